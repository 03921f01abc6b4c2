import numpy as np

from fa3_course import notes
from fa3_course.checker import Exercise

EXERCISE = Exercise(
    "03.11",
    "ex11_profile.py",
    functions={"binding": 1, "ceiling": 1, "gain": 1},
    hints=(
        "max(shares, key=shares.get) is the busiest unit.",
        "If the busiest unit works for 60 % of the time, the rest, 40 %, is waiting; without it the kernel would take 60 % of its time.",
        "gain: new time = (1 - largest old share) + largest of share * factors.get(unit, 1); the speed-up is 1 over that.",
    ),
)
UNITS = ("tensor", "XU", "ALU", "FMA", "issue")


def draw(t):
    return {unit: float(share) for unit, share in zip(UNITS, t.rng.uniform(0.1, 0.98, 5), strict=True)}


@EXERCISE.holds("who binds, if anybody", "the busiest unit, if it is near enough to 1")
def _(t, binding, ceiling, gain):
    for _ in range(12):
        shares, near = draw(t), float(t.rng.uniform(0.4, 1))
        top = max(shares.values())
        want = next(u for u in UNITS if shares[u] == top) if top >= near else "waiting"
        got = binding(shares, near)
        t.expect(got == want, f"{shares}, near {near:.2f}: {got!r}, expected {want!r}")


@EXERCISE.holds("the kernel of our notes: nobody binds", "no share reaches 90 %")
def _(t, binding, ceiling, gain):
    for name, shares in notes.profiles(notes.find("profile")).items():
        got = binding(shares)
        t.expect(got == "waiting", f"{name}, {shares}: {got!r}, expected 'waiting'")
        t.expect(np.isclose(ceiling(shares), 1 / max(shares.values())), f"{name}: ceiling {ceiling(shares):.3f}")


@EXERCISE.holds("the ceiling: nobody waits", "1 / the largest share")
def _(t, binding, ceiling, gain):
    for _ in range(8):
        shares = draw(t)
        # in old time: work goes on until the busiest unit is through
        want = 1 / sorted(shares.values())[-1]
        t.expect(np.isclose(ceiling(shares), want), f"{shares}: {ceiling(shares):.3f}, expected {want:.3f}")


@EXERCISE.holds(
    "a change of one or more units, the waiting stays", "waiting = 1 - the largest share, before the change"
)
def _(t, binding, ceiling, gain):
    for trial in range(12):
        shares, cycles = draw(t), float(t.rng.uniform(1e4, 1e6))
        changed = t.rng.choice(UNITS, int(t.rng.integers(1, 4)), replace=False)
        factors = {str(unit): float(t.rng.uniform(0.2, 1.5)) for unit in changed}
        if trial % 2:  # the busiest unit loses its place to another
            first, second = sorted(shares, key=shares.get)[:-3:-1]
            factors[first] = shares[second] / shares[first] * float(t.rng.uniform(0.3, 0.9))
            factors.pop(second, None)
        busy = {unit: share * cycles for unit, share in shares.items()}
        after = cycles - max(busy.values()) + max(busy[u] * factors.get(u, 1.0) for u in busy)
        got = gain(shares, factors)
        t.expect(
            np.isclose(got, cycles / after), f"{shares}, factors {factors}: {got:.4f}, expected {cycles / after:.4f}"
        )


@EXERCISE.holds("less work for a unit that is not the busiest gains nothing", "a gain of exactly 1")
def _(t, binding, ceiling, gain):
    shares = draw(t)
    least = min(shares, key=shares.get)
    got = gain(shares, {least: 0.1})
    t.expect(np.isclose(got, 1), f"{shares}, {least} to a tenth: {got:.4f}, expected 1")
    t.expect(np.isclose(gain(shares, {}), 1), f"no change: {gain(shares, {}):.4f}, expected 1")
