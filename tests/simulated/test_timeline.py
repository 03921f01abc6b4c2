"""Timelines: one form for simulated and measured ones, the pictures, predictions, the command, the view."""

import base64
import itertools
import json
import random

import numpy as np
import pytest
from typer.testing import CliRunner

from fa3_course import results, sim_view, simulated, timeline
from fa3_course.cli import app
from fa3_course.simulated import predict


def simulated_timeline(number="6", keys=640, d=64):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, s, 1, d)) for s in (128, keys, keys))
    return timeline.from_dict(simulated.simulate(number, q, k, v).report.timeline.as_dict(rung=number))


def test_round_trip_through_a_file(tmp_path):
    t = simulated_timeline()
    timeline.write(t, tmp_path / "t.json")
    assert timeline.read(tmp_path / "t.json") == t
    assert t.meta == {"rung": "6"} and t.unit == "cycles"


def test_a_timeline_from_a_card_is_read_and_drawn(tmp_path):
    """Stamps in nanoseconds, no lanes, no kinds: what a kernel on the card can write."""
    events = []
    for turn in range(16):  # of the two warpgroups, one after the other; softmax follows the turn
        wg, start = turn % 2, 500 * turn
        stamps = (
            ("tensor core", "PV", 0, 240),
            ("tensor core", "QK", 240, 490),
            (f"consumer{wg}", "softmax", 500, 950),
        )
        events += [
            {"lane": lane, "name": name, "start": start + begin, "end": start + end, "role": f"consumer{wg}"}
            for lane, name, begin, end in stamps
        ]
    path = tmp_path / "card.json"
    path.write_text(json.dumps({"schema": "fa3-timeline/1", "unit": "ns", "events": events, "meta": {"gpu": "H200"}}))
    t = timeline.read(path)
    assert set(t.lanes) == {"tensor core", "consumer0", "consumer1"}
    assert t.busy("tensor core") == pytest.approx(16 * 490)
    figure = timeline.draw(t, "stamped")
    whole, inside = figure.axes
    assert inside.get_xlabel() == "time in nanoseconds"
    assert whole.get_xlim() == t.span and inside.get_xlim() == (
        3 * 1000 - 760,
        6 * 1000 - 760,
    )  # three rounds, QK to QK


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"schema": "other"}, "schema is 'other'"),
        ({"unit": "hours"}, "unit is 'hours'"),
        ({"events": []}, "has no events"),
        ({"events": [{"lane": "a", "name": "b", "start": 2, "end": 1}]}, "event 0 .* end before start"),
        ({"events": [{"lane": "a", "name": "b", "start": 2}]}, "event 0 .* lacks or spoils 'end'"),
        ({"events": [{"lane": "a", "name": "b", "start": 0, "end": 1, "kind": "rest"}]}, "a kind that is not one of"),
    ],
)
def test_a_broken_file_is_refused_by_name(change, complaint, tmp_path):
    good = {"schema": "fa3-timeline/1", "unit": "cycles", "events": [{"lane": "a", "name": "b", "start": 0, "end": 1}]}
    path = tmp_path / "t.json"
    path.write_text(json.dumps(good | change))
    with pytest.raises(ValueError, match=complaint) as caught:
        timeline.read(path)
    assert str(path) in str(caught.value)


def test_perfetto_has_every_event_on_its_lane(tmp_path):
    t = simulated_timeline()
    timeline.write_perfetto(t, tmp_path / "p.json")
    trace = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    names = {row["tid"]: row["args"]["name"] for row in trace if row["name"] == "thread_name"}
    assert list(names.values()) == list(t.lanes)
    drawn = [row for row in trace if row["ph"] == "X"]
    assert len(drawn) == len(t.events)
    assert sum(row["dur"] for row in drawn if names[row["tid"]] == "mufu") == pytest.approx(t.busy("mufu"))


def test_ping_pong_shows_as_turns():
    """In rung 6 the tensor core serves whole turns; in rung 5 the two warpgroups' first GEMMs are mixed."""

    def changes(number):
        events = sorted(
            (e for e in simulated_timeline(number).events if e.lane == "tensor core"), key=lambda e: e.start
        )
        owners = [e.role for e in events]
        return sum(a != b for a, b in itertools.pairwise(owners))

    blocks = 5
    assert changes("6") == 2 * blocks + 1  # blocks + 1 turns of each of two warpgroups
    assert changes("5") > changes("6")


def test_softmax_runs_under_the_other_warpgroups_gemms():
    def covered(number):
        t = simulated_timeline(number, d=128)
        gemms = [(e.start, e.end) for e in t.events if e.lane == "tensor core" and e.role == "consumer1"]
        softmax = [(e.start, e.end) for e in t.events if e.lane == "consumer0" and e.name == "softmax"]
        under = sum(max(0.0, min(b, d) - max(a, c)) for a, b in softmax for c, d in gemms)
        return under / sum(b - a for a, b in softmax)

    assert covered("6") > 0.6 and covered("6") > 2 * covered("5")


def test_cut_outside_and_unknown_lane_are_refused():
    import matplotlib.pyplot as plt

    t = simulated_timeline()
    with pytest.raises(ValueError, match="nothing happens between"):
        t.cut(-10, -5)
    with pytest.raises(ValueError, match="no lane is called warp7"):
        timeline.gantt(t, plt.subplots()[1], lanes=["warp7"])


# --- predictions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number, head_dim", [("5", 128), ("7", 64), ("8", 64), ("10", 64)])
def test_prediction_stays_below_its_bound(number, head_dim):
    p = predict.predict(number, head_dim, False, 4096)
    assert 0.2 * p.cap < p.tflops <= p.cap * 1.0001
    peak = (8192 if number == "10" else 4096) * 132 * p.clock_ghz * 1e-3
    assert p.cap <= peak * 1.0001


def test_a_short_problem_agrees_with_its_full_simulation():
    """a + b x blocks, from 6 and 14 blocks, predicts the cycles of a run of 10."""
    c = predict.cost("6", 64, False)
    rng = np.random.default_rng(random.randrange(1000))
    q, k, v = (rng.standard_normal((1, s, 1, 64)) for s in (128, 1280, 1280))
    cycles = simulated.simulate("6", q, k, v).report.cycles
    assert c.cta + c.tile + 10 * c.block == pytest.approx(cycles, rel=0.03)


def test_the_table_compares_rows_and_says_when_there_are_none():
    assert "No measured row" in predict.table(None)
    rows = (
        results.Row(
            "rung06_pingpong", "fwd", "bf16", "6", 64, False, 16, 1024, 32, ms=1.0, tflops=400.0, sm_mhz=1700.0
        ),
        results.Row("fa3_lib", "fwd", "bf16", None, 64, True, 16, 1024, 32, ms=1.0, tflops=400.0, sm_mhz=1700.0),
        results.Row("fa3", "fwd", "bf16", None, 64, False, 16, 1024, 32, ms=1.0, tflops=500.0),
        results.Row("rung10_fp8", "fwd", "bf16", "10", 64, False, 16, 1024, 32, ms=1.0, tflops=500.0),
    )
    run = results.Run("2026-01-01", "x", gpu="H200", sms=132, rows=rows)
    comparison, library = predict.compare(run)
    want = predict.predict("6", 64, False, 1024, 16, 32, 1.7).tflops
    assert comparison.prediction.tflops == want and comparison.ratio == want / 400
    assert library.rung == "9"
    assert library.prediction.tflops == predict.predict("9", 64, True, 1024, 16, 32, 1.7).tflops
    assert f"| 6 | d64 full b16 s1024 h32 | 1700 | 400 | {want:.0f} |" in predict.table(run)


# --- the command and the view -------------------------------------------------------------------------------------------------


def test_the_command_prints_and_writes(tmp_path):
    paths = {name: tmp_path / f"{name}.out" for name in ("timeline", "perfetto")}
    plot = tmp_path / "p.png"
    arguments = ["sim", "6", "--d", "64", "--seqlen", "300", "--causal", "--json", "--table", "--plot", str(plot)]
    arguments += [x for name, path in paths.items() for x in (f"--{name}", str(path))]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    said = json.loads(outcome.output)
    assert said["verdict"] == "clean" and said["relative_error"] < 1e-2
    assert 0 < said["predicted_tflops"] <= said["cap_tflops"] and said["bound"] and said["table"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert timeline.read(paths["timeline"]).meta["rung"] == "6"
    assert json.loads(paths["perfetto"].read_text())["traceEvents"]


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["2"], "rung 2 has no simulated kernel"),
        (["5", "--d", "12"], "multiple of 8"),
        (["5", "--stages", "8"], "shared memory exceeded"),
        (["5", "--tma-latency", "-1"], "tma_latency = -1.0 must not be negative"),
        (["5", "--seqlen", "100000"], "take a shorter --seqlen"),
        (["5", "--seqlen", "64", "--plot", "/nowhere/p.png"], "No such file"),
        (["5", "--heads", "3", "--kv-heads", "2"], "h a multiple of hk"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, complaint):
    outcome = CliRunner().invoke(app, ["sim", *arguments])
    assert outcome.exit_code != 0
    assert complaint in str(outcome.exception) + outcome.output


def test_the_view_has_a_picture_and_knobs():
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    InteractiveShell.instance()
    with capture_output() as captured:
        sim_view.explore(head_dim=64, stages=4)
    knobs, picture = (output.data for output in captured.outputs)
    assert "application/vnd.jupyter.widget-view+json" in knobs and "Run this notebook" in knobs["text/plain"]
    assert base64.b64decode(picture["image/png"]).startswith(b"\x89PNG")

    view = sim_view.Explorer(head_dim=64)
    assert view.words.startswith("rung 6") and "of its peak" in view.words
    named = {knob.description: knob for column in view.knobs().children for knob in column.children}
    before = view.image
    named["ping-pong"].value = False
    assert view.words.startswith("rung 5") and view.image != before
    named["stages"].value, named["head dim"].value = 4, 256
    assert view.words == "refused"
    with pytest.raises(TypeError, match="no knob stage; there are head_dim"):
        sim_view.explore(stage=3)
    with pytest.raises(ValueError, match="stages = 3: the knob has"):
        sim_view.explore(stages=3)
