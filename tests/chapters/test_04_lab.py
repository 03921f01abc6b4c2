"""Chapter 4's lab: bug labs give their verdict under every seed, accept other mends, and hand out what they should."""

import os
import secrets

import pytest

from fa3_course.checker import Refused, Trial, catalogue, runner, submission
from hopper_sim import Kind

SEED = int(os.environ.get("FA3_TEST_SEED", secrets.randbelow(2**20)))
LABS = [exercise for exercise in catalogue.exercises("04") if ".B" in exercise.number]
# a verdict of the simulated SM, or the names of the tests that see a fault in the numbers
WANTED = {
    "04.B1": {"random"},
    "04.B2": Kind.ACCUMULATOR_IN_FLIGHT,
    "04.B3": {"V = 1", "random"},
    "04.B4": Kind.OVERWRITE_BEFORE_FREE,
    "04.B5": {"GQA"},
    "04.B6": Kind.OVERWRITE_BEFORE_FREE,
}

# bug lab: (text of the solution, another way to write it)
OTHER_MENDS = {
    "04.B1": ("turned[position(len(v))] = v", "turned[:] = v[np.argsort(position(len(v)))]"),
    "04.B2": (
        "            await rung10.fold(wg, acc_O, acc_T, shrink)\n        if i < len(blocks):\n            tOrP.write(weights[:, order])\n",
        "        if i < len(blocks):\n            tOrP.write(weights[:, order])\n        if i > 0:\n"
        "            await rung10.fold(wg, acc_O, acc_T, shrink)\n        if i < len(blocks):\n",
    ),
    "04.B3": (
        "            acc_O = acc_O * shrink[:, None] + acc_T\n        if i < len(scores):\n            shrink = next_shrink",
        "            acc_O = acc_O + acc_T\n        if i < len(scores):\n            acc_O = acc_O * next_shrink[:, None]",
    ),
    "04.B4": (
        "        await together.sync()\n        if me == 0:\n",
        "        if me > 0:\n            together.arrive()\n        else:\n            await together.sync()\n",
    ),
    "04.B5": ("head // (heads // kv_heads)", "head * kv_heads // heads"),
    "04.B6": ("t.v[me].reuse(", "t.v[(me + 1) % p.config.consumer_warpgroups].reuse("),
}
LAB = pytest.mark.parametrize("lab", LABS, ids=lambda lab: f"{lab.number}-seed{SEED}")


def evaluate(exercise, text, folder):
    path = folder / exercise.file
    path.write_text(text, encoding="utf-8")
    return runner.run(exercise, submission.from_file(exercise, path), SEED, 0)


def written(verdict):
    """A verdict as the learner returns it, and as Python text."""
    value = verdict if isinstance(verdict, set) else str(verdict)
    return value, repr(value)


@LAB
def test_verdict_does_not_depend_on_timing(lab):
    """The check draws inputs and runs three seeds; ten of it must agree, and no other verdict passes."""
    prediction = next(prop for prop in lab.properties if "prediction" in prop.name)
    others = [None] * (len(lab.functions) - 1)
    wanted, _ = written(WANTED[lab.number])
    for seed in range(SEED, SEED + 10):
        prediction.run(Trial(seed), lambda: wanted, *others)
    wrong = (
        (set(), {"no such test"}, wanted | {"V = 1", "MQA"})
        if isinstance(wanted, set)
        else (*(set(Kind) - {wanted}), "?")
    )
    for said in wrong:
        with pytest.raises(Refused, match=r"the simulated SM says|is no verdict|you say it|are no tests"):
            prediction.run(Trial(SEED), lambda said=said: said if isinstance(said, set) else str(said), *others)


@LAB
def test_other_mends_pass(lab, tmp_path):
    old, new = OTHER_MENDS[lab.number]
    assert lab.solution.count(old) == 1
    result = evaluate(lab, lab.solution.replace(old, new), tmp_path)
    assert result, [outcome for outcome in result.outcomes if not outcome.passed]


@LAB
def test_roles_are_handed_out_with_their_fault(lab, tmp_path):
    assert lab.path.parent.name == "bug_labs" and "NotImplementedError" not in lab.stub
    wanted, text = written(WANTED[lab.number])
    task = " ".join(lab.head.task.split())
    for name in wanted if isinstance(wanted, set) else {wanted}:
        assert f'"{name}"' in task, "the task has no such candidate"
    assert evaluate(lab, lab.stub, tmp_path).state == "not started"
    predicted = lab.stub.replace('return {"?"}', f"return {text}").replace('return "?"', f"return {text}")
    assert predicted != lab.stub
    result = evaluate(lab, predicted, tmp_path)
    seen = {outcome.name: outcome for outcome in result.outcomes}
    assert result.state == "failed" and next(o for name, o in seen.items() if "prediction" in name).passed
    if not isinstance(wanted, set):  # the verdict on the learner's own role quotes their file
        quoted = [outcome.seen for outcome in result.outcomes if wanted in outcome.seen]
        assert quoted and any(lab.file in text for text in quoted)


def test_every_bug_lab_has_its_verdict():
    assert [lab.number for lab in LABS] == list(WANTED)
