"""# 01.4 Attention, normalised once

*Difficulty 2 of 3, 15 minutes, needs a laptop*

Dividing `out` after every tile, as in 01.3, is work that the tensor cores cannot do: a division per element and per
tile. FlashAttention-2 delays it. The accumulator `acc_O` holds the un-normalised sum of `exp(score - row_max) * v`,
is only rescaled when the maximum grows, and is divided by `row_sum` once, after the last tile.

Write the loop body and the epilogue of this attention, for one head. The epilogue also gives the log-sum-exp of the
scaled scores (LSE), which 01.6 and the backward pass of 01.9 live on: `lse = ln(sum over keys of exp(scale * q .
k))`.
"""

import numpy as np


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, softmax_scale: float, tile_n: int
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(softmax_scale * q k^T) v in tiles of `tile_n` keys, normalised once.

    Args:
        q: `(sq, d)`.
        k: `(sk, d)`; sk may be 0.
        v: `(sk, dv)`.
        softmax_scale: factor on the scores, usually d ** -0.5.
        tile_n: keys of a tile; the last tile may be shorter.

    Returns:
        out `(sq, dv)` and lse `(sq,)`, natural logarithm; without keys 0 and -inf.
    """
    row_max = np.full(q.shape[0], -np.inf)
    row_sum = np.zeros(q.shape[0])
    acc_O = np.zeros((q.shape[0], v.shape[1]))
    for start in range(0, k.shape[0], tile_n):
        k_tile = k[start : start + tile_n]  # (n, d)
        v_tile = v[start : start + tile_n]  # (n, dv)
        # region learner
        # Scaled scores of the tile; new maximum; one rescale factor for both row_sum and acc_O. No division here.
        scores = softmax_scale * (q @ k_tile.T)
        new_max = np.maximum(row_max, scores.max(axis=-1))
        p = np.exp(scores - new_max[:, None])
        rescale = np.exp(row_max - new_max)
        row_sum = rescale * row_sum + p.sum(axis=-1)
        acc_O = rescale[:, None] * acc_O + p @ v_tile
        row_max = new_max
        # endregion
    # region learner
    # Normalise, and give the LSE. Without keys row_sum is 0: out is 0 and lse is -inf.
    seen = row_sum > 0
    out = acc_O / np.where(seen, row_sum, 1)[:, None]
    lse = np.where(seen, row_max + np.log(np.where(seen, row_sum, 1)), -np.inf)
    return out, lse
    # endregion
