import numpy as np

from fa3_course.checker import Exercise
from hopper_sim import HOPPER

EXERCISE = Exercise(
    "03.7",
    "ex07_waves.py",
    functions={"rounds": 1, "at_work": 1, "tile_rows": 1},
    hints=(
        "133 tiles on 132 SMs take two rounds.",
        "at_work: tiles / (rounds x sms). Tiles of one height: sequences x queries / rows, rounded up per sequence.",
        "tile_rows: the smallest rounds(...) * (rows + overhead) over 192, 128, 64; min() keeps the first of equal ones.",
    ),
)


def deal(tiles, sms):
    """How many tiles the busiest SM gets, by dealing."""
    loads = np.zeros(sms, dtype=int)
    for i in range(tiles):
        loads[i % sms] += 1
    return int(loads.max())


@EXERCISE.holds("rounds, by dealing", "round up")
def _(t, rounds, at_work, tile_rows):
    for _ in range(10):
        sms = int(t.rng.integers(1, 150))
        for tiles in (0, sms, sms + 1, int(t.rng.integers(1, 900))):
            got, want = rounds(tiles, sms), deal(tiles, sms)
            t.expect(got == want, f"{tiles} tiles, {sms} SMs: {got} rounds, expected {want}")


@EXERCISE.holds("SMs at work", "of all rounds, not of the last one alone; no tiles: 1")
def _(t, rounds, at_work, tile_rows):
    t.expect(at_work(0, 10) == 1, f"no tiles: {at_work(0, 10)}, expected 1")
    for _ in range(10):
        sms, tiles = int(t.rng.integers(1, 150)), int(t.rng.integers(1, 900))
        got, want = at_work(tiles, sms), tiles / sms / deal(tiles, sms)
        t.expect(np.isclose(got, want), f"{tiles} tiles, {sms} SMs: {got:.4f}, expected {want:.4f}")


@EXERCISE.holds("one tile too many costs half of a Hopper", "133 tiles on 132 SMs")
def _(t, rounds, at_work, tile_rows):
    got = [at_work(HOPPER.sms + extra, HOPPER.sms) for extra in (0, 1)]
    t.expect(got[0] == 1 and 0.5 < got[1] < 0.51, f"{HOPPER.sms} and {HOPPER.sms + 1} tiles: {got}")


@EXERCISE.holds("the height that is done first", "every sequence has its own last tile: round up per sequence")
def _(t, rounds, at_work, tile_rows):
    for _ in range(30):
        queries, sequences, sms = (int(t.rng.integers(*span)) for span in ((1, 1500), (1, 40), (1, 140)))
        overhead = float(t.rng.uniform(0, 200))
        time = {r: deal(sequences * -(-queries // r), sms) * (r + overhead) for r in (192, 128, 64)}
        got, want = tile_rows(queries, sequences, sms, overhead), min(time, key=time.get)
        what = f"{queries} queries, {sequences} sequences, {sms} SMs, overhead {overhead:.0f}"
        t.expect(got in time and np.isclose(time[got], time[want]), f"{what}: {got} rows, expected {want}")


@EXERCISE.holds("of equally good heights the tallest; without overhead a short one can win", "mind the order in min()")
def _(t, rounds, at_work, tile_rows):
    sms = int(t.rng.integers(2, 100))
    got = tile_rows(384, sms, sms, 0.0)  # 6 x 64 = 3 x 128 = 2 x 192
    t.expect(got == 192, f"384 queries, {sms} sequences on as many SMs, no overhead: {got}, expected 192")
    got = tile_rows(64, sms, sms, 0.0)
    t.expect(got == 64, f"64 queries, {sms} sequences on as many SMs: {got}, expected 64")
