"""A whole run on the CPU: rows, limits, and kernels that raise, crash and hang without taking the others along."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import forward
from bench.worker import Job
from fa3_course import results

WORKER = """
import os, signal, sys, time
import torch
from bench import worker
from bench.kernels import Kernel
from fa3_lib.reference import attention

worker.STAGE_SECONDS.update(check=6, time=6)

def right(q, k, v, causal):
    return attention(q, k, v, causal=causal)[0].to(q.dtype)

def on_causal(action):
    def call(q, k, v, causal):
        if causal:
            action()
        return right(q, k, v, causal)
    return call

def fail():
    raise RuntimeError("no such luck")

def missing():
    raise ImportError("No module named 'peer'")

calls = {
    "good": right,
    "zeros": lambda q, k, v, causal: torch.zeros_like(q),
    "raises": on_causal(fail),
    "crashes": on_causal(lambda: os.kill(os.getpid(), signal.SIGSEGV)),
    "hangs": on_causal(lambda: time.sleep(600)),
    "also_good": right,
}
kernels = [Kernel(n, "bf16", lambda call=c: call, device="cpu", timer="cpu") for n, c in calls.items()]
kernels.insert(1, Kernel("absent", "bf16", missing, device="cpu", timer="cpu"))
worker.Worker(worker.Job.read(sys.argv[1]), kernels).measure_all()
"""


def job(tmp_path, **more):
    given = dict(
        out=str(tmp_path / "out.json"),
        journal=str(tmp_path / "journal.json"),
        grid="quick",
        dtype="bf16",
        device="cpu",
        seed=3,
    )
    return Job(**given, rounds=2, burst_ms=1.0, command="test", started="2026-01-01T00:00:00Z", **more)


def start(script: Path, path: Path) -> subprocess.Popen:
    """A worker of the benchmark; the script lies elsewhere, so that it must be told where `bench` is."""
    environment = os.environ | {"PYTHONPATH": str(results.ROOT)}
    return subprocess.Popen([sys.executable, str(script), str(path)], cwd=results.ROOT, env=environment)


def test_a_kernel_that_raises_crashes_or_hangs_costs_only_its_own_rows(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    asked = job(tmp_path)

    trouble = forward.supervise(asked, tmp_path, lambda path: start(script, path))
    run = forward.finish(asked, [], trouble)
    assert trouble is None and run.finished
    assert set(asked.broken) == {"crashes/bf16", "hangs/bf16"}
    rows = {name: [r for r in run.rows if r.kernel == name] for name in {r.kernel for r in run.rows}}
    for name in ("good", "also_good"):
        assert [row.causal for row in rows[name]] == [False, True]
        for row in rows[name]:
            assert row.ms_p25 <= row.ms <= row.ms_p75 and row.timer == "cpu" and 0 < row.error < 1e-2
            flops = 4 * row.seqlen**2 * 64 * row.heads / (2 if row.causal else 1)
            assert row.tflops == pytest.approx(flops / row.ms / 1e9, rel=1e-5)
    assert [row.skipped for row in rows["absent"]] == ["ImportError: No module named 'peer'"]
    assert all("wrong: relative error" in row.skipped for row in rows["zeros"]) and len(rows["zeros"]) == 2
    full, causal = rows["raises"]
    assert full.measured and causal.skipped == "RuntimeError: no such luck"
    for name, words in (("crashes", "signal 11"), ("hangs", "hung for more than 6 s")):
        full, lost = rows[name]
        assert full.measured and full.causal is False
        assert words in lost.skipped and "check on d64 causal" in lost.skipped
    text = forward.table(run)
    assert "skipped: hangs on every other shape: hung" in text and "also_good: error at most" in text


def test_a_passed_deadline_leaves_rows_that_say_so(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    asked = job(tmp_path, deadline=time.time() - 1)
    trouble = forward.supervise(asked, tmp_path, lambda path: start(script, path))
    run = forward.finish(asked, [], trouble)
    assert not any(row.measured for row in run.rows)
    assert sum(row.skipped == "the time limit of the run was reached" for row in run.rows) == 2 * 6


def test_the_command_measures_the_rungs_of_a_cpu(tmp_path):
    out = tmp_path / "rows.json"
    command = [
        sys.executable,
        "-m",
        "bench.forward",
        "--device",
        "cpu",
        "--kernels",
        "0,1,fa3",
        "--rounds",
        "2",
        "--burst-ms",
        "1",
    ]
    done = subprocess.run([*command, "--out", out], cwd=results.ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    run = results.read(out)
    assert (
        run.finished
        and run.gpu is None
        and run.torch
        and run.command.startswith("python -m bench.forward --device cpu")
    )
    measured = [row for row in run.rows if row.measured]
    assert sorted({row.rung for row in measured}) == ["0", "1"] and len(measured) == 4
    assert all(row.source and not row.is_stale() for row in measured)
    assert {row.dtype: row.skipped for row in run.rows if row.kernel == "fa3"}.keys() == {"bf16", "fp8"}

    again = subprocess.run([*command, "--out", out], cwd=results.ROOT, capture_output=True, text=True, timeout=300)
    assert again.returncode == 2 and "never mixed" in again.stderr


@pytest.mark.parametrize("grid", ["quick", "small", "full"])
def test_the_dry_run_lists_every_kernel_and_shape(grid, capsys):
    assert forward.main(["--dry-run", "--device", "cuda", "--grid", grid]) == 0
    text = capsys.readouterr().out
    for case in forward.GRIDS[grid]:
        assert f"  {case}" in text
    for name in ("cublas/fp8", "cudnn/bf16", "fa2/bf16", "fa3/fp8", "fa4/bf16", "fa3_lib/bf16", "rung02"):
        assert name in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernels", "fa9"], "unknown kernel fa9"),
        (["--rounds", "0"], "must be positive"),
        (["--grid", "huge"], "invalid choice"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        forward.main([*arguments, "--dry-run"])
    assert stop.value.code == 2 and message in capsys.readouterr().err
