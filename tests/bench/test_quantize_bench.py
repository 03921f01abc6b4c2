"""The benchmark of FP8 operands: every bar is checked, on a CPU too, and its bytes are counted."""

from dataclasses import replace

import pytest

from bench import quantize
from bench.cases import paper
from fa3_course import results

CASES = [paper(d, False, 16_384) for d in (64, 128, 256)]
OPS = pytest.mark.parametrize("op", quantize.ops(), ids=lambda op: op.name)


@OPS
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_bar_is_right(op, case):
    error = quantize.check(op, case, seed=3, device="cpu")
    assert (error == 0) == (op.want is not None)


@OPS
def test_a_wrong_answer_has_no_time(op):
    def make(head_dim, device):
        call = op.make(head_dim, device)
        return lambda x: call(x.roll(1, 1))  # each row where its neighbour belongs

    with pytest.raises(ValueError, match="wrong"):
        quantize.check(replace(op, make=make), CASES[0], seed=3, device="cpu")


def test_rows_keep_what_bandwidth_needs(tmp_path):
    rows = [quantize.row_of(op, CASES[1], ms=0.05) for op in quantize.ops()]
    run = results.Run(date="2026-01-01T00:00:00Z", command="x", gpu="a card", grid="quantize", rows=tuple(rows))
    results.write(tmp_path / "experiments_quantize_a.json", run)
    assert results.load(tmp_path) == []  # no run of whole kernels
    found = results.experiments("quantize", tmp_path).rows
    assert found == tuple(rows) and not any(row.is_stale() for row in found)
    copy = found[0]
    assert copy.kernel == "copy" and quantize.bandwidth(copy) == pytest.approx(4 * 16_384 * 2048 / 0.05e-3 / 1e9)
    assert "100% of copy" in quantize.report(found) and "75% of copy" in quantize.report(found)


def test_dry_run(capsys):
    assert quantize.main(["--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * len(quantize.ops()) and "134 MB" in lines[0]


@pytest.mark.gpu
@OPS
def test_every_bar_on_the_card(op):
    for case in CASES:
        quantize.check(op, case, seed=3)
