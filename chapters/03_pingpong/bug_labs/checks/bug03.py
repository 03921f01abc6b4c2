from fa3_course import simulated
from fa3_course.checker import Exercise, Trial, protocol
from fa3_course.simulated import parts, rung07
from fa3_lib.config import ForwardConfig

EXERCISE = Exercise(
    "03.B3",
    "bug03_one_wait.py",
    functions={"verdict": 1, "consumer": 0},
    hints=(
        "Two groups are in flight, QK and then PV. Which one is done after wait_group(1)?",
        "QK is done, PV is not, and still reads the slot of V. The producer fills a slot that is called free: overwrite before free.",
        "Release V behind wait_group(0), K where it is.",
    ),
    faults=(
        (
            "            t.k_empty[slot].arrive(parts.WARPS)\n",
            "            t.k_empty[slot].arrive(parts.WARPS)\n            if i > 0:\n                t.v_empty[last_slot].arrive(parts.WARPS)\n",
        ),
        (
            "            await wg.wait_group(0)\n            t.v_empty[last_slot].arrive(parts.WARPS)\n",
            "            await wg.wait_group(0)\n            if i == len(blocks):\n                t.v_empty[last_slot].arrive(parts.WARPS)\n",
        ),
    ),
)


def builder(consumer):
    def build(sm, p, tile):
        t = parts.make_tiles(sm, p)
        sm.role("producer", rung07.producer, p, t, tile, threads=parts.WARP)
        for me, name in enumerate(parts.consumer_names(p.config)):
            sm.role(name, protocol.role(consumer), me, p, t, tile)

    return build


@EXERCISE.holds("your prediction is the verdict on the role as handed out", "which product still reads the slot?")
def _(t, verdict, consumer):
    config = ForwardConfig(64, 64, 64, 32)
    q, k, v = (t.normal(1, n, 1, 64) for n in (64, 224, 224))

    def run(seed, role):
        problem = simulated.make_problem("5", q, k, v, config=config, dtype="f16")
        return simulated.run("5", problem, seed=seed, build=builder(role)).report

    protocol.expect_verdict(t, EXERCISE, verdict, run)


@EXERCISE.holds("mended: many blocks, under any timing", "what a product reads is in use until the product is done")
def _(t, verdict, consumer):
    for _ in range(3):
        protocol.attention(t, builder(consumer), consumers=2, sq=128, sk=224)


@EXERCISE.holds("mended: one block, one slot", "the first round has no PV, the last one no QK")
def _(t, verdict, consumer):
    protocol.attention(t, builder(consumer), sk=int(t.rng.integers(1, 33)))
    protocol.attention(t, builder(consumer), sk=128, stages=1)


@EXERCISE.holds("mended: causal, four slots", "rows without keys, and a ring that is longer than the loop")
def _(t, verdict, consumer):
    protocol.attention(t, builder(consumer), sq=150, sk=90, stages=4, causal=True)


@EXERCISE.holds("the overlap is kept", "wait_group(1) before the softmax, and slots freed as soon as they are free")
def _(t, verdict, consumer):
    seed, sizes = int(t.rng.integers(10**6)), {"sk": 1024, "tile_n": 64, "head_dim": 128}
    mine, ours = (
        protocol.attention(Trial(seed), builder(role), **sizes).cycles for role in (consumer, rung07.consumer)
    )
    t.expect(mine <= 1.02 * ours, f"{mine:,.0f} cycles, the course's consumer takes {ours:,.0f}")
