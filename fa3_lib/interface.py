"""`flash_attn_func`: FlashAttention-3's Python signature, checked arguments, and the way to the kernel."""

import functools
import itertools
import math
from typing import NamedTuple

import torch

from fa3_lib import tiled
from fa3_lib.compiler import forward_kernel
from fa3_lib.config import HEAD_DIMS, ForwardConfig, ceil_div, forward_config

DTYPES = (torch.float16, torch.bfloat16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MAX_HEAD_DIM = HEAD_DIMS[-1]
MAX_PACK = 64  # rows of a consumer's tile: it then holds one query of 64 heads
TMA_ALIGNMENT = 16  # bytes; base addresses and all strides but the last must be multiples of it
COUNTERS = 4096  # calls with dynamic tiles that may be in flight on a device at once


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
    *,
    sinks: torch.Tensor | None = None,
    two_level: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale * Q K^T) V, forward only.

    On an H100 or H200 this is one warp-specialised kernel; on CPU tensors the same algorithm in PyTorch, to learn and
    test with. Argument names, order, layouts and return values are those of FlashAttention-3's `flash_attn_func`; `sinks` and
    `two_level` are ours.

    Args:
        q: `(batch, seqlen_q, heads, head_dim)`, fp16, bf16 or float8_e4m3fn; the last dim contiguous, head_dim a multiple of 8
            (of 8 bits: 16) up to 256.
        k: `(batch, seqlen_k, kv_heads, head_dim)`; heads is a multiple of kv_heads (MHA, GQA, MQA).
        v: `(batch, seqlen_k, kv_heads, head_dim_v)`; head_dim_v a multiple of 8 (of 8 bits: 16) up to 256. All three of one dtype.
        softmax_scale: positive factor on the scores; `head_dim ** -0.5` when None.
        causal: query i sees the keys `j <= i + seqlen_k - seqlen_q` (the last query is aligned with the last key).
        q_descale, k_descale, v_descale: `(batch, kv_heads)` fp32, any strides, with float8 tensors only: what the numbers of a batch
            entry and KV head (for q: of the query heads that read it) are multiplied by; at least 0; 1 when None.
            `fa3_lib.quantize` makes them.
        window_size: `(left, right)`: query i sees the keys from `i + seqlen_k - seqlen_q - left` to
            `i + seqlen_k - seqlen_q + right`, both included; -1 or None is an unlimited side. `causal` makes right 0.
        softcap: if positive, scores become `softcap * tanh(score / softcap)` before the mask.
        num_splits: 1, or 0 to let the library choose (it chooses 1).
        pack_gqa: whether the query heads of one KV head share query tiles, as many of them as the largest power of two up to 64
            that divides their number (so True changes nothing for 1, 3, 5 ...); None packs where tiles would be badly filled.
            The result is the same but for rounding.
        deterministic: the forward pass gives the same bits in every run whatever this says.
        sm_margin: SMs of the device that the kernel leaves to others. A CPU has none to leave.
        return_attn_probs: also return the log-sum-exp (the name is FlashAttention's).
        sinks: `(heads,)`, any float dtype: per query head one further logit (natural units, not scaled; finite or -inf) that
            belongs to no key: it enlarges the sum that the exponentials are divided by (gpt-oss; `learnable_sink` of
            FlashAttention-4, `s_aux` of vLLM).
        two_level: of float8 tensors alone: sums over keys are kept in fp32. False leaves them in the tensor core's accumulator, as
            FlashAttention-3 does: of about 13 bits, it stops growing over long contexts (V = 1 gives 0.3 at 64k keys).

    Returns:
        out `(batch, seqlen_q, heads, head_dim_v)` in q's dtype (bf16 for float8), exactly 0 in rows that see no key. With
        `return_attn_probs`, `(out, lse)`; lse `(batch, heads, seqlen_q)` fp32, natural log, scale included, -inf in such rows. With sinks the LSE
        includes the sink, and is the sink in such rows.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, its value and what is accepted.
        NotImplementedError: an argument of FlashAttention-3 that this version does not have yet, by name.
        ImportError: CuTe DSL is not installed, and the tensors are on a GPU.
        RuntimeError: a CUDA device that is not a Hopper.
    """
    if qv is not None or attention_chunk or num_splits > 1 or num_splits < 0:
        _refuse_missing(qv, attention_chunk, num_splits)
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        _refuse_types(q=q, k=k, v=v)
    if sinks is not None and not isinstance(sinks, torch.Tensor):
        _refuse_types(sinks=sinks)
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    ):
        _refuse_grad(q=q, k=k, v=v, sinks=sinks)
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    elif not 0.0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale is {softmax_scale}; a positive finite number is accepted")
    if softcap != 0.0 and not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap is {softcap}; 0 (none) or a positive finite number is accepted")
    left, right = (-1, -1) if window_size == (-1, -1) else window_sides(window_size)
    if q_descale is not None or k_descale is not None or v_descale is not None:
        check_descales(q, k, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    arguments = (float(softmax_scale), bool(causal), left, right, float(softcap), sinks, pack_gqa, sm_margin)
    eager = not torch.compiler.is_compiling() and type(q) is type(k) is type(v) is torch.Tensor
    if q.dtype in FP8_DTYPES:
        from fa3_lib import fp8

        arguments += (q_descale, k_descale, v_descale, two_level)
        if eager:
            out, lse = fp8.forward(q, k, v, *arguments, return_attn_probs)
        else:
            out, lse = torch.ops.fa3_lib.flash_attn_fp8_fwd(q, k, v, *arguments)
    elif not two_level:
        raise ValueError(f"two_level=False is given and q is {q.dtype}, whose sums are fp32: pass True")
    elif not eager:
        check_tensors(*_facts(q), *_facts(k), *_facts(v))
        if sinks is not None:
            check_sinks(sinks.shape, sinks.dtype, sinks.device, q.shape[2], q.device)
        out, lse = torch.ops.fa3_lib.flash_attn_fwd(q, k, v, *arguments)
    else:
        out, lse = _forward(q, k, v, *arguments, return_attn_probs)
    return (out, lse) if return_attn_probs else out


class _Plan(NamedTuple):
    """What a call needs and what depends on shapes, strides, dtypes, devices and masks alone."""

    config: ForwardConfig
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    window_left: int  # keys, at least 0
    window_right: int
    empty: bool  # nothing to compute
    ctas: int  # SMs of the device that may be used; 0 on a CPU
    strides: tuple[tuple[int, ...] | None, ...]  # of q, k, v, where TMA needs other strides than the tensor's
    convert_sinks: bool  # they are not contiguous fp32


# Checking costs more host time than the launch, so each combination is checked once.
@functools.lru_cache(maxsize=4096)
def _plan(*key) -> _Plan:
    *facts, causal, left, right, softcap, sinks, pack_gqa, sm_margin = key
    check_tensors(*facts)
    q_shape, q_stride, _, device, k_shape, k_stride, _, _, v_shape, v_stride, _, _ = facts
    batch, seqlen_q, heads, head_dim = q_shape
    seqlen_k, kv_heads = k_shape[1], k_shape[2]
    convert_sinks = False
    if sinks is not None:
        shape, stride, dtype, sinks_device = sinks
        check_sinks(shape, dtype, sinks_device, heads, device)
        convert_sinks = dtype != torch.float32 or stride != (1,)

    left, right = effective_window(left, right, causal, seqlen_q, seqlen_k)
    causal = (left, right) == (-1, 0)
    window = not causal and (left, right) != (-1, -1)
    unlimited = seqlen_q + seqlen_k
    choose = functools.partial(
        forward_config, head_dim, v_shape[-1], causal, seqlen_q, window=window, softcap=softcap, sinks=sinks is not None
    )
    config = choose()
    pack = choose_pack_gqa(pack_gqa, heads // kv_heads, seqlen_q, config.tile_m)
    if pack > 1:
        config = choose(pack_gqa=pack)

    sms, strides = 0, (None, None, None)
    if device.type != "cpu":
        sms = _hopper_sms(device)
        layouts = (("q", q_shape, q_stride), ("k", k_shape, k_stride), ("v", v_shape, v_stride))
        strides = tuple(_tma_strides(*layout) for layout in layouts)
    check_sm_margin(sm_margin, sms)
    out_shape = (batch, seqlen_q, heads, v_shape[-1])
    return _Plan(
        config,
        out_shape,
        lse_shape=(batch, heads, seqlen_q),
        window_left=unlimited if left < 0 else left,
        window_right=unlimited if right < 0 else right,
        empty=0 in out_shape or seqlen_k == 0,
        ctas=sms and sms - sm_margin,
        strides=strides,
        convert_sinks=convert_sinks,
    )


def effective_window(left: int, right: int, causal: bool, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """The window, `causal` included, with -1 for sides that forbid nothing: a mask without effect is not compiled."""
    if causal:
        right = 0
    return -1 if left >= seqlen_k - 1 else left, -1 if right >= seqlen_q - 1 else right


def choose_pack_gqa(pack_gqa: bool | None, group: int, seqlen_q: int, tile_m: int) -> int:
    """Query heads that share a tile: 1, or the largest power of two up to 64 that divides the `group` of one KV head.

    Where the caller leaves the choice, tiles are packed if that fills them better by a tenth (FlashAttention-3's rule).
    """
    pack = max(1, min(group & -group, MAX_PACK))
    if pack_gqa is None:
        pack_gqa = _filled(seqlen_q, tile_m) < 0.9 * _filled(seqlen_q * pack, tile_m)
    return pack if pack_gqa else 1


def _filled(rows: int, tile_m: int) -> float:
    """The part of the query tiles' rows that exist."""
    return rows / max(1, ceil_div(rows, tile_m) * tile_m)


def _facts(x: torch.Tensor) -> tuple:
    return x.shape, x.stride(), x.dtype, x.device


def _forward(
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
    with_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse); lse is None on a GPU if it is not wanted."""
    plan = _plan(
        *_facts(q), *_facts(k), *_facts(v),
        causal, left, right, softcap > 0.0, None if sinks is None else _facts(sinks), pack_gqa, sm_margin,
    )  # fmt: skip
    config, device = plan.config, q.device
    if plan.convert_sinks:
        sinks = sinks.new_empty(sinks.shape, dtype=torch.float32).copy_(sinks)
    if not plan.ctas:
        return tiled.attention(q, k, v, softmax_scale, config, softcap, sinks, plan.window_left, plan.window_right)

    out = torch.empty(plan.out_shape, dtype=q.dtype, device=device)
    lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=device) if with_lse else None
    if plan.empty:  # TMA knows no empty tensors
        if with_lse:
            lse.copy_(sinks[:, None]) if sinks is not None else lse.fill_(-math.inf)
        return out.zero_(), lse
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_ALIGNMENT:
        _refuse_misaligned(q=q, k=k, v=v)
    if plan.strides != (None, None, None):
        q, k, v = (x if s is None else x.as_strided(x.shape, s) for x, s in zip((q, k, v), plan.strides, strict=True))
    kernel = forward_kernel(config, q.dtype, with_lse)
    scalars = (softmax_scale, softcap, plan.window_left, plan.window_right, plan.ctas)
    if device.index == torch.cuda.current_device():
        kernel(q, k, v, out, lse, sinks, _counter(device) if config.dynamic else None, *scalars)
    else:
        with torch.cuda.device(device):
            kernel(q, k, v, out, lse, sinks, _counter(device) if config.dynamic else None, *scalars)
    return out, lse


def _counter(device: torch.device) -> torch.Tensor:
    """Two int32 zeros in which one launch counts the tiles that its CTAs have taken; it leaves zeros behind.

    An eager call takes the next of a ring of slots, which costs no launch; a slot comes again after `COUNTERS` calls. A CUDA
    graph may be replayed at any time beside other calls, so one that is captured gets zeros of its own, filled in every replay.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    slots, calls = _counter_ring(device)
    return slots[next(calls) % COUNTERS]  # the count is atomic under the GIL: two threads never get one slot


@functools.cache
def _counter_ring(device: torch.device) -> tuple[tuple[torch.Tensor, ...], itertools.count]:
    slots = torch.zeros(COUNTERS, 2, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # kernels on other streams will use them as well
    return slots.unbind(), itertools.count()


# PyTorch's dispatcher costs more host time than the launch itself, so eager calls go to _forward directly and only
# torch.compile (and fake or wrapped tensors) come through the operator.
@torch.library.custom_op("fa3_lib::flash_attn_fwd", mutates_args=())
def _operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward(q, k, v, softmax_scale, causal, left, right, softcap, sinks, pack_gqa, sm_margin)


@_operator.register_fake
def _operator_fake(q, k, v, *arguments):
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads, v.shape[-1]))
    return out, q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


# --- checks ----------------------------------------------------------------------------------------------------------


def _refuse_missing(qv, attention_chunk: int, num_splits: int) -> None:
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
    """Raises TypeError or ValueError if a descale that is given is not fp32 (batch, kv_heads) beside float8 tensors."""
    for name, x in descales.items():
        if x is None:
            continue
        if q.dtype not in FP8_DTYPES:
            raise ValueError(f"{name} is given and q is {q.dtype}; descales belong to float8 tensors: pass None")
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor is accepted")
        if x.dtype != torch.float32:
            raise TypeError(f"{name} is {x.dtype}; torch.float32 is accepted")
        accepted = (k.shape[0], k.shape[2])
        if tuple(x.shape) != accepted:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; (batch, kv_heads) = {accepted} is accepted")
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


def _refuse_types(**tensors) -> None:
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor is accepted")


def _refuse_grad(**tensors) -> None:
    names = ", ".join(name for name, x in tensors.items() if x is not None and x.requires_grad)
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
