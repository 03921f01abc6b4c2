"""Attention on CPU tensors by the kernel's own algorithm: tiles, online softmax, delayed normalisation.

A way to learn and to test without a GPU, in the order of the kernel (key blocks from the last one down). Not fast.
"""

import math

import torch

from fa3_lib.config import ForwardConfig, ceil_div


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    config: ForwardConfig,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    window_left: int = 0,
    window_right: int = 0,
    p_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    offset: int = 0,
    rounded_sums: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and sums in fp32; P is rounded before P V, as the kernel does.

    A tile has the queries and key blocks of the kernel's, packed or not; all heads are computed side by side, so that
    packing changes which queries share a tile and nothing else.

    Args:
        q: `(b, sq, h, d)`; k: `(b, sk, hk, d)`; v: `(b, sk, hk, dv)`; any float dtype.
        softmax_scale: factor on the scores, positive.
        config: tiles and mask.
        softcap: positive, with `config.softcap`.
        sinks: `(h,)` fp32, with `config.sinks`.
        window_left, window_right: keys before and after a query's own position, at least 0, with `config.window`.
        p_dtype, out_dtype: what P and the output are rounded to; q's dtype when None.
        offset: P is rounded in the range (0, 2**offset].
        rounded_sums: whether the output is divided by the sum of P as it is rounded; the LSE never is.

    Returns:
        out `(b, sq, h, dv)`; lse `(b, h, sq)` fp32, which includes the sinks.
    """
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    p_dtype, out_dtype = p_dtype or q.dtype, out_dtype or q.dtype
    out = q.new_zeros(batch, seqlen_q, heads, v.shape[-1], dtype=out_dtype)
    lse = torch.full((batch, heads, seqlen_q), -math.inf, device=q.device)
    # a softcap's constants stay outside the loop: scores become tanh(scores * factor), and the cap joins the scale
    factor = softmax_scale / softcap if config.softcap else 1.0
    scale_log2 = (softcap if config.softcap else softmax_scale) * math.log2(math.e)
    right = window_right if config.window else 0 if config.causal else seqlen_k + seqlen_q
    # (b, h, s, d) in fp32; 16-bit products are exact there
    qf = q.transpose(1, 2).float()
    kf, vf = (x.transpose(1, 2).float().repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))

    for m_block in range(ceil_div(seqlen_q * config.pack_gqa, config.tile_m)):
        rows = slice(config.first_query(m_block), min(config.last_query(m_block) + 1, seqlen_q))
        position = torch.arange(rows.start, rows.stop)[:, None] + seqlen_k - seqlen_q
        row_max = torch.full((batch, heads, rows.stop - rows.start, 1), -math.inf)
        row_sum, divisor = torch.zeros_like(row_max), torch.zeros_like(row_max)
        acc_O = torch.zeros(*row_max.shape[:-1], v.shape[-1])
        first = config.first_key_block(m_block, seqlen_q, seqlen_k, window_left) if config.window else 0
        for n in reversed(range(first, config.key_blocks(m_block, seqlen_q, seqlen_k, right=right))):
            cols = slice(n * config.tile_n, min((n + 1) * config.tile_n, seqlen_k))
            scores = qf[:, :, rows] @ kf[:, :, cols].transpose(-1, -2)  # (b, h, rows, cols)
            if config.softcap:
                scores = torch.tanh(scores * factor)
            key = torch.arange(cols.start, cols.stop)[None, :]
            scores.masked_fill_(key > position + right, -math.inf)
            if config.window:
                scores.masked_fill_(key < position - window_left, -math.inf)
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            subtracted = new_max.masked_fill(new_max == -math.inf, 0.0) * scale_log2
            shrink = torch.exp2(row_max * scale_log2 - subtracted)
            p = torch.exp2(scores * scale_log2 - (subtracted - offset))
            row_sum = row_sum * shrink + p.sum(-1, keepdim=True)
            p_rounded = p.to(p_dtype).float()
            divisor = divisor * shrink + (p_rounded if rounded_sums else p).sum(-1, keepdim=True)
            acc_O = acc_O * shrink + p_rounded @ vf[:, :, cols]
            row_max = new_max

        top = row_max * scale_log2 - offset
        if config.sinks:  # the sink joins the sum as one more key would, with the maximum of both subtracted
            sink = sinks[:, None, None] * math.log2(math.e)
            new_top = torch.maximum(top, sink)
            subtracted = new_top.masked_fill(new_top == -math.inf, 0.0)
            shrink = torch.exp2(top - subtracted)
            row_sum, divisor = (x * shrink + torch.exp2(sink - subtracted) for x in (row_sum, divisor))
            acc_O = acc_O * shrink
            top = new_top
        empty = divisor == 0.0  # a row with a key has a weight of 1 somewhere; NaN goes its way
        out[:, rows] = torch.where(empty, 0.0, acc_O / divisor).transpose(1, 2).to(out_dtype)
        row_lse = torch.where(empty, -math.inf, (top + torch.log2(row_sum)) * math.log(2.0))
        lse[:, :, rows] = row_lse.squeeze(-1)
    return out, lse
