"""Chapter 3's lesson: the learner's consumer is rung 6 once its places are filled; what section 13 computes is right."""

import ast
import heapq
from dataclasses import replace

import jupytext
import numpy as np
import pytest
import torch

from fa3_course import paths, simulated
from fa3_course.simulated import parts, rung05
from fa3_lib.config import forward_config
from hopper_sim import Fault

FILLED = {
    "    # A: before the first turn": "    if me == 0:\n        t.turns[0].arrive()",
    "        # B: before the issue": "        await t.turns[me].sync()",
    "        # C: after the issue": "        t.turns[(me + 1) % len(t.turns)].arrive()",
}
SEED = np.random.SeedSequence().entropy % 2**32
rng = np.random.default_rng(SEED)


def cell() -> str:
    notebook = jupytext.read(paths.checkout() / "chapters" / "03_pingpong" / "lesson.py")
    (source,) = (c.source for c in notebook.cells if c.cell_type == "code" and "async def my_consumer" in c.source)
    return source.rpartition("\n\nprint(")[0]


def run(source: str, tile_m: int):
    names: dict = {"parts": parts, "rung05": rung05, "replace": replace}
    exec(source, names)
    config = simulated.configuration("6", 64, False, tile_m=tile_m)
    q = rng.standard_normal((1, tile_m, 1, 64))
    k, v = (rng.standard_normal((1, 4 * config.tile_n, 1, 64)) for _ in range(2))
    build = names["with_consumer"](names["my_consumer"])
    mine, rung = (simulated.simulate("6", q, k, v, config=config, **kw) for kw in ({"build": build}, {}))
    return mine, rung


@pytest.mark.parametrize("tile_m", [128, 192])
def test_filled_in_it_is_rung_6(tile_m):
    source = cell()
    for place, line in FILLED.items():
        assert source.count(place) == 1
        source = source.replace(place, line)
    mine, rung = run(source, tile_m)
    assert np.array_equal(mine.out, rung.out) and np.array_equal(mine.lse, rung.lse), SEED
    assert mine.report.cycles == rung.report.cycles


def test_untouched_it_takes_no_turns():
    with pytest.raises(Fault, match="unbalanced named barrier"):
        run(cell(), 128)


# --- section 13: the maximum that is kept --------------------------------------------------------------------------------


def functions_of(start: str) -> dict:
    """The functions of the one code cell that defines `start`."""
    notebook = jupytext.read(paths.checkout() / "chapters" / "03_pingpong" / "lesson.py")
    (source,) = (c.source for c in notebook.cells if c.cell_type == "code" and f"def {start}(" in c.source)
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names: dict = {"np": np, "torch": torch, "heapq": heapq}
    exec(compile(tree, "lesson.py", "exec"), names)
    return names


def error(scores, values, limit):
    """Largest error of a pass against fp64, and which (later block, row) were raised."""
    weights = np.exp2(scores.astype(float) - scores.max(1, keepdims=True))
    truth = weights @ values / weights.sum(1, keepdims=True)
    with np.errstate(all="ignore"):
        out, raised, _ = functions_of("one_pass")["one_pass"](scores, values, 32, limit)
    return np.abs(out - truth).max(), raised


def test_a_kept_maximum_is_as_good_as_the_true_one():
    scores, values = rng.standard_normal((48, 256), np.float32), rng.standard_normal((256, 64), np.float32)
    rounding = 2.0**-8 * np.abs(values).max()  # of a weight to bf16, and of what is added up
    for limit, raised in ((0.0, True), (2.0**40, False)):
        found, where = error(scores, values, limit)
        assert found < rounding and (where == raised).all(), SEED

    scores[5, 64:96] += 300.0  # beyond fp32 over the last block's maximum
    found, where = error(scores, values, 2.0**40)
    assert found < rounding and np.argwhere(where).tolist() == [[4, 5]], (
        SEED
    )  # blocks 6, 5, ..., 2: the fifth, row 5 alone


def test_rows_that_are_not_raised_keep_their_bits():
    one_pass = functions_of("one_pass")["one_pass"]
    scores, values = rng.standard_normal((16, 128), np.float32), rng.standard_normal((128, 32), np.float32)
    before = one_pass(scores, values, 32, 2.0**40)[0]
    scores[3, :32] += 200.0
    after = one_pass(scores, values, 32, 2.0**40)[0]
    others = np.arange(16) != 3
    assert np.array_equal(before[others], after[others]) and not np.array_equal(before[3], after[3]), SEED


def test_turns_of_the_library_are_those_that_the_lesson_names():
    text = (paths.checkout() / "chapters" / "03_pingpong" / "lesson.py").read_text(encoding="utf-8")
    assert "takes turns at d 64 and d 256, and none at d 128" in text
    assert [forward_config(d, d, False).ping_pong for d in (64, 128, 256)] == [True, False, True]
