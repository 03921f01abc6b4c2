import numpy as np

from fa3_course.checker import Exercise

EXERCISE = Exercise(
    "04.10",
    "ex10_prmt.py",
    functions={"prmt": 1, "take_apart": 1, "turn": 1},
    hints=(
        "Digit i of the selector is `selector >> 4 * i & 0xF`; the chosen byte is `both >> 8 * digit & 0xFF`, and goes to bit 8 * i.",
        "take_apart: bytes 0, 2, 4, 6 and bytes 1, 3, 5, 7, each selector written from the right.",
        "turn: 0x5140 of keys 0 and 1 gives k0 d0, k1 d0, k0 d1, k1 d1. The same of keys 2 and 3; 0x7362 has the other two dims. "
        "Then 0x5410 and 0x7632 put halves together.",
    ),
)


def words(t, *shape):
    return t.rng.integers(0, 2**32, shape, dtype=np.uint32)


def four_bytes(register):
    return list(int(register).to_bytes(4, "little"))


def permuted(low, high, selector):
    """One pair of registers, on lists of bytes."""
    source, result = four_bytes(low) + four_bytes(high), []
    for digit in f"{selector:04x}"[::-1]:
        byte = source[int(digit, 16) % 8]
        result.append((255 if byte > 127 else 0) if int(digit, 16) > 7 else byte)
    return int.from_bytes(result, "little")


class Prmt:
    """A right one for the other two functions, which counts."""

    def __init__(self):
        self.count = 0

    def __call__(self, low, high, selector):
        self.count += 1
        return np.vectorize(permuted, otypes=[np.uint32])(low, high, selector)


def compare(t, got, want, what):
    got, want = np.asarray(got), np.asarray(want, dtype=np.uint32)
    t.expect(
        got.dtype == np.uint32 and got.shape == want.shape,
        f"{what}: {got.dtype} {got.shape}, expected uint32 {want.shape}",
    )
    if (got != want).any():
        at = np.unravel_index((got != want).argmax(), want.shape)
        t.expect(False, f"{what}: 0x{got[at]:08X}, expected 0x{want[at]:08X}")


def check_prmt(t, prmt, selectors):
    for selector in map(int, selectors):
        for shape in ((5,), (5,), (2, 3)):
            low, high = words(t, *shape), words(t, *shape)
            want = [permuted(a, b, selector) for a, b in zip(low.ravel(), high.ravel(), strict=True)]
            compare(t, prmt(low, high, selector), np.reshape(want, shape), f"prmt with selector 0x{selector:04X}")


@EXERCISE.holds("prmt: every byte of both registers can be chosen", "digits 0 to 3 are bytes of low, 4 to 7 of high")
def _(t, prmt, take_apart, turn):
    check_prmt(t, prmt, [0x3210, 0x7654, 0x0123, 0x4567, 0x6420, 0x0000])
    check_prmt(t, prmt, [int("".join(map(str, digits)), 16) for digits in t.rng.integers(0, 8, (8, 4))])


@EXERCISE.holds(
    "prmt: a digit of 8 and more gives the sign of its byte", "the same byte as the digit less 8; 0x00 or 0xFF"
)
def _(t, prmt, take_apart, turn):
    check_prmt(t, prmt, [0x8888, 0xFEDC, 0xBA98, *t.rng.integers(0, 2**16, 12)])


@EXERCISE.holds("take_apart sorts pairs by head dim, with two permutes", "even bytes of both, odd bytes of both")
def _(t, prmt, take_apart, turn):
    for shape in ((2,), (6, 2)):
        registers, permute = words(t, *shape), Prmt()
        pairs = registers.astype("<u4").view(np.uint8).reshape(*shape[:-1], 4, 2)  # (keys, dims)
        want = np.ascontiguousarray(np.swapaxes(pairs, -1, -2)).view("<u4")[..., 0]
        compare(t, take_apart(registers, permute), want, "take_apart")
        t.expect(permute.count <= 2, f"{permute.count} permutes, two must do")


@EXERCISE.holds("turn transposes 4 x 4 bytes", "register i of the result has byte i of every key")
def _(t, prmt, take_apart, turn):
    for shape in ((4,), (7, 4), (2, 3, 4)):
        registers = words(t, *shape)
        matrix = registers.astype("<u4").view(np.uint8).reshape(*shape, 4)
        want = np.ascontiguousarray(np.swapaxes(matrix, -1, -2)).view("<u4")[..., 0]
        compare(t, turn(registers, Prmt()), want, "turn")


@EXERCISE.holds("turn needs eight permutes", "two rounds of four: pairs of bytes first, then halves")
def _(t, prmt, take_apart, turn):
    permute = Prmt()
    turn(words(t, 3, 4), permute)
    t.expect(0 < permute.count <= 8, f"{permute.count} permutes, eight must do")


@EXERCISE.holds("your prmt drives both", "turned twice is as before")
def _(t, prmt, take_apart, turn):
    for _ in range(3):
        registers = words(t, 5, 4)
        compare(t, turn(turn(registers, prmt), prmt), registers, "turned twice")
        pairs = words(t, 5, 2)
        compare(t, take_apart(pairs, prmt), take_apart(pairs, Prmt()), "take_apart with your prmt")
