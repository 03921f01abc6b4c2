"""FP8 attention behind `flash_attn_func`, which checks its arguments but for q, k and v: plan and launch; on CPU tensors the
kernel's roundings in PyTorch."""

import functools

import torch

from fa3_lib import checks, interface, tiled
from fa3_lib.compiler import forward_kernel
from fa3_lib.config import ceil_div
from fa3_lib.fp8_config import KEY_GROUP, SCALE_BLOCK, few_queries, fp8_config
from fa3_lib.quantize import dequantize, transpose_v

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
P_DTYPE = torch.float8_e4m3fn
OUT_DTYPES = (torch.bfloat16, torch.float16)  # the first is what a call gets that asks for none


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool = False,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    two_level: bool = True,
    out_dtype: torch.dtype | None = None,
    with_lse: bool = True,
    transposed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """softmax(softmax_scale * Q K^T) V for 8-bit tensors: the numbers that they hold times their descales.

    Args:
        q: `(batch, seqlen_q, heads, head_dim)` torch.float8_e4m3fn or torch.float8_e5m2, as k and v, each with a format of its own;
            the last dim contiguous, head_dim a multiple of 16 up to 256.
        k: `(batch, seqlen_k, kv_heads, head_dim)`, likewise.
        v: `(batch, seqlen_k, kv_heads, head_dim_v)`, any strides (a kernel of its own transposes it, if there are many queries or
            strides or address are no multiples of 16 bytes), or what `fa3_lib.quantize.transpose_v` makes of it, with
            `transposed`, which saves its time where one V serves several calls.
        softmax_scale, causal, softcap, sinks, pack_gqa, sm_margin: as `flash_attn_func` takes them.
        left, right: the window's sides, -1 for unlimited.
        q_descale, k_descale, v_descale: `(batch, kv_heads)` fp32, any strides, at least 0: what the numbers of a batch entry and KV
            head (for q: of the query heads that read it) are multiplied by; 1 when None. Where q's times k's is negative, the
            kernel's answer is NaN, unless there is a softcap. Or, all three, `(batch, heads, ceil(seqlen / 128))`: a factor for
            each 128 rows of a head, as `quantize` makes them with granularity="block"; with two_level only.
        two_level: adds P V of each key block to the output in fp32. Without it sums stay in the tensor core's accumulator of
            about 13 bits: a little faster, for contexts of a few thousand keys; over longer ones they stop growing. A CPU adds in
            fp32 whatever this says.
        out_dtype: torch.bfloat16 (None) or torch.float16.
        with_lse: whether the log-sum-exp is wanted. On a GPU without it and with two levels every third weight of an unmasked
            block is exact to 3 % only (e4m3 rounds all by 6 %), which is faster; the bits of out then differ from those with it.

    Returns:
        out `(batch, seqlen_q, heads, head_dim_v)` and lse `(batch, heads, seqlen_q)` fp32, as `flash_attn_func`'s; lse is
        None on a GPU if it is not wanted.

    Raises:
        TypeError, ValueError, ImportError, RuntimeError: as `flash_attn_func`.
    """
    facts = interface._facts
    block_scales = q_descale is not None and q_descale.dim() == 3
    plan = _plan(
        *facts(q), *facts(k), *facts(v), causal, left, right, softcap > 0.0, None if sinks is None else facts(sinks),
        pack_gqa, sm_margin, two_level, out_dtype, block_scales, transposed, v.data_ptr() % checks.TMA_ALIGNMENT == 0,
    )  # fmt: skip
    config, device = plan.config, q.device
    if plan.convert_sinks:
        sinks = sinks.new_empty(sinks.shape, dtype=torch.float32).copy_(sinks)
    window = plan.window_left, plan.window_right
    if not plan.ctas:
        v = untransposed(v, k.shape[1]) if transposed else v
        descales = (q_descale, k_descale, v_descale)
        q, k, v = (dequantised(x, descale) for x, descale in zip((q, k, v), descales, strict=True))
        return tiled.attention(
            q, k, v, softmax_scale, config, softcap, sinks, *window, P_DTYPE, plan.out_dtype, config.offset, two_level
        )

    out, lse = interface.outputs(plan, device, sinks, with_lse)
    if plan.empty:
        return out, lse
    vt = v if transposed or config.transposes_v else transpose_v(v)
    if (q.data_ptr() | k.data_ptr() | vt.data_ptr()) % checks.TMA_ALIGNMENT:
        checks.refuse_misaligned(q=q, k=k, v=vt)
    if plan.strides != (None, None, None):
        q, k, vt = (x if s is None else x.as_strided(x.shape, s) for x, s in zip((q, k, vt), plan.strides, strict=True))
    q, k, vt = (x.view(torch.uint8) for x in (q, k, vt))
    descales = [ones(k.shape[0], k.shape[2], device) if x is None else x for x in (q_descale, k_descale, v_descale)]
    kernel = forward_kernel(config, plan.out_dtype, with_lse)
    scalars = (softmax_scale, softcap, *window, plan.ctas)
    interface.launch(kernel, config, device, (q, k, vt, out, lse, sinks), (*descales, *scalars))
    return out, lse


# what torch.compile (and fake or wrapped tensors) come through
@torch.library.custom_op("fa3_lib::flash_attn_fp8_fwd", mutates_args=())
def _operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    sinks: torch.Tensor | None,
    pack_gqa: bool | None,
    sm_margin: int,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    two_level: bool,
    out_dtype: torch.dtype | None,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = forward(
        q, k, v, softmax_scale, causal, left, right, softcap, sinks, pack_gqa, sm_margin,
        q_descale, k_descale, v_descale, two_level, out_dtype, with_lse,
    )  # fmt: skip
    return out, lse if with_lse else out.new_empty(0, dtype=torch.float32)  # an operator's results are tensors


@_operator.register_fake
def _operator_fake(q, k, v, *arguments):
    batch, seqlen_q, heads, _ = q.shape
    *_, out_dtype, with_lse = arguments
    out = q.new_empty((batch, seqlen_q, heads, v.shape[-1]), dtype=out_dtype or OUT_DTYPES[0])
    return out, q.new_empty((batch, heads, seqlen_q) if with_lse else 0, dtype=torch.float32)


# Checking costs more host time than the launch, so each combination is checked once.
@functools.lru_cache(maxsize=4096)
def _plan(*key) -> interface.Plan:
    (
        *tensors,
        causal,
        left,
        right,
        softcap,
        sinks,
        pack_gqa,
        sm_margin,
        two_level,
        out_dtype,
        block_scales,
        transposed,
        v_aligned,
    ) = key
    check_tensors(*tensors, transposed)
    q_shape, q_stride, q_dtype, _, k_shape, k_stride, k_dtype, _, v_shape, v_stride, v_dtype, _ = tensors
    if out_dtype not in (None, *OUT_DTYPES):
        raise TypeError(
            f"out_dtype is {out_dtype}; for float8 tensors one of {', '.join(map(str, OUT_DTYPES))} is accepted"
        )
    if block_scales and not two_level:
        raise ValueError("two_level=False is given with descales of blocks, which join the sums there: pass True")
    if block_scales and pack_gqa:
        raise ValueError(
            "pack_gqa=True is given with descales of blocks: packed heads have different ones; pass None or False"
        )
    _, seqlen_q, heads, head_dim = q_shape
    head_dim_v = v_shape[2] if transposed else v_shape[3]
    queries = seqlen_q * (heads // k_shape[2])  # of one KV head
    turnable = not transposed and v_aligned and tma_reads(v_shape, v_stride)
    formats = tuple(FORMATS[dtype] for dtype in (q_dtype, k_dtype, v_dtype))

    def choose(causal, window, pack_gqa=1):
        return fp8_config(
            head_dim, head_dim_v, causal, seqlen_q,
            two_level=two_level, window=window, softcap=softcap, sinks=sinks is not None, pack_gqa=pack_gqa,
            block_scales=block_scales, formats=formats,
            transposes_v=turnable and few_queries(head_dim, head_dim_v, queries, causal),
        )  # fmt: skip

    def strides(config):
        q_and_k = (tma_strides(*layout) for layout in (("q", q_shape, q_stride), ("k", k_shape, k_stride)))
        return *q_and_k, tma_strides("v", v_shape, v_stride) if config.transposes_v else None

    return interface.make_plan(
        tensors, head_dim_v, causal, left, right, sinks, False if block_scales else pack_gqa, sm_margin,
        out_dtype or OUT_DTYPES[0], choose, strides,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def ones(batch: int, kv_heads: int, device: torch.device) -> torch.Tensor:
    """Descales of 1, one number in memory."""
    return torch.ones(1, 1, device=device).expand(batch, kv_heads)


# --- on a CPU --------------------------------------------------------------------------------------------------------


def dequantised(x: torch.Tensor, descale: torch.Tensor | None) -> torch.Tensor:
    """What x `(b, s, heads, d)` stands for, in fp32; descale `(b, kv_heads)`, `(b, heads, blocks)` or None."""
    if descale is None:
        return x.float()
    return dequantize(x, descale, SCALE_BLOCK if descale.dim() == 3 else None)


def untransposed(vt: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    """The V `(b, sk, hk, dv)` that `transpose_v` made vt from, on a CPU."""
    b, hk, dv, padded = vt.shape
    keys = vt.view(torch.uint8).view(b, hk, dv, padded // KEY_GROUP, 2, 4, 2, 2)  # half, quad, j, e
    keys = keys.permute(0, 3, 4, 6, 5, 7, 1, 2)  # ..., half, j, quad, e
    return keys.reshape(b, padded, hk, dv)[:, :seqlen_k].view(vt.dtype)


# --- checks ----------------------------------------------------------------------------------------------------------


def check_tensors(
    q_shape, q_stride, q_dtype, q_device, k_shape, k_stride, k_dtype, k_device, v_shape, v_stride, v_dtype, v_device,
    transposed,
) -> None:  # fmt: skip
    """Raises TypeError or ValueError if q, k, v of these shapes, strides, dtypes and devices are not accepted."""
    for name, shape in (("q", q_shape), ("k", k_shape), ("v", v_shape)):
        if len(shape) != 4:
            raise ValueError(f"{name} has shape {tuple(shape)}; (batch, seqlen, heads, head_dim) is accepted")
    if not {q_dtype, k_dtype, v_dtype} <= set(FORMATS):
        accepted = " or ".join(map(str, FORMATS))
        raise TypeError(f"q, k, v are {q_dtype}, {k_dtype}, {v_dtype}; beside one of 8 bits, {accepted} is accepted")
    if not (q_device == k_device == v_device):
        raise ValueError(f"q, k, v are on {q_device}, {k_device}, {v_device}; one device is accepted")

    batch, _, heads, head_dim = q_shape
    _, seqlen_k, kv_heads, _ = k_shape
    head_dim_v = v_shape[2] if transposed else v_shape[3]
    fitting_v = (batch, seqlen_k, kv_heads, head_dim_v)
    if transposed:
        fitting_v = (batch, kv_heads, head_dim_v, ceil_div(seqlen_k, KEY_GROUP) * KEY_GROUP)
    if tuple(k_shape) != (batch, seqlen_k, kv_heads, head_dim) or tuple(v_shape) != fitting_v:
        raise ValueError(
            f"q {tuple(q_shape)}, k {tuple(k_shape)}, v {tuple(v_shape)} do not fit together; accepted are q (b, sq, h, d), "
            f"k (b, sk, hk, d), v {'(b, hk, dv, sk in whole groups of 32)' if transposed else '(b, sk, hk, dv)'}"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads, k and v have {kv_heads}; accepted is a multiple of the KV heads")
    for name, dim in (("q and k", head_dim), ("v", head_dim_v)):
        if dim % 16 or not 0 < dim <= checks.MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim of {name} is {dim}; of 8 bits, a multiple of 16 from 16 to {checks.MAX_HEAD_DIM} is accepted"
            )
    for name, stride in (("q", q_stride), ("k", k_stride)):
        if stride[3] != 1:
            raise ValueError(
                f"{name} has strides {stride}; the last must be 1 (head_dim contiguous): call {name}.contiguous()"
            )
    if transposed and tuple(v_stride) != tuple(torch.empty(v_shape, device="meta").stride()):
        raise ValueError(f"v has strides {v_stride}; a transposed v must be contiguous, as transpose_v makes it")


def tma_strides(name: str, shape, stride) -> tuple[int, ...] | None:
    """Strides for TMA if they are not the tensor's own: a dim of size 1 never uses its stride, so any value is right."""
    usable = tuple(16 if size == 1 and i < 3 else s for i, (size, s) in enumerate(zip(shape, stride, strict=True)))
    if any(s % 16 for s in usable[:3]):
        raise ValueError(
            f"{name} has strides {stride}; multiples of 16 bytes are accepted, except the last: call {name}.contiguous()"
        )
    return usable if usable != tuple(stride) else None


def tma_reads(shape, stride) -> bool:
    """Whether TMA can read such a tensor where it lies."""
    return stride[3] == 1 and all(
        size == 1 or (s > 0 and s % 16 == 0) for size, s in zip(shape[:3], stride, strict=False)
    )
