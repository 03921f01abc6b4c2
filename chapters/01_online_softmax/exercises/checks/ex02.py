import numpy as np

from fa3_course.checker import Exercise
from fa3_course.checker.truth import log_sum_exp

EXERCISE = Exercise(
    "01.2",
    "ex02_one_pass.py",
    functions={"update": 2},
    hints=(
        "When the maximum grows from m to M, every old term exp(s - m) should have been exp(s - M). "
        "Which factor is missing?",
        "new_sum = row_sum * exp(row_max - new_max) + sum(exp(scores - new_max)).",
        "While a row has seen nothing, both maxima are -inf and their difference is NaN. Subtract 0 there, as in 01.1.",
    ),
)


def fold(update, scores, cuts):
    """Runs the learner's update over the pieces of `scores` between `cuts`."""
    state = np.full(len(scores), -np.inf), np.zeros(len(scores))
    for piece in np.split(scores, cuts, axis=1):
        if piece.shape[1]:
            state = update(*state, piece)
    return state


def compare(t, state, scores):
    row_max, row_sum = state
    truth = scores.max(axis=1)
    t.close(row_max, truth, "row_max")
    t.close(row_sum, np.exp(log_sum_exp(scores) - np.where(np.isneginf(truth), 0, truth)), "row_sum")


@EXERCISE.holds("the first tile alone gives its own maximum and sum", "start: row_max = -inf and row_sum = 0")
def _(t, update):
    scores = t.normal(5, 8)
    compare(t, fold(update, scores, []), scores)


@EXERCISE.holds("any split of the row gives the same maximum and sum", "rescale the old sum when the maximum grows")
def _(t, update):
    scores = 5 * t.normal(4, 60)
    for pieces in (1, 3, 10):
        compare(t, fold(update, scores, np.sort(t.rng.integers(0, 61, pieces))), scores)


@EXERCISE.holds("rising and falling scores both work", "a falling row keeps its maximum: the factor is then exp(0) = 1")
def _(t, update):
    rising = np.sort(30 * t.normal(2, 40), axis=1)
    scores = np.stack([rising[0], rising[1][::-1]])
    compare(t, fold(update, scores, range(1, 40)), scores)


@EXERCISE.holds("a tile of -inf changes nothing, at the start too", "-inf - (-inf) is NaN: subtract 0 instead")
def _(t, update):
    scores = t.normal(4, 20)
    scores[0, :5] = scores[1, 5:10] = scores[2, 15:] = scores[3] = -np.inf
    compare(t, fold(update, scores, [5, 10, 15]), scores)


@EXERCISE.holds(
    "no overflow for logits of 1e4, in either direction", "every exponent must be <= 0: subtract the NEW maximum"
)
def _(t, update):
    scores = t.normal(2, 30) + np.array([[1e4], [-1e4]])
    scores[:, 20] += 500  # a jump whose exponential does not fit fp64 when the old maximum is subtracted
    compare(t, fold(update, scores, [7, 14, 25]), scores)


@EXERCISE.holds("fresh inputs give fresh results", "right in call 1 and wrong later: something is kept between calls")
def _(t, update):
    row_max, row_sum, scores = t.normal(3), 1 + t.rng.random(3), t.normal(3, 4)
    for call in (1, 2, 3):
        new_max = np.maximum(row_max, scores.max(axis=1))
        truth = row_sum * np.exp(row_max - new_max) + np.exp(scores - new_max[:, None]).sum(axis=1)
        got_max, got_sum = update(row_max, row_sum, scores)
        t.close(got_max, new_max, f"row_max of call {call}")
        t.close(got_sum, truth, f"row_sum of call {call}")
        scores = t.refill(scores)
