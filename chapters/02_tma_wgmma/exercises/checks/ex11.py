import numpy as np

from fa3_course.checker import Exercise, protocol
from fa3_course.checker import truth as exact
from hopper_sim import GlobalTensor, launch

EXERCISE = Exercise(
    "02.11",
    "ex11_epilogue.py",
    functions={"epilogue": 0},
    hints=(
        "Order: store_shared, fence_async_proxy, tma_store, commit_store, wait_store(0). The fence stands between the ordinary "
        "stores and the copy that reads them.",
        "Where row_sum is 0 divide by 1, and write -inf as the LSE (0 * -inf and -inf + inf are NaN).",
        "lse = ln(2) * (scale_log2 * row_max + log2(row_sum)); `await wg.store_global(lse, (first_row,), values)`.",
    ),
)


def run(t, epilogue, rows=64, d=64, consumers=1, empty=0.0, spread=1.0):
    """Consumers hold the exact accumulators of random scores; compares what they store with the truth."""
    tall = 64 * consumers
    scores, v = spread * t.normal(tall, 50), t.normal(50, d)
    scores[t.rng.random(tall) < empty] = -np.inf
    scale_log2 = float(t.rng.uniform(0.1, 0.4))
    row_max = scores.max(axis=1).astype(np.float32)
    p = np.exp2(scale_log2 * (scores - np.where(np.isneginf(row_max), 0, row_max)[:, None]))
    row_sum = p.sum(axis=1).astype(np.float32)
    out, lse = GlobalTensor.output("O", (rows, d), "f16"), GlobalTensor.output("LSE", (rows,), "f32")

    def build(sm):
        staged = sm.shared("staged", (consumers, 64, d), "f16")
        for me in range(consumers):
            sm.role(f"consumer{me}", consumer, staged[me], me)

    async def consumer(wg, staged, me):
        acc_O, mine = wg.registers("O", (64, d)), slice(64 * me, 64 * me + 64)
        acc_O.write(p[mine] @ v)
        arguments = (row_max[mine].copy(), row_sum[mine].copy(), scale_log2, staged, out, lse, 64 * me)
        await protocol.role(epilogue)(wg, acc_O, *arguments)

    what = f"{rows} rows of {tall}, d {d}"
    seed = int(t.rng.integers(10**6))
    protocol.clean(lambda: launch(build, [()], outputs=(out, lse), seed=seed), what)
    natural = scale_log2 * np.log(2.0) * scores[:rows]
    truth = exact.softmax(natural) @ v
    t.close(out.numpy(), truth, f"out, {what}", same_precision=truth.astype(np.float16))
    t.close(lse.numpy(), exact.log_sum_exp(natural), f"LSE, {what}", tolerance=1e-5)


@EXERCISE.holds("out and LSE of 64 rows, and a clean protocol", "normalise, stage, fence, store, wait")
def _(t, epilogue):
    run(t, epilogue)


@EXERCISE.holds("rows past the end are dropped", "TMA clips its box, and store_global its rows: nothing to do for you")
def _(t, epilogue):
    run(t, epilogue, rows=int(t.rng.integers(1, 64)), d=128)


@EXERCISE.holds(
    "rows without keys give 0 and -inf", "0 / 0 and 0 * -inf are NaN: replace the sum and the maximum first"
)
def _(t, epilogue):
    run(t, epilogue, empty=0.5)
    run(t, epilogue, empty=1.0)


@EXERCISE.holds("two consumers, each its own 64 rows", "store to first_row, not to 0")
def _(t, epilogue):
    run(t, epilogue, rows=100, consumers=2)


@EXERCISE.holds("large scores: the LSE is a natural logarithm", "log2(sum) + scale_log2 * max, times ln(2)")
def _(t, epilogue):
    run(t, epilogue, spread=300.0)


@EXERCISE.holds("clean under any timing", "the role may return only when the store has left shared memory")
def _(t, epilogue):
    for _ in range(4):
        run(t, epilogue, rows=120, consumers=2)
