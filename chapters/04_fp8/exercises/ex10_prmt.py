"""# 04.10 Turning V, byte by byte

*Difficulty 3 of 3, 15 minutes, needs a laptop*

An 8-bit WGMMA wants the bytes of one sum beside each other: for P V those of four *keys* in a register. V has four *head
dims* of one key there. Hopper turns 16-bit matrices on the way from shared memory (`ldmatrix.trans`), but bytes only in
registers, with one instruction:

    prmt(low, high, selector)     byte i of the result is chosen by hex digit i of the selector, from the right:
                                  digits 0 to 3 are the bytes of low, 4 to 7 those of high;
                                  8 is added to a digit for the sign of its byte: 0xFF if its top bit is set, else 0x00

Write the instruction itself; then `take_apart`, which is what FA3 needs after `ldmatrix.trans`, where pairs of head dims still
stick together; then a whole turn of 4 x 4 bytes without any help. Byte 0 is the lowest.
"""

from collections.abc import Callable

import numpy as np


def prmt(low: np.ndarray, high: np.ndarray, selector: int) -> np.ndarray:
    """PTX's byte permute.

    Args:
        low, high: uint32 of one shape.
        selector: four hex digits, 0x0000 to 0xFFFF.

    Returns:
        uint32 of the same shape.
    """
    # region learner
    # Put both into one uint64; then one digit of the selector after the other.
    raise NotImplementedError("04.10 is yours to write")
    # endregion


def take_apart(registers: np.ndarray, permute: Callable[[np.ndarray, np.ndarray, int], np.ndarray]) -> np.ndarray:
    """Four keys of two head dims each: sorted by head dim instead of by key.

    Args:
        registers: uint32 `(..., 2)`. Bytes of the first: key 0 dim 0, key 0 dim 1, key 1 dim 0, key 1 dim 1; of the second:
            the same of keys 2 and 3.
        permute: a `prmt`; two of them must do.

    Returns:
        uint32 `(..., 2)`: the first has keys 0 to 3 of dim 0, the second those of dim 1.
    """
    # region learner
    # Two selectors. The bytes of dim 0 are the even ones of both registers.
    raise NotImplementedError("04.10 is yours to write")
    # endregion


def turn(registers: np.ndarray, permute: Callable[[np.ndarray, np.ndarray, int], np.ndarray]) -> np.ndarray:
    """A 4 x 4 matrix of bytes, transposed.

    Args:
        registers: uint32 `(..., 4)`: register i has dims 0 to 3 of key i.
        permute: a `prmt`; eight of them must do.

    Returns:
        uint32 `(..., 4)`: register i has keys 0 to 3 of dim i.
    """
    # region learner
    # Two rounds of four. After the first, the two bytes of keys 0 and 1 of a dim lie beside each other.
    raise NotImplementedError("04.10 is yours to write")
    # endregion
