"""# 04.8 Scales per block, and powers of two

*Difficulty 2 of 3, 15 minutes, needs a laptop*

The paper gives each tile of rows its own factor: `tile_m` rows of Q, `tile_n` rows of K. A tile of scores then has one number
to be multiplied with, the product of the two, and it goes where softmax_scale goes.

Applying and undoing a factor rounds, unless it is a power of two. So there is an option: round each factor *up* to a power of
two. Up, because rounding down would push the largest value of the block over the edge of the format.
"""

from collections.abc import Callable

import numpy as np


def quantise(
    x: np.ndarray,
    block: int,
    to_grid: Callable[[np.ndarray], np.ndarray],
    largest: float,
    power_of_two: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """One factor per block of rows, and the rows divided by it and rounded.

    Args:
        x: `(rows, d)`, at least one row; infinities and NaN do not count for a factor.
        block: rows of a block; the last may be shorter.
        to_grid: rounds an array to the 8-bit format; infinity saturates.
        largest: the largest finite value of the format.
        power_of_two: whether factors are rounded up to powers of two.

    Returns:
        values on the grid `(rows, d)`, and the factors `(blocks,)`, positive; 1 for a block of zeros.
    """
    # region learner
    # Largest magnitude per row, then per block (np.maximum.reduceat); factor; its power of two (np.frexp is exact).
    raise NotImplementedError("04.8 is yours to write")
    # endregion


def undo(scores: np.ndarray, q_factors: np.ndarray, k_factors: np.ndarray, tile_m: int, tile_n: int) -> np.ndarray:
    """The true scores from those of quantised tensors.

    Args:
        scores: `(sq, sk)`, q8 @ k8.T.
        q_factors, k_factors: `(blocks,)`, of blocks of tile_m rows of Q and tile_n rows of K.
        tile_m, tile_n: rows of a block; the last ones may be shorter.

    Returns:
        `(sq, sk)`.
    """
    # region learner
    # One number per tile of tile_m x tile_n scores.
    raise NotImplementedError("04.8 is yours to write")
    # endregion
