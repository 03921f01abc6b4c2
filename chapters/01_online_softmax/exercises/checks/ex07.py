import numpy as np

from fa3_course.checker import Exercise
from fa3_course.checker.truth import allowed

EXERCISE = Exercise(
    "01.7",
    "ex07_tile_range.py",
    functions={"key_tiles": 2},
    hints=(
        "Query i sees i + 1 + seqlen_k - seqlen_q keys, if that lies between 0 and seqlen_k.",
        "tiles = ceil(keys of the last query / tile_n); the last query of the last tile is seqlen_q - 1.",
        "unmasked = floor(keys of the first query / tile_n). Clamp both counts to 0 .. seqlen_k before dividing.",
    ),
)


def truth(m_tile, tile_m, tile_n, sq, sk):
    """Counted in the mask itself."""
    rows = allowed(sq, sk, causal=True)[m_tile * tile_m : (m_tile + 1) * tile_m]
    tiles = [rows[:, start : start + tile_n] for start in range(0, sk, tile_n)]
    needed = [tile.any() for tile in tiles]
    full = [tile.shape[1] == tile_n and tile.all() for tile in tiles]
    return max((n + 1 for n, need in enumerate(needed) if need), default=0), sum(np.cumprod(full).astype(int))


def compare(t, key_tiles, tile_m, tile_n, sq, sk):
    for m_tile in range(-(-sq // tile_m)):
        got = tuple(key_tiles(m_tile, tile_m, tile_n, sq, sk))
        want = truth(m_tile, tile_m, tile_n, sq, sk)
        call = f"key_tiles({m_tile}, {tile_m}, {tile_n}, {sq}, {sk})"
        t.expect(got == want, f"{call} is {got}, expected {want}")


@EXERCISE.holds(
    "square: as many queries as keys",
    "tile i of a square problem with equal tiles reads i + 1 tiles, i of them unmasked",
)
def _(t, key_tiles):
    tile = int(t.rng.choice([4, 8, 16]))
    compare(t, key_tiles, tile, tile, 4 * tile, 4 * tile)
    compare(t, key_tiles, 2 * tile, tile, 8 * tile, 8 * tile)


@EXERCISE.holds("ragged lengths", "round up for the tiles that are read, down for those without a mask")
def _(t, key_tiles):
    for _ in range(20):
        length = int(t.rng.integers(1, 60))
        compare(t, key_tiles, int(t.rng.integers(1, 17)), int(t.rng.integers(1, 17)), length, length)


@EXERCISE.holds(
    "more keys than queries (bottom-right)", "the last query sees the last key: shift by seqlen_k - seqlen_q"
)
def _(t, key_tiles):
    for _ in range(20):
        sq = int(t.rng.integers(1, 30))
        compare(t, key_tiles, int(t.rng.integers(1, 9)), int(t.rng.integers(1, 9)), sq, sq + int(t.rng.integers(1, 40)))


@EXERCISE.holds(
    "more queries than keys: the first query tiles read nothing", "clamp negative counts to 0 before you divide"
)
def _(t, key_tiles):
    for _ in range(20):
        sk = int(t.rng.integers(1, 30))
        compare(t, key_tiles, int(t.rng.integers(1, 9)), int(t.rng.integers(1, 9)), sk + int(t.rng.integers(1, 40)), sk)


@EXERCISE.holds("one query sees every key and needs a mask only in a short last tile", "decoding: seqlen_q = 1")
def _(t, key_tiles):
    for _ in range(10):
        compare(t, key_tiles, 64, int(t.rng.integers(1, 17)), 1, int(t.rng.integers(1, 100)))
