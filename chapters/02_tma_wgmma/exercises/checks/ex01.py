from collections import Counter

from fa3_course.checker import Exercise

EXERCISE = Exercise(
    "02.1",
    "ex01_swizzle.py",
    functions={"address": 1, "turns": 1},
    hints=(
        "Without a swizzle the element begins at byte 128 * row + element_bytes * column.",
        "Bits 7..9 are the row modulo 8. Shift them down by 3 and they stand over bits 4..6: `(b >> 3) & 0x70`.",
        "`address`: `b ^ ((b >> 3) & 0x70)`. `turns`: the set of words {a // 4 + i, i = 0..3}; count them per `word % 32`; "
        "the largest count is the answer.",
    ),
)


def truth(row, column, size):
    """Chunk by chunk: chunk c of row r lies at place c ^ (r % 8)."""
    chunk, inside = divmod(column * size, 16)
    return 128 * row + 16 * (chunk ^ row % 8) + inside


def compare(t, address, size, rows):
    for row in rows:
        for column in range(128 // size):
            got, want = address(row, column, size), truth(row, column, size)
            t.expect(got == want, f"element ({row}, {column}) of {size} bytes: byte {got}, expected {want}")


@EXERCISE.holds("rows 0 to 7, 16-bit elements", "chunk c of row r lies at place c ^ (r % 8)")
def _(t, address, turns):
    compare(t, address, 2, range(8))


@EXERCISE.holds("the pattern repeats after 8 rows", "bits above 9 must not change anything: mask with 0x70")
def _(t, address, turns):
    compare(t, address, 2, map(int, t.rng.integers(8, 256, 6)))


@EXERCISE.holds("8-bit and 32-bit elements, too", "the swizzle moves bytes: it acts on the address, not on the column")
def _(t, address, turns):
    compare(t, address, 1, map(int, t.rng.integers(0, 64, 4)))
    compare(t, address, 4, map(int, t.rng.integers(0, 64, 4)))


@EXERCISE.holds("a tile stays a tile: no two elements share a place", "an exclusive or with the row is its own inverse")
def _(t, address, turns):
    for size in (1, 2, 4):
        places = {address(row, column, size) for row in range(16) for column in range(128 // size)}
        t.expect(places == set(range(0, 16 * 128, size)), f"{size}-byte elements: 16 rows do not fill 2048 bytes")


@EXERCISE.holds(
    "turns: the fullest bank decides", "one bank serves one word per turn; different banks work side by side"
)
def _(t, address, turns):
    for _ in range(20):
        addresses = [16 * int(a) for a in t.rng.integers(0, 200, t.rng.integers(1, 33))]
        words = {a + 4 * i for a in addresses for i in range(4)}
        want = max(Counter(word // 4 % 32 for word in words).values())
        got = turns(addresses)
        t.expect(got == want, f"addresses {addresses}: {got} turns, expected {want}")


@EXERCISE.holds("one word is read once, for whoever wants it", "accesses to the same address are served together")
def _(t, address, turns):
    here = 16 * int(t.rng.integers(0, 1000))
    t.expect(turns([here] * 8) == 1, f"8 accesses to byte {here}: {turns([here] * 8)} turns, expected 1")
    t.expect(turns([here, here + 128, here]) == 2, "two rows of one column, one of them twice: expected 2 turns")


@EXERCISE.holds("a swizzled column of 8 rows takes 1 turn, a plain one 8", "put your two functions together")
def _(t, address, turns):
    column = 8 * int(t.rng.integers(0, 8))
    swizzled, plain = (
        turns([address(row, column, 2) for row in range(8)]),
        turns([128 * r + 2 * column for r in range(8)]),
    )
    t.expect((swizzled, plain) == (1, 8), f"{swizzled} turns with the swizzle and {plain} without, expected 1 and 8")
