import json
import random
from dataclasses import replace

import pytest

from fa3_course import results
from fa3_course.results import Row, Run

ROW = Row(
    "fa3_lib",
    "fwd",
    "bf16",
    head_dim=128,
    causal=True,
    batch=1,
    seqlen=16384,
    heads=16,
    ms=1.5,
    tflops=700.0,
    timer="graph",
)


def test_a_run_survives_the_file(tmp_path):
    skipped = Row("fa4", "fwd", "bf16", skipped="No module named 'flash_attn'")
    run = Run(
        date="2026-01-02T03:04:05Z",
        command="test",
        gpu="card",
        peers={"fa3": "3.0"},
        finished=True,
        rows=(ROW, skipped),
    )
    results.write(tmp_path / "a.json", run)
    again = results.read(tmp_path / "a.json")
    assert replace(again, path=None) == run
    raw = json.loads((tmp_path / "a.json").read_text())
    assert raw["rows"][0]["pass"] == "fwd" and "direction" not in raw["rows"][0]
    assert not list(tmp_path.glob("*.part"))


def test_load_sorts_by_date_and_latest_is_the_newest_gpu_run(tmp_path):
    for name, date, gpu, rows in (
        ("z", "2026-01-01", "card", (ROW,)),
        ("a", "2026-01-03", None, (replace(ROW, timer="cpu"),)),
        ("m", "2026-01-02", "card", (replace(ROW, kernel="fa3"),)),
    ):
        results.write(tmp_path / f"{name}.json", Run(date=date, command="test", gpu=gpu, rows=rows))
    runs = results.load(tmp_path)
    assert [run.path.stem for run in runs] == ["z", "m", "a"]
    assert results.latest(runs).path.stem == "m"
    assert results.latest(runs, kernel="fa3_lib").path.stem == "z"
    assert results.latest([]) is None
    assert results.load(tmp_path / "nowhere") == []


def test_select_takes_measured_rows_only_and_refuses_unknown_fields():
    run = Run(
        date="d",
        command="c",
        rows=(ROW, replace(ROW, causal=False), replace(ROW, kernel="fa4", ms=None, tflops=None, skipped="x")),
    )
    assert run.select(head_dim=128) == [ROW, replace(ROW, causal=False)]
    assert run.select(causal=[True]) == [ROW]
    assert run.select(kernel="fa4") == []
    assert run.one(causal=True) == ROW and run.one(head_dim=64) is None
    with pytest.raises(ValueError, match="2 rows match"):
        run.one(kernel="fa3_lib")
    with pytest.raises(TypeError, match="headdim"):
        run.select(headdim=128)


def test_a_row_is_stale_when_any_of_its_files_changes(tmp_path):
    (tmp_path / "lib").mkdir()
    names = ["lib/a.py", "lib/b.py"]
    for name in names:
        (tmp_path / name).write_text(f"x = {random.random()}\n")
    row = replace(ROW, source=tuple(names), source_hash=results.source_hash(names, tmp_path))
    run = Run(date="d", command="c", rows=(row, ROW))
    assert run.stale(tmp_path) == []
    assert results.source_hash(reversed(names), tmp_path) == row.source_hash
    text = (tmp_path / names[1]).read_text()

    (tmp_path / names[1]).write_bytes(text.replace("\n", "\r\n").encode())  # git's line ends are no change
    assert run.stale(tmp_path) == []
    (tmp_path / names[1]).write_text(text + "y = 1\n")
    assert run.stale(tmp_path) == [row]  # the peer's row has no source and never turns stale
    (tmp_path / names[1]).unlink()
    assert run.stale(tmp_path) == [row]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"kernel": "fa3"}], "needs kernel, pass and dtype"),
        ([{"kernel": "fa3", "pass": "fwd", "dtype": "bf16"}], "either a time or a reason"),
        ([{"kernel": "fa3", "pass": "fwd", "dtype": "bf16", "ms": 1.0, "skipped": "no"}], "either a time or a reason"),
        ([{"kernel": "fa3", "pass": "fwd", "dtype": "bf16", "ms": 1.0, "speed": 3}], "speed"),
    ],
)
def test_a_file_that_is_no_run_is_refused_by_name(tmp_path, rows, message):
    (tmp_path / "bad.json").write_text(json.dumps({"run": {"date": "d", "command": "c"}, "rows": rows}))
    with pytest.raises(ValueError, match=f"bad.json.*{message}"):
        results.load(tmp_path)


def test_numbers_that_json_has_not_are_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        results.write(tmp_path / "a.json", Run(date="d", command="c", rows=(replace(ROW, error=float("nan")),)))


def test_stored_rows_match_the_kernels_in_the_tree():
    """Tells which stored rows are stale, as an expected failure.

    New rows need a Hopper, which a change to a kernel must not have to wait for; so staleness is shown in the summary of
    every test run (and by `fa3 ladder`) but does not turn it red.
    """
    newest = {}
    for run in results.load():
        for row in run.rows:
            if row.measured:
                newest[(run.gpu, row.kernel, row.direction, row.dtype, row.shape)] = row
    stale = sorted({row.kernel for row in newest.values() if row.is_stale()})
    if stale:
        pytest.xfail(f"stale rows of {', '.join(stale)}: measure again with `python -m bench.forward` on a Hopper")
