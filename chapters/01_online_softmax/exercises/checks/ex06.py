import numpy as np

from fa3_course.checker import Exercise
from fa3_course.checker.truth import log_sum_exp, softmax

EXERCISE = Exercise(
    "01.6",
    "ex06_merge.py",
    functions={"merge": 2},
    hints=(
        "A part's share of the whole is exp(its lse) / (exp(lse_a) + exp(lse_b)).",
        "Subtract the larger LSE in all exponents; then lse = larger + ln(weight_a + weight_b).",
        "NaN * 0 is NaN. Choose with `np.where(weight > 0, share * out, 0)`. "
        "Where both LSE are -inf subtract 0 and divide by 1.",
    ),
)


def part(scores, v):
    return softmax(scores) @ v, log_sum_exp(scores)


def compare(t, answer, scores, v):
    for got, want, name in zip(answer, part(scores, v), ("out", "lse"), strict=True):
        t.close(got, want, name)


@EXERCISE.holds("two halves give the whole", "weigh each output by its share exp(lse - new lse)")
def _(t, merge):
    scores, v = 3 * t.normal(5, 40), t.normal(40, 4)
    for cut in (20, 1, 33):
        compare(t, merge(*part(scores[:, :cut], v[:cut]), *part(scores[:, cut:], v[cut:])), scores, v)


@EXERCISE.holds(
    "any random split, merged in any order, gives the same", "the result must be a valid input of the next merge"
)
def _(t, merge):
    scores, v = 4 * t.normal(3, 50), t.normal(50, 3)
    for _ in range(4):
        pieces = [p for p in np.split(t.rng.permutation(50), np.sort(t.rng.integers(0, 51, 5))) if len(p)]
        parts = [part(scores[:, keys], v[keys]) for keys in pieces]
        while len(parts) > 1:  # merge two random ones until one is left
            a = parts.pop(t.rng.integers(len(parts)))
            b = parts.pop(t.rng.integers(len(parts)))
            parts.append(merge(*a, *b))
        compare(t, parts[0], scores, v)


@EXERCISE.holds(
    "a part without keys is not read, even if it holds NaN", "choose with np.where instead of multiplying by 0"
)
def _(t, merge):
    scores, v = t.normal(4, 20), t.normal(20, 3)
    scores[0, :8], scores[1, 8:] = -np.inf, -np.inf
    parts = [part(scores[:, :8], v[:8]), part(scores[:, 8:], v[8:])]
    for out, lse in parts:
        out[np.isneginf(lse)] = np.nan
    compare(t, merge(*parts[0], *parts[1]), scores, v)


@EXERCISE.holds("two parts without keys give 0 and -inf", "-inf - (-inf) is NaN, and so is 0 / 0")
def _(t, merge):
    scores, v = t.normal(3, 10), t.normal(10, 2)
    scores[1] = -np.inf
    compare(t, merge(*part(scores[:, :4], v[:4]), *part(scores[:, 4:], v[4:])), scores, v)


@EXERCISE.holds("no overflow for an LSE of 1e4, in either direction", "exp(lse) does not fit: subtract the larger LSE")
def _(t, merge):
    for shift in (1e4, -1e4):
        scores, v = t.normal(3, 12) + shift, t.normal(12, 2)
        scores[0, :6] -= 2e4  # far apart: the small part must vanish, not turn into NaN
        compare(t, merge(*part(scores[:, :6], v[:6]), *part(scores[:, 6:], v[6:])), scores, v)


@EXERCISE.holds("fresh inputs give fresh results", "right in call 1 and wrong later: something is kept between calls")
def _(t, merge):
    out_a, lse_a, out_b, lse_b = t.normal(3, 2), t.normal(3), t.normal(3, 2), t.normal(3)
    for call in (1, 2, 3):
        share = 1 / (1 + np.exp(lse_b - lse_a))
        out, lse = merge(out_a, lse_a, out_b, lse_b)
        t.close(out, share[:, None] * out_a + (1 - share)[:, None] * out_b, f"out of call {call}")
        t.close(lse, np.logaddexp(lse_a, lse_b), f"lse of call {call}")
        out_a, lse_a = t.refill(out_a), t.refill(lse_a)
