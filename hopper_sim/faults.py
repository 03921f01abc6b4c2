"""What can go wrong, by name, and where in the role it happened."""

import enum
import inspect
import linecache
import sys
from dataclasses import dataclass
from pathlib import Path


class Kind(enum.StrEnum):
    """The verdicts. A kernel without any of them is clean."""

    DEADLOCK = "deadlock"
    WRONG_PHASE = "wrong phase"
    WRONG_BYTES = "wrong transaction bytes"
    TOO_MANY_ARRIVALS = "too many arrivals"
    UNBALANCED_BARRIER = "unbalanced named barrier"
    BARRIER_ID = "two meanings of one barrier id"
    ROLES_DISAGREE = "roles disagree on the number of tiles"
    READ_BEFORE_FULL = "read before full"
    OVERWRITE_BEFORE_FREE = "overwrite before free"
    RACE = "race"
    MISSING_PROXY_FENCE = "missing proxy fence"
    MISSING_WGMMA_FENCE = "missing wgmma fence"
    ACCUMULATOR_IN_FLIGHT = "accumulator touched in flight"
    OPERAND_IN_FLIGHT = "operand touched in flight"
    MISSING_COMMIT = "wgmma never committed"
    NEVER_WRITTEN = "element never written"
    WRITTEN_TWICE = "element written twice"
    RETURNED_EARLY = "role returned early"
    REGISTER_BUDGET = "register budget exceeded"
    SMEM_BUDGET = "shared-memory budget exceeded"
    MISALIGNED_BOX = "misaligned box"
    NOT_K_MAJOR = "fp8 operand not K-major"
    RUNAWAY = "no end in sight"
    BAD_USE = "bad use"


@dataclass(frozen=True)
class Site:
    """Where a role stood: frames of the learner's code from the innermost to the role, as (file, line, function)."""

    frames: tuple[tuple[str, int, str], ...]

    def __str__(self) -> str:
        if not self.frames:
            return "outside any role"
        file, line, function = self.frames[0]
        text = linecache.getline(file, line).strip()
        where = f"{_place(file, line)} in {function}" + (f": {text}" if text else "")
        for file, line, function in self.frames[1:]:
            where += f" (called from {_place(file, line)} in {function})"
        return where


def _place(file: str, line: int) -> str:
    """file:line; a notebook's cells have made-up file names that would tell nobody anything."""
    in_notebook = "ipykernel_" in file or file.startswith("<ipython")
    return f"line {line} of the cell" if in_notebook else f"{Path(file).name}:{line}"


def here() -> Site:
    """The site of the innermost code that does not belong to the simulator (its gallery of faults counts as a learner's)."""
    frames: list[tuple[str, int, str]] = []
    role_depth = 0  # frames up to the outermost `async def`, the role
    frame = sys._getframe(1)
    while frame is not None and len(frames) < 8:
        module = frame.f_globals.get("__name__", "")
        if module == "hopper_sim.clock":  # the event loop: everything further out started the simulation
            break
        if not module.startswith("hopper_sim.") or module == "hopper_sim.gallery":
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            if frame.f_code.co_flags & inspect.CO_COROUTINE:
                role_depth = len(frames)
        frame = frame.f_back
    return Site(tuple(frames[: max(role_depth, 1)]))


class Suspended(BaseException):
    """Stops a role that has read bytes which nothing has written yet.

    The others run on: when the data arrives later, the read came before full; when nothing more happens, the bytes are
    never written. Roles never see this exception, so that a broad `except Exception` does not catch it.
    """

    def __init__(self, fault: "Fault"):
        self.fault = fault


class Fault(Exception):
    """The simulator's verdict on a broken kernel.

    Attributes:
        kind: one of `Kind`.
        message: what happened, in words; the exception's text is "kind: message" and the site.
        site: the line of the role, where there is one.
    """

    def __init__(self, kind: Kind, message: str, site: Site | None = None):
        self.kind, self.message, self.site = kind, message, site
        at = f"\n  at {site}" if site is not None and site.frames else ""
        super().__init__(f"{kind}: {message}{at}")


def misuse(message: str) -> Fault:
    """A call that no hardware would accept, or that the simulator does not know: says what to do."""
    return Fault(Kind.BAD_USE, message, here())
