"""FP8 attention on one card: speed beside FA3 and cuBLAS, errors beside fp64, and a sweep over tiles.

    python -m bench.fp8                                     # on a Hopper, about three minutes: speed, then errors
    python -m bench.fp8 --sweep --head-dim 128              # tiles, compiled in parallel; prints, stores nothing
    python -m bench.fp8 --dry-run                           # what would be measured; with --sweep compiles it; no GPU

Speed goes to `bench/results/experiments_fp8_*.json` (read by `fa3_course.results.experiments("fp8")`): the whole call, V's transpose
included, and the transpose and the kernel apart. Errors go to `experiments_fp8error_*.json`; their rows are called
`question: kernel`, and `error` is, by question:

    V = 1, V has a mean    |out - truth| / |truth|, Frobenius
    table 3                root of the mean square of out - truth (the paper's table 3: outliers in Q, K and V)
    MiniLM                 |out - truth| / |truth| on the course's activations, by scale and format
    needle                 part of the bits of the one value asked for that are read wrong
"""

import argparse
import functools
import itertools
import multiprocessing
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from bench import card, kernels, timing
from bench.cases import GRIDS, Attention, Case, paper
from bench.kernels import Kernel
from bench.worker import reason, row_of
from fa3_course import paths, results
from fa3_course.results import Row, Run
from fa3_lib import fp8, reference
from fa3_lib.fp8_config import HEAD_DIMS, Fp8Config
from fa3_lib.quantize import quantize, rotation_signs, transpose_v

E4M3 = torch.float8_e4m3fn
DTYPES = {name: dtype for dtype, name in fp8.FORMATS.items()}
QUERIES = 64  # of the questions about errors
KEYS = tuple(1024 * 4**i for i in range(5))  # 1k to 256k


# --- speed -----------------------------------------------------------------------------------------------------------


def speed(cases: Sequence[Case], group: Sequence[Kernel], run: Run, sampler, rounds: int, burst_ms: float):
    """Rows, case by case: every kernel is checked, then all take turns."""
    for case in cases:
        fitting = [kernel for kernel in group if kernel.direction == case.direction]
        count = timing.input_sets(case.bytes("fp8"), run.l2_bytes or 0)
        sets = [kernels.inputs(case, "fp8", "cuda", run.seed + 1 + i) for i in range(count)]
        rows, timers = [], {}
        for kernel in fitting:
            try:
                error = None if kernel.name in kernels.PARTS else kernels.check(kernel, case, run.seed)
                prepared = [kernels.PARTS[kernel.name](*x) if kernel.name in kernels.PARTS else x for x in sets]
                timers[kernel] = timing.GraphTimer(kernel.bind(case), prepared), error
            except Exception as problem:  # one kernel that fails must not hide the others
                rows.append(row_of(kernel, case, skipped=reason(problem)))
        samples: dict[Kernel, list[float]] = {kernel: [] for kernel in timers}
        for turn in range(rounds):
            for kernel in timing.rotated(list(timers), turn):
                with sampler.during(kernel.label):
                    samples[kernel] += timers[kernel][0].burst(burst_ms)
        for kernel, (timer, error) in timers.items():
            low, mid, high = timing.quartiles(samples[kernel])
            mhz, watts = sampler.take(kernel.label)
            figures = {"ms": mid, "ms_p25": low, "ms_p75": high, "error": error}
            if kernel.name != "transpose_v":  # it computes nothing
                figures["tflops"] = case.flops / mid / 1e9
            short = {name: float(f"{value:.6g}") for name, value in figures.items() if value is not None}
            rows.append(row_of(kernel, case, **short, sm_mhz=mhz, watts=watts, timer=timer.name))
        yield case, rows


# --- errors ----------------------------------------------------------------------------------------------------------


def answers() -> dict[str, Callable]:
    """Who is asked: (q, k, v) in e4m3 -> out."""

    def ours(two_level):
        return lambda q, k, v: fp8.forward(q, k, v, q.shape[-1] ** -0.5, two_level=two_level, with_lse=False)[0]

    return {
        "fa3_lib": ours(True),
        "fa3_lib one level": ours(False),
        "fa3": lambda q, k, v: kernels._fa3()(q, k, v, False),
    }


def relative(out: torch.Tensor, truth: torch.Tensor) -> float:
    return float((out.double() - truth).norm() / truth.norm())


def truth_of(q, k, v) -> torch.Tensor:
    return reference.attention(q.float(), k.float(), v.float())[0]


def questions(keys: int, generator: torch.Generator, d: int = 128):
    """(name, q, k, v in e4m3, measure of out) of every question about long contexts."""

    def normal(*shape, scale=1.0):
        return torch.randn(shape, generator=generator, device="cuda") * scale

    q, k = (normal(1, s, 1, d, scale=0.5).to(E4M3) for s in (QUERIES, keys))
    ones = torch.ones(1, keys, 1, d, device="cuda")
    yield "V = 1", q, k, ones.to(E4M3), lambda out: relative(out, torch.ones_like(out, dtype=torch.float64))
    equal = torch.zeros_like(q.float()).to(E4M3)
    yield "V = 1, equal scores", equal, k, ones.to(E4M3), lambda out: relative(out, torch.ones_like(out).double())
    v = (1 + normal(1, keys, 1, d)).to(E4M3)
    truth = truth_of(q, k, v)
    yield "V has a mean", q, k, v, lambda out: relative(out, truth)

    # one key is the query's own and gets half of all weight; its value, +1 or -1 beside a mean of 1, is to be read
    k = normal(1, keys, 1, d).to(E4M3)
    spots = torch.randperm(keys, generator=generator, device="cuda")[:QUERIES]
    needles = k.float()[:, spots]
    excess = (torch.tensor(float(keys)).log() + 0.5) * d**0.5 / needles.square().sum(-1, keepdim=True)
    codes = torch.randint(2, (1, QUERIES, 1, d), generator=generator, device="cuda") * 2.0 - 1
    v = 1 + 0.25 * normal(1, keys, 1, d)
    v[:, spots] = 1 + codes
    yield (
        "needle",
        (needles * excess).to(E4M3),
        k,
        v.to(E4M3),
        lambda out: float(((out.float() > 1) != (codes > 0)).float().mean()),
    )


def outliers(generator: torch.Generator, n: int = 4096, heads: int = 4, d: int = 128) -> list[torch.Tensor]:
    """Q, K, V of the paper's table 3: N(0, 1) + N(0, 100) * Bernoulli(0.001), in fp32."""

    def normal():
        return torch.randn((1, n, heads, d), generator=generator, device="cuda")

    def rare():
        return torch.rand((1, n, heads, d), generator=generator, device="cuda") < 0.001

    return [normal() + 10 * normal() * rare() for _ in range(3)]


def quantised(q, k, v, granularity: str, rotated: bool, formats: Sequence[str] = ("e4m3",) * 3) -> torch.Tensor:
    """The answer on q, k, v rounded to 8 bits; formats: of each."""
    signs = rotation_signs(q.shape[-1], 0, q.device) if rotated else None
    packed = [
        quantize(x, DTYPES[f], granularity, signs=s)
        for x, s, f in zip((q, k, v), (signs, signs, None), formats, strict=True)
    ]
    descales = [descale for _, descale in packed]
    return fp8.forward(*(x for x, _ in packed), q.shape[-1] ** -0.5, with_lse=False,
                       **dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True)))[0]  # fmt: skip


def errors(seed: int):
    """Rows of all questions."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def row(name, call, given, measure, shape):
        fields = {"kernel": name, "dtype": "fp8", "source": kernels.FP8_SOURCE, **shape}
        fields["source_hash"] = results.source_hash(kernels.FP8_SOURCE)
        try:
            error = float(f"{measure(call(*given)):.4g}")
            return Row(**fields, ms=timing.EventTimer(call, [given]).call_ms, error=error, timer="events")
        except Exception as problem:
            return Row(**fields, skipped=reason(problem))

    for keys in KEYS:
        shape = {"direction": "fwd", "head_dim": 128, "causal": False, "batch": 1, "seqlen": keys, "heads": 1}
        for question, q, k, v, measure in questions(keys, generator):
            for name, call in answers().items():
                yield row(f"{question}: {name}", call, (q, k, v), measure, shape)

    q, k, v = outliers(generator)
    truth, _ = reference.attention(q, k, v)
    shape = Attention(q.shape[3], False, q.shape[0], q.shape[1], q.shape[2]).fields

    def rmse(out):
        return float((out.double() - truth).square().mean().sqrt())

    for granularity, rotated in itertools.product(("tensor", "head", "block"), (False, True)):
        name = f"table 3: one scale per {granularity}{', rotated' if rotated else ''}"
        yield row(name, lambda *x, g=granularity, r=rotated: quantised(*x, g, r), (q, k, v), rmse, shape)
    for formats in (("e5m2",) * 3, ("e4m3", "e4m3", "e5m2")):
        name = f"table 3: one scale per head, rotated, {'/'.join(formats)}"
        yield row(name, lambda *x, f=formats: quantised(*x, "head", True, f), (q, k, v), rmse, shape)

    with np.load(paths.data("minilm_qkv.npz")) as arrays:
        q, k, v = (torch.from_numpy(arrays[name]).transpose(1, 2).contiguous().cuda() for name in "qkv")
    text, _ = reference.attention(q, k, v)
    shape = Attention(q.shape[3], False, q.shape[0], q.shape[1], q.shape[2]).fields
    for granularity, rotated in itertools.product(("tensor", "head", "block"), (False, True)):
        name = f"MiniLM: one scale per {granularity}{', rotated' if rotated else ''}"
        call = functools.partial(quantised, granularity=granularity, rotated=rotated)
        yield row(name, call, (q, k, v), lambda out: relative(out, text), shape)
    for formats in (("e5m2",) * 3, ("e4m3", "e4m3", "e5m2")):
        call = functools.partial(quantised, granularity="head", rotated=True, formats=formats)
        name = f"MiniLM: one scale per head, rotated, {'/'.join(formats)}"
        yield row(name, call, (q, k, v), lambda out: relative(out, text), shape)


# --- sweep -----------------------------------------------------------------------------------------------------------

SYMBOL = "variant"
# (tile_m, tile_n, pv_columns) worth trying with two levels and (tile_m, tile_n) with one, by head dim
CANDIDATES = {
    64: ((192, 128, 64), (192, 128, 32), (192, 192, 64), (128, 192, 64)),
    128: ((192, 128, 64), (192, 128, 32), (128, 128, 128), (128, 192, 64)),
    192: ((128, 128, 64), (128, 128, 96), (128, 192, 64)),
    256: ((128, 128, 128), (128, 128, 64)),
}
ONE_LEVEL = {64: ((192, 128), (128, 192)), 128: ((128, 128), (128, 192)), 192: ((128, 128),), 256: ((128, 128),)}


@dataclass(frozen=True)
class Variant:
    """A configuration and what came of compiling it: an object file, or why there is none."""

    config: Fp8Config
    path: str = ""
    problem: str = ""

    def __str__(self) -> str:
        c = self.config
        turns = "turns" if c.ping_pong else "no turns"
        level = f"T of {c.pv_columns}" if c.two_level else "one level"
        return f"{c.tile_m}x{c.tile_n}, {c.stages} stages, {level}, {turns}"


def variants(head_dim: int, causal: bool) -> list[Variant]:
    d, found = head_dim, []
    shape = {"causal": causal}
    for turns in (True, False):
        for m, n, columns in CANDIDATES[d]:
            found.append(Fp8Config(d, d, m, n, ping_pong=turns, pv_columns=columns, **shape))
        for m, n in ONE_LEVEL[d]:
            found.append(Fp8Config(d, d, m, n, ping_pong=turns, pv_columns=d, two_level=False, **shape))
    roomier = [replace(config, stages=4) for config in found[:1]]
    checked = []
    for config in found + roomier:
        try:
            checked.append(Variant(config.validate()))
        except ValueError as error:
            checked.append(Variant(config, problem=str(error).partition("): ")[2]))
    return checked


def build(variant: Variant, folder: str) -> Variant:
    """The variant with its object file in `folder`, or with ptxas's complaints. Runs in a process of its own."""
    from fa3_course import sass
    from fa3_lib.forward_fp8_sm90 import compile_forward

    if variant.problem:
        return variant
    compiled = []

    def compile_fn(options: str):
        compiled.append(compile_forward(variant.config, torch.bfloat16, f"--enable-tvm-ffi {options}", with_lse=False))
        return compiled[-1]

    try:
        (report,) = sass.compile_report(compile_fn)
    except Exception as error:
        return replace(variant, problem=reason(error))
    path = str(Path(folder) / f"{abs(hash(variant.config))}.o")
    compiled[-1].export_to_c(path, function_name=SYMBOL)
    return Variant(variant.config, path, "; ".join(report.problems()))


def build_all(wanted: Sequence[Variant], folder: str) -> list[Variant]:
    """Compiles in as many processes as there are cores: threads inside the compiler crash it."""
    with multiprocessing.get_context("spawn").Pool(min(len(wanted), os.cpu_count() or 1)) as pool:
        return pool.starmap(build, [(variant, folder) for variant in wanted], chunksize=1)


def measure_variants(built: Sequence[Variant], case: Attention, rounds: int, burst_ms: float):
    """(median ms, relative error) per variant; V is transposed before."""
    import cutlass.cute as cute

    sms, l2_bytes = (
        getattr(torch.cuda.get_device_properties(0), x) for x in ("multi_processor_count", "L2_cache_size")
    )
    count = timing.input_sets(case.bytes("fp8"), l2_bytes)
    drawn = [kernels.inputs(case, "fp8", "cuda", 1 + i) for i in range(count)]
    sets = [tuple(x.view(torch.uint8) for x in (q, k, transpose_v(v))) for q, k, v in drawn]
    one = fp8.ones(case.batch, case.heads, sets[0][0].device)
    q, k, v = (x.to(torch.bfloat16).transpose(1, 2) for x in drawn[0])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal).transpose(1, 2).double()
    del q, k, v

    timers, differences = [], []
    for variant in built:
        kernel = cute.runtime.load_module(variant.path, enable_tvm_ffi=True)[SYMBOL]

        def call(q, k, vt, kernel=kernel):
            out = torch.empty(q.shape, dtype=torch.bfloat16, device="cuda")
            kernel(q, k, vt, out, None, None, None, one, one, one, case.head_dim**-0.5, 0.0, 0, 0, sms)
            return out

        differences.append(relative(call(*sets[0]), expected))
        timers.append(timing.GraphTimer(call, sets))
    samples = [[] for _ in built]
    for turn in range(rounds):
        for i in timing.rotated(range(len(built)), turn):
            samples[i] += timers[i].burst(burst_ms)
    return [(timing.quartiles(s)[1], d) for s, d in zip(samples, differences, strict=True)]


def sweep(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        built = build_all([v for d in args.head_dim for v in variants(d, args.causal)], folder)
        for variant in built:
            print(f"d{variant.config.head_dim} {variant}: {variant.problem or 'clean'}", flush=True)
        usable = [variant for variant in built if variant.path]
        if args.dry_run or not usable:
            return 0 if usable else 1
        for d, seqlen in itertools.product(args.head_dim, args.seqlen):
            case, group = paper(d, args.causal, seqlen), [v for v in usable if v.config.head_dim == d]
            print(f"\n{case}: TFLOP/s, error", flush=True)
            measured = measure_variants(group, case, args.rounds, args.burst_ms)
            for variant, (ms, error) in sorted(zip(group, measured, strict=True), key=lambda x: x[1][0]):
                print(f"  {case.flops / ms / 1e9:6.0f}  {error:.1e}  {variant}", flush=True)
    return 0


# --- command ---------------------------------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.fp8", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("speed", "errors"))
    parser.add_argument("--grid", choices=GRIDS, default="full", help="of the speeds")
    parser.add_argument("--kernels", help="comma-separated names; all of them by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--burst-ms", type=float, default=20.0)
    parser.add_argument("--seed", type=int, help="of the inputs; drawn anew if left out, and stored in the run")
    parser.add_argument("--out", type=Path, default=results.RESULTS, help="folder of the results")
    parser.add_argument("--sweep", action="store_true", help="compare tiles instead; stores nothing")
    parser.add_argument("--head-dim", type=numbers, default=list(HEAD_DIMS), help="of the sweep")
    parser.add_argument("--seqlen", type=numbers, default=[1024, 4096, 16384], help="of the sweep, 16k tokens in all")
    parser.add_argument("--causal", action="store_true", help="of the sweep")
    parser.add_argument("--dry-run", action="store_true", help="list (with --sweep: compile), measure nothing")
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("needs a Hopper GPU (`fa3 doctor` says what is missing); --dry-run needs none")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    typed = sys.argv[1:] if argv is None else list(argv)
    args = parse(typed)
    if args.sweep:
        return sweep(args)
    cases, group = GRIDS[args.grid], kernels.chosen(kernels.fp8_kernels(), args.kernels)
    if args.dry_run:
        for case in cases:
            print(case, *(kernel.label for kernel in group if kernel.direction == case.direction), sep="  ")
        return 0
    now = datetime.now(UTC)
    seed = random.randrange(2**31) if args.seed is None else args.seed
    commit, dirty = card.git_state()
    run = Run(
        date=f"{now:%Y-%m-%dT%H:%M:%SZ}", command=shlex.join(["python", "-m", "bench.fp8", *typed]),
        commit=commit, dirty=dirty, grid=args.grid, dtype="fp8", seed=seed, peers=kernels.peer_versions(), **card.machine(),
    )  # fmt: skip
    with card.Sampler(card.open_nvml()) as sampler, torch.no_grad():
        if args.only != "errors":
            out = args.out / f"{results.EXPERIMENTS}fp8_{now:%Y%m%dT%H%M%SZ}.json"
            rows: list[Row] = []
            for case, fresh in speed(cases, group, run, sampler, args.rounds, args.burst_ms):
                rows += fresh
                results.write(out, replace(run, rows=tuple(rows)))
                figures = [
                    f"{r.kernel} {r.tflops:.0f}" if r.tflops else f"{r.kernel} {(r.ms or 0) * 1e3:.0f} us"
                    for r in fresh
                ]
                print(f"{case!s:<28}", "  ".join(figures), *(r.skipped for r in fresh if r.skipped), flush=True)
            results.write(out, replace(run, rows=tuple(rows), finished=True))
            print(out)
        if args.only != "speed":
            out = args.out / f"{results.EXPERIMENTS}fp8error_{now:%Y%m%dT%H%M%SZ}.json"
            rows = []
            for row in errors(seed):
                rows.append(row)
                print(f"{row.seqlen:>7} {row.kernel:<44} {row.error if row.measured else row.skipped}", flush=True)
            results.write(out, replace(run, grid="errors", rows=tuple(rows), finished=True))
            print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
