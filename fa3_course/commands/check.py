"""`fa3 check`, `fa3 catchup`, `fa3 reset`: the learner's side of the course in a terminal."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fa3_course.checker import UnknownExercise, catalogue, evaluate, report, workspace
from fa3_course.checker.model import Exercise

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _numbers(number: str | None) -> list[str]:
    """The exercises that an argument names: one ("01.3"), a chapter ("01"), or all."""
    if number and "." in number:
        return [catalogue.find(number).number]
    return [exercise.number for exercise in catalogue.exercises(number.zfill(2) if number else None)]


def check(
    number: Annotated[
        str | None, typer.Argument(help='An exercise ("01.3") or a chapter ("01"); everything when left out.')
    ] = None,
    hint: Annotated[int, typer.Option(min=0, help="How many hint levels to show.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Draw the inputs of an earlier check again.")] = None,
    as_json: Json = False,
) -> None:
    """Check your exercise files. Exit code 0 when everything passes that this machine can run, 1 when something does
    not, 2 when there is no such exercise."""
    try:
        numbers = _numbers(number)
    except UnknownExercise as error:
        _refuse(str(error))
    results = [evaluate(n, hint=hint, seed=seed) for n in numbers]
    if as_json:
        print(json.dumps([result.to_dict() for result in results], indent=2))
    elif number and "." in number:
        report.print_result(results[0])
    else:
        report.print_board(results)
    # what this machine cannot run is no failure of a chapter, but asked for by number it has not passed either
    possible = [result for result in results if result.state != "not possible"]
    raise typer.Exit(0 if possible and all(possible) else 1)


def catchup(
    number: Annotated[str, typer.Argument(help='Where you join: "01.4" solves 01.1 to 01.3, "01" the whole chapter.')],
    as_json: Json = False,
) -> None:
    """Take over the solutions before an exercise. What you wrote is kept in exercises/.backup/."""
    try:
        changed = workspace.catch_up(number)
    except UnknownExercise as error:
        _refuse(str(error))
    _report(changed, "solved", as_json)


def reset(
    number: Annotated[str, typer.Argument(help='An exercise ("01.4") or a chapter ("01").')],
    as_json: Json = False,
) -> None:
    """Put the untouched stub back. What you wrote is kept in exercises/.backup/."""
    try:
        changed = workspace.reset(number)
    except UnknownExercise as error:
        _refuse(str(error))
    _report(changed, "reset", as_json)


def _report(changed: list[tuple[Exercise, Path | None]], verb: str, as_json: bool) -> None:
    if as_json:
        rows = [{"number": e.number, "file": str(e.path), "backup": copy and str(copy)} for e, copy in changed]
        print(json.dumps(rows, indent=2))
        return
    for exercise, copy in changed:
        kept = f"  (yours: {copy.relative_to(exercise.folder)})" if copy else ""
        print(f"{exercise.number} {verb}: {exercise.room}/{exercise.file}{kept}")
    if not changed:
        print("Nothing to do: no exercise comes before that one.")


def _refuse(message: str) -> None:
    print(f"fa3: {message}", file=sys.stderr)
    raise typer.Exit(2)
