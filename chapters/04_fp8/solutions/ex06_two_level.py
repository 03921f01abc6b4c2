"""# 04.6 One level, two levels

*Difficulty 2 of 3, 15 minutes, needs a laptop*

`product(p, v, acc)` is a tensor core: it returns `acc + p @ v`, added with its 13 bits, and starts from 0 when acc is None.
What you write yourself around it runs in fp32 (here fp64) and is as good as exact.

FA3 lets the tensor core hold the output for the whole context: **one level**. Between two key tiles the accumulator is
rescaled to the new maximum, and goes back in. The sum grows with the context, and 13 bits are soon too few.

**Two levels**: each tile is multiplied into a fresh accumulator and added outside, where the rescale already is:
`acc_O * rescale + T`. And as a tile's product is there by itself for a moment, each tile may have its own factor for V.
"""

from collections.abc import Callable, Sequence

import numpy as np


def one_level(
    p_tiles: Sequence[np.ndarray],
    v_tiles: Sequence[np.ndarray],
    rescales: Sequence[np.ndarray],
    v_descale: float,
    product: Callable[..., np.ndarray],
) -> np.ndarray:
    """The sum of P V over all key tiles, held by the tensor core.

    Args:
        p_tiles: one `(rows, n)` per tile, in the order in which they come; at least one tile.
        v_tiles: one `(n, dv)` per tile.
        rescales: one `(rows,)` per tile: the factor for what was added before it.
        v_descale: V's factor.
        product: `product(p, v)` or `product(p, v, acc)`.

    Returns:
        acc_O `(rows, dv)`.
    """
    # region learner
    # The accumulator goes through every product. V's factor is the same for all tiles: when is it multiplied?
    acc_O = np.zeros((len(p_tiles[0]), v_tiles[0].shape[1]))
    for p, v, rescale in zip(p_tiles, v_tiles, rescales, strict=True):
        acc_O = product(p, v, acc_O * rescale[:, None])
    return acc_O * v_descale
    # endregion


def two_level(
    p_tiles: Sequence[np.ndarray],
    v_tiles: Sequence[np.ndarray],
    rescales: Sequence[np.ndarray],
    v_descales: Sequence[float],
    product: Callable[..., np.ndarray],
) -> np.ndarray:
    """The sum of P V over all key tiles, each from a fresh accumulator; `v_descales` has one factor per tile."""
    # region learner
    # One multiply-add per tile outside the tensor core.
    acc_O = np.zeros((len(p_tiles[0]), v_tiles[0].shape[1]))
    for p, v, rescale, descale in zip(p_tiles, v_tiles, rescales, v_descales, strict=True):
        acc_O = acc_O * rescale[:, None] + descale * product(p, v)
    return acc_O
    # endregion
