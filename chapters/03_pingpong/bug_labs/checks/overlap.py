"""The properties of a mended consumer of rung 7: the same for every fault in it."""

from fa3_course import simulated
from fa3_course.checker import Trial, protocol
from fa3_course.simulated import parts, rung07
from fa3_lib.config import ForwardConfig


def builder(consumer):
    def build(sm, p, tile):
        t = parts.make_tiles(sm, p)
        sm.role("producer", rung07.producer, p, t, tile, threads=parts.WARP)
        for me, name in enumerate(parts.consumer_names(p.config)):
            sm.role(name, protocol.role(consumer), me, p, t, tile)

    return build


def register(exercise, question):
    """Adds the properties to `exercise`; `question` is what to ask when the predicted verdict is not the right one."""

    @exercise.holds("your prediction is the verdict on the role as handed out", question)
    def _(t, verdict, consumer):
        config = ForwardConfig(64, 64, 64, 32)
        q, k, v = (t.normal(1, n, 1, 64) for n in (64, 224, 224))

        def run(seed, role):
            problem = simulated.make_problem("5", q, k, v, config=config, dtype="f16")
            return simulated.run("5", problem, seed=seed, build=builder(role)).report

        protocol.expect_verdict(t, exercise, verdict, run)

    @exercise.holds("mended: many blocks, under any timing", "what a product reads is in use until the product is done")
    def _(t, verdict, consumer):
        for _ in range(3):
            protocol.attention(t, builder(consumer), consumers=2, sq=128, sk=224)

    @exercise.holds("mended: one block, one slot", "the first round has no PV, the last one no QK")
    def _(t, verdict, consumer):
        protocol.attention(t, builder(consumer), sk=int(t.rng.integers(1, 33)))
        protocol.attention(t, builder(consumer), sk=128, stages=1)

    @exercise.holds("mended: causal, four slots", "rows without keys, and a ring that is longer than the loop")
    def _(t, verdict, consumer):
        protocol.attention(t, builder(consumer), sq=150, sk=90, stages=4, causal=True)

    @exercise.holds("the overlap is kept", "wait_group(1) before the softmax, and slots freed as soon as they are free")
    def _(t, verdict, consumer):
        seed, sizes = int(t.rng.integers(10**6)), {"sk": 1024, "tile_n": 64, "head_dim": 128}
        mine, ours = (
            protocol.attention(Trial(seed), builder(role), **sizes).cycles for role in (consumer, rung07.consumer)
        )
        t.expect(mine <= 1.02 * ours, f"{mine:,.0f} cycles, the course's consumer takes {ours:,.0f}")
