import numpy as np

from fa3_course.checker import Exercise
from fa3_course.checker.truth import attention

EXERCISE = Exercise(
    "04.3",
    "ex03_descale.py",
    functions={"descale": 1, "fold": 2},
    hints=(
        "np.abs(x).max(axis=(1, 3)) is the largest magnitude per batch and head.",
        "reshape(batch, kv_heads, -1) puts the query heads of one KV head into the last axis.",
        "np.repeat(factor, heads // kv_heads, axis=1): query heads 0 .. group - 1 read KV head 0. np.tile would deal them out.",
    ),
)


def draw(t, batch=2, length=5, kv_heads=3, group=2):
    """x with a loudness of its own for each batch and head."""
    x = t.normal(batch, length, kv_heads * group, 4)
    return x * 2 ** t.rng.uniform(-6, 6, (batch, 1, kv_heads * group, 1))


def truth(x, kv_heads, largest):
    group = x.shape[2] // kv_heads
    factors = np.ones((len(x), kv_heads))
    for i, head in np.ndindex(factors.shape):
        values = np.abs(x[i, :, head * group : (head + 1) * group])
        top = values[np.isfinite(values)].max(initial=0)
        factors[i, head] = top / largest if top else 1
    return factors


def compare(t, descale, x, kv_heads, largest=448.0):
    # relative, so that a small factor counts as much as a large one
    want = truth(x, kv_heads, largest)
    t.close(descale(x, kv_heads, largest) / want, np.ones_like(want), "descale, in parts of the right one")


@EXERCISE.holds("one factor per batch and head", "reduce over tokens and head dim, not over batch or heads")
def _(t, descale, fold):
    for heads in (1, 4):
        compare(t, descale, draw(t, kv_heads=heads, group=1), heads)
        compare(t, descale, draw(t, kv_heads=heads, group=1), heads, 57344.0)


@EXERCISE.holds(
    "query heads that read one KV head share its factor", "their largest magnitude is the maximum of theirs"
)
def _(t, descale, fold):
    for group in (2, 5):
        compare(t, descale, draw(t, group=group), 3)


@EXERCISE.holds("nothing is larger than the largest value", "take the magnitude: the loudest value may be negative")
def _(t, descale, fold):
    x = draw(t, group=1)
    x[:, 2, :, 1] = -1.5 * np.abs(x).max(axis=(1, 3))
    edge = np.abs(x / np.asarray(descale(x, 3, 448.0))[:, None, :, None]).max(axis=(1, 3))
    t.close(edge, np.full((2, 3), 448.0), "largest magnitude after division")


@EXERCISE.holds("zeros get factor 1, infinities and NaN do not count", "a factor of 0 would divide by 0")
def _(t, descale, fold):
    x = draw(t, group=1)
    x[0, :, 1] = 0
    x[1, 1, 0, 2], x[1, 3, 0, 0], x[0, 0, 2, 3] = np.inf, np.nan, -np.inf
    x[1, :, 2] = np.nan
    compare(t, descale, x, 3)


def attend(q, k, v, scale_log2, out_scale):
    """What a kernel does with the folded factors, one batch and query head."""
    scores = q @ k.T * scale_log2
    p = np.exp2(scores - scores.max(axis=1, keepdims=True))
    return p @ v / p.sum(axis=1, keepdims=True) * out_scale


def through_kernel(t, fold, group, scale):
    factors = [2 ** t.rng.uniform(-3, 3, (2, 3)) for _ in "qkv"]
    q, k, v = t.normal(2, 4, 3 * group, 8), t.normal(2, 7, 3, 8), t.normal(2, 7, 3, 8)
    scale_log2, out_scale = map(np.asarray, fold(scale, *factors, 3 * group))
    for what, got in (("scale_log2", scale_log2), ("out_scale", out_scale)):
        t.expect(got.shape == (2, 3 * group), f"{what} has shape {got.shape}, expected {(2, 3 * group)}")
    for i, head in np.ndindex(2, 3 * group):
        kv = head // group
        undone = [x * f[i, kv] for x, f in zip((q[i, :, head], k[i, :, kv], v[i, :, kv]), factors, strict=True)]
        want, _ = attention(*undone, scale)
        got = attend(q[i, :, head], k[i, :, kv], v[i, :, kv], scale_log2[i, head], out_scale[i, head])
        t.close(got, want, f"out of batch {i}, query head {head}")


@EXERCISE.holds(
    "the folded factors give attention of the true tensors", "exp2 wants log2(e); Q's and K's factors multiply"
)
def _(t, descale, fold):
    for scale in (0.1, float(t.rng.uniform(0.05, 0.5))):
        through_kernel(t, fold, 1, scale)


@EXERCISE.holds("grouped query heads take their KV head's factors", "head i reads KV head i // group: np.repeat")
def _(t, descale, fold):
    for group in (2, 3):
        through_kernel(t, fold, group, 0.2)
