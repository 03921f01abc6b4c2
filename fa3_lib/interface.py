"""`flash_attn_func`: FlashAttention-3's Python signature, checked arguments, and the way to the kernel."""

import functools
import math

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
    _check_tensors(q, k, v)
    if window_size != (-1, -1):
        causal = _causal_from_window(window_size, causal, q.shape[1], k.shape[1])
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    elif not 0.0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale is {softmax_scale}; a positive finite number is accepted")

    if torch.compiler.is_compiling() or not (type(q) is type(k) is type(v) is torch.Tensor):
        out, lse = torch.ops.fa3_lib.flash_attn_fwd(q, k, v, float(softmax_scale), bool(causal))
    else:
        out, lse = _forward(q, k, v, float(softmax_scale), bool(causal))
    return (out, lse) if return_attn_probs else out


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of checked arguments."""
    batch, seqlen_q, heads, head_dim = q.shape
    head_dim_v = v.shape[-1]
    config = _forward_config(head_dim, head_dim_v, causal)
    device = q.device
    if device.type == "cpu":
        return tiled.attention(q, k, v, softmax_scale, config)

    _require_hopper(device.index)
    q, k, v = _tma_readable("q", q), _tma_readable("k", k), _tma_readable("v", v)
    out = torch.empty((batch, seqlen_q, heads, head_dim_v), dtype=q.dtype, device=device)
    lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=device)
    if out.numel() == 0 or k.shape[1] == 0:  # nothing to compute, and TMA knows no empty tensors
        return out.zero_(), lse.fill_(-math.inf)
    kernel = forward_kernel(config, q.dtype)
    if device.index == torch.cuda.current_device():
        kernel(q, k, v, out, lse, softmax_scale)
    else:
        with torch.cuda.device(device):
            kernel(q, k, v, out, lse, softmax_scale)
    return out, lse


_forward_config = functools.cache(forward_config)


# PyTorch's dispatcher costs more host time than the launch itself, so eager calls go to _forward directly and only
# torch.compile (and fake or wrapped tensors) come through the operator.
_operator = torch.library.custom_op("fa3_lib::flash_attn_fwd", _forward, mutates_args=())


@_operator.register_fake
def _forward_fake(q, k, v, softmax_scale, causal):
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
    if causal:
        right = 0 if right < 0 else min(right, 0)
    unlimited_left = left < 0 or left >= seqlen_k - 1
    unlimited_right = right < 0 or right >= seqlen_q - 1 and right != 0
    if not unlimited_left or not (unlimited_right or right == 0):
        raise NotImplementedError(
            f"window_size={tuple(window_size)} is not supported yet; pass (-1, -1), or (-1, 0) for the causal mask"
        )
    return not unlimited_right


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor is accepted")
    if not (q.dim() == k.dim() == v.dim() == 4):
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 4:
                raise ValueError(f"{name} has shape {tuple(x.shape)}; (batch, seqlen, heads, head_dim) is accepted")
    if q.dtype not in DTYPES or not (q.dtype == k.dtype == v.dtype):
        raise TypeError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; all torch.float16 or all torch.bfloat16 is accepted")
    if not (q.device == k.device == v.device):
        raise ValueError(f"q, k, v are on {q.device}, {k.device}, {v.device}; one device is accepted")

    batch, seqlen_q, heads, head_dim = q.shape
    _, seqlen_k, kv_heads, head_dim_v = v.shape
    if k.shape != (batch, seqlen_k, kv_heads, head_dim) or v.shape[0] != batch:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit together; accepted are q (b, sq, h, d), "
            "k (b, sk, hk, d), v (b, sk, hk, dv)"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads, k and v have {kv_heads}; accepted is a multiple of the KV heads")
    for name, dim in (("q and k", head_dim), ("v", head_dim_v)):
        if dim % 8 or not 0 < dim <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim of {name} is {dim}; a multiple of 8 from 8 to {MAX_HEAD_DIM} is accepted")
    if not (q.stride(3) == k.stride(3) == v.stride(3) == 1):
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.stride(3) != 1:
                raise ValueError(
                    f"{name} has strides {x.stride()}; the last must be 1 (head_dim contiguous): call {name}.contiguous()"
                )
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        names = [name for name, x in (("q", q), ("k", k), ("v", v)) if x.requires_grad]
        raise NotImplementedError(
            f"{', '.join(names)} requires grad, and there is no backward pass yet: call under torch.no_grad() or detach"
        )


def _tma_readable(name: str, x: torch.Tensor) -> torch.Tensor:
    """`x` if TMA can read it where it lies (a copy of expanded tensors); raises ValueError if it is misaligned."""
    stride = x.stride()
    if x.data_ptr() % TMA_ALIGNMENT:
        raise ValueError(
            f"{name} starts at an address that is {x.data_ptr() % TMA_ALIGNMENT} bytes past a multiple of {TMA_ALIGNMENT}; "
            f"16-byte aligned storage is accepted: call {name}.clone()"
        )
    if (stride[0] | stride[1] | stride[2]) & 7:
        # the stride of a dim of size 1 is never used, so any value is right there
        stride = tuple(8 if size == 1 and i < 3 else s for i, (size, s) in enumerate(zip(x.shape, stride, strict=True)))
        if (stride[0] | stride[1] | stride[2]) & 7:
            raise ValueError(
                f"{name} has strides {x.stride()}; multiples of 8 elements (16 bytes) are accepted, except the last: "
                f"call {name}.contiguous()"
            )
        x = x.as_strided(x.shape, stride)
    return x


@functools.cache
def _require_hopper(device_index: int) -> None:
    major, minor = torch.cuda.get_device_capability(device_index)
    if (major, minor) != (9, 0):
        raise RuntimeError(
            f"fa3_lib runs on Hopper (compute capability 9.0: H100, H200); cuda:{device_index} is "
            f"{torch.cuda.get_device_name(device_index)} ({major}.{minor}). Use "
            "torch.nn.functional.scaled_dot_product_attention there"
        )
