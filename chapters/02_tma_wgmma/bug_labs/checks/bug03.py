from fa3_course import simulated
from fa3_course.checker import Exercise, Trial, protocol
from fa3_course.simulated import parts, rung04
from fa3_lib.config import ForwardConfig

EXERCISE = Exercise(
    "02.B3",
    "bug03_short_tile.py",
    functions={"verdict": 1, "producer": 0},
    hints=(
        "What does TMA write where the box hangs over the end of the tensor, and does the barrier count it? (02.3)",
        "The box is always whole: c.tile_n x c.head_dim elements land, zeros included. Fewer bytes announced than landed: "
        '"wrong transaction bytes".',
        "Announce c.k_bytes and c.v_bytes, for every block.",
    ),
    faults=(
        (
            "        at, box = (batch",
            "        keys = min(c.tile_n, p.seqlens[1] - n * c.tile_n)\n        at, box = (batch",
        ),
        ("arrive_expect_tx(c.k_bytes)", "arrive_expect_tx(keys * c.head_dim * c.element_bytes)"),
        ("arrive_expect_tx(c.v_bytes)", "arrive_expect_tx(keys * c.head_dim_v * c.element_bytes)"),
    ),
)


def builder(producer):
    def build(sm, p, tile):
        t = parts.make_tiles(sm, p)
        sm.role("producer", protocol.role(producer), p, t, tile, threads=parts.WARP)
        sm.role("consumer0", rung04.consumer, 0, p, t, tile)

    return build


@EXERCISE.holds("your prediction is the verdict on the role as handed out", "75 keys: the last block has 11 of 32")
def _(t, verdict, producer):
    config = ForwardConfig(64, 64, 64, 32)
    q, k, v = (t.normal(1, n, 1, 64) for n in (64, 75, 75))

    def run(seed, role):
        problem = simulated.make_problem("4", q, k, v, config=config, dtype="f16")
        return simulated.run("4", problem, seed=seed, build=builder(role)).report

    protocol.expect_verdict(t, EXERCISE, verdict, run)


@EXERCISE.holds("mended: whole blocks", "nothing changes where every block is full")
def _(t, verdict, producer):
    protocol.attention(t, builder(producer), sk=128)


@EXERCISE.holds("mended: any length, under any timing", "one key, one key too many, one key too few")
def _(t, verdict, producer):
    for sk in (1, 31, 33, 75, int(t.rng.integers(34, 150))):
        protocol.attention(t, builder(producer), sk=sk, sq=int(t.rng.integers(1, 64)))


@EXERCISE.holds("causal, grouped heads, other rings", "heads and batches are coordinates of the box")
def _(t, verdict, producer):
    protocol.attention(t, builder(producer), sq=90, sk=101, heads=4, kv_heads=2, batch=2, causal=True, stages=4)
    protocol.attention(t, builder(producer), sq=64, sk=101, stages=1)


@EXERCISE.holds("as many copies as before", "one box for K and one for V per block; the tail is no extra copy")
def _(t, verdict, producer):
    seed = int(t.rng.integers(10**6))
    mine, ours = (protocol.attention(Trial(seed), b, sk=200).cycles for b in (builder(producer), rung04.build))
    t.expect(mine <= 1.04 * ours, f"{mine:,.0f} cycles, the course's producer takes {ours:,.0f}")
