"""Chapter 2's lab: bug labs give their verdict under every seed, accept other mends, and hand out what they should."""

import os
import secrets
import sys

import pytest

from fa3_course.checker import Trial, catalogue, protocol, runner, stubs, submission
from hopper_sim import Kind

SEED = int(os.environ.get("FA3_TEST_SEED", secrets.randbelow(2**20)))
LABS = [exercise for exercise in catalogue.exercises("02") if ".B" in exercise.number]
WANTED = {
    "02.B1": Kind.OVERWRITE_BEFORE_FREE,
    "02.B2": Kind.WRONG_PHASE,
    "02.B3": Kind.WRONG_BYTES,
    "02.B4": Kind.MISSING_PROXY_FENCE,
    "02.B5": Kind.OVERWRITE_BEFORE_FREE,
    "02.B6": Kind.ROLES_DISAGREE,
}

# bug lab: (text of the solution, another way to write it)
OTHER_MENDS = {
    "02.B1": (
        "        await ring.full[slot].wait(phase)\n",
        "        slot, phase = i % p.stages, (i // p.stages) & 1\n        await ring.full[slot].wait(phase)\n",
    ),
    "02.B2": ("        phase ^= slot == 0\n", "        phase = (phase + 1) % 2 if slot == 0 else phase\n"),
    "02.B3": ("t.k_full[slot].arrive_expect_tx(c.k_bytes)", "t.k_full[slot].arrive_expect_tx(t.k[slot].nbytes)"),
    "02.B4": (  # the thread that stores fences, after it has heard of the other's stores
        "    wg.fence_async_proxy()\n    if me == 1:\n        both.arrive()\n    else:\n        await both.sync()\n",
        "    if me == 1:\n        both.arrive()\n    else:\n        await both.sync()\n        wg.fence_async_proxy()\n",
    ),
    "02.B5": ("        if i > 0:\n            ring.empty[(i - 1) % p.stages]", "        if i:\n            ring.empty[i % p.stages - 1]"),
    "02.B6": (
        "blocks = len(p.blocks(m))",
        "blocks = c.key_blocks(m, p.q.shape[1], p.k.shape[1])",
    ),
}  # fmt: skip


def evaluate(exercise, text, folder):
    path = folder / exercise.file
    path.write_text(text, encoding="utf-8")
    return runner.run(exercise, submission.from_file(exercise, path), SEED, 0)


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.number)
def test_verdict_does_not_depend_on_timing(lab):
    """`expect_verdict` draws operands and runs three seeds of the simulator; ten of it must agree with the name."""
    prediction = next(prop for prop in lab.properties if "prediction" in prop.name)
    roles = [None] * (len(lab.functions) - 1)
    for seed in range(SEED, SEED + 10):
        prediction.run(Trial(seed), lambda: str(WANTED[lab.number]), *roles)
    for kind in set(Kind) - {WANTED[lab.number]}:
        with pytest.raises(protocol.Refused, match="the simulated SM says"):
            prediction.run(Trial(SEED), lambda kind=kind: str(kind), *roles)
    with pytest.raises(protocol.Refused, match="is no verdict"):
        prediction.run(Trial(SEED), lambda: "?", *roles)


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.number)
def test_other_mends_pass(lab, tmp_path):
    old, new = OTHER_MENDS[lab.number]
    assert lab.solution.count(old) == 1
    result = evaluate(lab, lab.solution.replace(old, new), tmp_path)
    assert result, [outcome for outcome in result.outcomes if not outcome.passed]


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.number)
def test_roles_are_handed_out_with_their_fault(lab, tmp_path):
    assert lab.path.parent.name == "bug_labs" and "NotImplementedError" not in lab.stub
    assert evaluate(lab, lab.stub, tmp_path).state == "not started"
    predicted = lab.stub.replace('return "?"', f'return "{WANTED[lab.number]}"')
    result = evaluate(lab, predicted, tmp_path)
    seen = {outcome.name: outcome for outcome in result.outcomes}
    assert result.state == "failed" and next(o for name, o in seen.items() if "prediction" in name).passed
    # the verdict on the learner's own role quotes their file
    quoted = [outcome.seen for outcome in result.outcomes if str(WANTED[lab.number]) in outcome.seen]
    assert quoted and any(f"{lab.file}:" in text for text in quoted)


def test_bug_labs_are_found_after_the_exercises():
    numbers = [exercise.number for exercise in catalogue.exercises("02")]
    assert len(LABS) == 6 and numbers[-6:] == list(WANTED) and len(numbers) - 6 >= 10
    assert catalogue.find("2.b1") is catalogue.find("02.B1")
    with pytest.raises(catalogue.UnknownExercise, match=r"02\.B6"):
        catalogue.find("02.B7")


def test_faults_must_apply():
    text = "# region learner\n# task\nx = 1\n# endregion\n# region learner: y = 0\n# task\ny = 1\n# endregion\n"
    stub = stubs.make_stub(text, "02.B1", (("x = 1", "x = 2"),))
    assert stub == text.replace("x = 1", "x = 2").replace("y = 1", "y = 0")
    assert stubs.untouched(stub, text, "02.B1", (("x = 1", "x = 2"),))
    assert not stubs.untouched(text, text, "02.B1", (("x = 1", "x = 2"),))
    for faults in ((("x = 3", ""),), (("= 1", ""),), (("# region", ""),)):
        with pytest.raises(ValueError, match="exactly once"):
            stubs.make_stub(text, "02.B1", faults)


# --- kernels that would hang -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This static loop has")
@pytest.mark.parametrize(
    "old, new",
    (
        (None, None),  # the stub waits for nothing and frees nothing
        ("    pipe_V.consumer_release(state)\n", ""),
        ("    pipe_V.consumer_release(state)\n", "    pipe_V.consumer_release(state)\n    state.advance()\n"),
    ),
)
def test_a_method_that_would_hang_the_card_is_not_launched(old, new, tmp_path, monkeypatch):
    pytest.importorskip("cutlass")
    from fa3_course import rung_host, rungs

    launches = []
    monkeypatch.setattr(rungs, "has_hopper", lambda: True)
    monkeypatch.setattr(rung_host, "run", lambda *a, **_: launches.append(a))
    exercise = catalogue.find("02.13")
    assert old is None or exercise.solution.count(old) == 1
    text = exercise.solution.replace(old, new) if old else exercise.stub
    last = evaluate(exercise, text, tmp_path).outcomes[-1]
    assert last.name.startswith("on a Hopper") and not last.passed and last.seen.startswith("not launched")
    assert not launches


# --- the twins on the card ---------------------------------------------------------------------------------------------

TWINS = catalogue.load_source(
    (path := LABS[0].folder / "bug_labs" / "twins.py").read_text(encoding="utf-8"), path, "twins"
)


@pytest.mark.parametrize("name", TWINS.TWINS)
def test_twin_is_a_kernel_with_one_wrong_line(name):
    """Compiled for sm_90a; it never runs here."""
    torch, sass = pytest.importorskip("torch"), pytest.importorskip("fa3_course.sass")
    pytest.importorskip("cutlass")
    twin = TWINS.TWINS[name]
    module = twin.module()
    config = module.make_config(64, twin.causal)
    (report,) = sass.compile_report(lambda options: module.compile_rung(config, torch.float16, options))
    assert report.count("HGMMA") and report.count("UTMALDG") and not report.problems()


def test_watchdog_ends_what_does_not_end():
    hanging = "print('started', flush=True)\nwhile True:\n    pass"
    lines, status, _ = TWINS.watch([sys.executable, "-c", hanging], 2.0)
    assert lines == ["started"] and status is None
    lines, status, complaint = TWINS.watch([sys.executable, "-c", "raise SystemExit('broken')"], 60.0)
    assert (lines, status, complaint) == ([], 1, "broken")


def test_twins_belong_to_bug_labs():
    assert [f"02.{name}" for name in TWINS.TWINS] == list(WANTED)


@pytest.mark.gpu
@pytest.mark.skipif(not os.environ.get("FA3_HANG_TESTS"), reason="hangs a kernel on purpose; FA3_HANG_TESTS=1 runs it")
def test_the_card_never_blocks_the_caller():
    """B6 hangs on a Hopper; the watchdog gives control back."""
    assert "ended by the watchdog" in TWINS.report("B6", 60.0)
