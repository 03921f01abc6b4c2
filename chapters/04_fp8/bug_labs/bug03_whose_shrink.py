"""# 04.B3 Whose shrink?

*Difficulty 3 of 3, 15 minutes, needs a laptop*

`T = P V` of a block runs under the softmax of the *next* block. When T is done, two factors are at hand: by how much the sum shrank
when T's own block was met, and by how much it shrinks now. `attend` is such a loop, in NumPy, for the rows of one query tile. Five tests
compare it with the truth:

    "two blocks"           random scores, random V
    "V = 1"                eight blocks, random scores
    "equal scores"         eight blocks, all scores equal, random V
    "largest score first"  eight blocks, each row's largest score in the first one, random V
    "random"               eight blocks, random scores, random V

1. **Predict** which of them fail, and write their names into `verdict`, as a set. For the others, say why they are blind.
2. **Check**: your prediction is compared with what the tests say.
3. **Mend** the loop. PV must stay where it is, before the softmax of its round.
"""

from collections.abc import Sequence

import numpy as np


def verdict() -> set[str]:
    """The tests that see the fault in `attend` as it was handed out."""
    # region learner: return {"?"}
    # Write down, for three blocks, to which maximum O, T and the row sum belong in each round.
    return {"?"}
    # endregion


def attend(scores: Sequence[np.ndarray], v: Sequence[np.ndarray]) -> np.ndarray:
    """Attention of some rows, two levels, PV under the softmax of the next block.

    Args:
        scores: per key block `(rows, tile_n)`, scaled, base 2: a weight is `2 ** score`.
        v: per key block `(tile_n, dv)`.

    Returns:
        `(rows, dv)`.
    """
    rows = len(scores[0])
    row_max, row_sum = np.full(rows, -np.inf), np.zeros(rows)
    acc_O, shrink, p = np.zeros((rows, v[0].shape[1])), np.ones(rows), None
    # region learner
    # Round i: the softmax of block i, T = P V of block i - 1.
    for i in range(len(scores) + 1):
        if i > 0:
            acc_T = p @ v[i - 1]
        if i < len(scores):
            new_max = np.maximum(row_max, scores[i].max(axis=1))
            next_shrink = np.exp2(row_max - new_max)
            p = np.exp2(scores[i] - new_max[:, None])
            row_sum, row_max = row_sum * next_shrink + p.sum(axis=1), new_max
            shrink = next_shrink
        if i > 0:
            acc_O = acc_O * shrink[:, None] + acc_T
    # endregion
    return acc_O / row_sum[:, None]
