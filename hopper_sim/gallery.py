"""A correct kernel, and everything that one wrong line makes of it.

The kernel is a pipelined matrix product C = scale * A B^T: a producer warp fills a ring by TMA, two warpgroups scale their
half of A in registers and multiply, and one of them stores both halves. `python -m hopper_sim.gallery` breaks it in every
way of `FAULTS` and prints the verdicts; `--write` puts the list into this package's README.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hopper_sim.faults import Fault, Kind
from hopper_sim.inject import patched
from hopper_sim.machine import HOPPER, Machine
from hopper_sim.memory import GlobalTensor, SharedTile
from hopper_sim.role import Role
from hopper_sim.sm import SM, Report, launch

TILE_M, TILE_N, TILE_K = 128, 64, 64
CONSUMERS = ("consumer0", "consumer1")


@dataclass(frozen=True)
class Problem:
    """A (m, k) and B (n, k) of format `dtype`; C (m, n) f16."""

    a: GlobalTensor
    b: GlobalTensor
    c: GlobalTensor
    scale: float

    @property
    def k_tiles(self) -> int:
        return -(-self.a.shape[1] // TILE_K)


async def producer(
    warp: Role, p: Problem, row: int, ring_a: SharedTile, ring_b: SharedTile, full: list, empty: list
) -> None:
    await warp.setmaxnreg(24)
    stages = len(full)
    for i in range(p.k_tiles):
        slot, phase = i % stages, i // stages % 2
        await empty[slot].wait(phase ^ 1)
        full[slot].arrive_expect_tx(ring_a[slot].nbytes + ring_b[slot].nbytes)
        warp.tma_load(ring_a[slot], p.a, (row, TILE_K * i), (TILE_M, TILE_K), full[slot])
        warp.tma_load(ring_b[slot], p.b, (0, TILE_K * i), (TILE_N, TILE_K), full[slot])


async def consumer(
    wg: Role,
    me: int,
    p: Problem,
    row: int,
    ring_a: SharedTile,
    ring_b: SharedTile,
    staged: SharedTile,
    full: list,
    empty: list,
    both,
) -> None:
    await wg.setmaxnreg(240)
    stages, mine = len(full), slice(64 * me, 64 * me + 64)
    acc = wg.registers("acc", (64, TILE_N))
    a = wg.registers("a", (64, TILE_K), p.a.dtype)
    acc.write(0.0)
    for i in range(p.k_tiles):
        slot, phase = i % stages, i // stages % 2
        await full[slot].wait(phase)
        values = await wg.load_shared(ring_a[slot][mine])
        await wg.spend("scale", fma=a.shape[0] * a.shape[1])
        a.write(p.scale * values)
        wg.wgmma_fence()
        wg.wgmma(acc, a, ring_b[slot].T)
        wg.commit()
        await wg.wait_group(0)
        empty[slot].arrive(4)
    await wg.store_shared(staged[mine], acc.read())
    wg.fence_async_proxy()
    if me == 1:
        both.arrive()
    else:
        await both.sync()
        wg.tma_store(staged, p.c, (row, 0), (TILE_M, TILE_N))
        wg.commit_store()
        await wg.wait_store(0)


def build(
    sm: SM, row: int, p: Problem, stages: int, producer: Callable = producer, consumer: Callable = consumer
) -> None:
    """One CTA: rows row .. row + 127 of C."""
    ring_a = sm.shared("A", (stages, TILE_M, TILE_K), p.a.dtype)
    ring_b = sm.shared("B", (stages, TILE_N, TILE_K), p.b.dtype)
    staged = sm.shared("C", (TILE_M, TILE_N), p.c.dtype)
    full = sm.mbarriers("full", stages, arrivals=1, by=("producer",))
    empty = sm.mbarriers("empty", stages, arrivals=8, by=CONSUMERS)
    both = sm.named_barrier(1, threads=256, name="BOTH_STAGED", by=CONSUMERS)
    sm.role("producer", producer, p, row, ring_a, ring_b, full, empty, threads=32)
    for me, name in enumerate(CONSUMERS):
        sm.role(name, consumer, me, p, row, ring_a, ring_b, staged, full, empty, both)


def problem(seed: int = 0, m: int = 256, k: int = 384, dtype: str = "f16") -> Problem:
    """Random A and B. m and k need not be multiples of the tiles."""
    rng = np.random.default_rng(seed)
    a = GlobalTensor.input("A", rng.standard_normal((m, k)), dtype)
    b = GlobalTensor.input("B", rng.standard_normal((TILE_N, k)), dtype)
    return Problem(a, b, GlobalTensor.output("C", (m, TILE_N), "f16"), 0.125)


def run(
    p: Problem, seed: int = 0, stages: int = 2, machine: Machine = HOPPER, build: Callable = build, **roles: Callable
) -> Report:
    """The product, with some functions replaced."""
    grid = [
        (
            row,
            p,
            stages,
            *(roles.get(name, default) for name, default in (("producer", producer), ("consumer", consumer))),
        )
        for row in range(0, p.a.shape[0], TILE_M)
    ]
    return launch(build, grid, outputs=(p.c,), machine=machine, seed=seed)


@dataclass(frozen=True)
class Injected:
    """One wrong line: in `where`, `old` becomes `new`; the verdict must be `kind`."""

    title: str
    where: str  # "producer", "consumer" or "build"
    old: str
    new: str
    kind: Kind
    dtype: str = "f16"

    def run(self, seed: int = 0, machine: Machine = HOPPER) -> Fault | None:
        """The verdict on the broken kernel; None when it got away."""
        function = {"producer": producer, "consumer": consumer, "build": build}[self.where]
        try:
            run(
                problem(seed, dtype=self.dtype),
                seed,
                machine=machine,
                **{self.where: patched(function, self.old, self.new)},
            )
        except Fault as fault:
            return fault
        return None


FAULTS = (
    Injected("no wait for the data", "consumer", "await full[slot].wait(phase)", "pass", Kind.READ_BEFORE_FULL),
    Injected("the wait waits for the last round's phase", "consumer", "await full[slot].wait(phase)", "await full[slot].wait(phase ^ 1)", Kind.WRONG_PHASE),
    Injected("the phase bit never flips", "consumer", "slot, phase = i % stages, i // stages % 2", "slot, phase = i % stages, 0", Kind.WRONG_PHASE),
    Injected("no wait for a free slot", "producer", "await empty[slot].wait(phase ^ 1)", "pass", Kind.OVERWRITE_BEFORE_FREE),
    Injected("the slot is released before the product is done", "consumer", "        await wg.wait_group(0)\n        empty[slot].arrive(4)", "        empty[slot].arrive(4)\n        await wg.wait_group(0)", Kind.OVERWRITE_BEFORE_FREE),
    Injected("the first wait of the producer takes phase 0", "producer", "wait(phase ^ 1)", "wait(phase)", Kind.DEADLOCK),
    Injected("a slot is never released", "consumer", "empty[slot].arrive(4)", "pass", Kind.DEADLOCK),
    Injected("one warp in four releases the slot", "consumer", "empty[slot].arrive(4)", "empty[slot].arrive(1)", Kind.DEADLOCK),
    Injected("expect_tx forgets B", "producer", "arrive_expect_tx(ring_a[slot].nbytes + ring_b[slot].nbytes)", "arrive_expect_tx(ring_a[slot].nbytes)", Kind.WRONG_BYTES),
    Injected("expect_tx counts B twice", "producer", "+ ring_b[slot].nbytes)", "+ 2 * ring_b[slot].nbytes)", Kind.WRONG_BYTES),
    Injected("the producer arrives twice", "producer", "        warp.tma_load(ring_a", "        full[slot].arrive()\n        warp.tma_load(ring_a", Kind.TOO_MANY_ARRIVALS),
    Injected("the empty barrier counts one warpgroup", "build", "arrivals=8", "arrivals=4", Kind.TOO_MANY_ARRIVALS),
    Injected("no proxy fence before the store", "consumer", "wg.fence_async_proxy()", "pass", Kind.MISSING_PROXY_FENCE),
    Injected("no wgmma fence", "consumer", "wg.wgmma_fence()", "pass", Kind.MISSING_WGMMA_FENCE),
    Injected("the accumulator is read without a wait", "consumer", "        await wg.wait_group(0)\n        empty[slot].arrive(4)\n    await", "        empty[slot].arrive(4) if i + 1 < p.k_tiles and not await wg.wait_group(0) else None\n    await", Kind.ACCUMULATOR_IN_FLIGHT),
    Injected("no commit", "consumer", "wg.commit()", "pass", Kind.MISSING_COMMIT),
    Injected("the register operand is rewritten too early", "consumer", "        await wg.wait_group(0)\n        empty[slot].arrive(4)", "        if slot == stages - 1:\n            await wg.wait_group(0)\n            for done in empty:\n                done.arrive(4)", Kind.OPERAND_IN_FLIGHT),
    Injected("one side never arrives", "consumer", "both.arrive()", "pass", Kind.UNBALANCED_BARRIER),
    Injected("one side arrives twice", "consumer", "both.arrive()", "both.arrive(), both.arrive()", Kind.UNBALANCED_BARRIER),
    Injected("one id, two meanings", "build", "    sm.role(\"producer\"", "    sm.named_barrier(1, threads=128, name=\"SCRATCH\")\n    sm.role(\"producer\"", Kind.BARRIER_ID),
    Injected("no barrier between the halves", "consumer", "await both.sync()", "pass", Kind.RACE),
    Injected("the consumers do one tile more", "consumer", "range(p.k_tiles)", "range(p.k_tiles + 1)", Kind.ROLES_DISAGREE),
    Injected("the consumers do one tile fewer", "consumer", "range(p.k_tiles)", "range(p.k_tiles - 1)", Kind.ROLES_DISAGREE),
    Injected("one consumer does one tile fewer", "consumer", "range(p.k_tiles)", "range(p.k_tiles - me)", Kind.ROLES_DISAGREE),
    Injected("B is never loaded", "producer", "        warp.tma_load(ring_b[slot], p.b, (0, TILE_K * i), (TILE_N, TILE_K), full[slot])", "        full[slot].expect_tx(0)", Kind.WRONG_BYTES),
    Injected("B is neither expected nor loaded", "producer", "        full[slot].arrive_expect_tx(ring_a[slot].nbytes + ring_b[slot].nbytes)\n        warp.tma_load(ring_a[slot], p.a, (row, TILE_K * i), (TILE_M, TILE_K), full[slot])\n        warp.tma_load(ring_b[slot], p.b, (0, TILE_K * i), (TILE_N, TILE_K), full[slot])", "        full[slot].arrive_expect_tx(ring_a[slot].nbytes)\n        warp.tma_load(ring_a[slot], p.a, (row, TILE_K * i), (TILE_M, TILE_K), full[slot])", Kind.NEVER_WRITTEN),
    Injected("only one half of C is stored", "consumer", "wg.tma_store(staged, p.c, (row, 0), (TILE_M, TILE_N))", "wg.tma_store(staged[0:64], p.c, (row, 0), (64, TILE_N))", Kind.NEVER_WRITTEN),
    Injected("every CTA stores to row 0", "consumer", "p.c, (row, 0)", "p.c, (0, 0)", Kind.WRITTEN_TWICE),
    Injected("the role returns while its store is under way", "consumer", "await wg.wait_store(0)", "pass", Kind.RETURNED_EARLY),
    Injected("setmaxnreg asks for more than there is", "consumer", "wg.setmaxnreg(240)", "wg.setmaxnreg(256)", Kind.REGISTER_BUDGET),
    Injected("too few registers for the tiles", "consumer", "wg.setmaxnreg(240)", "wg.setmaxnreg(64)", Kind.REGISTER_BUDGET),
    Injected("ten stages", "build", "    ring_a =", "    stages = 10\n    ring_a =", Kind.SMEM_BUDGET),
    Injected("a box of twelve bytes", "producer", "warp.tma_load(ring_b[slot], p.b, (0, TILE_K * i), (TILE_N, TILE_K), full[slot])", "warp.tma_load(ring_b[slot][0:6], p.b, (0, TILE_K * i), (64, 6), full[slot])", Kind.MISALIGNED_BOX),
    Injected("fp8 with B as it lies for a plain product", "consumer", "ring_b[slot].T", "ring_b[slot]", Kind.NOT_K_MAJOR, "e4m3"),
    Injected("a forgotten await", "consumer", "await full[slot].wait(phase)", "full[slot].wait(phase)", Kind.BAD_USE),
)  # fmt: skip


def listing() -> str:
    """Every fault as Markdown: the changed line and the verdict's own words."""
    parts = []
    for number, fault in enumerate(FAULTS, 1):
        verdict = fault.run()
        if verdict is None or verdict.kind != fault.kind:
            raise SystemExit(f"{fault.title}: expected {fault.kind}, got {verdict}")
        old = "\n".join(f"- {line}" for line in fault.old.split("\n"))
        new = "\n".join(f"+ {line}" for line in fault.new.split("\n"))
        parts.append(
            f"**{number}. {fault.title}**: {verdict.kind}\n\n```diff\n{old}\n{new}\n```\n\n```\n{verdict}\n```\n"
        )
    return "\n".join(parts)


def main() -> None:
    """Prints the list, or with --write puts it between the markers of README.md."""
    text = listing()
    if sys.argv[1:] == ["--write"]:
        readme = Path(__file__).with_name("README.md")
        begin, end = "<!-- gallery: begin -->", "<!-- gallery: end -->"
        page = re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n\n{text}\n{end}", readme.read_text(), flags=re.S)
        readme.write_text(page)
    elif not sys.argv[1:]:
        print(text)
    else:
        raise SystemExit("usage: python -m hopper_sim.gallery [--write]")


if __name__ == "__main__":
    main()
