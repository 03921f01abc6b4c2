import numpy as np

from fa3_course import rungs
from fa3_course.checker import Exercise

fp8 = rungs._module("chapters/04_fp8/steps/fp8_numerics.py")

EXERCISE = Exercise(
    "04.6",
    "ex06_two_level.py",
    functions={"one_level": 1, "two_level": 1},
    hints=(
        "rescale belongs to what was added before the tile: multiply acc_O by it, then add the tile.",
        "one level: acc_O = product(p, v, acc_O * rescale[:, None]); V's factor multiplies the end result.",
        "two levels: acc_O = acc_O * rescale[:, None] + descale * product(p, v).",
    ),
)


def draw(t, tiles=4, rows=3, n=6, dv=5):
    p, v = list(t.normal(tiles, rows, n)), list(t.normal(tiles, n, dv))
    return p, v, list(t.rng.uniform(0.1, 1, (tiles, rows))), list(2 ** t.rng.uniform(-4, 4, tiles))


class Exact:
    """An exact tensor core that keeps what it was given."""

    def __init__(self):
        self.calls = []

    def __call__(self, p, v, acc=None):
        self.calls.append((p.copy(), None if acc is None else np.array(acc)))
        return p @ v + (0 if acc is None else acc)


def truth(p_tiles, v_tiles, rescales, descales):
    """Each tile by itself: its product, times every rescale that comes after it."""
    later = np.cumprod(np.array(rescales)[::-1], axis=0)[::-1]
    factors = [*later[1:], np.ones_like(later[0])]
    return sum(d * f[:, None] * (p @ v) for p, v, f, d in zip(p_tiles, v_tiles, factors, descales, strict=True))


@EXERCISE.holds("one level: the fp64 truth, when the tensor core is exact", "rescale what was there, then add the tile")
def _(t, one_level, two_level):
    for tiles in (1, 4, 9):
        p, v, rescales, (d, *_) = draw(t, tiles)
        t.close(one_level(p, v, rescales, d, Exact()), truth(p, v, rescales, [d] * tiles), "acc_O")


@EXERCISE.holds(
    "two levels: the fp64 truth, each tile with its own factor", "descale multiplies the tile's own product"
)
def _(t, one_level, two_level):
    for tiles in (1, 4, 9):
        p, v, rescales, descales = draw(t, tiles)
        t.close(two_level(p, v, rescales, descales, Exact()), truth(p, v, rescales, descales), "acc_O")


@EXERCISE.holds("one level: the tensor core holds the sum", "give acc_O to every product but perhaps the first")
def _(t, one_level, two_level):
    p, v, rescales, (d, *_) = draw(t)
    core = Exact()
    one_level(p, v, rescales, d, core)
    t.expect(len(core.calls) == len(p), f"{len(core.calls)} products for {len(p)} tiles")
    t.expect(all(acc is not None and acc.any() for _, acc in core.calls[1:]), "a later product started from 0")


@EXERCISE.holds("two levels: every product starts from nothing", "product(p, v), once per tile, without acc")
def _(t, one_level, two_level):
    p, v, rescales, descales = draw(t)
    core = Exact()
    two_level(p, v, rescales, descales, core)
    t.expect(len(core.calls) == len(p), f"{len(core.calls)} products for {len(p)} tiles")
    for tile, (given, acc) in zip(p, core.calls, strict=True):
        t.expect(acc is None or not acc.any(), "a product was given a sum to start from")
        t.expect(given.shape == tile.shape, f"a product of shape {given.shape}, the tile has {tile.shape}")


@EXERCISE.holds(
    "V = 1 at 32k keys, 13 bits: one level loses a tenth or more, two levels less than 0.5 %", "see the last two"
)
def _(t, one_level, two_level):
    tiles, n = 256, 128
    p = [fp8.to_grid(t.rng.uniform(100, 256, (2, n)), fp8.E4M3) for _ in range(tiles)]
    v, ones = [np.ones((n, 1))] * tiles, [np.ones(2)] * tiles
    total = np.sum(p, axis=(0, 2), dtype=np.float64)[:, None]
    one = np.asarray(one_level(p, v, ones, 1.0, fp8.tensor_core)) / total
    two = np.asarray(two_level(p, v, ones, [1.0] * tiles, fp8.tensor_core)) / total
    t.expect((one < 0.9).all(), f"one level answers {one.ravel()}: does the tensor core hold the sum?")
    t.expect((abs(two - 1) < 0.005).all(), f"two levels answer {two.ravel()}, expected 1 within 0.005")


@EXERCISE.holds("fresh inputs give fresh results", "right in call 1 and wrong later: something is kept between calls")
def _(t, one_level, two_level):
    core = Exact()
    p, v, rescales, descales = draw(t)
    for call in (1, 2, 3):
        t.close(two_level(p, v, rescales, descales, core), truth(p, v, rescales, descales), f"acc_O of call {call}")
        for tile in v:
            t.refill(tile)
