"""The commands of `fa3`, one module each; `fa3_course.cli` imports them only when they are called."""
