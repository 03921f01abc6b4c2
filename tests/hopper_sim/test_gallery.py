"""The correct kernel stays clean; every broken one gets its verdict, whatever the timing."""

from pathlib import Path

import numpy as np
import pytest

from hopper_sim import HOPPER, Kind, gallery

WILD = HOPPER.with_(jitter=1.0)  # latencies from nothing to twice their value


def test_clean_and_equal_under_200_seeds():
    first = None
    for seed in range(200):
        p = gallery.problem(5, m=128, k=200)
        gallery.run(p, seed, machine=WILD if seed % 2 else HOPPER)
        first = p.c.stored if first is None else first
        assert np.array_equal(p.c.stored, first), f"seed {seed} gives other bits"


@pytest.mark.parametrize(
    "m, k, stages, dtype", [(256, 384, 2, "f16"), (200, 72, 3, "bf16"), (64, 328, 1, "f16"), (130, 208, 4, "e4m3")]
)
def test_numbers(m, k, stages, dtype):
    p = gallery.problem(m + k, m, k, dtype)
    report = gallery.run(p, stages=stages)
    a = p.a.numpy()
    scaled = np.float32(p.scale) * a  # a power of two: exact in every format, subnormal 8-bit numbers aside
    truth = scaled.astype(np.float64) @ p.b.numpy().astype(np.float64).T
    tolerance = np.abs(truth).max() * (2e-3 if dtype != "e4m3" else 3e-2)
    assert np.abs(p.c.numpy() - truth).max() < tolerance
    assert report.flops == 2 * len(report.cta_ends) * gallery.TILE_M * gallery.TILE_N * gallery.TILE_K * p.k_tiles


@pytest.mark.parametrize("fault", gallery.FAULTS, ids=lambda fault: fault.title.replace(" ", "-"))
def test_each_fault_is_named(fault):
    for seed in range(6):
        verdict = fault.run(seed, WILD if seed % 2 else HOPPER)
        assert verdict is not None, f"seed {seed}: nothing found"
        assert verdict.kind == fault.kind, f"seed {seed}: {verdict}"


def test_the_gallery_covers_every_kind_but_the_runaway():
    assert {fault.kind for fault in gallery.FAULTS} == set(Kind) - {Kind.RUNAWAY}


def test_verdicts_quote_the_changed_line():
    fault = next(f for f in gallery.FAULTS if f.title == "a forgotten await")
    text = str(fault.run())
    assert "consumer.patched.py" in text and "full[slot].wait(phase)" in text and "write `await`" in text


def test_a_deadlock_says_who_waits_on_what():
    fault = next(f for f in gallery.FAULTS if f.title == "one warp in four releases the slot")
    text = str(fault.run())
    assert "producer waits for empty[0].wait(0)" in text
    assert "2 of 8 arrivals" in text
    assert "cycle: producer -> consumer" in text


def test_the_readme_lists_the_verdicts_of_today():
    readme = Path(gallery.__file__).with_name("README.md").read_text(encoding="utf-8")
    assert gallery.listing() in readme, "run `python -m hopper_sim.gallery --write`"
