"""# 01.1 A softmax that does not overflow

*Difficulty 1 of 3, 5 minutes, needs a laptop*

`exp(89)` is too large for fp32 and `exp(12)` for fp16, yet the softmax itself is always between 0 and 1. Write the
safe softmax: subtracting the row's maximum changes nothing in the result, and no exponent is positive any more.

Some rows will see no key at all: every score is `-inf`, since a mask has removed it. Their probabilities are 0, not
NaN.
"""

import numpy as np


def softmax(scores: np.ndarray) -> np.ndarray:
    """Probabilities along the last axis.

    Args:
        scores: `(rows, keys)`, at least one key; -inf marks a key that the row may not see.

    Returns:
        `(rows, keys)` in the dtype of `scores`; a row of -inf gives zeros.
    """
    # region learner
    # row_max, then exp, then the row's sum. Mind the row whose maximum is -inf: what is -inf - (-inf)?
    row_max = scores.max(axis=-1, keepdims=True)
    shift = np.where(np.isneginf(row_max), 0, row_max)
    p = np.exp(scores - shift)
    row_sum = p.sum(axis=-1, keepdims=True)
    return p / np.where(row_sum == 0, 1, row_sum)
    # endregion
