"""The checker: runs named properties of an exercise on the learner's code and says what it saw.

In a notebook, after the cell with your function:

    check("01.3", weighted_average)           the function of the cell
    check("01.3", weighted_average, hint=1)   the same, with the first hint
    check("01.3")                             the file exercises/ex03_*.py instead
    progress("01")                            the chapter so far
    answer("01.3")                            your function, once it passes

In a terminal: `fa3 check 01.3`.

A new exercise is two texts in its chapter's folder, and wrong answers for the tests:

    solutions/ex12_name.py              head, answer, `# region learner` around what the learner writes (see `stubs`)
    exercises/checks/ex12.py            `EXERCISE = Exercise(...)` and its properties (see `model`)
    tests/fa3_course/test_exercises.py  its wrong answers, in `WRONG`

`fa3 reset 01.12` then writes the stub, and a cell `# %% exercise="01.12"` in lab.py puts it into the lab. A bug lab
"02.B1" has its check in bug_labs/checks/bug01.py and its learner's file in bug_labs/; see `protocol`.
"""

import secrets
from collections.abc import Callable

from fa3_course.checker import catalogue, report, runner, submission
from fa3_course.checker.catalogue import UnknownExercise
from fa3_course.checker.model import Exercise
from fa3_course.checker.runner import Outcome, Result
from fa3_course.checker.trial import Refused, Trial

__all__ = [
    "Exercise",
    "Outcome",
    "Refused",
    "Result",
    "Trial",
    "UnknownExercise",
    "answer",
    "check",
    "evaluate",
    "progress",
]

_session: dict[str, Result] = {}  # last result of each exercise in this process, for `progress`


def evaluate(number: str, *functions: Callable, hint: int = 0, seed: int | None = None) -> Result:
    """Checks an exercise and shows nothing; arguments as in `check`."""
    if hint < 0:
        raise ValueError(f"hint must be 0 or more, got {hint}")
    exercise = catalogue.find(number)
    seed = secrets.randbelow(10**6) if seed is None else seed
    problem, state = submission.lacking_here(exercise), "not possible"
    if not problem:
        try:
            chosen = _choose(exercise, functions)
            return runner.run(exercise, chosen, seed, int(hint))
        except Refused as refusal:
            problem, state = str(refusal), "failed"
    return Result(
        exercise.number, exercise.head.title, state, f"{exercise.room}/{exercise.file}", seed, problem=problem
    )


def _choose(exercise: Exercise, functions: tuple[Callable, ...]) -> submission.Submission:
    """What the cell holds; the learner's file when the cell is an untouched stub and the file is not."""
    if not functions:
        return submission.from_file(exercise)
    cell = submission.from_functions(exercise, functions)
    if cell.started or not exercise.path.is_file():
        return cell
    file = submission.from_file(exercise)
    return file if file.started else cell


def check(number: str, *functions: Callable, hint: int | bool = 0, seed: int | None = None) -> Result:
    """Checks an exercise on fresh inputs and shows a table of its properties.

    Args:
        number: "01.3".
        functions: your functions, in the order in which the exercise names them. Without any, your file
            chapters/NN_*/exercises/exMM_*.py is checked; so it is when the cell's function is the untouched stub and
            the file has been worked on (by you, or by `fa3 catchup`).
        hint: how many hint levels to show; True for the first.
        seed: repeats the inputs of an earlier check; drawn fresh when None.

    Returns:
        the result: True when every property holds.

    Raises:
        UnknownExercise: there is no such exercise.
        TypeError: not as many functions as the exercise asks for.
        ValueError: a negative hint.
    """
    result = evaluate(number, *functions, hint=hint, seed=seed)
    _session[result.number] = result
    report.show(result)
    return result


def _last(number: str) -> Result:
    """The last result of this session; the learner's file is checked where there is none."""
    return _session[number] if number in _session else evaluate(number)


def answer(number: str) -> Callable | tuple[Callable, ...] | None:
    """The learner's function of an exercise (a tuple where it has several), or None as long as it does not pass.

    Takes the last check in this session, or checks the learner's file. For cells that build on an exercise.
    """
    exercise = catalogue.find(number)
    result = _last(exercise.number)
    if not result:
        return None
    return result.functions if len(result.functions) > 1 else result.functions[0]


def progress(chapter: str) -> list[Result]:
    """Shows the chapter's exercises with their last result in this session; those not checked yet are checked now,
    from the learner's files.
    """
    results = [_last(exercise.number) for exercise in catalogue.exercises(chapter.zfill(2))]
    report.show_board(results)
    return results
