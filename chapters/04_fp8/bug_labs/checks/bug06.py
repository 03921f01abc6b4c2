from pathlib import Path

from fa3_course.checker import Exercise, protocol
from fa3_course.checker.catalogue import load_source
from fa3_course.simulated import parts, rung10
from hopper_sim import patched

HELPER = Path(__file__).parents[2] / "exercises" / "checks" / "fp8_cta.py"
cta = load_source(HELPER.read_text(encoding="utf-8"), HELPER, "fp8_cta")

EXERCISE = Exercise(
    "04.B6",
    "bug06_in_vs_place.py",
    functions={"verdict": 1, "finish": 0},
    hints=(
        "Consumer 0 has seen its last PV end. Both consumers read the same slots of V.",
        "Consumer 1's last PV, or the one before, may still read slot 0 when consumer 0 writes O there: overwrite before free.",
        "await everybody.sync() before the epilogue: then every consumer's last PV has ended.",
    ),
    faults=(("    await everybody.sync()\n", ""),),
)
EPILOGUE = "await parts.epilogue(wg, p, staged[me], tile, me, acc_O, rows, p.v_descale[kv])"
consumer = patched(rung10.consumer, EPILOGUE, "await staged(wg, me, p, t, tile, acc_O, rows)")
TILE = {"tile_n": 128}  # a slot of V holds as many bytes as the 16-bit output of a consumer


def builder(finish):
    def build(sm, p, tile):
        c, names, t = p.config, parts.consumer_names(p.config), parts.make_tiles(sm, p)
        t = cta.replace(t, v=t.v.reuse("Vt", (c.stages, c.head_dim_v, c.tile_n), p.v.dtype))
        everybody = sm.named_barrier(8, 128 * len(names), "EVERYBODY", by=names)

        async def last(wg, me, p, t, tile, acc_O, rows):
            await protocol.role(finish)(wg, me, p, t, everybody, tile, acc_O, rows)

        sm.role("producer", rung10.producer, p, t, tile, threads=parts.WARP)
        for me, name in enumerate(names):
            sm.role(name, consumer, me, p, t, tile, last)

    return build


@EXERCISE.holds("your prediction is the verdict on the role as handed out", "two consumers, one ring")
def _(t, verdict, finish):
    p = cta.make_problem(t, consumers=2, sq=128, sk=256, **TILE)
    protocol.expect_verdict(t, EXERCISE, verdict, lambda seed, role: cta.run(cta.fresh(p), builder(role), seed))


@EXERCISE.holds("one consumer: clean and right", "here even the broken role is right")
def _(t, verdict, finish):
    cta.check(t, builder(finish), sk=384, **TILE)


@EXERCISE.holds("mended: two consumers, under any timing", "everybody's last PV is over before anybody writes")
def _(t, verdict, finish):
    for _ in range(3):
        cta.check(t, builder(finish), consumers=2, sq=128, sk=int(t.rng.integers(129, 700)), **TILE)


@EXERCISE.holds("mended: four slots; three consumers; turns", "each consumer has a slot of its own")
def _(t, verdict, finish):
    cta.check(t, builder(finish), consumers=2, sq=128, sk=512, stages=4, **TILE)
    cta.check(t, builder(finish), consumers=3, sq=192, sk=300, stages=4, two_level=False, **TILE)


@EXERCISE.holds(
    "mended: causal, several tiles and heads", "once per query tile, also by a consumer whose rows see no key"
)
def _(t, verdict, finish):
    cta.check(t, builder(finish), consumers=2, sq=300, sk=260, heads=2, causal=True, **TILE)
