import numpy as np

from fa3_course.checker import Exercise
from fa3_course.checker import truth as exact
from fa3_course.checker.counting import counting

EXERCISE = Exercise(
    "01.9",
    "ex09_backward.py",
    functions={"backward": 3},
    hints=(
        "exp(softmax_scale * s - lse) is already normalised: no maximum, no sum.",
        "Mask p after the exponential, with np.where: that of a hidden score may be inf, and inf * 0 is NaN. In a "
        "row without keys lse is -inf, every exponential is inf, and the mask hides them all.",
        "dv[keys] = p.T @ dout; ds = p * (dout @ v[keys].T - delta[:, None]); dq += softmax_scale * ds @ k[keys]; "
        "dk[keys] = softmax_scale * ds.T @ q.",
    ),
    seconds=60.0,  # the first import of torch is inside
)


def draw(t, sq, sk, d, dv):
    return t.normal(sq, dv), t.normal(sq, d), t.normal(sk, d), t.normal(sk, dv)


def autograd(dout, q, k, v, scale, causal):
    """Gradients by PyTorch in fp64, over the rows that see a key."""
    import torch

    mask = exact.allowed(len(q), len(k), causal)
    rows = mask.any(axis=1)
    q64, k64, v64 = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (q, k, v))
    scores = (scale * q64 @ k64.T).masked_fill(~torch.from_numpy(mask), -torch.inf)
    (torch.softmax(scores[rows], dim=-1) @ v64).backward(torch.tensor(dout[rows], dtype=torch.float64))
    return tuple(x.grad.numpy() for x in (q64, k64, v64))


def compare(t, backward, dout, q, k, v, scale, causal, tile_n, where=""):
    out, lse = exact.attention(q, k, v, scale, exact.allowed(len(q), len(k), causal))
    answer = backward(dout, q, k, v, out, lse, scale, causal, tile_n)
    for got, want, name in zip(answer, autograd(dout, q, k, v, scale, causal), ("dq", "dk", "dv"), strict=True):
        t.close(got, want, name + where)


@EXERCISE.holds("dq, dk and dv match autograd", "check the formulas one by one: dv needs only p and dout")
def _(t, backward):
    for sq, sk, d, dv in ((6, 16, 4, 4), (3, 20, 8, 5), (1, 1, 2, 2)):
        compare(
            t,
            backward,
            *draw(t, sq, sk, d, dv),
            float(t.rng.uniform(0.2, 1)),
            False,
            8,
            f" for {sq} queries, {sk} keys",
        )


@EXERCISE.holds(
    "causal, aligned bottom-right",
    "query i sees key j when j <= i + sk - sq; j is `position`, not the index in the tile",
)
def _(t, backward):
    for sq, sk in ((10, 10), (4, 13)):
        compare(t, backward, *draw(t, sq, sk, 4, 4), 0.5, True, 4, f" for {sq} queries, {sk} keys")


@EXERCISE.holds("block size does not change the answer", "dq collects over tiles; dk and dv belong to one tile each")
def _(t, backward):
    inputs = draw(t, 7, 18, 4, 3)
    for tile_n in (1, 5, 18, 64):
        for causal in (False, True):
            compare(t, backward, *inputs, 0.5, causal, tile_n, f" for tile_n = {tile_n}, causal {causal}")


@EXERCISE.holds(
    "a row with no keys has gradient 0", "its lse is -inf, and -inf - (-inf) is NaN: mask after the exponential"
)
def _(t, backward):
    compare(t, backward, *draw(t, 9, 4, 4, 3), 0.5, True, 3)


@EXERCISE.holds(
    "gradients have no NaN for logits of 1e4",
    "a hidden key may score far above the row's lse: mask after the exponential",
)
def _(t, backward):
    dout, q, k, v = draw(t, 6, 6, 4, 3)
    q, k = np.abs(q) * 100, np.sort(np.abs(k), axis=0) * 100  # the keys grow: hidden ones score highest
    out, lse = exact.attention(q, k, v, 0.5, exact.allowed(6, 6, True))
    answer = backward(dout, q, k, v, out, lse, 0.5, True, 2)
    for got, want, name in zip(answer, autograd(dout, q, k, v, 0.5, True), ("dq", "dk", "dv"), strict=True):
        t.close(got, want, name, tolerance=1e-6)  # rounding of scores near 1e5, times k


@EXERCISE.holds("the scores of all keys are never in memory at once", "recompute one tile of p at a time")
def _(t, backward):
    dout, q, k, v = draw(t, 12, 160, 4, 4)
    out, lse = exact.attention(q, k, v, 0.5)
    tally, arrays = counting(dout, q, k, v, out, lse)
    backward(*arrays, 0.5, True, 8)
    most = tally.largest or (0,)
    t.expect(
        np.prod(most) <= 160 * 4,
        f"an array of shape {most} was made; the largest of k, v and a tile has 160 x 4 elements",
    )


@EXERCISE.holds("fresh inputs give fresh results", "right in call 1 and wrong later: something is kept between calls")
def _(t, backward):
    inputs = draw(t, 4, 8, 4, 4)
    for call in (1, 2, 3):
        compare(t, backward, *inputs, 0.5, False, 4, f" of call {call}")
        inputs = tuple(map(t.refill, inputs))
