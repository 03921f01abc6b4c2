from dataclasses import replace

from fa3_course import simulated
from fa3_course.checker import Exercise, Trial, protocol
from fa3_course.simulated import parts, rung05, rung06
from fa3_lib.config import ForwardConfig

EXERCISE = Exercise(
    "03.B1",
    "bug01_last_turn.py",
    functions={"verdict": 1, "consumer": 0},
    hints=(
        "Follow two consumers through their last rounds. Who waits for the arrival that is missing?",
        "Consumer 1 takes its last turn after consumer 0 has taken its own: it waits for an arrival that never comes.",
        "`next_one.arrive()` in every round, without an `if`. One arrival is then left over at consumer 0's barrier, for the next tile.",
    ),
    faults=(("        next_one.arrive()\n", "        if i < len(blocks):\n            next_one.arrive()\n"),),
)


def builder(consumer):
    def build(sm, p, tile):
        turns = parts.make_turns(sm, replace(p.config, ping_pong=True))
        t = replace(parts.make_tiles(sm, p), turns=turns)
        sm.role("producer", rung05.producer, p, t, tile, threads=parts.WARP)
        for me, name in enumerate(parts.consumer_names(p.config)):
            sm.role(name, protocol.role(consumer), me, p, t, tile)

    return build


@EXERCISE.holds("your prediction is the verdict on the role as handed out", "who waits for ever, and for whom?")
def _(t, verdict, consumer):
    config = ForwardConfig(64, 64, 128, 32)
    q, k, v = (t.normal(1, n, 1, 64) for n in (128, 160, 160))

    def run(seed, role):
        problem = simulated.make_problem("6", q, k, v, config=config, dtype="f16")
        return simulated.run("6", problem, seed=seed, build=builder(role)).report

    protocol.expect_verdict(t, EXERCISE, verdict, run)


@EXERCISE.holds("mended: two consumers, under any timing", "as many arrivals as waits, plus the opening")
def _(t, verdict, consumer):
    for _ in range(3):
        protocol.attention(t, builder(consumer), consumers=2, sq=128, sk=160)


@EXERCISE.holds("mended: three consumers", "the turns go round")
def _(t, verdict, consumer):
    protocol.attention(t, builder(consumer), consumers=3, sq=192, sk=100)


@EXERCISE.holds("mended: one block, and causal tiles", "the last round is a turn like any other")
def _(t, verdict, consumer):
    protocol.attention(t, builder(consumer), consumers=2, sq=100, sk=int(t.rng.integers(1, 33)))
    protocol.attention(t, builder(consumer), consumers=2, sq=200, sk=150, causal=True)


@EXERCISE.holds("turns are still taken, and passed on early", "no turns at all, or late ones, would be slower")
def _(t, verdict, consumer):
    seed, sizes = int(t.rng.integers(10**6)), {"consumers": 2, "sq": 128, "sk": 768, "tile_n": 64, "head_dim": 256}
    mine, ours = (
        protocol.attention(Trial(seed), builder(role), **sizes).cycles for role in (consumer, rung06.consumer)
    )
    t.expect(mine <= 1.02 * ours, f"{mine:,.0f} cycles, the course's consumer takes {ours:,.0f}")
