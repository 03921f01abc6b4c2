import numpy as np

from fa3_course.checker import Exercise
from fa3_course.checker.counting import counting
from fa3_course.checker.truth import log_sum_exp, softmax

EXERCISE = Exercise(
    "04.4",
    "ex04_offset.py",
    functions={"tile": 2, "epilogue": 2},
    hints=(
        "2^offset * 2^x is 2^(x + offset): where can the sum be made once per row instead of once per score?",
        "shift = row_max * scale_log2 - offset, with 0 in place of a row_max of -inf. Sum p, then round it.",
        "row_sum is 2^offset times too large, so ln(row_sum) is offset * ln(2) too large. acc_O / row_sum has lost it.",
    ),
)


def draw(t, rows=5, n=12):
    scores = 6 * t.normal(rows, n)
    return scores, scores.max(axis=1) + t.rng.choice([0.0, 1.5], rows), float(t.rng.uniform(0.05, 1.0))


def unrounded(p):
    return p


def coarse(p):
    """A rounding that nobody can overlook: down to whole numbers."""
    return np.floor(p)


@EXERCISE.holds("P is 2^offset times the old P, rounded", "exp2's argument gets + offset, before to_grid")
def _(t, tile, epilogue):
    for offset in (0.0, 8.0, float(t.rng.uniform(-4, 8))):
        scores, row_max, scale = draw(t)
        want = 2**offset * np.exp(scale * (scores - row_max[:, None]))
        t.close(tile(scores, row_max, scale, offset, unrounded)[0], want, f"P, offset {offset:.1f}")
        t.close(tile(scores, row_max, scale, offset, lambda p: -np.sqrt(p))[0], -np.sqrt(want), "P on another grid")


@EXERCISE.holds("row_sum adds P before it is rounded", "sum p, not to_grid(p)")
def _(t, tile, epilogue):
    for offset in (2.0, 8.0):
        scores, row_max, scale = draw(t)
        want = 2**offset * np.exp(scale * (scores - row_max[:, None])).sum(axis=1)
        t.close(tile(scores, row_max, scale, offset, coarse)[1], want, "row_sum")


@EXERCISE.holds(
    "the offset costs nothing: one multiply and one subtraction per score", "fold it into the constant of the row"
)
def _(t, tile, epilogue):
    scores, row_max, scale = draw(t, 4, 64)
    tally, arrays = counting(scores, row_max)
    tile(*arrays, scale, 8.0, unrounded)
    seen = tally.elements
    t.expect(
        seen["exp"] == 0 and seen["exp2"] == scores.size,
        f"{seen['exp']} exp and {seen['exp2']} exp2 for {scores.size} scores",
    )
    for name, operations in (("multiply", ("multiply", "divide")), ("subtract", ("subtract", "add", "negative"))):
        count = sum(seen[operation] for operation in operations)
        t.expect(count <= scores.size + 4 * len(row_max), f"{count} {name} operations for {scores.size} scores")


def whole(t, tile, epilogue, scores, v, scale, offset):
    row_max = scores.max(axis=1)
    p, row_sum = tile(scores, row_max, scale, offset, unrounded)
    return epilogue(np.asarray(p) @ v, row_max, np.asarray(row_sum), scale, offset)


@EXERCISE.holds("the output does not depend on the offset", "2^offset is in acc_O and in row_sum")
def _(t, tile, epilogue):
    for offset in (-3.0, 0.0, 8.0):
        (scores, _, scale), v = draw(t), t.normal(12, 3)
        out, _ = whole(t, tile, epilogue, scores, v, scale, offset)
        t.close(out, softmax(scale * scores) @ v, f"out, offset {offset:g}")


@EXERCISE.holds(
    "LSE does not depend on the offset", "subtract offset * ln(2): LSE is natural, the offset is a power of 2"
)
def _(t, tile, epilogue):
    for offset in (-3.0, 0.0, 8.0):
        (scores, _, scale), v = draw(t), t.normal(12, 3)
        _, lse = whole(t, tile, epilogue, scores, v, scale, offset)
        t.close(lse, log_sum_exp(scale * scores), f"lse, offset {offset:g}")


@EXERCISE.holds("a row with no keys gives 0 and -inf, logits of 1e4 no NaN", "use 0 in place of a row_max of -inf")
def _(t, tile, epilogue):
    (scores, _, scale), v = draw(t), t.normal(12, 3)
    scores[0], scores[1, 3], scores[2], scores[3] = -np.inf, -np.inf, scores[2] + 1e4, scores[3] - 1e4
    out, lse = whole(t, tile, epilogue, scores, v, scale, 8.0)
    t.close(out, softmax(scale * scores) @ v, "out")
    t.close(lse, log_sum_exp(scale * scores), "lse")


@EXERCISE.holds("fresh inputs give fresh results", "right in call 1 and wrong later: something is kept between calls")
def _(t, tile, epilogue):
    scores, row_max, scale = draw(t)
    for call in (1, 2, 3):
        row_max = np.maximum(row_max, scores.max(axis=1))
        want = 256 * np.exp(scale * (scores - row_max[:, None]))
        p, row_sum = tile(scores, row_max, scale, 8.0, unrounded)
        t.close(p, want, f"P of call {call}")
        t.close(row_sum, want.sum(axis=1), f"row_sum of call {call}")
        _, lse = epilogue(want, row_max, want.sum(axis=1), scale, 8.0)
        t.close(lse, log_sum_exp(scale * scores), f"lse of call {call}")
        scores = t.refill(scores)
