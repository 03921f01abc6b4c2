"""# 04.5 An adder of unknown width

*Difficulty 2 of 3, 15 minutes, needs a laptop*

A tensor core's FP8 sum keeps the leading bit and `bits` more. To add a term it aligns term and sum to the larger of the two,
and cuts what falls below the last kept bit: nothing is rounded up. A term that is small beside the sum loses bits, and in
the end all of them: the sum stops growing. That is how FA3's FP8 attention loses most of its answer on long contexts.

First write what the sum feels of a term. Then be the experimenter: you get a card as a function, may add equal terms as
often as you like, and find how many bits it keeps. NVIDIA does not say; the moment when the sum stops does.
"""

from collections.abc import Callable

import numpy as np


def kept(term: np.ndarray, total: np.ndarray, bits: int) -> np.ndarray:
    """What reaches the sum when `term` is added to `total`.

    Args:
        term, total: fp64 of one shape, any sign.
        bits: kept after the leading one of the larger magnitude.

    Returns:
        `term` without the bits that fall out of the adder's window, of the same shape.
    """
    # region learner
    # The larger magnitude says where the window lies; its last bit is worth 2^bits less. Cut towards zero.
    exponent = np.frexp(np.maximum(np.abs(term), np.abs(total)))[1] - 1
    step = np.ldexp(1.0, exponent - bits)
    return np.trunc(term / step) * step
    # endregion


def width(accumulate: Callable[[float, int], float]) -> int:
    """How many bits a card's adder keeps after the leading one: what `kept` calls `bits`.

    Args:
        accumulate: `accumulate(term, count)` starts from 0, adds `term` count times, one after the other, and returns the
            sum; count up to 2^40. A run costs time, so a hundred of them must do.

    Returns:
        the number of bits, 4 to 30.
    """
    # region learner
    # Double the count until the sum no longer follows. How large is it then, and what is its last bit worth?
    count = 1
    while accumulate(1.0, 2 * count) > accumulate(1.0, count):
        count *= 2
    # the sum has stopped at `count`: its last kept bit is worth 2, twice the term
    return count.bit_length() - 2
    # endregion
