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
    names |= {"display": lambda _: None, "print": lambda *_: None, "guess": None} | given
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


SHAPE = {"direction": "fwd", "dtype": "fp8", "batch": 1, "heads": 16, "ms": 2.0}
GEMM = results.Row("cublas", "gemm", "fp8", seqlen=8192, ms=1.0)  # the yardstick that such a run has besides


def stored_run(rows, **changes):
    run = {"date": "2026-01-02T03:04:05Z", "command": "python -m bench.fp8", "gpu": "a card", "finished": True}
    return results.Run(**{**run, **changes}, rows=tuple(rows))


def shown_by(part, function, run):
    """(tables, printed lines) of one of the lesson's functions that show a stored run."""
    tables, said = [], []
    names = names_of(
        part,
        display=lambda x: tables.append(x.data),
        print=lambda *x: said.append(" ".join(map(str, x))),
        results=mock.Mock(experiments=lambda _: None),
    )
    said.clear()
    names[function](run)
    return tables, said


@pytest.mark.parametrize("what", ("quantize", "errors", "speeds", "ratios"))
def test_nothing_stored_is_said(what):
    tables, said = shown_by(f"def show_{what}", f"show_{what}", None)
    assert not tables and len(said) == 1 and said[0].startswith("no row stored yet: `python -m bench.")


def test_stored_quantisation_is_shown():
    rows = [
        results.Row(name, head_dim=d, causal=False, seqlen=512, **{**SHAPE, "ms": ms})
        for name, d, ms in (("copy", 64, 0.02), ("copy", 128, 0.03), ("quantize: head, rotated", 128, 0.045))
    ]
    (table,), said = shown_by("def show_quantize", "show_quantize", stored_run(rows))
    assert "| copy | 20 | 30 |" in table and "| quantize: head, rotated |  | 45 |" in table and "a card" in said[0]


def test_stored_errors_are_shown():
    """Rows in the form of `bench.fp8`: "question: who"."""
    rows = [
        results.Row(f"{question}: {who}", head_dim=128, causal=False, seqlen=keys, error=0.25, **SHAPE)
        for question in ("V = 1", "V = 1, equal scores", "V has a mean", "needle")
        for who in ("fa3_lib", "fa3_lib one level", "fa3")
        for keys in (1024, 4096, 16384, 65536, 262144)
    ]
    third = [
        results.Row(f"table 3: {name}", head_dim=128, causal=False, seqlen=4096, error=error, **SHAPE)
        for name, error in (("one scale per tensor", 0.0213), ("one scale per head, rotated", 0.0087))
    ]
    (table,), said = shown_by("def show_errors", "show_errors", stored_run(rows + third))
    assert (
        "| one scale per tensor | 0.024 | 2.1e-02 |" in table
        and "| one scale per head, rotated |  | 8.7e-03 |" in table
    )
    assert (
        "a card" in said[-1] and "needle, 262,144 keys: fa3_lib 25 %, fa3_lib, one level 25 %, FA3 (C++) 25 %" in said
    )


def test_stored_speeds_are_shown():
    rows = [
        results.Row(name, head_dim=d, causal=causal, seqlen=n, tflops=500.0, **{**SHAPE, "ms": ms})
        for name, ms in (("fa3", 2.0), ("fa3_lib", 2.0), ("fa3_lib kernel", 1.9), ("transpose_v", 0.1))
        for d in (64, 128)
        for causal in (False, True)
        for n in (1024, 16384)
    ]
    (table,), _ = shown_by("def show_speeds", "show_speeds", stored_run([*rows, GEMM]))
    assert "| 1024 | 5.0 % | 5.0 % |" in table and "| 16384 |" in table


def test_stored_ratios_are_shown():
    """Geometric means over both masks and the lengths from 1k on, where both kernels have a row."""
    speeds = {"fa3": 400.0, "fa3_lib": 100.0, "fa3_lib one level": 800.0}
    rows = [
        results.Row(
            name, head_dim=d, causal=causal, seqlen=n, tflops=tflops * (4 if causal and d == 256 else 1), **SHAPE
        )
        for name, tflops in speeds.items()
        for d in (64, 256)
        for causal, n in ((False, 512), (False, 1024), (True, 1024))
        if (name, d, causal) != ("fa3", 256, True)
    ]
    rows.append(results.Row("fa3", head_dim=256, causal=True, seqlen=1024, tflops=100.0, **SHAPE))
    (table,), said = shown_by("def show_ratios", "show_ratios", stored_run([*rows, GEMM]))
    assert "| two levels / FA3 | 0.25 | 1.00 |" in table and "| one level / FA3 | 2.00 | 8.00 |" in table
    assert "| two levels, the kernel / FA3 |  |  |" in table and "1 times" in said[0]


def test_the_text_says_what_the_stored_rows_say():
    """Where sentences about FP8's speeds and errors lean on the rows that the repository stores."""
    speeds, errors = results.experiments("fp8"), results.experiments("fp8error")
    assert speeds and errors
    ratio = names_of("def ratios")["ratios"](speeds)
    full, causal, one_level = (
        [ratio[name, d] for d in (64, 128, 256)] for name in ("the same, full", "the same, causal", "one level / FA3")
    )
    assert min(*full[:2], *causal[:2]) > 1.05 and max(full[2], causal[2]) < 0.97
    assert min(ratio["two levels / one level", d] for d in (64, 128)) > 1.05
    assert 0.95 < min(one_level[:2]) < max(one_level[:2]) < 1.05 and 1.01 < one_level[2] < 1.07

    longest = max(row.seqlen for row in errors.rows)
    for question in ("V = 1", "V = 1, equal scores", "V has a mean"):
        error = {who: errors.one(kernel=f"{question}: {who}", seqlen=longest).error for who in ("fa3", "fa3_lib")}
        assert error["fa3"] > 0.5 and error["fa3_lib"] < 2**-8, question
    needle = [errors.one(kernel=f"needle: {who}", seqlen=longest).error for who in ("fa3_lib one level", "fa3_lib")]
    assert needle[0] > 0.1 and needle[1] == 0
    table_3 = {
        rotated: errors.one(kernel=f"table 3: one scale per tensor{rotated}").error for rotated in ("", ", rotated")
    }
    assert table_3[", rotated"] < 0.6 * table_3[""]
