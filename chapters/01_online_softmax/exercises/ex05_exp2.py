"""# 01.5 One multiply per score

*Difficulty 2 of 3, 10 minutes, needs a laptop*

A GPU has an instruction for 2^x (`MUFU.EX2`), none for e^x, and one for `a * b + c` (`FFMA`). Since `exp(x) = 2^(x *
log2(e))`, scale and logarithm fold into one constant:

    scale_log2 = softmax_scale * log2(e)
    p = exp2(score * scale_log2 - row_max * scale_log2)

`row_max` stays in units of raw scores, `row_max * scale_log2` is computed once per row, so that each score costs one
FFMA and one EX2. The LSE that we hand out is a natural logarithm all the same.
"""

import numpy as np


def probabilities(scores: np.ndarray, row_max: np.ndarray, softmax_scale: float) -> np.ndarray:
    """exp(softmax_scale * (scores - row_max)) by exp2, with one multiply and one subtraction per score.

    Args:
        scores: `(rows, n)` raw scores q . k, not scaled; -inf marks a key that the row may not see.
        row_max: `(rows,)` maximum of raw scores, at least that of `scores`; -inf in a row that has seen no key.
        softmax_scale: positive factor on the scores.

    Returns:
        `(rows, n)`; 0 where the score is -inf.
    """
    # region learner
    # Two constants first: scale_log2, and per row row_max * scale_log2 (0 where row_max is -inf). Then one line.
    raise NotImplementedError("01.5 is yours to write")
    # endregion


def natural_lse(row_max: np.ndarray, row_sum: np.ndarray, softmax_scale: float) -> np.ndarray:
    """ln(sum of exp(softmax_scale * score)).

    Args:
        row_max: `(rows,)` maximum of raw scores, -inf in a row without keys.
        row_sum: `(rows,)` sum of the `probabilities` against row_max, 0 in a row without keys.
        softmax_scale: positive factor on the scores.

    Returns:
        `(rows,)`, -inf in a row without keys.
    """
    # region learner
    # row_max has raw units, row_sum none. Which of them needs the scale, and is log2(e) still in either?
    raise NotImplementedError("01.5 is yours to write")
    # endregion
