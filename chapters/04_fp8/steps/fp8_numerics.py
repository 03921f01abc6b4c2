"""FP8 attention on a Hopper, emulated in NumPy: formats, tensor core, scales, rotation, and the loop of a kernel.

Every function computes with fp32 or fp64 values that *lie on* the 8-bit grid. The emulated tensor core follows what was
measured (`chapters/04_fp8/measured_fa3_fp8.json`) and published (DeepSeek-V3 report, arXiv:2412.19437; MMA-Sim,
arXiv:2511.10909): it keeps 13 fraction bits and cuts every product to that grid before adding. It claims the same size of
error as the card's, not the same last bit.

Tensors: q `(b, sq, h, d)`, k `(b, sk, hk, d)`, v `(b, sk, hk, dv)`, as everywhere in this course.
"""

import math
from dataclasses import dataclass

import numpy as np

FRACTION_BITS = 13  # what Hopper's FP8 tensor core keeps after the leading bit
K_STEP = 32  # products that one FP8 WGMMA adds at once


# --- formats -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """An 8-bit floating-point format: one sign bit, then exponent, then mantissa.

    `ieee` formats spend the highest exponent on inf and NaN; the others (e4m3) only the single code of all ones, on NaN.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    ieee: bool

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def largest_code(self) -> int:
        """The code of the largest finite value."""
        return 0x7F - (2**self.mantissa_bits if self.ieee else 1)

    @property
    def largest(self) -> float:
        return float(decode(np.uint8(self.largest_code), self))

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest positive value, which is subnormal."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)


E4M3 = Format("e4m3", 4, 3, ieee=False)
E5M2 = Format("e5m2", 5, 2, ieee=True)


def decode(codes: np.ndarray, fmt: Format) -> np.ndarray:
    """The exact fp32 value of each uint8 code: sign, exponent and mantissa taken apart."""
    codes = np.asarray(codes, np.uint8).astype(np.int32)
    steps = 2**fmt.mantissa_bits
    sign = np.where(codes >> 7, np.float32(-1), np.float32(1))
    exponent = (codes & 0x7F) >> fmt.mantissa_bits
    mantissa = codes & (steps - 1)
    # exponent field 0: no hidden one, and the exponent of field 1
    significand = np.where(exponent == 0, mantissa, mantissa + steps).astype(np.float32)
    value = sign * np.ldexp(significand, np.maximum(exponent, 1) - fmt.bias - fmt.mantissa_bits)
    above = (codes & 0x7F) - fmt.largest_code
    if fmt.ieee:
        value = np.where(above == 1, sign * np.float32(np.inf), value)
        above = above - 1
    return np.where(above > 0, np.float32(np.nan), value)


def encode(values: np.ndarray, fmt: Format, saturate: bool = True) -> np.ndarray:
    """Rounds fp32 values to the nearest code, ties to the even code. Other inputs are first rounded to fp32.

    Args:
        values: any shape.
        saturate: too large values and inf become the largest finite value, as `cvt.rn.satfinite` does; otherwise inf where
            the format has one, else NaN.

    Returns:
        uint8 codes. NaN stays NaN (code 0x7F), zero keeps its sign, tiny values become a zero of their sign.
    """
    with np.errstate(over="ignore"):
        x = np.asarray(values, np.float32)
    finite = np.where(np.isfinite(x), np.abs(x), np.float32(0))
    exponent = np.where(finite > 0, np.frexp(finite)[1] - 1, 1 - fmt.bias)  # frexp's mantissa lies in [1/2, 1)
    exponent = np.maximum(exponent, 1 - fmt.bias)  # below it: subnormal
    # in units of the last mantissa bit; rint rounds ties to even
    steps = np.rint(np.ldexp(finite, fmt.mantissa_bits - exponent)).astype(np.int32)
    # codes count upwards through all exponents, so a carry out of the mantissa needs no special case
    code = (exponent - (1 - fmt.bias)) * 2**fmt.mantissa_bits + steps
    too_large = (code > fmt.largest_code) | np.isinf(x)
    code = np.where(too_large, fmt.largest_code + (0 if saturate else 1), code)
    code = code | (np.signbit(x).astype(np.int32) << 7)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


def to_grid(values: np.ndarray, fmt: Format | None) -> np.ndarray:
    """fp32 values after a round trip through the format; None leaves them as fp32."""
    return np.asarray(values, np.float32) if fmt is None else decode(encode(values, fmt), fmt)


# --- the tensor core ---------------------------------------------------------------------------------------------------


def _quanta(largest: np.ndarray, fraction_bits: int) -> np.ndarray:
    """One over the last kept bit of numbers as large as `largest`; fp32's smallest normal is the last bit of all."""
    exponent = np.frexp(np.where(np.isfinite(largest), largest, 0))[1] - 1
    return np.ldexp(np.float32(1), -np.maximum(exponent - fraction_bits, -126))


def tensor_core(
    a: np.ndarray, b: np.ndarray, acc: np.ndarray | None = None, fraction_bits: int | None = FRACTION_BITS
) -> np.ndarray:
    """acc + a @ b as an FP8 tensor core adds.

    Each step takes 32 products and the running sum, aligns all 33 to the largest exponent among them, cuts each below the
    last kept bit, and adds what is left exactly; the sum is cut to the same number of bits.

    Args:
        a: `(m, k)`, values on an 8-bit grid (others work, their products are rounded to fp32).
        b: `(k, n)`.
        acc: `(m, n)` fp32, or None for zero.
        fraction_bits: bits kept after the leading one; None adds in fp64 and rounds once to fp32.

    Returns:
        `(m, n)` fp32.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a @ b needs shapes (m, k) and (k, n), not {a.shape} and {b.shape}")
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    acc = np.zeros((a.shape[0], b.shape[1]), np.float32) if acc is None else np.asarray(acc, np.float32)
    if fraction_bits is None:
        return (acc + a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
    if not 1 <= fraction_bits <= 16:
        # 33 terms below 2**(bits + 2) must add exactly in fp32's 24 bits
        raise ValueError(f"fraction_bits must be 1 to 16, or None for exact sums, not {fraction_bits}")
    for k in range(0, a.shape[1], K_STEP):
        products = a[:, k : k + K_STEP, None] * b[None, k : k + K_STEP]  # (m, 32, n)
        scale = _quanta(np.maximum(np.abs(products).max(axis=1), np.abs(acc)), fraction_bits)
        products *= scale[:, None]
        total = np.trunc(products, out=products).sum(axis=1) + np.trunc(acc * scale)  # whole numbers: exact
        scale_of_total = _quanta(total, fraction_bits)
        acc = np.trunc(total * scale_of_total) / scale_of_total / scale
    return acc


# --- scales and rotation -----------------------------------------------------------------------------------------------

SCALES = ("none", "tensor", "head", "block")


def descales(
    x: np.ndarray,
    fmt: Format,
    scales: str = "head",
    block: int = 128,
    kv_heads: int | None = None,
    power_of_two: bool = False,
) -> np.ndarray:
    """The fp32 factors that undo a quantisation: `x ≈ to_grid(x / descale) * descale`, the largest |x| at the format's edge.

    Args:
        x: `(b, s, h, d)`. Infinities and NaN do not count; a group of zeros gets factor 1.
        scales: "none" (factor 1), "tensor", "head" (batch and KV head, as FA3 takes them), "block" (rows of a tile).
        block: rows of a tile; the last may be shorter.
        kv_heads: query heads that read one KV head share its factor under "head"; None means that x has KV heads.
        power_of_two: rounds factors up to a power of two, so that applying and undoing them is exact.

    Returns:
        `(b, s, h, 1)`, equal within a group.
    """
    if scales not in SCALES:
        raise ValueError(f"scales must be one of {', '.join(SCALES)}, not {scales!r}")
    b, s, h, _ = x.shape
    heads = h if kv_heads is None else kv_heads
    if heads < 1 or h % heads:
        raise ValueError(f"{h} heads cannot share the scales of {heads} KV heads: it must divide them")
    if block < 1:
        raise ValueError(f"block must be at least 1 row, not {block}")
    shape = (b, s, h, 1)
    if scales == "none" or x.size == 0:
        return np.ones(shape, np.float32)
    size = np.abs(np.where(np.isfinite(x), x, 0)).max(axis=3).astype(np.float64)  # (b, s, h)
    if scales == "tensor":
        size = np.broadcast_to(size.max(), (b, s, h))
    elif scales == "head":
        size = size.max(axis=1).reshape(b, heads, -1).max(axis=2)
        size = np.broadcast_to(np.repeat(size, h // heads, axis=1)[:, None], (b, s, h))
    else:
        starts = np.arange(0, s, block)
        size = np.repeat(np.maximum.reduceat(size, starts, axis=1), np.diff(starts, append=s), axis=1)
    factor = np.where(size > 0, np.maximum(size / fmt.largest, np.finfo(np.float32).tiny), 1)
    if power_of_two:
        factor = 2.0 ** np.ceil(np.log2(factor))
    return factor.astype(np.float32)[..., None]


def hadamard(x: np.ndarray) -> np.ndarray:
    """The fast Walsh-Hadamard transform of the last axis, divided by its norm: a rotation that is its own inverse.

    An axis that is no power of two is turned in chunks of the largest power of two that divides it (192: three times 64).
    """
    d = x.shape[-1]
    size = d & -d
    y = x.reshape(*x.shape[:-1], d // size, size)
    for half in (2**i for i in range(size.bit_length() - 1)):
        pairs = y.reshape(*y.shape[:-1], size // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([low + high, low - high], axis=-2).reshape(y.shape)
    return (y / math.sqrt(size)).reshape(x.shape)


def rotate(x: np.ndarray, seed: int) -> np.ndarray:
    """Random signs, then `hadamard`, on the last axis. Rotating q and k with the same seed leaves q @ k.T as it is."""
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=x.shape[-1])
    return hadamard(x * signs)


# --- attention ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """What is rounded where. A format of None leaves that operand in fp32, bits of None let a product add exactly."""

    q: Format | None = E4M3
    k: Format | None = E4M3
    p: Format | None = E4M3
    v: Format | None = E4M3
    qk_bits: int | None = FRACTION_BITS
    pv_bits: int | None = FRACTION_BITS
    two_level: bool = False  # PV of each key tile into a fresh accumulator, added to the output in fp32
    scales: str = "head"
    power_of_two: bool = False
    rotation: int | None = None  # seed of the signs
    offset: float = 8.0  # P lies in (0, 2**offset]
    tile_m: int = 128
    tile_n: int = 128

    def validate(self) -> None:
        """Raises ValueError, by name, for what no kernel could do."""
        if self.scales == "block" and self.v is not None and not self.two_level:
            raise ValueError("block scales of V need two_level=True: they are applied to each key tile's own product")
        if self.p is not None and 2.0**self.offset > self.p.largest:
            raise ValueError(f"offset {self.offset} puts P above {self.p.name}'s largest value, {self.p.largest:g}")
        if self.tile_m < 1 or self.tile_n < 1:
            raise ValueError("tile_m and tile_n must be at least 1")


EXACT = Recipe(None, None, None, None, None, None)


def _quantised(x: np.ndarray, fmt: Format | None, recipe: Recipe, block: int, kv_heads: int) -> tuple:
    """Values on the grid, and the factors that undo the scaling."""
    if fmt is None:
        return x, np.ones((*x.shape[:3], 1), np.float32)
    factor = descales(x, fmt, recipe.scales, block, kv_heads, recipe.power_of_two)
    return to_grid(x / factor, fmt), factor


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    softmax_scale: float | None = None,
    causal: bool = False,
    recipe: Recipe = Recipe(),
) -> tuple[np.ndarray, np.ndarray]:
    """Attention through the tiles of an FP8 kernel, with every rounding of `recipe`.

    Key tiles go from the last to the first, as in FA3. The row sum adds P before it is rounded.

    Args:
        q: `(b, sq, h, d)`; k: `(b, sk, hk, d)`; v: `(b, sk, hk, dv)`; finite or not, any float dtype.
        softmax_scale: `d ** -0.5` when None.
        causal: aligned bottom-right.

    Returns:
        out `(b, sq, h, dv)` fp32 and lse `(b, h, sq)` fp32, natural; a row without keys gives 0 and -inf.
    """
    recipe.validate()
    (b, sq, h, d), (_, sk, hk, _) = q.shape, k.shape
    if k.shape[:1] + k.shape[3:] != (b, d) or v.shape[:3] != (b, sk, hk) or d < 1 or hk < 1 or h % hk:
        raise ValueError(f"shapes do not fit: q {q.shape}, k {k.shape}, v {v.shape}")
    if recipe.rotation is not None:
        q, k = (rotate(np.asarray(x, np.float64), recipe.rotation) for x in (q, k))
    with np.errstate(over="ignore"):
        q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
    q8, q_descale = _quantised(q, recipe.q, recipe, recipe.tile_m, hk)
    k8, k_descale = _quantised(k, recipe.k, recipe, recipe.tile_n, hk)
    v8, v_descale = _quantised(v, recipe.v, recipe, recipe.tile_n, hk)
    scale = np.float32(d**-0.5 if softmax_scale is None else softmax_scale)

    out = np.zeros((b, sq, h, v.shape[3]), np.float32)
    lse = np.full((b, h, sq), -np.inf, np.float32)
    for i, head in np.ndindex(b, h):
        kv = (i, slice(None), head // (h // hk))
        q_factor = scale * q_descale[i, :, head]
        with np.errstate(invalid="ignore", over="ignore"):  # inf and NaN go where IEEE sends them
            out[i, :, head], lse[i, head] = _one_head(
                q8[i, :, head], k8[kv], v8[kv], q_factor, k_descale[kv], v_descale[kv], causal, recipe
            )
    return out, lse


def _one_head(q, k, v, q_factor, k_factor, v_factor, causal, recipe) -> tuple[np.ndarray, np.ndarray]:
    """q `(sq, d)`, k and v `(sk, ...)` on their grids, factors one per row -> out `(sq, dv)`, lse `(sq,)`."""
    (sq, _), sk = q.shape, len(k)
    row_max, row_sum = np.full((sq, 1), -np.inf, np.float32), np.zeros((sq, 1), np.float32)
    acc_O = np.zeros((sq, v.shape[1]), np.float32)
    log2e = np.float32(math.log2(math.e))
    for n in range((sk - 1) // recipe.tile_n * recipe.tile_n, -1, -recipe.tile_n):
        tile = slice(n, min(n + recipe.tile_n, sk))
        # the factors of a query row and of a key tile are folded into the scores' one multiplication
        scores = tensor_core(q, k[tile].T, None, recipe.qk_bits) * (q_factor * log2e * k_factor[tile].T)
        if causal:
            hidden = np.arange(n, tile.stop) > np.arange(sq)[:, None] + sk - sq
            scores = np.where(hidden, np.float32(-np.inf), scores)
        new_max = np.maximum(row_max, scores.max(axis=1, keepdims=True))
        safe_max = np.where(np.isneginf(new_max), np.float32(0), new_max)
        P = np.exp2(scores - safe_max + np.float32(recipe.offset))
        rescale = np.exp2(row_max - safe_max)
        row_sum = row_sum * rescale + P.sum(axis=1, keepdims=True)
        row_max = new_max
        P8 = to_grid(P, recipe.p)
        if recipe.two_level:  # v_factor is equal within a key tile
            acc_O = acc_O * rescale + v_factor[n] * tensor_core(P8, v[tile], None, recipe.pv_bits)
        else:
            acc_O = tensor_core(P8, v[tile], acc_O * rescale, recipe.pv_bits)
    seen = row_sum != 0  # NaN counts as seen: it must reach the output
    final = np.where(seen, 1 / np.where(seen, row_sum, 1), 0)
    if not recipe.two_level and sk:
        final = final * v_factor[0]  # one factor per head here: see Recipe.validate
    with np.errstate(divide="ignore"):
        lse = row_max + np.log2(row_sum) - np.float32(recipe.offset)
    return acc_O * final.astype(np.float32), np.where(seen, lse / log2e, -np.inf)[:, 0]


# --- where P and V's keys must lie -------------------------------------------------------------------------------------


def accumulator_columns(lane: int) -> np.ndarray:
    """The 8 of 32 columns of S that a lane holds for one of its rows, in the order of its registers."""
    return np.array([8 * j + 2 * (lane % 4) + e for j in range(4) for e in range(2)])


def operand_positions(lane: int) -> np.ndarray:
    """The 8 of 32 contraction positions that the same lane must hold of an 8-bit A operand, in the order of its bytes."""
    return np.array([16 * half + 4 * (lane % 4) + byte for half in range(2) for byte in range(4)])


def key_order() -> np.ndarray:
    """`order[position]` is the key, 0..31, that V must keep at a contraction position so that P moves between no lanes."""
    order = np.empty(32, int)
    for lane in range(4):
        order[operand_positions(lane)] = accumulator_columns(lane)
    return order
