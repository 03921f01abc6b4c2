"""Chapter 3's kernels with one idea taken out, measured in one run; schedules and waves; exponentials against products.

    python -m bench.experiments_03                 # on a Hopper, about three minutes, most of them compiling
    python -m bench.experiments_03 --dry-run       # compiles every variant and reports on its machine code; no GPU

Rows go to `bench/results/experiments_03_*.json`; a row's `kernel` is `experiment: variant`, and the lesson reads them with
`fa3_course.results.experiments("03")`. The row of the exponentials counts one exponential as one operation.
"""

import argparse
import functools
import random
import shlex
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from bench import card, kernels, timing
from bench.cases import GEMM, HIDDEN, TOKENS, Attention, Case, paper
from bench.experiments_02 import measure
from bench.kernels import Kernel
from bench.worker import reason
from fa3_course import results, rung_host, rungs
from fa3_course.results import Row, Run
from fa3_lib.compiler import COMPILE_LOCK
from fa3_lib.config import ForwardConfig, ceil_div

FILES = {
    "5": "chapters/02_tma_wgmma/steps/rung05_warp_specialised.py",
    "6": "chapters/03_pingpong/steps/rung06_pingpong.py",
    "7": "chapters/03_pingpong/steps/rung07_overlap.py",
    "7b": "chapters/03_pingpong/steps/rung07b_overlap_no_warp_specialisation.py",
    "8": "chapters/03_pingpong/steps/rung08_persistent.py",
}
RUNG = {number: rungs._module(file) for number, file in FILES.items()}
THIS = "bench/experiments_03.py"


@dataclass(frozen=True)
class Variant:
    """One bar of one experiment: a kernel class, its configuration, and the rung that it comes from."""

    experiment: str
    name: str
    rung: str
    config: ForwardConfig
    kernel: type

    @property
    def label(self) -> str:
        return f"{self.experiment}: {self.name}"

    def candidate(self) -> Kernel:
        """The variant as `bench.kernels` wants it."""

        def call(q, k, v, causal):
            return rung_host.run(self.kernel, self.config, q, k, v, causal=causal)[0]

        source = (FILES[self.rung], *rungs._CUTE_PARTS, THIS)
        return Kernel(self.label, "bf16", lambda: call, rung=self.rung, source=source)


# --- the paper's ablation, and how many consumers ------------------------------------------------------------------------


def ablation(head_dim: int, causal: bool) -> list[Variant]:
    """Rung 7 and what it is without each of its ideas, all with two consumers and tiles of 128 x 128."""
    config = {number: RUNG[number].make_config(head_dim, causal) for number in FILES}
    plain = {number: RUNG[number].Attention for number in FILES}
    return [
        Variant("ablation", "all of it", "7", config["7"], plain["7"]),
        Variant("ablation", "no turns", "7", replace(config["7"], ping_pong=False), plain["7"]),
        Variant("ablation", "no overlap inside a warpgroup", "6", config["6"], plain["6"]),
        Variant("ablation", "neither", "5", config["5"], plain["5"]),
        Variant("ablation", "no warp specialisation", "7b", config["7b"], plain["7b"]),
    ]


def consumers(causal: bool) -> list[Variant]:
    """Rungs 6 and 7 at head dim 64 with two and with three consumers."""
    found = []
    for number in ("6", "7"):
        for count in (2, 3):
            config = replace(RUNG[number].make_config(64, causal), tile_m=64 * count)
            found.append(Variant("consumers", f"rung {number}, {count}", number, config, RUNG[number].Attention))
    return found


# --- schedules -----------------------------------------------------------------------------------------------------------


class AsTheyCome(RUNG["8"].Attention):
    """Rung 8 whose CTA takes tiles in their order, the short causal ones of a head first."""

    @cute.jit
    def tile_of_round(self, round_index: Int32, mQ: cute.Tensor):
        m_blocks, heads = ceil_div(mQ.shape[0], self.config.tile_m), mQ.shape[2]
        tile = round_index * cute.arch.grid_dim()[0] + cute.arch.block_idx()[0]
        m_block, sequence = tile % m_blocks, tile // m_blocks
        if sequence >= heads * mQ.shape[3]:
            m_block = -1
        return m_block, sequence % heads, sequence // heads


class HeadsInterleaved(RUNG["8"].Attention):
    """Rung 8 whose neighbours work on different heads: the longest tiles of all heads first, then the next ones."""

    @cute.jit
    def tile_of_round(self, round_index: Int32, mQ: cute.Tensor):
        m_blocks, heads = ceil_div(mQ.shape[0], self.config.tile_m), mQ.shape[2]
        tile = round_index * cute.arch.grid_dim()[0] + cute.arch.block_idx()[0]
        sequences = heads * mQ.shape[3]
        m_block, sequence = m_blocks - 1 - tile // sequences, tile % sequences
        if m_block < 0:
            m_block = -1
        return m_block, sequence % heads, sequence // heads


def schedules(causal: bool) -> list[Variant]:
    """Head dim 128: a CTA per tile, and a CTA per SM that walks over tiles in several orders."""
    config = {number: RUNG[number].make_config(128, causal) for number in ("7", "8")}
    found = [
        Variant("schedule", "a CTA per tile", "7", config["7"], RUNG["7"].Attention),
        Variant("schedule", "persistent", "8", config["8"], RUNG["8"].Attention),
        Variant("schedule", "persistent, heads interleaved", "8", config["8"], HeadsInterleaved),
    ]
    if causal:
        found.append(Variant("schedule", "persistent, as they come", "8", config["8"], AsTheyCome))
    return found


# 16 tiles of 128 rows per head: a little less and a little more than one and two waves of 132 SMs
WAVES = tuple(Attention(128, False, 1, 2048, heads) for heads in (8, 9, 16, 17))


def waves() -> list[Variant]:
    found = schedules(False)[:2]
    return [replace(v, experiment="waves") for v in found]


def plan() -> list[tuple[Case, list[Variant]]]:
    """Every case with its variants; the ablation on the paper's shape: 4 x 16k tokens, hidden size 2048."""
    steps = []
    for head_dim in (128, 64):
        for causal in (False, True):
            case = Attention(head_dim, causal, 4, TOKENS, HIDDEN // head_dim)
            steps.append((case, ablation(head_dim, causal) + (consumers(causal) if head_dim == 64 else [])))
    for causal in (False, True):
        for seqlen in (4096, TOKENS):
            steps.append((paper(128, causal, seqlen), schedules(causal)))
    return steps + [(case, waves()) for case in WAVES]


# --- exponentials against products -----------------------------------------------------------------------------------------


class Exponentials:
    """A kernel of nothing but exponentials: every thread applies x -> 2^-x to 16 numbers, over and over.

    Called by the DSL with out `(n,)` fp32, one sum per thread, and the number of repetitions.
    """

    chains, threads, ctas_per_sm = 16, 256, 8

    @cute.jit
    def __call__(self, out: cute.Tensor, rounds: Int32, stream):
        self.kernel(out, rounds).launch(
            grid=[ceil_div(out.shape[0], self.threads), 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, out: cute.Tensor, rounds: Int32):
        at = cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0]
        x = cute.make_rmem_tensor(self.chains, Float32)
        for c in cutlass.range_constexpr(self.chains):
            x[c] = Float32(at % 1024) / 1024 + c / self.chains
        for _ in cutlass.range(rounds, unroll=1):
            for c in cutlass.range_constexpr(self.chains):  # 16 of a thread are under way at once
                x[c] = cute.math.exp2(-x[c], fastmath=True)
        total = Float32(0.0)
        for c in cutlass.range_constexpr(self.chains):
            total += x[c]
        if at < out.shape[0]:
            out[at] = total

    @classmethod
    def compile(cls, options: str = ""):
        """The compiled kernel; no GPU is needed."""
        out = make_fake_tensor(Float32, (cute.sym_int(),), (1,), assumed_align=4)
        stream = make_fake_stream(use_tvm_ffi_env_stream="--enable-tvm-ffi" in options)
        with COMPILE_LOCK:
            return cute.compile(cls(), out, Int32(1), stream, options=f"--gpu-arch sm_90a {options}")

    @classmethod
    def truth(cls, n: int, rounds: int) -> torch.Tensor:
        """The fp64 answer `(n,)`."""
        x = (torch.arange(n, dtype=torch.float64) % 1024 / 1024)[:, None] + torch.arange(cls.chains) / cls.chains
        for _ in range(rounds):
            x = torch.exp2(-x)
        return x.sum(1)


@functools.cache
def _exponentials():
    return Exponentials.compile("--enable-tvm-ffi")


def exponentials(n: int, rounds: int) -> torch.Tensor:
    """n sums of 16 numbers on the current card, each after `rounds` exponentials."""
    out = torch.full((n,), torch.nan, device="cuda")
    _exponentials()(out, rounds)
    return out


def measure_exponentials(sampler: card.Sampler, rounds: int, burst_ms: float) -> Row:
    """The row of the exponentials: `tflops` is 1e12 of them per second."""
    label, repeats = "exp against matmul: exponentials", 4096
    row = Row(label, "exp", "fp32", source=(THIS,), source_hash=results.source_hash((THIS,)))
    n = torch.cuda.get_device_properties().multi_processor_count * Exponentials.ctas_per_sm * Exponentials.threads
    right = Exponentials.truth(n, 3)
    error = float((exponentials(n, 3).double().cpu() - right).norm() / right.norm())
    if not error < 1e-5:
        return replace(row, skipped=f"wrong: relative error {error:.2e}")
    timer = timing.GraphTimer(lambda: exponentials(n, repeats), [(), ()])
    samples = []
    for _ in range(rounds):
        with sampler.during(label):
            samples += timer.burst(burst_ms)
    low, mid, high = timing.quartiles(samples)
    mhz, watts = sampler.take(label)
    rate = n * Exponentials.chains * repeats / mid / 1e9
    return replace(
        row, ms=mid, ms_p25=low, ms_p75=high, tflops=rate, error=error, sm_mhz=mhz, watts=watts, timer=timer.name
    )


# --- measuring -------------------------------------------------------------------------------------------------------------


def dry_run() -> int:
    """Compiles everything once and prints what its machine code holds; the number of kernels that do not compile or spill."""
    from fa3_course import sass

    compiles = {"exp against matmul: exponentials": Exponentials.compile}
    for case, variants in plan():
        for v in variants:
            mask = "causal" if v.config.causal else "full"
            compiles[f"d{case.head_dim} {mask} {v.label}"] = functools.partial(
                rung_host.compile_kernel, v.kernel, v.config, torch.bfloat16
            )
    failed = 0
    for name, compile_fn in compiles.items():
        try:
            (report,) = sass.compile_report(compile_fn)
            problems = "; ".join(report.problems()) or "clean"
            failed += bool(report.problems())
            print(f"{name:<60} {report.registers} registers, {report.smem} bytes shared, {problems}", flush=True)
        except Exception as error:
            failed += 1
            print(f"{name:<60} {reason(error)}", flush=True)
    return failed


def main(argv: list[str] | None = None) -> int:
    typed = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m bench.experiments_03", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="results file; by default named after the time")
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
    out = args.out or results.RESULTS / f"{results.EXPERIMENTS}03_{now:%Y%m%dT%H%M%SZ}.json"
    commit, dirty = card.git_state()
    run = Run(
        date=f"{now:%Y-%m-%dT%H:%M:%SZ}", command=shlex.join(["python", "-m", "bench.experiments_03", *typed]),
        commit=commit, dirty=dirty, grid="experiments_03", dtype="bf16", seed=seed, **card.machine(),
    )  # fmt: skip
    cublas = kernels.chosen(kernels.candidates("bf16"), "cublas/bf16")
    with card.Sampler(card.open_nvml()) as sampler, torch.no_grad():

        def store(rows: list[Row]) -> None:
            nonlocal run
            run = replace(run, rows=(*run.rows, *rows))
            results.write(out, run)
            for row in rows:
                shape = row.shape if row.seqlen else ""
                print(
                    f"{shape:<28} {row.kernel:<44}",
                    f"{row.tflops:.1f} T/s" if row.measured else row.skipped,
                    flush=True,
                )

        store([measure_exponentials(sampler, args.rounds, args.burst_ms)])
        todo = [(GEMM, cublas), *((case, [v.candidate() for v in variants]) for case, variants in plan())]
        for case, group in todo:
            store(measure(group, case, seed, run.l2_bytes or 0, sampler, args.rounds, args.burst_ms))
            torch.cuda.empty_cache()  # the next shape's inputs are as large
    results.write(out, replace(run, finished=True))
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
