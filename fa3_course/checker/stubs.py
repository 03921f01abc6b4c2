"""One text per exercise: the solution. The stub is derived from it, never written.

A solution marks what the learner writes:

    # region learner
    # The comment right below the marker is the task; the stub keeps it.
    row_max = scores.max(axis=-1)
    # endregion

The stub keeps every line outside the markers, the markers and the task, and replaces the rest by a statement that
raises NotImplementedError. Where raising is impossible (code that a compiler reads) the marker names another statement:
`# region learner: pass`.

In a bug lab the stub keeps the regions, with faults in them; only one that names a statement is left to be written.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_OPEN = re.compile(r"^(?P<indent> *)# region learner(?:: (?P<statement>.+))?$")
_CLOSE = re.compile(r"^ *# endregion$")


@dataclass
class Region:
    """One marked piece of an exercise, without its markers."""

    indent: str
    statement: str | None  # what stands in the stub instead of raising
    lines: list[str] = field(default_factory=list)

    @property
    def task(self) -> list[str]:
        """The comment lines right below the opening marker."""
        for count, line in enumerate(self.lines):
            if not line.lstrip().startswith("#"):
                return self.lines[:count]
        return self.lines


def split(text: str) -> tuple[list[str], list[Region]]:
    """The lines outside the regions (markers included) and the regions, in order.

    Raises:
        ValueError: a region is opened twice, never closed, or closed without being opened; the message has the line.
    """
    outside: list[str] = []
    regions: list[Region] = []
    opened = 0
    for number, line in enumerate(text.splitlines(), start=1):
        opening = _OPEN.match(line)
        if opening and opened:
            raise ValueError(f"line {number}: `# region learner` inside the region of line {opened}")
        if opening:
            opened = number
            regions.append(Region(opening["indent"], opening["statement"]))
        elif opened and _CLOSE.match(line):
            opened = 0
        elif opened:
            regions[-1].lines.append(line)
            continue
        elif _CLOSE.match(line):
            raise ValueError(f"line {number}: `# endregion` without `# region learner`")
        outside.append(line)
    if opened:
        raise ValueError(f"line {opened}: `# region learner` is never closed by `# endregion`")
    return outside, regions


Faults = Sequence[tuple[str, str]]  # (text of the solution, what the stub has instead)


def make_stub(solution: str, number: str, faults: Faults = ()) -> str:
    """The learner's text of exercise `number` ("01.3"), derived from the solution's text.

    Raises:
        ValueError: no region, or a fault's old text does not stand in exactly one of them, once.
    """
    outside, regions = split(solution)
    if not regions:
        raise ValueError(f"{number}: the solution has no `# region learner`")
    texts = ["\n".join(region.lines) for region in regions]
    for old, _ in faults:
        if sum(text.count(old) for text in texts) != 1:
            raise ValueError(f"{number}: {old!r} does not stand in the regions exactly once")
    lines: list[str] = []
    remaining = zip(regions, texts, strict=True)
    for line in outside:
        lines.append(line)
        if _OPEN.match(line):
            region, text = next(remaining)
            if faults and not region.statement:
                for old, new in faults:
                    text = text.replace(old, new)
                lines.append(text)
                continue
            statement = region.statement or f'raise NotImplementedError("{number} is yours to write")'
            lines += [*region.task, region.indent + statement]
    return "\n".join(lines) + "\n"


def untouched(text: str, solution: str, number: str, faults: Faults = ()) -> bool:
    """Whether `text` (a file or a notebook cell) still holds the stub's regions as they were handed out.

    Text without markers counts as touched: somebody wrote it.
    """
    try:
        _, mine = split(text)
    except ValueError:
        return False
    _, given = split(make_stub(solution, number, faults))
    return bool(mine) and [r.lines for r in mine] == [r.lines for r in given]
