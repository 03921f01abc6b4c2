import numpy as np

from fa3_course.checker import Exercise
from fa3_course.checker.counting import counting
from fa3_course.checker.truth import softmax

EXERCISE = Exercise(
    "01.3",
    "ex03_tiles.py",
    functions={"weighted_average": 1},
    hints=(
        "`out * row_sum` is the un-normalised average of the old keys, against the old maximum.",
        "Weight of everything old, against the new maximum: `row_sum * exp(row_max - new_max)`. "
        "It weighs `out`, and it is the old part of the new sum.",
        "out = (old_weight * out + p @ v_tile) / row_sum with the new row_sum; where row_sum is 0 divide by 1.",
    ),
)


@EXERCISE.holds(
    "matches the fp64 truth", "compute the new maximum, then the weights, then out, then keep the new state"
)
def _(t, weighted_average):
    for rows, keys, d, tile_n in ((3, 32, 4, 8), (1, 5, 2, 5), (4, 7, 3, 16)):
        scores, v = 3 * t.normal(rows, keys), t.normal(keys, d)
        t.close(weighted_average(scores, v, tile_n), softmax(scores) @ v, f"out for {keys} keys in tiles of {tile_n}")


@EXERCISE.holds(
    "block size does not change the answer", "rescale out and row_sum when the maximum grows; mind the short last tile"
)
def _(t, weighted_average):
    scores, v = 5 * t.normal(3, 45), t.normal(45, 4)
    for tile_n in (1, 2, 7, 16, 45, 100):
        t.close(weighted_average(scores, v, tile_n), softmax(scores) @ v, f"out for tile_n = {tile_n}, 45 keys")


@EXERCISE.holds(
    "rising scores, where every tile brings a new maximum", "both the old out and the old sum need the factor"
)
def _(t, weighted_average):
    scores, v = np.sort(20 * t.normal(2, 24), axis=1), t.normal(24, 3)
    t.close(weighted_average(scores, v, 4), softmax(scores) @ v, "out")


@EXERCISE.holds(
    "a row with no keys gives 0; a masked first tile is harmless", "guard -inf - (-inf), and the division by 0"
)
def _(t, weighted_average):
    scores, v = t.normal(4, 24), t.normal(24, 3)
    scores[0] = scores[1, :8] = scores[2, 8:] = -np.inf
    t.close(weighted_average(scores, v, 8), softmax(scores) @ v, "out")


@EXERCISE.holds("output has no NaN for logits of 1e4", "every exponent must be <= 0: subtract the NEW maximum")
def _(t, weighted_average):
    scores, v = t.normal(2, 30) + np.array([[1e4], [-1e4]]), t.normal(30, 3)
    scores[:, 20] += 900
    t.close(weighted_average(scores, v, 7), softmax(scores) @ v, "out")


@EXERCISE.holds(
    "no array is larger than a tile",
    "work on `tile` and `v_tile` only: the whole row of scores is never in fast memory",
)
def _(t, weighted_average):
    tally, (scores, v) = counting(t.normal(6, 160), t.normal(160, 4))
    weighted_average(scores, v, 8)
    t.expect(
        np.prod(tally.largest or (0,)) <= 6 * 8,
        f"an array of shape {tally.largest} was made; 6 rows and tiles of 8 keys allow 6 x 8",
    )


@EXERCISE.holds("fresh inputs give fresh results", "right in call 1 and wrong later: something is kept between calls")
def _(t, weighted_average):
    scores, v = t.normal(3, 12), t.normal(12, 4)
    for call in (1, 2, 3):
        t.close(weighted_average(scores, v, 4), softmax(scores) @ v, f"out of call {call}")
        scores, v = t.refill(scores), t.refill(v)
