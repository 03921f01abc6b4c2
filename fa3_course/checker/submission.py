"""The learner's functions, from their file or from a notebook, and where an error in them happened."""

import importlib.util
import inspect
import linecache
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fa3_course.checker import stubs
from fa3_course.checker.catalogue import load_source
from fa3_course.checker.model import Exercise
from fa3_course.checker.trial import Refused


@dataclass(frozen=True)
class Submission:
    """What is checked.

    Args:
        functions: in the exercise's order.
        files: file names, as in tracebacks, that hold the learner's code -> what to call them in a report.
        origin: the learner's file, or "this notebook".
        started: False when the text is the stub as handed out.
    """

    functions: tuple[Callable, ...]
    files: dict[str, str]
    origin: str
    started: bool

    def where(self, error: BaseException) -> str:
        """The line of the learner's code that raised `error`, or "" when none is in its traceback."""
        mine = [
            frame
            for link in _chain(error)
            for frame in traceback.extract_tb(link.__traceback__)
            if frame.filename in self.files
        ]
        if not mine:
            return ""
        last = mine[-1]
        return f"{self.files[last.filename]}, line {last.lineno}, in {last.name}:  {(last.line or '').strip()}"


def _chain(error: BaseException) -> list[BaseException]:
    """The error and its causes, outermost first."""
    links = [error]
    while links[-1].__cause__ is not None:
        links.append(links[-1].__cause__)
    return links


def _untouched(exercise: Exercise, text: str) -> bool:
    return stubs.untouched(text, exercise.solution, exercise.number, exercise.faults)


def lacking_here(exercise: Exercise) -> str:
    """What this machine lacks for the exercise, or ""."""
    missing = [module for module in exercise.modules if importlib.util.find_spec(module) is None]
    if missing:
        return f"needs {', '.join(missing)}, which is not installed on this machine"
    if exercise.hopper and not _has_hopper():
        return "needs a Hopper GPU (H100, H200), and this machine has none"
    return ""


def _has_hopper() -> bool:
    import torch  # only here: most exercises need no torch, and importing it takes seconds

    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def from_file(exercise: Exercise, path: Path | None = None) -> Submission:
    """The functions in the learner's file (or in `path`).

    Raises:
        Refused: the file is missing, is no valid Python, fails while it runs, or lacks a function.
    """
    path = path or exercise.path
    if not path.is_file():
        raise Refused(f"{path.name} is missing; `fa3 reset {exercise.number}` puts the stub there")
    text = path.read_text(encoding="utf-8")
    linecache.checkcache(str(path))
    files = {str(path): path.name}
    try:
        module = load_source(text, path, f"learner_{path.stem}")
    except SyntaxError as error:
        raise Refused(
            f"{path.name}, line {error.lineno} is not valid Python: {error.msg}:  {(error.text or '').strip()}"
        ) from None
    except Exception as error:
        where = Submission((), files, path.name, True).where(error)
        raise Refused(f"{path.name} fails while it is read: {type(error).__name__}: {error} ({where})") from error
    lacking = [name for name in exercise.functions if not callable(getattr(module, name, None))]
    if lacking:
        raise Refused(f"{path.name} has no function {', '.join(lacking)}; keep the stub's names")
    functions = tuple(getattr(module, name) for name in exercise.functions)
    return Submission(
        functions,
        files,
        f"{exercise.folder.parent.name}/{exercise.folder.name}/{exercise.room}/{path.name}",
        not _untouched(exercise, text),
    )


def from_functions(exercise: Exercise, functions: tuple[Callable, ...]) -> Submission:
    """Functions defined in a notebook cell (or anywhere else).

    Raises:
        TypeError: not as many functions as the exercise asks for.
    """
    names = ", ".join(exercise.functions)
    if len(functions) != len(exercise.functions) or not all(map(callable, functions)):
        raise TypeError(f'call it as check("{exercise.number}", {names})')
    files: dict[str, str] = {}
    started = False
    for function in functions:
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is None:  # a callable object, so no stub
            started = True
            continue
        files[code.co_filename] = "your cell" if "ipykernel" in code.co_filename else Path(code.co_filename).name
        linecache.checkcache(code.co_filename)
        text = "".join(linecache.getlines(code.co_filename))
        started |= not _untouched(exercise, text)
    return Submission(functions, files, "this notebook", started)
