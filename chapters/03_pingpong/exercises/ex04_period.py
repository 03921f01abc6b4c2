"""# 03.4 How many consumers?

*Difficulty 2 of 3, 12 minutes, needs a laptop*

Each of n consumers goes round for ever: its two products on the tensor cores, then its softmax, which spends a part of its time in
the MUFU. The tensor cores serve one consumer at a time, and so does the MUFU; the rest of a softmax (maximum, sum, conversion, waits)
disturbs nobody. In the steady state every consumer comes back after the same time, the *period*.

Three things can decide it: one consumer's own way round, the tensor cores, or the MUFU. Per cycle the tensor cores do 4096
floating-point operations, and MUFU computes 16 exponentials.
"""


def work(head_dim: int, tile_n: int) -> tuple[float, float]:
    """Cycles of the tensor cores and of the MUFU for one consumer (64 query rows) and one key block, at full rate."""
    # region learner
    # Two products of 64 x tile_n x head_dim; one exponential per score.
    raise NotImplementedError("03.4 is yours to write")
    # endregion


def period(consumers: int, product: float, softmax: float, mufu: float) -> float:
    """Cycles in which each consumer goes round once.

    Args:
        product, softmax: cycles of one consumer and block. mufu: the part of `softmax` spent in the MUFU.
    """
    # region learner
    # The largest of three times.
    raise NotImplementedError("03.4 is yours to write")
    # endregion


def enough(product: float, softmax: float, mufu: float) -> int:
    """The smallest number of consumers with which the tensor cores or the MUFU are always at work."""
    # region learner
    # More consumers than that bring nothing in this model.
    raise NotImplementedError("03.4 is yours to write")
    # endregion
