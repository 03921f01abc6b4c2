"""Chapter 4's kernel sitting: what it computes by hand agrees with the kernel, its faults have the verdicts that it speaks of."""

import importlib.util
from unittest import mock

import jupytext
import numpy as np
import pytest

from fa3_course import paths, results, rungs
from fa3_course.simulated import rung10
from hopper_sim import patched

LESSON = paths.checkout() / "chapters" / "04_fp8" / "lesson_b.py"
CELLS = [cell.source for cell in jupytext.read(LESSON).cells if cell.cell_type == "code"]
SEED = np.random.SeedSequence().entropy % 2**32


def cell(part: str) -> str:
    (source,) = (source for source in CELLS if part in source)
    return source


def names_of(*parts: str, **given) -> dict:
    """What the cells that hold these texts define, run after the lesson's first cell."""
    names: dict = {}
    exec(cell("import importlib.util"), names)
    names |= {"display": lambda _: None, "print": lambda *_: None} | given
    for part in parts:
        exec(cell(part), names)
    return names


@pytest.fixture(scope="module")
def lesson():
    return names_of("def ldmatrix_trans", "def fp8_problem", "BREAKS = {")


def test_the_turn_by_lanes_is_the_pre_pass(lesson):
    """ldmatrix.trans, prmt and stmatrix, lane by lane, against the key order of rung 10's host code and its simulator."""
    rng = np.random.default_rng(SEED)
    v = rng.integers(0, 127, (32, 16))
    turned = lesson["turn"](v)
    assert np.array_equal(turned, rung10.transposed_v(v[None, :, None])[0, 0]), SEED
    assert np.array_equal(turned, v[rungs._module("chapters/04_fp8/steps/fp8_numerics.py").key_order()].T), SEED


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="CuTe DSL has Linux wheels only")
def test_configurations_are_the_rungs(lesson):
    rung = rungs._module("chapters/04_fp8/steps/rung10_fp8.py")
    assert {d: (c.tile_m, c.tile_n) for d, c in lesson["CONFIGS"].items()} == rung.TILES
    assert all(rung.make_config(d, False) == config for d, config in lesson["CONFIGS"].items())


WANTED = {
    "nothing": "clean",
    "V's bytes counted as 16-bit": "wrong transaction bytes",
    "T is read before PV is done": "accumulator touched in flight",
    "V not K-major": "fp8 operand not K-major",
    "P in natural order": "clean",
    "Q's descale forgotten": "clean",
    "the newer shrink": "clean",
}


def test_breaks_have_the_verdicts_that_the_text_speaks_of(lesson):
    assert list(lesson["BREAKS"]) == list(WANTED)
    said = {what: lesson["verdict"](change) for what, change in lesson["BREAKS"].items()}
    for what, start in WANTED.items():
        assert said[what].startswith(start), said
    off = {what: int(text.split(" off by ")[1].split()[0]) for what, text in said.items() if text.startswith("clean")}
    assert off.pop("nothing") <= 5 and min(off.values()) > 10, said


def test_my_change_reaches_the_simulator(lesson):
    name, old, new = lesson["BREAKS"]["P in natural order"]
    with mock.patch.object(rung10, name, patched(getattr(rung10, name), old, new)):
        p = lesson["fp8_problem"](keys=256)
        lesson["simulated"].run("11", p)
    assert lesson["error_of"](p) > 0.1


def test_turned_inside_and_before_are_the_same_bits(lesson):
    before, inside = lesson["before"], lesson["inside"]
    assert np.array_equal(before.lse.numpy(), inside.lse.numpy()) and inside.v.shape == (1, 2048, 1, 128)


def stored_run(rows):
    return results.Run(
        date="2026-01-02T03:04:05Z", command="python -m bench.fp8", gpu="a card", finished=True, rows=tuple(rows)
    )


def test_tables_show_the_newest_stored_rows(tmp_path):
    shown, said = [], []
    names = names_of(
        "def newest", display=lambda x: shown.append(x.data), print=lambda *x: said.append(" ".join(map(str, x)))
    )
    show = names["show"]
    shape = {"direction": "fwd", "dtype": "fp8", "head_dim": 128, "causal": False, "batch": 1, "heads": 16, "ms": 2.0}
    show("fp8", "error", lambda row: row.error, tmp_path)
    assert "error: no row stored yet" in said[-1] and not shown
    rows = [results.Row("fa3_lib", seqlen=n, tflops=100.0 + n, error=0.01, **shape) for n in (1024, 2048)]
    results.write(tmp_path / "fp8_card.json", stored_run(rows))
    show("fp8", "TFLOP/s", lambda row: row.tflops, tmp_path)
    assert "1,124" in shown[-1] and "2,148" in shown[-1] and "a card" in said[-1]
    show("fp8", "TFLOP/s", lambda row: row.tflops, tmp_path, most=1)
    assert "1,124" not in shown[-1] and "2,148" in shown[-1]
    newer = results.Run(**{**vars(stored_run(rows[:1])), "date": "2026-02-02T03:04:05Z"})
    results.write(tmp_path / "experiments_fp8_card.json", newer)
    show("fp8", "error", lambda row: row.error, tmp_path)
    assert shown[-1].count("fa3_lib") == 1 and shown[-1].count("0.01") == 1
