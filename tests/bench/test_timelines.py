"""Stamps in chapter 3's kernels: what they leave of the machine code, and how a timeline is read out of them."""

import importlib.util
import itertools
import json
import random

import numpy as np
import pytest
import torch

from fa3_course import timeline

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("CuTe DSL has Linux wheels only", allow_module_level=True)

from bench import timelines
from bench.timelines import CONSUMER, LOAD_WARP
from fa3_course import rung_host, rungs, sass
from fa3_course.timeline import Event
from fa3_lib.config import ForwardConfig

CONFIG = ForwardConfig(128, 128, 128, 128, ping_pong=True)
PRODUCT, ISSUE, HANDOVER, SOFTMAX, BLOCKS = 512, 60, 100, 900, 12


def rung6(start: int) -> np.ndarray:
    """The stamps of a CTA of rung 6 whose counter reads `start` at its first one: turns of P V and Q K^T, softmax between."""
    buffer = np.zeros((timelines.ROLES, timelines.SLOTS, timelines.COLUMNS), np.uint32)

    def stamp(role, mark, block, time):
        marks = list(CONSUMER if role else LOAD_WARP)
        buffer[role, block, marks.index(mark)] = (start + time) % 2**32

    free, ready = 0, [0, 0]  # when the tensor cores are, and when each consumer's softmax is done
    for block in range(BLOCKS):
        for c in (0, 1):
            at = max(ready[c], free - 2 * ISSUE)
            if block:
                stamp(c + 1, "softmax done", block - 1, ready[c])
                stamp(c + 1, "V there", block - 1, ready[c] + 10)
                stamp(c + 1, "turn", block - 1, at + 20)
                stamp(c + 1, "PV issued", block - 1, at + 20 + ISSUE)
                free = max(free, at + 20) + PRODUCT
                stamp(c + 1, "O there", block - 1, free + 30)
                at = free + 30
            stamp(c + 1, "K there", block, at + 20)
            stamp(c + 1, "QK issued", block, at + 20 + ISSUE)
            free = max(free, at + 20) + PRODUCT
            stamp(c + 1, "S there", block, free + 30)
            ready[c] = free + 30 + SOFTMAX
        for i, mark in enumerate(LOAD_WARP):
            stamp(0, mark, block, free - 700 + HANDOVER * i)
    return buffer


@pytest.mark.parametrize("start", (1, 2**32 - 5000), ids=("plain", "the counter passes 2^32"))
def test_stamps_become_turns(start, tmp_path):
    buffer = rung6(start)
    whole = timelines.as_timeline(buffer, CONFIG)
    assert whole.lanes == ("producer", "consumer0", "tensor core", "consumer1")
    gemms = sorted((e for e in whole.events if e.lane == "tensor core"), key=lambda e: e.start)
    assert [(e.role, e.name) for e in gemms[2:6]] == [(f"consumer{c}", name) for c in (0, 1) for name in ("PV", "QK")]
    assert all(a.end <= b.start for a, b in itertools.pairwise(gemms))
    softmaxes = [e for e in whole.events if e.name == "softmax"]
    assert len(softmaxes) == 2 * (BLOCKS - 1) and {e.end - e.start for e in softmaxes} == {SOFTMAX}
    assert {e.name for e in whole.events if e.lane == "producer"} >= {"load K", "load V", "wait V empty"}

    part = timelines.window(whole, buffer, 3, 3 + timelines.BLOCKS)
    assert part.span == (0, part.span[1])
    timeline.write(part, tmp_path / "t.json")
    assert timeline.read(tmp_path / "t.json") == part
    assert (tmp_path / "t.json").stat().st_size < 15_000
    figure = timeline.draw(part, "rung 6")
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["load warp", "warpgroup 0", "tensor core", "warpgroup 1"]
    assert part.under("consumer0", "softmax") > 0.9 > part.moved(5).under("consumer0", "epilogue") == 0.0
    both = timeline.beside({"measured": part, "later": part.moved(10_000)})
    assert len({ax.get_xlim() for ax in both.axes}) == 1 and both.axes[0].get_xlim()[0] == 0


def test_an_empty_buffer_is_refused():
    with pytest.raises(ValueError, match="the CTA that should stamp has not run"):
        timelines.chains(np.zeros((timelines.ROLES, timelines.SLOTS, timelines.COLUMNS), np.uint32))


def test_products_follow_each_other_in_the_order_of_issue():
    def event(name, start, end):
        return Event("tensor core", name, start, end, "consumer0")

    # the first was seen late: the second, which ended at 1100 and takes 500, had begun by 600; the third waited for it
    found = timelines.in_order([event("c", 700, 1600), event("a", 0, 900), event("b", 100, 1100)], 500)
    assert [(e.name, e.start, e.end) for e in found] == [("a", 0, 600), ("b", 600, 1100), ("c", 1100, 1600)]
    idle = [event("a", 0, 500), event("b", 800, 1300)]
    assert timelines.in_order(idle, 500) == idle


@pytest.mark.parametrize("number, head_dim", (*timelines.SHOWN, ("8", 64)), ids=lambda x: str(x))
def test_stamps_change_nothing_else_in_the_machine_code(number, head_dim):
    rung = rungs._module(timelines.FILES[number])
    config = rung.make_config(head_dim, False)
    plain, stamped = (
        sass.compile_report(lambda options, k=kernel: rung_host.compile_kernel(k, config, torch.bfloat16, options))[0]
        for kernel in (rung.Attention, timelines.stamped(number, 1 << 44, 0))
    )
    assert stamped.problems() == []
    assert stamped.registers == plain.registers and stamped.smem == plain.smem
    same = (
        "HGMMA",
        "MUFU.EX2",
        "FFMA",
        "FADD",
        "FMUL",
        "F2FP",
        "UTMALDG",
        "UTMASTG",
        "BAR",
        "SYNCS",
        "FMNMX",
        "USETMAXREG",
        "BRA",
        "WARPGROUP",
    )
    assert {op: stamped.count(op) for op in same} == {op: plain.count(op) for op in same}
    assert stamped.count("STG") >= plain.count("STG") + 18  # the marks of two loop bodies and of the load warp
    text = (timelines.results.ROOT / timelines.FILES[number]).read_text(encoding="utf-8")
    assert "stamp" not in text and "clock" not in text


def test_a_rung_that_has_changed_is_refused():
    with pytest.raises(ValueError, match="the rung has no such lines"):
        timelines.change("class Attention:\n    pass\n", timelines.K_STAGE)


@pytest.mark.gpu
@pytest.mark.parametrize("number, head_dim", (*timelines.SHOWN, ("6", 64)), ids=lambda x: str(x))
def test_on_the_card(number, head_dim):
    from bench import card

    with card.Sampler(None) as sampler, torch.no_grad():
        for _ in range(3):  # another process may have had the card between two stamps
            found = timelines.record(number, head_dim, random.randrange(2**31), sampler)
            if number != "6" or turns_are_whole(found):
                break
    consumers = {e.role for e in found.events if e.lane == "tensor core"}
    assert consumers == {f"consumer{c}" for c in range(found.meta["tile_m"] // 64)}
    for role in consumers:
        mine = [e.name for e in found.events if e.lane == "tensor core" and e.role == role]
        assert min(mine.count("QK"), mine.count("PV")) >= timelines.BLOCKS - 2
        assert any(e.name == "softmax" for e in found.events if e.lane == role)
    assert len(json.dumps(found.as_dict())) < 30_000
    if (number, head_dim) == ("6", 128):  # the softmax is shorter than the other's turn, so somebody waits for his own
        assert any(e.name == "turn" for e in found.events)
    assert number != "6" or turns_are_whole(found)


def turns_are_whole(timeline):
    """PV and QK of one consumer, then of the next."""
    gemms = sorted((e for e in timeline.events if e.lane == "tensor core"), key=lambda e: e.start)
    changes = sum(a.role != b.role for a, b in itertools.pairwise(gemms))
    return changes <= len(gemms) / 2 + 1
