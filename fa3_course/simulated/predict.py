"""What the simulated SM says about a whole card, and how far that is from stored measurements.

The time of a query tile is a + b x (key blocks), and a CTA costs c once; a, b and c come from short simulations, with as
many CTAs on the SM as there is room for. Tiles are then handed to the card's SMs: as they become free, or for the persistent
rung by its own walk. The model knows neither power nor L2 nor DRAM limits: the clock is the measured row's where there is one.
"""

import functools
import heapq
from dataclasses import dataclass

import numpy as np

from fa3_course import results, simulated
from fa3_course.simulated import parts
from fa3_lib.config import ForwardConfig
from hopper_sim import HOPPER, Machine

SHORT, LONG = 6, 14  # key blocks of the simulations that give a and b
WAVES = 3  # where CTAs share an SM, so many one after the other, since the start of one runs under the work of others
LIBRARY = ("fa3_lib", "9")  # the kernel name of the library's rows, and the rung that simulates it
TOKENS, HIDDEN = 16_384, 2048  # the paper's benchmark: 16k tokens in all, heads x head_dim = 2048
TIE = 0.98  # a unit this close to the busiest one is named with it


@dataclass(frozen=True)
class Cost:
    """Cycles of one SM: per CTA, per query tile, per key block; and the cycles that the busiest units work per key block.

    Where `resident` CTAs share the SM, its cycles divided by the tiles it finishes in them.
    """

    cta: float
    tile: float
    block: float
    bound: str
    bound_cycles: float
    config: ForwardConfig
    resident: int


@dataclass(frozen=True)
class Prediction:
    """TFLOP/s of a card, and what TFLOP/s would be if the busiest unit never stood still."""

    tflops: float
    cap: float
    bound: str
    clock_ghz: float


@functools.lru_cache(maxsize=128)
def cost(number: str, head_dim: int, causal: bool, machine: Machine = HOPPER, seqlen_q: int | None = None) -> Cost:
    """Measures a rung on the simulated SM. Raises ValueError for a shape that the rung refuses."""
    config = simulated.configuration(number, head_dim, causal, seqlen_q)
    r = simulated.rung(number)
    resident = r.resident_ctas(config, machine)
    tiles = 1 if resident == 1 else WAVES * resident
    short, long = (_run(number, config, head_dim, blocks, tiles, machine, resident) for blocks in (SHORT, LONG))
    block = (long.cycles - short.cycles) / (LONG - SHORT) / tiles
    cta, tile = 0.0, short.cycles / tiles - SHORT * block
    if r.persistent:
        two = _run(number, config, head_dim, SHORT, 2, machine)
        cta = max(2 * short.cycles - two.cycles, 0.0)
        tile -= cta
    busy = {unit: (long.busy[unit] - short.busy[unit]) / (LONG - SHORT) / tiles for unit in long.busy}
    least_time = {unit: cycles / machine.efficiency(unit) for unit, cycles in busy.items()}
    most = max(least_time.values())
    bound = " and ".join(unit for unit, cycles in least_time.items() if cycles >= TIE * most)
    return Cost(cta, tile, block, bound, most, config, resident)


def _run(
    number: str, config: ForwardConfig, head_dim: int, blocks: int, heads: int, machine: Machine, resident: int = 1
):
    rng = np.random.default_rng(0)
    shapes = ((1, config.tile_m, heads, head_dim), *2 * ((1, blocks * config.tile_n, heads, head_dim),))
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    return simulated.simulate(
        number, q, k, v, config.causal, config=config, machine=machine, ctas_per_sm=resident
    ).report


def predict(
    number: str,
    head_dim: int,
    causal: bool,
    seqlen: int,
    batch: int | None = None,
    heads: int | None = None,
    clock_ghz: float | None = None,
    machine: Machine = HOPPER,
) -> Prediction:
    """TFLOP/s for self-attention of this shape; batch and heads default to the paper's 16k tokens and hidden size 2048."""
    batch = batch or max(TOKENS // seqlen, 1)
    heads = heads or max(HIDDEN // head_dim, 1)
    clock = clock_ghz or machine.clock_ghz
    c = cost(number, head_dim, causal, machine, seqlen if simulated.rung(number).persistent else None)
    persistent = simulated.rung(number).persistent
    m_blocks = -(-seqlen // c.config.tile_m)
    blocks = [c.config.key_blocks(m, seqlen, seqlen) for m in range(m_blocks)]
    if persistent:
        shares = (parts.walk(m_blocks, heads * batch, causal, cta, machine.sms) for cta in range(machine.sms))
        longest = max(c.cta + sum(c.tile + blocks[m] * c.block for m, _ in mine) for mine in shares)
    else:
        sms = [0.0] * machine.sms
        for n in (n for n in sorted(blocks, reverse=True) for _ in range(batch * heads)):
            heapq.heapreplace(sms, sms[0] + c.cta + c.tile + n * c.block)
        longest = max(sms)
    flops = 4.0 * seqlen**2 * head_dim * heads * batch * (0.5 if causal else 1.0)
    work = sum(blocks) * batch * heads * c.bound_cycles / machine.sms
    return Prediction(flops / longest * clock * 1e-3, flops / work * clock * 1e-3, c.bound, clock)


@dataclass(frozen=True)
class Comparison:
    """A measured row of a rung, the prediction for its shape and clock, and their ratio (predicted / measured)."""

    rung: str
    row: results.Row
    prediction: Prediction

    @property
    def ratio(self) -> float:
        return self.prediction.tflops / self.row.tflops


def compare(run: results.Run | None, machine: Machine = HOPPER) -> list[Comparison]:
    """Every measured forward row of a rung that has a simulated kernel, beside its prediction; the library is rung 8."""
    if run is None:
        return []
    machine = machine.with_(sms=run.sms) if run.sms else machine
    found = []
    for row in run.select(direction="fwd"):
        rung = LIBRARY[1] if row.kernel == LIBRARY[0] else row.rung
        if rung not in simulated.RUNGS or row.tflops is None or (row.dtype == "fp8") != simulated.rung(rung).fp8:
            continue
        clock = row.sm_mhz / 1000 if row.sm_mhz else None
        try:
            prediction = predict(rung, row.head_dim, row.causal, row.seqlen, row.batch, row.heads, clock, machine)
        except ValueError:  # a head dim that the simulated rung refuses
            continue
        found.append(Comparison(rung, row, prediction))
    return found


def table(run: results.Run | None) -> str:
    """The comparison as Markdown, worst and median error below; says so when no row is stored."""
    found = compare(run)
    if not found:
        return "No measured row of a simulated rung is stored yet: `fa3 bench` on a Hopper stores them, and this table fills itself."
    lines = [
        "| rung | shape | MHz | measured | predicted | predicted / measured | bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in found:
        mhz = f"{c.row.sm_mhz:.0f}" if c.row.sm_mhz else f"{c.prediction.clock_ghz * 1000:.0f} (assumed)"
        lines.append(f"| {c.rung} | {c.row.shape} | {mhz} | {c.row.tflops:.0f} | {c.prediction.tflops:.0f} | {c.ratio:.2f} | {c.prediction.bound} |")  # fmt: skip
    for what, chosen in (
        *((f"rung {number}", [c for c in found if c.rung == number]) for number in simulated.RUNGS),
        (f"all rows of {run.gpu}, {run.date}", found),
    ):
        if chosen:
            errors, ratios = [abs(c.ratio - 1) for c in chosen], [c.ratio for c in chosen]
            lines.append(
                f"\n{what}: {len(chosen)} rows, predicted / measured {np.median(ratios):.2f} in the median ({min(ratios):.2f} to {max(ratios):.2f}), off by {np.median(errors):.0%} in the median, {max(errors):.0%} at worst"
            )
    return "\n".join(lines)
