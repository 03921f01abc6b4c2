"""`python -m fa3_course` is the `fa3` command where the package is not installed."""

from fa3_course.cli import main

main()
