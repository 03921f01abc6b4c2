"""The learner's files: catching up, starting again, and never losing what somebody wrote."""

from datetime import datetime
from pathlib import Path

from fa3_course.checker import catalogue
from fa3_course.checker.model import Exercise


def _backup(path: Path) -> Path:
    """Copies a file into `.backup/` beside it, which git ignores; returns the copy."""
    folder = path.parent / ".backup"
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    copy = folder / f"{path.stem}-{stamp}{path.suffix}"
    copy.write_bytes(path.read_bytes())
    return copy


def replace(exercise: Exercise, text: str) -> Path | None:
    """Writes the learner's file; returns the backup of what was there, None when nothing of theirs was replaced."""
    path = exercise.path
    before = path.read_text(encoding="utf-8") if path.is_file() else None
    if before == text:
        return None
    copy = _backup(path) if before is not None and before not in (exercise.stub, exercise.solution) else None
    path.write_text(text, encoding="utf-8")
    return copy


def catch_up(number: str) -> list[tuple[Exercise, Path | None]]:
    """Puts the solutions of all exercises of the chapter before `number` into the learner's files.

    Args:
        number: "01.4" for the state in which exercise 4 begins, "01" for the whole chapter solved.

    Returns:
        each exercise with the backup of the learner's text (None when there was none to keep).
    """
    chapter = number.partition(".")[0].zfill(2)
    before = catalogue.exercises(chapter)
    if "." in number:
        stop = catalogue.find(number).number
        before = before[: [exercise.number for exercise in before].index(stop)]
    return [(exercise, replace(exercise, exercise.solution)) for exercise in before]


def reset(number: str) -> list[tuple[Exercise, Path | None]]:
    """Puts the untouched stub back, for one exercise ("01.4") or a chapter ("01"); returns as `catch_up` does."""
    chosen = [catalogue.find(number)] if "." in number else catalogue.exercises(number.zfill(2))
    return [(exercise, replace(exercise, exercise.stub)) for exercise in chosen]
