"""Where the course's files are. Chapters, benchmark rows and pins live in the checkout, not in the installed package."""

from pathlib import Path


class CheckoutMissing(RuntimeError):
    """The command needs files of the repository, and neither the package nor the current folder lies in a checkout."""


def _is_checkout(folder: Path) -> bool:
    return (folder / "chapters").is_dir() and (folder / "fa3_course").is_dir() and (folder / "pyproject.toml").is_file()


def checkout() -> Path:
    """The repository's root: the one this package was loaded from, else the one around the current folder.

    Raises:
        CheckoutMissing: when there is none.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package, *(here := Path.cwd().resolve(), *here.parents)):
        if _is_checkout(folder):
            return folder
    raise CheckoutMissing(
        "this needs the repository (chapters/, bench/): clone it, then run `fa3` inside the clone or install it with "
        "`pip install -e .`"
    )


def results() -> Path:
    """Folder of the stored benchmark rows, the only source of numbers."""
    return checkout() / "bench" / "results"


def out() -> Path:
    """Folder for what commands write (ignored by git); made when missing."""
    folder = checkout() / "out"
    folder.mkdir(exist_ok=True)
    return folder


def data(name: str) -> Path:
    """A data file that is installed with the package."""
    return Path(__file__).resolve().parent / "data" / name
