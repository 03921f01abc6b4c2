"""Rings over random shapes, and bad input: errors in the simulator's own terms, with the line of the role."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hopper_sim import HOPPER, SM, Fault, GlobalTensor, Kind, patched


def ring(stages: int, tiles: int, readers: int, seed: int, machine=HOPPER, producer=None, consumer=None) -> np.ndarray:
    """A producer hands `tiles` tiles to `readers` consumers through a ring; each returns the sum of what it saw."""
    x = GlobalTensor.input("X", np.arange(tiles * 64).reshape(tiles, 64) % 2003, "f32")
    names = tuple(f"consumer{i}" for i in range(readers))
    sums = np.zeros(readers)

    async def produce(warp, slots, full, empty):
        for i in range(tiles):
            slot, phase = i % stages, i // stages % 2
            await empty[slot].wait(phase ^ 1)
            full[slot].arrive_expect_tx(slots[slot].nbytes)
            warp.tma_load(slots[slot], x, (i, 0), (1, 64), full[slot])

    async def consume(wg, me, slots, full, empty):
        for i in range(tiles):
            slot, phase = i % stages, i // stages % 2
            await full[slot].wait(phase)
            sums[me] += (await wg.load_shared(slots[slot])).sum()
            await wg.spend("think", fma=1000 * (1 + me))
            empty[slot].arrive(4)

    sm = SM(machine, seed)
    slots = sm.shared("slots", (stages, 64), "f32")
    full, empty = (
        sm.mbarriers("full", stages, 1, by=("producer",)),
        sm.mbarriers("empty", stages, 4 * readers, by=names),
    )
    sm.role("producer", producer or produce, slots, full, empty, threads=32)
    for me, name in enumerate(names):
        sm.role(name, consumer or consume, me, slots, full, empty)
    sm.run()
    return sums - x.numpy().sum()


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 4), st.integers(0, 2**20), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_every_reader_sees_every_tile(stages, tiles, readers, seed, jitter):
    assert not ring(stages, tiles, readers, seed, HOPPER.with_(jitter=jitter)).any()


def one_role(body, threads=128, **shared):
    sm = SM()
    tiles = {name: sm.shared(name, *spec) for name, spec in shared.items()}
    sm.role("role", body, *tiles.values(), threads=threads)
    return sm.run()


def refused(match, body, **options):
    with pytest.raises(Fault, match=match) as verdict:
        one_role(body, **options)
    assert verdict.value.kind == Kind.BAD_USE
    assert "test_protocol.py" in str(verdict.value) and f" in {body.__name__}" in str(verdict.value)


def test_bad_input_is_refused_with_the_line_of_the_role():
    async def negative_count(wg):
        await wg.spend("x", mufu=-1)

    async def unknown_unit(wg):
        await wg.spend("x", sfu=64)

    async def negative_latency(wg):
        await wg.spend("x", latency=-5)

    async def odd_registers(wg):
        await wg.setmaxnreg(100)

    async def negative_group(wg):
        await wg.wait_group(-1)

    async def outside(wg, tile):
        await wg.load_shared(tile[4])

    async def columns(wg, tile):
        await wg.load_shared(tile[:, 0:8])

    async def thin(warp):
        warp.registers("acc", (64, 64))

    async def wrong_shape(wg, tile):
        await wg.store_shared(tile, np.zeros((4, 4)))

    refused("mufu = -1 must not be negative", negative_count)
    refused("unknown unit sfu; register arithmetic runs on fma, alu and mufu", unknown_unit)
    refused("latency = -5 must not be negative", negative_latency)
    refused("a multiple of 8", odd_registers)
    refused("n must not be negative", negative_group)
    refused("lies outside 0:4", outside, tile=((4, 64), "f16"))
    refused("contiguous", columns, tile=((4, 64), "f16"))
    refused("whole warpgroup", thin, threads=32)
    refused(r"is \(4, 64\), the values are \(4, 4\)", wrong_shape, tile=((4, 64), "f16"))


def test_unknown_units_and_impossible_machines():
    async def idle(wg):
        await wg.spend("x", fma=128)

    report = one_role(idle)
    with pytest.raises(Fault, match=r"unknown unit 'sfu'.*mufu"):
        report.share("sfu")
    with pytest.raises(Fault, match=r"tma_latency = -1 must not be negative"):
        HOPPER.with_(tma_latency=-1)
    with pytest.raises(Fault, match="no value is called tma_lattency"):
        HOPPER.with_(tma_lattency=1)
    with pytest.raises(Fault, match="jitter = 2 must be at most 1"):
        HOPPER.with_(jitter=2)


def test_declarations_are_checked():
    def plain(wg):
        pass

    async def fine(wg):
        await wg.spend("x", fma=1)

    sm = SM()
    for declare, match in (
        (lambda: sm.role("r", plain), "must be an `async def`"),
        (lambda: sm.role("r", fine, threads=48), "whole warps"),
        (lambda: sm.mbarrier("b", 0), "arrivals = 0"),
        (lambda: sm.named_barrier(0, 128), "ids run from 1"),
        (lambda: sm.named_barrier(16, 128), "ids run from 1"),
        (lambda: sm.named_barrier(3, 100), "multiple of 32"),
        (lambda: sm.shared("t", (0, 4), "f16"), "must be at least 1"),
        (lambda: sm.run(), "has no roles"),
    ):
        with pytest.raises(Fault, match=match):
            declare()
    sm.mbarrier("b", 1, by=("nobody",))
    sm.role("r", fine)
    with pytest.raises(Fault, match="made for role 'nobody'"):
        sm.run()


def test_a_phase_is_a_bit():
    async def counter(wg, bar):
        await bar.wait(2)

    sm = SM()
    sm.role("role", counter, sm.mbarrier("bar", 1))
    with pytest.raises(Fault, match=r"counter % 2"):
        sm.run()


def test_a_role_that_never_ends_is_stopped():
    async def forever(wg):
        while True:
            await wg.spend("x", fma=1000)

    sm = SM()
    sm.role("role", forever)
    with pytest.raises(Fault, match="max_cycles") as verdict:
        sm.run(max_cycles=1e5)
    assert verdict.value.kind == Kind.RUNAWAY


def test_another_roles_registers_and_instructions():
    async def first(wg, box):
        box["acc"] = wg.registers("acc", (64, 8))
        box["wg"] = wg
        await wg.spend("x", fma=1)

    async def thief(wg, box):
        await wg.spend("wait", fma=1e6)
        box["acc"].read()

    sm, box = SM(), {}
    sm.role("first", first, box)
    sm.role("thief", thief, box)
    with pytest.raises(Fault, match="thief issues an instruction of first"):
        sm.run()


def test_errors_of_python_keep_their_type_and_gain_the_role():
    async def broken(wg):
        await wg.spend("x", fma=1)
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        one_role(broken)
    assert "role role" in caught.value.__notes__[0]


def test_a_helpers_verdict_names_helper_and_role():
    async def helper(wg, tile):
        await wg.load_shared(tile)

    async def reader(wg, tile):
        await helper(wg, tile)

    with pytest.raises(Fault) as verdict:
        one_role(reader, tile=((4, 64), "f16"))
    assert verdict.value.kind == Kind.NEVER_WRITTEN
    assert " in helper: await wg.load_shared(tile) (called from " in str(verdict.value) and "in reader" in str(
        verdict.value
    )


def test_a_role_that_returns_early_is_named_with_its_last_line():
    async def hasty(wg, me, slots, full, empty):
        await full[0].wait(0)
        await wg.load_shared(slots[0])

    with pytest.raises(Fault) as verdict:
        ring(stages=2, tiles=6, readers=1, seed=0, consumer=hasty)
    assert verdict.value.kind == Kind.ROLES_DISAGREE
    assert "consumer0 has returned, after test_protocol.py" in str(verdict.value)


def test_the_package_stands_alone():
    """hopper_sim imports NumPy and the standard library, nothing of the course."""
    import ast
    import sys
    from pathlib import Path

    import hopper_sim

    for path in Path(hopper_sim.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [node.module]
                if isinstance(node, ast.ImportFrom)
                else [a.name for a in getattr(node, "names", [])]
                if isinstance(node, ast.Import)
                else []
            )
            for name in names:
                top = name.partition(".")[0]
                assert top in {"hopper_sim", "numpy"} or top in sys.stdlib_module_names, f"{path.name} imports {name}"


def test_the_readmes_example_runs_and_its_broken_form_is_named(capsys):
    from pathlib import Path

    import hopper_sim

    readme = Path(hopper_sim.__file__).with_name("README.md").read_text(encoding="utf-8")
    code = readme.split("```python\n")[1].split("```")[0]
    exec(code, {})
    assert capsys.readouterr().out.strip()
    lines = [line for line in code.splitlines() if "take this line away" not in line]
    assert len(lines) == len(code.splitlines()) - 1
    with pytest.raises(Fault) as verdict:
        exec("\n".join(lines), {})
    assert verdict.value.kind == Kind.READ_BEFORE_FULL


def test_setmaxnreg_waits_for_what_others_give_back():
    async def giver(wg):
        await wg.spend("slow", fma=128 * 5000)
        await wg.setmaxnreg(24)

    async def taker(wg):
        await wg.setmaxnreg(240)

    sm = SM()
    for name, body in (("giver", giver), ("taker0", taker), ("taker1", taker)):
        sm.role(name, body)
    assert sm.run().cycles > 5000


@pytest.mark.parametrize(
    "consumers, given, taken, fits", ((2, 24, 240, True), (2, 40, 232, True), (2, 32, 240, False), (3, 32, 160, True))
)
def test_setmaxnreg_hands_out_what_the_launch_allotted(consumers, given, taken, fits):
    """384 threads have 168 registers each, 64,512 of 65,536: with 32 + 2 x 240 per thread the last one waits for ever."""

    async def producer(wg):
        await wg.setmaxnreg(given)

    async def consumer(wg):
        await wg.setmaxnreg(taken)

    sm = SM()
    sm.role("producer", producer)
    for i in range(consumers):
        sm.role(f"consumer{i}", consumer)
    if fits:
        sm.run()
        return
    with pytest.raises(Fault, match="of 64512") as verdict:
        sm.run()
    assert verdict.value.kind == Kind.REGISTER_BUDGET


def test_patched_wants_the_line_exactly_once():
    with pytest.raises(Fault, match="occurs 0 times"):
        patched(ring, "no such line", "pass")
