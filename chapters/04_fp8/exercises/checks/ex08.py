import numpy as np

from fa3_course import rungs
from fa3_course.checker import Exercise

fp8 = rungs._module("chapters/04_fp8/steps/fp8_numerics.py")

EXERCISE = Exercise(
    "04.8",
    "ex08_blocks.py",
    functions={"quantise": 2, "undo": 1},
    hints=(
        "np.maximum.reduceat(values, np.arange(0, len(values), block)) is the maximum of each block, a shorter last one too.",
        "np.repeat(factor, block)[:rows] gives each row its block's factor.",
        "np.frexp(f) = (m, e): f = m * 2^e with m in [1/2, 1). Rounded up that is 2^e, except for m = 1/2: then f is 2^(e - 1).",
    ),
)


def unrounded(x):
    return x


def e4m3(x):
    return fp8.to_grid(x, fp8.E4M3).astype(np.float64)


def draw(t, rows=23, d=6):
    """Rows of very different loudness, signs mixed."""
    return t.normal(rows, d) * 2 ** t.rng.uniform(-8, 8, (rows, 1))


def truth(x, block, largest):
    factors = []
    for start in range(0, len(x), block):
        values = np.abs(x[start : start + block])
        top = values[np.isfinite(values)].max(initial=0)
        factors.append(top / largest if top else 1.0)
    return np.array(factors)


def rounded_up(factor):
    """The next power of two, found by trying."""
    return min(2.0**e for e in range(-60, 60) if 2.0**e >= factor)


def compare(t, quantise, x, block, largest=448.0, power_of_two=False):
    want = truth(x, block, largest)
    if power_of_two:
        want = np.array([rounded_up(factor) for factor in want])
    values, factors = quantise(x, block, unrounded, largest, power_of_two)
    t.close(np.asarray(factors) / want, np.ones_like(want), f"factors of blocks of {block}, in parts of the right ones")
    if np.isfinite(x).all():
        t.close(values, x / want[np.arange(len(x)) // block, None], "divided rows")


@EXERCISE.holds(
    "each block of rows has its own factor", "the block's largest magnitude over the format's largest value"
)
def _(t, quantise, undo):
    for block in (1, 4, 8):
        compare(t, quantise, draw(t, 3 * block), block)
        compare(t, quantise, draw(t, 3 * block), block, 57344.0)


@EXERCISE.holds("the last block may be shorter, one block may hold all", "as many factors as blocks, rounded up")
def _(t, quantise, undo):
    for rows, block in ((23, 8), (9, 8), (5, 8), (17, 3)):
        compare(t, quantise, draw(t, rows), block)


@EXERCISE.holds("zeros get factor 1, infinities and NaN do not count", "a factor of 0 divides by 0")
def _(t, quantise, undo):
    x = draw(t, 16)
    x[4:8] = 0
    compare(t, quantise, x.copy(), 4)
    x[1, 2], x[9, 0], x[12:] = np.inf, np.nan, -np.inf
    compare(t, quantise, x, 4)
    values, _ = quantise(x, 4, e4m3, 448.0)
    t.expect(np.asarray(values)[1, 2] == 448, f"infinity became {np.asarray(values)[1, 2]}, it should saturate")


@EXERCISE.holds("rounding happens after the division", "return to_grid(x / factor), not to_grid(x) / factor")
def _(t, quantise, undo):
    x = draw(t)
    values, _ = quantise(x, 4, e4m3, 448.0)
    t.close(values, e4m3(x / truth(x, 4, 448.0)[np.arange(len(x)) // 4, None]), "values on the grid", tolerance=0)


@EXERCISE.holds(
    "powers of two are rounded up, and stay when they are one", "rounding down or to nearest overflows the format"
)
def _(t, quantise, undo):
    compare(t, quantise, draw(t), 4, power_of_two=True)
    for edge in (1.0, np.nextafter(1.0, 2), np.nextafter(1.0, 0), 0.25, 2.0**40 * (1 + 2.0**-51)):
        x = t.rng.uniform(-1, 1, (4, 5))
        x[2, 3] = -1
        compare(t, quantise, 448 * edge * x, 4, power_of_two=True)


@EXERCISE.holds("a power of two is undone without any error", "what e4m3 holds comes back as it was")
def _(t, quantise, undo):
    x = fp8.decode(t.rng.integers(0, 0x7F, (24, 8)).astype(np.uint8), fp8.E4M3).astype(np.float64)
    x *= t.rng.choice([-1, 1], x.shape)
    values, factors = quantise(x, 8, e4m3, 448.0, True)
    t.close(np.asarray(values) * np.repeat(factors, 8)[:, None], x, "values after the round trip", tolerance=0)


@EXERCISE.holds(
    "the scores come back, tile by tile", "tile (i, j) of the scores has the factor q_factors[i] * k_factors[j]"
)
def _(t, quantise, undo):
    for (sq, tile_m), (sk, tile_n) in (((12, 4), (12, 4)), ((11, 4), (14, 3)), ((3, 8), (20, 5))):
        q, k = draw(t, sq), draw(t, sk)
        f, g = 2 ** t.rng.uniform(-3, 3, -(-sq // tile_m)), 2 ** t.rng.uniform(-3, 3, -(-sk // tile_n))
        scores = (q / f[np.arange(sq) // tile_m, None]) @ (k / g[np.arange(sk) // tile_n, None]).T
        t.close(undo(scores, f, g, tile_m, tile_n), q @ k.T, f"scores of {sq} x {sk} in tiles of {tile_m} x {tile_n}")


@EXERCISE.holds("fresh inputs give fresh results", "right in call 1 and wrong later: something is kept between calls")
def _(t, quantise, undo):
    x = draw(t)
    for _ in range(3):
        compare(t, quantise, x, 4)
        x = t.refill(x)
