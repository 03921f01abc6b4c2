"""# 02.3 What a box brings, and how many bytes the barrier sees

*Difficulty 2 of 3, 12 minutes, needs a laptop*

A TMA load copies a box of a tensor of 1 to 5 dimensions into shared memory. The box may hang over any edge of the tensor,
or lie outside altogether, also at negative coordinates: what does not exist is filled with zeros. The barrier counts the
bytes that are *written to shared memory*.

Write the copy: what lands, and what `expect_tx` must have announced.
"""

import numpy as np


def tma_load(tensor: np.ndarray, at: tuple[int, ...], box: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """The box at these coordinates.

    Args:
        tensor: 1 to 5 dimensions, any dtype.
        at: coordinate of the box's first element in each dimension; may be negative or past the
            end.
        box: its extent in each dimension.

    Returns:
        a new array of shape `box` in the tensor's dtype, and the bytes that count on the barrier.
    """
    # region learner
    # An array of zeros; per dimension, which coordinates at .. at + box - 1 exist? Where in the box
    # do they go?
    tile = np.zeros(box, tensor.dtype)
    low = [max(a, 0) for a in at]
    high = [max(min(a + b, n), l) for a, b, n, l in zip(at, box, tensor.shape, low, strict=True)]
    source = tuple(slice(l, h) for l, h in zip(low, high, strict=True))
    target = tuple(slice(l - a, h - a) for l, h, a in zip(low, high, at, strict=True))
    if all(h > l and l < n for l, h, n in zip(low, high, tensor.shape, strict=True)):
        tile[target] = tensor[source]
    return tile, tile.nbytes
    # endregion
