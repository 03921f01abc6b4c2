import itertools

import numpy as np

from fa3_course.checker import Exercise

EXERCISE = Exercise(
    "02.3",
    "ex03_box.py",
    functions={"tma_load": 2},
    hints=(
        "Begin with np.zeros(box, tensor.dtype), and copy the part that exists.",
        "In one dimension, coordinates max(at, 0) .. min(at + box, extent) - 1 exist; in the box they begin at "
        "max(at, 0) - at. Build a tuple of slices for each side. Mind boxes of which nothing exists.",
        "The bytes are those of the whole box, zeros included: np.prod(box) * tensor.itemsize.",
    ),
)


def truth(tensor, at, box):
    """Element by element."""
    tile = np.zeros(box, tensor.dtype)
    for inside in itertools.product(*map(range, box)):
        place = tuple(a + i for a, i in zip(at, inside, strict=True))
        if all(0 <= p < n for p, n in zip(place, tensor.shape, strict=True)):
            tile[inside] = tensor[place]
    return tile


def compare(t, tma_load, tensor, at, box):
    what = f"tensor {tensor.shape} {tensor.dtype}, box {box} at {at}"
    tile, nbytes = tma_load(tensor, at, box)
    want = truth(tensor, at, box)
    t.expect(np.asarray(tile).dtype == tensor.dtype, f"{what}: dtype {np.asarray(tile).dtype}; TMA converts nothing")
    t.close(np.asarray(tile).astype(np.float64), want.astype(np.float64), f"tile of {what}", tolerance=0.0)
    t.expect(nbytes == want.nbytes, f"{what}: {nbytes} bytes, expected {want.nbytes}")


def draw(t, dims, dtype=np.float16):
    shape = tuple(map(int, t.rng.integers(2, 7, dims)))
    return t.rng.uniform(1, 9, shape).astype(dtype)


@EXERCISE.holds("a box inside the tensor", "a slice per dimension, at .. at + box")
def _(t, tma_load):
    compare(t, tma_load, draw(t, 2), (0, 1), (2, 1))
    compare(t, tma_load, t.rng.uniform(1, 9, (20, 40)).astype(np.float16), (3, 8), (16, 32))


@EXERCISE.holds("over the far edge: zeros, and the same bytes", "the barrier counts the whole box, not what exists")
def _(t, tma_load):
    for _ in range(6):
        tensor = draw(t, 2)
        at = tuple(int(t.rng.integers(0, n)) for n in tensor.shape)
        compare(t, tma_load, tensor, at, (6, 8))


@EXERCISE.holds(
    "over the near edge: negative coordinates", "tensor[-1:] is Python's last row; for TMA it does not exist"
)
def _(t, tma_load):
    for _ in range(6):
        tensor = draw(t, 2)
        compare(t, tma_load, tensor, (-int(t.rng.integers(1, 4)), -int(t.rng.integers(1, 4))), (5, 8))


@EXERCISE.holds("nothing of the box exists", "all zeros, all bytes: the barrier must not wait for ever")
def _(t, tma_load):
    tensor = draw(t, 2)
    for at in ((tensor.shape[0], 0), (0, tensor.shape[1] + 5), (-4, 0), (1, -9), (50, -50)):
        compare(t, tma_load, tensor, at, (4, 8))


@EXERCISE.holds(
    "one to five dimensions, bytes by dtype", "loop over the dimensions; 2 bytes in fp16, 1 in int8, 4 in fp32"
)
def _(t, tma_load):
    for dims, dtype in ((1, np.float16), (3, np.int8), (4, np.float16), (5, np.float32)):
        tensor = draw(t, dims, dtype)
        at = tuple(int(t.rng.integers(-2, n + 1)) for n in tensor.shape)
        compare(t, tma_load, tensor, at, tuple(map(int, t.rng.integers(1, 5, dims))))


@EXERCISE.holds(
    "a copy, not a view; fresh inputs, fresh results", "TMA writes into shared memory, not into your tensor"
)
def _(t, tma_load):
    tensor = t.normal(6, 8)
    for _ in range(3):
        tile, _ = tma_load(tensor, (1, 0), (4, 8))
        t.expect(not np.shares_memory(tile, tensor), "the tile shares memory with the tensor")
        compare(t, tma_load, tensor, (1, 0), (4, 8))
        tensor = t.refill(tensor)
