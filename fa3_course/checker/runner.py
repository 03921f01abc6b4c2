"""Runs an exercise's properties on a submission."""

from dataclasses import asdict, dataclass
from typing import Literal

from fa3_course.checker.limits import TimeUp, limited
from fa3_course.checker.model import Exercise, Property
from fa3_course.checker.submission import Submission
from fa3_course.checker.trial import Refused, Trial

State = Literal["passed", "failed", "not started", "not possible"]


@dataclass(frozen=True)
class Outcome:
    """What one property found."""

    name: str
    passed: bool
    seen: str = ""  # values, or the learner's line that raised
    hint: str = ""


@dataclass(frozen=True)
class Result:
    """What a check found. True when every property holds.

    Args:
        state: "not started" when the stub is untouched; "not possible" when this machine lacks something.
        problem: why no property could run, or "".
        seed: of the inputs; `check(number, ..., seed=seed)` draws the same ones again.
        hints: the hint levels that were asked for.
        levels: how many hint levels there are.
    """

    number: str
    title: str
    state: State
    origin: str
    seed: int
    outcomes: tuple[Outcome, ...] = ()
    problem: str = ""
    hints: tuple[str, ...] = ()
    levels: int = 0

    def __bool__(self) -> bool:
        return self.state == "passed"

    @property
    def holding(self) -> int:
        """How many properties hold."""
        return sum(outcome.passed for outcome in self.outcomes)

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return asdict(self)

    def _ipython_display_(self) -> None:
        """Nothing: `check` has shown the report already."""


def _outcome(exercise: Exercise, prop: Property, submission: Submission, seed: int) -> Outcome:
    try:
        limited(lambda: prop.run(Trial(seed), *submission.functions), exercise.seconds)
    except Refused as refusal:
        seen = str(refusal)
    except TimeUp:
        seen = f"still running after {exercise.seconds:.0f} s: does a loop never end?"
    except NotImplementedError as error:
        seen = f"not written yet: {error}"
    except Exception as error:
        where = submission.where(error)
        # an error outside the learner's lines still comes from the values or arguments that their code has
        seen = f"{type(error).__name__}: {error}" + (
            f"  ({where})" if where else "  (raised while the check used your result)"
        )
    else:
        return Outcome(prop.name, True)
    return Outcome(prop.name, False, seen, prop.hint)


def run(exercise: Exercise, submission: Submission, seed: int, hint: int) -> Result:
    """Runs the properties in order. After one that never ends the others are not run: they would hang as well."""
    outcomes: list[Outcome] = []
    hanging = False
    for prop in exercise.properties:
        if hanging:
            outcomes.append(Outcome(prop.name, False, "not run, since an earlier one did not end"))
            continue
        outcomes.append(_outcome(exercise, prop, submission, seed))
        hanging = outcomes[-1].seen.startswith("still running")
    state: State = "passed" if all(o.passed for o in outcomes) else "failed"
    if not submission.started and state == "failed":
        state = "not started"
    return Result(
        exercise.number,
        exercise.head.title,
        state,
        submission.origin,
        seed,
        tuple(outcomes),
        hints=exercise.hints[:hint],
        levels=len(exercise.hints),
    )
