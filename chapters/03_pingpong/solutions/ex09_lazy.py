"""# 03.9 Lazy rescale

*Difficulty 2 of 3, 15 minutes, needs a laptop*

Online softmax multiplies `acc_O` and `row_sum` by `2 ** (old maximum - new maximum)` whenever the maximum of a row grows. It need not. Any reference
value does, as long as nothing overflows: P, the sum and O are all relative to it, and it cancels at the end. So keep the maximum *in
use* until a block's maximum exceeds it by more than a threshold; P is then at most `2 ** threshold`.

Scores are in base 2 here (already multiplied by scale times log2 e). On Hopper this saved nearly all rescales, and no time: nobody had waited for
them, and the branch cut the schedule in two (lesson, section 12). The arithmetic is worth knowing all the same: FlashAttention-4
does it on Blackwell.
"""

import numpy as np


def update(
    row_max: np.ndarray, row_sum: np.ndarray, acc_O: np.ndarray, scores: np.ndarray, v: np.ndarray, threshold: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """One key block.

    Args:
        row_max: (rows,) maximum in use, -inf before the first key. row_sum: (rows,). acc_O: (rows, d).
        scores: (rows, keys), base 2; -inf where masked. v: (keys, d). threshold: at least 0, finite.

    Returns:
        the new row_max, row_sum and acc_O, and how many rows changed their maximum in use.
    """
    # region learner
    # Which rows are too far? Only those take the block's maximum. Mind rows that have seen no key.
    block_max = scores.max(axis=1)
    far = block_max > row_max + threshold
    new_max = np.where(far, block_max, row_max)
    safe = np.where(np.isneginf(new_max), 0, new_max)
    shrink, p = np.exp2(row_max - safe), np.exp2(scores - safe[:, None])
    return new_max, row_sum * shrink + p.sum(axis=1), acc_O * shrink[:, None] + p @ v, int(far.sum())
    # endregion


def finish(row_max: np.ndarray, row_sum: np.ndarray, acc_O: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The output (rows, d) and LSE (rows,), natural log; 0 and -inf for a row without keys."""
    # region learner
    # The reference value cancels in the output, and must be added back in the LSE.
    seen = row_sum > 0
    total = np.where(seen, row_sum, 1)
    lse = np.where(seen, np.log(2) * (np.where(seen, row_max, 0) + np.log2(total)), -np.inf)
    return acc_O / total[:, None], lse
    # endregion
