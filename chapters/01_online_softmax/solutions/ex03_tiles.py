"""# 01.3 The weighted average, tile by tile

*Difficulty 2 of 3, 15 minutes, needs a laptop*

Attention does not want the probabilities, it wants their average of the values: `softmax(scores) @ v`. Tiles of
scores come one after the other and are forgotten. In this first form `out` is, after every tile, the finished average
of the keys seen so far: that is the order of FlashAttention-1.

When a tile arrives, the old average was normalised by the old sum and taken against the old maximum. Undo the first,
repair the second, add the tile's own values, and normalise again.
"""

import numpy as np


def weighted_average(scores: np.ndarray, v: np.ndarray, tile_n: int) -> np.ndarray:
    """softmax(scores) @ v in one pass over tiles of `tile_n` keys.

    Args:
        scores: `(rows, keys)`; -inf marks a key that the row may not see.
        v: `(keys, d)`.
        tile_n: keys of a tile; the last tile may be shorter.

    Returns:
        `(rows, d)`; a row without keys gives 0.
    """
    rows, keys = scores.shape
    row_max = np.full(rows, -np.inf)
    row_sum = np.zeros(rows)
    out = np.zeros((rows, v.shape[1]))
    for start in range(0, keys, tile_n):
        tile = scores[:, start : start + tile_n]  # (rows, n)
        v_tile = v[start : start + tile_n]  # (n, d)
        # region learner
        # Update row_max and row_sum as in 01.2, and out with them. out is a finished average after every tile.
        new_max = np.maximum(row_max, tile.max(axis=-1))
        shift = np.where(np.isneginf(new_max), 0, new_max)
        p = np.exp(tile - shift[:, None])
        old_weight = row_sum * np.exp(row_max - shift)
        row_sum = old_weight + p.sum(axis=-1)
        row_max = new_max
        out = (old_weight[:, None] * out + p @ v_tile) / np.where(row_sum == 0, 1, row_sum)[:, None]
        # endregion
    return out
