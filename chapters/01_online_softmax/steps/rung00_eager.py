"""Rung 0: attention as a few PyTorch calls (runs on a CPU and on any GPU).

Starts the ladder   scores = Q K^T, weights = softmax(scores), out = weights V; each result goes through memory
Expect              right numbers, and (batch, heads, seqlen_q, seqlen_k) score and weight matrices that fill a card
Look for            the peak memory, which grows with the square of the sequence length
"""

import math

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * Q K^T) V, unfused.

    Args:
        q: `(batch, seqlen_q, heads, head_dim)` torch tensor, fp16, bf16, fp32 or fp64.
        k: `(batch, seqlen_k, kv_heads, head_dim)`; query head i reads KV head `i // (heads // kv_heads)`.
        v: `(batch, seqlen_k, kv_heads, head_dim_v)`.
        softmax_scale: factor on the scores; `head_dim ** -0.5` when None.
        causal: query i sees keys `j <= i + seqlen_k - seqlen_q` (bottom-right aligned).

    Returns:
        out `(batch, seqlen_q, heads, head_dim_v)` in q's dtype, 0 in rows that see no key;
        lse `(batch, heads, seqlen_q)` fp32, natural log with the scale included, -inf in such rows.

    Raises:
        TypeError: for anything but torch tensors of one of these dtypes.
        ValueError: for shapes that do not fit together.
    """
    check_inputs(q, k, v)
    seqlen_q, seqlen_k, heads, kv_heads = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    q = (q * scale).transpose(1, 2)  # (b, h, sq, d); scaled before the product, which keeps fp16 scores in range
    k, v = (x.transpose(1, 2).repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))  # (b, h, sk, d)

    scores = q @ k.transpose(-1, -2)  # (b, h, sq, sk): the matrix that hurts
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))  # once more, in fp32
    if causal:
        future = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device).triu(seqlen_k - seqlen_q + 1)
        scores = scores.masked_fill(future, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)  # (b, h, sq); -inf where a row sees no key
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])  # and once more
    out = weights.to(v.dtype) @ v  # (b, h, sq, dv)
    return out.transpose(1, 2), lse.float()


def check_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuses, by name, what `attention` cannot take."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or x.dtype not in DTYPES or x.dtype != q.dtype:
            got = getattr(x, "dtype", type(x))
            raise TypeError(f"{name} must be a torch tensor of fp16, bf16, fp32 or fp64 like q, got {got}")
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, seqlen, heads, head_dim), got shape {tuple(x.shape)}")
    if q.shape[3] == 0:
        raise ValueError("q: head_dim must be at least 1, got 0")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads: not a multiple of the {k.shape[2]} KV heads")
