from pathlib import Path

from fa3_course.checker import Exercise, protocol
from fa3_course.checker.catalogue import load_source

HELPER = Path(__file__).with_name("fp8_cta.py")
cta = load_source(HELPER.read_text(encoding="utf-8"), HELPER, "fp8_cta")

EXERCISE = Exercise(
    "04.11",
    "ex11_turner.py",
    functions={"turner": 0},
    hints=(
        "Two rings, two waits: raw full before you read, V empty before you write.",
        "You consume the raw ring (full with the bit i // stages % 2) and fill V's (empty with the other bit: a fresh ring is empty).",
        "wait raw.full; load; raw.empty.arrive(); wait t.v_empty with phase ^ 1; store v[order].T; fence_async_proxy; t.v_full.arrive().",
    ),
)


def run(t, turner, **sizes):
    return cta.check(t, cta.transposer.builder(protocol.role(turner)), transposed=False, **sizes)


@EXERCISE.holds("one block: clean and right", "keys in the order of P's registers, then transposed")
def _(t, turner):
    run(t, turner, sk=32)


@EXERCISE.holds("many blocks, two consumers", "phases flip when a ring has gone round")
def _(t, turner):
    run(t, turner, consumers=2, sq=128, sk=256)


@EXERCISE.holds("one slot, and four", "both rings have the same number of slots")
def _(t, turner):
    run(t, turner, sk=128, stages=1)
    run(t, turner, sk=200, stages=4)


@EXERCISE.holds("ragged, causal, grouped heads", "as many blocks as everybody else: p.blocks(tile[0])")
def _(t, turner):
    run(t, turner, sq=150, sk=int(t.rng.integers(70, 120)), heads=2, causal=True)


@EXERCISE.holds(
    "clean under any timing", "a slot is free when it has been read, V is full when the fence stands behind it"
)
def _(t, turner):
    for _ in range(4):
        run(t, turner, consumers=2, sq=128, sk=160)
