"""Chapter 3's lesson: the consumer that the learner completes is rung 6 once its three places are filled."""

from dataclasses import replace

import jupytext
import numpy as np
import pytest

from fa3_course import paths, simulated
from fa3_course.simulated import parts, rung05
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
