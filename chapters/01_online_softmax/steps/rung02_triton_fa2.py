"""Rung 2: the same loop as one GPU kernel, in Triton, in FlashAttention-2's way.

Adds to rung 1      tiles live in registers and shared memory; each program owns one query tile and waits for every step
Expect              linear memory, one kernel, a third to a half of the tensor cores' peak
Look for in SASS    the exponentials (MUFU.EX2) and the products (HGMMA) of a program never at the same time

Without a GPU the kernel runs in Triton's interpreter, on CPU tensors; nothing else changes.
"""

import contextlib
import importlib.util
import math
import os

import numpy
import torch

if importlib.util.find_spec("triton") is None:
    raise ImportError("rung 2 needs Triton, which has wheels for Linux only; rungs 0 and 1 run here")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by Triton when it is imported

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

INTERPRETED = triton.knobs.runtime.interpret
if INTERPRETED and not isinstance(tl.max, InterpretedFunction):
    raise ImportError("Triton was imported as a compiler before rung 2: set TRITON_INTERPRET=1 before Python starts")
major_minor = [tuple(map(int, x.__version__.split(".")[:2])) for x in (triton, numpy)]
if INTERPRETED and major_minor[0] < (3, 7) and major_minor[1] >= (2, 4):
    raise ImportError(
        f"the interpreter of Triton {triton.__version__} breaks with numpy {numpy.__version__}: pip install 'numpy<2.4'"
    )

LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(math.log(2.0))
HOPPER_SHARED_MEMORY = 232_448  # bytes that one program may use (227 KB)

# (tile_m, tile_n, warps, stages) by bytes per element and padded head dim: as large as the registers (S, P and O of a
# thread) and a Hopper's shared memory allow without spills. Only fp32 above 64 spills more than a register.
TILES = {
    2: {16: (128, 128, 8, 3), 32: (128, 128, 8, 3), 64: (128, 128, 8, 3), 128: (128, 128, 8, 2), 256: (128, 64, 8, 2)},
    4: {16: (64, 32, 4, 2), 32: (64, 32, 4, 2), 64: (64, 32, 4, 2), 128: (32, 32, 4, 2), 256: (32, 16, 8, 2)},
}


# fmt: off
@triton.jit
def attend(
    acc_O, row_max, row_sum,  # (tile_m, padded_v), (tile_m,), (tile_m,); all fp32, row_max in raw scores
    q,  # (tile_m, padded_d)
    K, V,  # pointers to key `first * TILE_N` of this head
    k_row, v_row,
    first, last,  # key tiles first <= n < last
    visible,  # (tile_m,) row r sees the keys below visible[r]
    seqlen_k, scale_log2,
    TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED_D: tl.constexpr,
    PADDED_V: tl.constexpr, MASKED: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Adds the key tiles first .. last - 1 to (row_max, row_sum, acc_O). Masks are compiled in only where needed."""
    c = tl.arange(0, TILE_N)
    d = tl.arange(0, PADDED_D)[None, :]
    e = tl.arange(0, PADDED_V)[None, :]
    # one moving pointer per tensor and fixed offsets: a moving tensor of pointers would cost 2 registers per element
    offset_k = c[:, None] * k_row + d
    offset_v = c[:, None] * v_row + e
    in_d, in_v = d < HEAD_DIM, e < HEAD_DIM_V
    for n in range(first, last):
        keys = n * TILE_N + c
        # loads past the end must give 0: a garbage NaN in V times a weight of 0 would still be NaN
        if MASKED:
            exists = (keys < seqlen_k)[:, None]
            k = tl.load(K + offset_k, mask=exists & in_d, other=0.0)
            v = tl.load(V + offset_v, mask=exists & in_v, other=0.0)
        else:
            k = tl.load(K + offset_k) if HEAD_DIM == PADDED_D else tl.load(K + offset_k, mask=in_d, other=0.0)
            v = tl.load(V + offset_v) if HEAD_DIM_V == PADDED_V else tl.load(V + offset_v, mask=in_v, other=0.0)
        if WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)

        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (tile_m, tile_n) fp32, raw
        if MASKED:
            scores = tl.where(keys[None, :] < visible[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = new_max * scale_log2
        if MASKED:
            # only here can a row still have seen no key: 0 in place of -inf gives exp2(-inf) = 0 and no NaN
            shift = tl.where(new_max == float("-inf"), 0.0, shift)
        p = tl.exp2(scores * scale_log2 - shift[:, None])  # one multiply-add and one MUFU per score
        rescale = tl.exp2(row_max * scale_log2 - shift)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc_O = tl.dot(p.to(v.dtype), v, acc_O * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
        K += TILE_N * k_row
        V += TILE_N * v_row
    return acc_O, row_max, row_sum


# lengths and heads stay numbers of the launch, 1 included: one compile serves all shapes of a head dim
# fmt: off
@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "heads", "group"])
def forward_kernel(
    Q, K, V, O,  # (batch, seqlen, heads, head_dim) with any strides but the last, which is 1
    LSE,  # (batch, heads, seqlen_q) fp32, contiguous
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, o_batch, o_row, o_head,  # strides
    seqlen_q, seqlen_k, heads, group,  # group: query heads per KV head
    scale_log2,
    CAUSAL: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, PADDED_D: tl.constexpr, PADDED_V: tl.constexpr, WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # fmt: on
    """One program: one tile of queries of one head, against all keys that it sees."""
    tiles = tl.cdiv(seqlen_q, TILE_M)
    m = tl.program_id(0) % tiles
    if CAUSAL:
        m = tiles - 1 - m  # the longest rows first, so that the last wave is short
    batch = (tl.program_id(0) // tiles // heads).to(tl.int64)
    head = (tl.program_id(0) // tiles % heads).to(tl.int64)
    first_row = m.to(tl.int64) * TILE_M  # 64-bit: row * stride may pass 2^31

    r = tl.arange(0, TILE_M)
    d = tl.arange(0, PADDED_D)[None, :]
    e = tl.arange(0, PADDED_V)[None, :]
    rows = m * TILE_M + r
    exists = (rows < seqlen_q)[:, None]

    Q += batch * q_batch + head * q_head + first_row * q_row
    q = tl.load(Q + r[:, None] * q_row + d, mask=exists & (d < HEAD_DIM), other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    K += batch * k_batch + (head // group) * k_head
    V += batch * v_batch + (head // group) * v_head

    blocks = tl.cdiv(seqlen_k, TILE_N)
    unmasked = seqlen_k // TILE_N  # the lowest key tiles, in which every row sees every key
    if CAUSAL:
        offset = seqlen_k - seqlen_q  # bottom-right: the last query is aligned with the last key
        visible = tl.minimum(rows + 1 + offset, seqlen_k)
        # max(.., 0) before the division, which truncates towards 0 on the GPU
        blocks = tl.minimum(blocks, tl.cdiv(tl.maximum((m + 1) * TILE_M + offset, 0), TILE_N))
        unmasked = tl.minimum(unmasked, tl.maximum(m * TILE_M + 1 + offset, 0) // TILE_N)
    else:
        visible = tl.zeros([TILE_M], tl.int32) + seqlen_k

    acc_O = tl.zeros([TILE_M, PADDED_V], tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    acc_O, row_max, row_sum = attend(
        acc_O, row_max, row_sum, q, K, V, k_row, v_row, 0, unmasked, visible, seqlen_k, scale_log2,
        TILE_N, HEAD_DIM, HEAD_DIM_V, PADDED_D, PADDED_V, False, WIDEN, PRECISION,
    )  # fmt: skip
    K += unmasked.to(tl.int64) * TILE_N * k_row
    V += unmasked.to(tl.int64) * TILE_N * v_row
    acc_O, row_max, row_sum = attend(
        acc_O, row_max, row_sum, q, K, V, k_row, v_row, unmasked, blocks, visible, seqlen_k, scale_log2,
        TILE_N, HEAD_DIM, HEAD_DIM_V, PADDED_D, PADDED_V, True, WIDEN, PRECISION,
    )  # fmt: skip

    empty = row_max == float("-inf")
    divisor = tl.where(empty, 1.0, row_sum)  # the only division, once per row
    lse = tl.where(empty, float("-inf"), row_max * (scale_log2 * LN_2) + tl.log(divisor))
    tl.store(LSE + (batch * heads + head) * seqlen_q + rows, lse, mask=rows < seqlen_q)
    O += batch * o_batch + head * o_head + first_row * o_row
    out = (acc_O * (1.0 / divisor)[:, None]).to(O.dtype.element_ty)
    tl.store(O + r[:, None] * o_row + e, out, mask=exists & (e < HEAD_DIM_V))


def launch_options(
    head_dim: int, head_dim_v: int, dtype: torch.dtype, causal: bool, shared_memory: int = HOPPER_SHARED_MEMORY
) -> dict:
    """Compile-time constants, warps and stages of the kernel for these tensors, within so many bytes of shared memory."""
    padded_d, padded_v = (max(16, triton.next_power_of_2(x)) for x in (head_dim, head_dim_v))
    tile_m, tile_n, warps, stages = TILES[dtype.itemsize][max(padded_d, padded_v)]
    # Q and `stages` tiles of K and V must fit; other cards than Hopper have less than half of its shared memory
    while (tile_m * padded_d + stages * tile_n * (padded_d + padded_v)) * dtype.itemsize > shared_memory:
        if stages > 2:
            stages -= 1
        elif tile_n > 16:
            tile_n //= 2
        elif tile_m > 16:
            tile_m, warps = tile_m // 2, max(4, warps // 2)
        else:
            stages -= 1
    return dict(
        CAUSAL=causal,
        TILE_M=tile_m,
        TILE_N=tile_n,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        PADDED_D=padded_d,
        PADDED_V=padded_v,
        # the interpreter multiplies bf16 operands of tl.dot as if their bits were integers (seen in 3.6 to 3.9)
        WIDEN=INTERPRETED and dtype == torch.bfloat16,
        PRECISION="tf32x3" if dtype == torch.float32 else "tf32",  # tf32 alone would keep 10 bits; 16 bit ignores it
        num_warps=warps,
        num_stages=stages,
    )


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * Q K^T) V in one kernel.

    Args:
        q: `(batch, seqlen_q, heads, head_dim)` fp16, bf16 or fp32, any strides; head_dim at most 256.
        k: `(batch, seqlen_k, kv_heads, head_dim)`; query head i reads KV head `i // (heads // kv_heads)`.
        v: `(batch, seqlen_k, kv_heads, head_dim_v)`; head_dim_v at most 256.
        softmax_scale: factor on the scores, any finite number; `head_dim ** -0.5` when None.
        causal: query i sees keys `j <= i + seqlen_k - seqlen_q` (bottom-right aligned).

    Returns:
        out `(batch, seqlen_q, heads, head_dim_v)` in q's dtype, exactly 0 in rows that see no key;
        lse `(batch, heads, seqlen_q)` fp32, natural log with the scale included, -inf in such rows.

    Raises:
        TypeError, ValueError: naming the argument that the kernel cannot take.
        NotImplementedError: when a gradient is asked for.
    """
    scale = check_inputs(q, k, v, softmax_scale)
    (batch, seqlen_q, heads, head_dim), (_, seqlen_k, kv_heads, head_dim_v) = q.shape, v.shape
    if scale <= 0:  # row_max is a maximum of raw scores: the sign must sit in Q, the factor must be positive
        q, scale = q * math.copysign(1.0, scale) if scale else q * 0, abs(scale) or 1.0
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))

    out = q.new_empty(batch, seqlen_q, heads, head_dim_v)
    lse = q.new_empty(batch, heads, seqlen_q, dtype=torch.float32)
    if lse.numel() == 0 or seqlen_k == 0:  # nothing to launch
        return out.zero_(), lse.fill_(-math.inf)
    available = HOPPER_SHARED_MEMORY
    if q.is_cuda:
        available = torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin
    options = launch_options(head_dim, head_dim_v, q.dtype, causal, available)
    grid = (triton.cdiv(seqlen_q, options["TILE_M"]) * batch * heads,)
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        forward_kernel[grid](
            q, k, v, out, lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            seqlen_q, seqlen_k, heads, heads // kv_heads, scale * LOG2_E, **options,
        )  # fmt: skip
    return out, lse


def check_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None) -> float:
    """Refuses, by name, what the kernel cannot take. Returns the scale."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in (torch.float16, torch.bfloat16, torch.float32) or x.dtype != q.dtype:
            raise TypeError(f"{name} must be fp16, bf16 or fp32 like q ({q.dtype}), got {x.dtype}")
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, seqlen, heads, head_dim), got shape {tuple(x.shape)}")
        if not 1 <= x.shape[3] <= 256:
            raise ValueError(f"{name}: head_dim must be 1..256, got {x.shape[3]}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}: they must share one device")
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name}.requires_grad: rung 2 has no backward pass; call it under torch.no_grad()"
            )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads: not a multiple of the {k.shape[2]} KV heads")
    if not (q.is_cuda or INTERPRETED):
        raise ValueError("q is on the CPU: move it to the GPU, or set TRITON_INTERPRET=1 before Python starts")
    scale = q.shape[3] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if not math.isfinite(scale):
        raise ValueError(f"softmax_scale must be finite, got {softmax_scale}")
    return scale
