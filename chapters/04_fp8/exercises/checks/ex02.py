import numpy as np
import torch

from fa3_course.checker import Exercise

EXERCISE = Exercise(
    "04.2",
    "ex02_round.py",
    functions={"to_grid": 1},
    hints=(
        "np.frexp(x) gives a mantissa in [1/2, 1) and an exponent: the exponent that you want is one less.",
        "np.rint rounds halves to the even whole number, and that is the even code: a code counts steps.",
        "step = np.ldexp(1.0, np.maximum(exponent, lowest_exponent) - mantissa_bits); np.rint(x / step) * step; np.clip.",
    ),
)
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)
DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


def values(fmt):
    """All finite values from 0 up: their index is their code."""
    codes = torch.arange(128, dtype=torch.uint8).view(DTYPES[fmt]).double().numpy()
    return codes[np.isfinite(codes)]


def truth(x, fmt):
    """Looked up in the list of all values: the nearer neighbour, or the one with the even code."""
    known = values(fmt)
    size = np.minimum(np.abs(x), known[-1])
    below = np.clip(np.searchsorted(known, size, side="right") - 1, 0, len(known) - 2)
    down, up = size - known[below], known[below + 1] - size
    code = below + ((up < down) | ((up == down) & (below % 2 == 1)))
    return np.copysign(known[code], x)


def compare(t, to_grid, x, fmt=E4M3):
    got, want = np.asarray(to_grid(x, *fmt)), truth(x, fmt)
    t.expect(got.dtype == np.float64 and got.shape == x.shape, f"{got.dtype} {got.shape}, expected float64 {x.shape}")
    wrong = ~((got == want) & (np.signbit(got) == np.signbit(want)))
    if wrong.any():
        at = np.unravel_index(wrong.argmax(), wrong.shape)
        t.expect(False, f"{x[at]!r} with {fmt[0]} mantissa bits: {got[at]!r}, expected {want[at]!r}")


@EXERCISE.holds("the nearest value of e4m3, between 2^-6 and 448", "half a step is the largest error")
def _(t, to_grid):
    for shape in ((200,), (3, 50)):
        x = t.rng.choice([-1, 1], shape) * 2 ** t.rng.uniform(-6, np.log2(448), shape)
        compare(t, to_grid, x)
        compare(t, to_grid, t.refill(x))  # the same memory, new numbers


@EXERCISE.holds("ties go to the even code", "1.0625 goes down to 1, 1.1875 goes up to 1.25; np.rint knows how")
def _(t, to_grid):
    for fmt in (E4M3, E5M2):
        known = values(fmt)
        ties = (known[1:] + known[:-1]) / 2  # the middle of two codes is an fp64 number
        compare(t, to_grid, np.concatenate([ties, -ties]), fmt)
        compare(t, to_grid, np.concatenate([np.nextafter(ties, 0), np.nextafter(ties, np.inf)]), fmt)


@EXERCISE.holds("what the format holds stays as it is", "also a power of two, where the step changes")
def _(t, to_grid):
    for fmt in (E4M3, E5M2):
        known = t.rng.permutation(values(fmt))
        compare(t, to_grid, np.concatenate([known, -known]), fmt)


@EXERCISE.holds("below the smallest normal number the step stays 2^-9", "the exponent is never below lowest_exponent")
def _(t, to_grid):
    x = t.rng.choice([-1, 1], 200) * 2 ** t.rng.uniform(-9, -6, 200)
    compare(t, to_grid, x)
    compare(t, to_grid, x / 2**8, E5M2)


@EXERCISE.holds("too large numbers saturate, infinity too", "the last step is a clip to largest")
def _(t, to_grid):
    far = np.array([449.0, 464, 480, 1e6, 1e300, np.inf, t.rng.uniform(500, 1000)])
    compare(t, to_grid, np.concatenate([far, -far]))
    compare(t, to_grid, 128 * np.concatenate([far, -far]), E5M2)


@EXERCISE.holds("NaN stays NaN, and a zero keeps its sign", "np.clip leaves NaN alone; -1e-9 becomes -0.0")
def _(t, to_grid):
    tiny = np.array([0.0, -0.0, 1e-9, -1e-9, 1e-300, -1e-300, 5e-324])
    compare(t, to_grid, tiny)
    got = np.asarray(to_grid(np.array([np.nan, 1.0, -np.nan]), *E4M3))
    t.expect(np.isnan(got[[0, 2]]).all() and got[1] == 1, f"NaN, 1, NaN became {got}")


@EXERCISE.holds("e5m2 by the same function", "the three numbers say all that there is to know of a format")
def _(t, to_grid):
    compare(t, to_grid, t.rng.choice([-1, 1], 300) * 2 ** t.rng.uniform(-18, 17, 300), E5M2)
