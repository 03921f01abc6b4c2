from fa3_course.checker import Exercise, Trial, protocol
from fa3_course.simulated import parts, rung04

EXERCISE = Exercise(
    "02.8",
    "ex08_ring.py",
    functions={"producer": 0, "consumer": 0},
    hints=(
        "slot = i % stages, phase = i // stages % 2, in both roles. The consumer waits for `phase`, the producer for the "
        "phase before: `phase ^ 1`, which passes at once in the first round.",
        "A slot of K is free when QK has been *waited for*, not when it has been issued. K and V have barriers of their own: "
        "K's slot can be refilled while softmax runs.",
        "The tail needs nothing: both roles run over the same p.blocks, so every load is waited for and every wait has a load.",
    ),
)


def builder(producer, consumer):
    def build(sm, p, tile):
        t = parts.make_tiles(sm, p)
        sm.role("producer", protocol.role(producer), p, t, tile, threads=parts.WARP)
        sm.role("consumer0", protocol.role(consumer), 0, p, t, tile)

    return build


def run(t, producer, consumer, **sizes):
    return protocol.attention(t, builder(producer, consumer), **sizes)


@EXERCISE.holds("one slot: clean and right", "with one slot every load waits for the release of the one before")
def _(t, producer, consumer):
    run(t, producer, consumer, stages=1, sk=96)


@EXERCISE.holds("two slots, many rounds", "the bits flip once per round, not once per load")
def _(t, producer, consumer):
    run(t, producer, consumer, stages=2, sk=224)


@EXERCISE.holds("the tail: fewer blocks than slots, a last round that is not full, ragged lengths", "see hint 3")
def _(t, producer, consumer):
    run(t, producer, consumer, stages=4, sk=int(t.rng.integers(1, 64)))
    run(t, producer, consumer, stages=4, sk=160, sq=int(t.rng.integers(1, 64)))
    run(t, producer, consumer, stages=2, sk=int(t.rng.integers(65, 96)))


@EXERCISE.holds("causal, with rows that see no key", "a query tile may have no key block at all")
def _(t, producer, consumer):
    run(t, producer, consumer, sq=150, sk=70, causal=True)
    run(t, producer, consumer, sq=70, sk=150, heads=2, kv_heads=1, causal=True)


@EXERCISE.holds("clean under any timing", "who reads a slot arrives after its read is over, whatever the latencies")
def _(t, producer, consumer):
    for _ in range(4):
        run(t, producer, consumer, stages=2, sk=160)


@EXERCISE.holds(
    "the producer runs ahead: as fast as the course's own rung 4",
    "free K right after QK, V right after PV; use all slots; wait for a slot only when you want to fill it",
)
def _(t, producer, consumer):
    seed = int(t.rng.integers(10**6))
    sizes = {"stages": 2, "sk": 640, "tile_n": 64}
    mine = run(Trial(seed), producer, consumer, **sizes).cycles
    ours = run(Trial(seed), rung04.producer, rung04.consumer, **sizes).cycles
    t.expect(mine <= 1.04 * ours, f"{mine:,.0f} cycles, the course's roles take {ours:,.0f}")
