"""Measures forward attention on this machine's card: peers, rungs and fa3_lib in one run.

    python -m bench.forward                  # the paper's grid, about five minutes on an H200
    python -m bench.forward --quick          # head_dim 128 only, about a minute
    python -m bench.forward --dry-run        # what would be measured, without a card

Rows go to `bench/results/` (see `fa3_course.results`) after every shape. Where there is no card, the rungs that run on a
CPU are measured on small shapes, and the rows go to `out/`.
"""

import argparse
import json
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from bench import timing
from bench.cases import GRIDS
from bench.kernels import Kernel, candidates, chosen
from bench.worker import Job, plan, row_of
from fa3_course import results
from fa3_course.results import ROOT, Row, Run

GRACE_SECONDS = 30  # after the time limit, for the case in progress
IMPORT_SECONDS = 180  # for a worker's imports, before its first journal entry
HOST_AIM_US = 20  # what an eager call of fa3_lib may cost the host


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.forward", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--grid", choices=sorted(GRIDS), default="full", help="shapes: the paper's grid, a third of it, or d128 only"
    )
    parser.add_argument("--quick", action="store_true", help="same as --grid quick")
    parser.add_argument("--kernels", help="comma-separated names or rung numbers; all if left out")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16"), default="bf16", help="of everything but the fp8 and fp32 kernels"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda where there is a card, cpu elsewhere")
    parser.add_argument("--out", type=Path, help="results file; by default named after card and time")
    parser.add_argument("--limit-seconds", type=float, help="start no further shape when this would be exceeded")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds over the kernels of a shape")
    parser.add_argument("--burst-ms", type=float, default=40.0, help="milliseconds of one kernel in one round")
    parser.add_argument("--seed", type=int, help="of the inputs; drawn anew if left out, and stored in the run")
    parser.add_argument("--commit", help="revision to record where there is no git checkout")
    parser.add_argument("--dry-run", action="store_true", help="list kernels and shapes, measure nothing")
    return parser


def blame(journal: Path) -> dict | None:
    """The last journal entry of a worker, None before its first."""
    try:
        return json.loads(journal.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


LATE = "was stopped at the time limit"


def watch(process: subprocess.Popen, journal: Path, deadline: float | None, poll_s: float = 0.2) -> str | None:
    """Waits for a worker. Returns None when it ended well, else what went wrong, in words; kills it when it hangs.

    A stage may last as long as its journal entry says; after the run's deadline a worker has GRACE_SECONDS left, and then
    the answer is LATE.
    """
    born = time.time()
    while process.poll() is None:
        time.sleep(poll_s)
        entry = blame(journal)
        since = journal.stat().st_mtime if entry else born
        limit = entry["limit_s"] if entry else IMPORT_SECONDS
        hung = time.time() - since > limit
        if hung or (deadline is not None and time.time() > deadline + GRACE_SECONDS):
            process.kill()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                print("the killed worker does not go away; going on without waiting for it", file=sys.stderr)
            return f"hung for more than {limit:.0f} s" if hung else LATE
    code = process.returncode
    if code == 0:
        return None
    return f"killed its process (signal {-code})" if code < 0 else f"ended its process (exit code {code})"


def start_worker(job_file: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "bench.worker", str(job_file)], cwd=ROOT)


def supervise(job: Job, folder: Path, start: Callable[[Path], subprocess.Popen] = start_worker) -> str | None:
    """Runs workers until one ends well, each without the kernels that took the one before down.

    Args:
        job: its `broken` is filled in here.
        folder: for the job's file.
        start: starts a worker on a job file.

    Returns:
        None when the plan was worked through, else why the run ended before: LATE, or what befell a worker that had no
        kernel to blame.
    """
    journal, path = Path(job.journal), folder / "job.json"
    while True:
        journal.unlink(missing_ok=True)
        job.save(path)
        trouble = watch(start(path), journal, job.deadline)
        if trouble is None or trouble is LATE:
            return trouble
        entry = blame(journal)
        if entry is None or entry["kernel"] is None or entry["kernel"] in job.broken:
            return f"{trouble}, and no kernel is to blame"
        where = f"{entry['stage']} on {entry['case']}" if entry["case"] else entry["stage"]
        job.broken[entry["kernel"]] = f"{trouble} ({where})"
        print(f"{entry['kernel']} {job.broken[entry['kernel']]}; going on without it", file=sys.stderr, flush=True)


def finish(job: Job, chosen: list[Kernel], trouble: str | None) -> Run | None:
    """Adds rows for what no worker came to, marks a complete run, and returns it; None where nothing was written."""
    out = Path(job.out)
    if not out.exists():
        return None
    run = results.read(out)
    rows = list(run.rows)
    if trouble is not None:
        settled = {(row.kernel, row.dtype) for row in rows if row.seqlen is None}
        done = {(row.kernel, row.dtype, row.shape) for row in rows}
        missing = [
            row_of(k, case, skipped=f"the run ended before: it {trouble}")
            for case, group in plan(job, chosen)
            for k in group
        ]
        rows += [r for r in missing if (r.kernel, r.dtype) not in settled and (r.kernel, r.dtype, r.shape) not in done]
    run = replace(run, rows=tuple(rows), finished=trouble is None)
    results.write(out, run)
    return run


def short(row: Row) -> str:
    """A row's kernel as a column's head: `rung 2`, `fa3`, `fa3 fp8`."""
    name = f"rung {row.rung}" if row.rung is not None else row.kernel
    return f"{name} {row.dtype}" if row.dtype == "fp8" else name


def table(run: Run) -> str:
    """The measured rows as text: a line per shape, a column per kernel, TFLOP/s; then host times, errors, what was skipped."""
    measured = [row for row in run.rows if row.measured]
    names = list(dict.fromkeys(short(row) for row in measured))
    shapes = list(dict.fromkeys(row.shape for row in measured))
    cells = {(row.shape, short(row)): row for row in measured}
    width = max([9, *map(len, names)]) + 2
    head = max([7, *map(len, shapes)]) + 1
    lines = [f"{'TFLOP/s':<{head}}" + "".join(f"{name:>{width}}" for name in names) + f"{'SM MHz':>12}"]
    for shape in shapes:
        here = [cells.get((shape, name)) for name in names]
        line = "".join(f"{row.tflops:>{width}.4g}" if row else f"{'-':>{width}}" for row in here)
        clocks = [row.sm_mhz for row in here if row and row.sm_mhz]
        lines.append(f"{shape:<{head}}{line}{f'{min(clocks):.0f}-{max(clocks):.0f}' if clocks else '-':>12}")
    for name in names:
        rows = [row for row in measured if short(row) == name]
        host = [row.host_us for row in rows if row.host_us is not None]
        aim = f" (aim: under {HOST_AIM_US})" if name == "fa3_lib" else ""
        took = f"host {min(host):.1f} to {max(host):.1f} us a call{aim}, " if host else ""
        spread = max((row.ms_p75 - row.ms_p25) / row.ms for row in rows)
        worst = max(row.error for row in rows)
        timers = "/".join(sorted({row.timer for row in rows}))
        lines.append(
            f"{name}: {took}error at most {worst:.1e}, quartiles at most {100 * spread:.1f} % apart, timer {timers}"
        )
    lines += [f"skipped: {short(row)} on {row.shape}: {row.skipped}" for row in run.rows if row.skipped]
    return "\n".join(lines)


def describe(job: Job, kernels: list[Kernel]) -> str:
    """The plan in words: every kernel with its sources, every shape with its work."""
    lines = ["kernels:"]
    for kernel in kernels:
        here = "" if kernel.device == "cpu" or torch.cuda.is_available() else " (not on this machine)"
        lines.append(
            f"  {kernel.label:<28} {kernel.device}, timer {kernel.timer}{here}: {', '.join(kernel.source) or 'a peer'}"
        )
    lines.append("shapes:")
    for case, group in plan(job, kernels):
        size = case.bytes(group[0].dtype)
        kind = (
            f"{timing.input_sets(size, 60 << 20)} sets of {size >> 20} MiB past a 60 MiB L2"
            if group[0].device == "cuda"
            else "CPU"
        )
        lines.append(f"  {case!s:<28}{case.flops / 1e12:9.4g} TFLOP, {kind}: {', '.join(k.label for k in group)}")
    return "\n".join(lines)


def default_out(device: str, gpu: str | None, started: str) -> Path:
    """`bench/results/<card>_<time>.json` for a card, `out/bench_cpu_<time>.json` for a CPU."""
    stamp = started.replace("-", "").replace(":", "")
    if device == "cpu":
        return ROOT / "out" / f"bench_cpu_{stamp}.json"
    words = "".join(c if c.isalnum() else " " for c in (gpu or "gpu").lower().replace("nvidia", "")).split()
    return results.RESULTS / f"{'_'.join(words)}_{stamp}.json"


def main(argv: list[str] | None = None) -> int:
    typed = sys.argv[1:] if argv is None else argv
    parse = parser()
    args = parse.parse_args(typed)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.rounds < 1 or args.burst_ms <= 0:
        parse.error("--rounds and --burst-ms must be positive")
    try:
        kernels = chosen(candidates(args.dtype), args.kernels)
    except ValueError as error:
        parse.error(str(error))
    started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    out = (args.out or default_out(device, gpu, started)).resolve()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            out=str(out),
            journal=str(Path(folder) / "journal.json"),
            grid="quick" if args.quick else args.grid,
            dtype=args.dtype,
            device=device,
            seed=random.randrange(2**31) if args.seed is None else args.seed,
            rounds=args.rounds,
            burst_ms=args.burst_ms,
            command=shlex.join(["python", "-m", "bench.forward", *typed]),
            started=started,
            kernels=args.kernels,
            deadline=time.time() + args.limit_seconds if args.limit_seconds else None,
            commit=args.commit,
        )
        if args.dry_run:
            print(describe(job, kernels))
            return 0
        if device == "cuda" and not torch.cuda.is_available():
            parse.error(
                "--device cuda: torch sees no CUDA device here (`fa3 doctor` says why); --dry-run shows the plan"
            )
        if out.exists():
            parse.error(f"--out {out} exists: rows of two runs are never mixed, name another file")
        try:
            trouble = supervise(job, Path(folder))
        except KeyboardInterrupt:  # the worker got it too; its rows are stored
            trouble = "was interrupted"
        run = finish(job, kernels, trouble)
    if trouble:
        print(f"the run is not complete: it {trouble}", file=sys.stderr)
    if run is None:
        print("nothing was measured", file=sys.stderr)
        return 1
    print(table(run))
    print(
        f"{sum(row.measured for row in run.rows)} rows measured, {sum(not row.measured for row in run.rows)} skipped: {out}"
    )
    return 0 if trouble in (None, LATE) else 1


if __name__ == "__main__":
    sys.exit(main())
