"""`flash_attn_func`: FlashAttention-3's Python signature, and the way from its arguments to the kernel."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from fa3_lib import checks, tiled
from fa3_lib.checks import FP8_DTYPES, TMA_ALIGNMENT
from fa3_lib.compiler import forward_kernel
from fa3_lib.config import ForwardConfig, ceil_div, forward_config

MAX_PACK = 64  # rows of a consumer's tile: it then holds one query of 64 heads
COUNTERS = 4096  # calls with dynamic tiles that may be in flight on a device at once
CAPTURED_COUNTERS = 65_536  # such calls in CUDA graphs, over a process's life, that cost no memset in their replays


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
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale * Q K^T) V, forward only.

    On an H100 or H200 this is one warp-specialised kernel; on CPU tensors the same algorithm in PyTorch, to learn and
    test with. Argument names, order, layouts and return values are those of FlashAttention-3's `flash_attn_func`; `sinks`,
    `two_level` and `out_dtype` are ours.

    Args:
        q: `(batch, seqlen_q, heads, head_dim)`, fp16, bf16, float8_e4m3fn or float8_e5m2; the last dim contiguous, head_dim a
            multiple of 8 (of 8 bits: 16) up to 256.
        k: `(batch, seqlen_k, kv_heads, head_dim)`; heads is a multiple of kv_heads (MHA, GQA, MQA).
        v: `(batch, seqlen_k, kv_heads, head_dim_v)`; head_dim_v a multiple of 8 (of 8 bits: 16) up to 256. All three of one dtype;
            of 8 bits each may have either.
        softmax_scale: positive factor on the scores; `head_dim ** -0.5` when None.
        causal: query i sees the keys `j <= i + seqlen_k - seqlen_q` (the last query is aligned with the last key).
        q_descale, k_descale, v_descale: `(batch, kv_heads)` fp32, any strides, with float8 tensors only: what the numbers of a batch
            entry and KV head (for q: of the query heads that read it) are multiplied by; at least 0; 1 when None.
            Or, all three, `(batch, heads, ceil(seqlen / 128))`: a factor for each 128 rows. `fa3_lib.quantize` makes them.
        window_size: `(left, right)`: query i sees the keys from `i + seqlen_k - seqlen_q - left` to
            `i + seqlen_k - seqlen_q + right`, both included; -1 or None is an unlimited side. `causal` makes right 0.
        softcap: if positive, scores become `softcap * tanh(score / softcap)` before the mask.
        num_splits: 1, or 0 to let the library choose (it chooses 1).
        pack_gqa: whether the query heads of one KV head share query tiles, as many of them as the largest power of two up to 64
            that divides their number (so True changes nothing for 1, 3, 5 ...); None packs where tiles would be badly filled.
            The result is the same but for rounding.
        deterministic: the forward pass gives the same bits in every run whatever this says.
        sm_margin: SMs of the device that the kernel leaves to others. A CPU has none to leave.
        return_attn_probs: also return the log-sum-exp (the name is FlashAttention's). In FP8 out has other bits then (`fp8.forward`).
        sinks: `(heads,)`, any float dtype: per query head one further logit (natural units, not scaled; finite or -inf) that
            belongs to no key: it enlarges the sum that the exponentials are divided by (gpt-oss; `learnable_sink` of
            FlashAttention-4, `s_aux` of vLLM).
        two_level: of float8 tensors alone: sums over keys are kept in fp32. False leaves them in the tensor core's accumulator, as
            FlashAttention-3 does: of about 13 bits, it stops growing over long contexts (V = 1 gives 0.3 at 64k keys).
        out_dtype: of float8 tensors, torch.bfloat16 (None) or torch.float16; of others q's dtype (None).

    Returns:
        out `(batch, seqlen_q, heads, head_dim_v)` in q's dtype (for float8 in `out_dtype`), exactly 0 in rows that see no key. With
        `return_attn_probs`, `(out, lse)`; lse `(batch, heads, seqlen_q)` fp32, natural log, scale included, -inf in such rows. With sinks the LSE
        includes the sink, and is the sink in such rows.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, its value and what is accepted.
        NotImplementedError: an argument of FlashAttention-3 that this version does not have yet, by name.
        ImportError: CuTe DSL is not installed, and the tensors are on a GPU.
        RuntimeError: a CUDA device that is not a Hopper.
    """
    if qv is not None or attention_chunk or num_splits > 1 or num_splits < 0:
        checks.refuse_missing(qv, attention_chunk, num_splits)
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        checks.refuse_types(q=q, k=k, v=v)
    if sinks is not None and not isinstance(sinks, torch.Tensor):
        checks.refuse_types(sinks=sinks)
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    ):
        checks.refuse_grad(q=q, k=k, v=v, sinks=sinks)
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    elif not 0.0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale is {softmax_scale}; a positive finite number is accepted")
    if softcap != 0.0 and not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap is {softcap}; 0 (none) or a positive finite number is accepted")
    left, right = (-1, -1) if window_size == (-1, -1) else checks.window_sides(window_size)
    if q_descale is not None or k_descale is not None or v_descale is not None:
        checks.check_descales(q, k, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    arguments = (float(softmax_scale), bool(causal), left, right, float(softcap), sinks, pack_gqa, sm_margin)
    eager = not torch.compiler.is_compiling() and type(q) is type(k) is type(v) is torch.Tensor
    if q.dtype in FP8_DTYPES:
        from fa3_lib import fp8

        call = fp8.forward if eager else torch.ops.fa3_lib.flash_attn_fp8_fwd
        out, lse = call(q, k, v, *arguments, q_descale, k_descale, v_descale, two_level, out_dtype, return_attn_probs)
    elif not two_level:
        raise ValueError(f"two_level=False is given and q is {q.dtype}, whose sums are fp32: pass True")
    elif out_dtype not in (None, q.dtype):
        raise TypeError(f"out_dtype is {out_dtype} and q is {q.dtype}; None or q's own dtype is accepted")
    elif not eager:
        checks.check_tensors(*_facts(q), *_facts(k), *_facts(v))
        if sinks is not None:
            checks.check_sinks(sinks.shape, sinks.dtype, sinks.device, q.shape[2], q.device)
        out, lse = torch.ops.fa3_lib.flash_attn_fwd(q, k, v, *arguments)
    else:
        out, lse = _forward(q, k, v, *arguments, return_attn_probs)
    return (out, lse) if return_attn_probs else out


class Plan(NamedTuple):
    """What a call needs and what depends on shapes, strides, dtypes, devices and masks alone."""

    config: ForwardConfig
    out_dtype: torch.dtype
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
def _plan(*key) -> Plan:
    *facts, causal, left, right, softcap, sinks, pack_gqa, sm_margin = key
    checks.check_tensors(*facts)
    q_shape, q_stride, dtype, _, k_shape, k_stride, _, _, v_shape, v_stride, _, _ = facts
    head_dim, head_dim_v, seqlen_q = q_shape[3], v_shape[3], q_shape[1]

    def choose(causal, window, pack_gqa=1):
        mask = {"window": window, "softcap": softcap, "sinks": sinks is not None}
        return forward_config(head_dim, head_dim_v, causal, seqlen_q, pack_gqa=pack_gqa, **mask)

    def strides(config):
        layouts = (("q", q_shape, q_stride), ("k", k_shape, k_stride), ("v", v_shape, v_stride))
        return tuple(checks.tma_strides(*layout) for layout in layouts)

    return make_plan(facts, head_dim_v, causal, left, right, sinks, pack_gqa, sm_margin, dtype, choose, strides)


def make_plan(
    facts, head_dim_v, causal, left, right, sinks, pack_gqa, sm_margin, out_dtype, choose: Callable, strides: Callable
) -> Plan:
    """The plan of a call whose q, k and v are checked.

    Args:
        facts: shape, strides, dtype and device of q, then of k, then of v.
        sinks: the same of the sinks, or None.
        choose: (causal, window, pack_gqa=1) -> the configuration.
        strides: configuration -> those of q, k and v for TMA, None where it takes the tensor's own; asked for on a GPU alone.
        The rest is as in `flash_attn_func`, the window's sides -1 for unlimited.
    """
    (batch, seqlen_q, heads, _), _, _, device, (_, seqlen_k, kv_heads, _), *_ = facts
    convert_sinks = False
    if sinks is not None:
        shape, stride, dtype, sinks_device = sinks
        checks.check_sinks(shape, dtype, sinks_device, heads, device)
        convert_sinks = dtype != torch.float32 or stride != (1,)

    left, right = effective_window(left, right, causal, seqlen_q, seqlen_k)
    causal = (left, right) == (-1, 0)
    window = not causal and (left, right) != (-1, -1)
    config = choose(causal, window)
    pack = choose_pack_gqa(pack_gqa, heads // kv_heads, seqlen_q, config.tile_m)
    if pack > 1:
        config = choose(causal, window, pack)

    sms, tma_strides = 0, (None, None, None)
    if device.type != "cpu":
        sms, tma_strides = checks.hopper_sms(device), strides(config)
    checks.check_sm_margin(sm_margin, sms)
    out_shape = (batch, seqlen_q, heads, head_dim_v)
    unlimited = seqlen_q + seqlen_k
    return Plan(
        config,
        out_dtype,
        out_shape,
        lse_shape=(batch, heads, seqlen_q),
        window_left=unlimited if left < 0 else left,
        window_right=unlimited if right < 0 else right,
        empty=0 in out_shape or seqlen_k == 0,
        ctas=sms and sms - sm_margin,
        strides=tma_strides,
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

    out, lse = outputs(plan, device, sinks, with_lse)
    if plan.empty:
        return out, lse
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_ALIGNMENT:
        checks.refuse_misaligned(q=q, k=k, v=v)
    if plan.strides != (None, None, None):
        q, k, v = (x if s is None else x.as_strided(x.shape, s) for x, s in zip((q, k, v), plan.strides, strict=True))
    kernel = forward_kernel(config, q.dtype, with_lse)
    scalars = (softmax_scale, softcap, plan.window_left, plan.window_right, plan.ctas)
    launch(kernel, config, device, (q, k, v, out, lse, sinks), scalars)
    return out, lse


def outputs(plan: Plan, device, sinks, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse) for a kernel to fill; where the plan says that there is nothing to compute, filled (TMA knows no empty tensors)."""
    out = torch.empty(plan.out_shape, dtype=plan.out_dtype, device=device)
    lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=device) if with_lse else None
    if plan.empty:
        out.zero_()
        if with_lse:
            lse.copy_(sinks[:, None]) if sinks is not None else lse.fill_(-math.inf)
    return out, lse


def launch(kernel, config: ForwardConfig, device: torch.device, tensors: tuple, arguments: tuple) -> None:
    """`kernel(*tensors, counter, *arguments)` with `device` as the current one; the counter is None unless tiles are dynamic."""
    if device.index == torch.cuda.current_device():
        kernel(*tensors, _counter(device) if config.dynamic else None, *arguments)
    else:
        with torch.cuda.device(device):
            kernel(*tensors, _counter(device) if config.dynamic else None, *arguments)


def _counter(device: torch.device) -> torch.Tensor:
    """Two int32 zeros in which one launch counts the tiles that its CTAs have taken; it leaves zeros behind.

    An eager call takes the next of a ring of slots, which costs no launch; a slot comes again after `COUNTERS` calls. A CUDA
    graph may be replayed at any time beside other calls, so a call that is captured gets a slot for itself, for ever: replays
    of one graph follow each other. Without such slots it gets zeros that every replay fills anew.
    """
    if torch.cuda.is_current_stream_capturing():
        slot = next(_captured_slots.get(device, iter(())), None)
        return torch.zeros(2, dtype=torch.int32, device=device) if slot is None else slot
    slots, calls = _counter_ring(device)
    return slots[next(calls) % COUNTERS]  # the count is atomic under the GIL: two threads never get one slot


@functools.cache
def _counter_ring(device: torch.device) -> tuple[tuple[torch.Tensor, ...], itertools.count]:
    """The slots of eager calls and their count; those of captured calls are made beside them, since a capture can make none."""
    slots = torch.zeros(COUNTERS + CAPTURED_COUNTERS, 2, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # kernels on other streams will use them as well
    _captured_slots[device] = map(slots.__getitem__, range(COUNTERS, COUNTERS + CAPTURED_COUNTERS))
    return slots[:COUNTERS].unbind(), itertools.count()


_captured_slots: dict[torch.device, Iterator[torch.Tensor]] = {}  # each is handed out once


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
