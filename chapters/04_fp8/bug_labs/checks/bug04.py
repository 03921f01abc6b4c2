from pathlib import Path

from fa3_course.checker import Exercise, protocol
from fa3_course.checker.catalogue import load_source
from fa3_course.simulated import parts

HELPER = Path(__file__).parents[2] / "exercises" / "checks" / "fp8_cta.py"
cta = load_source(HELPER.read_text(encoding="utf-8"), HELPER, "fp8_cta")
TURNERS = ("turner0", "turner1", "turner2")

EXERCISE = Exercise(
    "04.B4",
    "bug04_one_for_all.py",
    functions={"verdict": 1, "turner": 0},
    hints=(
        "Warp 0 has read its block when it arrives. What does it know about warps 1 and 2?",
        "Nothing: TMA may write the next block over what they still read. Overwrite before free, as in FA3 without its barrier.",
        "All three wait for each other after reading, `await together.sync()`; then warp 0 arrives.",
    ),
    faults=(("        await together.sync()\n", ""),),
)


def builder(turner):
    def build(sm, p, tile):
        t, raw = cta.transposer.tiles(sm, p, TURNERS)
        together = sm.named_barrier(8, 32 * len(TURNERS), "TOGETHER", by=TURNERS)
        sm.role("producer", cta.transposer.producer, p, t, raw, tile, threads=parts.WARP, warpgroup="producer")
        for me, name in enumerate(TURNERS):
            body = protocol.role(turner)
            sm.role(name, body, me, p, t, raw, together, tile, threads=parts.WARP, warpgroup="producer")
        cta.transposer.consumers(sm, p, t, tile)

    return build


@EXERCISE.holds("your prediction is the verdict on the role as handed out", "who knows that warp 2 has read the stage?")
def _(t, verdict, turner):
    p = cta.make_problem(t, sk=256, transposed=False)
    protocol.expect_verdict(t, EXERCISE, verdict, lambda seed, role: cta.run(cta.fresh(p), builder(role), seed))


@EXERCISE.holds("no more blocks than stages: clean and right", "here even the broken role is right")
def _(t, verdict, turner):
    cta.check(t, builder(turner), sk=64, transposed=False)


@EXERCISE.holds("mended: many blocks, two consumers, under any timing", "all have read before one speaks")
def _(t, verdict, turner):
    for _ in range(3):
        cta.check(t, builder(turner), consumers=2, sq=128, sk=256, transposed=False)


@EXERCISE.holds("mended: one slot, four slots, head dim 128", "once per block, everybody")
def _(t, verdict, turner):
    cta.check(t, builder(turner), sk=160, stages=1, transposed=False)
    cta.check(t, builder(turner), sk=200, stages=4, d=128, transposed=False)


@EXERCISE.holds("mended: causal, ragged, grouped heads", "as many rounds as blocks, for all three")
def _(t, verdict, turner):
    cta.check(t, builder(turner), sq=150, sk=int(t.rng.integers(100, 180)), heads=2, causal=True, transposed=False)
