from dataclasses import replace

from fa3_course.checker import Exercise, Trial, protocol
from fa3_course.simulated import parts, rung05, rung06

EXERCISE = Exercise(
    "03.2",
    "ex02_turns.py",
    functions={"consumer": 0},
    hints=(
        "Every consumer waits at its own barrier and arrives at the next one's: as often as it waits.",
        "mine = t.turns[me]; next_one = t.turns[(me + 1) % len(t.turns)]. Consumer 0 arrives once at its own barrier before the loop.",
        "`await mine.sync()` before the issue; `next_one.arrive()`, then `await wg.wait_group(0)` after it, in every round of the "
        "loop, the last one too.",
    ),
)


def builder(consumer):
    def build(sm, p, tile):
        turns = parts.make_turns(sm, replace(p.config, ping_pong=True))
        t = replace(parts.make_tiles(sm, p), turns=turns)
        sm.role("producer", rung05.producer, p, t, tile, threads=parts.WARP)
        for me, name in enumerate(parts.consumer_names(p.config)):
            sm.role(name, protocol.role(consumer), me, p, t, tile)

    return build


def run(t, consumer, **sizes):
    return protocol.attention(t, builder(consumer), **{"consumers": 2, "sq": 128, **sizes})


@EXERCISE.holds("two consumers, many blocks: clean and right", "one wait and one arrival in every round")
def _(t, consumer):
    run(t, consumer, sk=256)


@EXERCISE.holds("three consumers", "the one after the last is consumer 0: (me + 1) % len(t.turns)")
def _(t, consumer):
    run(t, consumer, consumers=3, sq=192, sk=160)


@EXERCISE.holds("one block only, and more stages than blocks", "PV of the last block is a turn, too")
def _(t, consumer):
    run(t, consumer, sk=int(t.rng.integers(1, 33)))
    run(t, consumer, sk=70, stages=4)


@EXERCISE.holds("causal, ragged, rows without keys", "both consumers of a tile take equally many turns")
def _(t, consumer):
    run(t, consumer, sq=int(t.rng.integers(129, 250)), sk=int(t.rng.integers(60, 120)), heads=2, causal=True)


@EXERCISE.holds("clean under any timing", "only the barriers may order the consumers, no lucky latency")
def _(t, consumer):
    for _ in range(4):
        run(t, consumer, sk=128)


@EXERCISE.holds(
    "the turn is passed on before the products are done: as fast as the course's rung 6",
    "whoever holds the turn until wait_group returns leaves the tensor cores without a successor",
)
def _(t, consumer):
    seed, sizes = int(t.rng.integers(10**6)), {"sk": 768, "tile_n": 64, "head_dim": 256}
    mine, ours = (run(Trial(seed), role, **sizes).cycles for role in (consumer, rung06.consumer))
    t.expect(mine <= 1.02 * ours, f"{mine:,.0f} cycles, the course's consumer takes {ours:,.0f}")
