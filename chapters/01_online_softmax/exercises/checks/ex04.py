import numpy as np

from fa3_course.checker import Exercise
from fa3_course.checker import truth as exact
from fa3_course.checker.counting import counting

EXERCISE = Exercise(
    "01.4",
    "ex04_delayed.py",
    functions={"attention": 2},
    hints=(
        "The factor exp(row_max - new_max) repairs what was summed against the old maximum: row_sum and acc_O.",
        "In the epilogue out = acc_O / row_sum, and ln(sum exp(s)) = row_max + ln(row_sum).",
        "Without keys the loop never ran: row_sum is 0. Divide by 1 there, and set lse to -inf.",
    ),
)


def draw(t, sq, sk, d, dv):
    return t.normal(sq, d), t.normal(sk, d), t.normal(sk, dv)


def compare(t, answer, truth, where=""):
    for got, want, name in zip(answer, truth, ("out", "lse"), strict=True):
        t.close(got, want, name + where)


@EXERCISE.holds("out and lse match the fp64 truth", "lse is the natural logarithm of the sum over the scaled scores")
def _(t, attention):
    for sq, sk, d, dv in ((5, 32, 8, 8), (1, 3, 4, 2), (7, 50, 16, 8)):
        q, k, v = draw(t, sq, sk, d, dv)
        scale = float(t.rng.uniform(0.1, 1.0))
        compare(t, attention(q, k, v, scale, 16), exact.attention(q, k, v, scale), f" for {sq} queries, {sk} keys")


@EXERCISE.holds("block size does not change the answer", "rescale acc_O as well as row_sum when the maximum grows")
def _(t, attention):
    q, k, v = draw(t, 4, 45, 8, 3)
    truth = exact.attention(3 * q, k, v, 0.5)
    for tile_n in (1, 7, 16, 45, 64):
        compare(t, attention(3 * q, k, v, 0.5, tile_n), truth, f" for tile_n = {tile_n}")


@EXERCISE.holds("output has no NaN for logits of 1e4", "scale first, then subtract the new maximum, then exp")
def _(t, attention):
    q, k, v = draw(t, 4, 40, 8, 4)
    q, k = q * 100, np.abs(k) * 100
    q[:2], q[2:] = np.abs(q[:2]), -np.abs(q[2:])  # rows with only positive and rows with only negative scores
    compare(t, attention(q, k, v, 0.35, 8), exact.attention(q, k, v, 0.35))


@EXERCISE.holds("a call without keys gives 0 and -inf", "the loop never runs then: see hint 3")
def _(t, attention):
    q, k, v = draw(t, 3, 0, 4, 2)
    compare(t, attention(q, k, v, 0.5, 8), exact.attention(q, k, v, 0.5))


@EXERCISE.holds("normalised once: more tiles need no more divisions", "divide in the epilogue only")
def _(t, attention):
    q, k, v = draw(t, 4, 64, 8, 8)
    divisions = []
    for tile_n in (64, 8):
        tally, arrays = counting(q, k, v)
        attention(*arrays, 0.5, tile_n)
        divisions.append(sum(tally.calls[name] for name in ("divide", "reciprocal", "floor_divide")))
    t.expect(divisions[0] == divisions[1], f"{divisions[0]} divisions for 1 tile, {divisions[1]} for 8 tiles")


@EXERCISE.holds("the scores of all keys are never in memory at once", "no q @ k.T over all keys: one tile at a time")
def _(t, attention):
    tally, arrays = counting(*draw(t, 6, 160, 8, 8))
    attention(*arrays, 0.5, 8)
    most = tally.largest or (0,)
    t.expect(np.prod(most) <= 6 * 8, f"an array of shape {most} was made; 6 rows and tiles of 8 keys allow 6 x 8")


@EXERCISE.holds("fresh inputs give fresh results", "right in call 1 and wrong later: something is kept between calls")
def _(t, attention):
    q, k, v = draw(t, 3, 12, 4, 4)
    for call in (1, 2, 3):
        compare(t, attention(q, k, v, 0.5, 4), exact.attention(q, k, v, 0.5), f" of call {call}")
        q, k, v = map(t.refill, (q, k, v))
