"""# 04.B5 Whose factor?

*Difficulty 1 of 3, 10 minutes, needs a laptop*

FA3 takes its descales as `(batch, KV heads)`, for Q as well. `head_attention` computes one query head and folds them where they are free:
Q's and K's into the softmax's factor, V's into the end. Q has more heads than its factors have columns, and somebody made the index fit.
Five tests compare with the truth, all with random inputs:

    "MHA"                  as many KV heads as query heads, all factors different
    "MQA"                  one KV head, all factors different
    "GQA, V's factors"     2 KV heads for 8 heads; V's factors differ between the KV heads, Q's and K's do not
    "GQA, first and last"  2 KV heads for 8 heads, all factors different; only the first and the last head are looked at
    "GQA"                  2 KV heads for 8 heads, all factors different

1. **Predict** which of them fail, and write their names into `verdict`, as a set. For the others, say why they are blind.
2. **Check**: your prediction is compared with what the tests say.
3. **Mend** the function.
"""

import numpy as np


def verdict() -> set[str]:
    """The tests that see the fault in `head_attention` as it was handed out."""
    # region learner: return {"?"}
    # List, for 8 heads and 2 KV heads, which factor each head takes and which one it should.
    return {"GQA"}
    # endregion


def head_attention(
    batch: int,
    head: int,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    q_descale: np.ndarray,
    k_descale: np.ndarray,
    v_descale: np.ndarray,
) -> np.ndarray:
    """One query head of an 8-bit attention.

    Args:
        q: `(b, sq, h, d)` stored values; k, v: `(b, sk, hk, d)`; h is a multiple of hk, query head i reads KV head i // (h // hk).
        q_descale, k_descale, v_descale: `(b, hk)`: a true value is the stored one times its factor.

    Returns:
        `(sq, d)`.
    """
    heads, kv_heads, d = q.shape[2], k.shape[2], q.shape[3]
    # region learner
    # Which KV head, which factors?
    kv_head = head // (heads // kv_heads)
    factor = q_descale[batch, kv_head] * k_descale[batch, kv_head]
    scores = d**-0.5 * factor * (q[batch, :, head] @ k[batch, :, kv_head].T)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return v_descale[batch, kv_head] * (p @ v[batch, :, kv_head]) / p.sum(axis=1, keepdims=True)
    # endregion
