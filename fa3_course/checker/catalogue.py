"""Finds exercises: chapters/NN_name/exercises/checks/ex*.py and bug_labs/checks/bug*.py, each with one `EXERCISE`."""

from functools import lru_cache
from pathlib import Path
from types import ModuleType

from fa3_course import paths
from fa3_course.checker.model import Exercise


class UnknownExercise(LookupError):
    """There is no exercise or chapter of that number; the message lists those that exist."""


def load_source(text: str, path: Path | str, name: str) -> ModuleType:
    """A module made from text, never from a stale .pyc: a learner saves and checks twice within a second."""
    module = ModuleType(name)
    module.__file__ = str(path)
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def chapters_folder() -> Path:
    """The `chapters` folder around the current folder (a learner's copy), else the checkout's."""
    here = Path.cwd().resolve()
    for folder in (here, *here.parents):
        if any(folder.glob("chapters/*/exercises/checks")):
            return folder / "chapters"
    return paths.checkout() / "chapters"


@lru_cache(maxsize=64)
def _load(path: Path) -> Exercise:
    exercise = load_source(path.read_text(encoding="utf-8"), path, f"checks_{path.stem}").EXERCISE
    exercise.folder, exercise.room = path.parent.parent.parent, path.parent.parent.name
    return exercise


def exercises(chapter: str | None = None) -> list[Exercise]:
    """All exercises, or those of chapter "01", in order; a chapter's bug labs come after its exercises.

    Raises:
        UnknownExercise: the chapter has none.
    """
    folder = chapters_folder()
    chapters = sorted(folder.glob(f"{chapter or '[0-9][0-9]'}_*"))
    rooms = ("exercises/checks/ex*.py", "bug_labs/checks/bug*.py")
    found = [_load(path) for one in chapters for room in rooms for path in sorted(one.glob(room))]
    if not found:
        known = sorted({path.parent.parent.parent.name[:2] for path in folder.glob("*/exercises/checks/ex*.py")})
        raise UnknownExercise(
            f"no exercises in chapter {chapter}; chapters with exercises: {', '.join(known) or 'none'}"
        )
    return found


def find(number: str) -> Exercise:
    """Exercise `number`, written "01.3" ("1.3" is understood too), or bug lab "02.B1".

    Raises:
        UnknownExercise: no such exercise.
    """
    chapter, _, index = number.partition(".")
    wanted = f"{chapter.zfill(2)}.{index.lstrip('0').upper()}"
    known = exercises(chapter.zfill(2))
    for exercise in known:
        if exercise.number == wanted:
            return exercise
    raise UnknownExercise(f"no exercise {number}; this chapter has {', '.join(e.number for e in known)}")
