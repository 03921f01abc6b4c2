from fa3_course.checker import Exercise, Trial, protocol
from fa3_course.simulated import parts, rung05, rung07

EXERCISE = Exercise(
    "03.3",
    "ex03_overlap.py",
    functions={"consumer": 0},
    hints=(
        "Two groups are in flight after the issue. The older one is QK, and softmax needs nothing but QK.",
        "wait_group(1): QK is done, PV goes on; in round 0 there is no PV, so wait_group(0). Free K, then softmax. wait_group(0): PV "
        "is done. Free V, write P, rescale O.",
        "if i < n: QK. if i > 0: PV. if i < n: wait_group(1 if i > 0 else 0), release K, step. if i > 0: wait_group(0), release V. "
        "if i < n: tOrP.write, rescale.",
    ),
)


def builder(consumer):
    def build(sm, p, tile):
        t = parts.make_tiles(sm, p)
        sm.role("producer", rung07.producer, p, t, tile, threads=parts.WARP)
        for me, name in enumerate(parts.consumer_names(p.config)):
            sm.role(name, protocol.role(consumer), me, p, t, tile)

    return build


def run(t, consumer, **sizes):
    return protocol.attention(t, builder(consumer), **sizes)


@EXERCISE.holds("one block: clean and right", "round 0 has no PV, the last round has no QK")
def _(t, consumer):
    run(t, consumer, sk=int(t.rng.integers(1, 33)))


@EXERCISE.holds(
    "many blocks, two consumers", "what a product reads or writes is nobody else's until the product is done"
)
def _(t, consumer):
    run(t, consumer, consumers=2, sq=128, sk=256)


@EXERCISE.holds("one slot, and four", "every slot is freed once per round")
def _(t, consumer):
    run(t, consumer, sk=128, stages=1)
    run(t, consumer, sk=200, stages=4)


@EXERCISE.holds("causal, ragged, rows without keys", "a tile may have no key block at all")
def _(t, consumer):
    run(t, consumer, sq=int(t.rng.integers(100, 200)), sk=int(t.rng.integers(40, 90)), heads=2, causal=True)


@EXERCISE.holds("clean under any timing", "a slot, P and O are free when the product is done, not when it was issued")
def _(t, consumer):
    for _ in range(4):
        run(t, consumer, consumers=2, sq=128, sk=160)


@EXERCISE.holds(
    "softmax runs while PV does: as fast as the course's rung 7, faster than rung 5", "wait_group(1) before the softmax"
)
def _(t, consumer):
    seed, sizes = int(t.rng.integers(10**6)), {"sk": 1024, "tile_n": 64, "head_dim": 128}
    mine, ours = (run(Trial(seed), role, **sizes).cycles for role in (consumer, rung07.consumer))
    without = protocol.attention(Trial(seed), rung05.build, **sizes).cycles
    said = f"{mine:,.0f} cycles; the course's consumer takes {ours:,.0f}, the one of rung 5 {without:,.0f}"
    t.expect(mine <= 1.01 * ours and mine < without, said)
