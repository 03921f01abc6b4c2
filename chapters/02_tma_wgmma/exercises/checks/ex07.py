from fa3_course.checker import Exercise, protocol
from fa3_course.simulated import parts

EXERCISE = Exercise(
    "02.7",
    "ex07_everything_waits.py",
    functions={"warpgroup": 0},
    hints=(
        "Everything that you start must be waited for before you touch its result: copies by `await t.k_full[0].wait(bit)`, "
        "products by `wg.commit()` and `await wg.wait_group(0)`.",
        "One slot: load i completes phase i, so the bit is i % 2. QK overwrites acc_S (accumulate=False); PV adds to acc_O, "
        "which therefore must be rescaled before.",
        "QK: `wg.wgmma_fence(); wg.wgmma(acc_S, t.q[0], t.k[0].T, accumulate=False); wg.commit(); await wg.wait_group(0)`. "
        "PV: `wg.wgmma(acc_O, tOrP, t.v[0])`, with the same lines around it.",
    ),
)


def run(t, warpgroup, **sizes):
    def build(sm, p, tile):
        tiles = parts.make_tiles(sm, p, loader="consumer0")
        sm.role("consumer0", protocol.role(warpgroup), p, tiles, tile)

    return protocol.attention(t, build, stages=1, **sizes)


@EXERCISE.holds("one key block: clean and right", "compare your loop with the two GEMMs of the lesson, line by line")
def _(t, warpgroup):
    run(t, warpgroup, sk=32)


@EXERCISE.holds("several key blocks: phases and rescaling", "the bit of load i is i % 2; O shrinks before P V is added")
def _(t, warpgroup):
    run(t, warpgroup, sk=160)


@EXERCISE.holds("ragged lengths", "take keys and masks from p.blocks and rows.step: they know about the tail")
def _(t, warpgroup):
    run(t, warpgroup, sq=int(t.rng.integers(1, 64)), sk=int(t.rng.integers(33, 120)))


@EXERCISE.holds("causal, grouped heads, several query tiles", "use tile and n as they come")
def _(t, warpgroup):
    run(t, warpgroup, sq=100, sk=130, heads=2, kv_heads=1, causal=True)


@EXERCISE.holds("clean under any timing", "a wait that is missing is a fault even when the data happened to be there")
def _(t, warpgroup):
    for _ in range(4):
        run(t, warpgroup, sk=96)
