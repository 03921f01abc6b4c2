"""What it costs to make FP8 operands: quantisation, rotation and V's transpose, beside a copy in the same run.

    python -m bench.quantize                 # on a Hopper, about two minutes
    python -m bench.quantize --dry-run       # what would be measured, and the bytes; no GPU

Every kernel gets a bf16 tensor of 16k tokens and hidden size 2048 (V's transpose: FP8), and is checked against PyTorch on a
CPU first. Rows go to `bench/results/experiments_quantize_*.json`; read them with `fa3_course.results.experiments("quantize")`, and
their bytes per second with `bench.quantize.bandwidth(row)`.
"""

import argparse
import random
import shlex
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from bench import card, timing
from bench.cases import HEAD_DIMS, TOKENS, Attention, paper
from fa3_course import results
from fa3_course.results import Row, Run
from fa3_lib.quantize import dequantize, hadamard, quantize, rotation_signs, transpose_v

SOURCE = ("bench/quantize.py", "fa3_lib/quantize.py", "fa3_lib/quantize_triton.py")
SEED = 7  # of the signs
# a rotated bf16 number is rounded to 8 bits: e4m3's error is 2.6 % of normal numbers, of bf16 0.2 %
ERROR_LIMITS = {"fp8": 4e-2, "bf16": 4e-3}


@dataclass(frozen=True)
class Op:
    """One bar.

    Args:
        name: of the row.
        bytes_per_element: of x that must pass through memory, once for each pass: reads and writes.
        dtype: of the input.
        make: (head_dim, device) -> the call, which takes x.
        back: (result, head_dim) -> what the result stands for in fp64, to be compared with x; None where `want` says it.
        want: (x on the CPU) -> the result itself, equal to the last bit.
    """

    name: str
    bytes_per_element: int
    make: Callable
    dtype: str = "bf16"
    back: Callable | None = None
    want: Callable | None = None


def block_rows(head_dim: int) -> int:
    """Rows of a block, as a key tile of an FP8 kernel has them: 128, above head dim 128 it is 64."""
    return 128 if head_dim <= 128 else 64


def _signs(head_dim: int, device) -> torch.Tensor:
    return rotation_signs(head_dim, SEED, device)


def _quantizer(granularity: str, rotated: bool = False, given: bool = False) -> Callable:
    def make(head_dim: int, device) -> Callable:
        options: dict = {"granularity": granularity}
        if granularity == "block":
            options["block"] = block_rows(head_dim)
        if rotated:
            options["signs"] = _signs(head_dim, device)
        if given:
            options["descale"] = torch.full((1, 1), 0.0125, device=device)  # N(0, 1) ends far below 448 times this
        return lambda x: quantize(x, **options)

    return make


def _rotator(head_dim: int, device) -> Callable:
    signs = _signs(head_dim, device)
    return lambda x: hadamard(x, signs)


def _unrotated(y: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undoes a rotation: the transform is its own inverse, the signs come last."""
    y = hadamard(y.float().cpu(), torch.ones(head_dim))
    return y.double() * _signs(head_dim, "cpu").double()


def _back(granularity: str, rotated: bool = False) -> Callable:
    def back(result, head_dim: int) -> torch.Tensor:
        x = dequantize(*(t.cpu() for t in result), block_rows(head_dim) if granularity == "block" else None)
        return _unrotated(x, head_dim) if rotated else x.double()

    return back


def ops() -> list[Op]:
    """Every bar: the yardstick first."""
    found = [Op("copy", 4, lambda d, device: torch.clone, want=torch.clone)]
    # scales of a head need a pass for the maximum, one of 2 bytes; those of a block are found by who rounds it
    for granularity, size in (("tensor", 5), ("head", 5), ("block", 3)):
        for rotated in (False, True):
            name = f"quantize: {granularity}{', rotated' if rotated else ''}"
            found.append(Op(name, size, _quantizer(granularity, rotated), back=_back(granularity, rotated)))
    given = _quantizer("head", given=True)
    found.append(Op("quantize: head, given scales", 3, given, back=_back("head")))
    found.append(Op("hadamard", 4, _rotator, back=_unrotated))
    found.append(Op("transpose_v", 2, lambda d, device: transpose_v, dtype="fp8", want=transpose_v))
    return found


def bandwidth(row: Row) -> float:
    """Gigabytes (1e9) per second of a measured row: the bytes that must move, over the median time."""
    size = {op.name: op.bytes_per_element for op in ops()}[row.kernel]
    return size * row.batch * row.seqlen * row.heads * row.head_dim / row.ms / 1e6


def draw(op: Op, case: Attention, seed: int, device: str = "cuda") -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    shape = (case.batch, case.seqlen, case.heads, case.head_dim)
    x = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    return x.to(torch.float8_e4m3fn) if op.dtype == "fp8" else x


def check(op: Op, case: Attention, seed: int, device: str = "cuda") -> float:
    """The relative error of one call on a small ragged case; ValueError if it is wrong."""
    case = replace(case, batch=2, seqlen=301, heads=3)
    x = draw(op, case, seed, device)
    call = op.make(case.head_dim, device)
    call(x)  # compiles; the call that counts then finds poisoned memory
    poison = [torch.full((x.numel() * size,), 0xFF, dtype=torch.uint8, device=device) for size in (1, 2)]
    del poison
    result = call(x)
    if op.want is not None:
        want = op.want(x.cpu())
        if not torch.equal(result.cpu().view(torch.uint8), want.view(torch.uint8)):
            raise ValueError(f"wrong: {op.name} differs from PyTorch on a CPU on {case}")
        return 0.0
    truth = x.cpu().double()
    error = float((op.back(result, case.head_dim) - truth).norm() / truth.norm())
    limit = ERROR_LIMITS["bf16" if op.name == "hadamard" else "fp8"]
    if not error <= limit:  # NaN is wrong too
        raise ValueError(f"wrong: relative error {error:.2e} of {op.name} on {case}, limit {limit:.0e}")
    return error


def row_of(op: Op, case: Attention, **values) -> Row:
    return Row(kernel=op.name, dtype=op.dtype, source=SOURCE, source_hash=results.source_hash(SOURCE),
               **case.fields, **values)  # fmt: skip


def measure(
    case: Attention, seed: int, l2_bytes: int, sampler: card.Sampler, rounds: int, burst_ms: float
) -> list[Row]:
    """Rows of one case: every kernel is checked, then all take turns."""
    rows, timers, errors = [], {}, {}
    for op in ops():
        try:
            errors[op] = check(op, case, seed)
            first = draw(op, case, seed)
            count = timing.input_sets(first.numel() * first.itemsize, l2_bytes)
            sets = [(first,), *((draw(op, case, seed + 1 + i),) for i in range(count - 1))]
            call, held = op.make(case.head_dim, "cuda"), deque(maxlen=count)
            # results are held for a while, so that the next ones do not find their memory in L2
            timers[op] = timing.GraphTimer(lambda x, call=call, held=held: held.append(call(x)), sets)
        except Exception as error:  # one kernel that fails must not hide the others
            rows.append(row_of(op, case, skipped=f"{type(error).__name__}: {error}".splitlines()[0][:200]))
    samples: dict[Op, list[float]] = {op: [] for op in timers}
    for turn in range(rounds):
        for op in timing.rotated(list(timers), turn):
            with sampler.during(op.name):
                samples[op] += timers[op].burst(burst_ms)
    for op, timer in timers.items():
        low, mid, high = timing.quartiles(samples[op])
        mhz, watts = sampler.take(op.name)
        figures = {"ms": mid, "ms_p25": low, "ms_p75": high, "error": errors[op]}
        short = {name: float(f"{value:.6g}") for name, value in figures.items()}
        rows.append(row_of(op, case, **short, sm_mhz=mhz, watts=watts, timer=timer.name))
    return rows


def report(rows: list[Row]) -> str:
    """A line a row: bytes per second, and their share of the copy's."""
    copies = [bandwidth(row) for row in rows if row.measured and row.kernel == "copy"]
    lines = []
    for row in rows:
        text = row.skipped
        if row.measured:
            share = f" ({bandwidth(row) / copies[0]:.0%} of copy)" if copies else ""
            text = f"{row.ms * 1e3:7.1f} us {bandwidth(row):6.0f} GB/s{share}"
        lines.append(f"d{row.head_dim:<4} {row.kernel:<32} {text}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    typed = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m bench.quantize", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="results file; by default named after the time")
    parser.add_argument("--seqlen", type=int, default=TOKENS, help="of the shapes (16k tokens in all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst-ms", type=float, default=20.0)
    parser.add_argument("--seed", type=int, help="of the inputs; drawn anew if left out, and stored in the run")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured; needs no GPU")
    args = parser.parse_args(typed)
    cases = [paper(d, False, args.seqlen) for d in HEAD_DIMS]
    if args.dry_run:
        for case in cases:
            elements = case.batch * case.seqlen * case.heads * case.head_dim
            for op in ops():
                print(f"{case!s:<28} {op.name:<32} {op.bytes_per_element * elements / 1e6:6.0f} MB")
        return 0
    if not torch.cuda.is_available():
        parser.error("needs a GPU (`fa3 doctor` says what is missing); --dry-run lists what would be measured")
    now = datetime.now(UTC)
    seed = random.randrange(2**31) if args.seed is None else args.seed
    out = args.out or results.RESULTS / f"{results.EXPERIMENTS}quantize_{now:%Y%m%dT%H%M%SZ}.json"
    commit, dirty = card.git_state()
    run = Run(
        date=f"{now:%Y-%m-%dT%H:%M:%SZ}", command=shlex.join(["python", "-m", "bench.quantize", *typed]),
        commit=commit, dirty=dirty, grid="quantize", dtype="bf16", seed=seed, **card.machine(),
    )  # fmt: skip
    with card.Sampler(card.open_nvml()) as sampler, torch.no_grad():
        for case in cases:
            rows = measure(case, seed, run.l2_bytes or 0, sampler, args.rounds, args.burst_ms)
            run = replace(run, rows=(*run.rows, *rows))
            results.write(out, run)
            print(report(rows), flush=True)
    results.write(out, replace(run, finished=True))
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
