"""Variants of chapter 2's kernels, measured in one run: what stages, tiles, registers, arrivals, Q and epilogue cost.

    python -m bench.experiments_02                 # on a Hopper, about four minutes
    python -m bench.experiments_02 --dry-run       # compiles every variant and reports on its machine code; no GPU

Rows go to `bench/results/experiments_02_*.json`; a row's `kernel` is `experiment: variant`, and the lesson reads them with
`fa3_course.results.experiments("02")`.
"""

import argparse
import random
import shlex
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import cutlass
import cutlass.cute as cute
import cutlass.cute.nvgpu as nvgpu
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
import torch
from cutlass import Boolean, Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from bench import card, kernels, timing
from bench.cases import GEMM, paper
from bench.kernels import Kernel
from bench.worker import reason, row_of
from fa3_course import device_softmax as softmax
from fa3_course import results, rung_host, rungs
from fa3_course.results import Row, Run
from fa3_lib.config import SMEM_LIMIT, WARPGROUP, WGMMA_M, ForwardConfig

SEQLEN = 8192
RUNG3, RUNG4, RUNG5 = (rungs.find(number).module() for number in "345")
RING = {"3": RUNG3, "4": RUNG4, "5": RUNG5}


@dataclass(frozen=True)
class Variant:
    """One bar of one experiment: a kernel class, its configuration, and the rung whose file it comes from."""

    experiment: str
    name: str
    rung: str
    config: ForwardConfig
    kernel: type

    @property
    def label(self) -> str:
        return f"{self.experiment}: {self.name}"

    def candidate(self, dtype: str) -> Kernel:
        """The variant as `bench.kernels` wants it."""

        def call(q, k, v, causal):
            return rung_host.run(self.kernel, replace(self.config, causal=causal), q, k, v, causal=causal)[0]

        source = (*rungs.find(self.rung).sources(), "bench/experiments_02.py")
        return Kernel(self.label, dtype, lambda: call, rung=self.rung, source=source)


# --- kernels that differ from a rung in one place ----------------------------------------------------------------------


class Alone(RUNG3.Attention):
    """Rung 3 with more shared memory than two CTAs of an SM could have."""

    min_smem = SMEM_LIMIT // 2 + 1024


class Split40(ForwardConfig):
    """24/240 is the usual split; this one leaves the producer 40, as kernels do whose producer computes addresses."""

    producer_registers, consumer_registers = 40, 232


def arriving(threads_per_arrival: int) -> type:
    """Rung 5 whose consumers arrive on "empty" once per so many threads (32 is the rung itself)."""

    class Arriving(RUNG5.Attention):
        @cute.jit
        def make_ring(self, barriers: cute.Pointer, stage_bytes: cutlass.Constexpr, defer_sync: cutlass.Constexpr):
            cfg = self.config
            arrivals = cfg.consumer_warpgroups * WARPGROUP // threads_per_arrival
            ring = pipeline.PipelineTmaAsync.create(
                num_stages=cfg.stages,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, cfg.full_arrivals),
                consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals),
                tx_count=stage_bytes,
                barrier_storage=barriers,
                defer_sync=defer_sync,
            )
            speaks = Boolean(cute.arch.thread_idx()[0] % threads_per_arrival == 0)
            return replace(ring, is_signaling_thread=speaks)

    return Arriving


class QInRegisters(RUNG5.Attention):
    """Rung 5 that reads Q from shared memory once and hands it to WGMMA from registers."""

    def make_mma_qk(self, accumulate: bool) -> cute.TiledMma:
        mma = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32,
            (1, 1, 1), (WGMMA_M, self.config.tile_n), warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        return mma

    @cute.jit
    def q_operand(self, mma_qk, thread, sQ):
        atom = cute.make_copy_atom(nvgpu.warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_A(atom, mma_qk)
        thr = copy.get_slice(thread)
        shape = mma_qk.get_slice(thread).partition_shape_A((WGMMA_M, self.config.head_dim))
        tSrQ = cute.make_rmem_tensor(shape, self.dtype)
        cute.copy(copy, thr.partition_S(sQ), thr.retile(tSrQ))
        return tSrQ


_FILE5 = results.ROOT / rungs.find("5").file

# every thread keeps the third of the register file that it is launched with
NO_HANDOVER = rung_host.edited(
    _FILE5,
    ("            cute.arch.setmaxregister_decrease(cfg.producer_registers)\n", ""),
    ("            cute.arch.setmaxregister_increase(cfg.consumer_registers)\n", ""),
)

# the epilogue below gets O itself instead of TMA's coordinates of it
_PLAIN_O = rung_host.edited(
    _FILE5,
    ("self.kernel(Q, K, V, O, mLSE,", "self.kernel(Q, K, V, O, mO, mLSE,"),
    ("        mLSE: cute.Tensor,  # (b, h, sq)\n", "        plain_O: cute.Tensor,\n        mLSE: cute.Tensor,\n"),
    ("gO = cute.local_tile(mO[", "gO = cute.local_tile(plain_O["),
)


class DirectStores(_PLAIN_O.Attention):
    """Rung 5 whose threads write their elements of O to global memory, two neighbours (4 bytes) at a time.

    For tensors as wide as the configuration's tile.
    """

    @cute.jit
    def epilogue(
        self, mma_pv, tma_O, acc_O, row_max, row_sum, scale_log2, sO, gO, gLSE, thread, first_row, seqlen_q, barrier
    ):  # fmt: skip
        inverse, lse = softmax.finish_rows(row_max, row_sum, scale_log2)
        softmax.scale_rows(acc_O, inverse)
        rO = cute.make_rmem_tensor_like(acc_O, self.dtype)
        rO.store(acc_O.load().to(self.dtype))
        tOgO = mma_pv.get_slice(thread).partition_C(gO)  # ((2, 2, dv / 8), 1, 1): pair, row, group of 8 columns
        for r in cutlass.range_constexpr(softmax.ROWS):
            row = first_row + softmax.row_in_tile(thread, r)
            if row < seqlen_q:
                cute.autovec_copy(rO[(None, r, None), 0, 0], tOgO[(None, r, None), 0, 0])
                if thread % softmax.THREADS_PER_ROW == 0:
                    gLSE[row] = lse[r]


# --- the experiments ---------------------------------------------------------------------------------------------------


class AnyStages(ForwardConfig):
    """A ring of any length; the library's own loop wants a power of two."""

    def validate(self) -> ForwardConfig:
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"shared memory exceeded. {self.budget()}")
        ForwardConfig(**(vars(self) | {"stages": 1})).validate()
        return self


def variants() -> list[Variant]:
    """Every variant, in the order in which the lesson shows them."""
    config3, config5 = (RING[n].make_config(128, False) for n in "35")
    plain5 = RUNG5.Attention

    def as_kind(kind, config, **changes):
        return kind(**(vars(config) | changes))

    found = [
        Variant("occupancy", "rung 3, as many CTAs as fit", "3", config3, RUNG3.Attention),
        Variant("occupancy", "rung 3, one CTA per SM", "3", config3, Alone),
    ]
    for n, tile_n in (("4", 64), ("5", 64), ("5", 128)):
        for stages in (1, 2, 3, 4):
            config = as_kind(AnyStages, RING[n].make_config(128, False), stages=stages, tile_n=tile_n)
            if config.smem_bytes <= SMEM_LIMIT:
                name = f"rung {n}, tile_n {tile_n}, stages {stages}"
                found.append(Variant("stages", name, n, config, RING[n].Attention))
    for tile_n in (32, 64, 80, 96, 112, 128, 144, 160, 176):
        found.append(Variant("tile_n", f"tile_n {tile_n}", "5", replace(config5, tile_n=tile_n), plain5))
    found += [
        Variant("registers", "24/240", "5", config5, plain5),
        Variant("registers", "40/232", "5", as_kind(Split40, config5), plain5),
        Variant("registers", "no setmaxnreg", "5", config5, NO_HANDOVER.Attention),
        Variant("registers", "no setmaxnreg, tile_n 176", "5", replace(config5, tile_n=176), NO_HANDOVER.Attention),
        Variant("arrivals", "every thread", "5", config5, arriving(1)),
        Variant("arrivals", "one per warp", "5", config5, plain5),
        Variant("arrivals", "one per warpgroup", "5", config5, arriving(WARPGROUP)),
        Variant("Q", "read from shared memory", "5", config5, plain5),
        Variant("Q", "kept in registers", "5", config5, QInRegisters),
        Variant("epilogue", "stmatrix and TMA store", "5", config5, plain5),
        Variant("epilogue", "stores from registers", "5", config5, DirectStores),
    ]
    return found


def gemms() -> list[Kernel]:
    """Chapter 2's small GEMM, with A from shared memory and from registers."""
    file = "chapters/02_tma_wgmma/steps/gemm_tile.py"
    module = rungs._module(file)
    return [
        Kernel(
            f"gemm: A from {source}",
            "bf16",
            lambda source=source: lambda a, b: module.matmul(a, b, source),
            direction="gemm",
            source=(file,),
        )
        for source in ("shared", "registers")
    ]


# --- measuring ---------------------------------------------------------------------------------------------------------


def measure(group: list[Kernel], case, seed: int, l2_bytes: int, sampler: card.Sampler, rounds: int, burst_ms: float):
    """Rows of one case: every kernel is checked, then all take turns."""
    count = timing.input_sets(case.bytes("bf16"), l2_bytes)
    sets = [kernels.inputs(case, "bf16", "cuda", seed + 1 + i) for i in range(count)]
    rows: list[Row] = []
    timers: dict[Kernel, tuple] = {}
    for kernel in group:
        try:
            timers[kernel] = timing.GraphTimer(kernel.bind(case), sets), kernels.check(kernel, case, seed)
        except Exception as error:  # one variant that fails must not hide the others
            rows.append(row_of(kernel, case, skipped=reason(error)))
    samples: dict[Kernel, list[float]] = {kernel: [] for kernel in timers}
    for turn in range(rounds):
        for kernel in timing.rotated(list(timers), turn):
            with sampler.during(kernel.label):
                samples[kernel] += timers[kernel][0].burst(burst_ms)
    for kernel, (timer, error) in timers.items():
        low, mid, high = timing.quartiles(samples[kernel])
        mhz, watts = sampler.take(kernel.label)
        figures = {"ms": mid, "ms_p25": low, "ms_p75": high, "tflops": case.flops / mid / 1e9, "error": error}
        short = {name: float(f"{value:.6g}") for name, value in figures.items()}
        rows.append(row_of(kernel, case, **short, sm_mhz=mhz, watts=watts, timer=timer.name))
    order = {kernel.label: i for i, kernel in enumerate(group)}
    return sorted(rows, key=lambda row: order[f"{row.kernel}/{row.dtype}"])


def dry_run() -> int:
    """Compiles every variant and prints what its machine code holds; the number of variants that do not compile."""
    from fa3_course import sass

    failed = 0
    for v in variants():
        try:
            (report,) = sass.compile_report(
                lambda options, v=v: rung_host.compile_kernel(v.kernel, v.config, torch.bfloat16, options)
            )
            problems = "; ".join(report.problems()) or "clean"
            print(f"{v.label:<44} {report.registers} registers, {report.smem} bytes shared, {problems}", flush=True)
        except Exception as error:
            failed += 1
            print(f"{v.label:<44} {reason(error)}", flush=True)
    return failed


def main(argv: list[str] | None = None) -> int:
    typed = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m bench.experiments_02", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="results file; by default named after the time")
    parser.add_argument("--seqlen", type=int, default=SEQLEN, help="of the attention shapes (16k tokens in all)")
    parser.add_argument("--causal", action="store_true", help="with the causal mask, too (twice the time)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst-ms", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="of the inputs; drawn anew if left out, and stored in the run")
    parser.add_argument("--dry-run", action="store_true", help="compile and report, measure nothing; needs no GPU")
    args = parser.parse_args(typed)
    if args.dry_run:
        return 1 if dry_run() else 0
    if not rungs.has_hopper():
        parser.error("needs a Hopper GPU (`fa3 doctor` says what is missing); --dry-run compiles the variants anywhere")
    now = datetime.now(UTC)
    seed = random.randrange(2**31) if args.seed is None else args.seed
    out = args.out or results.RESULTS / f"{results.EXPERIMENTS}02_{now:%Y%m%dT%H%M%SZ}.json"
    commit, dirty = card.git_state()
    run = Run(
        date=f"{now:%Y-%m-%dT%H:%M:%SZ}", command=shlex.join(["python", "-m", "bench.experiments_02", *typed]),
        commit=commit, dirty=dirty, grid="experiments_02", dtype="bf16", seed=seed, **card.machine(),
    )  # fmt: skip
    cublas = kernels.chosen(kernels.candidates("bf16"), "cublas/bf16")
    todo = [(GEMM, [*cublas, *gemms()])]
    for causal in (False, True) if args.causal else (False,):
        todo.append((paper(128, causal, args.seqlen), [v.candidate("bf16") for v in variants()]))
    with card.Sampler(card.open_nvml()) as sampler, torch.no_grad():
        for case, group in todo:
            rows = measure(group, case, seed, run.l2_bytes or 0, sampler, args.rounds, args.burst_ms)
            run = replace(run, rows=(*run.rows, *rows))
            results.write(out, run)
            for row in rows:
                print(f"{row.shape:<28} {row.kernel:<44}", f"{row.tflops:.1f} TFLOP/s" if row.measured else row.skipped)
    results.write(out, replace(run, finished=True))
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
