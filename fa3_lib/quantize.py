"""FP8 operands for attention on a Hopper: scales, rounding, rotation, and V as the kernel reads it.

CUDA tensors go through Triton kernels (`quantize_triton.py`), CPU tensors through PyTorch; both compute the same.
"""

import torch

KEY_GROUP = 32  # keys of one FP8 k-step of the tensor core, inside which V's keys are permuted


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
