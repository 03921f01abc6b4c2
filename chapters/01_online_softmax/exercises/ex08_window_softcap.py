"""# 01.8 Softcap and a sliding window, for free constants

*Difficulty 3 of 3, 15 minutes, needs a laptop*

Some models cap their scores, `x -> softcap * tanh(x / softcap)`, and let a query see only keys nearby. Neither may
cost more than it must in a loop that runs for every score. With raw scores s, the scaled score of a capped model is

    softcap * tanh(s * softmax_scale / softcap)

Fold as in 01.5: multiply s once, by `softmax_scale / softcap`, before tanh; the factor `softcap * log2(e)` after tanh
becomes the `scale_log2` that the exponential multiplies by anyway. Without a softcap, s stays as it is and scale_log2
is that of 01.5.

The order matters: tanh of a masked score, -inf, would be -1, and the key would be back. Query i stands at key
position `p = i + seqlen_k - seqlen_q` and sees the keys `p - left <= j <= p + right`, both ends included; -1 means no
limit, and causal means `right = 0`.
"""

import numpy as np


def prepare(
    scores: np.ndarray, softmax_scale: float, window_size: tuple[int, int], causal: bool, softcap: float
) -> tuple[np.ndarray, float]:
    """Scores and constant for `exp2(scores * scale_log2 - row_max * scale_log2)`.

    Args:
        scores: `(seqlen_q, seqlen_k)` raw scores q . k.
        softmax_scale: positive factor on the scores.
        window_size: (left, right), each 0 or more, or -1 for no limit.
        causal: the query sees no key after its own position, whatever `right` says.
        softcap: positive, or 0 for none.

    Returns:
        scores `(seqlen_q, seqlen_k)`, -inf where the query may not see the key, and scale_log2.
    """
    # region learner
    # First the cap and the constant, then the mask. At most one multiply per score.
    raise NotImplementedError("01.8 is yours to write")
    # endregion
