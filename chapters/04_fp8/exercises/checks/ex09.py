import numpy as np

from fa3_course.checker import Exercise

EXERCISE = Exercise(
    "04.9",
    "ex09_key_order.py",
    functions={"key_order": 1, "rename": 1},
    hints=(
        "Lane q has eight keys and eight positions, so two digits of each name are free: j and e on one side, h and b on the other.",
        "e becomes the lower bit of b: b = 2 * (j % 2) + e and h = j // 2. So position = 16 * (j // 2) + 4 * q + 2 * (j % 2) + e.",
        "Register 4 j + 2 r + e has the binary digits (j1, j0, r, e), byte 4 (2 h + r) + b has (h, r, b1, b0): "
        "with h = j1 and b = (j0, e) the two in the middle change places.",
    ),
)


def dealt(p):
    """P `(8 quads, 2 rows, 32 keys)` -> what 8 x 4 lanes hold: `(8, 4, 16)`."""
    held = np.empty((8, 4, 16))
    for q, j, r, e in np.ndindex(4, 4, 2, 2):
        held[:, q, 4 * j + 2 * r + e] = p[:, r, 8 * j + 2 * q + e]
    return held


def read(operand):
    """What the tensor core reads from 8 x 4 lanes' bytes `(8, 4, 16)`: `(8, 2, 32 positions)`."""
    a = np.empty((8, 2, 32))
    for q, h, r, b in np.ndindex(4, 2, 2, 4):
        a[:, r, 16 * h + 4 * q + b] = operand[:, q, 4 * (2 * h + r) + b]
    return a


def order_of(t, key_order, keys):
    order = np.asarray(key_order(keys))
    t.expect(
        order.shape == (keys,) and order.dtype.kind in "iu", f"{order.dtype} {order.shape}, expected {keys} integers"
    )
    return order


@EXERCISE.holds("each group of 32 keys keeps its keys", "every key once, inside its own group")
def _(t, key_order, rename):
    for keys in (32, 96, 224):
        order = order_of(t, key_order, keys).reshape(-1, 32)
        for group, part in enumerate(order):
            missing = sorted(set(range(32 * group, 32 * group + 32)) - set(part.tolist()))
            t.expect(not missing, f"{keys} keys, group {group}: keys {missing} have no position")


@EXERCISE.holds("each lane's positions have that lane's keys", "key 8 j + 2 q + e belongs to a position 16 h + 4 q + b")
def _(t, key_order, rename):
    for position, key in enumerate(order_of(t, key_order, 64)):
        wanted_by, held_by = position % 16 // 4, key % 8 // 2
        t.expect(
            wanted_by == held_by,
            f"position {position} is lane {wanted_by}'s, key {key} there is held by lane {held_by}",
        )


@EXERCISE.holds("rename only moves a lane's own values", "the same 16 values in each lane")
def _(t, key_order, rename):
    held = t.normal(3, 4, 16)
    got = np.asarray(rename(held))
    t.expect(got.shape == held.shape, f"shape {got.shape}, expected {held.shape}")
    t.close(np.sort(got, axis=-1), np.sort(held, axis=-1), "sorted values of each lane", tolerance=0)


@EXERCISE.holds("the two rows do not mix", "byte 4 (2 h + r) + b: registers 0, 1, 4, 5 ... are row 0")
def _(t, key_order, rename):
    rows = np.broadcast_to(np.arange(16) // 2 % 2, (2, 16)).astype(float)
    got = np.asarray(rename(rows.copy()))
    want = np.broadcast_to(np.arange(16) // 4 % 2, (2, 16))
    t.close(got, want, "row of each operand byte", tolerance=0)


@EXERCISE.holds("P V is right, without a lane reading another's registers", "order and rename must fit together")
def _(t, key_order, rename):
    for groups in (1, 4):
        p, v = t.normal(8, 2, 32 * groups), t.normal(32 * groups, 6)
        order, out = order_of(t, key_order, 32 * groups), 0
        for g in range(groups):
            operand = rename(dealt(p[:, :, 32 * g : 32 * g + 32]))
            out = out + read(np.asarray(operand)) @ v[order][32 * g : 32 * g + 32]
        t.close(out, p @ v, f"P V over {groups} groups of 32 keys")


@EXERCISE.holds("fresh inputs give fresh results", "right in call 1 and wrong later: something is kept between calls")
def _(t, key_order, rename):
    for _ in range(3):
        p, v = t.normal(8, 2, 32), t.normal(32, 6)
        t.close(read(np.asarray(rename(dealt(p)))) @ v[order_of(t, key_order, 32)], p @ v, "P V")
