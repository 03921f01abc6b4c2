"""# 02.4 What TMA refuses

*Difficulty 2 of 3, 12 minutes, needs a laptop*

A descriptor (a *tensor map*) cannot describe every tensor. These are the rules of `cuTensorMapEncodeTiled` in NVIDIA's
driver API, without interleaving; the word in front is the answer that your function gives when the rule is broken:

| answer | rule |
|---|---|
| `"dimensions"` | 1 to 5 dimensions; shape, strides and box have as many |
| `"address"` | the first element's address is a multiple of 16 bytes |
| `"extent"` | every extent of the tensor lies in 1 .. 2^32 |
| `"inner stride"` | elements of the last dimension are neighbours: its stride is 1 |
| `"stride"` | the other strides, in bytes, are multiples of 16 and below 2^40 |
| `"box side"` | every side of the box lies in 1 .. 256 elements |
| `"box row"` | the box's last side, in bytes, is a multiple of 16 |
| `"swizzle"` | with a swizzle of 32, 64 or 128 bytes, the box's last side is at most that long |

If several rules are broken, name the first of the table; `""` says that TMA takes it.
"""


def tma_refuses(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    element_bytes: int,
    swizzle_bytes: int = 0,
) -> str:
    """Which rule forbids a tensor map, or "".

    Args:
        address: of the first element, in bytes.
        shape, strides, box: the last dimension is the innermost; strides in elements.
        element_bytes: 1, 2, 4 or 8.
        swizzle_bytes: 0, 32, 64 or 128.
    """
    # region learner
    # Rule by rule, in the order of the table. Strides are given in elements, the rule counts bytes.
    raise NotImplementedError("02.4 is yours to write")
    # endregion
