import numpy as np

from fa3_course.checker import Exercise
from fa3_course.checker.counting import counting

EXERCISE = Exercise(
    "04.7",
    "ex07_hadamard.py",
    functions={"hadamard": 1, "rotate": 1},
    hints=(
        "The rounds may come in any order: each uses one bit of the index.",
        "x.reshape(..., d // (2 * half), 2, half): axis -2 tells the two partners apart. np.stack puts them together again.",
        "low + high goes where low was, low - high where high was; divide by np.sqrt(d) once, at the end.",
    ),
)


def matrix(d):
    """Element by element."""
    return np.array([[(-1) ** (i & j).bit_count() for j in range(d)] for i in range(d)]) / np.sqrt(d)


def flips(t, d):
    return t.rng.choice([-1.0, 1.0], d)


@EXERCISE.holds("the Hadamard matrix, for any power of two", "sum and difference, one round per bit of the index")
def _(t, hadamard, rotate):
    for d in (1, 2, 4, 16, 64, 256):
        x = t.normal(3, d)
        t.close(hadamard(x), x @ matrix(d), f"hadamard of {d} channels")
    x = t.normal(2, 3, 2, 8)
    t.close(hadamard(x), x @ matrix(8), "hadamard of a (batch, seqlen, heads, d) array")


@EXERCISE.holds("lengths stay, and twice is nothing", "divide by sqrt(d): then the matrix is its own inverse")
def _(t, hadamard, rotate):
    for d in (32, 128):
        x = t.normal(4, d)
        once = np.asarray(hadamard(x))
        t.close(np.linalg.norm(once, axis=1), np.linalg.norm(x, axis=1), "length of the rows")
        t.close(hadamard(once), x, "the transform of the transform")


@EXERCISE.holds("d log2 d additions per row and no matrix product", "log2 d rounds of d sums or differences")
def _(t, hadamard, rotate):
    for d in (16, 128):
        tally, (x,) = counting(t.normal(4, d))
        hadamard(x)
        seen = tally.elements
        products = [name for name in ("matmul", "dot", "einsum", "tensordot", "inner", "vecmat") if seen[name]]
        t.expect(not products, f"it uses {', '.join(products)}")
        sums, allowed = seen["add"] + seen["subtract"], 4 * d * (d.bit_length() - 1)
        t.expect(0 < sums <= allowed, f"{sums} sums and differences for 4 rows of {d}, allowed {allowed}")
        t.expect(seen["multiply"] + seen["divide"] <= 8 * d, f"{seen['multiply']} multiplications for 4 rows of {d}")


@EXERCISE.holds("a length that is no power of two is refused by name", "raise ValueError, and say d in its message")
def _(t, hadamard, rotate):
    for d in (3, 96, 192):
        try:
            hadamard(t.normal(2, d))
        except ValueError as refusal:
            t.expect(str(d) in str(refusal), f"the message does not say {d}: {refusal}")
        else:
            t.expect(False, f"{d} channels were accepted")


@EXERCISE.holds("signs first, then the transform", "x * signs goes into hadamard")
def _(t, hadamard, rotate):
    for d in (8, 64):
        x, signs = t.normal(5, d), flips(t, d)
        t.close(rotate(x, signs), (x * signs) @ matrix(d), "rotated rows")


@EXERCISE.holds("the scores stay as they are", "an orthogonal matrix, the same for Q and K")
def _(t, hadamard, rotate):
    q, k, signs = t.normal(6, 128), t.normal(9, 128), flips(t, 128)
    q[:, t.rng.integers(128)] *= 100
    t.close(np.asarray(rotate(q, signs)) @ np.asarray(rotate(k, signs)).T, q @ k.T, "scores")


@EXERCISE.holds("a loud channel is spread, a row of equal values is no spike", "sqrt(d) into all channels; signs first")
def _(t, hadamard, rotate):
    spike, signs = np.zeros((1, 64)), flips(t, 64)
    spike[0, t.rng.integers(64)] = 80.0
    t.close(np.abs(rotate(spike, signs)), np.full((1, 64), 10.0), "magnitudes after one loud channel")
    # 64 equal values with these signs have exactly the same share in every row of the matrix
    bent = np.array([(-1.0) ** ((i >> 3) & i).bit_count() for i in range(64)])
    t.close(np.abs(rotate(np.full((1, 64), 5.0), bent)), np.full((1, 64), 5.0), "magnitudes after 64 equal values")
