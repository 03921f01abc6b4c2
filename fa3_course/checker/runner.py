"""Runs an exercise's properties on a submission."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

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
        functions: what was checked, in the exercise's order.
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
    functions: tuple[Callable, ...] = ()

    def __bool__(self) -> bool:
        return self.state == "passed"

    @property
    def holding(self) -> int:
        """How many properties hold."""
        return sum(outcome.passed for outcome in self.outcomes)

    def to_dict(self) -> dict:
        """Plain values for JSON: everything but the functions."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "functions"}
        return plain | {"outcomes": [vars(outcome) for outcome in self.outcomes]}

    def _ipython_display_(self) -> None:
        """Nothing: `check` has shown the report already."""


def guarded(function: Callable, name: str, results: int) -> Callable:
    """The function with read-only arguments (changing the caller's array is an error on the line that tries) and with
    its number of results checked.
    """

    @functools.wraps(function)
    def call(*arguments):
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                argument.flags.writeable = False
        value = function(*arguments)
        if value is None and results:
            raise Refused(f"{name} returned None: is the `return` missing?")
        if results > 1 and not (isinstance(value, tuple) and len(value) == results):
            got = f"{len(value)} values" if isinstance(value, tuple) else type(value).__name__
            raise Refused(f"{name} must return a tuple of {results} values, it returned {got}")
        return value

    return call


def _outcome(exercise: Exercise, prop: Property, submission: Submission, seed: int) -> Outcome:
    functions = [
        guarded(function, name, results)
        for function, (name, results) in zip(submission.functions, exercise.functions.items(), strict=True)
    ]
    try:
        limited(lambda: prop.run(Trial(seed), *functions), exercise.seconds)
    except Refused as refusal:
        return Outcome(prop.name, False, str(refusal), prop.hint)
    except TimeUp:
        return Outcome(prop.name, False, f"still running after {exercise.seconds:g} s: does a loop never end?")
    except Exception as error:
        # outside the learner's lines it was their result that the check could not use
        where = submission.where(error) or "while the check used your result"
        return Outcome(prop.name, False, f"{type(error).__name__}: {error}  ({where})")
    return Outcome(prop.name, True)


def run(exercise: Exercise, submission: Submission, seed: int, hint: int) -> Result:
    """Runs the properties in order. After one that never ends the others are not run: they would hang as well."""
    outcomes: list[Outcome] = []
    hanging = False
    for prop in exercise.properties:
        if hanging:
            outcomes.append(Outcome(prop.name, False, "not run, since an earlier one did not end"))
            continue
        outcome = _outcome(exercise, prop, submission, seed)
        outcomes.append(outcome)
        hanging = outcome.seen.startswith("still running")
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
        functions=submission.functions,
    )
