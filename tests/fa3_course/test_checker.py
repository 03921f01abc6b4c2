"""The checker itself: what it says of broken code, where it looks, what it keeps, and its commands."""

import dataclasses
import json
import os
import secrets
import shutil
import threading

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from fa3_course.checker import (
    Trial,
    UnknownExercise,
    answer,
    catalogue,
    check,
    evaluate,
    progress,
    runner,
    stubs,
    submission,
    truth,
    workspace,
)
from fa3_course.checker import counting as count
from fa3_course.checker.trial import Refused
from fa3_course.commands import check as commands
from fa3_lib import reference

SEED = int(os.environ.get("FA3_TEST_SEED", secrets.randbelow(2**20)))


@pytest.fixture
def chapter(tmp_path, monkeypatch):
    """A learner's copy of chapter 1, with untouched stubs; the checker finds it from the current folder."""
    original = catalogue.find("01.1").folder
    copy = tmp_path / "chapters" / original.name
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("*.ipynb", ".backup"))
    monkeypatch.chdir(copy)
    workspace.reset("01")
    shutil.rmtree(copy / "exercises" / ".backup", ignore_errors=True)
    return copy


def write(number, old, new):
    """The solution of an exercise with a change, as the learner's file."""
    exercise = catalogue.find(number)
    assert old in exercise.solution
    exercise.path.write_text(exercise.solution.replace(old, new), encoding="utf-8")


def test_a_crash_names_the_learners_line(chapter):
    write("01.1", "p = np.exp(scores - shift)", "p = np.expp(scores - shift)")
    result = evaluate("01.1", seed=SEED)
    line = catalogue.find("01.1").path.read_text().split("np.expp")[0].count("\n") + 1
    assert result.state == "failed"
    for outcome in result.outcomes:
        assert "AttributeError" in outcome.seen
        assert f"ex01_safe_softmax.py, line {line}, in softmax:  p = np.expp(scores - shift)" in outcome.seen
        assert "checker" not in outcome.seen


def test_an_endless_loop_is_reported_and_stopped(chapter):
    write("01.1", "    row_max = ", "    while True:\n        pass\n    row_max = ")
    exercise = dataclasses.replace(catalogue.find("01.1"), seconds=0.3)
    before = threading.active_count()
    result = runner.run(exercise, submission.from_file(exercise), SEED, 0)
    assert result.state == "failed" and "still running after 0.3 s" in result.outcomes[0].seen
    assert all("not run" in outcome.seen for outcome in result.outcomes[1:])
    assert threading.active_count() == before, "the loop still runs"


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        ("p = np.exp(scores - shift)", "scores -= shift\n    p = np.exp(scores)", "read-only"),
        ("return p /", "p /", "returned None"),
        ("return p / ", "return (p / ", "not valid Python"),
        ("def softmax(", "def my_softmax(", "has no function softmax"),
        ("import numpy as np", "import numpy as np\nnp.nothing", "fails while it is read"),
        ("return p / ", "return p[:, :1] / ", "shape"),
        ("return p / np.where(row_sum == 0, 1, row_sum)", "return 'p'", "dtype"),
    ],
)
def test_what_a_broken_file_is_told(chapter, old, new, seen):
    write("01.1", old, new)
    result = evaluate("01.1", seed=SEED)
    assert result.state == "failed" and not result
    assert seen in result.problem + "".join(outcome.seen for outcome in result.outcomes)


def test_results_are_counted(chapter):
    write("01.2", "return new_max, new_sum", "return np.stack([new_max, new_sum])")
    assert all("tuple of 2 values" in outcome.seen for outcome in evaluate("01.2").outcomes)


def test_functions_of_a_cell_and_the_file_behind_an_untouched_one(chapter, capsys):
    exercise = catalogue.find("01.1")

    def cell(text):
        path = chapter / "cell.py"
        path.write_text(text, encoding="utf-8")
        return catalogue.load_source(text, path, "cell").softmax

    assert check("01.1", cell(exercise.stub)).state == "not started"
    assert answer("01.1") is None
    assert check("01.1", cell(exercise.solution)).origin == "this notebook"
    assert answer("01.1")(np.zeros((1, 2))).tolist() == [[0.5, 0.5]]
    workspace.catch_up("01.2")
    assert check("01.1", cell(exercise.stub)).origin.endswith(f"01_online_softmax/exercises/{exercise.file}")
    wrong = cell(exercise.solution.replace("np.exp(", "np.exp2("))
    assert check("01.1", wrong).state == "failed", "a cell that was worked on is checked itself"
    with pytest.raises(TypeError, match=r'check\("01.1", softmax\)'):
        check("01.1", wrong, wrong)
    capsys.readouterr()
    board = progress("01")
    assert [result.number for result in board if result] == [] and board[0].state == "failed"
    assert "01.1" in capsys.readouterr().out


def test_hints_come_in_levels_and_seeds_repeat(chapter, capsys):
    write("01.1", "np.exp(scores - shift)", "np.exp(scores)")
    exercise = catalogue.find("01.1")
    assert evaluate("01.1").hints == ()
    assert evaluate("01.1", hint=True).hints == exercise.hints[:1]
    check("01.1", hint=2)
    text = capsys.readouterr().out
    assert exercise.hints[1].split("`")[0] in text and "hint 3 of 3" in text and "--hint 3" in text
    assert evaluate("01.1", seed=SEED).to_dict() == evaluate("01.1", seed=SEED).to_dict()
    assert evaluate("01.1").seed != evaluate("01.1").seed


def test_catch_up_and_reset_keep_what_was_written(chapter):
    mine = catalogue.find("01.2").path
    mine.write_text("my = 'work'\n", encoding="utf-8")
    changed = workspace.catch_up("01.4")
    assert [exercise.number for exercise, _ in changed] == ["01.1", "01.2", "01.3"]
    copies = [copy for _, copy in changed if copy]
    assert len(copies) == 1 and copies[0].read_text() == "my = 'work'\n"
    assert (copies[0].parent / ".gitignore").read_text() == "*\n"
    assert evaluate("01.2") and evaluate("01.4").state == "not started"

    [(exercise, copy)] = workspace.reset("1.2")
    assert copy is None, "a solution is no work of the learner's"
    assert exercise.path.read_text() == exercise.stub and evaluate("01.2").state == "not started"
    assert len(workspace.catch_up("01")) == len(catalogue.exercises("01"))
    assert workspace.catch_up("01.1") == []


def test_what_the_machine_lacks_is_named(chapter, monkeypatch):
    exercise = catalogue.find("01.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(exercise, "hopper", True)
    result = evaluate("01.1")
    assert result.state == "not possible" and "needs a Hopper GPU" in result.problem and not result
    monkeypatch.setattr(exercise, "modules", ("no_such_module",))
    assert "needs no_such_module" in evaluate("01.1").problem


def test_commands(chapter):
    def run(function, *arguments):
        app = typer.Typer()
        app.command()(function)
        return CliRunner().invoke(app, list(arguments))

    assert run(commands.check, "01.1").exit_code == 1
    caught = run(commands.catchup, "01.2", "--json")
    assert caught.exit_code == 0 and [row["number"] for row in json.loads(caught.stdout)] == ["01.1"]
    passed = run(commands.check, "1.1", "--json", "--seed", str(SEED))
    assert passed.exit_code == 0, passed.output
    [result] = json.loads(passed.stdout)
    assert result["state"] == "passed" and result["seed"] == SEED and all(o["passed"] for o in result["outcomes"])
    assert "5 of 5" in run(commands.check, "01.1").stdout
    hinted = run(commands.check, "01.2", "--hint", "1")
    assert hinted.exit_code == 1 and "Hint 1" in hinted.stdout
    assert "01.1 reset" in run(commands.reset, "01.1").stdout
    for function, wrong in ((commands.check, "01.99"), (commands.catchup, "77"), (commands.reset, "01.0")):
        refused = run(function, wrong)
        assert refused.exit_code == 2 and "no exercise" in refused.stderr


def test_unknown_numbers_are_refused():
    for number in ("01.99", "01", "99.1", "", "x"):
        with pytest.raises(UnknownExercise):
            catalogue.find(number)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# region learner\nx = 1\n", "line 1.*never closed"),
        ("# region learner\n# region learner\n# endregion\n", "line 2.*inside"),
        ("x = 1\n# endregion\n", "line 2.*without"),
    ],
)
def test_broken_markers_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        stubs.split(text)
    assert not stubs.untouched(text, "# region learner\n# endregion\n", "01.1")


def test_stub_keeps_the_task_and_names_another_statement():
    solution = (
        "def f(x):\n    # region learner: pass\n    # the task\n    # in two lines\n    # endregion\n    return x\n"
    )
    answered = solution.replace("    # endregion", "    x = 1\n    # a remark\n    x += 1\n    # endregion")
    assert stubs.make_stub(answered, "01.1") == solution.replace("    # endregion", "    pass\n    # endregion")


def test_close_follows_the_same_precision_rule():
    trial = Trial(SEED)
    exact = trial.normal(200)
    plain = exact.astype(np.float16)
    trial.close(plain, exact, same_precision=plain)
    error = np.abs(plain.astype(np.float64) - exact).max()
    noise = np.abs((plain + np.float16(0.3) - np.float16(0.3)).astype(np.float64) - exact).max()
    bound = 2 * error + 2 * noise
    trial.close(exact + 0.99 * bound, exact, same_precision=plain)
    with pytest.raises(Refused, match="expected"):
        trial.close(exact + 1.01 * bound, exact, same_precision=plain)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1.0])
def test_close_never_lets_a_wrong_value_pass(bad):
    truth_values = np.array([0.0, -np.inf, 2.0])
    trial = Trial(SEED)
    trial.close(truth_values.copy(), truth_values)
    for index in range(3):
        got = truth_values.copy()
        if got[index] != bad:
            got[index] = bad
            with pytest.raises(Refused, match=rf"result at \[{index}\]"):
                trial.close(got, truth_values)


def test_counting_sees_every_way_to_compute():
    tally, (x, y) = count.counting(np.ones((4, 8)), np.ones((8, 4)))
    z = np.exp(x) @ y
    z += 1
    np.einsum("ij,jk->ik", x, np.ones((8, 16)))
    (x * 2).sum(axis=1)
    np.where(x > 0, x, 0) / 3
    assert tally.elements["exp"] == 32 and tally.calls["matmul"] == 1 and tally.elements["multiply"] == 32
    assert tally.calls["add.reduce"] == 1 and tally.elements["divide"] == 32
    assert tally.largest == (4, 16) and tally.calls["einsum"] == 1
    assert isinstance(z, count.CountingArray)


@pytest.mark.parametrize("window", [(-1, -1), (2, 1), (0, 0), (-1, 3)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sq", "sk"), [(7, 7), (3, 9), (9, 3)])
def test_truth_is_the_reference(sq, sk, causal, window):
    trial = Trial(SEED)
    q, k, v = trial.normal(sq, 8), trial.normal(sk, 8), trial.normal(sk, 4)
    out, lse = truth.attention(q, k, v, 0.4, truth.allowed(sq, sk, causal, window))
    tensors = (torch.from_numpy(x)[None, :, None] for x in (q, k, v))
    want_out, want_lse = reference.attention(*tensors, 0.4, causal, window)
    trial.close(out, want_out[0, :, 0].numpy())
    trial.close(lse, want_lse[0, 0].numpy())
