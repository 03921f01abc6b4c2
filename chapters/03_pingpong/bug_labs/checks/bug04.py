from fa3_course import simulated
from fa3_course.checker import Exercise, protocol
from fa3_lib.config import ForwardConfig

EXERCISE = Exercise(
    "03.B4",
    "bug04_one_id.py",
    functions={"verdict": 1, "build": 0},
    hints=(
        "List the ids that two consumers use, then those that three use.",
        "With three consumers the turns are barriers 1, 2 and 3. Barrier 3 is the staged output's, too: two meanings of one id. The "
        "hardware would add up the threads of both.",
        "The first free id after the turns: `1 + len(names)`; the count is 128 threads per consumer.",
    ),
    faults=(("sm.named_barrier(1 + len(names), 128", "sm.named_barrier(3, 128"),),
)


def run_once(t, build, seed, consumers):
    config = ForwardConfig(64, 64, 64 * consumers, 32)
    q, k, v = (t.normal(1, n, 1, 64) for n in (64 * consumers, 96, 96))
    problem = simulated.make_problem("5", q, k, v, config=config, dtype="f16")
    return simulated.run("5", problem, seed=seed, build=build).report


@EXERCISE.holds("your prediction is the verdict on the CTA as handed out", "count the barriers of three consumers")
def _(t, verdict, build):
    protocol.expect_verdict(t, EXERCISE, verdict, lambda seed, handed: run_once(t, handed, seed, 3))


@EXERCISE.holds("two consumers: clean and right", "here even the broken function is right")
def _(t, verdict, build):
    protocol.attention(t, protocol.role(build), consumers=2, sq=128, sk=160)


@EXERCISE.holds("mended: three consumers, under any timing", "an id that no turn has; 128 threads of each consumer")
def _(t, verdict, build):
    for _ in range(2):
        protocol.attention(t, protocol.role(build), consumers=3, sq=192, sk=128)


@EXERCISE.holds("mended: several tiles, ragged and causal", "counts and ids come from the number of consumers")
def _(t, verdict, build):
    protocol.attention(t, protocol.role(build), consumers=3, sq=300, sk=200, causal=True)
    protocol.attention(t, protocol.role(build), consumers=2, sq=200, sk=100, heads=2)


@EXERCISE.holds("each barrier has one id, and id 0 stays with sync_threads", "ids 1 to 15; turns first, as handed out")
def _(t, verdict, build):
    for consumers in (2, 3):
        seen = []

        def watched(sm, p, tile, seen=seen):
            protocol.role(build)(sm, p, tile)
            seen.append({number: barrier.threads for number, barrier in sm.named.items()})

        protocol.attention(t, watched, consumers=consumers, sq=64 * consumers, sk=64)
        counts = sorted(seen[0].values())
        want = sorted([256] * consumers + [128 * consumers])
        t.expect(counts == want, f"{consumers} consumers: barriers {seen[0]}, expected counts {want}")
