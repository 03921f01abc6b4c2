from pathlib import Path

from fa3_course.checker import Exercise, Trial, protocol
from fa3_course.checker.catalogue import load_source

HELPER = Path(__file__).with_name("persistent.py")
persistent = load_source(HELPER.read_text(encoding="utf-8"), HELPER, "persistent")

EXERCISE = Exercise(
    "03.B6",
    "bug06_q_is_free.py",
    functions={"verdict": 1, "consumer": 0},
    hints=(
        "After the last QK nobody reads Q. Who uses its memory next, and when?",
        "The output is staged there. The next Q may arrive before, while, or after it is written and stored: overwrite before free.",
        "With c.own_output release in release_q, `arrive(c.q_empty_arrivals)`; without it, arrive once after the epilogue.",
    ),
    faults=(
        (
            "            if c.own_output:\n                t.q_empty[me].arrive(c.q_empty_arrivals)",
            "            t.q_empty[me].arrive(c.q_empty_arrivals)",
        ),
        ("\n        if not c.own_output:\n            t.q_empty[me].arrive(c.q_empty_arrivals)", ""),
    ),
)


@EXERCISE.holds("your prediction is the verdict on the role as handed out", "which memory holds the output?")
def _(t, verdict, consumer):
    p = persistent.problem(t, sq=128, sk=96)
    run = lambda seed, role: persistent.run(persistent.fresh(p), role, seed)  # noqa: E731
    protocol.expect_verdict(t, EXERCISE, verdict, run)


@EXERCISE.holds("output with memory of its own: clean and right", "here even the broken role is right")
def _(t, verdict, consumer):
    persistent.check(t, consumer, sq=192, sk=96, own_output=True)


@EXERCISE.holds("mended: output in Q's place, under any timing", "Q is free when the output has left")
def _(t, verdict, consumer):
    for _ in range(3):
        persistent.check(t, consumer, sq=256, sk=int(t.rng.integers(33, 120)))


@EXERCISE.holds("mended: two consumers, causal, several heads", "each consumer frees its own Q, once per tile")
def _(t, verdict, consumer):
    persistent.check(t, consumer, sq=256, sk=128, consumers=2, heads=2, causal=True)
    persistent.check(t, consumer, sq=256, sk=128, consumers=2, own_output=True)


@EXERCISE.holds(
    "the early release is kept where it is right", "with memory for the output, Q is free after the last QK"
)
def _(t, verdict, consumer):
    seed, sizes = int(t.rng.integers(10**6)), {"sq": 512, "sk": 64, "own_output": True}
    late = EXERCISE.solution.replace("            if c.own_output:", "            if False:")
    late = load_source(late.replace("if not c.own_output:", "if True:"), "late.py", "late").consumer
    mine, never = (persistent.check(Trial(seed), role, **sizes).cycles for role in (consumer, late))
    t.expect(mine < 0.995 * never, f"{mine:,.0f} cycles; with the late release it would be {never:,.0f}")
