"""# 03.10 An exponential without the MUFU

*Difficulty 2 of 3, 15 minutes, needs a laptop*

`2 ** x` for x at most 0, as softmax needs it, in fp32 and with multiply-adds only (Cody and Waite's range split). Cut x into a whole number n and
a fraction f in [0, 1): `2 ** x = 2 ** n * 2 ** f`. The second factor is a polynomial of f. The first is no multiplication at all: the exponent
of an fp32 number stands in bits 23 to 30, so adding n there multiplies by 2 ** n.

Softmax rounds the result to 16 bits, so a short polynomial will do. The lesson's section 12 says why this lost on Hopper.
"""

import numpy as np


def fit(degree: int) -> np.ndarray:
    """Coefficients, highest power first, of a polynomial that is close to 2 ** f in [0, 1]: small *relative* error."""
    # region learner
    # np.polyfit on many points; its weights `w` multiply the errors. A relative error divides them.
    raise NotImplementedError("03.10 is yours to write")
    # endregion


def exp2(x: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """2 ** x in fp32, without np.exp2 and its like.

    Args:
        x: fp32, at most 0; -inf where a key is masked. Below -126 the result may be anything from 0 to 2 ** -126.
        coefficients: as `fit` gives them.
    """
    # region learner
    # Clamp, split, Horner's rule in fp32, then add n to the exponent: `.view(np.int32)` shows the
    # bits of an fp32 array as whole numbers.
    raise NotImplementedError("03.10 is yours to write")
    # endregion
