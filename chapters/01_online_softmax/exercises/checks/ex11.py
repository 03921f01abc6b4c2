import numpy as np

from fa3_course.checker import Exercise
from fa3_course.checker import truth as exact

EXERCISE = Exercise(
    "01.11",
    "ex11_triton.py",
    functions={"triton_attention": 2},
    modules=("triton",),
    hints=(
        "The loop body of 01.4, with `tl.` in front: tl.dot for @, tl.max(x, axis=1), tl.sum(x, axis=1), tl.maximum, "
        "tl.math.exp2.",
        "p = exp2(scores * scale_log2 - (new_max * scale_log2)[:, None]); "
        "rescale = exp2((row_max - new_max) * scale_log2).",
        "Both operands of tl.dot have one type: `tl.dot(p.to(v.dtype), v)`. End with row_max = new_max.",
    ),
    seconds=60.0,  # the interpreter runs each program in Python; on a card the first call compiles
)


def compare(t, function, heads, sq, sk, d, spread=1.0):
    import torch
    import triton.language as tl

    device = "cuda" if torch.cuda.is_available() else "cpu"
    interpreted = type(tl.max).__name__ == "InterpretedFunction"
    t.expect(
        device == "cuda" or interpreted,
        "triton was imported before TRITON_INTERPRET=1 was set: restart the kernel, or run `fa3 check 01.11`",
    )
    q, k, v = ((spread * t.normal(heads, n, d)).astype(np.float16) for n in (sq, sk, sk))
    q *= t.rng.uniform(0.5, 1.5)
    scale = d**-0.5
    out, lse = function(*(torch.tensor(x, device=device) for x in (q, k, v)), scale)
    out, lse = out.cpu().numpy(), lse.cpu().numpy()
    for head in range(heads):
        q_h, k_h, v_h = q[head], k[head], v[head]
        true_out, true_lse = exact.attention(q_h, k_h, v_h, scale)
        scores = scale * (q_h.astype(np.float32) @ k_h.astype(np.float32).T)
        plain = exact.softmax(scores).astype(np.float16) @ v_h  # what fp16 allows: P and the result rounded to fp16
        where = f" of head {head}, {sq} queries, {sk} keys, d {d}"
        t.close(out[head], true_out, "out" + where, same_precision=plain)
        t.close(lse[head], true_lse, "lse" + where, tolerance=1e-5)


@EXERCISE.holds("out and lse match the fp64 truth", "an untouched loop leaves acc_O and row_sum at 0, and 0 / 0 is NaN")
def _(t, function):
    compare(t, function, 1, 32, 64, 16)


@EXERCISE.holds(
    "ragged lengths: keys past the end do not count", "a zero-filled key has score 0: set it to -inf before the maximum"
)
def _(t, function):
    compare(t, function, 1, 40, 45, 32)
    compare(t, function, 1, 3, 1, 16)


@EXERCISE.holds("several heads, several query tiles", "the loop must use its own tiles only, and restart nothing")
def _(t, function):
    compare(t, function, 2, 50, 40, 16)


@EXERCISE.holds(
    "large scores: every tile brings a new maximum",
    "rescale row_sum and acc_O by exp2((row_max - new_max) * scale_log2)",
)
def _(t, function):
    compare(t, function, 1, 20, 130, 16, spread=4.0)


@EXERCISE.holds("fresh inputs give fresh results", "compute from the arguments, keep nothing between calls")
def _(t, function):
    for _ in range(2):
        compare(t, function, 1, 8, 40, 16)
