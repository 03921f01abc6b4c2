"""# 03.11 Read a profile

*Difficulty 2 of 3, 12 minutes, needs a laptop*

A profile says in which share of the cycles each unit worked. Only a unit that is busy nearly always binds; otherwise the kernel
*waits*: for a barrier, for a result, for a warp that can issue.

Before you optimise, ask what there is to gain. A sober estimate keeps the waiting as it is: a kernel takes the time of its busiest unit, and
on top of that the cycles in which that unit stood still. Whoever makes *another* unit's work shorter gains nothing then.
"""

from collections.abc import Mapping


def binding(shares: Mapping[str, float], near: float = 0.9) -> str:
    """The unit with the largest share if that is at least `near`, else "waiting"."""
    # region learner
    # A unit that is busy for 60 % of the time does not bind.
    unit = max(shares, key=shares.get)
    return unit if shares[unit] >= near else "waiting"
    # endregion


def ceiling(shares: Mapping[str, float]) -> float:
    """How many times faster the same work could be if nobody ever waited."""
    # region learner
    # Then the busiest unit works all the time.
    return 1 / max(shares.values())
    # endregion


def gain(shares: Mapping[str, float], factors: Mapping[str, float]) -> float:
    """Speed-up if the work of some units is multiplied by a factor (0.75: a quarter less) and the waiting stays.

    Args:
        factors: only the units that change.
    """
    # region learner
    # All in shares of the old time: the waiting is 1 - the largest share. What is the largest share
    # of work afterwards?
    waiting = 1 - max(shares.values())
    return 1 / (waiting + max(share * factors.get(unit, 1) for unit, share in shares.items()))
    # endregion
