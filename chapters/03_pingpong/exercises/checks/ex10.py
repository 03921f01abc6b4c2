import numpy as np

from fa3_course.checker import Exercise
from fa3_course.checker.counting import counting

EXERCISE = Exercise(
    "03.10",
    "ex10_exp2.py",
    functions={"fit": 1, "exp2": 1},
    hints=(
        "n = np.floor(x), f = x - n. Clamp x at -126 first, so that -inf does no harm and n + 127 stays positive.",
        "Horner: start with 0; for each coefficient: power = power * f + np.float32(c). Keep everything in fp32.",
        "bits = power.view(np.int32) + (n.astype(np.int32) << 23); the result is bits.view(np.float32). "
        "fit: np.polyfit(f, np.exp2(f), degree, w=np.exp2(-f)).",
    ),
)
# between a weighted least-squares fit and one without weights
LIMITS = {1: 4.2e-2, 2: 2.9e-3, 3: 1.5e-4, 4: 6e-6}


def relative(got, x):
    return np.abs(got.astype(np.float64) / np.exp2(x.astype(np.float64)) - 1)


def points(t, low=-100.0):
    return np.sort(t.rng.uniform(low, 0, 4000)).astype(np.float32)


@EXERCISE.holds(
    "the polynomial: small relative error in all of [0, 1]", "weights: an error at f = 1 counts half of one at 0"
)
def _(t, fit, exp2):
    f = np.linspace(0, 1, 1001)
    for degree, limit in LIMITS.items():
        c = np.asarray(fit(degree), dtype=np.float64)
        t.expect(
            c.shape == (degree + 1,), f"degree {degree}: coefficients of shape {c.shape}, expected {(degree + 1,)}"
        )
        worst = relative(np.polyval(c, f), f).max()
        t.expect(worst <= limit, f"degree {degree}: relative error {worst:.1e}, {limit:.1e} is possible")


@EXERCISE.holds("2 ** x as good as the polynomial, for any range", "n goes into the exponent, f into the polynomial")
def _(t, fit, exp2):
    for degree, limit in LIMITS.items():
        for low in (-1.0, -30.0, -125.0):
            x = points(t, low)
            got = exp2(x.copy(), np.asarray(fit(degree)))
            t.expect(got.dtype == np.float32 and got.shape == x.shape, f"got {got.dtype} {got.shape}, expected fp32")
            worst = relative(got, x).max()
            t.expect(
                worst <= limit + 1e-6, f"degree {degree}, x from {low:g}: relative error {worst:.1e}, limit {limit:.1e}"
            )


@EXERCISE.holds("the coefficients are taken as given", "exp2 must work with any polynomial: here 1 + f")
def _(t, fit, exp2):
    x = points(t, -20.0)
    n = np.floor(x.astype(np.float64))
    got, want = exp2(x.copy(), np.array([1.0, 1.0])), np.exp2(n) * (1 + x - n)
    t.close(got / want, np.ones(x.shape), "result over 2 ** n (1 + f)", tolerance=1e-6)


@EXERCISE.holds("masked keys: -inf gives next to nothing", "clamp at -126 first")
def _(t, fit, exp2):
    x = points(t)
    x[::7] = -np.inf
    x[1::7] = np.float32(-3e38)
    got = exp2(x, np.asarray(fit(3)))
    tiny = np.concatenate([got[::7], got[1::7]])
    t.expect(bool(np.isfinite(got).all()), f"{(~np.isfinite(got)).sum()} results are no numbers")
    t.expect(tiny.min() >= 0 and tiny.max() <= 2.0**-125, f"2 ** -inf: from {tiny.min():g} to {tiny.max():g}")


@EXERCISE.holds("no exponential, no power", "only multiply, add, floor and whole numbers")
def _(t, fit, exp2):
    tally, (x,) = counting(points(t))
    exp2(x, np.asarray(fit(3)))
    used = {"exp", "exp2", "expm1", "power", "float_power", "ldexp"} & set(tally.calls)
    t.expect(not used and tally.calls["multiply"] > 0, f"used: {', '.join(sorted(used)) or 'no multiplication at all'}")
