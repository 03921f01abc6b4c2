"""What the lessons show: diffs, tables of machine code, experiments."""

from collections import Counter

import pytest

from fa3_course import lesson_views, results, rungs
from fa3_course.sass import KernelReport


def test_diff_holds_what_the_later_rung_adds_and_counts_it():
    text = lesson_views.rung_diff("4", "5").data
    assert "+            cute.arch.setmaxregister_increase(cfg.consumer_registers)" in text
    assert "-TILE_M = WGMMA_M" in text
    added = sum(line.startswith("+") for line in text.splitlines())
    assert f"{added} lines added" in text
    assert "Rung 5:" not in text, "head docstrings are not part of the diff"


def test_diff_takes_files_as_well_as_numbers():
    files = [rungs.find(n).file for n in ("4", "5")]
    assert lesson_views.rung_diff(*files).data == lesson_views.rung_diff("4", "5").data


def test_the_ladder_adds_one_idea_at_a_time():
    """Rung 5 is rung 4 with a second consumer: a diff that a reader takes in at once."""
    texts = [lesson_views.rung_diff(a, b).data for a, b in (("3", "4"), ("4", "5"))]
    changed = [sum(line.startswith(("+", "-")) for line in text.splitlines()) for text in texts]
    assert changed[1] < 50 and changed[0] < 160


def test_table_counts_by_prefix():
    report = KernelReport("k", 168, 0, Counter({"HGMMA.64x128x16.F32": 3, "HGMMA.64x64x16.F32": 1}), 8, 8, 4096)
    text = lesson_views.sass_table({"a": report, "b": report}, ("HGMMA",)).data
    assert "| 4 | 4 |" in text and "| 168 | 168 |" in text and "| 4,096 | 4,096 |" in text and "| 8 | 8 |" in text


@pytest.fixture
def run():
    shape = dict(direction="fwd", dtype="bf16", head_dim=128, causal=False, batch=2, seqlen=8192, heads=16)
    names = ("stages: rung 4, stages 1", "stages: rung 4, stages 2", "Q: kept in registers", "rung04_ring")
    rows = tuple(results.Row(name, ms=1.0 + i, tflops=100.0 + i, **shape) for i, name in enumerate(names))
    return results.Run(date="2026-01-01T00:00:00Z", command="x", gpu="a card", rows=rows)


def test_rows_of_an_experiment_keep_their_order(run):
    names = [row.kernel for row in lesson_views.experiment_rows(run, "stages", causal=False)]
    assert names == ["stages: rung 4, stages 1", "stages: rung 4, stages 2"]
    assert lesson_views.experiment_rows(run, "stages", causal=True) == []
    assert lesson_views.experiment_rows(None, "stages") == []


def test_speeds_finds_rungs_by_number(run):
    found = lesson_views.speeds(run, ["3", "4"], head_dim=128, causal=False, seqlen=8192)
    assert list(found) == ["4"] and found["4"].tflops == 103.0
    assert lesson_views.speeds(None, ["4"]) == {}


def test_missing_experiments_say_which_command_stores_them(run):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2)
    lesson_views.draw_experiment(left, [], "nothing")
    assert "python -m bench.experiments_02" in left.texts[0].get_text()
    rows = lesson_views.experiment_rows(run, "stages")
    lesson_views.draw_experiment(right, rows, "stages")
    assert [bar.get_width() for bar in right.patches] == [row.tflops for row in rows]
    assert [label.get_text() for label in right.get_yticklabels()] == ["rung 4, stages 1", "rung 4, stages 2"]
    plt.close(fig)


def test_source_of_a_method_is_not_indented():
    assert lesson_views.source(rungs.Rung.load).data.startswith("```python\ndef load")
