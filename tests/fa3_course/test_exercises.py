"""Every exercise of every chapter: the solution passes, the stub does not, and wrong answers are refused.

A wrong answer is a solution with one realistic fault. `WRONG` gives the fault as a replacement in the solution's text, and a
property that must see it; `GENERIC` spoils the results of any exercise.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fa3_course.checker import catalogue, runner, stubs, submission

SEED = int(os.environ.get("FA3_TEST_SEED", secrets.randbelow(2**20)))
EXERCISES = {exercise.number: exercise for exercise in catalogue.exercises()}

# exercise: {fault: (text of the solution, its replacement, part of the name of a property that must refuse it)}
WRONG = {
    "01.1": {
        "no maximum": ("np.exp(scores - shift)", "np.exp(scores)", "no overflow"),
        "maximum of the whole array": ("scores.max(axis=-1, keepdims=True)", "scores.max()", "1e4"),
        "no guard for empty rows": ("np.where(np.isneginf(row_max), 0, row_max)", "row_max", "a row with no keys"),
        "widened to fp64": ("np.exp(scores - shift)", "np.exp(scores - np.float64(shift))", "fp16"),
        "exp2": ("np.exp(scores - shift)", "np.exp2(scores - shift)", "fp64 truth"),
    },
    "01.2": {
        "missing rescale": ("row_sum * np.exp(row_max - shift)", "row_sum", "any split"),
        "inverse rescale": ("np.exp(row_max - shift)", "np.exp(shift - row_max)", "any split"),
        "old maximum in the exponent": ("np.exp(scores - shift[:, None])", "np.exp(scores - row_max[:, None])", "1e4"),
        "maximum of the tile only": ("np.maximum(row_max, scores.max(axis=-1))", "scores.max(axis=-1)", "falling"),
        "no guard for empty rows": ("np.where(np.isneginf(new_max), 0, new_max)", "new_max", "a tile of -inf"),
    },
    "01.3": {
        "missing rescale": ("row_sum * np.exp(row_max - shift)", "row_sum", "block size"),
        "average of averages": ("old_weight[:, None] * out + p", "out + p", "block size"),
        "no guard for empty rows": ("np.where(np.isneginf(new_max), 0, new_max)", "new_max", "a row with no keys"),
        "division by zero": ("np.where(row_sum == 0, 1, row_sum)[:, None]", "row_sum[:, None]", "a row with no keys"),
        "whole row at once": ("new_max = np.maximum(row_max, ", "np.exp(scores)\n        new_max = np.maximum(row_max, ", "no array"),
    },
    "01.4": {
        "acc_O not rescaled": ("rescale[:, None] * acc_O", "acc_O", "block size"),
        "row_sum not rescaled": ("rescale * row_sum", "row_sum", "block size"),
        "lse in base 2": ("row_max + np.log(np.where(seen, row_sum, 1))", "row_max * np.log2(np.e) + np.log2(np.where(seen, row_sum, 1))", "lse match"),
        "lse without the maximum": ("row_max + np.log(", "np.log(", "lse match"),
        "lse without the scale": ("lse = np.where(seen, row_max +", "lse = np.where(seen, row_max / softmax_scale +", "lse match"),
        "empty lse is 0": ("-np.inf)\n    return out", "0.0)\n    return out", "without keys"),
        "normalised in the loop": ("p @ v_tile\n", "p @ v_tile\n        acc_O = acc_O / row_sum[:, None] * row_sum[:, None]\n", "normalised once"),
        "all scores at once": ("scores = softmax_scale * (q @ k_tile.T)", "scores = softmax_scale * (q @ k.T)[:, start : start + tile_n]", "never in memory"),
    },
    "01.5": {
        "exp instead of exp2": ("np.exp2(", "np.exp(", "probabilities match"),
        "e^x by exp": ("np.exp2(scores * scale_log2 - shift[:, None])", "np.exp(softmax_scale * scores - shift[:, None] / np.log2(np.e))", "exp2 only"),
        "two multiplies": ("scores * scale_log2 -", "scores * softmax_scale * np.log2(np.e) -", "one multiply"),
        "lse in base 2": ("np.log(np.where", "np.log2(np.where", "LSE is natural"),
        "lse without the scale": ("row_max * softmax_scale + np.log", "row_max + np.log", "LSE is natural"),
        "log2(e) left in the lse": ("row_max * softmax_scale + np.log", "row_max * softmax_scale * np.log2(np.e) + np.log", "LSE is natural"),
        "no guard for empty rows": ("np.where(np.isneginf(row_max), 0, row_max)", "row_max", "a row with no keys"),
    },
    "01.6": {
        "plain mean": ("np.exp(lse_a - shift), np.exp(lse_b - shift)", "np.exp(0 * lse_a), np.exp(0 * lse_b)", "two halves"),
        "no maximum": ("np.where(np.isneginf(top), 0, top)", "0 * np.where(np.isneginf(top), 0, top)", "1e4"),
        "empty part is read": ("np.where(weight_a[:, None] > 0, (weight_a / divisor)[:, None] * out_a, 0)", "(weight_a / divisor)[:, None] * out_a", "not read"),
        "base 2": ("np.exp(lse_a - shift), np.exp(lse_b - shift)", "np.exp2(lse_a - shift), np.exp2(lse_b - shift)", "two halves"),
        "lse of one part": ("np.where(seen, shift + np.log(divisor), -np.inf)", "top", "any random split"),
        "empty lse is 0": ("np.log(divisor), -np.inf)", "np.log(divisor), 0.0)", "two parts without keys"),
    },
    "01.7": {
        "first query sees one key too few": ("first + 1 + seqlen_k", "first + seqlen_k", "ragged"),
        "last query sees one key too few": ("last + 1 + seqlen_k", "last + seqlen_k", "ragged"),
        "top-left": ("seen_by_last = min(max(last + 1 + seqlen_k - seqlen_q, 0)", "seen_by_last = min(max(last + 1, 0)", "bottom-right"),
        "unmasked counts the diagonal tile": ("seen_by_first // tile_n", "-(-seen_by_first // tile_n)", "square"),
        "negative counts": ("max(last + 1 + seqlen_k - seqlen_q, 0)", "last + 1 + seqlen_k - seqlen_q", "more queries"),
        "rounded down": ("-(-seen_by_last // tile_n)", "seen_by_last // tile_n", "ragged"),
    },
    "01.8": {
        "mask before tanh": (
            "    if softcap > 0:",
            "    scores = np.where(np.tri(*scores.shape, scores.shape[1] - scores.shape[0]) + (not causal) > 0, scores, -np.inf)\n    causal = False\n    if softcap > 0:",
            "stays masked",
        ),
        "scale in both places": ("scale_log2 = softcap * np.log2(np.e)", "scale_log2 = softcap * softmax_scale * np.log2(np.e)", "softcap alone"),
        "cap of raw scores": ("(softmax_scale / softcap)", "(1 / softcap)", "softcap alone"),
        "softcap ignored": ("if softcap > 0:", "if softcap > 1e9:", "softcap alone"),
        "left bound exclusive": ("distance < -left", "distance <= -left", "every window"),
        "right bound one too far": ("distance > right", "distance > right + 1", "every window"),
        "-1 taken as a bound": ("if left >= 0:", "if left >= -1:", "every window"),
        "top-left": ("[:, None] + seqlen_k - seqlen_q", "[:, None]", "every window"),
        "causal lost in a window": ("    if causal:", "    if causal and right < 0:", "every window"),
        "two multiplies": ("scores * (softmax_scale / softcap)", "scores * softmax_scale / softcap", "one multiply"),
    },
    "01.9": {
        "no delta": ("(dout @ v[keys].T - delta[:, None])", "(dout @ v[keys].T)", "match autograd"),
        "delta from p and dp of the tile": ("ds = p * (dout @ v[keys].T - delta[:, None])", "dp = dout @ v[keys].T\n        ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))", "block size"),
        "dk without the scale": ("dk[keys] = softmax_scale * (ds.T @ q)", "dk[keys] = ds.T @ q", "match autograd"),
        "dq of the last tile only": ("dq = dq + softmax_scale", "dq = softmax_scale", "block size"),
        "lse in base 2": ("lse[:, None])", "lse[:, None] * np.log2(np.e))", "match autograd"),
        "mask before the exponential": (
            "p = np.exp(softmax_scale * (q @ k[keys].T) - lse[:, None])",
            "s = softmax_scale * (q @ k[keys].T)\n        if causal:\n            s[position[None, :] > np.arange(sq)[:, None] + sk - sq] = -np.inf\n        causal = False\n        p = np.exp(s - lse[:, None])",
            "a row with no keys",
        ),
        "mask by multiplication": (
            "np.where(position[None, :] <= np.arange(sq)[:, None] + sk - sq, p, 0)",
            "p * (position[None, :] <= np.arange(sq)[:, None] + sk - sq)",
            "1e4",
        ),
        "top-left mask": ("np.arange(sq)[:, None] + sk - sq", "np.arange(sq)[:, None]", "bottom-right"),
        "diagonal hidden": ("position[None, :] <= np", "position[None, :] < np", "bottom-right"),
        "all scores at once": ("(q @ k[keys].T)", "(q @ k.T)[:, keys]", "never in memory"),
    },
    "01.10": {
        "one product": ("2 * 2 * batch * heads", "2 * batch * heads", "fused kernel"),
        "S and P moved once": ("4 * element_bytes * queries", "2 * element_bytes * queries", "eager form"),
        "K and V with all heads": ("keys = batch * seqlen_k * kv_heads", "keys = batch * seqlen_k * heads", "grouped heads"),
        "elements instead of bytes": ("moved = element_bytes * head_dim", "moved = head_dim", "fused kernel"),
        "no LSE": ("4 * queries if fused", "0 if fused", "fused kernel"),
        "the higher ceiling": ("min(peak, ", "max(peak, ", "roofline"),
        "intensity upside down": ("operations / moved * bandwidth", "moved / operations * bandwidth", "roofline"),
    },
    "01.11": {
        "missing rescale of acc_O": ("acc_O * rescale[:, None]", "acc_O", "new maximum"),
        "missing rescale of row_sum": ("row_sum * rescale", "row_sum", "new maximum"),
        "padding keys count": ("tl.where(keys[None, :] < seqlen_k, tl.dot(q, k), float(\"-inf\"))", "tl.dot(q, k)", "ragged"),
        "exp instead of exp2": ("p = tl.math.exp2(", "p = tl.math.exp(", "fp64 truth"),
        "maximum never kept": ("        row_max = new_max\n", "", "new maximum"),
    },
}  # fmt: skip

# what becomes of the tuple `results`; numbers, arrays and tensors all take these operators
GENERIC = {
    "NaN": "tuple(x * float('nan') for x in results)",
    "zero-filled": "tuple(x * 0 for x in results)",
    "cached": "kept.setdefault(0, results)",
    "cached by shape": "kept.setdefault(tuple(getattr(a, 'shape', a) for a in arguments), results)",
}
SPOIL = """

def spoiled_{name}(*arguments, inner={name}, kept={{}}):
    value = inner(*arguments)
    results = value if isinstance(value, tuple) else (value,)
    results = {fault}
    return results if isinstance(value, tuple) else results[0]


{name} = spoiled_{name}
"""
BY_SHAPE_IS_RIGHT = ("01.7", "01.10")  # their arguments are numbers: equal arguments have equal answers


def evaluate(number: str, texts: list[str], seed: int) -> list[dict]:
    """The checker's result on each text, as JSON-able values. Needs no pytest: it runs in a child process, too."""
    exercise, results = EXERCISES[number], []
    for text in texts:
        with tempfile.TemporaryDirectory() as folder:  # a real file: Triton reads its kernels' source there
            path = Path(folder) / exercise.file
            path.write_text(text, encoding="utf-8")
            results.append(runner.run(exercise, submission.from_file(exercise, path), seed, 0).to_dict())
    return results


def evaluate_apart(number: str, texts: list[str]) -> list[dict]:
    """`evaluate`, for Triton in a child: only its first import decides whether kernels are interpreted."""
    exercise = EXERCISES[number]
    if missing := submission.lacking_here(exercise):
        pytest.skip(missing)
    if "triton" not in exercise.modules:
        return evaluate(number, texts, SEED)
    command = [sys.executable, __file__, number, str(SEED)]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def failing(result: dict) -> list[str]:
    return [outcome["name"] for outcome in result["outcomes"] if not outcome["passed"]]


@pytest.mark.parametrize("number", EXERCISES, ids=lambda n: f"{n}-seed{SEED}")
def test_solution_passes_and_stub_does_not(number):
    exercise = EXERCISES[number]
    solution, stub = evaluate_apart(number, [exercise.solution, exercise.stub])
    assert solution["state"] == "passed", [o for o in solution["outcomes"] if not o["passed"]]
    assert stub["state"] == "not started"
    assert failing(stub), "the untouched stub has every property"


@pytest.mark.parametrize("number", EXERCISES, ids=lambda n: f"{n}-seed{SEED}")
def test_wrong_answers_are_refused(number):
    exercise = EXERCISES[number]
    faults = WRONG.get(number, {})
    assert len(faults) >= 3, f"{number} needs at least three wrong answers in WRONG"
    for fault, (old, _, _) in faults.items():
        assert exercise.solution.count(old) >= 1, f"{fault}: the solution has no `{old}`"
    texts = [exercise.solution.replace(old, new) for old, new, _ in faults.values()]
    for (fault, (_, _, name)), result in zip(faults.items(), evaluate_apart(number, texts), strict=True):
        assert result["state"] == "failed", f"{fault}: accepted"
        assert any(name in n for n in failing(result)), f"{fault}: refused only by {failing(result)}, not by `{name}`"


@pytest.mark.parametrize("number", EXERCISES, ids=lambda n: f"{n}-seed{SEED}")
def test_spoiled_results_are_refused(number):
    exercise = EXERCISES[number]
    faults = [fault for fault in GENERIC if fault != "cached by shape" or number not in BY_SHAPE_IS_RIGHT]
    texts = [
        exercise.solution + "".join(SPOIL.format(name=name, fault=GENERIC[fault]) for name in exercise.functions)
        for fault in faults
    ]
    for fault, result in zip(faults, evaluate_apart(number, texts), strict=True):
        assert result["state"] == "failed", f"{fault}: accepted"


@pytest.mark.parametrize("number", EXERCISES)
def test_stub_and_solution_are_one_text(number):
    exercise = EXERCISES[number]
    outside, regions = stubs.split(exercise.solution)
    assert stubs.split(exercise.stub)[0] == outside
    assert all(region.task and region.lines != region.task for region in regions), "a region needs a task and an answer"
    # the learner's copy, solved or not, still is this exercise
    learner = exercise.path.read_text(encoding="utf-8")
    assert stubs.split(learner)[0] == outside, f"`fa3 reset {number}` writes {exercise.file} anew"


@pytest.mark.parametrize("number", EXERCISES)
def test_exercise_is_complete(number):
    exercise = EXERCISES[number]
    assert exercise.head.minutes > 0 and exercise.head.task
    assert len(exercise.hints) >= 3
    names = [prop.name for prop in exercise.properties]
    assert len(names) >= 4 and len(set(names)) == len(names)
    assert all(prop.hint for prop in exercise.properties)


if __name__ == "__main__":
    print(json.dumps(evaluate(sys.argv[1], json.load(sys.stdin), int(sys.argv[2]))))
