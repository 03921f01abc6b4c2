import numpy as np

from fa3_course import simulated
from fa3_course.checker import Exercise
from fa3_lib.config import ForwardConfig
from hopper_sim import HOPPER

EXERCISE = Exercise(
    "02.12",
    "ex12_bound.py",
    functions={"block_cycles": 3, "ceiling": 1},
    hints=(
        "rows = 64 * consumers. A product of m x n x k is 2 m n k operations; there are two. One exponential per score.",
        "Bytes of shared memory: per warpgroup Q (64 x d), K and V (tile_n x d each), 2 bytes per element; and once more K and V, "
        "as TMA writes them.",
        "overlap: tensor / max(tensor, mufu, shared). Without: tensor / max(tensor + mufu, shared).",
    ),
)
UNITS = {"tensor core": 0, "mufu": 1, "shared memory": 2}
SHORT, LONG = 2, 4  # key blocks of the two simulations whose difference is measured


def measured(t, consumers, tile_n, d):
    """Busy cycles per key block and unit, on the simulated SM."""
    config = ForwardConfig(d, d, 64 * consumers, tile_n).validate()
    busy = []
    for blocks in (SHORT, LONG):
        q, *kv = (t.normal(1, n, 1, d) for n in (64 * consumers, blocks * tile_n, blocks * tile_n))
        busy.append(simulated.simulate("5", q, *kv, config=config).report.busy)
    return [(busy[1][unit] - busy[0][unit]) / (LONG - SHORT) for unit in UNITS]


def draw(t):
    consumers, d = int(t.rng.integers(1, 4)), 64 * int(t.rng.integers(1, 3))
    return consumers, 16 * int(t.rng.integers(1, 5)), d


def compare(t, block_cycles, unit):
    for _ in range(3):
        case = draw(t)
        got, want = block_cycles(*case)[UNITS[unit]], measured(t, *case)[UNITS[unit]]
        what = "{} consumers, tile_n {}, d {}".format(*case)
        t.expect(
            np.isclose(got, want, rtol=1e-6), f"{what}: {unit} {got:,.1f} cycles; the simulator counts {want:,.1f}"
        )


@EXERCISE.holds(
    "tensor cores, as the simulated SM counts them", "2 products, 2 operations per multiply-add, 4096 per cycle"
)
def _(t, block_cycles, ceiling):
    compare(t, block_cycles, "tensor core")


@EXERCISE.holds("MUFU, as the simulated SM counts it", "one exponential per score: rows x tile_n, 16 per cycle")
def _(t, block_cycles, ceiling):
    compare(t, block_cycles, "mufu")


@EXERCISE.holds("shared memory, as the simulated SM counts it", "P comes from registers; TMA's writes count, too")
def _(t, block_cycles, ceiling):
    compare(t, block_cycles, "shared memory")


@EXERCISE.holds(
    "without overlap: 50, 67 and 80 % for head dims 64, 128 and 256", "products and exponentials take turns"
)
def _(t, block_cycles, ceiling):
    for d in (64, 128, 256):
        for consumers in (2, 3):
            got, want = ceiling(consumers, 128, d, False), (4 * d / 4096) / (4 * d / 4096 + 1 / HOPPER.mufu)
            t.expect(np.isclose(got, want, rtol=1e-6), f"{consumers} consumers, d {d}: {got:.3f}, expected {want:.3f}")


@EXERCISE.holds("with overlap the busiest unit decides", "tensor time over the largest of the three; never above 1")
def _(t, block_cycles, ceiling):
    for _ in range(6):
        consumers, tile_n, d = (
            int(t.rng.integers(1, 4)),
            16 * int(t.rng.integers(1, 17)),
            64 * int(t.rng.integers(1, 5)),
        )
        rows = 64 * consumers
        tensor, mufu = rows * tile_n * d / 1024, rows * tile_n / HOPPER.mufu
        shared = 2 * d * (consumers * 64 + 2 * (consumers + 1) * tile_n) / HOPPER.smem_bandwidth
        for overlap in (True, False):
            want = tensor / max(*((tensor, mufu) if overlap else (tensor + mufu,)), shared)
            got, what = ceiling(consumers, tile_n, d, overlap), f"{consumers} consumers, tile_n {tile_n}, d {d}"
            t.expect(np.isclose(got, want, rtol=1e-6), f"{what}, overlap {overlap}: {got:.3f}, expected {want:.3f}")
