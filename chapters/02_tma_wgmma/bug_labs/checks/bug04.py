from fa3_course.checker import Exercise, Trial, protocol
from fa3_course.checker.catalogue import load_source
from hopper_sim import GlobalTensor, launch

EXERCISE = Exercise(
    "02.B4",
    "bug04_fence.py",
    functions={"verdict": 1, "epilogue": 0},
    hints=(
        "Consumer 0 fences. Which stores can its fence cover: has consumer 1 handed over its own by then?",
        "The barrier orders consumer 1's stores before the TMA copy, but they went through the ordinary path, and no fence stands "
        'after them on the way to the copy: "missing proxy fence".',
        "Fence right after store_shared, in both consumers, before they come to the barrier (what CUTLASS does); or in consumer 0 "
        "after the barrier.",
    ),
    faults=(
        ("[:, None])\n    wg.fence_async_proxy()\n", "[:, None])\n"),
        ("        await both.sync()", "        wg.fence_async_proxy()\n        await both.sync()"),
    ),
)
NAMES = ("consumer0", "consumer1")


class Case:
    """Two consumers with accumulators of fresh numbers; `rows` of their 128 exist."""

    def __init__(self, t, rows=128, d=64):
        self.t, self.rows, self.d = t, rows, d
        self.values, self.row_sum = t.normal(128, d), t.rng.uniform(1, 9, 128)

    def run(self, seed, epilogue):
        self.out = GlobalTensor.output("O", (self.rows, self.d), "f16")

        async def consumer(wg, me, staged, both):
            acc_O, mine = wg.registers("O", (64, self.d)), slice(64 * me, 64 * me + 64)
            acc_O.write(self.values[mine])
            await protocol.role(epilogue)(wg, me, acc_O, self.row_sum[mine].copy(), staged, self.out, both)

        def build(sm):
            staged = sm.shared("staged", (2, 64, self.d), "f16")
            both = sm.named_barrier(1, threads=256, name="BOTH_STAGED", by=NAMES)
            for me, name in enumerate(NAMES):
                sm.role(name, consumer, me, staged, both)

        return launch(build, [()], outputs=(self.out,), seed=seed)

    def check(self, epilogue):
        seed = int(self.t.rng.integers(10**6))
        report = protocol.clean(lambda: self.run(seed, epilogue), f"{self.rows} rows, d {self.d}")
        truth = (self.values / self.row_sum[:, None])[: self.rows]
        what = f"out, {self.rows} rows, d {self.d}"
        self.t.close(self.out.numpy(), truth, what, same_precision=truth.astype("float16"))
        return report


@EXERCISE.holds(
    "your prediction is the verdict on the role as handed out", "what has consumer 0 heard of when it fences?"
)
def _(t, verdict, epilogue):
    protocol.expect_verdict(t, EXERCISE, verdict, Case(t).run)


@EXERCISE.holds("mended: clean and right", "a fence after the stores of each, on the way to the copy")
def _(t, verdict, epilogue):
    Case(t).check(epilogue)


@EXERCISE.holds("mended: rows past the end, wider rows", "the store's box may hang over the end of the tensor")
def _(t, verdict, epilogue):
    Case(t, rows=int(t.rng.integers(65, 128))).check(epilogue)
    Case(t, rows=int(t.rng.integers(1, 65)), d=128).check(epilogue)


@EXERCISE.holds("mended: under any timing", "who stores must have met the other, and must wait until the copy has read")
def _(t, verdict, epilogue):
    for _ in range(6):
        Case(t).check(epilogue)


@EXERCISE.holds("one store, one meeting", "no second barrier and no second copy is needed")
def _(t, verdict, epilogue):
    seed = int(t.rng.integers(10**6))
    ours = load_source(EXERCISE.solution, "ours.py", "ours").epilogue
    mine, best = (Case(Trial(seed)).check(role) for role in (epilogue, ours))
    t.expect(
        mine.cycles <= 1.04 * best.cycles, f"{mine.cycles:,.0f} cycles, the course's epilogue takes {best.cycles:,.0f}"
    )
