from fa3_course.checker import Exercise, Trial, protocol

EXERCISE = Exercise(
    "02.B2",
    "bug02_wrap_around.py",
    functions={"verdict": 1, "load": 0, "multiply": 0},
    hints=(
        "Write down slot and bit of both roles for five steps and two slots, and compare with your answer to 02.5.",
        "In the second round the consumer waits for phase 0 of slot 0 again. That one has long been complete: the wait passes at "
        'once, before load 2 has landed. "wrong phase".',
        "A slot's bit flips each time that the ring wraps around: `phase ^= slot == 0` after the slot has advanced.",
    ),
    faults=(("\n        phase ^= slot == 0", ""),),
)


@EXERCISE.holds(
    "your prediction is the verdict on the roles as handed out", "follow the consumer into the second round"
)
def _(t, verdict, load, multiply):
    p = protocol.make_product(t, steps=6)
    protocol.expect_verdict(t, EXERCISE, verdict, lambda seed, *roles: protocol.product(p.fresh(), seed, *roles))


@EXERCISE.holds("mended: the first round", "two steps, two slots: here even the broken roles are right")
def _(t, verdict, load, multiply):
    protocol.check_product(t, load, multiply, steps=2)


@EXERCISE.holds("mended: many rounds, under any timing", "the bit of a slot flips once per round")
def _(t, verdict, load, multiply):
    for steps in (3, 4, 5, 11):
        for _ in range(2):
            protocol.check_product(t, load, multiply, steps=steps)


@EXERCISE.holds("one to four slots", "with one slot the ring wraps around at every step")
def _(t, verdict, load, multiply):
    for stages in (1, 3, 4):
        protocol.check_product(t, load, multiply, steps=9, stages=stages)


@EXERCISE.holds("still a ring: copies run under products", "do not mend it by using one slot")
def _(t, verdict, load, multiply):
    seed = int(t.rng.integers(10**6))
    one, two = (protocol.check_product(Trial(seed), load, multiply, steps=16, stages=n).cycles for n in (1, 2))
    t.expect(two < 0.7 * one, f"{two:,.0f} cycles with two slots, {one:,.0f} with one: the second slot buys nothing")
