"""# 04.1 What a byte is worth

*Difficulty 1 of 3, 10 minutes, needs a laptop*

An 8-bit float is a sign bit, then an exponent field `E`, then a mantissa field `M` of `m` bits. With the bias
`2^(exponent_bits - 1) - 1` a code is worth

    (-1)^sign * 2^(E - bias) * (1 + M / 2^m)     where E > 0
    (-1)^sign * 2^(1 - bias) * (0 + M / 2^m)     where E = 0 (zero and the subnormals: no hidden one)

A few codes mean no number. A format that follows IEEE 754 (e5m2) gives up its whole highest exponent: infinity where `M`
is 0, NaN elsewhere. e4m3 keeps that exponent for numbers and gives up only the two codes whose seven lower bits are all
ones: NaN, and no infinity.

Write the decoder for any split of the seven bits.
"""

import numpy as np


def decode(codes: np.ndarray, exponent_bits: int, mantissa_bits: int, ieee: bool) -> np.ndarray:
    """The exact value of each code.

    Args:
        codes: uint8, any shape.
        exponent_bits, mantissa_bits: at least 2 and 1, together 7.
        ieee: whether the highest exponent means infinity and NaN; otherwise only 0x7F and 0xFF mean NaN.

    Returns:
        fp64, of the shape of `codes`. A zero has the sign of its code.
    """
    # region learner
    # Take the fields apart (as int: a uint8 overflows), then significand and exponent; what is no number; the sign.
    bits = codes.astype(int)
    field = bits >> mantissa_bits & 2**exponent_bits - 1
    mantissa = bits & 2**mantissa_bits - 1
    significand = (field > 0) + mantissa / 2**mantissa_bits
    value = np.ldexp(significand, np.maximum(field, 1) - (2 ** (exponent_bits - 1) - 1))
    if ieee:
        top = field == 2**exponent_bits - 1
        value = np.where(top, np.where(mantissa == 0, np.inf, np.nan), value)
    else:
        value = np.where(bits & 0x7F == 0x7F, np.nan, value)
    return np.where(bits >> 7, -value, value)
    # endregion
