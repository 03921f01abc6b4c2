"""# 04.2 Rounding to eight bits

*Difficulty 2 of 3, 15 minutes, needs a laptop*

The card rounds with `cvt.rn.satfinite`: to the nearest value of the format; from the middle between two values to the one
whose last mantissa bit is 0 (*ties to even*, so that ties do not push a mean in one direction); and too large a number, infinity
as well, to the largest finite value. NaN stays NaN.

Between two powers of two a float's values are equally spaced: in [2^e, 2^(e+1)) one step is 2^(e - mantissa_bits). Below
the lowest normal exponent the step stays what it is there: those are the subnormals. So rounding is: find the step, divide,
round to a whole number, multiply.
"""

import numpy as np


def to_grid(x: np.ndarray, mantissa_bits: int, lowest_exponent: int, largest: float) -> np.ndarray:
    """Each number rounded to the nearest value of a float format, ties to even, saturating.

    Args:
        x: fp64, any shape; infinities and NaN too.
        mantissa_bits: 3 for e4m3, 2 for e5m2.
        lowest_exponent: of normal numbers: -6 for e4m3, -14 for e5m2.
        largest: the largest finite value: 448 for e4m3, 57344 for e5m2.

    Returns:
        fp64, of the shape of `x`. NaN stays NaN, and what is rounded to zero keeps its sign.
    """
    # region learner
    # Exponent of each number (np.frexp gives one too many), never below lowest_exponent; the step; round; saturate.
    raise NotImplementedError("04.2 is yours to write")
    # endregion
