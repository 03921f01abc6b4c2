"""# 02.5 The phase bits of a ring, by hand

*Difficulty 2 of 3, 12 minutes, needs a laptop*

A ring of slots has two mbarriers per slot: `full`, which completes a phase each time a tile has landed, and `empty`, which
completes one each time the tile has been read. Load number `i` (0, 1, 2, ...) uses the slots in turn. Before it, the
producer waits on `empty`; after it, the consumer waits on `full`.

`wait(bit)` takes the parity of a phase. Phases of a barrier are numbered 0, 1, 2, ...; the wait passes when the latest
*completed* phase has that parity. A fresh barrier has completed none, and acts as if phase "-1", with parity 1, had just
been completed.
"""


def passes(bit: int, completed: int) -> bool:
    """Whether `wait(bit)` passes on a barrier that has completed so many phases."""
    # region learner
    # The latest completed phase has the number completed - 1.
    raise NotImplementedError("02.5 is yours to write")
    # endregion


def ring(i: int, stages: int) -> tuple[int, int, int]:
    """Slot of load i, the producer's bit for empty[slot], the consumer's bit for full[slot].

    Args:
        i: load number, counted over the whole life of the ring.
        stages: number of slots.
    """
    # region learner
    # How often has this slot been used before? The consumer waits for the phase of this use, the
    # producer for the one in which the use before was freed.
    raise NotImplementedError("02.5 is yours to write")
    # endregion


def started_at_most(freed: int, stages: int) -> int:
    """How many loads may have been started when the consumer has freed the first `freed` loads."""
    # region learner
    # How far ahead can a producer be?
    raise NotImplementedError("02.5 is yours to write")
    # endregion
