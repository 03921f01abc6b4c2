"""`flash_attn_func`: FlashAttention-3's Python signature, checked arguments, and the way to the kernel."""

import functools
import math
from typing import NamedTuple

import torch

from fa3_lib import tiled
from fa3_lib.compiler import forward_kernel
from fa3_lib.config import HEAD_DIMS, ForwardConfig, forward_config

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = HEAD_DIMS[-1]
TMA_ALIGNMENT = 16  # bytes; base addresses and all strides but the last must be multiples of it


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale * Q K^T) V, forward only.

    On an H100 or H200 this is one warp-specialised kernel; on CPU tensors the same algorithm in PyTorch, to learn and
    test with. Argument names, order, layouts and return values are those of FlashAttention-3's `flash_attn_func`.

    Args:
        q: `(batch, seqlen_q, heads, head_dim)`, fp16 or bf16; the last dim contiguous, head_dim a multiple of 8 up to 256.
        k: `(batch, seqlen_k, kv_heads, head_dim)`; heads is a multiple of kv_heads (MHA, GQA, MQA).
        v: `(batch, seqlen_k, kv_heads, head_dim_v)`; head_dim_v a multiple of 8 up to 256.
        softmax_scale: positive factor on the scores; `head_dim ** -0.5` when None.
        causal: query i sees the keys `j <= i + seqlen_k - seqlen_q` (the last query is aligned with the last key).
        window_size: unlimited `(-1, -1)`, or `(-1, 0)`, which is `causal=True`; None means -1.
        num_splits: 1, or 0 to let the library choose (it chooses 1).
        pack_gqa: None or False.
        deterministic: the forward pass gives the same bits in every run whatever this says.
        return_attn_probs: also return the log-sum-exp (the name is FlashAttention's).

    Returns:
        out `(batch, seqlen_q, heads, head_dim_v)` in q's dtype, exactly 0 in rows that see no key. With `return_attn_probs`,
        `(out, lse)`; lse `(batch, heads, seqlen_q)` fp32, natural log, scale included, -inf in such rows.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, its value and what is accepted.
        NotImplementedError: an argument of FlashAttention-3 that this version does not have yet, by name.
        RuntimeError: a CUDA device that is not a Hopper.
    """
    if qv is not None or q_descale is not None or k_descale is not None or v_descale is not None:
        _refuse_given(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    if attention_chunk or softcap or num_splits > 1 or num_splits < 0 or pack_gqa or sm_margin:
        _refuse_value(
            attention_chunk=(attention_chunk, 0),
            softcap=(softcap, 0.0),
            num_splits=(num_splits, 1),
            pack_gqa=(bool(pack_gqa), False),
            sm_margin=(sm_margin, 0),
        )
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        _refuse_types(q=q, k=k, v=v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        _refuse_grad(q=q, k=k, v=v)
    if window_size != (-1, -1):
        causal = _causal_from_window(window_size, causal, q.shape[1], k.shape[1])
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    elif not 0.0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale is {softmax_scale}; a positive finite number is accepted")

    if torch.compiler.is_compiling() or not (type(q) is type(k) is type(v) is torch.Tensor):
        check_tensors(*_facts(q), *_facts(k), *_facts(v))
        out, lse = torch.ops.fa3_lib.flash_attn_fwd(q, k, v, float(softmax_scale), bool(causal))
    else:
        out, lse = _forward(q, k, v, float(softmax_scale), bool(causal), return_attn_probs)
    return (out, lse) if return_attn_probs else out


class _Plan(NamedTuple):
    """What a call needs and what depends on shapes, strides, dtypes and devices alone."""

    config: ForwardConfig
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    empty: bool  # nothing to compute
    ctas: int  # SMs of the device; 0 on a CPU
    strides: tuple[tuple[int, ...] | None, ...]  # of q, k, v, where TMA needs other strides than the tensor's


# Checking costs more host time than the launch, so each combination is checked once.
@functools.lru_cache(maxsize=4096)
def _plan(*facts_and_causal) -> _Plan:
    *facts, causal = facts_and_causal
    check_tensors(*facts)
    q_shape, q_stride, _, device, k_shape, k_stride, _, _, v_shape, v_stride, _, _ = facts
    batch, seqlen_q, heads, head_dim = q_shape
    config = forward_config(head_dim, v_shape[-1], causal, seqlen_q)
    out_shape = (batch, seqlen_q, heads, v_shape[-1])
    empty = 0 in out_shape or k_shape[1] == 0
    ctas, strides = 0, (None, None, None)
    if device.type != "cpu":
        ctas = _hopper_sms(device)
        layouts = (("q", q_shape, q_stride), ("k", k_shape, k_stride), ("v", v_shape, v_stride))
        strides = tuple(_tma_strides(*layout) for layout in layouts)
    return _Plan(config, out_shape, (batch, heads, seqlen_q), empty, ctas, strides)


def _facts(x: torch.Tensor) -> tuple:
    return x.shape, x.stride(), x.dtype, x.device


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool, with_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse); lse is None on a GPU if it is not wanted."""
    plan = _plan(*_facts(q), *_facts(k), *_facts(v), causal)
    device = q.device
    if not plan.ctas:
        return tiled.attention(q, k, v, softmax_scale, plan.config)

    out = torch.empty(plan.out_shape, dtype=q.dtype, device=device)
    lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=device) if with_lse else None
    if plan.empty:  # TMA knows no empty tensors
        return out.zero_(), lse.fill_(-math.inf) if with_lse else None
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_ALIGNMENT:
        _refuse_misaligned(q=q, k=k, v=v)
    if plan.strides != (None, None, None):
        q, k, v = (x if s is None else x.as_strided(x.shape, s) for x, s in zip((q, k, v), plan.strides, strict=True))
    kernel = forward_kernel(plan.config, q.dtype, with_lse)
    if device.index == torch.cuda.current_device():
        kernel(q, k, v, out, lse, softmax_scale, plan.ctas)
    else:
        with torch.cuda.device(device):
            kernel(q, k, v, out, lse, softmax_scale, plan.ctas)
    return out, lse


# PyTorch's dispatcher costs more host time than the launch itself, so eager calls go to _forward directly and only
# torch.compile (and fake or wrapped tensors) come through the operator.
@torch.library.custom_op("fa3_lib::flash_attn_fwd", mutates_args=())
def _operator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward(q, k, v, softmax_scale, causal)


@_operator.register_fake
def _operator_fake(q, k, v, softmax_scale, causal):
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads, v.shape[-1]))
    return out, q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


# --- checks ----------------------------------------------------------------------------------------------------------


def _refuse_given(**arguments) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not supported yet; pass None")


def _refuse_value(**arguments) -> None:
    for name, (value, accepted) in arguments.items():
        if value != accepted and not (name == "num_splits" and value == 0):
            raise NotImplementedError(f"{name}={value} is not supported yet; pass {accepted}")


def _causal_from_window(window_size, causal: bool, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether the window is the causal mask; unlimited windows are no mask. Any other window is refused."""
    left, right = (-1 if side is None else side for side in window_size)
    if left < -1 or right < -1:
        raise ValueError(f"window_size={tuple(window_size)}; sides of -1 (or None, unlimited), 0, 1 ... are accepted")
    if causal:
        right = 0 if right < 0 else min(right, 0)
    unlimited_left = left < 0 or left >= seqlen_k - 1
    unlimited_right = right < 0 or (right >= seqlen_q - 1 and right != 0)
    if not unlimited_left or not (unlimited_right or right == 0):
        raise NotImplementedError(
            f"window_size={tuple(window_size)} is not supported yet; pass (-1, -1), or (-1, 0) for the causal mask"
        )
    return not unlimited_right


def check_tensors(
    q_shape, q_stride, q_dtype, q_device, k_shape, k_stride, k_dtype, k_device, v_shape, v_stride, v_dtype, v_device
) -> None:
    """Raises TypeError or ValueError if q, k, v of these shapes, strides, dtypes and devices are not accepted."""
    for name, shape in (("q", q_shape), ("k", k_shape), ("v", v_shape)):
        if len(shape) != 4:
            raise ValueError(f"{name} has shape {tuple(shape)}; (batch, seqlen, heads, head_dim) is accepted")
    if q_dtype not in DTYPES or not (q_dtype == k_dtype == v_dtype):
        raise TypeError(
            f"q, k, v are {q_dtype}, {k_dtype}, {v_dtype}; all torch.float16 or all torch.bfloat16 is accepted"
        )
    if not (q_device == k_device == v_device):
        raise ValueError(f"q, k, v are on {q_device}, {k_device}, {v_device}; one device is accepted")

    batch, _, heads, head_dim = q_shape
    _, seqlen_k, kv_heads, head_dim_v = v_shape
    if tuple(k_shape) != (batch, seqlen_k, kv_heads, head_dim) or v_shape[0] != batch:
        raise ValueError(
            f"q {tuple(q_shape)}, k {tuple(k_shape)}, v {tuple(v_shape)} do not fit together; accepted are q (b, sq, h, d), "
            "k (b, sk, hk, d), v (b, sk, hk, dv)"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads, k and v have {kv_heads}; accepted is a multiple of the KV heads")
    for name, dim in (("q and k", head_dim), ("v", head_dim_v)):
        if dim % 8 or not 0 < dim <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim of {name} is {dim}; a multiple of 8 from 8 to {MAX_HEAD_DIM} is accepted")
    for name, stride in (("q", q_stride), ("k", k_stride), ("v", v_stride)):
        if stride[3] != 1:
            raise ValueError(
                f"{name} has strides {stride}; the last must be 1 (head_dim contiguous): call {name}.contiguous()"
            )


def _refuse_types(**tensors) -> None:
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor is accepted")


def _refuse_grad(**tensors) -> None:
    names = ", ".join(name for name, x in tensors.items() if x.requires_grad)
    raise NotImplementedError(
        f"{names} requires grad, and there is no backward pass yet: call under torch.no_grad() or detach"
    )


def _refuse_misaligned(**tensors) -> None:
    for name, x in tensors.items():
        if rest := x.data_ptr() % TMA_ALIGNMENT:
            raise ValueError(
                f"{name} starts {rest} bytes past a multiple of {TMA_ALIGNMENT}; storage aligned to {TMA_ALIGNMENT} bytes "
                f"is accepted: call {name}.clone()"
            )


def _tma_strides(name: str, shape, stride) -> tuple[int, ...] | None:
    """Strides for TMA if they are not the tensor's own: a dim of size 1 never uses its stride, so any value is right."""
    usable = tuple(8 if size == 1 and i < 3 else s for i, (size, s) in enumerate(zip(shape, stride, strict=True)))
    if any(s % 8 for s in usable[:3]):
        raise ValueError(
            f"{name} has strides {stride}; multiples of 8 elements (16 bytes) are accepted, except the last: "
            f"call {name}.contiguous()"
        )
    return usable if any(s % 8 for s in stride[:3]) else None


def _hopper_sms(device: torch.device) -> int:
    """Number of SMs; raises RuntimeError if the device is not a Hopper."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability != (9, 0):
        name = torch.cuda.get_device_name(device) if capability else device.type
        raise RuntimeError(
            f"fa3_lib runs on Hopper (compute capability 9.0: H100, H200), {device} is {name} {capability or ''}; "
            "use torch.nn.functional.scaled_dot_product_attention there"
        )
    return torch.cuda.get_device_properties(device).multi_processor_count
