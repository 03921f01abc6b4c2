import itertools

import numpy as np

from fa3_course.checker import Exercise
from fa3_course.checker.counting import counting
from fa3_course.checker.truth import allowed

EXERCISE = Exercise(
    "01.8",
    "ex08_window_softcap.py",
    functions={"prepare": 2},
    hints=(
        "With a softcap: scores = tanh(scores * (softmax_scale / softcap)), scale_log2 = softcap * log2(e).",
        "`j - p` in one array, with p = i + seqlen_k - seqlen_q: hidden where it is < -left or > right.",
        "Turn the arguments into two bounds once (causal sets right = 0), skip a bound of -1, and put -inf in last.",
    ),
)


def exponents(scores, softmax_scale, window_size, causal, softcap):
    """Base-2 exponents of the truth: the formula as the model defines it, masked last."""
    scaled = scores * softmax_scale
    if softcap:
        scaled = softcap * np.tanh(scaled / softcap)
    return np.where(allowed(*scores.shape, causal, window_size), scaled * np.log2(np.e), -np.inf)


def compare(t, prepare, sq, sk, window_size=(-1, -1), causal=False, softcap=0.0):
    scores, scale = 10 * t.normal(sq, sk), float(t.rng.uniform(0.1, 1.0))
    got, scale_log2 = prepare(scores, scale, window_size, causal, softcap)
    t.expect(np.ndim(scale_log2) == 0 and scale_log2 > 0, f"scale_log2 is {scale_log2}, expected one positive number")
    what = f"scores * scale_log2 for window {window_size}, causal {causal}, softcap {softcap}, {sq} x {sk}"
    t.close(np.asarray(got) * scale_log2, exponents(scores, scale, window_size, causal, softcap), what)


@EXERCISE.holds(
    "softcap alone matches its formula", "divide by softcap before tanh; its log2(e) goes into the constant"
)
def _(t, prepare):
    for softcap in (1.0, 15.0, float(t.rng.uniform(5, 50))):
        compare(t, prepare, 5, 9, softcap=softcap)


@EXERCISE.holds(
    "without softcap the scores stay raw, and scale_log2 is that of 01.5", "softcap = 0 means none, not a division by 0"
)
def _(t, prepare):
    compare(t, prepare, 5, 9)
    scores = t.normal(3, 4)
    t.close(prepare(scores, 0.3, (-1, -1), False, 0.0)[0], scores, "scores", tolerance=0.0)


@EXERCISE.holds("a masked key stays masked under the softcap", "tanh(-inf) is -1: mask after tanh")
def _(t, prepare):
    for sq, sk in ((6, 6), (4, 9)):
        compare(t, prepare, sq, sk, causal=True, softcap=15.0)


@EXERCISE.holds(
    "every window, causal or not, for any lengths", "bottom-right: p = i + seqlen_k - seqlen_q; both ends included"
)
def _(t, prepare):
    for sq, sk in ((7, 7), (4, 11), (9, 5), (1, 6)):
        for window, causal in itertools.product(((-1, -1), (2, -1), (-1, 1), (0, 0), (3, 2), (1, 0)), (False, True)):
            compare(t, prepare, sq, sk, window, causal)


@EXERCISE.holds(
    "equal spellings give equal results", "window (-1, 0) is causal; a window wider than the keys is no window"
)
def _(t, prepare):
    scores = t.normal(5, 8)
    for a, b in (
        (((-1, 0), False), ((-1, -1), True)),
        (((100, 100), False), ((-1, -1), False)),
        (((2, 5), True), ((2, 0), False)),
    ):
        first, second = (np.asarray(prepare(scores, 0.5, *spelling, 0.0)[0]) for spelling in (a, b))
        t.expect(
            np.array_equal(first, second),
            f"window_size {a[0]}, causal {a[1]} differs from window_size {b[0]}, causal {b[1]}",
        )


@EXERCISE.holds("at most one multiply per score", "fold the two factors into one number before you touch the scores")
def _(t, prepare):
    for softcap, most in ((20.0, 1), (0.0, 0)):
        tally, (scores,) = counting(t.normal(12, 12))
        prepare(scores, 0.4, (3, 0), False, softcap)
        count = tally.elements["multiply"] + tally.elements["divide"]
        t.expect(
            count <= most * scores.size,
            f"{count} multiplies and divisions for {scores.size} scores, softcap {softcap:.0f}",
        )


@EXERCISE.holds("fresh inputs give fresh results", "right in call 1 and wrong later: something is kept between calls")
def _(t, prepare):
    scores = t.normal(4, 6)
    for call in (1, 2, 3):
        got, scale_log2 = prepare(scores, 0.5, (2, 1), False, 10.0)
        t.close(np.asarray(got) * scale_log2, exponents(scores, 0.5, (2, 1), False, 10.0), f"exponent of call {call}")
        scores = t.refill(scores)
