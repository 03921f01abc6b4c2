"""# 04.3 One factor per batch and KV head

*Difficulty 2 of 3, 15 minutes, needs a laptop*

Before a tensor is rounded it is divided by a factor that brings its largest magnitude to the largest value of the format.
The kernel gets the factor as *descale* and multiplies by it later. FA3's kernel takes `q_descale`, `k_descale` and
`v_descale`, each of shape (batch, KV heads): also for Q, so all query heads that read one KV head share a factor.

It never multiplies a tensor by them. `(q / a) . (k / b) * (a b)` is `q . k`, so Q's and K's factors go into the constant
that each score is multiplied with anyway (01.5: softmax_scale and log2(e)). V's factor is common to a head: it goes into the
last multiplication of the output.

Write both: how the factor is found, and where the three factors go.
"""

import numpy as np


def descale(x: np.ndarray, kv_heads: int, largest: float) -> np.ndarray:
    """The factors by which `x` is divided before it is rounded.

    Args:
        x: `(batch, seqlen, heads, head_dim)`; infinities and NaN do not count.
        kv_heads: divides heads; query head i reads KV head `i // (heads // kv_heads)`.
        largest: the largest finite value of the format.

    Returns:
        `(batch, kv_heads)`, positive; 1 for a group of zeros.
    """
    # region learner
    # Largest magnitude per batch and head; then over the query heads that share a KV head.
    size = np.abs(np.where(np.isfinite(x), x, 0)).max(axis=(1, 3))
    size = size.reshape(len(x), kv_heads, -1).max(axis=2)
    return np.where(size > 0, size / largest, 1.0)
    # endregion


def fold(
    softmax_scale: float, q_descale: np.ndarray, k_descale: np.ndarray, v_descale: np.ndarray, heads: int
) -> tuple[np.ndarray, np.ndarray]:
    """Where the factors go: P is `exp2(score * scale_log2 - row_max * scale_log2)`, out is `acc_O / row_sum * out_scale`.

    Args:
        softmax_scale: factor on the true scores.
        q_descale, k_descale, v_descale: `(batch, kv_heads)`.
        heads: query heads, a multiple of kv_heads.

    Returns:
        scale_log2 and out_scale, each `(batch, heads)`: one number per batch and query head.
    """
    # region learner
    # From KV heads to query heads: each factor is repeated. Mind the exp2.
    group = heads // q_descale.shape[1]
    scale_log2 = softmax_scale * np.log2(np.e) * q_descale * k_descale
    return np.repeat(scale_log2, group, axis=1), np.repeat(v_descale, group, axis=1)
    # endregion
