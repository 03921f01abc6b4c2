"""# 02.6 K-major or MN-major

*Difficulty 2 of 3, 10 minutes, needs a laptop*

A matrix product sums over one dimension, the *contraction*. An operand is **K-major** when the contraction is contiguous in
memory, and **MN-major** when its other dimension is. WGMMA takes 16-bit operands in shared memory either way; 8-bit ones
must be K-major. An operand in registers has no major: threads hold it as fragments.

Products are written as in `einsum`: `"qd,kd->qk"` is S = Q K^T, `"qk,kd->qd"` is O = P V. For each operand you are told
which dimension is contiguous, or "" for an operand in registers. Say how WGMMA must be told to read it, and which
operands have to be transposed in memory first.
"""


def majors(product: str, contiguous: tuple[str, str]) -> tuple[str, str]:
    """ "K", "MN" or "" (registers) for A and for B.

    Args:
        product: "ab,cd->ef" with one letter per dimension; the letter that is missing in the result
            is the contraction.
        contiguous: for A and for B the letter of the contiguous dimension, "" for registers.
    """
    # region learner
    # Find the contraction; then compare it with the contiguous dimension of each operand.
    raise NotImplementedError("02.6 is yours to write")
    # endregion


def to_transpose(product: str, contiguous: tuple[str, str], element_bytes: int) -> str:
    """The operands that WGMMA cannot read as they lie: "", "A", "B" or "AB".

    Raises:
        ValueError: B is in registers.
    """
    # region learner
    # Which operands are MN-major, and does this element size allow it?
    raise NotImplementedError("02.6 is yours to write")
    # endregion
