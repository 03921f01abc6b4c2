"""The GPU side of `fa3_lib.quantize`: Triton kernels and their launches. Imported on the first CUDA tensor only.

The launches take checked tensors and allocated outputs.
"""

import contextlib

import torch
import triton
import triton.language as tl

GROUP = 32  # keys, `fa3_lib.quantize.KEY_GROUP`
TRANSPOSE_KEYS, TRANSPOSE_COLUMNS = 128, 64  # a program's tile of V: whole 128-byte lines on the side of the keys


# fmt: off
# lengths stay numbers of the launch, 1 included: one compile serves all shapes
@triton.jit(do_not_specialize=["seqlen", "heads", "groups"])
def transpose_v_kernel(
    V, v_batch, v_row, v_head, v_column,  # (batch, seqlen, heads, head_dim) uint8, any strides
    OUT,  # (batch, heads, head_dim, padded) uint8, contiguous
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


def transpose_v(v: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out `(batch, heads, head_dim, padded)` with the permuted keys of v `(batch, seqlen, heads, head_dim)`, uint8."""
    batch, heads, head_dim, padded = out.shape
    if out.numel() == 0:
        return
    tiles = batch * heads * triton.cdiv(padded, TRANSPOSE_KEYS) * triton.cdiv(head_dim, TRANSPOSE_COLUMNS)
    with on_device_of(v):
        transpose_v_kernel[(tiles,)](
            v, *v.stride(), out, v.shape[1], heads, padded // GROUP,
            GROUP=GROUP, HEAD_DIM=head_dim, KEYS=TRANSPOSE_KEYS, COLUMNS=TRANSPOSE_COLUMNS, num_warps=4,
        )  # fmt: skip


def on_device_of(x: torch.Tensor):
    """Triton launches on the current device, whatever its arguments' device is."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
