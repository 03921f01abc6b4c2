"""TMA boxes, WGMMA products, time, against NumPy and against arithmetic."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hopper_sim import HOPPER, SM, Fault, GlobalTensor, Kind, formats, launch
from hopper_sim.wgmma import short_product


def run(build, seed=0, machine=HOPPER):
    sm = SM(machine, seed)
    build(sm)
    return sm.run()


# --- TMA ---------------------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_boxes_of_any_rank_with_zero_fill_and_clipping(data):
    rank = data.draw(st.integers(1, 5), label="rank")
    outer = data.draw(st.lists(st.integers(1, 4), min_size=rank - 1, max_size=rank - 1), label="outer extents")
    shape = (*outer, 8 * data.draw(st.integers(1, 3), label="inner / 8"))
    box = (*(data.draw(st.integers(1, 4)) for _ in outer), 8 * data.draw(st.integers(1, 3)))
    at = tuple(data.draw(st.integers(-3, 5)) for _ in shape)
    seed = data.draw(st.integers(0, 2**16), label="seed")
    values = np.random.default_rng(seed).integers(1, 100, shape).astype(np.float32)
    source, target = GlobalTensor.input("X", values, "f16"), GlobalTensor.output("Y", shape, "f16")
    seen = {}

    async def copy(wg, tile, bar):
        bar.arrive_expect_tx(tile.nbytes)
        wg.tma_load(tile, source, at, box, bar)
        await bar.wait(0)
        seen["tile"] = await wg.load_shared(tile)
        wg.tma_store(tile, target, at, box)
        wg.commit_store()
        await wg.wait_store(0)

    run(lambda sm: sm.role("copy", copy, sm.shared("tile", box, "f16"), sm.mbarrier("bar", 1)), seed)

    want = np.zeros(box, dtype=np.float32)
    for index in np.ndindex(*box):
        where = tuple(a + i for a, i in zip(at, index, strict=True))
        if all(0 <= w < extent for w, extent in zip(where, shape, strict=True)):
            want[index] = values[where]
            assert target.numpy()[where] == values[where]
    np.testing.assert_array_equal(seen["tile"], want)
    assert target.writes.sum() == (want > 0).sum()


@pytest.mark.parametrize(
    "shape, box, dtype, rule",
    [
        ((8, 12), (8, 4), "f16", "innermost box dimension is 8 bytes"),
        ((8, 12), (8, 8), "f16", "rows of X are 24 bytes apart"),
        ((512, 16), (512, 16), "f16", "a box dimension lies in 1..256"),
        ((2, 2, 2, 2, 2, 16), (1,) * 5 + (16,), "f16", "1 to 5 dimensions"),
    ],
)
def test_the_rules_of_a_tensor_map(shape, box, dtype, rule):
    async def load(wg, tile, bar, x):
        bar.arrive_expect_tx(tile.nbytes)
        wg.tma_load(tile, x, (0,) * len(shape), box, bar)
        await bar.wait(0)

    def build(sm):
        x = GlobalTensor.input("X", np.zeros(shape), dtype)
        sm.role("load", load, sm.shared("tile", box, dtype), sm.mbarrier("bar", 1), x)

    with pytest.raises(Fault, match=rule):
        run(build)


# --- WGMMA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f16", "bf16", "e4m3", "e5m2"])
@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize("mn_major", [False, True])
def test_products_and_accumulation(dtype, from_registers, mn_major):
    rng = np.random.default_rng(11)
    n, k = 72, 64
    a, b = formats.rounded(rng.standard_normal((64, k)), dtype), formats.rounded(rng.standard_normal((k, n)), dtype)
    seen = {}

    async def multiply(wg, tile_a, tile_b):
        await wg.store_shared(tile_a, a)
        await wg.store_shared(tile_b, b if mn_major else b.T)
        wg.fence_async_proxy()
        acc = wg.registers("acc", (64, n))
        operand = tile_a
        if from_registers:
            operand = wg.registers("a", (64, k), dtype)
            operand.write(a)
        wg.wgmma_fence()
        wg.wgmma(acc, operand, tile_b if mn_major else tile_b.T, accumulate=False)
        wg.wgmma(acc, operand, tile_b if mn_major else tile_b.T)
        wg.commit()
        await wg.wait_group(0)
        seen["acc"] = acc.read()

    def build(sm):
        tile_b = sm.shared("B", (k, n) if mn_major else (n, k), dtype)
        sm.role("multiply", multiply, sm.shared("A", (64, k), dtype), tile_b)

    if mn_major and dtype.startswith("e"):
        with pytest.raises(Fault) as verdict:
            run(build)
        assert verdict.value.kind == Kind.NOT_K_MAJOR
    else:
        run(build)
        np.testing.assert_allclose(seen["acc"], 2 * (a.astype(np.float64) @ b), rtol=1e-5, atol=1e-4)


def test_the_short_accumulator_stops_where_the_card_does():
    """All logits equal, P = 2**8, V = 1: an H200's sum stops at 2**22, that is after 16,384 keys."""
    acc, p, v = np.zeros((1, 1), np.float32), np.full((1, 512), 256.0), np.ones((512, 1))
    sums = []
    for _ in range(2 * 16384 // 512):
        acc = short_product(acc, p, v)
        sums.append(float(acc[0, 0]))
    assert sums[16384 // 512 - 1] == 2.0**22 and sums[-1] == 2.0**22
    assert sums[:4] == [512 * 256.0 * i for i in (1, 2, 3, 4)]


def test_the_short_accumulator_keeps_thirteen_bits():
    rng = np.random.default_rng(3)
    a, b = rng.uniform(0.5, 1, (4, 64)), rng.uniform(0.5, 1, (64, 5))
    error = short_product(np.zeros((4, 5)), a, b) / (a @ b) - 1
    assert (error <= 0).all(), "the hardware cuts towards zero"
    assert 2**-14 < np.abs(error).max() < 32 * 2**-13


# --- time --------------------------------------------------------------------------------------------------------------


def test_a_unit_is_shared_and_never_does_two_things_at_once():
    work = 16 * 640.0  # 640 cycles of MUFU

    async def exponentials(wg):
        await wg.spend("exp", mufu=work)

    machine = HOPPER.with_(jitter=0.0)
    alone = run(lambda sm: sm.role("wg0", exponentials), machine=machine)
    both = run(lambda sm: [sm.role(f"wg{i}", exponentials) for i in (0, 1)], machine=machine)
    fixed, stretch = machine.launch_latency + machine.math_latency, 1 / machine.math_efficiency
    assert alone.cycles == pytest.approx(fixed + 640 * stretch)
    assert both.cycles == pytest.approx(fixed + 1280 * stretch)
    assert both.busy["mufu"] == 1280 and both.bound == "mufu"
    ends = sorted(e["end"] for e in both.timeline.events if e["lane"].startswith("wg"))
    assert ends[1] - ends[0] <= machine.quantum * stretch + 1e-6, "two that ask together finish together"


def test_ctas_on_one_sm_share_its_units():
    """Four CTAs, two at a time: MUFU does the same work, and the start of a CTA runs under the work of another."""
    busy = []

    async def exponentials(wg, tile):
        await wg.store_shared(tile, np.full((16, 8), wg.sm.slot))
        busy.append(wg.sm.slot)
        await wg.spend("exp", mufu=16 * 640.0)

    def build(sm):
        sm.role("wg", exponentials, sm.shared("tile", (16, 8), "f32"))

    machine = HOPPER.with_(jitter=0.0)
    one, two = (launch(build, [()] * 4, machine=machine, ctas_per_sm=n) for n in (1, 2))
    assert one.busy == two.busy and one.busy["mufu"] == 4 * 640
    work = 4 * 640 / machine.math_efficiency
    assert one.cycles > work + 4 * machine.launch_latency
    assert work + machine.launch_latency < two.cycles < one.cycles - machine.launch_latency
    assert busy[:4] == [0] * 4 and sorted(busy[4:]) == [0, 0, 1, 1]
    assert two.timeline.lanes[:2] == ["wg", "wg of CTA slot 1"]
    assert len(two.cta_ends) == 4 and two.cta_ends[-1] == two.cycles


def test_a_cta_that_hangs_beside_a_good_one_is_found():
    async def role(wg, bar, hangs):
        if hangs:
            await bar.wait(0)

    def build(sm, hangs):
        sm.role("wg", role, sm.mbarrier("bar", 1, by=("wg",)), hangs)

    with pytest.raises(Fault, match=r"wg waits for bar\.wait"):
        launch(build, [(False,), (True,), (False,), (False,)], ctas_per_sm=2)
    with pytest.raises(Fault, match="ctas_per_sm = 0 must be at least 1"):
        launch(build, [(False,)], ctas_per_sm=0)


@pytest.mark.parametrize(
    "threads, registers, smem, ctas",
    [
        (128, 122, 41_984, 4),  # registers come in eights: 128 x 128 x 4 is the whole file
        (128, 163, 82_944, 2),  # 2 x (82,944 + 1024) fit into 228 KB, 3 do not
        (384, 168, 82_944, 1),
        (1024, 24, 1024, 2),  # threads
        (128, 24, 232_449, 0),  # more than a CTA may use
    ],
)
def test_how_many_ctas_share_an_sm(threads, registers, smem, ctas):
    assert HOPPER.resident_ctas(threads, registers, smem) == ctas


def test_the_tensor_core_takes_the_time_of_its_flops():
    machine = HOPPER.with_(jitter=0.0)

    async def multiply(wg, tile, dtype):
        await wg.store_shared(tile, np.zeros((128, 128)))
        wg.fence_async_proxy()
        acc = wg.registers("acc", (64, 128))
        wg.wgmma_fence()
        for i in range(4):
            wg.wgmma(acc, tile[0:64], tile.T, accumulate=i > 0)
        wg.commit()
        await wg.wait_group(0)

    for dtype, rate in (("bf16", 4096), ("e4m3", 8192)):
        report = run(
            lambda sm, dtype=dtype: sm.role("wg", multiply, sm.shared("x", (128, 128), dtype), dtype), machine=machine
        )
        assert report.busy["tensor core"] == pytest.approx(4 * 2 * 64 * 128 * 128 / rate)


def test_timeline_lanes_of_units_add_up():
    from hopper_sim import gallery

    report = gallery.run(gallery.problem(2))
    for unit, busy in report.busy.items():
        events = sorted((e["start"], e["end"]) for e in report.timeline.events if e["lane"] == unit)
        assert sum(end - start for start, end in events) * HOPPER.efficiency(unit) == pytest.approx(busy)
        assert all(b[0] >= a[1] - 1e-6 for a, b in itertools.pairwise(events)), f"{unit} does two things at once"
