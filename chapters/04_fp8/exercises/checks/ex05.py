import math

import numpy as np

from fa3_course.checker import Exercise, Refused

EXERCISE = Exercise(
    "04.5",
    "ex05_adder.py",
    functions={"kept": 1, "width": 1},
    hints=(
        "The leading bit of x is worth 2^(np.frexp(x)[1] - 1). The last kept bit is 2^bits smaller.",
        "np.trunc(term / step) * step, where step is the last kept bit of the larger of the two magnitudes.",
        "A sum of 2^e has its last bit at 2^(e - bits). Terms of 1 stop counting when that is 2: at a sum of 2^(bits + 1).",
    ),
)


def cut(term, total, bits):
    """The same on whole numbers, by shifting bits out."""
    shift = max(max(abs(term), abs(total)).bit_length() - 1 - bits, 0)
    return (abs(term) >> shift << shift) * (1 if term >= 0 else -1)


def compare(t, kept, terms, totals, bits):
    unit = 2.0 ** t.rng.integers(-20, 20)  # the window moves with the numbers
    got = np.asarray(kept(unit * np.array(terms, float), unit * np.array(totals, float), bits))
    t.expect(got.shape == (len(terms),), f"shape {got.shape}, expected {(len(terms),)}")
    for term, total, value in zip(terms, totals, got / unit, strict=True):
        want = cut(term, total, bits)
        t.expect(value == want, f"of {term} beside a sum of {total}, {bits} bits keep {value:g}, expected {want}")


def whole(t, low, high, count=40):
    """Whole numbers of every size from 2^low to 2^high."""
    return [int(x) for x in 2 ** t.rng.uniform(low, high, count)]


@EXERCISE.holds("bits below the window are cut, never rounded up", "trunc or floor, not rint")
def _(t, kept, width):
    for bits in (13, int(t.rng.integers(4, 20))):
        compare(t, kept, whole(t, 8, 20), whole(t, 20, 24), bits)


@EXERCISE.holds("terms inside the window pass whole, terms below it count nothing", "the window has bits + 1 bits")
def _(t, kept, width):
    for bits in (13, int(t.rng.integers(6, 20))):
        compare(t, kept, whole(t, 0, 6), [2**bits] * 40, bits)
        compare(t, kept, [1, 2, 3, 4] * 10, [2 ** (bits + 1)] * 20 + [2 ** (bits + 2)] * 20, bits)


@EXERCISE.holds("a term larger than the sum has the window", "align to the larger of the two")
def _(t, kept, width):
    compare(t, kept, whole(t, 20, 30), whole(t, 0, 20), 13)
    compare(t, kept, whole(t, 20, 30), [0] * 40, 13)


@EXERCISE.holds("negative terms are cut towards zero", "np.trunc; the window follows the magnitudes")
def _(t, kept, width):
    for signs in ((-1, 1), (1, -1), (-1, -1)):
        terms, totals = ([sign * x for x in whole(t, 8, 24)] for sign in signs)
        compare(t, kept, terms, totals, 13)


class Card:
    """A card that adds with `bits` bits, a hundred times and no more. It adds whole octaves at once, exactly."""

    def begin(self, bits):
        self.bits, self.runs = bits, 0

    def __call__(self, term, count):
        self.runs += 1
        if self.runs > 100:
            raise Refused(f"a hundred runs have not found the {self.bits} bits; does the count double?")
        whole_term, unit = int(math.ldexp(math.frexp(term)[0], 53)), 2.0 ** (math.frexp(term)[1] - 53)
        total = 0
        while count > 0:
            felt = cut(whole_term, total, self.bits)
            if felt == 0:
                break
            top = 1 << max(total.bit_length(), whole_term.bit_length())
            steps = min(count, max(-(-(top - total) // felt), 1))
            total = cut(total + steps * felt, 0, self.bits)
            count -= steps
        return total * unit


@EXERCISE.holds("the width of any card", "the sum of ones stops at 2^(bits + 1)")
def _(t, kept, width):
    card = Card()
    for bits in (13, *map(int, t.rng.permutation(np.arange(4, 31)))):
        card.begin(bits)
        got = width(card)
        t.expect(got == bits, f"a card that keeps {bits} bits: {got}")


@EXERCISE.holds("a hundred runs of the card are enough", "double the count; do not go up by one")
def _(t, kept, width):
    card = Card()
    for bits in (30, 24):
        card.begin(bits)
        width(card)  # the card refuses to run more often


@EXERCISE.holds("fresh inputs give fresh results", "right in call 1 and wrong later: something is kept between calls")
def _(t, kept, width):
    for _ in range(3):
        compare(t, kept, whole(t, 8, 20), whole(t, 20, 24), 13)
