"""The process that touches the card: measures the cases of a job one by one and stores the rows after each.

`bench.forward` starts it, watches its journal, and starts it again without a kernel that crashed or hung; rows that are
in the file already are not measured twice.
"""

import gc
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from bench import card, kernels, timing
from bench.cases import CPU_CASES, GRIDS, Case
from bench.kernels import Kernel
from fa3_course import results
from fa3_course.results import Row, Run

CONTEXT_LOST = 70  # exit code: a CUDA error that only a new process gets rid of
STAGE_SECONDS = {"load": 180, "check": 180, "host": 60, "capture": 120, "time": 120, "rest": 180}


@dataclass
class Job:
    """What `bench.forward` asks for; travels as JSON.

    Args:
        out: results file. journal: file that says which kernel is being worked on.
        grid: a name in `bench.cases.GRIDS`. kernels: comma-separated names, None for all. dtype: of the 16-bit kernels.
        device: "cuda" or "cpu" (the CPU cases of the CPU kernels, nothing else).
        deadline: time.time() after which no case is started, None for no limit.
        rounds, burst_ms: every kernel is timed this often, for this long.
        broken: by kernel label, why a kernel is not to be touched again.
        command, commit, started: for the run's head.
    """

    out: str
    journal: str
    grid: str
    dtype: str
    device: str
    seed: int
    rounds: int
    burst_ms: float
    command: str
    started: str
    kernels: str | None = None
    deadline: float | None = None
    commit: str | None = None
    broken: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: str | Path) -> "Job":
        return Job(**json.loads(Path(path).read_text(encoding="utf-8")))


def plan(job: Job, candidates: list[Kernel]) -> list[tuple[Case, list[Kernel]]]:
    """Each case with the kernels that are measured on it, the most wanted case first.

    CPU kernels run on the CPU cases, in a run on a card too.
    """
    steps = []
    if job.device == "cuda":
        for case in GRIDS[job.grid]:
            steps.append((case, [k for k in candidates if k.device == "cuda" and k.meant_for(case)]))
    for case in CPU_CASES:
        steps.append((case, [k for k in candidates if k.device == "cpu" and k.meant_for(case)]))
    return [(case, group) for case, group in steps if group]


def row_of(kernel: Kernel, case: Case | None = None, **values: object) -> Row:
    """A row with everything that is known of the kernel and the case before any measurement."""
    shape = case.fields if case else {"direction": kernel.direction}
    digest = results.source_hash(kernel.source) if kernel.source else None
    return Row(
        kernel=kernel.name,
        dtype=kernel.dtype,
        rung=kernel.rung,
        source=kernel.source,
        source_hash=digest,
        **shape,
        **values,
    )


def reason(error: BaseException) -> str:
    """An exception in one line of at most 300 characters."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"[:300]


class Worker:
    """State of one worker process: the run so far, and what was learnt about each kernel."""

    def __init__(self, job: Job, candidates: list[Kernel]):
        self.job, self.out = job, Path(job.out)
        self.candidates = candidates
        self.run = results.read(self.out) if self.out.exists() else self._new_run()
        self.done = {(r.kernel, r.dtype, r.shape) for r in self.run.rows}
        self.unusable: dict[str, str] = {}  # label -> why, on every shape
        self.checked: dict[tuple, tuple[float | None, float | None, str | None]] = {}  # -> error, host_us, skipped
        self.sampler = card.Sampler(card.open_nvml() if job.device == "cuda" else None)

    def _new_run(self) -> Run:
        commit, dirty = card.git_state()
        if self.job.commit:
            commit, dirty = self.job.commit, dirty if commit else None
        facts = card.machine() if self.job.device == "cuda" else {**card.machine(), "gpu": None}
        head = Run(
            date=self.job.started,
            command=self.job.command,
            commit=commit,
            dirty=dirty,
            grid=self.job.grid if self.job.device == "cuda" else "cpu",
            dtype=self.job.dtype,
            seed=self.job.seed,
            peers=kernels.peer_versions(),
        )
        return replace(head, **facts)

    def add(self, rows: list[Row]) -> None:
        new = [row for row in rows if (row.kernel, row.dtype, row.shape) not in self.done]
        self.done |= {(row.kernel, row.dtype, row.shape) for row in new}
        self.run = replace(self.run, rows=(*self.run.rows, *new))
        results.write(self.out, self.run)

    def stage(self, kernel: Kernel | None, case: Case | None, name: str) -> None:
        """Writes down what is about to happen: all that the parent knows if this process dies or hangs."""
        label = kernel.label if kernel else None
        line = {"kernel": label, "case": str(case) if case else None, "stage": name, "limit_s": STAGE_SECONDS[name]}
        partial = self.job.journal + ".part"
        Path(partial).write_text(json.dumps(line), encoding="utf-8")
        os.replace(partial, self.job.journal)

    def measure_all(self) -> None:
        """Every case of the plan, until the deadline; what is left gets rows that say so."""
        for kernel in self.candidates:
            self.load(kernel)
        self.stage(None, None, "rest")
        gc.freeze()  # every graph capture collects garbage; the DSL's many modules need not be searched each time
        longest = 0.0
        with self.sampler:
            for case, group in plan(self.job, self.candidates):
                group = [
                    k
                    for k in group
                    if k.label not in self.unusable and (k.name, k.dtype, row_of(k, case).shape) not in self.done
                ]
                if not group:
                    continue
                left = self.job.deadline - time.time() if self.job.deadline else float("inf")
                if left < longest:
                    self.add([row_of(k, case, skipped="the time limit of the run was reached") for k in group])
                    continue
                start = time.time()
                self.add(self.measure(case, group))
                longest = max(longest, time.time() - start)
                print(f"{case}: {len(group)} kernels, {time.time() - start:.1f} s", flush=True)

    def load(self, kernel: Kernel) -> None:
        """Imports a kernel; if that fails, one row says why for every shape."""
        why = self.job.broken.get(kernel.label)
        if why is None and kernel.device == "cuda" and not torch.cuda.is_available():
            why = "needs a CUDA device"
        if why is None and kernel.device == "cuda" and self.job.device == "cpu":
            why = "runs on the card, and this run measures the CPU only"
        if why is None:
            try:
                self.stage(kernel, None, "load")
                kernels._loaded(kernel)
            except Exception as error:  # a peer's import may raise anything
                why = reason(error)
        if why is not None:
            self.unusable[kernel.label] = why
            self.add([row_of(kernel, skipped=why)])

    def measure(self, case: Case, group: list[Kernel]) -> list[Row]:
        """Rows of one case: check, capture, then interleaved rounds."""
        rows, timers = [], {}
        sets: dict[tuple, list[tuple]] = {}  # kept until the end: graphs hold their addresses
        for kernel in group:
            error, host, skipped = self.check(kernel, case)
            if skipped is None:
                skipped = kernel.refuses(case, torch.cuda.mem_get_info()[0] if kernel.device == "cuda" else None)
            if skipped is None:
                try:
                    self.stage(kernel, case, "capture")
                    timers[kernel] = self.timer(kernel, case, sets), error, host
                    continue
                except Exception as caught:
                    skipped = self.survive(kernel, case, caught)
            rows.append(row_of(kernel, case, error=error, host_us=host, skipped=skipped))

        samples: dict[Kernel, list[float]] = {kernel: [] for kernel in timers}
        for turn in range(self.job.rounds):
            for kernel in timing.rotated(list(samples), turn):
                try:
                    self.stage(kernel, case, "time")
                    with self.sampler.during(kernel.label):
                        samples[kernel] += timers[kernel][0].burst(self.job.burst_ms)
                except Exception as caught:
                    del samples[kernel]
                    rows.append(row_of(kernel, case, skipped=self.survive(kernel, case, caught)))

        for kernel, times in samples.items():
            low, mid, high = timing.quartiles(times)
            mhz, watts = self.sampler.take(kernel.label)
            timer, error, host = timers[kernel]
            figures = {
                "ms": mid,
                "ms_p25": low,
                "ms_p75": high,
                "tflops": case.flops / mid / 1e9,
                "host_us": host,
                "error": error,
            }
            short = {name: None if value is None else float(f"{value:.6g}") for name, value in figures.items()}
            rows.append(row_of(kernel, case, **short, sm_mhz=mhz, watts=watts, timer=timer.name))
        self.stage(None, case, "rest")
        order = {kernel.label: i for i, kernel in enumerate(self.candidates)}
        rows.sort(key=lambda row: order[f"{row.kernel}/{row.dtype}"])
        timers.clear()
        sets.clear()
        if self.job.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        return rows

    def check(self, kernel: Kernel, case: Case) -> tuple[float | None, float | None, str | None]:
        """(relative error, host time in us, why not) of a kernel at this head_dim and mask; found once."""
        key = (kernel.label, case.tiny())
        if key not in self.checked:
            error = host = skipped = None
            try:
                self.stage(kernel, case, "check")
                error = kernels.check(kernel, case, self.job.seed)
                if kernel.device == "cuda":
                    self.stage(kernel, case, "host")
                    tiny = case.tiny()
                    host = timing.host_us(kernel.bind(tiny), kernels.inputs(tiny, kernel.dtype, "cuda", self.job.seed))
            except Exception as caught:
                skipped = self.survive(kernel, case, caught)
            self.checked[key] = error, host, skipped
        return self.checked[key]

    def timer(self, kernel: Kernel, case: Case, sets: dict[tuple, list[tuple]]) -> object:
        """The kernel's timer on this case; input sets are shared between kernels of one dtype."""
        key = (kernel.dtype, kernel.device, kernel.as_numpy)
        if key not in sets:
            count = (
                timing.input_sets(case.bytes(kernel.dtype), self.run.l2_bytes or 0) if kernel.device == "cuda" else 2
            )
            seeds = range(self.job.seed + 1, self.job.seed + 1 + count)
            sets[key] = [kernels.inputs(case, kernel.dtype, kernel.device, seed, kernel.as_numpy) for seed in seeds]
        call = kernel.bind(case)
        try:
            return timing.TIMERS[kernel.timer](call, sets[key])
        except Exception as error:
            if kernel.timer != "graph" or isinstance(error, torch.OutOfMemoryError):
                raise
            self.survive(kernel, case, error)
            print(f"{kernel.label} on {case}: no CUDA graph ({reason(error)}); timing eager calls", flush=True)
            return timing.EventTimer(call, sets[key])

    def survive(self, kernel: Kernel, case: Case, error: Exception) -> str:
        """The reason for the row, if the process can go on; otherwise stores it and ends the process."""
        text = reason(error)
        print(f"{kernel.label} on {case}: {text}", file=sys.stderr, flush=True)
        if kernel.device == "cuda":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except Exception:
                self.add([row_of(kernel, case, skipped=text)])
                os._exit(CONTEXT_LOST)
        return text


def main(argv: list[str] | None = None) -> None:
    (path,) = argv if argv is not None else sys.argv[1:]
    job = Job.read(path)
    torch.manual_seed(job.seed)
    with torch.no_grad():
        Worker(job, kernels.chosen(kernels.candidates(job.dtype), job.kernels)).measure_all()


if __name__ == "__main__":
    main()
