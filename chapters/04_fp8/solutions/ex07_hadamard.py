"""# 04.7 A rotation in d log2 d additions

*Difficulty 2 of 3, 15 minutes, needs a laptop*

A few channels of Q and K are often far louder than the rest. *Incoherent processing* spreads them: Q and K are multiplied
by the same orthogonal matrix, `(Q M)(K M)^T = Q K^T`, and each new channel is a mixture of all old ones. `M` is a diagonal of
random signs, then a Hadamard matrix divided by `sqrt(d)`. The Hadamard matrix has `H[i, j] = (-1)^popcount(i & j)`,
and needs no multiplication: in `log2 d` rounds, every value meets the one whose index differs in a single bit, and
the two become their sum and their difference.

    round with half = 2:   x0 + x2   x1 + x3   x0 - x2   x1 - x3   x4 + x6   ...

The signs come first. Without them a row of equal values would become a single spike, the contrary of what we want.
"""

import numpy as np


def hadamard(x: np.ndarray) -> np.ndarray:
    """`x @ H / sqrt(d)` along the last axis, by sums and differences.

    Args:
        x: `(..., d)`, d a power of two, 1 included.

    Returns:
        the same shape.

    Raises:
        ValueError: d is no power of two; the message names d.
    """
    # region learner
    # For half = 1, 2, 4, ...: reshape so that an axis tells partners apart; sum and difference; reshape back.
    d = x.shape[-1]
    if d < 1 or d & (d - 1):
        raise ValueError(f"the last axis must be a power of two long, not {d}: pad it, or turn it in chunks")
    half = 1
    while half < d:
        pairs = x.reshape(*x.shape[:-1], d // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([low + high, low - high], axis=-2).reshape(x.shape)
        half *= 2
    return x / np.sqrt(d)
    # endregion


def rotate(x: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Random signs, then the Hadamard transform.

    Args:
        x: `(..., d)`.
        signs: `(d,)` of +1 and -1, the same for Q and K.

    Returns:
        the same shape.
    """
    # region learner
    # Which of the two comes first?
    return hadamard(x * signs)
    # endregion
