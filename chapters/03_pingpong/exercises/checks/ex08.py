from fa3_course.checker import Exercise
from fa3_course.simulated import parts

EXERCISE = Exercise(
    "03.8",
    "ex08_pairs.py",
    functions={"pair": 1, "walk": 1},
    hints=(
        "A sequence has (m_blocks + 1) // 2 pairs.",
        "short = unit % pairs, sequence = unit // pairs, long = m_blocks - 1 - short; where both are equal there is one tile.",
        "walk: `for unit in range(cta, sequences * pairs, ctas)`, all tiles of pair(unit, m_blocks).",
    ),
)


def draw(t):
    return tuple(int(t.rng.integers(*span)) for span in ((1, 20), (1, 12), (1, 40)))


@EXERCISE.holds("a pair: mirror images of one sequence, long one first", "m and m_blocks - 1 - m")
def _(t, pair, walk):
    for _ in range(10):
        half, sequence = int(t.rng.integers(1, 10)), int(t.rng.integers(0, 9))
        short = int(t.rng.integers(0, half))
        got = [tuple(tile) for tile in pair(sequence * half + short, 2 * half)]
        want = [(2 * half - 1 - short, sequence), (short, sequence)]
        t.expect(got == want, f"unit {sequence * half + short}, {2 * half} tiles: {got}, expected {want}")


@EXERCISE.holds("an odd number of tiles: the middle one is alone", "(m_blocks + 1) // 2 units, the last with one tile")
def _(t, pair, walk):
    for half in (0, 1, int(t.rng.integers(2, 9))):
        got = [tuple(tile) for tile in pair(half, 2 * half + 1)]
        t.expect(got == [(half, 0)], f"unit {half} of {2 * half + 1} tiles: {got}, expected {[(half, 0)]}")


@EXERCISE.holds("every tile once, whatever the number of CTAs", "units c, c + ctas, c + 2 ctas, ...")
def _(t, pair, walk):
    for _ in range(10):
        m_blocks, sequences, ctas = draw(t)
        seen = sorted(tuple(tile) for cta in range(ctas) for tile in walk(m_blocks, sequences, cta, ctas))
        want = sorted((m, s) for m in range(m_blocks) for s in range(sequences))
        what = f"{m_blocks} tiles, {sequences} sequences, {ctas} CTAs"
        t.expect(seen == want, f"{what}: {len(seen)} tiles, {len(set(seen))} different ones; expected {len(want)}")


@EXERCISE.holds(
    "the order of the course's kernel", "tiles of one sequence are neighbours in time: they share K and V in L2"
)
def _(t, pair, walk):
    for _ in range(6):
        m_blocks, sequences, ctas = draw(t)
        for cta in range(ctas):
            got = [tuple(tile) for tile in walk(m_blocks, sequences, cta, ctas)]
            want = parts.walk(m_blocks, sequences, True, cta, ctas)
            what = f"{m_blocks} tiles, {sequences} sequences, CTA {cta} of {ctas}"
            t.expect(got == want, f"{what}: {got[:6]} ..., expected {want[:6]} ...")


@EXERCISE.holds("balance: no CTA has more than one pair more than another", "pairs are equally long")
def _(t, pair, walk):
    for _ in range(6):
        half, sequences, ctas = (int(t.rng.integers(*span)) for span in ((1, 10), (1, 12), (1, 30)))
        loads = [sum(m + 1 for m, _ in walk(2 * half, sequences, cta, ctas)) for cta in range(ctas)]
        t.expect(max(loads) - min(loads) <= 2 * half + 1, f"{2 * half} tiles, {sequences} sequences: loads {loads}")
