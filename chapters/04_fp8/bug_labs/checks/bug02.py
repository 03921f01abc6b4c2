from pathlib import Path

from fa3_course.checker import Exercise, Trial, protocol
from fa3_course.checker.catalogue import load_source
from fa3_course.simulated import parts, rung10
from fa3_lib.config import WGMMA_M

HELPER = Path(__file__).parents[2] / "exercises" / "checks" / "fp8_cta.py"
cta = load_source(HELPER.read_text(encoding="utf-8"), HELPER, "fp8_cta")

EXERCISE = Exercise(
    "04.B2",
    "bug02_no_hurry.py",
    functions={"verdict": 1, "consumer": 0},
    hints=(
        "Two groups are in flight, QK and then PV into T. Which one is done after wait_group(1)?",
        "QK is done, PV still writes T: whoever reads T now touches an accumulator in flight.",
        "Move the fold behind wait_group(0); shrink must still be the one of the block before.",
    ),
    faults=(
        (
            "            t.k_empty[slot].arrive(parts.WARPS)\n",
            "            t.k_empty[slot].arrive(parts.WARPS)\n            if i > 0:\n"
            "                await rung10.fold(wg, acc_O, acc_T, shrink)\n",
        ),
        (
            "            t.v_empty[last_slot].arrive(parts.WARPS)\n            await rung10.fold(wg, acc_O, acc_T, shrink)\n",
            "            t.v_empty[last_slot].arrive(parts.WARPS)\n            if i == len(blocks):\n"
            "                await rung10.fold(wg, acc_O, acc_T, shrink)\n",
        ),
    ),
)


def builder(consumer):
    def build(sm, p, tile):
        c, t = p.config, parts.make_tiles(sm, p)
        t = cta.replace(t, v=t.v.reuse("Vt", (c.stages, c.head_dim_v, c.tile_n), p.v.dtype))
        staged = sm.shared("O", (c.consumer_warpgroups, WGMMA_M, c.head_dim_v), p.out.dtype)
        sm.role("producer", rung10.producer, p, t, tile, threads=parts.WARP)
        for me, name in enumerate(parts.consumer_names(c)):
            sm.role(name, protocol.role(consumer), me, p, t, tile, staged)

    return build


@EXERCISE.holds("your prediction is the verdict on the role as handed out", "what writes T, and until when?")
def _(t, verdict, consumer):
    p = cta.make_problem(t, sk=224)
    protocol.expect_verdict(t, EXERCISE, verdict, lambda seed, role: cta.run(cta.fresh(p), builder(role), seed))


@EXERCISE.holds("mended: many blocks, two consumers, under any timing", "T belongs to PV until wait_group(0)")
def _(t, verdict, consumer):
    for _ in range(2):
        cta.check(t, builder(consumer), consumers=2, sq=128, sk=224)


@EXERCISE.holds("mended: one block, one slot", "the first round has no PV, the last one no QK")
def _(t, verdict, consumer):
    cta.check(t, builder(consumer), sk=int(t.rng.integers(1, 33)))
    cta.check(t, builder(consumer), sk=128, stages=1)


@EXERCISE.holds("mended: causal, grouped heads, four slots", "each T has the maximum of its own block")
def _(t, verdict, consumer):
    cta.check(t, builder(consumer), sq=150, sk=90, stages=4, causal=True, heads=2)


@EXERCISE.holds("the overlap is kept", "wait_group(1) before the softmax")
def _(t, verdict, consumer):
    seed, sizes = int(t.rng.integers(10**6)), {"sk": 1024, "tile_n": 64, "d": 128}
    mine, ours = (cta.check(Trial(seed), builder(role), **sizes).cycles for role in (consumer, rung10.consumer))
    t.expect(mine <= 1.02 * ours, f"{mine:,.0f} cycles, the course's consumer takes {ours:,.0f}")
