from fa3_course import simulated
from fa3_course.checker import Exercise, Trial, protocol
from fa3_course.simulated import parts, rung04
from fa3_lib.config import ForwardConfig

EXERCISE = Exercise(
    "02.B6",
    "bug06_two_opinions.py",
    functions={"verdict": 1, "producer": 0},
    hints=(
        "Count both ways for 64 queries, 160 keys, tile_m 64, tile_n 32: what does the producer load, what does the consumer read?",
        "The producer counts from the top-left corner: 2 blocks. The consumer reads 5, since row 0 already sees 97 keys. The "
        'producer returns, the consumer waits for ever: "roles disagree on the number of tiles".',
        "One function for both roles: `blocks = len(p.blocks(m))`. (Or add `seqlen_k - seqlen_q` inside the min, and mind tiles "
        "that see nothing.)",
    ),
    faults=(
        (
            "    blocks = len(p.blocks(m))\n",
            "    blocks = -(-p.seqlens[1] // c.tile_n)\n"
            "    if c.causal:\n"
            "        blocks = min(blocks, -(-(m + 1) * c.tile_m // c.tile_n))\n",
        ),
    ),
)


def builder(producer):
    def build(sm, p, tile):
        t = parts.make_tiles(sm, p)
        sm.role("producer", protocol.role(producer), p, t, tile, threads=parts.WARP)
        sm.role("consumer0", rung04.consumer, 0, p, t, tile)

    return build


@EXERCISE.holds(
    "your prediction is the verdict on the role as handed out", "64 queries, 160 keys: who has fewer blocks?"
)
def _(t, verdict, producer):
    config = ForwardConfig(64, 64, 64, 32, causal=True)
    q, k, v = (t.normal(1, n, 1, 64) for n in (64, 160, 160))

    def run(seed, role):
        problem = simulated.make_problem("4", q, k, v, causal=True, config=config, dtype="f16")
        return simulated.run("4", problem, seed=seed, build=builder(role)).report

    protocol.expect_verdict(t, EXERCISE, verdict, run)


@EXERCISE.holds("mended: as many queries as keys, and no mask", "here even the broken role is right")
def _(t, verdict, producer):
    protocol.attention(t, builder(producer), sq=128, sk=128, causal=True)
    protocol.attention(t, builder(producer), sq=64, sk=100)


@EXERCISE.holds("mended: more keys than queries, under any timing", "the last row sees all keys: bottom-right")
def _(t, verdict, producer):
    for sq in (1, 64, int(t.rng.integers(2, 130))):
        protocol.attention(t, builder(producer), sq=sq, sk=160, causal=True)


@EXERCISE.holds("mended: fewer keys than queries", "a whole query tile may see no key: then nothing is loaded")
def _(t, verdict, producer):
    for sk in (1, 40, int(t.rng.integers(2, 120))):
        protocol.attention(t, builder(producer), sq=180, sk=sk, causal=True)


@EXERCISE.holds("masked blocks are still skipped", "loading all blocks in both roles would be right, and twice as slow")
def _(t, verdict, producer):
    seed = int(t.rng.integers(10**6))
    sizes = {"sq": 256, "sk": 256, "causal": True}
    mine, ours = (protocol.attention(Trial(seed), b, **sizes).cycles for b in (builder(producer), rung04.build))
    t.expect(mine <= 1.04 * ours, f"{mine:,.0f} cycles, the course's producer takes {ours:,.0f}")
