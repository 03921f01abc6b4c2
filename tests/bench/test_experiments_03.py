"""The experiments of chapter 3: variants compile without spills, every schedule visits every tile, exponentials are alone."""

import importlib.util
import inspect
import random
import sys
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("CuTe DSL has Linux wheels only", allow_module_level=True)

import cutlass.cute as cute

from bench import experiments_03
from fa3_course import results, rung_host, sass

STEPS = [(case, v) for case, variants in experiments_03.plan() for v in variants]
ONCE = list({(v.kernel, v.config): v for _, v in STEPS}.values())
# the rungs with their own configurations are compiled by tests/chapters
CHANGED = [v for v in ONCE if v.kernel.__module__ == "bench.experiments_03" or v.name == "no turns"]


def name(v):
    return f"{v.label}, d{v.config.head_dim} {'causal' if v.config.causal else 'full'}"


def test_names_are_unique_in_every_case():
    for case, variants in experiments_03.plan():
        labels = [v.label for v in variants]
        assert len(labels) == len(set(labels)), case
        assert all(v.config.causal == case.causal and v.config.head_dim == case.head_dim for v in variants)


def test_the_ablation_takes_out_one_thing_at_a_time():
    config = {v.name: v.config for v in experiments_03.ablation(128, False)}
    tiles = {(c.tile_m, c.tile_n, c.stages) for c in config.values()}
    assert tiles == {(128, 128, 2)}
    assert {n for n, c in config.items() if c.ping_pong} == {"all of it", "no overlap inside a warpgroup"}


@pytest.mark.parametrize("variant", CHANGED, ids=name)
def test_changed_kernels_compile(variant):
    (report,) = sass.compile_report(
        lambda options: rung_host.compile_kernel(variant.kernel, variant.config, torch.bfloat16, options)
    )
    assert report.problems() == []
    turns = report.count("BAR.ARV")
    assert (turns == 0) == (variant.name == "no turns")


def test_the_exponentials_are_alone_in_their_loop():
    (report,) = sass.compile_report(experiments_03.Exponentials.compile)
    assert report.problems() == []
    assert report.count("MUFU.EX2") == experiments_03.Exponentials.chains
    assert report.count("FMUL") == 0  # no scaling around them
    assert report.instructions < 100


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("kernel", ("AsTheyCome", "HeadsInterleaved"))
def test_a_schedule_visits_every_tile_once(kernel, causal):
    # a copy of the module: the DSL rewrites a function when it compiles it, and then it takes no Python numbers
    spec = importlib.util.spec_from_file_location("fresh_experiments_03", experiments_03.__file__)
    fresh = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    tile_of_round = inspect.unwrap(getattr(fresh, kernel).tile_of_round)
    config = experiments_03.RUNG["8"].make_config(128, causal)
    for m_blocks, heads, batch, sms in ((7, 3, 2, 5), (8, 1, 1, 132), (1, 5, 3, 4)):
        mQ = SimpleNamespace(shape=(m_blocks * config.tile_m, 128, heads, batch))
        units = -(-m_blocks // (2 if causal else 1)) * heads * batch  # as rung 8's __call__ counts them
        ctas = min(units, sms)
        visited = Counter()
        for cta in range(ctas):
            for r in range(-(-units // ctas) * (2 if causal else 1)):
                with (
                    mock.patch.object(cute.arch, "grid_dim", lambda ctas=ctas: (ctas, 1, 1)),
                    mock.patch.object(cute.arch, "block_idx", lambda cta=cta: (cta, 0, 0)),
                ):
                    tile = tile_of_round(SimpleNamespace(config=config), r, mQ)
                visited[tile] += tile[0] >= 0
        tiles = {(m, h, b): 1 for m in range(m_blocks) for h in range(heads) for b in range(batch)}
        assert {tile: n for tile, n in visited.items() if n} == tiles


def test_a_row_of_exponentials_is_stored_and_found(tmp_path):
    row = results.Row("exp against matmul: exponentials", "exp", "fp32", ms=1.0, tflops=4.0, sm_mhz=1980.0)
    run = results.Run(date="2026-01-01T00:00:00Z", command="x", gpu="a card", grid="experiments_03", rows=(row,))
    results.write(tmp_path / "experiments_03_a.json", run)
    found = results.experiments("03", tmp_path)
    assert found is not None and found.one(direction="exp") == row


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ONCE, ids=name)
def test_every_variant_is_right(variant):
    from tests.tolerance import assert_close_to_truth

    c = variant.config
    for sq, sk in ((700, 700), (1500, 1333)):
        q, k, v = (torch.randn(2, s, 4, c.head_dim, dtype=torch.bfloat16, device="cuda") for s in (sq, sk, sk))
        out, lse = rung_host.run(variant.kernel, c, q, k, v, causal=c.causal)
        assert_close_to_truth(out, lse, q, k, v, causal=c.causal)


@pytest.mark.gpu
def test_exponentials_are_right():
    n, rounds = random.randrange(1, 5000), random.randrange(1, 9)
    out = experiments_03.exponentials(n, rounds)
    torch.testing.assert_close(out.double().cpu(), experiments_03.Exponentials.truth(n, rounds), rtol=1e-5, atol=0)
