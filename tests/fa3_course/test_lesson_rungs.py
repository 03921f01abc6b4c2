"""What lessons say of a rung's file."""

import importlib.util

import pytest

from fa3_course import lesson_rungs, results, rungs

FILE = rungs.find("5").file


def test_the_stored_row_is_found_by_file_and_by_name():
    shape = dict(direction="fwd", dtype="bf16", head_dim=128, causal=False, batch=2, seqlen=8192, heads=16)
    rows = tuple(results.Row(name, ms=1.0, tflops=t, **shape) for name, t in (("rung05_warp_specialised", 1.0), ("fa3", 2.0)))  # fmt: skip
    run = results.Run(date="2026-01-01T00:00:00Z", command="x", gpu="a card", rows=rows)
    assert lesson_rungs.stored(run, FILE, head_dim=128).tflops == 1.0
    assert lesson_rungs.stored(run, "fa3", head_dim=128).tflops == 2.0
    assert lesson_rungs.stored(run, FILE, head_dim=64) is None and lesson_rungs.stored(None, FILE) is None
    if not rungs.has_hopper():
        assert "needs a Hopper" in (text := lesson_rungs.check_and_measure(FILE, run)) and "1 TFLOP/s on a card" in text
        assert "no stored row" in lesson_rungs.check_and_measure(FILE, None)


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="CuTe DSL has no wheels here")
def test_machine_code_needs_no_gpu():
    report = lesson_rungs.machine_code(FILE)
    assert report.count("HGMMA") > 0 and report.count("UTMALDG") > 0 and report.spill_store == 0


@pytest.mark.gpu
def test_a_rung_is_checked_and_timed():
    lesson_rungs.check(FILE)
    assert lesson_rungs.tflops(FILE) > 0
