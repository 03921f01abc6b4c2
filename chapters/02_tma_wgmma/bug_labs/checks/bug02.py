from fa3_course.checker import Exercise, protocol

EXERCISE = Exercise(
    "02.B2",
    "bug02_second_tile.py",
    functions={"verdict": 1, "load": 0, "multiply": 0},
    hints=(
        "Write down count, slot and both bits of producer and consumer for two tiles of 3 steps, 2 slots.",
        "At the second tile the ring stands in the middle of a round. A phase that is counted from the start of the *tile* is "
        'then the bit of a phase that has long been complete: the wait passes at once. "wrong phase".',
        "In `multiply`, the phase is `count // p.stages % 2`, as in `load`.",
    ),
    faults=(
        (
            "        for _step in range(p.steps):\n            slot, phase = count % p.stages, count // p.stages % 2\n",
            "        for step in range(p.steps):\n            slot, phase = count % p.stages, step // p.stages % 2\n",
        ),
    ),
)


@EXERCISE.holds("your prediction is the verdict on the roles as handed out", "hint 1 finds the load at which it happens")
def _(t, verdict, load, multiply):
    p = protocol.make_product(t, steps=3, tiles=2)
    protocol.expect_verdict(t, EXERCISE, verdict, lambda seed, *roles: protocol.product(p.fresh(), seed, *roles))


@EXERCISE.holds("mended: one tile", "nothing changes for the first tile")
def _(t, verdict, load, multiply):
    protocol.check_product(t, load, multiply, steps=5, tiles=1)


@EXERCISE.holds("mended: several tiles, any number of steps, any timing", "odd numbers of steps leave the ring mid-round")
def _(t, verdict, load, multiply):
    for steps in (1, 2, 3, 4, 5):
        protocol.check_product(t, load, multiply, steps=steps, tiles=3)


@EXERCISE.holds("other rings", "one to four slots; with one, every load flips the bit")
def _(t, verdict, load, multiply):
    for stages in (1, 3, 4):
        protocol.check_product(t, load, multiply, steps=3, tiles=3, stages=stages)


@EXERCISE.holds("the ring goes on: the next tile's copies start before the last one is stored", "no drain between tiles")
def _(t, verdict, load, multiply):
    report = protocol.check_product(t, load, multiply, steps=4, tiles=4)
    flights = [event for event in report.timeline.events if event["lane"] == "TMA in flight"]
    first_store = min(event["start"] for event in flights if event["name"].startswith("store"))
    early = sum(event["start"] < first_store for event in flights if event["name"].startswith("load A"))
    t.expect(early > 4, f"{early} of 16 loads had started when the first of 4 tiles was stored; more than its own 4 were expected")
