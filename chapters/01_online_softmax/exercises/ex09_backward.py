"""# 01.9 The backward pass, by recomputation

*Difficulty 3 of 3, 25 minutes, needs a laptop*

The forward pass threw the probabilities away. The backward pass does not miss them: `p = exp(softmax_scale * s -
lse)` brings any tile of them back, normalised, from q, k and one number per row. Written out for one head, with dout
the gradient of out:

    dv = p^T dout            dp = dout v^T
    ds = p * (dp - delta)    delta = sum over d of dout * out, one number per row
    dq = softmax_scale * ds k
    dk = softmax_scale * ds^T q

`delta` is the softmax's own gradient: p sums to 1 in each row, so raising one probability lowers the others.

Write `delta` and the loop body. The check compares with PyTorch's autograd in fp64.
"""

import numpy as np


def backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    softmax_scale: float,
    causal: bool,
    tile_n: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of attention, in tiles of `tile_n` keys.

    Args:
        dout, out: `(sq, dv)`, gradient of the output and the output itself.
        q, k, v: `(sq, d)`, `(sk, d)`, `(sk, dv)`.
        lse: `(sq,)`, natural log-sum-exp of the scaled scores, -inf in a row that sees no key.
        softmax_scale: factor on the scores.
        causal: query i sees the keys `j <= i + sk - sq`.
        tile_n: keys of a tile; the last tile may be shorter.

    Returns:
        dq, dk, dv of the shapes of q, k, v; a row that sees no key has gradient 0 and adds nothing to dk and dv.
    """
    sq, sk = q.shape[0], k.shape[0]
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    # region learner
    # delta (sq,), from dout and out.
    raise NotImplementedError("01.9 is yours to write")
    # endregion
    for start in range(0, sk, tile_n):
        keys = slice(start, min(start + tile_n, sk))
        position = np.arange(sk)[keys]  # (n,) indices of the tile's keys
        # region learner
        # Recompute p, and set it to 0 where causal hides the key: its exponential may be inf. Then the four products.
        raise NotImplementedError("01.9 is yours to write")
        # endregion
    return dq, dk, dv
