"""The tensor core: D (+)= A B for one warpgroup, 64 rows, asynchronous, fp32 accumulator."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hopper_sim import formats
from hopper_sim.clock import when_all
from hopper_sim.faults import Fault, Kind, here, misuse
from hopper_sim.memory import RegisterTile, SharedTile

if TYPE_CHECKING:
    from hopper_sim.role import Role

ROWS = 64
SHORT_ACCUMULATOR_BITS = 13  # fraction bits that the 8-bit formats keep; see `short_product`
SIXTEEN_BIT, EIGHT_BIT = ("f16", "bf16"), ("e4m3", "e5m2")


def short_product(acc: np.ndarray, a: np.ndarray, b: np.ndarray, bits: int = SHORT_ACCUMULATOR_BITS) -> np.ndarray:
    """acc + a @ b with the short accumulator of the 8-bit formats.

    Per k32 step, the accumulator and the 32 products are cut (towards zero) `bits` fraction bits below the leading bit of
    the largest of them, then added. So a sum of equal positive products stops growing once a product lies below its last
    bit: with P = 2**8 and V = 1 at 2**22, after 16,384 keys, as FA3's FP8 kernel does on an H200.

    Args:
        acc: (m, n) float32. a: (m, k). b: (k, n); k is a multiple of 32.
    """
    acc = acc.astype(np.float64)
    for k in range(0, a.shape[1], 32):
        products = a[:, k : k + 32, None].astype(np.float64) * b[None, k : k + 32, :]  # (m, 32, n)
        largest = np.maximum(np.abs(products).max(axis=1), np.abs(acc))
        _, exponent = np.frexp(largest)  # largest = f * 2**exponent with 0.5 <= f < 1
        unit = np.ldexp(1.0, exponent - 1 - bits)
        acc = (np.trunc(acc / unit) + np.trunc(products / unit[:, None]).sum(axis=1)) * unit
    return acc.astype(np.float32)


def issue(
    role: "Role",
    acc: RegisterTile,
    a: SharedTile | RegisterTile,
    b: SharedTile,
    accumulate: bool,
    label: str,
    short_accumulator: bool,
) -> None:
    """See `Role.wgmma`."""
    m, n, k = _check_shapes(acc, a, b, short_accumulator)
    _check_registers(role, acc, a, accumulate)
    site, group = here(), role.mma.add(acc.name, here())

    reads = [b] if isinstance(a, RegisterTile) else [a, b]
    for tile in reads:
        role.sm.memory.access(tile.access(role, False, "WGMMA", ("wgmma", role.name), group, site), role.clock)
    acc.writer_group, acc.written, acc.last_wgmma = group, True, site
    if isinstance(a, RegisterTile):
        a.reader_group, a.last_wgmma = group, site

    eb = formats.element_bytes(b.dtype)
    machine, sm = role.sm.machine, role.sm
    rate = machine.tensor_flops_16bit if eb == 2 else machine.tensor_flops_8bit
    flops = 2 * m * n * k
    sm.hardware.flops += flops
    a_values = a.peek().copy() if isinstance(a, RegisterTile) else None

    def finished() -> None:
        left = a_values if a_values is not None else a.peek()
        left = left.T if isinstance(a, SharedTile) and a.transposed else left
        right = b.peek().T if b.transposed else b.peek()
        start = acc.peek() if accumulate else np.zeros(acc.shape, dtype=np.float32)
        acc.poke(short_product(start, left, right) if short_accumulator else start + left @ right)

    smem_bytes = sum(tile.nbytes for tile in reads)
    text = label or f"{acc.name} {'+=' if accumulate else '='} {a.name} {b.name}"
    steps = k // (16 if eb == 2 else 32)
    _queue(role, group, steps, flops / rate / steps, smem_bytes / machine.smem_bandwidth, text, finished)


def _queue(
    role: "Role",
    group: int,
    steps: int,
    step_cycles: float,
    smem_cycles: float,
    label: str,
    finished: Callable[[], None],
) -> None:
    """Issues one k-step after the other into the tensor core's queue; the WGMMAs of a role finish in the order of their issue.

    Two warpgroups that issue at the same time interleave; one that starts clearly earlier is served first.
    """
    sm, gap = role.sm, role.sm.machine.wgmma_issue

    def served() -> None:
        role.mma.last_finish = max(role.mma.last_finish, sm.clock.now + sm.machine.wgmma_latency)
        sm.clock.after(role.mma.last_finish - sm.clock.now, complete)

    def complete() -> None:
        finished()
        role.mma.done(group)

    every = when_all(steps + 1, served)

    def issue_step() -> None:
        sm.units["tensor core"].submit(role.lane, step_cycles, label, every)

    sm.units["shared memory"].submit(role.lane, smem_cycles, label, every)
    start = max(sm.clock.now, role.issued_until)
    for step in range(steps):
        sm.clock.after(start + step * gap - sm.clock.now, issue_step)
    role.issued_until = start + steps * gap


def _check_shapes(
    acc: RegisterTile, a: SharedTile | RegisterTile, b: SharedTile, short_accumulator: bool
) -> tuple[int, int, int]:
    """m, n, k; raises `Fault` with the rule that is broken."""
    if not isinstance(b, SharedTile):
        raise misuse(f"B ({getattr(b, 'name', b)}) must lie in shared memory; only A may be a register tile")
    if acc.dtype != "f32":
        raise misuse(f"the accumulator {acc.name} must be f32, not {acc.dtype}")
    if a.dtype != b.dtype or a.dtype not in SIXTEEN_BIT + EIGHT_BIT:
        raise misuse(
            f"A ({a.name}: {a.dtype}) and B ({b.name}: {b.dtype}) must share one format of {SIXTEEN_BIT + EIGHT_BIT}"
        )
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise misuse(f"A {a.name} {a.shape} and B {b.name} {b.shape} must have two dimensions")
    a_shape = a.shape[::-1] if isinstance(a, SharedTile) and a.transposed else a.shape
    b_shape = b.shape[::-1] if b.transposed else b.shape
    eight = a.dtype in EIGHT_BIT
    if eight and not b.transposed:
        text = f"B = {b.name} {b.shape} has its contraction dimension outermost; for {b.dtype} it must be stored (n, k), k contiguous, and given as .T: transpose it first"
        raise Fault(Kind.NOT_K_MAJOR, text, here())
    if eight and isinstance(a, SharedTile) and a.transposed:
        raise Fault(Kind.NOT_K_MAJOR, f"A = {a.name}.T: for {a.dtype} A must be stored (m, k), k contiguous", here())
    if short_accumulator and not eight:
        raise misuse(f"the short accumulator is a property of the 8-bit formats; {a.dtype} accumulates in full fp32")
    (m, k), (k_b, n), step = a_shape, b_shape, 32 if eight else 16
    rules = (
        (m == ROWS, f"a warpgroup multiplies {ROWS} rows, A has {m}"),
        (k == k_b, f"A is (m, k) = {a_shape}, B is (k, n) = {b_shape}: the k differ"),
        (acc.shape == (m, n), f"the accumulator is {acc.shape}, the product {(m, n)}"),
        (n % 8 == 0 and 8 <= n <= 256, f"n = {n} must be a multiple of 8 from 8 to 256"),
        (k % step == 0, f"k = {k} must be a multiple of {step} for {a.dtype}"),
    )
    for ok, rule in rules:
        if not ok:
            raise misuse(f"wgmma {acc.name}, {a.name}, {b.name}: {rule}")
    return m, n, k


def _check_registers(role: "Role", acc: RegisterTile, a: SharedTile | RegisterTile, accumulate: bool) -> None:
    """Ownership, fences and poison of the register operands."""
    registers = [acc] + ([a] if isinstance(a, RegisterTile) else [])
    for tile in registers:
        if tile.role is not role:
            raise misuse(f"{role.name} uses {tile.name}, which lies in the registers of {tile.role.name}")
    if accumulate and not acc.written:
        raise Fault(
            Kind.NEVER_WRITTEN,
            f"{role.name} accumulates into {acc.name}, which nothing has written: the first product needs accumulate=False",
            here(),
        )
    if isinstance(a, RegisterTile) and not a.written:
        raise Fault(Kind.NEVER_WRITTEN, f"{role.name} multiplies with {a.name}, which nothing has written", here())
    if isinstance(a, RegisterTile) and a.writer_group > role.mma.waited:
        raise Fault(
            Kind.ACCUMULATOR_IN_FLIGHT, f"{role.name} uses {a.name} as an operand while a WGMMA still writes it", here()
        )
    for tile in registers:
        if tile.touched:
            text = f"{role.name} gives {tile.name} to a WGMMA after ordinary instructions used it, without wgmma_fence() between: the tensor core may see old registers"
            raise Fault(Kind.MISSING_WGMMA_FENCE, text, here())
