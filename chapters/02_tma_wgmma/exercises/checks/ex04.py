import numpy as np

from fa3_course.checker import Exercise

EXERCISE = Exercise(
    "02.4",
    "ex04_tma_refuses.py",
    functions={"tma_refuses": 1},
    hints=(
        "Write the rules as (answer, holds) pairs in the table's order and return the first that does not hold.",
        "`strides[:-1]` are the outer strides; times element_bytes they are bytes. The last side of the box is a row.",
        "Two 16-bit rows 100 elements apart are 200 bytes apart: no multiple of 16. 64 columns of 16 bits are 128 bytes: "
        "as long as the widest swizzle.",
    ),
)


def draw(t, dims=None):
    """A contiguous tensor and a box that TMA takes, as keyword arguments."""
    dims = dims or int(t.rng.integers(1, 6))
    size = int(t.rng.choice([1, 2, 4, 8]))
    shape = (*map(int, t.rng.integers(1, 300, dims - 1)), 16 * int(t.rng.integers(1, 9)))
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(dims))
    swizzle = int(t.rng.choice([0, 32, 64, 128]))
    widest = (swizzle or 128) // 16
    row = 16 * int(t.rng.integers(1, widest + 1)) // size
    box = (*map(int, t.rng.integers(1, 257, dims - 1)), row)
    return {
        "address": 16 * int(t.rng.integers(0, 2**30)),
        "shape": shape,
        "strides": strides,
        "box": box,
        "element_bytes": size,
        "swizzle_bytes": swizzle,
    }


def compare(t, tma_refuses, case, want):
    got = tma_refuses(*case.values())
    t.expect(got == want, f"{case}: {got!r}, expected {want!r}")


def replaced(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


@EXERCISE.holds("what TMA takes is not refused", 'return "" when every rule holds')
def _(t, tma_refuses):
    for dims in (1, 2, 3, 4, 5):
        for _ in range(4):
            compare(t, tma_refuses, draw(t, dims), "")


@EXERCISE.holds("the attention tensors of this course", "views and slices keep the strides of what they are cut from")
def _(t, tma_refuses):
    b, s, h, d = (int(x) for x in (t.rng.integers(1, 5), t.rng.integers(1, 999), t.rng.integers(1, 9), 128))
    q = {"address": 256, "shape": (b, s, h, d), "strides": (s * h * d, h * d, d, 1), "box": (1, 128, 1, 64)}
    q |= {"element_bytes": 2, "swizzle_bytes": 128}
    compare(t, tma_refuses, q, "")
    compare(t, tma_refuses, q | {"box": (1, 128, 1, 128)}, "swizzle")
    compare(t, tma_refuses, q | {"strides": (3 * s * h * d, 3 * h * d, d, 1)}, "")  # q of a packed qkv
    compare(t, tma_refuses, q | {"shape": (b, s, h, 100), "strides": (s * h * 100, h * 100, 100, 1)}, "stride")
    compare(t, tma_refuses, q | {"address": 256 + 2 * 4}, "address")  # q[..., 4:]


@EXERCISE.holds("dimensions and extents", "at most five, and none of them empty")
def _(t, tma_refuses):
    case = draw(t, 3)
    six = {name: (1,) * 3 + case[name] for name in ("shape", "box")} | {
        "strides": (case["strides"][0],) * 3 + case["strides"]
    }
    compare(t, tma_refuses, case | six, "dimensions")
    compare(t, tma_refuses, case | {"box": case["box"][1:]}, "dimensions")
    at = int(t.rng.integers(0, 3))
    compare(t, tma_refuses, case | {"shape": replaced(case["shape"], at, 0)}, "extent")
    compare(t, tma_refuses, case | {"shape": replaced(case["shape"], at, 2**32 + 1)}, "extent")
    compare(t, tma_refuses, case | {"shape": replaced(case["shape"], at, 2**32)}, "")


@EXERCISE.holds("strides count in bytes", "elements times element_bytes: 8 elements are enough in fp16, 16 in fp8")
def _(t, tma_refuses):
    for size in (1, 2, 4):
        case = draw(t, 3) | {"element_bytes": size, "swizzle_bytes": 0}
        case["box"] = (8, 8, 32)
        step = 16 // size
        good, odd = step * int(t.rng.integers(100, 999)), step // 2 + step * int(t.rng.integers(100, 999))
        compare(t, tma_refuses, case | {"strides": (good, step, 1)}, "")
        compare(t, tma_refuses, case | {"strides": (odd, step, 1)}, "stride")
        compare(t, tma_refuses, case | {"strides": (good, odd, 1)}, "stride")
        compare(t, tma_refuses, case | {"strides": (2**40 // size, step, 1)}, "stride")
        compare(t, tma_refuses, case | {"strides": (good, 1, step)}, "inner stride")


@EXERCISE.holds(
    "boxes: sides, rows, swizzle", "256 elements per side; the last side in bytes, against 16 and the swizzle"
)
def _(t, tma_refuses):
    case = draw(t, 2) | {"element_bytes": 2, "swizzle_bytes": 0}
    for side, want in ((256, ""), (257, "box side"), (0, "box side")):
        compare(t, tma_refuses, case | {"box": (side, 64)}, want)
    compare(t, tma_refuses, case | {"box": (8, 256)}, "")
    compare(t, tma_refuses, case | {"box": (8, 264)}, "box side")
    compare(t, tma_refuses, case | {"box": (8, 12)}, "box row")
    for swizzle in (32, 64, 128):
        compare(t, tma_refuses, case | {"box": (8, swizzle // 2), "swizzle_bytes": swizzle}, "")
        compare(t, tma_refuses, case | {"box": (8, swizzle // 2 + 8), "swizzle_bytes": swizzle}, "swizzle")


@EXERCISE.holds("several broken rules: the first of the table", "keep the table's order")
def _(t, tma_refuses):
    case = {
        "address": 8,
        "shape": (0, 64),
        "strides": (9, 2),
        "box": (300, 28),
        "element_bytes": 2,
        "swizzle_bytes": 32,
    }
    mends = (  # one after the other; each uncovers the next broken rule
        ("address", {"address": 16 * int(t.rng.integers(1, 99))}),
        ("extent", {"shape": (int(t.rng.integers(1, 99)), 64)}),
        ("inner stride", {"strides": (9, 1)}),
        ("stride", {"strides": (64, 1)}),
        ("box side", {"box": (8, 28)}),
        ("box row", {"box": (8, 32)}),
        ("swizzle", {"swizzle_bytes": 64}),
    )
    for answer, mend in mends:
        compare(t, tma_refuses, case, answer)
        case |= mend
    compare(t, tma_refuses, case, "")
