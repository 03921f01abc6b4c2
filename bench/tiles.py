"""Compares tile configurations of fa3_lib's forward kernel on one card, compiled in parallel, timed in turns.

    python -m bench.tiles --head-dim 64 --tile-m 128,192 --tile-n 96,128 --stages 2,4 --causal --seqlen 1024,16384
    python -m bench.tiles --head-dim 128 --tile-n 128,176 --dry-run      # compiles and shows spills; no GPU

Every combination of the listed values is a variant; those without room are listed with the reason. A table to choose
`fa3_lib.config.TILES` by, not a record: what the choice then gives is measured by `bench.forward`.
"""

import argparse
import itertools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import timing
from bench.cases import Attention, paper
from fa3_lib.config import HEAD_DIMS, TILES, ForwardConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SYMBOL = "variant"


@dataclass(frozen=True)
class Variant:
    """A configuration and what came of compiling it: an object file, or why there is none."""

    config: ForwardConfig
    dtype: str
    path: str = ""
    problem: str = ""

    def __str__(self) -> str:
        c = self.config
        turns, output = "turns" if c.ping_pong else "no turns", "own O" if c.own_output else "O direct"
        return f"{c.tile_m}x{c.tile_n}, {c.stages} stages, {turns}, {output}"


def variants(args: argparse.Namespace) -> list[Variant]:
    """Every combination of the command's values; a list without a value means the library's own choice."""
    tile_m, tile_n, _ = TILES[args.head_dim, args.head_dim]
    found = []
    for m, n, stages, turns, own in itertools.product(
        args.tile_m or [tile_m], args.tile_n or [tile_n], args.stages, args.turns, args.own_output
    ):
        config = ForwardConfig(
            args.head_dim, args.head_dim, m, n, stages, args.causal,
            ping_pong=bool(turns), own_output=bool(own), direct_output=not own, dynamic=args.causal and args.dynamic,
        )  # fmt: skip
        problem = ""
        try:
            config.validate()
        except ValueError as error:
            problem = str(error).partition(": ")[2]
        found.append(Variant(config, args.dtype, problem=problem))
    return found


def build(variant: Variant, folder: str) -> Variant:
    """The variant with its object file in `folder`, or with ptxas's complaints. Runs in a process of its own."""
    from fa3_course import sass
    from fa3_lib.forward_sm90 import compile_forward

    if variant.problem:
        return variant
    dtype = DTYPES[variant.dtype]
    compiled = []

    def compile_fn(options: str):
        compiled.append(compile_forward(variant.config, dtype, f"--enable-tvm-ffi {options}"))
        return compiled[-1]

    (report,) = sass.compile_report(compile_fn)
    path = str(Path(folder) / f"{abs(hash(variant.config))}.o")
    compiled[-1].export_to_c(path, function_name=SYMBOL)
    return Variant(variant.config, variant.dtype, path, "; ".join(report.problems()))


def build_all(wanted: Sequence[Variant], folder: str) -> list[Variant]:
    """Compiles in as many processes as there are cores: threads inside the compiler crash it."""
    with multiprocessing.get_context("spawn").Pool(min(len(wanted), os.cpu_count() or 1)) as pool:
        return pool.starmap(build, [(variant, folder) for variant in wanted], chunksize=1)


def measure(built: Sequence[Variant], case: Attention, rounds: int, burst_ms: float) -> list[tuple[float, float]]:
    """(median ms, largest difference to cuDNN's output) per variant."""
    import cutlass.cute as cute
    from torch.nn.attention import SDPBackend, sdpa_kernel

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    dtype = DTYPES[built[0].dtype]
    shape = (case.batch, case.seqlen, case.heads, case.head_dim)
    count = timing.input_sets(case.bytes(built[0].dtype), l2_bytes)
    sets = [tuple(torch.randn(shape, dtype=dtype, device="cuda") for _ in range(3)) for _ in range(count)]
    lse = torch.empty(case.batch, case.heads, case.seqlen, device="cuda")
    counter = torch.zeros(2, dtype=torch.int32, device="cuda")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        q, k, v = (x.transpose(1, 2) for x in sets[0])
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal).transpose(1, 2)

    timers, differences = [], []
    for variant in built:
        kernel = cute.runtime.load_module(variant.path, enable_tvm_ffi=True)[SYMBOL]

        def call(q, k, v, kernel=kernel, counter=counter if variant.config.dynamic else None):
            out = torch.empty_like(q)
            kernel(q, k, v, out, lse, None, counter, case.head_dim**-0.5, 0.0, 0, 0, sms)
            return out

        differences.append((call(*sets[0]).float() - expected.float()).abs().max().item())
        timers.append(timing.GraphTimer(call, sets))
    samples = [[] for _ in built]
    for turn in range(rounds):
        for i in timing.rotated(range(len(built)), turn):
            samples[i] += timers[i].burst(burst_ms)
    return [(timing.quartiles(s)[1], d) for s, d in zip(samples, differences, strict=True)]


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="python -m bench.tiles")
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, required=True)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--tile-m", type=numbers, help="query rows: 64, 128, 192; the library's by default")
    parser.add_argument("--tile-n", type=numbers, help="keys of a block; the library's by default")
    parser.add_argument("--stages", type=numbers, default=[2])
    parser.add_argument("--turns", type=numbers, default=[1], help="1: ping-pong, 0: none")
    parser.add_argument("--own-output", type=numbers, default=[0], help="1: memory of its own for O, 0: from registers")
    parser.add_argument("--dynamic", action="store_true", help="causal tiles from a counter, not in pairs")
    parser.add_argument("--seqlen", type=numbers, default=[1024, 4096, 16384], help="16k tokens in all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--burst-ms", type=float, default=25.0)
    parser.add_argument("--dry-run", action="store_true", help="compile, measure nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        built = build_all(variants(args), folder)
        for variant in built:
            print(f"{variant}: {variant.problem or 'compiled, nothing spilled'}")
        usable = [variant for variant in built if variant.path]
        if args.dry_run or not usable:
            return 0 if usable else 1
        if not torch.cuda.is_available():
            print("no GPU here: --dry-run compiles only", file=sys.stderr)
            return 1
        for seqlen in args.seqlen:
            case = paper(args.head_dim, args.causal, seqlen)
            print(f"\n{case}: TFLOP/s, largest difference to cuDNN")
            for variant, (ms, difference) in zip(
                usable, measure(usable, case, args.rounds, args.burst_ms), strict=True
            ):
                print(f"  {case.flops / ms / 1e9:6.0f}  {difference:.1e}  {variant}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
