"""`fa3 bench`: the checkout's benchmark, with the arguments of `python -m bench.forward`."""

import subprocess
import sys

from fa3_course import paths


def bench(arguments: list[str]) -> int:
    """Runs `python -m bench.forward` in the checkout, arguments as they are (`--help` too). Returns its exit status."""
    try:
        return subprocess.run([sys.executable, "-m", "bench.forward", *arguments], cwd=paths.checkout()).returncode
    except KeyboardInterrupt:  # the benchmark has its own answer to it, rows so far are on disk
        return 130
