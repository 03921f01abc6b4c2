import numpy as np

from fa3_course.checker import Exercise
from fa3_course.checker.counting import counting
from fa3_course.checker.truth import log_sum_exp

EXERCISE = Exercise(
    "01.5",
    "ex05_exp2.py",
    functions={"probabilities": 1, "natural_lse": 1},
    hints=(
        "exp(a * (s - m)) = exp2(s * c - m * c) with c = a * log2(e).",
        "`(s - m) * c` is one multiply too, but a subtraction and a multiplication are two instructions; "
        "`s * c - (m * c)` is a single FFMA.",
        "row_sum has no unit, so its natural logarithm needs no factor: lse = row_max * softmax_scale + ln(row_sum).",
    ),
)


def draw(t, rows=4, n=12):
    scores = 4 * t.normal(rows, n)
    row_max = scores.max(axis=1) + t.rng.choice([0.0, 1.5], rows)  # an earlier tile may have had the maximum
    return scores, row_max, float(t.rng.uniform(0.05, 2.0))


@EXERCISE.holds(
    "probabilities match the fp64 truth", "the exponent is softmax_scale * (score - row_max), times log2(e)"
)
def _(t, probabilities, natural_lse):
    for _ in range(3):
        scores, row_max, scale = draw(t)
        t.close(probabilities(scores, row_max, scale), np.exp(scale * (scores - row_max[:, None])), "probabilities")


@EXERCISE.holds(
    "the LSE is natural and includes the scale", "no log2 in the LSE: row_max has raw units, row_sum has none"
)
def _(t, probabilities, natural_lse):
    for _ in range(3):
        scores, row_max, scale = draw(t)
        row_sum = np.exp(scale * (scores - row_max[:, None])).sum(axis=1)
        t.close(natural_lse(row_max, row_sum, scale), log_sum_exp(scale * scores), "lse")


@EXERCISE.holds(
    "exp2 only, and at most one multiply and one subtraction per score", "compute constants per row, before the scores"
)
def _(t, probabilities, natural_lse):
    scores, row_max, scale = draw(t, 4, 64)
    tally, arrays = counting(scores, row_max)
    probabilities(*arrays, scale)
    seen = tally.elements
    t.expect(
        seen["exp"] == 0 and seen["exp2"] == scores.size,
        f"{seen['exp']} exp and {seen['exp2']} exp2 for {scores.size} scores",
    )
    per_row = 4 * len(row_max)  # the constants of a row may cost a few operations
    for name, operations in (("multiply", ("multiply", "divide")), ("subtract", ("subtract", "add", "negative"))):
        count = sum(seen[operation] for operation in operations)
        t.expect(count <= scores.size + per_row, f"{count} {name} operations for {scores.size} scores")


@EXERCISE.holds("a row with no keys gives 0 and -inf", "use 0 in place of a row_max of -inf; ln(0) needs a guard")
def _(t, probabilities, natural_lse):
    scores, row_max, scale = draw(t)
    scores[0], row_max[0], scores[1, 3] = -np.inf, -np.inf, -np.inf
    finite = np.where(np.isneginf(row_max), 0, row_max)
    truth = np.exp(scale * (scores - finite[:, None]))
    t.close(probabilities(scores, row_max, scale), truth, "probabilities")
    t.close(natural_lse(row_max, truth.sum(axis=1), scale), log_sum_exp(scale * scores), "lse")


@EXERCISE.holds("output has no NaN for logits of 1e4", "subtract inside the exponent, not after it")
def _(t, probabilities, natural_lse):
    scores, row_max, scale = draw(t)
    for shift in (1e4, -1e4):
        p = probabilities(scores + shift, row_max + shift, scale)
        t.close(p, np.exp(scale * (scores - row_max[:, None])), "probabilities")
        t.close(
            natural_lse(row_max + shift, np.asarray(p).sum(axis=1), scale), log_sum_exp(scale * (scores + shift)), "lse"
        )


@EXERCISE.holds("fresh inputs give fresh results", "right in call 1 and wrong later: something is kept between calls")
def _(t, probabilities, natural_lse):
    scores, row_max, scale = draw(t)
    for call in (1, 2, 3):
        row_max = np.maximum(row_max, scores.max(axis=1))
        truth = np.exp(scale * (scores - row_max[:, None]))
        t.close(probabilities(scores, row_max, scale), truth, f"probabilities of call {call}")
        t.close(natural_lse(row_max, truth.sum(axis=1), scale), log_sum_exp(scale * scores), f"lse of call {call}")
        scores = t.refill(scores)
