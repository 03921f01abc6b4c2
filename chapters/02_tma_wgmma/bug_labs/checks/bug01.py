from fa3_course.checker import Exercise, Trial, protocol

EXERCISE = Exercise(
    "02.B1",
    "bug01_double_buffer.py",
    functions={"verdict": 1, "load": 0, "multiply": 0},
    hints=(
        "Who tells the producer that slot 0 has been read, before it starts load 2?",
        'Load 2 goes into slot 0. Nothing orders it after the product of step 0: "overwrite before free", also when the '
        "product happened to be faster.",
        "Producer: `await ring.empty[slot].wait(phase ^ 1)` before it announces. Consumer: `ring.empty[slot].arrive(4)` after "
        "wait_group(0).",
    ),
    faults=(
        (
            "        slot, phase = i % p.stages, i // p.stages % 2\n        await ring.empty[slot].wait(phase ^ 1)\n",
            "        slot = i % p.stages\n",
        ),
        ("\n        ring.empty[slot].arrive(4)", ""),
    ),
)
REFERENCE = 7  # k-steps: three and a half rounds of two slots


@EXERCISE.holds("your prediction is the verdict on the roles as handed out", "look at what load 2 does to slot 0")
def _(t, verdict, load, multiply):
    p = protocol.make_product(t, steps=REFERENCE)
    protocol.expect_verdict(t, EXERCISE, verdict, lambda seed, *roles: protocol.product(p.fresh(), seed, *roles))


@EXERCISE.holds("mended: clean and right, one round", "two steps, two slots: here even the broken roles are right")
def _(t, verdict, load, multiply):
    protocol.check_product(t, load, multiply, steps=2)


@EXERCISE.holds("mended: many rounds, under any timing", "the verdict quotes the line and who had not waited for whom")
def _(t, verdict, load, multiply):
    for steps in (REFERENCE, 8, 12):
        for _ in range(3):
            protocol.check_product(t, load, multiply, steps=steps)


@EXERCISE.holds("one, three and four slots, too", "take the number of slots from p.stages")
def _(t, verdict, load, multiply):
    for stages in (1, 3, 4):
        protocol.check_product(t, load, multiply, steps=9, stages=stages)


@EXERCISE.holds("still a double buffer: copies run under products", "do not mend it by waiting for everything")
def _(t, verdict, load, multiply):
    seed = int(t.rng.integers(10**6))
    one, two = (protocol.check_product(Trial(seed), load, multiply, steps=16, stages=n).cycles for n in (1, 2))
    t.expect(two < 0.7 * one, f"{two:,.0f} cycles with two slots, {one:,.0f} with one: the second slot buys nothing")
