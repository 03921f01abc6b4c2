"""Chapter 3's lab: bug labs give their verdict under every seed, accept other mends, and hand out what they should."""

import os
import secrets

import pytest

from fa3_course.checker import Trial, catalogue, protocol, runner, submission
from hopper_sim import Kind

SEED = int(os.environ.get("FA3_TEST_SEED", secrets.randbelow(2**20)))
LABS = [exercise for exercise in catalogue.exercises("03") if ".B" in exercise.number]
WANTED = {
    "03.B1": Kind.UNBALANCED_BARRIER,
    "03.B2": Kind.OPERAND_IN_FLIGHT,
    "03.B3": Kind.OVERWRITE_BEFORE_FREE,
    "03.B4": Kind.BARRIER_ID,
    "03.B5": Kind.DEADLOCK,
    "03.B6": Kind.OVERWRITE_BEFORE_FREE,
}

# bug lab: (text of the solution, another way to write it)
OTHER_MENDS = {
    "03.B1": ("        next_one.arrive()\n", "        t.turns[me - len(t.turns) + 1].arrive()\n"),
    "03.B2": (
        "            tOrP.write(weights)\n            await parts.rescale(wg, acc_O, shrink)\n",
        "            await parts.rescale(wg, acc_O, shrink)\n            tOrP.write(weights)\n",
    ),
    "03.B3": (
        "            await wg.wait_group(0)\n",
        "            if i > 0:\n                await wg.wait_group(0)\n",
    ),
    "03.B4": ("sm.named_barrier(1 + len(names), 128", "sm.named_barrier(15, 128"),
    "03.B5": ("    done = 0\n", "    done = c.stages * 2\n"),
    "03.B6": (
        "            if c.own_output:\n                t.q_empty[me].arrive(c.q_empty_arrivals)",
        "            for _ in range(4 if c.own_output else 0):\n                t.q_empty[me].arrive()",
    ),
}


def evaluate(exercise, text, folder):
    path = folder / exercise.file
    path.write_text(text, encoding="utf-8")
    return runner.run(exercise, submission.from_file(exercise, path), SEED, 0)


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: f"{lab.number}-seed{SEED}")
def test_verdict_does_not_depend_on_timing(lab):
    """`expect_verdict` draws operands and runs three seeds of the simulator; five of it must agree with the name."""
    prediction = next(prop for prop in lab.properties if "prediction" in prop.name)
    roles = [None] * (len(lab.functions) - 1)
    for seed in range(SEED, SEED + 5):
        prediction.run(Trial(seed), lambda: str(WANTED[lab.number]), *roles)
    with pytest.raises(protocol.Refused, match="the simulated SM says"):
        prediction.run(Trial(SEED), lambda: str(Kind.NEVER_WRITTEN), *roles)
    with pytest.raises(protocol.Refused, match="is no verdict"):
        prediction.run(Trial(SEED), lambda: "?", *roles)


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: f"{lab.number}-seed{SEED}")
def test_other_mends_pass(lab, tmp_path):
    old, new = OTHER_MENDS[lab.number]
    assert lab.solution.count(old) == 1
    result = evaluate(lab, lab.solution.replace(old, new), tmp_path)
    assert result, [outcome for outcome in result.outcomes if not outcome.passed]


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: f"{lab.number}-seed{SEED}")
def test_roles_are_handed_out_with_their_fault(lab, tmp_path):
    assert lab.path.parent.name == "bug_labs" and "NotImplementedError" not in lab.stub
    assert str(WANTED[lab.number]) in lab.head.task.replace("\n   ", ""), "the verdict is among the task's candidates"
    assert evaluate(lab, lab.stub, tmp_path).state == "not started"
    predicted = lab.stub.replace('return "?"', f'return "{WANTED[lab.number]}"')
    result = evaluate(lab, predicted, tmp_path)
    seen = {outcome.name: outcome for outcome in result.outcomes}
    assert result.state == "failed" and next(o for name, o in seen.items() if "prediction" in name).passed
    # the verdict on the learner's own role quotes their file
    quoted = [outcome.seen for outcome in result.outcomes if str(WANTED[lab.number]) in outcome.seen]
    assert quoted and any(lab.file in text for text in quoted)


def test_every_bug_lab_has_its_verdict():
    assert [lab.number for lab in LABS] == list(WANTED)
