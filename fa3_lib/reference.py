"""The truth: attention in fp64, written to be read first. Every kernel of the project is compared with it."""

import math

import torch


def attention_mask(
    seqlen_q: int,
    seqlen_k: int,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Which key each query may see: bool `(seqlen_q, seqlen_k)`, True where attention is allowed.

    The last query is aligned with the last key (bottom-right). Query i stands at key position
    `p = i + seqlen_k - seqlen_q` and sees the keys `p - left <= j <= p + right`; both ends are inclusive, -1 means
    unlimited, and `causal` sets `right = 0` (or leaves a smaller window as it is).
    """
    left, right = window_size
    if causal:
        right = 0 if right < 0 else min(right, 0)
    position = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device=device)[None, :]
    allowed = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        allowed &= key >= position - left
    if right >= 0:
        allowed &= key <= position + right
    return allowed


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * Q K^T) V in fp64, with the whole score matrix in memory.

    Args:
        q: `(batch, seqlen_q, heads, head_dim)`, any float dtype.
        k: `(batch, seqlen_k, kv_heads, head_dim)`; query head i reads KV head `i // (heads // kv_heads)`.
        v: `(batch, seqlen_k, kv_heads, head_dim_v)`.
        softmax_scale: factor on the scores; `head_dim ** -0.5` when None.
        causal, window_size: see `attention_mask`.
        softcap: if positive, scores become `softcap * tanh(scores / softcap)` before the mask.
        sinks: `(heads,)`, per query head one further logit (natural units, not scaled) that belongs to no key: it enlarges
            the sum that the exponentials are divided by, and adds nothing to the output (gpt-oss).

    Returns:
        out `(batch, seqlen_q, heads, head_dim_v)` fp64, exactly 0 in rows that see no key;
        lse `(batch, heads, seqlen_q)` fp64, natural log of the sum of exponentials of the scaled scores, -inf in such rows.
        With sinks the sum includes the sink, as the LSE of FlashAttention-4's `learnable_sink` and of vLLM's `s_aux` does;
        a row that sees no key has LSE = sink.
    """
    heads, kv_heads = q.shape[2], k.shape[2]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q64 = q.double().transpose(1, 2)  # (b, h, sq, d)
    k64, v64 = (x.double().transpose(1, 2).repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))  # (b, h, sk, d)

    scores = scale * (q64 @ k64.transpose(-1, -2))  # (b, h, sq, sk)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    allowed = attention_mask(q.shape[1], k.shape[1], causal, window_size, q.device)
    scores = scores.masked_fill(~allowed, -math.inf)

    lse = torch.logsumexp(scores, dim=-1) if k.shape[1] else scores.new_full(scores.shape[:-1], -math.inf)  # (b, h, sq)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None])
    # a row without keys has lse = -inf; subtracting 0 instead makes its exponentials 0 and not NaN
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return (weights @ v64).transpose(1, 2), lse
