"""The GPU side of `fa3_lib.quantize`: Triton kernels and their launches. Imported on the first CUDA tensor only.

The launches take checked tensors and outputs of the right shape. All kernels are bound by memory: a program loads one tile
into registers, rotates it there if it is asked to, and reduces or rounds it.
"""

import contextlib

import torch
import triton
import triton.language as tl

GROUP = 32  # keys, `fa3_lib.quantize.KEY_GROUP`
TRANSPOSE_KEYS, TRANSPOSE_COLUMNS = 128, 64  # a program's tile of V: whole 128-byte lines on the side of the keys

WARP_ELEMENTS = 2048  # of a tile: 64 registers a thread
TILE_ELEMENTS = 4 * WARP_ELEMENTS
OWN_ELEMENTS = 8 * WARP_ELEMENTS  # the largest block that one program holds, reading x once; more warps would spill
MAX_ROWS = 128
MATRIX_STAGES = 5  # of a rotation, on the tensor cores: a matrix of 32 x 32, made in registers


# --- tiles of x ----------------------------------------------------------------------------------------------------------


# fmt: off
@triton.jit
def place(program, seqlen, heads, block, blocks, chunks, ROWS: tl.constexpr):
    # fmt: on
    """(batch, block, head, rows, exists) of a program; neighbours take the heads of the same rows, which are neighbours in memory."""
    head = (program % heads).to(tl.int64)  # 64 bits: offsets may pass 2^31
    chunk = program // heads % chunks
    b = program // heads // chunks % blocks
    batch = (program // heads // chunks // blocks).to(tl.int64)
    in_block = chunk * ROWS + tl.arange(0, ROWS)
    rows = b * block + in_block
    return batch, b, head, rows.to(tl.int64), (in_block < block) & (rows < seqlen)


# fmt: off
@triton.jit
def load_tile(
    X, SIGNS,
    row, column,  # strides
    rows, exists,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr,
    MATRIX_STAGES: tl.constexpr,
):
    # fmt: on
    """(ROWS, COLUMNS) of one head in fp32, rotated if there are signs; 0 where there is nothing."""
    c = tl.arange(0, COLUMNS)
    mask = exists[:, None] & (c < HEAD_DIM)[None, :]
    x = tl.load(X + rows[:, None] * row + c[None, :] * column, mask=mask, other=0.0)
    if SIGNS is not None:
        x = x * tl.load(SIGNS + c, mask=c < HEAD_DIM, other=0.0).to(x.dtype)[None, :]  # exact in any dtype
        if MATRIX_STAGES > 0:  # the first stages in one product on the tensor cores, of numbers that are 16 bits wide still
            SIZE: tl.constexpr = 2**MATRIX_STAGES
            chunks = tl.reshape(x, (ROWS * COLUMNS // SIZE, SIZE))
            x = tl.reshape(tl.dot(chunks, hadamard_matrix(SIZE).to(x.dtype)), (ROWS, COLUMNS))
        x = x.to(tl.float32)
        for stage in tl.static_range(MATRIX_STAGES, STAGES):
            x = butterfly(x, ROWS, COLUMNS, 2**stage)
        x = x * 2.0 ** (-0.5 * STAGES)
    return x.to(tl.float32)


@triton.jit
def hadamard_matrix(SIZE: tl.constexpr):
    """(SIZE, SIZE) fp32: -1 where row and column have an odd number of common bits, otherwise 1; SIZE up to 64."""
    i = tl.arange(0, SIZE)
    common = i[:, None] & i[None, :]
    odd = (0x6996 >> (common & 15)) ^ (0x6 >> (common >> 4))  # parities of 4 and of 2 bits, looked up
    return (1 - 2 * (odd & 1)).to(tl.float32)


@triton.jit
def butterfly(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr):
    """Columns c and c + HALF become their sum and their difference."""
    pairs = tl.permute(tl.reshape(x, (ROWS, COLUMNS // (2 * HALF), 2, HALF)), (0, 1, 3, 2))
    low, high = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), (ROWS, COLUMNS))


@triton.jit
def finite_max(x):
    """The largest |x|; infinities and NaN do not count."""
    size = tl.abs(x)
    amax = tl.max(size)
    if not (amax < float("inf")):  # rare: the comparisons only where they matter
        amax = tl.max(tl.where(size < float("inf"), size, 0.0))
    return amax


@triton.jit
def descale_of(amax, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The factor that undoes a scaling of amax to LARGEST; 1 for a group of zeros, never subnormal."""
    if POWER_OF_TWO:
        # both formats end at 1.75 times a power of two: mantissas above 1.75 carry into the exponent
        scaled = (amax * (1.75 / LARGEST)).to(tl.int32, bitcast=True)
        factor = ((scaled + 0x1FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    else:
        factor = tl.div_rn(amax, LARGEST)
    factor = tl.maximum(factor, 1.1754943508222875e-38)
    return tl.where(amax > 0, factor, 1.0)


# --- kernels ---------------------------------------------------------------------------------------------------------------


# lengths stay numbers of the launch, 1 included: one compile serves all shapes
NUMBERS = ["seqlen", "heads", "group", "block", "blocks", "chunks"]


# fmt: off
@triton.jit(do_not_specialize=NUMBERS)
def amax_kernel(
    X, x_batch, x_row, x_head, x_column,  # (batch, seqlen, heads, head_dim), any strides
    SIGNS,  # (head_dim,) fp32, or None: no rotation
    AMAX, a_batch, a_head, a_block,  # bits of fp32, 0 before the launch; a stride of 0 shares a maximum
    seqlen, heads, group, block, blocks, chunks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr,
    MATRIX_STAGES: tl.constexpr,
):
    # fmt: on
    """The largest finite |x| of each group. Positive floats are ordered like their bits, and a maximum has no order of additions."""
    batch, b, head, rows, exists = place(tl.program_id(0), seqlen, heads, block, blocks, chunks, ROWS)
    X += batch * x_batch + head * x_head
    x = load_tile(X, SIGNS, x_row, x_column, rows, exists, ROWS, COLUMNS, HEAD_DIM, STAGES, MATRIX_STAGES)
    slot = AMAX + batch * a_batch + head // group * a_head + b * a_block
    tl.atomic_max(slot, finite_max(x).to(tl.int32, bitcast=True), sem="relaxed")


# fmt: off
@triton.jit(do_not_specialize=NUMBERS)
def quantize_kernel(
    X, x_batch, x_row, x_head, x_column,  # (batch, seqlen, heads, head_dim), any strides
    SIGNS,  # (head_dim,) fp32, or None: no rotation
    AMAX, a_batch, a_head, a_block,  # bits of fp32, as amax_kernel leaves them
    DESCALE, s_batch, s_head, s_block,  # fp32
    OUT, o_batch, o_row, o_head,  # like x in FP8, last stride 1
    seqlen, heads, group, block, blocks, chunks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr,
    MATRIX_STAGES: tl.constexpr,
    SCALE: tl.constexpr,  # "given": DESCALE is read; "amax": written, from AMAX; "own": written, the tile is a whole group
    LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):
    # fmt: on
    """Divides by the group's factor and rounds."""
    # backwards: what amax_kernel has read last may still be in L2
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, b, head, rows, exists = place(program, seqlen, heads, block, blocks, chunks, ROWS)
    X += batch * x_batch + head * x_head
    x = load_tile(X, SIGNS, x_row, x_column, rows, exists, ROWS, COLUMNS, HEAD_DIM, STAGES, MATRIX_STAGES)
    DESCALE += batch * s_batch + head // group * s_head + b * s_block
    if SCALE == "given":
        descale = tl.load(DESCALE)
    else:
        if SCALE == "amax":
            slot = AMAX + batch * a_batch + head // group * a_head + b * a_block
            amax = tl.load(slot).to(tl.float32, bitcast=True)
        else:
            amax = finite_max(x)
        descale = descale_of(amax, LARGEST, POWER_OF_TWO)
        tl.store(DESCALE, descale)  # the programs of a group write the same number
    y = tl.clamp(x * tl.div_rn(1.0, descale), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    c = tl.arange(0, COLUMNS)
    OUT += batch * o_batch + head * o_head
    mask = exists[:, None] & (c < HEAD_DIM)[None, :]
    tl.store(OUT + rows[:, None] * o_row + c[None, :], y.to(OUT.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit(do_not_specialize=NUMBERS)
def hadamard_kernel(
    X, x_batch, x_row, x_head, x_column,  # (batch, seqlen, heads, head_dim), any strides
    SIGNS,  # (head_dim,) fp32, or None: no rotation
    OUT, o_batch, o_row, o_head,  # like x, last stride 1
    seqlen, heads, group, block, blocks, chunks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr,
    MATRIX_STAGES: tl.constexpr,
):
    # fmt: on
    """Rotates without rounding to FP8."""
    batch, _, head, rows, exists = place(tl.program_id(0), seqlen, heads, block, blocks, chunks, ROWS)
    X += batch * x_batch + head * x_head
    x = load_tile(X, SIGNS, x_row, x_column, rows, exists, ROWS, COLUMNS, HEAD_DIM, STAGES, MATRIX_STAGES)
    c = tl.arange(0, COLUMNS)
    OUT += batch * o_batch + head * o_head
    mask = exists[:, None] & (c < HEAD_DIM)[None, :]
    tl.store(OUT + rows[:, None] * o_row + c[None, :], x.to(OUT.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit(do_not_specialize=["seqlen", "heads", "groups"])
def transpose_v_kernel(
    V, v_batch, v_row, v_head, v_column,  # (batch, seqlen, heads, head_dim) uint8, any strides
    OUT,  # (batch, heads, head_dim, groups * GROUP) uint8, contiguous
    seqlen, heads, groups,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # fmt: on
    """One program: a tile of KEYS x COLUMNS of one head, read along columns and written along keys."""
    padded = groups * GROUP  # a visible multiple of 32: stores of 16 bytes
    key_tiles, column_tiles = tl.cdiv(padded, KEYS), tl.cdiv(HEAD_DIM, COLUMNS)
    tile = tl.program_id(0)
    first_column = tile % column_tiles * COLUMNS
    head = (tile // column_tiles % heads).to(tl.int64)  # 64 bits: offsets may pass 2^31
    first_key = (tile // column_tiles // heads % key_tiles) * KEYS
    batch = (tile // column_tiles // heads // key_tiles).to(tl.int64)

    position = first_key + tl.arange(0, KEYS)
    # 32 group + 16 half + 4 quad + 2 j + e holds key 32 group + 16 half + 8 j + 2 quad + e
    key = (position & ~14) | ((position & 2) << 2) | ((position & 12) >> 1)
    column = first_column + tl.arange(0, COLUMNS)
    exists = (key < seqlen)[:, None] & (column < HEAD_DIM)[None, :]
    V += batch * v_batch + head * v_head
    v = tl.load(V + key.to(tl.int64)[:, None] * v_row + column[None, :] * v_column, mask=exists, other=0)

    OUT += (batch * heads + head) * HEAD_DIM * padded
    inside = (column < HEAD_DIM)[:, None] & (position < padded)[None, :]
    tl.store(OUT + column.to(tl.int64)[:, None] * padded + position[None, :], tl.trans(v), mask=inside)


# --- launches ----------------------------------------------------------------------------------------------------------------


def tiling(x: torch.Tensor, block: int | None, rows: int | None = None) -> tuple[tuple[int], dict, dict]:
    """(programs, numbers, constants): how x is cut into tiles of one head.

    Args:
        block: rows that no tile may leave; None for all.
        rows: of a tile; None for as many as TILE_ELEMENTS allow.
    """
    batch, seqlen, heads, head_dim = x.shape
    columns = triton.next_power_of_2(head_dim)
    rows = rows or max(1, min(MAX_ROWS, TILE_ELEMENTS // columns))
    block = block or seqlen
    blocks, chunks = triton.cdiv(seqlen, block), triton.cdiv(block, rows)
    numbers = {"seqlen": seqlen, "heads": heads, "block": block, "blocks": blocks, "chunks": chunks}
    stages = (head_dim & -head_dim).bit_length() - 1
    # 16 columns are the least that a tensor core takes; fp32 numbers would lose bits there
    matrix_stages = min(stages, MATRIX_STAGES) if x.itemsize == 2 and stages >= 4 else 0
    constants = {
        "ROWS": rows, "COLUMNS": columns, "HEAD_DIM": head_dim, "STAGES": stages, "MATRIX_STAGES": matrix_stages,
        "num_warps": max(1, min(16, rows * columns // WARP_ELEMENTS)),
    }  # fmt: skip
    return (batch * heads * blocks * chunks,), numbers, constants


def quantize(
    x: torch.Tensor,
    out: torch.Tensor,
    descale: torch.Tensor,
    largest: float,
    block: int | None,
    power_of_two: bool,
    signs: torch.Tensor | None,
    given: bool,
) -> None:
    """Fills out like x and descale unless it is given.

    Args:
        out: FP8; of a wider dtype it gets the scaled numbers before they are rounded.
        descale: fp32 `(batch, heads that share, blocks)`; groups that share a factor have strides of 0.
        largest: number of the format.
        block: rows of a group; None for all.
    """
    if x.numel() == 0:
        return
    group = x.shape[2] // descale.shape[1]
    own_rows = block and triton.next_power_of_2(block)
    own = not given and block is not None and own_rows * triton.next_power_of_2(x.shape[3]) <= OWN_ELEMENTS
    grid, numbers, constants = tiling(x, block, own_rows if own else None)
    scale = "given" if given else "own" if own else "amax"
    with on_device_of(x):
        amax = descale
        if scale == "amax":
            # as the factors lie in memory, those with stride 0 once
            shape = [1 if stride == 0 else size for size, stride in zip(descale.shape, descale.stride(), strict=True)]
            amax = torch.zeros(shape, dtype=torch.int32, device=x.device).expand(descale.shape)
            amax_kernel[grid](x, *x.stride(), signs, amax, *amax.stride(), group=group, **numbers, **constants)
        quantize_kernel[grid](
            x, *x.stride(), signs, amax, *amax.stride(), descale, *descale.stride(), out, *out.stride()[:3],
            group=group, **numbers, **constants, SCALE=scale, LARGEST=largest, POWER_OF_TWO=power_of_two,
        )  # fmt: skip


def hadamard(x: torch.Tensor, signs: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out with x times the signs, rotated."""
    if x.numel() == 0:
        return
    grid, numbers, constants = tiling(x, None)
    with on_device_of(x):
        hadamard_kernel[grid](x, *x.stride(), signs, out, *out.stride()[:3], group=1, **numbers, **constants)


def transpose_v(v: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out `(batch, heads, head_dim, padded)` with the permuted keys of v `(batch, seqlen, heads, head_dim)`, uint8."""
    if out.numel() == 0:
        return
    batch, heads, head_dim, padded = out.shape
    tiles = batch * heads * triton.cdiv(padded, TRANSPOSE_KEYS) * triton.cdiv(head_dim, TRANSPOSE_COLUMNS)
    with on_device_of(v):
        transpose_v_kernel[(tiles,)](
            v, *v.stride(), out, v.shape[1], heads, padded // GROUP,
            GROUP=GROUP, HEAD_DIM=head_dim, KEYS=TRANSPOSE_KEYS, COLUMNS=TRANSPOSE_COLUMNS, num_warps=4,
        )  # fmt: skip


def on_device_of(x: torch.Tensor):
    """Triton launches on the current device, whatever its arguments' device is."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
