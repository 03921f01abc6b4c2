from fa3_course.checker import Exercise
from fa3_course.checker.trial import Refused

EXERCISE = Exercise(
    "03.1",
    "ex01_book.py",
    functions={"book": 3, "calls": 1},
    hints=(
        "Three numbers change: openings, counted threads, and those of them that wait.",
        "A barrier that opens sets counted and waiting back to 0. More threads than the count: raise ValueError.",
        "calls: `[('sync', 128), ('arrive', 128)]` for every turn; consumer 0's barrier has one more `('arrive', 128)`, first.",
    ),
)


def rounds_of(t, threads):
    """(calls, openings, counted, waiting), made round by round."""
    calls, openings = [], int(t.rng.integers(0, 5))
    for number in range(openings + 1):
        missing = threads // 32
        if number == openings:  # a last round that does not reach the count
            missing = int(t.rng.integers(0, missing))
        pieces = []
        while missing:
            size = int(t.rng.integers(1, missing + 1))
            pieces.append((str(t.rng.choice(["sync", "arrive"])), 32 * size))
            missing -= size
        calls += pieces
    return calls, openings, sum(n for _, n in pieces), sum(n for kind, n in pieces if kind == "sync")


@EXERCISE.holds("openings, counted and waiting threads, any calls", "the counts start again when the barrier opens")
def _(t, book, calls):
    for _ in range(20):
        threads = 64 * int(t.rng.integers(1, 9))
        made, *want = rounds_of(t, threads)
        got = book(threads, made)
        t.expect(list(got) == want, f"{threads} threads, {made}: {tuple(got)}, expected {tuple(want)}")


@EXERCISE.holds("too many threads are refused", "raise ValueError as soon as the count is exceeded")
def _(t, book, calls):
    for _ in range(5):
        made = [("sync", 128), ("arrive", 128)] * int(t.rng.integers(0, 4)) + [("arrive", 128), ("sync", 160)]
        try:
            got = book(256, made)
        except ValueError:
            continue
        raise Refused(f"288 threads at a barrier of 256 gave {got}; expected a ValueError")


@EXERCISE.holds("each turn: one wait of the owner, one arrival of the one before", "128 threads each, in every turn")
def _(t, book, calls):
    for me in (0, 1, 2):
        turns = int(t.rng.integers(1, 12))
        made = [tuple(call) for call in calls(me, turns)]
        want = {("sync", 128): turns, ("arrive", 128): turns + (me == 0)}
        got = {call: made.count(call) for call in made}
        t.expect(got == want, f"consumer {me}, {turns} turns: calls {got}, expected {want}")


@EXERCISE.holds(
    "every turn opens the barrier; consumer 0's is left with one arrival", "who opens the first turn of all?"
)
def _(t, book, calls):
    for me in (0, 1, 2):
        turns = int(t.rng.integers(1, 12))
        opened = counted = 0
        for _, n in calls(me, turns):
            counted += n
            opened, counted = opened + counted // 256, counted % 256
        want = (turns, 128 if me == 0 else 0)
        t.expect(
            (opened, counted) == want,
            f"consumer {me}, {turns} turns: {opened} openings, {counted} left; expected {want}",
        )


@EXERCISE.holds("a kernel without turns calls nobody", "with 0 turns only the opening is left")
def _(t, book, calls):
    for me, want in ((0, [("arrive", 128)]), (1, [])):
        got = [tuple(call) for call in calls(me, 0)]
        t.expect(got == want, f"consumer {me}, 0 turns: {got}, expected {want}")
