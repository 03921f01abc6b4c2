import numpy as np

from fa3_course import budget
from fa3_course.checker import Exercise
from fa3_lib.config import ForwardConfig

EXERCISE = Exercise(
    "03.4",
    "ex04_period.py",
    functions={"work": 2, "period": 1, "enough": 1},
    hints=(
        "A product of m x n x k takes 2 m n k operations.",
        "Nobody is faster than alone: product + softmax. And in one period each shared unit serves every consumer once.",
        "period: max(product + softmax, n * product, n * mufu). enough: the first n with n * max(product, mufu) >= product + softmax.",
    ),
)


def simulated(consumers, product, softmax, mufu):
    """The period, by letting the consumers go round: two units that serve whoever came first."""
    ready, tensor, multi, rounds = [0.0] * consumers, 0.0, 0.0, []
    for _ in range(400):
        for me in range(consumers):  # in turns; equal work keeps the order
            tensor = max(tensor, ready[me]) + product
            multi = max(multi, tensor) + mufu
            ready[me] = multi + softmax - mufu
        rounds.append(ready[0])
    return (rounds[-1] - rounds[199]) / 200


def draw(t, number=0):
    """Product, softmax, and its part in the MUFU; the MUFU is the slower unit when `number` is odd, else the tensor cores."""
    slow, fast = float(t.rng.uniform(500, 900)), float(t.rng.uniform(100, 400))
    product, mufu = (fast, slow) if number % 2 else (slow, fast)
    return product, mufu + float(t.rng.uniform(0, 1500)), mufu


@EXERCISE.holds("work per head dim, as the course's calculator counts it", "2 products x 2 operations; 64 rows")
def _(t, work, period, enough):
    for _ in range(8):
        d, tile_n = 64 * int(t.rng.integers(1, 5)), 16 * int(t.rng.integers(1, 17))
        cycles = budget.cycles(ForwardConfig(d, d, 64, tile_n))
        want, got = (cycles["tensor core"], cycles["mufu"]), work(d, tile_n)
        t.expect(np.allclose(got, want, rtol=1e-9), f"d {d}, tile_n {tile_n}: {tuple(got)}, expected {want}")


@EXERCISE.holds("one consumer: its own way round", "alone nobody waits: product + softmax")
def _(t, work, period, enough):
    for _ in range(5):
        product, softmax, mufu = draw(t)
        got = period(1, product, softmax, mufu)
        t.expect(np.isclose(got, product + softmax), f"{got:.1f}, expected {product + softmax:.1f}")


@EXERCISE.holds(
    "the period, against consumers that really go round", "the slowest of three: way round, tensor cores, MUFU"
)
def _(t, work, period, enough):
    for number in range(12):
        n, times = int(t.rng.integers(1, 6)), draw(t, number)
        got, want = period(n, *times), simulated(n, *times)
        text = "{} consumers, product {:.0f}, softmax {:.0f}, of it MUFU {:.0f}".format(n, *times)
        t.expect(np.isclose(got, want, rtol=1e-3), f"{text}: {got:.1f}, they take {want:.1f}")


@EXERCISE.holds(
    "enough: one less leaves both units idle, one more brings nothing", "tensor cores or MUFU: either is a limit"
)
def _(t, work, period, enough):
    for number in range(12):
        product, softmax, mufu = draw(t, number)
        n, text = enough(product, softmax, mufu), f"product {product:.0f}, softmax {softmax:.0f}, MUFU {mufu:.0f}"
        rate = [k / simulated(k, product, softmax, mufu) for k in range(1, 40)]
        want = 1 + next(
            k for k in range(38) if rate[k + 1] <= rate[k] * (1 + 1e-6) or rate[k] >= max(rate) * (1 - 1e-6)
        )
        t.expect(n == want, f"{text}: {n} consumers, expected {want}")


@EXERCISE.holds(
    "a short softmax needs two, a long one more", "softmax as long as the product: two. Twice as long: three"
)
def _(t, work, period, enough):
    product = float(t.rng.integers(100, 1000))
    for times, want in ((1, 2), (2, 3), (3, 4)):
        got = enough(product, times * product, product / 2)
        t.expect(got == want, f"softmax {times} times the product: {got} consumers, expected {want}")
