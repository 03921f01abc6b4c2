from pathlib import Path

import numpy as np

from fa3_course.checker import Exercise
from fa3_course.checker.catalogue import load_source

HELPER = Path(__file__).with_name("which_tests.py")
which = load_source(HELPER.read_text(encoding="utf-8"), HELPER, "which_tests")

EXERCISE = Exercise(
    "04.B3",
    "bug03_whose_shrink.py",
    functions={"verdict": 1, "attend": 1},
    hints=(
        "In round i, T belongs to the maximum after block i - 1, and O before the add to the one after block i - 2.",
        "O must shrink by what block i - 1 found. The loop uses what block i found. Both are 1 when the maximum stays, and in the last "
        "round there is no block i.",
        "Assign shrink = next_shrink at the end of the round, behind the add.",
    ),
    faults=(
        (
            "            row_sum, row_max = row_sum * next_shrink + p.sum(axis=1), new_max\n",
            "            row_sum, row_max = row_sum * next_shrink + p.sum(axis=1), new_max\n            shrink = next_shrink\n",
        ),
        (
            "            acc_O = acc_O * shrink[:, None] + acc_T\n        if i < len(scores):\n            shrink = next_shrink",
            "            acc_O = acc_O * shrink[:, None] + acc_T",
        ),
    ),
)


def compare(t, scores, v, attend):
    got = attend(list(scores.copy()), list(v.copy()))
    flat = np.concatenate(scores, axis=1)
    weights = np.exp2(flat - flat.max(axis=1, keepdims=True))
    t.close(got, weights @ np.concatenate(v) / weights.sum(axis=1, keepdims=True), "out")


def draw(t, blocks=8, rows=4, n=5, dv=3):
    """Scores whose maximum moves in every row and in most blocks, and V."""
    grow = np.linspace(0, 8, blocks)[:, None, None] if blocks > 1 else 0
    return t.normal(blocks, rows, n) + grow, t.normal(blocks, n, dv)


def test_two(t, attend):
    compare(t, *draw(t, blocks=2), attend)


def test_ones(t, attend):
    scores, v = draw(t)
    compare(t, scores, np.ones_like(v), attend)


def test_equal(t, attend):
    scores, v = draw(t)
    compare(t, np.full_like(scores, t.rng.uniform(-3, 3)), v, attend)


def test_first(t, attend):
    scores, v = draw(t)
    scores[0, :, 0] = 20
    compare(t, scores, v, attend)


def test_random(t, attend):
    compare(t, *draw(t), attend)


TESTS = {
    "two blocks": test_two,
    "V = 1": test_ones,
    "equal scores": test_equal,
    "largest score first": test_first,
    "random": test_random,
}


@EXERCISE.holds(
    "your prediction is what the five tests say of the loop as handed out", "to which maximum does O belong?"
)
def _(t, verdict, attend):
    which.expect_prediction(t, EXERCISE, verdict, TESTS)


@EXERCISE.holds("mended: all five tests pass", "O shrinks by what T's own block found")
def _(t, verdict, attend):
    which.all_hold(t, TESTS, attend)


@EXERCISE.holds("mended: one block, three blocks, many blocks", "the first O is zero; the last round has no softmax")
def _(t, verdict, attend):
    for blocks in (1, 3, 25):
        compare(t, *draw(t, blocks=blocks), attend)


@EXERCISE.holds(
    "mended: scores that fall, and scores of a thousand", "nothing overflows when shrink and P belong together"
)
def _(t, verdict, attend):
    scores, v = draw(t)
    compare(t, scores[::-1], v, attend)
    compare(t, 1000 + 30 * scores, v, attend)


class Watched(list):
    """V's blocks; notes when they are asked for."""

    def __init__(self, blocks, log):
        super().__init__(blocks)
        self.log = log

    def __getitem__(self, i):
        if isinstance(i, int | np.integer):
            self.log.append(("V", int(i)))
        return super().__getitem__(i)


@EXERCISE.holds(
    "PV of a block is issued before the softmax of the next", "as handed out: T first, the add after the softmax"
)
def _(t, verdict, attend):
    scores, v = draw(t, blocks=6)
    log = []

    class Scores(Watched):
        def __getitem__(self, i):
            if isinstance(i, int | np.integer) and ("S", int(i)) not in log:
                log.append(("S", int(i)))
            return list.__getitem__(self, i)

    attend(Scores(list(scores), log), Watched(list(v), log))
    for i in range(1, 6):
        first_s, last_v = log.index(("S", i)), len(log) - 1 - log[::-1].index(("V", i - 1))
        t.expect(last_v < first_s, f"V of block {i - 1} is used after the scores of block {i}: no overlap")
