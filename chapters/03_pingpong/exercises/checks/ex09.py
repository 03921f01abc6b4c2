import numpy as np

from fa3_course.checker import Exercise, truth

EXERCISE = Exercise(
    "03.9",
    "ex09_lazy.py",
    functions={"update": 4, "finish": 2},
    hints=(
        "far = block_max > row_max + threshold. -inf plus anything is -inf, so the first key is always far.",
        "new_max = np.where(far, block_max, row_max). Everything else as in chapter 1, relative to new_max; the factor of rows that are "
        "not far is 2 ** 0 = 1.",
        "A row without keys: take 0 for its maximum in the exponents. LSE: log(2) * (row_max + log2(row_sum)).",
    ),
)


def run(t, update, finish, scores, v, threshold, block=16):
    """All blocks: (out, lse, rescales, states)."""
    rows, d = scores.shape[0], v.shape[1]
    state, count, states = (np.full(rows, -np.inf), np.zeros(rows), np.zeros((rows, d))), 0, []
    for at in range(0, scores.shape[1], block):
        *state, changed = update(*state, scores[:, at : at + block].copy(), v[at : at + block].copy(), threshold)
        count += int(changed)
        states.append(state)
    return (*finish(*state), count, states)


def inputs(t, spread=4.0):
    rows, keys, d = (int(t.rng.integers(*span)) for span in ((3, 20), (40, 150), (2, 9)))
    return spread * t.normal(rows, keys), t.normal(keys, d)


def compare(t, update, finish, scores, v, threshold):
    out, lse, *_ = run(t, update, finish, scores, v, threshold)
    natural = scores * np.log(2)
    t.close(out, truth.softmax(natural) @ v, f"out, threshold {threshold:g}")
    t.close(lse, truth.log_sum_exp(natural), f"LSE, threshold {threshold:g}")


@EXERCISE.holds(
    "out and LSE match the fp64 truth, for any threshold", "P, sum and O are relative to one and the same value"
)
def _(t, update, finish):
    for threshold in (0.0, 1.0, 8.0, float(t.rng.uniform(2, 20))):
        compare(t, update, finish, *inputs(t), threshold)


@EXERCISE.holds(
    "rising maxima, large scores", "a row that is too far takes the block's maximum, the others keep theirs"
)
def _(t, update, finish):
    scores, v = inputs(t)
    compare(t, update, finish, scores + np.linspace(0, 1e4, scores.shape[1]), v, 8.0)
    compare(t, update, finish, scores - 1e4, v, 8.0)


@EXERCISE.holds("rows whose first keys are masked, and rows without keys", "-inf minus -inf is NaN: put 0 in its place")
def _(t, update, finish):
    scores, v = inputs(t)
    scores[0], scores[1, :20] = -np.inf, -np.inf
    compare(t, update, finish, scores, v, 8.0)


@EXERCISE.holds(
    "it is lazy: the maximum in use moves only when it must", "count the rows that are farther than the threshold"
)
def _(t, update, finish):
    for threshold in (0.0, 3.0, 8.0):
        scores, v = inputs(t)
        scores = scores + np.linspace(0, 12, scores.shape[1])
        in_use, want = np.full(len(scores), -np.inf), 0
        for at in range(0, scores.shape[1], 16):
            for row, top in enumerate(scores[:, at : at + 16].max(axis=1)):
                if top > in_use[row] + threshold:
                    in_use[row], want = top, want + 1
        _, _, got, states = run(t, update, finish, scores, v, threshold)
        t.expect(got == want, f"threshold {threshold:g}: {got} changes of a row's maximum, expected {want}")
        t.close(states[-1][0], in_use, "the maximum in use")


@EXERCISE.holds(
    "P stays below 2 ** threshold", "the maximum in use is never more than the threshold below the largest score"
)
def _(t, update, finish):
    scores, v = inputs(t)
    scores = scores + np.linspace(0, 40, scores.shape[1])
    *_, states = run(t, update, finish, scores, v, 8.0)
    seen = np.maximum.accumulate(scores, axis=1)
    for number, (row_max, *_rest) in enumerate(states):
        behind = (seen[:, min(16 * (number + 1), scores.shape[1]) - 1] - row_max).max()
        t.expect(behind <= 8.0 + 1e-9, f"after block {number} a score is 2 ** {behind:.1f} times the maximum in use")
