"""# 01.11 The inner loop, in Triton

*Difficulty 3 of 3, 20 minutes, needs Linux (Triton runs on the CPU in its interpreter, or on an NVIDIA card)*

Optional, and the bridge to the GPU: the loop of 01.4 with the constants of 01.5, as one program of a Triton kernel.
The program owns `TILE_M` queries of one head; loads and stores are written, the inner loop is yours.

Everything is there to be used: `q` (TILE_M, D) in fp16, `k` (D, TILE_N) already transposed, `v` (TILE_N, D).
`tl.dot(a, b)` multiplies two tiles of fp16 into fp32. Keys past `seqlen_k` were loaded as zeros; a zero is a score
like any other, so they need the mask.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it while it is imported

import triton
import triton.language as tl


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    seqlen_q,
    seqlen_k,
    scale_log2,
    D: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    head = tl.program_id(1)
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.arange(0, D)
    q_offsets = (head * seqlen_q + rows)[:, None] * D + columns[None, :]
    q = tl.load(q_ptr + q_offsets, mask=rows[:, None] < seqlen_q, other=0.0)
    row_max = tl.full((TILE_M,), float("-inf"), tl.float32)  # of raw scores
    row_sum = tl.zeros((TILE_M,), tl.float32)
    acc_O = tl.zeros((TILE_M, D), tl.float32)
    for start in range(0, seqlen_k, TILE_N):
        keys = start + tl.arange(0, TILE_N)
        k = tl.load(
            k_ptr + (head * seqlen_k + keys)[None, :] * D + columns[:, None], mask=keys[None, :] < seqlen_k, other=0.0
        )
        v = tl.load(
            v_ptr + (head * seqlen_k + keys)[:, None] * D + columns[None, :], mask=keys[:, None] < seqlen_k, other=0.0
        )
        # region learner: pass
        # scores by tl.dot, keys past seqlen_k to -inf (tl.where); tl.max, tl.math.exp2, tl.sum along axis 1;
        # rescale row_sum and acc_O; P must be fp16 for the second tl.dot: p.to(v.dtype).
        scores = tl.where(keys[None, :] < seqlen_k, tl.dot(q, k), float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        p = tl.math.exp2(scores * scale_log2 - (new_max * scale_log2)[:, None])
        rescale = tl.math.exp2((row_max - new_max) * scale_log2)
        row_sum = row_sum * rescale + tl.sum(p, axis=1)
        acc_O = acc_O * rescale[:, None] + tl.dot(p.to(v.dtype), v)
        row_max = new_max
        # endregion
    out = acc_O / row_sum[:, None]
    lse = (row_max * scale_log2 + tl.math.log2(row_sum)) * 0.6931471805599453  # ln(2): natural logarithm
    tl.store(out_ptr + q_offsets, out.to(out_ptr.dtype.element_ty), mask=rows[:, None] < seqlen_q)
    tl.store(lse_ptr + head * seqlen_q + rows, lse, mask=rows < seqlen_q)


def triton_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without a mask.

    Args:
        q: `(heads, sq, d)` fp16, contiguous, d a power of two from 16 to 128.
        k, v: `(heads, sk, d)` fp16, contiguous, sk >= 1.
        softmax_scale: positive factor on the scores.

    Returns:
        out like q, and lse `(heads, sq)` fp32, natural logarithm.
    """
    heads, seqlen_q, d = q.shape
    out, lse = torch.empty_like(q), torch.empty(heads, seqlen_q, dtype=torch.float32, device=q.device)
    tile_m, tile_n = 32, 32
    grid = (triton.cdiv(seqlen_q, tile_m), heads)
    scale_log2 = softmax_scale * 1.4426950408889634  # log2(e)
    attention_kernel[grid](q, k, v, out, lse, seqlen_q, k.shape[1], scale_log2, D=d, TILE_M=tile_m, TILE_N=tile_n)
    return out, lse
