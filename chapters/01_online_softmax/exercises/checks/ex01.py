import numpy as np

from fa3_course.checker import Exercise
from fa3_course.checker.truth import softmax as truth

EXERCISE = Exercise(
    "01.1",
    "ex01_safe_softmax.py",
    functions={"softmax": 1},
    hints=(
        "Which exponent is the largest one that `exp` sees after you subtract the row's maximum?",
        "`-inf - (-inf)` is NaN. Use 0 instead of the maximum in a row whose maximum is -inf: `exp(-inf - 0)` is 0.",
        "The sum of such a row is 0 as well. Divide by `np.where(row_sum == 0, 1, row_sum)`.",
    ),
)


@EXERCISE.holds("matches the fp64 truth", "each row by itself: reduce along the last axis, with keepdims=True")
def _(t, softmax):
    for rows, keys in ((3, 7), (1, 1), (5, 300)):
        scores = t.normal(rows, keys)
        t.close(softmax(scores), truth(scores), f"probabilities of {rows} x {keys} scores")


@EXERCISE.holds("no overflow for logits of 1e4, in either direction", "subtract each row's own maximum before exp")
def _(t, softmax):
    scores = t.normal(3, 50) + np.array([[1e4], [-1e4], [0.0]])  # one maximum for all rows would erase the second
    t.close(softmax(scores), truth(scores), "probabilities of rows near 1e4, -1e4 and 0")


@EXERCISE.holds(
    "fp16 scores up to 60000 stay finite, and the result is fp16", "no fp64 constant should widen the array"
)
def _(t, softmax):
    scores = t.rng.uniform(-6e4, 6e4, (6, 40)).astype(np.float16)
    scores[:, :3] = scores.max(axis=-1, keepdims=True)  # several keys share the row's probability
    got = softmax(scores)
    t.expect(np.asarray(got).dtype == np.float16, f"the result has dtype {np.asarray(got).dtype}, expected float16")
    plain = np.exp(scores - scores.max(axis=-1, keepdims=True))
    t.close(got, truth(scores), "probabilities", same_precision=plain / plain.sum(axis=-1, keepdims=True))


@EXERCISE.holds("a row with no keys gives 0, and its neighbours are right", "a row of -inf: see hints 2 and 3")
def _(t, softmax):
    scores = t.normal(4, 9)
    scores[t.rng.random(scores.shape) < 0.3] = -np.inf
    scores[t.rng.integers(4)] = -np.inf
    t.close(softmax(scores), truth(scores), "probabilities")


@EXERCISE.holds("fresh inputs give fresh results", "right in call 1 and wrong later: something is kept between calls")
def _(t, softmax):
    scores = t.normal(2, 6)
    for call in (1, 2, 3):
        t.close(softmax(scores), truth(scores), f"probabilities of call {call}")
        scores = t.refill(scores)
