"""# 04.4 Offset 8

*Difficulty 2 of 3, 15 minutes, needs a laptop*

P is made inside the kernel, so no caller can scale it. Softmax gives numbers up to 1, while e4m3 reaches 448: the upper
octaves would stay empty, and at the lower end small probabilities become 0. FA3 multiplies P by 2^8, for nothing: the 8
is folded into the number that is subtracted from each score anyway.

    p = exp2(score * scale_log2 - (row_max * scale_log2 - offset))

The factor is in `acc_O` and in `row_sum`, so the output needs no correction. LSE does.

`row_sum` adds P *before* it is rounded: errors of single P then average out in the output, and LSE has none of them.
"""

from collections.abc import Callable

import numpy as np


def tile(
    scores: np.ndarray,
    row_max: np.ndarray,
    softmax_scale: float,
    offset: float,
    to_grid: Callable[[np.ndarray], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """P of one key tile, as the second product takes it, and the tile's part of the row sum.

    Args:
        scores: `(rows, n)` raw scores; -inf marks a key that the row may not see.
        row_max: `(rows,)` maximum of raw scores so far, at least that of `scores`; -inf in a row that has seen no key.
        softmax_scale: positive factor on the scores.
        offset: P lies in [0, 2^offset].
        to_grid: rounds an array to the 8-bit format.

    Returns:
        P on the grid `(rows, n)`, and the sum of P before rounding `(rows,)`.
    """
    # region learner
    # As in 01.5: one constant per row, with the offset inside; one multiply and one subtraction per score.
    scale_log2 = softmax_scale * np.log2(np.e)
    shift = np.where(np.isneginf(row_max), 0, row_max) * scale_log2 - offset
    p = np.exp2(scores * scale_log2 - shift[:, None])
    return to_grid(p), p.sum(axis=1)
    # endregion


def epilogue(
    acc_O: np.ndarray, row_max: np.ndarray, row_sum: np.ndarray, softmax_scale: float, offset: float
) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE after the last tile.

    Args:
        acc_O: `(rows, dv)` sum of P v.
        row_max: `(rows,)` maximum of raw scores, -inf in a row without keys.
        row_sum: `(rows,)` sum of P, 0 in a row without keys.
        softmax_scale, offset: as in `tile`.

    Returns:
        out `(rows, dv)`, and lse `(rows,)`: natural, scale included, without the offset. Without keys 0 and -inf.
    """
    # region learner
    # Which of the two still contains 2^offset?
    seen = row_sum > 0
    total = np.where(seen, row_sum, 1)
    lse = np.where(seen, row_max * softmax_scale + np.log(total) - offset * np.log(2), -np.inf)
    return acc_O / total[:, None], lse
    # endregion
