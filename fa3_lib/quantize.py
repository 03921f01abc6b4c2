"""FP8 operands for attention on a Hopper: scales, rounding, rotation, and V as the kernel reads it.

    signs = rotation_signs(q.shape[-1], seed=0, device=q.device)
    out = flash_attn_func(**quantize_qkv(q, k, v, signs=signs)._asdict())

A stored number stands for its value times the factor (descale) of its group: `x ≈ x8.float() * descale`. Groups are all of x
("tensor"), the heads of a batch entry that read one KV head ("head": what `flash_attn_func` takes), or blocks of rows of a
head ("block": the paper's, section 3.3). The largest finite |x| of a group lands on the format's largest number.

CUDA tensors go through Triton kernels (`quantize_triton.py`), which never wait for the device; CPU tensors through the same
computation in PyTorch, operation by operation.
"""

import math
from typing import NamedTuple

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
GRANULARITIES = ("tensor", "head", "block")
BLOCK = 128
KEY_GROUP = 32  # keys of one FP8 k-step of the tensor core, inside which V's keys are permuted


class Quantized(NamedTuple):
    """What `quantize_qkv` returns; `_asdict()` gives the keyword arguments of `flash_attn_func`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "head",
    *,
    kv_heads: int | None = None,
    block: int | None = None,
    power_of_two: bool = False,
    descale: torch.Tensor | None = None,
    signs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x in 8 bits, and the factors that undo its scaling.

    NaN stays NaN, infinities become the largest number of their sign; neither counts for the factors. Numbers too large for a
    given descale saturate. A group of zeros gets factor 1, and no factor is below fp32's smallest normal number. With signs,
    all this holds for the rotated rows, over which a NaN or an infinity spreads.

    Args:
        x: `(batch, seqlen, heads, head_dim)`, fp16, bf16 or fp32, any strides, CPU or CUDA.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        granularity: "tensor", "head" or "block": which numbers share a factor.
        kv_heads: for queries under "tensor" and "head": the heads that read one KV head share a factor. None: heads.
        block: rows of a group under "block" (the last one may be shorter); 128 when None.
        power_of_two: rounds the factors up to powers of two, so that to apply and to undo them is exact.
        descale: calibrated factors to be used instead of x's own: fp32, positive, a shape that expands to the one below.
        signs: as `rotation_signs` makes them: rotates x first (`hadamard`), in the same pass and without rounding between.

    Returns:
        x8 like x in dtype, contiguous, and descale, fp32: `(batch, kv_heads)`, under "block" `(batch, heads, ceil(seqlen / block))`.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument is wrong; the message names it.
    """
    check_input("x", x)
    if dtype not in FP8:
        raise TypeError(f"dtype must be one of {', '.join(map(str, FP8))}, got {dtype}")
    batch, seqlen, heads, _ = x.shape
    if granularity == "block":
        if kv_heads is not None:
            raise ValueError(
                f"kv_heads={kv_heads} under granularity='block': each head has factors of its own; leave it out"
            )
        block = BLOCK if block is None else block
        if not isinstance(block, int) or block < 1:
            raise ValueError(f"block must be at least 1 row, got {block}")
        shape = (batch, heads, -(-seqlen // block))
    elif granularity in GRANULARITIES:
        if block is not None:
            raise ValueError(f"block={block} under granularity={granularity!r}: only granularity='block' has blocks")
        kv_heads = heads if kv_heads is None else kv_heads
        if heads and (kv_heads < 1 or heads % kv_heads):
            raise ValueError(f"kv_heads must divide the {heads} heads of x, got {kv_heads}")
        shape = (batch, kv_heads, 1)
    else:
        raise ValueError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {granularity!r}")
    if signs is not None:
        check_signs(signs, x)
    given = descale is not None
    if given and power_of_two:
        raise ValueError("power_of_two rounds factors that are computed here; a given descale is used as it is")

    # (batch, heads that share, blocks); a factor of the whole tensor lies in memory once
    if given:
        factors = expand_descale(descale, shape if granularity == "block" else shape[:2], x.device)
    elif granularity == "tensor":
        factors = torch.ones(1, 1, 1, device=x.device).expand(shape)
    else:
        factors = torch.ones(shape, device=x.device)
    x8 = torch.empty(x.shape, dtype=dtype, device=x.device)
    largest = torch.finfo(dtype).max
    if x.is_cuda:
        from fa3_lib import quantize_triton

        quantize_triton.quantize(x, x8, factors, largest, block, power_of_two, signs, given)
    else:
        y = x.float() if signs is None else rotated(x, signs)
        if not given and x.numel():
            amax = group_amax(y, shape[1], block)
            amax = amax.amax() if granularity == "tensor" else amax
            factors = descale_of(amax, dtype, power_of_two).expand(shape)
        inverse = per_row(factors.reciprocal(), seqlen, heads, block)
        x8.copy_((y * inverse).clamp(-largest, largest))  # clamp keeps NaN
    return x8, factors if granularity == "block" else factors[..., 0]


def quantize_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "head",
    *,
    block_q: int | None = None,
    block_kv: int | None = None,
    power_of_two: bool = False,
    signs: torch.Tensor | None = None,
) -> Quantized:
    """The operands of one attention in 8 bits; q and k rotated with the same signs, which leaves Q K^T as it is.

    Args:
        q: `(batch, seqlen_q, heads, head_dim)`; k: `(batch, seqlen_k, kv_heads, head_dim)`; v: `(batch, seqlen_k, kv_heads,
            head_dim_v)`; as in `quantize`.
        dtype, granularity, power_of_two: as in `quantize`.
        block_q, block_kv: rows of a group under "block": of q, and of k and v.
        signs: `(head_dim,)`, as `rotation_signs` makes them; None for no rotation.

    Raises:
        TypeError, ValueError, NotImplementedError: as `quantize`, and for shapes that do not belong together.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_input(name, x)
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    shared = {"power_of_two": power_of_two}
    kv_heads = None if granularity == "block" else k.shape[2]
    q8, q_descale = quantize(q, dtype, granularity, kv_heads=kv_heads, block=block_q, signs=signs, **shared)
    k8, k_descale = quantize(k, dtype, granularity, block=block_kv, signs=signs, **shared)
    v8, v_descale = quantize(v, dtype, granularity, block=block_kv, **shared)
    return Quantized(q8, k8, v8, q_descale, k_descale, v_descale)


def dequantize(x8: torch.Tensor, descale: torch.Tensor, block: int | None = None) -> torch.Tensor:
    """`x8 * descale` in fp32, x8 `(batch, seqlen, heads, head_dim)`.

    Args:
        descale: fp32 `(batch, kv_heads)`, or `(batch, heads, blocks)`, as `quantize` returns them.
        block: rows of a group of such blocks; 128 when None.
    """
    if x8.dim() != 4 or x8.dtype not in FP8:
        raise TypeError(f"x8 must be (batch, seqlen, heads, head_dim) in FP8, got {tuple(x8.shape)} of {x8.dtype}")
    _, seqlen, heads, _ = x8.shape
    if descale.dim() == 2:
        if block is not None:
            raise ValueError(f"block={block}, but a descale of shape {tuple(descale.shape)} has no blocks")
        descale = descale[..., None]
    else:
        block = BLOCK if block is None else block
    expected = 1 if block is None else -(-seqlen // block)
    if descale.dim() != 3 or descale.shape[0] != x8.shape[0] or descale.shape[2] != expected:
        raise ValueError(f"descale {tuple(descale.shape)} and block {block} do not fit x8 {tuple(x8.shape)}")
    if heads and (descale.shape[1] == 0 or heads % descale.shape[1]):
        raise ValueError(f"the {heads} heads of x8 cannot share {descale.shape[1]} factors")
    return x8.float() * per_row(descale, seqlen, heads, block)


# --- rotation ------------------------------------------------------------------------------------------------------------


def rotation_signs(head_dim: int, seed: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Random signs for `hadamard`: `(head_dim,)` fp32 of 1 and -1, the same for a seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (2.0 * torch.randint(0, 2, (head_dim,), generator=generator) - 1.0).to(device)


def hadamard(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """x times random signs, then the Walsh-Hadamard transform of the last axis, divided by its norm.

    This is a rotation: with the same signs for queries and keys, their products stay what they are, while an outlier is spread
    over the row. A head_dim that is no power of two is turned in chunks of the largest power of two that divides it (192:
    three times 64). To feed `flash_attn_func` in FP8, give the signs to `quantize` instead: one pass, and no rounding between.

    Args:
        x: `(batch, seqlen, heads, head_dim)`, fp16, bf16 or fp32, any strides, CPU or CUDA.
        signs: `(head_dim,)` fp32 on x's device, 1 and -1, as `rotation_signs` makes them.

    Returns:
        Like x, contiguous; computed in fp32 and rounded once.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument is wrong; the message names it.
    """
    check_input("x", x)
    check_signs(signs, x)
    if not x.is_cuda:
        return rotated(x, signs).to(x.dtype)
    from fa3_lib import quantize_triton

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    quantize_triton.hadamard(x, signs, out)
    return out


def rotated(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """`hadamard` in fp32: log2 stages of sums and differences, as the Triton kernel adds them."""
    head_dim = x.shape[-1]
    size = head_dim & -head_dim
    y = x.float() * signs
    for half in (2**stage for stage in range(size.bit_length() - 1)):
        low, high = y.view(*x.shape[:-1], head_dim // (2 * half), 2, half).unbind(-2)
        y = torch.stack((low + high, low - high), dim=-2)
    return y.reshape(x.shape) * (1 / math.sqrt(size))


# --- V --------------------------------------------------------------------------------------------------------------------


def transpose_v(v: torch.Tensor) -> torch.Tensor:
    """V as the FP8 kernel reads it: keys contiguous, in the order in which P lies in registers.

    A thread holds P's columns `16 half + 8 j + 2 quad + e` of each 32 keys, and the tensor core takes its registers for the
    positions `16 half + 4 quad + 2 j + e`: V's keys are moved to these positions, so that P moves between no threads.

    Args:
        v: `(batch, seqlen_k, kv_heads, head_dim_v)`, a dtype of one byte, any strides, CPU or CUDA.

    Returns:
        `(batch, kv_heads, head_dim_v, seqlen_k padded to a multiple of 32)` in v's dtype, contiguous; bytes of 0 where there
        is no key.

    Raises:
        TypeError, ValueError: v is no such tensor.
    """
    if not isinstance(v, torch.Tensor) or v.element_size() != 1:
        raise TypeError(f"v must be a tensor of one-byte elements, got {getattr(v, 'dtype', type(v).__name__)}")
    if v.dim() != 4:
        raise ValueError(f"v must be (batch, seqlen_k, kv_heads, head_dim_v), got {tuple(v.shape)}")
    batch, seqlen, heads, head_dim = v.shape
    groups = -(-seqlen // KEY_GROUP)
    source = v.view(torch.uint8)
    if v.is_cuda:
        from fa3_lib import quantize_triton

        out = source.new_empty(batch, heads, head_dim, groups * KEY_GROUP)
        quantize_triton.transpose_v(source, out)
        return out.view(v.dtype)
    keys = source.new_zeros(batch, groups * KEY_GROUP, heads, head_dim)
    keys[:, :seqlen] = source
    keys = keys.view(batch, groups, 2, 2, 4, 2, heads, head_dim)  # half, j, quad, e
    out = keys.permute(0, 6, 7, 1, 2, 4, 3, 5)  # ..., half, quad, j, e
    return out.reshape(batch, heads, head_dim, groups * KEY_GROUP).view(v.dtype)


# --- pieces ----------------------------------------------------------------------------------------------------------------


def group_amax(y: torch.Tensor, share: int, block: int | None) -> torch.Tensor:
    """The largest finite |y| of each group, `(batch, share, blocks)`; y is not empty.

    Args:
        y: `(batch, seqlen, heads, head_dim)` fp32.
        share: groups of heads. block: rows of a group, None for all.
    """
    batch, seqlen, heads, _ = y.shape
    size = y.abs()
    rows = torch.where(size < math.inf, size, 0.0).amax(3)  # (batch, seqlen, heads); a comparison with NaN is false
    block = seqlen if block is None else block
    blocks = -(-seqlen // block)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, blocks * block - seqlen))
    return rows.view(batch, blocks, block, share, heads // share).amax((2, 4)).transpose(1, 2).contiguous()


def descale_of(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> torch.Tensor:
    """The fp32 factor that undoes a scaling of amax to dtype's largest number; 1 for a group of zeros, never subnormal."""
    factor = amax.double() / torch.finfo(dtype).max
    if power_of_two:
        mantissa, exponent = torch.frexp(factor)  # mantissa in [1/2, 1): a power of two has 1/2
        factor = torch.ldexp(torch.ones_like(factor), exponent - (mantissa == 0.5).int())
    factor = factor.float().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax > 0, factor, 1.0)


def per_row(factors: torch.Tensor, seqlen: int, heads: int, block: int | None) -> torch.Tensor:
    """Factors `(batch, share, blocks)` as `(batch, seqlen, heads, 1)`."""
    factors = factors.repeat_interleave(heads // max(factors.shape[1], 1), dim=1)
    if block is not None:
        factors = factors.repeat_interleave(block, dim=2)[..., :seqlen]
    return factors.transpose(1, 2)[..., None].expand(-1, seqlen, -1, -1)


def expand_descale(descale: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A given descale with the shape of its groups (a view); TypeError or ValueError if it has no such shape."""
    if not isinstance(descale, torch.Tensor) or descale.dtype != torch.float32 or descale.device != device:
        got = f"{descale.dtype} on {descale.device}" if isinstance(descale, torch.Tensor) else type(descale).__name__
        raise TypeError(f"descale must be a tensor of fp32 on {device}, got {got}")
    try:
        expanded = descale.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"descale {tuple(descale.shape)} does not expand to {shape}, the shape of the groups"
        ) from None
    return expanded if len(shape) == 3 else expanded[..., None]


def check_input(name: str, x: torch.Tensor) -> None:
    """Raises TypeError, ValueError or NotImplementedError, naming the argument."""
    if not isinstance(x, torch.Tensor) or x.dtype not in DTYPES:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a tensor of fp16, bf16 or fp32, got {got}")
    if x.dim() != 4 or x.shape[3] == 0:
        raise ValueError(f"{name} must be (batch, seqlen, heads, head_dim), got {tuple(x.shape)}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise NotImplementedError(
            f"{name}.requires_grad: rounding has no backward pass; use torch.no_grad() or detach()"
        )


def check_signs(signs: torch.Tensor, x: torch.Tensor) -> None:
    """Raises TypeError or ValueError; that signs are 1 and -1 is not checked, since that would wait for the device."""
    if not isinstance(signs, torch.Tensor) or signs.dtype != torch.float32:
        got = signs.dtype if isinstance(signs, torch.Tensor) else type(signs).__name__
        raise TypeError(f"signs must be a tensor of fp32, got {got}; rotation_signs makes them")
    if signs.shape != x.shape[3:] or signs.device != x.device or not signs.is_contiguous():
        raise ValueError(
            f"signs must be contiguous, ({x.shape[3]},) on {x.device}, got {tuple(signs.shape)} on {signs.device}"
        )
