from fa3_course import budget
from fa3_course.checker import Exercise
from fa3_lib.config import TILES, ForwardConfig, forward_config

EXERCISE = Exercise(
    "03.5",
    "ex05_budget.py",
    functions={"shared_bytes": 1, "registers": 1, "widest": 1},
    hints=(
        "A tile of r rows has r x head_dim x 2 bytes. Q has 64 rows per consumer, K and V tile_n rows in each stage.",
        "64 x tile_n fp32 scores over 128 threads: tile_n / 2 registers; P has half the bytes; O: head_dim / 2.",
        "widest tries 16, 32, ... 256 and keeps those with shared_bytes(...) <= 232448 and registers(...) <= {1: 256, 2: 240, 3: 160}"
        "[consumers] - 24.",
    ),
)


def draw(t):
    d, consumers, stages = 64 * int(t.rng.integers(1, 5)), int(t.rng.integers(1, 4)), int(t.rng.choice([1, 2, 4]))
    return d, consumers, stages, bool(t.rng.integers(2))


def config(case, tile_n):
    d, consumers, stages, own = case
    return ForwardConfig(d, d, 64 * consumers, tile_n, stages=stages, own_output=own)


@EXERCISE.holds("shared memory, as the configuration counts it", "the output of a CTA is as large as its Q")
def _(t, shared_bytes, registers, widest):
    for _ in range(12):
        case, tile_n = draw(t), 16 * int(t.rng.integers(1, 17))
        d, consumers, stages, own = case
        got, want = shared_bytes(d, consumers, tile_n, stages, own), config(case, tile_n).smem_bytes
        what = f"d {d}, {consumers} consumers, tile_n {tile_n}, {stages} stages, own output {own}"
        t.expect(got == want, f"{what}: {got:,} bytes, expected {want:,}")


@EXERCISE.holds("registers, with and without overlap", "P is 16 bits wide, and stands beside S only with overlap")
def _(t, shared_bytes, registers, widest):
    for overlap in (True, False, True, False):
        case, tile_n = draw(t), 16 * int(t.rng.integers(1, 17))
        parts = budget.budget(config(case, tile_n), overlap).registers
        got, want = registers(case[0], tile_n, overlap), sum(parts[name] for name in ("S", "P", "O"))
        t.expect(got == want, f"d {case[0]}, tile_n {tile_n}, overlap {overlap}: {got}, expected {want}")


@EXERCISE.holds("the widest tile with overlap is the one that the configuration accepts", "test both limits")
def _(t, shared_bytes, registers, widest):
    for d in (64, 128, 192, 256):
        for consumers in (1, 2, 3):
            stages, own = int(t.rng.choice([1, 2, 4])), bool(t.rng.integers(2))
            got, want = widest(d, consumers, stages, own, True), budget.widest(d, 64 * consumers, stages, own)
            what = f"d {d}, {consumers} consumers, {stages} stages, own output {own}"
            t.expect(got == want, f"{what}: {got}, expected {want}")


@EXERCISE.holds("without overlap, too", "P in S's place: the register limit moves, the other one does not")
def _(t, shared_bytes, registers, widest):
    for _ in range(10):
        case = draw(t)
        d, consumers, stages, own = case
        allowed = config(case, 16).consumer_registers - budget.OTHER_REGISTERS
        fits = [n for n in budget.TILE_N if config(case, n).smem_bytes <= 232_448 and n // 2 + d // 2 <= allowed]
        got, want = widest(d, consumers, stages, own, False), max(fits, default=0)
        t.expect(
            got == want, f"d {d}, {consumers} consumers, {stages} stages, own output {own}: {got}, expected {want}"
        )


@EXERCISE.holds("the library's tiles fit", "its tile_n is at most the widest")
def _(t, shared_bytes, registers, widest):
    for d, _ in TILES:
        c = forward_config(d, d, False)
        got = widest(d, c.consumer_warpgroups, c.stages, c.own_output, True)
        t.expect(c.tile_n <= got <= 256, f"d {d}: the library takes {c.tile_n} keys, you allow {got}")
