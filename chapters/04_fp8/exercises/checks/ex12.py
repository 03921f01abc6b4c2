import itertools

from fa3_course.checker import Exercise
from fa3_lib.config import ForwardConfig

EXERCISE = Exercise(
    "04.12",
    "ex12_halves.py",
    functions={"registers": 1, "widest_part": 1, "widest_tile": 1},
    hints=(
        "64 x n elements over 128 threads are n / 2 per thread; four bytes of P share a register.",
        "registers: tile_n / 2 + tile_n / 8 + head_dim / 2 + columns / 2. A part must divide the head dim: 192 has parts of 192 and 64.",
        "widest_tile: largest n of 32, 64 ... 256 with registers(...) <= {1: 256, 2: 240, 3: 160}[consumers] - 24 and "
        "head_dim * (3 * 64 * consumers + 2 * stages * n) + 1024 <= 232448.",
    ),
)
LIMIT = {1: 232, 2: 216, 3: 136}


def config(d, consumers, tile_n, stages=2):
    return ForwardConfig(d, d, 64 * consumers, tile_n, stages=stages, own_output=True, element_bytes=1)


def draw(t):
    return 64 * int(t.rng.integers(1, 5)), int(t.rng.integers(1, 4)), 32 * int(t.rng.integers(1, 9))


def parts_of(d):
    return [columns for columns in (64, 128, 192, 256) if d % columns == 0]


@EXERCISE.holds("registers of S, P and O, as the configuration counts them", "P has one byte per element")
def _(t, registers, widest_part, widest_tile):
    for _ in range(12):
        d, consumers, n = draw(t)
        got, want = registers(d, n, 0), config(d, consumers, n).accumulator_registers
        t.expect(got == want, f"d {d}, tile_n {n}, one level: {got}, expected {want}")


@EXERCISE.holds("T is as wide as its part", "fp32, 64 rows, `columns` columns")
def _(t, registers, widest_part, widest_tile):
    for _ in range(12):
        d, _, n = draw(t)
        columns = int(t.rng.choice(parts_of(d)))
        got = registers(d, n, columns) - registers(d, n, 0)
        t.expect(got == columns // 2, f"T of {columns} columns takes {got} registers, expected {columns // 2}")


@EXERCISE.holds(
    "the widest part leaves 24 registers free and divides the head dim", "try the largest first; 0 when none fits"
)
def _(t, registers, widest_part, widest_tile):
    for d in (64, 128, 192, 256):
        for consumers in (1, 2, 3):
            n = 32 * int(t.rng.integers(1, 9))
            room = 2 * (LIMIT[consumers] - config(d, consumers, n).accumulator_registers)
            want = max((columns for columns in parts_of(d) if columns <= room), default=0)
            got = widest_part(d, consumers, n)
            t.expect(got == want, f"d {d}, {consumers} consumers, tile_n {n}: {got}, expected {want}")


@EXERCISE.holds(
    "rung 10's tiles: T whole up to head dim 128, then in parts of 64", "two consumers; 128 keys, at head dim 256 64"
)
def _(t, registers, widest_part, widest_tile):
    for d, n, want in ((64, 128, 64), (128, 128, 128), (192, 128, 64), (256, 64, 64)):
        got = widest_part(d, 2, n)
        t.expect(got == want, f"d {d}, 2 consumers, tile_n {n}: {got} columns, rung 10 takes {want}")


@EXERCISE.holds("the widest tile meets both limits", "registers, and shared memory as the configuration counts it")
def _(t, registers, widest_part, widest_tile):
    for d, consumers, stages in itertools.product((64, 128, 192, 256), (1, 2, 3), (1, 2, 4, 8)):
        for columns in (0, int(t.rng.choice(parts_of(d)))):
            fitting = [
                n
                for n in range(32, 257, 32)
                if config(d, consumers, n).accumulator_registers + columns // 2 <= LIMIT[consumers]
                and config(d, consumers, n, stages).smem_bytes <= 232_448
            ]
            got, want = widest_tile(d, consumers, columns, stages), max(fitting, default=0)
            what = f"d {d}, {consumers} consumers, T of {columns} columns, {stages} stages"
            t.expect(got == want, f"{what}: {got}, expected {want}")
