import numpy as np

from fa3_course.checker import Exercise
from fa3_course.checker.trial import Refused
from fa3_lib.config import REGISTER_SPLIT, ForwardConfig
from hopper_sim import SM, Fault

EXERCISE = Exercise(
    "02.9",
    "ex09_counts.py",
    functions={"empty_arrivals": 1, "consumer_registers": 1, "accumulators": 1, "widest_tile": 1},
    hints=(
        "Count what one warpgroup does (128 threads, 4 warps), then multiply by the consumers.",
        "65536 / 128 = 512 registers for one thread of each warpgroup together: 512 - producer, divided by the consumers, cut "
        "to a multiple of 8, at most 256. Two consumers and 24 for the producer: 240.",
        "64 x tile_n / 128 = tile_n / 2 elements per thread: tile_n / 2 registers for S, tile_n / 4 for 16-bit P, d / 2 for O. "
        "widest_tile tries 16, 32, ... 256.",
    ),
)


def fits(registers, tile_n, head_dim, element_bytes):
    """Whether the simulated SM lets a warpgroup with so many registers have its three tiles."""

    async def consumer(wg):
        await wg.setmaxnreg(registers)
        wg.registers("S", (64, tile_n))
        wg.registers("P", (64, tile_n), {1: "e4m3", 2: "f16", 4: "f32"}[element_bytes])
        wg.registers("O", (64, head_dim))

    sm = SM()
    sm.role("consumer", consumer)
    try:
        sm.run()
    except Fault:
        return False
    return True


@EXERCISE.holds("arrivals: per thread, per warp, per warpgroup", "128, 4 or 1 for each consumer warpgroup")
def _(t, empty_arrivals, consumer_registers, accumulators, widest_tile):
    for consumers in (1, 2, 3):
        for who, size in (("thread", 1), ("warp", 32), ("warpgroup", 128)):
            got, want = empty_arrivals(consumers, who), len(range(0, 128 * consumers, size))
            t.expect(got == want, f"{consumers} consumers, one arrival per {who}: {got}, expected {want}")


@EXERCISE.holds("nobody else arrives", "raise ValueError for a word that you do not know")
def _(t, empty_arrivals, consumer_registers, accumulators, widest_tile):
    try:
        got = empty_arrivals(2, "CTA")
    except ValueError:
        return
    raise Refused(f'empty_arrivals(2, "CTA") gave {got}; expected a ValueError')


@EXERCISE.holds("the splits of FlashAttention-3", "two consumers and 24 leave 240, three and 32 leave 160")
def _(t, empty_arrivals, consumer_registers, accumulators, widest_tile):
    for consumers, (producer, want) in REGISTER_SPLIT.items():
        got = consumer_registers(consumers, producer)
        t.expect(got == want, f"{consumers} consumers, producer {producer}: {got}, expected {want}")


@EXERCISE.holds("as many as fit, and not 8 more", "the sum over all threads must not exceed 65536")
def _(t, empty_arrivals, consumer_registers, accumulators, widest_tile):
    for _ in range(20):
        consumers, producer = int(t.rng.integers(1, 5)), 8 * int(t.rng.integers(3, 21))
        got = consumer_registers(consumers, producer)
        allowed = [n for n in range(24, 257, 8) if 128 * (producer + consumers * n) <= 65_536]
        t.expect(got == max(allowed), f"{consumers} consumers, producer {producer}: {got}, expected {max(allowed)}")


@EXERCISE.holds("accumulators of a thread", "S and O count 4 bytes per element, P the input's")
def _(t, empty_arrivals, consumer_registers, accumulators, widest_tile):
    for _ in range(12):
        tile_n, d, size = 16 * int(t.rng.integers(1, 17)), 64 * int(t.rng.integers(1, 5)), int(t.rng.choice([1, 2]))
        want = ForwardConfig(d, d, 128, tile_n, element_bytes=size).accumulator_registers
        got = accumulators(tile_n, d, size)
        t.expect(got == want, f"tile_n {tile_n}, d {d}, {size} bytes: {got}, expected {want}")


@EXERCISE.holds("the widest tile fits the simulated SM, the next does not", "24 registers stay free; stop at 256")
def _(t, empty_arrivals, consumer_registers, accumulators, widest_tile):
    for consumers, producer in ((2, 24), (3, 32), (2, 40)):
        for d in map(int, 64 * t.rng.integers(1, 5, 2)):
            size = int(t.rng.choice([1, 2]))
            # 128 x (producer + consumers x n) <= 65536 as a search, not as the formula
            registers = max(n for n in range(24, 257, 8) if 128 * (producer + consumers * n) <= 65_536)
            want = max([n for n in range(16, 257, 16) if fits(registers, n, d, size)], default=0)
            got = widest_tile(consumers, producer, d, size)
            what = f"{consumers} consumers, {registers} registers, d {d}, {size} bytes"
            t.expect(np.isscalar(got) and got == want, f"{what}: tile_n {got}, expected {want}")
