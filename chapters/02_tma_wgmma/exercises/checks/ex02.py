from fa3_course.checker import Exercise

EXERCISE = Exercise(
    "02.2",
    "ex02_fragment.py",
    functions={"owner": 2, "element": 2, "partners": 1},
    hints=(
        "row // 16 is the warp, row % 8 the quad, column % 8 // 2 the thread of the quad.",
        "thread = 32 * warp + 4 * quad + pair; register = 4 * (column // 8) + 2 * (lower row?) + column % 2. "
        "The row is a lower one when row % 16 >= 8.",
        "Inverse: register % 2 is the column's last bit, register // 2 % 2 says whether 8 is added to the row, "
        "register // 4 is the group of 8 columns. The partners of a thread have the same thread // 4.",
    ),
)


def fragments(columns):
    """(row, column) -> (thread, register), by dealing elements out as the rules say it."""
    held = {}
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        quad, place = divmod(lane, 4)
        count = 0
        for group in range(0, columns, 8):
            for row in (16 * warp + quad, 16 * warp + quad + 8):
                for column in (group + 2 * place, group + 2 * place + 1):
                    held[row, column] = (thread, count)
                    count += 1
    return held


@EXERCISE.holds("threads of the first 8 columns", "32 * warp + 4 * (row % 8) + column // 2")
def _(t, owner, element, partners):
    for (row, column), (thread, _) in fragments(8).items():
        got = owner(row, column)[0]
        t.expect(got == thread, f"element ({row}, {column}): thread {got}, expected {thread}")


@EXERCISE.holds("registers of 64 x 128 elements", "columns of the pair, then rows, then groups of 8 columns")
def _(t, owner, element, partners):
    for (row, column), (thread, register) in fragments(128).items():
        got = tuple(owner(row, column))
        want = (thread, register)
        t.expect(got == want, f"element ({row}, {column}): (thread, register) {got}, expected {want}")


@EXERCISE.holds("the way back", "element(*owner(row, column)) is (row, column) again")
def _(t, owner, element, partners):
    for (row, column), (thread, register) in fragments(64).items():
        got = tuple(element(thread, register))
        t.expect(got == (row, column), f"thread {thread}, register {register}: element {got}, expected {(row, column)}")


@EXERCISE.holds("partners hold the same rows, and nobody else does", "four threads share a row; you are one of them")
def _(t, owner, element, partners):
    held = fragments(16)
    for thread in map(int, t.rng.integers(0, 128, 8)):
        rows = {row for (row, _), (who, _) in held.items() if who == thread}
        want = {who for (row, _), (who, _) in held.items() if row in rows} - {thread}
        got = set(partners(thread))
        t.expect(got == want, f"partners of thread {thread}: {sorted(got)}, expected {sorted(want)}")
