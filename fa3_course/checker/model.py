"""What an exercise is: a head, hints, and properties that a right answer has."""

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from fa3_course.checker import stubs

_HEAD = re.compile(
    r"# (?P<number>\d\d\.B?\d+) (?P<title>[^\n]+)\n\n"
    r"\*Difficulty (?P<difficulty>[123]) of 3, (?P<minutes>\d+) minutes, needs (?P<needs>[^\n]+)\*\n\n"
    r"(?P<task>.+)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Head:
    """What the learner reads first. `task` is Markdown."""

    title: str
    difficulty: int
    minutes: int
    needs: str
    task: str

    @classmethod
    def parse(cls, solution: str, number: str) -> "Head":
        """Reads the head from a solution's docstring; ValueError says how it must open."""
        match = _HEAD.fullmatch((ast.get_docstring(ast.parse(solution)) or "").strip())
        if not match or match["number"] != number:
            raise ValueError(
                f"the docstring of solution {number} must open with `# {number} Title`, an empty line, "
                "`*Difficulty N of 3, N minutes, needs a laptop*`, an empty line, and the task"
            )
        return cls(match["title"], int(match["difficulty"]), int(match["minutes"]), match["needs"], match["task"])


@dataclass(frozen=True)
class Property:
    """A named statement about the learner's functions: `run(trial, *functions)` raises Refused where it is false."""

    name: str
    run: Callable[..., None]
    hint: str


@dataclass
class Exercise:
    """One exercise. Its head is read from the solution's docstring, its stub is made from the solution.

    Args:
        number: chapter and exercise, "01.3"; of a bug lab "02.B1".
        file: file name of both the solution and the learner's copy, "ex03_tiles.py".
        functions: name of each function that is checked -> how many values it returns, 0 for a role or a function that
            declares roles.
        hints: from a nudge to nearly the answer; `check(..., hint=2)` shows the first two.
        modules: importable modules without which the exercise cannot run here.
        hopper: whether it needs a Hopper GPU.
        seconds: time limit of one property.
        faults: of a bug lab: (text of the solution, what the stub has instead).
    """

    number: str
    file: str
    functions: Mapping[str, int]
    hints: tuple[str, ...]
    modules: tuple[str, ...] = ()
    hopper: bool = False
    seconds: float = 20.0
    faults: tuple[tuple[str, str], ...] = ()
    properties: list[Property] = field(default_factory=list)
    folder: Path = Path()  # of the chapter; set when the chapter is loaded
    room: str = "exercises"  # or "bug_labs": the learner's folder in the chapter

    def holds(self, name: str, hint: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Decorator that adds a property; `hint` says what usually breaks it."""

        def add(run: Callable[..., None]) -> Callable[..., None]:
            self.properties.append(Property(name, run, hint))
            return run

        return add

    @cached_property
    def solution(self) -> str:
        """Text of the solution."""
        return (self.folder / "solutions" / self.file).read_text(encoding="utf-8")

    @cached_property
    def head(self) -> Head:
        return Head.parse(self.solution, self.number)

    @property
    def path(self) -> Path:
        """The learner's file."""
        return self.folder / self.room / self.file

    @property
    def stub(self) -> str:
        """The untouched text of the learner's file."""
        return stubs.make_stub(self.solution, self.number, self.faults)
