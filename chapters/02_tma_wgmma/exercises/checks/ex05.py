from fa3_course.checker import Exercise

EXERCISE = Exercise(
    "02.5",
    "ex05_ring.py",
    functions={"passes": 1, "ring": 3, "started_at_most": 1},
    hints=(
        "Play it on paper with 2 slots: loads 0, 1, 2, 3, 4 use slots 0, 1, 0, 1, 0; a slot's use is i // stages.",
        "Use u of a slot completes phase u of full: the consumer's bit is u % 2. The producer waits until use u - 1 has been "
        "freed, which completes phase u - 1 of empty: its bit is (u - 1) % 2, and that is 1 for u = 0.",
        "`passes`: bit == (completed - 1) % 2. `started_at_most`: the ring holds `stages` loads that nobody has freed.",
    ),
)


class Barrier:
    """Counts phases, and lets a wait pass as PTX has it: while the open phase's parity is the other one."""

    def __init__(self):
        self.open = 0

    def passes(self, bit):
        return self.open & 1 != bit


def play(t, ring, stages, loads, first=0):
    """A producer and a consumer take turns; every wait must block before its time and pass at it."""
    full, empty = ([Barrier() for _ in range(stages)] for _ in range(2))
    for i in range(first + loads):
        slot, at_empty, at_full = ring(i, stages)
        where = f"load {i} of a ring of {stages}"
        t.expect(slot == i % stages, f"{where}: slot {slot}, expected {i % stages}")
        t.expect(at_empty in (0, 1) and at_full in (0, 1), f"{where}: bits {at_empty}, {at_full}; a bit is 0 or 1")
        if i >= stages:
            t.expect(
                not empty[slot].passes(at_empty),
                f"{where}: the producer passes before use {i // stages - 1} of slot {slot} is freed",
            )
            empty[slot].open += 1
        t.expect(empty[slot].passes(at_empty), f"{where}: the producer hangs although slot {slot} is free")
        t.expect(not full[slot].passes(at_full), f"{where}: the consumer reads before the tile has landed")
        full[slot].open += 1
        t.expect(full[slot].passes(at_full), f"{where}: the consumer hangs although the tile has landed")


@EXERCISE.holds("a wait passes on the parity of the latest completed phase", "and on a fresh barrier on 1")
def _(t, passes, ring, started_at_most):
    for completed in (0, 1, 2, 3, *map(int, t.rng.integers(4, 10**6, 6))):
        barrier = Barrier()
        barrier.open = completed
        for bit in (0, 1):
            got = passes(bit, completed)
            t.expect(
                got in (True, False) and bool(got) == barrier.passes(bit),
                f"wait({bit}) after {completed} phases: {got}, expected {barrier.passes(bit)}",
            )


@EXERCISE.holds("the first round: the producer passes at once, the consumer waits", "empty: bit 1; full: bit 0")
def _(t, passes, ring, started_at_most):
    stages = int(t.rng.integers(1, 9))
    play(t, ring, stages, stages)


@EXERCISE.holds("one slot: the bits flip at every load", "each load is a new use of slot 0")
def _(t, passes, ring, started_at_most):
    play(t, ring, 1, 9)


@EXERCISE.holds("several slots: the bits flip once per round", "i // stages, not i, is the use of a slot")
def _(t, passes, ring, started_at_most):
    for stages in (2, 3, 4, 7):
        play(t, ring, stages, 6 * stages + 1)


@EXERCISE.holds("the ring goes on after hundreds of loads", "count loads over the whole life of the ring, never anew")
def _(t, passes, ring, started_at_most):
    play(t, ring, int(t.rng.integers(2, 7)), int(t.rng.integers(300, 600)))


@EXERCISE.holds("how far the producer can be ahead", "a slot is used again only after it has been freed")
def _(t, passes, ring, started_at_most):
    for _ in range(10):
        freed, stages = int(t.rng.integers(0, 500)), int(t.rng.integers(1, 9))
        started = 0
        while started < stages or started - stages < freed:  # the use before of its slot was load started - stages
            started += 1
        got = started_at_most(freed, stages)
        t.expect(got == started, f"{freed} loads freed, {stages} slots: {got} loads started, expected {started}")
