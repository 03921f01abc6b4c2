"""# 03.1 The book of a named barrier

*Difficulty 1 of 3, 10 minutes, needs a laptop*

A named barrier counts threads. `bar.sync` adds its threads and makes them wait; `bar.arrive` adds its threads and lets them go
on. When the count is reached the barrier opens: those who wait go on, and the count starts at 0 again. Nothing else is kept:
no phase bit, no names. So every fault of a ping-pong is a fault of book-keeping.

Keep the book of one barrier. Then list the calls that consumer `me`'s own barrier sees in a whole kernel with ping-pong: its
owner waits there before each of its turns, with 128 threads; the consumer before it arrives there after each of its own turns,
with 128 threads; and somebody has to open the very first turn, which is consumer 0's.
"""

from collections.abc import Sequence

Call = tuple[str, int]  # "sync" or "arrive", and how many threads


def book(threads: int, calls: Sequence[Call]) -> tuple[int, int, int]:
    """What a barrier has done after some calls.

    Args:
        threads: the count that opens it. calls: in the order of time.

    Returns:
        how often it has opened, the threads counted since, and how many of those wait.

    Raises:
        ValueError: a call brings more threads than are missing: two rounds of the barrier have been mixed up.
    """
    # region learner
    # Add up, call by call; at the count everything but the number of openings starts anew.
    raise NotImplementedError("03.1 is yours to write")
    # endregion


def calls(me: int, turns: int) -> list[Call]:
    """The calls at the barrier of consumer `me` when every consumer takes `turns` turns, in an order that is possible."""
    # region learner
    # Who opens the first turn, and of whom? After the last turn it is passed on, too.
    raise NotImplementedError("03.1 is yours to write")
    # endregion
