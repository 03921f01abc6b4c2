"""Rung 1: online softmax over tiles (NumPy).

Adds to rung 0      one pass over the keys, a tile at a time; delayed normalisation; exp2 with the scale folded in; LSE
Expect              the same numbers, with one (tile_m, tile_n) block of scores alive instead of the whole matrix
Look for            three values per query row that carry everything seen so far: row_max, row_sum, acc_O
"""

import math

import numpy as np

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    tile_m: int = 128,
    tile_n: int = 128,
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(scale * Q K^T) V in the order of FlashAttention-2; no array grows with seqlen_q * seqlen_k.

    Args:
        q: `(batch, seqlen_q, heads, head_dim)`, any float dtype; sums are kept in fp32, in fp64 for fp64 input.
        k: `(batch, seqlen_k, kv_heads, head_dim)`; query head i reads KV head `i // (heads // kv_heads)`.
        v: `(batch, seqlen_k, kv_heads, head_dim_v)`.
        softmax_scale: factor on the scores, any finite number; `head_dim ** -0.5` when None.
        causal: query i sees keys `j <= i + seqlen_k - seqlen_q` (bottom-right aligned).
        tile_m: query rows per tile (the paper's B_r). Does not change the answer.
        tile_n: keys per tile (the paper's B_c). Changes it by rounding only.

    Returns:
        out `(batch, seqlen_q, heads, head_dim_v)` in q's dtype, exactly 0 in rows that see no key;
        lse `(batch, heads, seqlen_q)` fp32, natural log with the scale included, -inf in such rows.

    Raises:
        ValueError: for shapes that do not fit together, tiles below 1 or a scale that is not finite.
    """
    scale = check_inputs(q, k, v, softmax_scale, tile_m, tile_n)
    (batch, seqlen_q, heads, head_dim), (_, seqlen_k, kv_heads, head_dim_v) = q.shape, v.shape
    group = heads // kv_heads
    dtype = np.result_type(q.dtype, np.float32)
    # query heads stand beside the KV head that they share, so that NumPy broadcasts K and V over the group
    q_grouped = q.astype(dtype).reshape(batch, seqlen_q, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    k_grouped, v_grouped = (x.astype(dtype).transpose(0, 2, 1, 3)[:, :, None] for x in (k, v))  # (b, hk, 1, sk, d)
    if scale <= 0:  # row_max below is a maximum of raw scores: the sign must sit in Q, the factor must be positive
        q_grouped, scale = q_grouped * np.sign(scale), abs(scale) or 1.0

    out = np.empty((batch, kv_heads, group, seqlen_q, head_dim_v), dtype)
    lse = np.empty((batch, kv_heads, group, seqlen_q), dtype)
    for start in range(0, seqlen_q, tile_m):
        rows = np.arange(start, min(start + tile_m, seqlen_q))
        # how many keys each row sees: the mask, as one number per row
        visible = np.clip(rows + 1 + seqlen_k - seqlen_q, 0, seqlen_k) if causal else np.full(len(rows), seqlen_k)
        out[..., rows, :], lse[..., rows] = query_tile(
            q_grouped[..., rows, :], k_grouped, v_grouped, scale * LOG2_E, visible, tile_n
        )
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, seqlen_q, heads, head_dim_v)
    return out.astype(q.dtype), lse.reshape(batch, heads, seqlen_q).astype(np.float32)


def query_tile(q, k, v, scale_log2, visible, tile_n):
    """One tile of queries against all its keys: the loop that every later rung keeps.

    Args:
        q: `(..., rows, d)`; k: `(..., sk, d)`; v: `(..., sk, dv)`; one dtype, fp32 or fp64.
        scale_log2: softmax scale times log2(e), positive.
        visible: int `(rows,)`, row r sees the keys below visible[r]; ascending.
        tile_n: keys per step.

    Returns:
        out `(..., rows, dv)` and lse `(..., rows)`.
    """
    row_max = np.full(q.shape[:-1], -np.inf, q.dtype)  # m: largest raw score so far
    row_sum = np.zeros(q.shape[:-1], q.dtype)  # l: sum of exponentials, relative to row_max
    acc_O = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)  # O before its division by l

    for start in range(0, int(visible[-1]), tile_n):
        keys = slice(start, min(start + tile_n, k.shape[-2]))
        scores = q @ k[..., keys, :].swapaxes(-1, -2)  # (..., rows, tile_n), raw: the scale is still to come
        if keys.stop > visible[0]:  # only tiles on the edge of the mask pay for it
            scores = np.where(np.arange(keys.start, keys.stop) < visible[:, None], scores, -np.inf)

        new_max = np.maximum(row_max, scores.max(axis=-1))
        # a row that has seen no key yet has the maximum -inf; subtracting 0 instead gives exp2(-inf) = 0 and no NaN
        shift = np.where(np.isneginf(new_max), 0.0, new_max) * scale_log2
        weights = np.exp2(scores * scale_log2 - shift[..., None])  # one multiply-add and one exp2 per score
        rescale = np.exp2(row_max * scale_log2 - shift)  # what the sums so far are worth under the new maximum
        row_sum = row_sum * rescale + weights.sum(axis=-1)
        acc_O = acc_O * rescale[..., None] + weights @ v[..., keys, :]
        row_max = new_max

    empty = np.isneginf(row_max)
    divisor = np.where(empty, 1.0, row_sum)  # the only division, once per row
    return acc_O / divisor[..., None], np.where(empty, -np.inf, row_max * (scale_log2 * LN_2) + np.log(divisor))


def check_inputs(q, k, v, softmax_scale, tile_m, tile_n) -> float:
    """Refuses, by name, what `attention` cannot take. Returns the scale."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, seqlen, heads, head_dim), got shape {x.shape}")
    if q.shape[3] == 0:
        raise ValueError("q: head_dim must be at least 1, got 0")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"shapes do not fit: q {q.shape}, k {k.shape}, v {v.shape}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads: not a multiple of the {k.shape[2]} KV heads")
    if tile_m < 1 or tile_n < 1:
        raise ValueError(f"tiles must be at least 1, got tile_m={tile_m}, tile_n={tile_n}")
    scale = q.shape[3] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if not math.isfinite(scale):
        raise ValueError(f"softmax_scale must be finite, got {softmax_scale}")
    return scale
