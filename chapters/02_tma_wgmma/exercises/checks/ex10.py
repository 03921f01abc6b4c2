from fa3_course.checker import Exercise, Trial, protocol
from fa3_course.simulated import rung04, rung05
from fa3_lib.config import REGISTER_FILE

EXERCISE = Exercise(
    "02.10",
    "ex10_two_consumers.py",
    functions={"build": 0},
    hints=(
        "full: the producer arrives once and announces bytes. empty: every consumer arrives with `arrive(4)`.",
        "One `consumer` body serves both roles; `me` says which 64 rows. Producer first gives registers back, else the "
        "consumers' setmaxnreg would wait for ever.",
        "arrivals=1 for q_full, k_full, v_full; arrivals=4 * c.consumer_warpgroups for k_empty, v_empty; "
        "setmaxnreg(p.config.producer_registers), setmaxnreg(p.config.consumer_registers).",
    ),
)


def run(t, build, **sizes):
    return protocol.attention(t, protocol.role(build), **{"consumers": 2, **sizes})


@EXERCISE.holds("two consumers, one round: clean and right", "two roles, 64 rows each; every one stores its own")
def _(t, build):
    run(t, build, sq=128, sk=64)


@EXERCISE.holds(
    "many rounds: a slot is freed by both", "an empty barrier that counts one consumer lets the producer in too early"
)
def _(t, build):
    run(t, build, sq=128, sk=256, stages=2)


@EXERCISE.holds("ragged lengths, causal, grouped heads", "take everything from p and tile")
def _(t, build):
    run(t, build, sq=int(t.rng.integers(65, 200)), sk=int(t.rng.integers(100, 200)), heads=2, causal=True)


@EXERCISE.holds(
    "one and three consumers, one and four stages", "counts follow from the configuration, they are not literals"
)
def _(t, build):
    run(t, build, consumers=1, sq=64, sk=96, stages=1)
    run(t, build, consumers=3, sq=192, sk=200, stages=4)


@EXERCISE.holds(
    "registers: the tiles of head dim 128 fit, and the sum is the configuration's",
    "S, P and O of 128 x 128 need 224 registers of a thread: setmaxnreg before wg.registers",
)
def _(t, build):
    seen = []

    def watched(sm, p, tile):
        protocol.role(build)(sm, p, tile)
        seen.append((sm, p.config))

    run(t, watched, sq=100, sk=128, tile_n=128, head_dim=128)
    for sm, c in seen:
        want = 128 * (c.producer_registers + c.consumer_warpgroups * c.consumer_registers)
        used = sm.register_pool.used()
        t.expect(
            used == want, f"{sm.register_pool.words()}; the configuration's {want} of {REGISTER_FILE} were expected"
        )


@EXERCISE.holds("two consumers use each copied tile twice", "both must work at the same time, on the same K and V")
def _(t, build):
    seed = int(t.rng.integers(10**6))
    sizes = {"sq": 128, "sk": 512, "tile_n": 64}
    mine, ours = (
        protocol.attention(Trial(seed), b, consumers=2, **sizes).cycles for b in (protocol.role(build), rung05.build)
    )
    alone = protocol.attention(Trial(seed), rung04.build, consumers=1, **sizes).cycles  # two query tiles, one by one
    said = f"{mine:,.0f} cycles; the course's rung 5 takes {ours:,.0f}, its rung 4, one query tile after the other, {alone:,.0f}"
    t.expect(mine <= 1.04 * ours and mine < alone, said)
