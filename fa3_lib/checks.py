"""Which arguments `flash_attn_func` accepts: each check raises with the argument's name, its value and what is accepted."""

import torch

from fa3_lib.config import HEAD_DIMS, ceil_div
from fa3_lib.fp8_config import SCALE_BLOCK

DTYPES = (torch.float16, torch.bfloat16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MAX_HEAD_DIM = HEAD_DIMS[-1]
TMA_ALIGNMENT = 16  # bytes; base addresses and all strides but the last must be multiples of it


def refuse_missing(qv, attention_chunk: int, num_splits: int) -> None:
    if qv is not None:
        raise NotImplementedError("qv is not supported yet; pass None")
    if attention_chunk:
        raise NotImplementedError(
            f"attention_chunk={attention_chunk} is not supported yet; pass 0 (window_size limits the keys of a query, too)"
        )
    raise NotImplementedError(f"num_splits={num_splits} is not supported yet; pass 1 or 0")


def window_sides(window_size: tuple[int | None, int | None]) -> tuple[int, int]:
    """(left, right) as integers of at least -1; raises ValueError if they are not."""
    sides = tuple(-1 if side is None else side for side in window_size)
    if len(sides) != 2 or not all(isinstance(side, int) and side >= -1 for side in sides):
        raise ValueError(
            f"window_size={tuple(window_size)}; two sides of -1 (or None, unlimited), 0, 1 ... are accepted"
        )
    return sides


def check_sinks(shape, dtype: torch.dtype, sinks_device: torch.device, heads: int, device: torch.device) -> None:
    """Raises TypeError or ValueError if sinks of this shape, dtype and device do not fit `heads` query heads on `device`."""
    if tuple(shape) != (heads,):
        raise ValueError(f"sinks has shape {tuple(shape)}; one per query head, ({heads},), is accepted")
    if not dtype.is_floating_point:
        raise TypeError(f"sinks is {dtype}; a float dtype is accepted")
    if sinks_device != device:
        raise ValueError(f"sinks is on {sinks_device}, q on {device}; one device is accepted")


def check_sm_margin(sm_margin: int, sms: int) -> None:
    """Raises ValueError unless a device of `sms` SMs (0: a CPU) keeps one."""
    if not isinstance(sm_margin, int) or sm_margin < 0 or (sms and sm_margin >= sms):
        accepted = f"0 to {sms - 1}" if sms else "0, 1, 2 ..."
        raise ValueError(f"sm_margin={sm_margin}; {accepted} is accepted")


def check_descales(q: torch.Tensor, k: torch.Tensor, **descales: torch.Tensor | None) -> None:
    """Raises TypeError or ValueError unless the descales that are given are fp32 beside float8 tensors and of one kind: all
    `(batch, kv_heads)`, or all three given, `(batch, heads, blocks)` of q, k and v (which has k's heads)."""
    by_block = any(isinstance(x, torch.Tensor) and x.dim() == 3 for x in descales.values())
    for name, x in descales.items():
        if by_block and x is None:
            raise ValueError(
                f"{name} is None beside descales of blocks; all three or none have a factor for each block"
            )
        if x is None:
            continue
        if q.dtype not in FP8_DTYPES:
            raise ValueError(f"{name} is given and q is {q.dtype}; descales belong to float8 tensors: pass None")
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor is accepted")
        if x.dtype != torch.float32:
            raise TypeError(f"{name} is {x.dtype}; torch.float32 is accepted")
        kind, accepted = "(batch, kv_heads)", (k.shape[0], k.shape[2])
        if by_block:
            rows = q if name == "q_descale" else k
            kind = f"(batch, heads, blocks of {SCALE_BLOCK} rows)"
            accepted = (k.shape[0], rows.shape[2], ceil_div(rows.shape[1], SCALE_BLOCK))
        if tuple(x.shape) != accepted:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; {kind} = {accepted} is accepted")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}; one device is accepted")


def check_tensors(
    q_shape, q_stride, q_dtype, q_device, k_shape, k_stride, k_dtype, k_device, v_shape, v_stride, v_dtype, v_device
) -> None:
    """Raises TypeError or ValueError if q, k, v of these shapes, strides, dtypes and devices are not accepted."""
    for name, shape in (("q", q_shape), ("k", k_shape), ("v", v_shape)):
        if len(shape) != 4:
            raise ValueError(f"{name} has shape {tuple(shape)}; (batch, seqlen, heads, head_dim) is accepted")
    if q_dtype not in DTYPES or not (q_dtype == k_dtype == v_dtype):
        _refuse_dtypes(q_dtype, k_dtype, v_dtype)
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


def _refuse_dtypes(*dtypes: torch.dtype) -> None:
    raise TypeError(f"q, k, v are {', '.join(map(str, dtypes))}; all torch.float16 or all torch.bfloat16 is accepted")


def refuse_types(**tensors) -> None:
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor is accepted")


def refuse_grad(**tensors) -> None:
    names = ", ".join(name for name, x in tensors.items() if x is not None and x.requires_grad)
    raise NotImplementedError(
        f"{names} requires grad, and there is no backward pass yet: call under torch.no_grad() or detach"
    )


def refuse_misaligned(**tensors) -> None:
    for name, x in tensors.items():
        if rest := x.data_ptr() % TMA_ALIGNMENT:
            raise ValueError(
                f"{name} starts {rest} bytes past a multiple of {TMA_ALIGNMENT}; storage aligned to {TMA_ALIGNMENT} bytes "
                f"is accepted: call {name}.clone()"
            )


def tma_strides(name: str, shape, stride) -> tuple[int, ...] | None:
    """Strides for TMA if they are not the tensor's own: a dim of size 1 never uses its stride, so any value is right."""
    usable = tuple(8 if size == 1 and i < 3 else s for i, (size, s) in enumerate(zip(shape, stride, strict=True)))
    if any(s % 8 for s in usable[:3]):
        raise ValueError(
            f"{name} has strides {stride}; multiples of 8 elements (16 bytes) are accepted, except the last: "
            f"call {name}.contiguous()"
        )
    return usable if any(s % 8 for s in stride[:3]) else None


def hopper_sms(device: torch.device) -> int:
    """Number of SMs; raises RuntimeError if the device is not a Hopper."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability != (9, 0):
        name = torch.cuda.get_device_name(device) if capability else device.type
        raise RuntimeError(
            f"fa3_lib runs on Hopper (compute capability 9.0: H100, H200), {device} is {name} {capability or ''}; "
            "use torch.nn.functional.scaled_dot_product_attention there"
        )
    return torch.cuda.get_device_properties(device).multi_processor_count
