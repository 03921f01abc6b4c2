from fa3_course.checker import Exercise, Trial, protocol
from fa3_course.checker.catalogue import load_source

EXERCISE = Exercise(
    "02.B5",
    "bug05_early_release.py",
    functions={"verdict": 1, "load": 0, "multiply": 0},
    hints=(
        "After wait_group(1) in step i, which groups are complete, and which one still reads which slot?",
        "The group of step i still reads slot i % stages. Releasing that slot lets the producer overwrite an operand in use: "
        '"overwrite before free". Complete is the group of step i - 1.',
        "Release slot (i - 1) % stages when i > 0; after the loop wait_group(0), then release the last slot.",
    ),
    faults=(
        (
            "        if i > 0:\n            ring.empty[(i - 1) % p.stages].arrive(4)\n    await wg.wait_group(0)\n    ring.empty[(p.steps - 1) % p.stages].arrive(4)",
            "        ring.empty[slot].arrive(4)\n    await wg.wait_group(0)",
        ),
    ),
)


@EXERCISE.holds("your prediction is the verdict on the roles as handed out", "which WGMMA may still read the slot?")
def _(t, verdict, load, multiply):
    p = protocol.make_product(t, steps=7)
    protocol.expect_verdict(t, EXERCISE, verdict, lambda seed, *roles: protocol.product(p.fresh(), seed, *roles))


@EXERCISE.holds("mended: many rounds, under any timing", "free what is complete, and only that")
def _(t, verdict, load, multiply):
    for steps in (3, 7, 12):
        for _ in range(2):
            protocol.check_product(t, load, multiply, steps=steps)


@EXERCISE.holds(
    "mended: one and two steps", "the first step has no step before it, the last one is freed after the loop"
)
def _(t, verdict, load, multiply):
    for steps in (1, 2):
        protocol.check_product(t, load, multiply, steps=steps)


@EXERCISE.holds("three and four slots", "the step before lies in slot (i - 1) % p.stages")
def _(t, verdict, load, multiply):
    for stages in (3, 4):
        protocol.check_product(t, load, multiply, steps=10, stages=stages)


@EXERCISE.holds(
    "the idea is kept: the next product is issued while one is in flight", "wait_group(1) inside the loop, not 0"
)
def _(t, verdict, load, multiply):
    seed = int(t.rng.integers(10**6))
    serial = EXERCISE.solution.replace("wait_group(1)", "wait_group(0)")
    waiting = load_source(serial, "serial.py", "serial").multiply
    mine, never = (
        protocol.check_product(Trial(seed), load, role, steps=24, stages=4).cycles for role in (multiply, waiting)
    )
    t.expect(mine < 0.99 * never, f"{mine:,.0f} cycles; with wait_group(0) in the loop it would be {never:,.0f}")
