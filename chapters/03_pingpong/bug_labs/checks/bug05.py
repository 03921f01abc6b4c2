from pathlib import Path

from fa3_course.checker import Exercise, protocol
from fa3_course.checker.catalogue import load_source

HELPER = Path(__file__).with_name("persistent.py")
persistent = load_source(HELPER.read_text(encoding="utf-8"), HELPER, "persistent")

EXERCISE = Exercise(
    "03.B5",
    "bug05_new_beginning.py",
    functions={"verdict": 1, "consumer": 0},
    hints=(
        "Two slots, two blocks per tile: with which phase does the producer fill slot 0 for the second tile?",
        "The producer is ahead: block 2 lies in slot 0, in the phase with bit 1. The consumer waits for one with bit 0, the next "
        "of which is block 4's; and the producer waits for the release of block 2: deadlock.",
        "`done = 0` before the loop; hand `done` to attend; `done += len(p.blocks(tile[0]))` after each tile.",
    ),
    faults=(
        ("    done = 0\n", ""),
        ("tile[0], done, acc_S", "tile[0], 0, acc_S"),
        ("\n        done += len(p.blocks(tile[0]))", ""),
    ),
)


@EXERCISE.holds(
    "your prediction is the verdict on the role as handed out", "slot and phase of the second tile's first block"
)
def _(t, verdict, consumer):
    p = persistent.problem(t, sq=192, sk=64)
    run = lambda seed, role: persistent.run(persistent.fresh(p), role, seed)  # noqa: E731
    protocol.expect_verdict(t, EXERCISE, verdict, run)


@EXERCISE.holds("tiles of four blocks: clean and right", "here the rings are back at their start when a tile ends")
def _(t, verdict, consumer):
    persistent.check(t, consumer, sq=192, sk=128)


@EXERCISE.holds("mended: two, three and five blocks, under any timing", "count blocks over all tiles")
def _(t, verdict, consumer):
    for sk in (64, 96, 160):
        persistent.check(t, consumer, sq=192, sk=sk, heads=2)


@EXERCISE.holds("mended: causal tiles of different length", "each tile adds its own number of blocks")
def _(t, verdict, consumer):
    persistent.check(t, consumer, sq=256, sk=256, causal=True)
    persistent.check(t, consumer, sq=200, sk=int(t.rng.integers(60, 150)), causal=True)


@EXERCISE.holds("mended: two consumers; one and four slots", "slots and phases follow from the count")
def _(t, verdict, consumer):
    persistent.check(t, consumer, sq=256, sk=96, consumers=2)
    persistent.check(t, consumer, sq=192, sk=70, stages=1)
    persistent.check(t, consumer, sq=192, sk=100, stages=4)
