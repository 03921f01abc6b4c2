"""The experiments of chapter 2: every variant compiles without spills, apart from the one that shows them."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from fa3_course import results

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("CuTe DSL has Linux wheels only", allow_module_level=True)

from bench import experiments_02
from fa3_course import rung_host, sass

CHANGED = [v for v in experiments_02.variants() if not v.kernel.__module__.startswith("fa3_rungs")]


def test_names_are_unique():
    labels = [v.label for v in experiments_02.variants()]
    assert len(labels) == len(set(labels))


@pytest.mark.parametrize("variant", CHANGED, ids=lambda v: v.label)
def test_changed_kernels_compile(variant):
    (report,) = sass.compile_report(
        lambda options: rung_host.compile_kernel(variant.kernel, variant.config, torch.bfloat16, options)
    )
    if variant.label == "registers: no setmaxnreg, tile_n 176":
        assert report.spill_store > 0
    else:
        assert report.problems() == []
    assert (report.count("USETMAXREG") == 0) == ("no setmaxnreg" in variant.label or variant.rung == "3")
    assert (report.count("UTMASTG") == 0) == (variant.label == "epilogue: stores from registers")
    assert (report.count("LDSM") > 0) == (variant.label == "Q: kept in registers")


def test_experiments_are_not_mistaken_for_runs(tmp_path):
    run = results.Run(date="2026-01-01T00:00:00Z", command="x", gpu="a card", grid="experiments_02")
    row = results.Row(
        "stages: 2", "fwd", "bf16", head_dim=128, causal=False, batch=1, seqlen=64, heads=1, ms=1.0, tflops=1.0
    )
    results.write(tmp_path / "experiments_02_a.json", replace(run, rows=(row,)))
    assert results.load(tmp_path) == []
    found = results.experiments("02", tmp_path)
    assert found is not None and found.rows == (row,)
    assert results.experiments("03", tmp_path) is None


@pytest.mark.gpu
@pytest.mark.parametrize("variant", experiments_02.variants(), ids=lambda v: v.label)
def test_every_variant_is_right(variant):
    from tests.tolerance import assert_close_to_truth

    q, k, v = (torch.randn(2, 700, 4, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    out, lse = rung_host.run(variant.kernel, variant.config, q, k, v)
    assert_close_to_truth(out, lse, q, k, v)
