"""# 01.6 Merging two partial results

*Difficulty 2 of 3, 10 minutes, needs a laptop*

Two workers have each attended to half of the keys and hand in a finished output and its LSE. That is enough to get
the output over all keys, exactly: the LSE says how much weight a part stands for. Split-KV decoding, ring attention
over many GPUs and the tiles of this chapter are all this one operation, and since it is associative, the parts may
come in any order.

A part that saw no key has LSE -inf. Nobody promises what its output holds (a kernel that had nothing to do wrote
nothing), so it must not be read.
"""

import numpy as np


def merge(out_a: np.ndarray, lse_a: np.ndarray, out_b: np.ndarray, lse_b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Attention over the keys of a and b together.

    Args:
        out_a, out_b: `(rows, d)`, normalised outputs; any value, NaN included, in rows whose LSE is -inf.
        lse_a, lse_b: `(rows,)`, natural log-sum-exp of the part's scaled scores.

    Returns:
        out `(rows, d)` and lse `(rows,)`; 0 and -inf in rows where both parts saw no key.
    """
    # region learner
    # Weights exp(lse - larger lse). Their sum gives the new lse. Drop what was not seen (np.where): NaN * 0 is NaN.
    top = np.maximum(lse_a, lse_b)
    shift = np.where(np.isneginf(top), 0, top)
    weight_a, weight_b = np.exp(lse_a - shift), np.exp(lse_b - shift)
    total = weight_a + weight_b
    seen = total > 0
    divisor = np.where(seen, total, 1)
    part_a = np.where(weight_a[:, None] > 0, (weight_a / divisor)[:, None] * out_a, 0)
    part_b = np.where(weight_b[:, None] > 0, (weight_b / divisor)[:, None] * out_b, 0)
    return part_a + part_b, np.where(seen, shift + np.log(divisor), -np.inf)
    # endregion
