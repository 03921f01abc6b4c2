from fa3_course.checker import Exercise

EXERCISE = Exercise(
    "03.6",
    "ex06_counts.py",
    functions={"position": 2, "restart_is_harmless": 1},
    hints=(
        "The ring knows nothing of tiles: number all blocks from 0.",
        "count = sum(lengths[:tile]) + block; the slot is count % stages, the phase count // stages % 2.",
        "restart_is_harmless: position(stages, lengths, tile, 0) must be (0, 0) for every tile with lengths[tile] > 0.",
    ),
)


def walk(stages, lengths):
    """(tile, block, slot, phase) of every block, by turning the ring."""
    slot = phase = 0
    for tile, length in enumerate(lengths):
        for block in range(length):
            yield tile, block, slot, phase
            slot += 1
            if slot == stages:
                slot, phase = 0, 1 - phase


def draw(t, most=9):
    return int(t.rng.choice([1, 2, 3, 4])), [int(n) for n in t.rng.integers(0, most, t.rng.integers(2, 7))]


@EXERCISE.holds("every block of every tile, as the ring turns", "blocks of earlier tiles count")
def _(t, position, restart_is_harmless):
    for _ in range(10):
        stages, lengths = draw(t)
        for tile, block, *want in walk(stages, lengths):
            got = list(position(stages, lengths, tile, block))
            t.expect(
                got == want, f"{stages} slots, tiles {lengths}: block {block} of tile {tile}: {got}, expected {want}"
            )


@EXERCISE.holds("one tile: as in chapter 2", "slot i % stages, phase i // stages % 2")
def _(t, position, restart_is_harmless):
    for stages in (1, 2, 3, 4):
        n = int(t.rng.integers(9, 20))
        for _, block, *want in walk(stages, [n]):
            got = list(position(stages, [n], 0, block))
            t.expect(got == want, f"{stages} slots, block {block}: {got}, expected {want}")


@EXERCISE.holds(
    "whole double rounds forgive a restart, single rounds do not", "slot 0 is not enough: the phase bit, too"
)
def _(t, position, restart_is_harmless):
    for stages in (1, 2, 4):
        whole = [2 * stages * int(n) for n in t.rng.integers(1, 4, 4)]
        t.expect(bool(restart_is_harmless(stages, whole)), f"{stages} slots, tiles {whole}: a restart does no harm")
        single = [stages, *whole]
        t.expect(
            not restart_is_harmless(stages, single), f"{stages} slots, tiles {single}: the phase is wrong in tile 1"
        )


@EXERCISE.holds(
    "any lengths, empty tiles and last tiles", "an empty tile looks at no slot; after the last tile nobody does"
)
def _(t, position, restart_is_harmless):
    cases = [(2, [4, 0, 4, 3]), (2, [3, 0, 0]), (2, [0, 3]), (1, [2, 1]), (1, [1, 1])]
    for stages, lengths in cases + [draw(t, 5) for _ in range(20)]:
        want = all((slot, phase) == (0, 0) for _, block, slot, phase in walk(stages, lengths) if block == 0)
        got = bool(restart_is_harmless(stages, lengths))
        t.expect(got == want, f"{stages} slots, tiles {lengths}: {got}, expected {want}")
