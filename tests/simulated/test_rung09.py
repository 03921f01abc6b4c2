"""The library's protocol on the simulated SM: the mailbox, the vote, the second S, and what the simulator says of their faults."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa3_course import simulated
from fa3_course.simulated import parts, rung09
from fa3_lib.config import forward_config
from hopper_sim import HOPPER, SM, Fault, GlobalTensor, Kind, Role, launch, patched
from tests.fa3_lib.large_weights import KINDS, ROWS, add_courses, assert_close_to_truth

WILD = HOPPER.with_(jitter=1.0)
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


def configuration(causal=False, dynamic=False, **changes):
    config = simulated.configuration("9", 64, causal, **{"tile_m": 128, "tile_n": 32, "ping_pong": True} | changes)
    return replace(config, dynamic=dynamic)


def draw(sq, sk, heads=1, kind=None, rows="random", tile_n=32, dtype="bf16"):
    """q, k, v of 64 columns with scores that jump between key blocks, if `kind` says so."""
    q, k, v = (torch.randn((1, s, heads, 64), dtype=DTYPES[dtype]) for s in (sq, sk, sk))
    if kind:
        add_courses(q, k, kind, rows, tile_n)
    return q, k, v


def run(tensors, config, dtype="bf16", seed=0, machine=HOPPER, ctas=1):
    """out and lse as torch tensors, how often S was computed once more, and the problem."""
    p = simulated.make_problem("9", *(x.float().numpy() for x in tensors), config.causal, config=config, dtype=dtype)
    grid = [(p, cta, ctas) for cta in range(ctas)]
    report = launch(rung09.build, grid, (p.out, p.lse), machine, seed, ctas_per_sm=ctas)
    again = sum(event["name"] == "QK again" for event in report.timeline.events)
    return torch.from_numpy(p.out.numpy()).to(DTYPES[dtype]), torch.from_numpy(p.lse.numpy()), again, p


def test_the_library_is_rung_9():
    for seqlen_q in (None, 512, 4096):
        for d in (64, 96, 128, 192, 256):
            for causal in (False, True):
                assert simulated.configuration("9", d, causal, seqlen_q) == forward_config(d, d, causal, seqlen_q)


# --- numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_jump(dtype, kind, rows):
    """The data of the kernel's tests on the card; where a weight must grow too large, S is computed once more."""
    for causal, own_output in ((False, True), (True, False)):
        tensors = draw(130, 200, 1, kind, rows, dtype=dtype)
        config = configuration(causal, causal, own_output=own_output, direct_output=not own_output)
        out, lse, again, _ = run(tensors, config, dtype, seed=int(torch.randint(1000, ())), machine=WILD)
        assert_close_to_truth(out, lse, *tensors, causal=causal)
        if kind == "falling":
            assert not again
        elif rows == "every" and kind in ("hundreds", "rising"):
            assert again


def test_ordinary_scores_never_need_a_second_s():
    for dtype in DTYPES:
        assert run(draw(128, 500, dtype=dtype), configuration(), dtype)[2] == 0


def test_a_maximum_that_is_never_raised_is_a_wrong_number(monkeypatch):
    """So the second S is not only there, the data need it."""
    monkeypatch.setattr(rung09.KeptMaximum, "too_large", lambda self, sums: np.zeros(sums.shape, dtype=bool))
    for kind in ("hundreds", "anywhere"):
        tensors = draw(128, 500, kind=kind, rows="every")
        out, lse, again, _ = run(tensors, configuration())
        assert not again
        with pytest.raises(AssertionError):
            assert_close_to_truth(out, lse, *tensors)


@pytest.mark.parametrize("garbage", ("times 1000", np.nan))
def test_rows_know_nothing_of_each_other(garbage):
    """Rows r and r + 8 of one thread, and all others: one row's second S leaves their bits."""
    q, k, v = draw(128, 300)
    out, lse, _, _ = run((q, k, v), configuration())
    repeats = 0
    for row in (0, 8, 77):
        bad = q.clone()
        bad[0, row] = q[0, row] * 1000 if garbage == "times 1000" else garbage
        new_out, new_lse, again, _ = run((bad, k, v), configuration())
        repeats += again
        if garbage != garbage:
            assert new_out[0, row].isnan().all() and new_lse[0, 0, row].isnan()
        new_out[0, row], new_lse[0, 0, row] = out[0, row], lse[0, 0, row]
        assert torch.equal(new_out, out) and torch.equal(new_lse, lse)
    assert repeats


def test_every_seed_gives_the_same_bits():
    """Of three CTAs that take tiles from one counter, with a second S here and there."""
    tensors, bits = draw(280, 280, 2, "anywhere"), None
    for seed in range(6):
        out, lse, again, p = run(tensors, configuration(True, True), seed=seed, machine=WILD, ctas=3)
        assert again and not p.counter.stored.any(), "the counter is 0 after the launch"
        new = out.view(torch.int16).numpy().tobytes() + lse.numpy().tobytes()
        bits = bits or new
        assert new == bits, f"seed {seed}"


# --- the walk ------------------------------------------------------------------------------------------------------------


@given(m_blocks=st.integers(1, 20), heads=st.integers(1, 6), batch=st.integers(1, 3), section=st.integers(0, 20))
def test_the_dynamic_walk_has_every_tile_once_and_long_ones_first(m_blocks, heads, batch, section):
    tensor = GlobalTensor.output("Q", (batch, 128 * m_blocks, heads, 64), "bf16")
    p = rung09.Problem9(configuration(True, True), tensor, tensor, tensor, tensor, tensor, 1.0, section)
    tiles = [p.tile(index) for index in range(p.end)]
    assert sorted(tiles) == [(m, h, b) for m in range(m_blocks) for h in range(heads) for b in range(batch)]
    size = (section or heads * batch) * m_blocks
    for start in range(0, p.end, size):
        rows = [m for m, _, _ in tiles[start : start + size]]
        assert rows == sorted(rows, reverse=True)


def test_the_dynamic_walk_is_the_kernel_s():
    walk = pytest.importorskip("fa3_lib.walk", reason="nvidia-cutlass-dsl has wheels for Linux only")
    tile = walk.Walk.tile.__wrapped__
    for m_blocks, heads, batch, section in ((5, 3, 2, 4), (3, 2, 2, 4), (1, 7, 1, 2)):
        tensor = GlobalTensor.output("Q", (batch, 128 * m_blocks, heads, 64), "bf16")
        p = rung09.Problem9(configuration(True, True), tensor, tensor, tensor, tensor, tensor, 1.0, section)
        kernel = walk.Walk(p.config, 128 * m_blocks, heads, batch, section)
        assert kernel.end == p.end
        assert [tile(kernel, index) for index in range(p.end)] == [p.tile(index) for index in range(p.end)]


def test_a_tile_is_not_taken_before_its_cta_is_nearly_done(monkeypatch):
    """Taken when the tile before it begins, it waits for a CTA that may be busy for long, while others run out of work."""
    loaded, taken = [], []
    load_k, atomic_add = parts.load_k, Role.atomic_add

    def counting_load(*arguments):
        loaded.append(arguments)
        return load_k(*arguments)

    def counting_add(role, counter, at, value):
        if at == (0,):
            taken.append(len(loaded))
        return atomic_add(role, counter, at, value)

    monkeypatch.setattr(parts, "load_k", counting_load)
    monkeypatch.setattr(Role, "atomic_add", counting_add)
    *_, p = run(draw(300, 280, 2), configuration(True, True))
    blocks = np.cumsum([len(p.blocks(p.tile(index)[0])) for index in range(p.end)])
    assert len(taken) == p.end and blocks[-1] == len(loaded)
    assert all(count >= before - 1 for count, before in zip(taken, blocks, strict=True))


# --- faults --------------------------------------------------------------------------------------------------------------

RELEASE = "    t.k_empty[slot].arrive(parts.WARPS)\n"
WAIT_PV = "    await wg.wait_group(0)\n"
RELEASE_V = "    t.v_empty[last_slot].arrive(parts.WARPS)\n"
VOTE = "    again = await vote.vote("
WAIT = "    await self.full.wait(taken % 2)\n"
LOAD = "    index = int((await role.load_shared(self.slot))[0])\n"
FREE = "    self.empty.arrive(role.threads // parts.WARP)\n"
FAULTS = {
    "K released before the vote": (rung09, "without_maximum", [(RELEASE, ""), (VOTE, RELEASE + VOTE)], {Kind.OVERWRITE_BEFORE_FREE}),
    "a vote of three warps": (rung09, "without_maximum", [("by_thread(rows.too_large(sums))", "by_thread(rows.too_large(sums))[:96]")], {Kind.DEADLOCK}),
    "the second S is not waited for": (rung09, "without_maximum", [("        await wg.wait_group(0)\n        shrink", "        shrink")], {Kind.ACCUMULATOR_IN_FLIGHT}),
    "V released under its product": (rung09, "without_maximum", [(WAIT_PV + RELEASE_V, RELEASE_V + WAIT_PV)], {Kind.OVERWRITE_BEFORE_FREE}),
    "the mailbox is read without an arrival": (rung09.Mailbox, "read", [(FREE, "")], {Kind.DEADLOCK}),
    "one arrival per reader, not per warp": (rung09.Mailbox, "read", [("role.threads // parts.WARP", "1")], {Kind.DEADLOCK}),
    "the mailbox is read without a wait": (rung09.Mailbox, "read", [(WAIT, "")], {Kind.RACE, Kind.NEVER_WRITTEN, Kind.TOO_MANY_ARRIVALS}),
    "the slot is freed before it is read": (rung09.Mailbox, "read", [(FREE, ""), (LOAD, FREE + LOAD)], {Kind.RACE, Kind.OVERWRITE_BEFORE_FREE}),
    "nobody asks for the next place": (rung09.Walk, "ask", [("        self.mail.wanted.arrive()\n", "        pass\n")], {Kind.DEADLOCK}),
    "a tile without keys does not ask": (rung09, "load_kv", [("        if not blocks:\n            walk.ask()\n", "")], {Kind.DEADLOCK}),
    "every block asks": (rung09, "load_kv", [("            if n == blocks[-1]:\n                walk.ask()\n", "            walk.ask()\n")], {Kind.TOO_MANY_ARRIVALS, Kind.DEADLOCK}),
    "the slot is overwritten early": (rung09, "scheduler", [("        await mail.empty.wait(posted % 2 ^ 1)\n", "")], {Kind.RACE, Kind.OVERWRITE_BEFORE_FREE, Kind.TOO_MANY_ARRIVALS}),
    "the last place is not posted": (rung09, "scheduler", [("    while index < p.end:", "    while index < p.end - walk.ctas:")], {Kind.ROLES_DISAGREE, Kind.DEADLOCK}),
    "CTAs begin where the counter does": (rung09, "scheduler", [("index = walk.ctas + await", "index = await")], {Kind.WRITTEN_TWICE, Kind.NEVER_WRITTEN}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(monkeypatch, fault):
    owner, name, edits, kinds = FAULTS[fault]
    config = configuration(True, True)
    # many keys, for a second S; few, for tiles of one block and of none, in which the next place is wanted at once
    problems = [draw(280, keys, 1, "rising", "every") for keys in (280, 40)]

    def run_all(**machine):
        for tensors in problems:
            run(tensors, config, **machine)

    run_all()
    broken = getattr(owner, name)
    for old, new in edits:
        broken = patched(broken, old, new)
    monkeypatch.setattr(owner, name, broken)
    for seed in range(3):
        with pytest.raises(Fault) as verdict:
            run_all(seed=seed, machine=WILD if seed % 2 else HOPPER)
        assert verdict.value.kind in kinds, str(verdict.value)


def test_a_k_released_too_early_shows_only_where_it_is_read_again(monkeypatch):
    broken = patched(patched(rung09.without_maximum, RELEASE, ""), VOTE, RELEASE + VOTE)
    monkeypatch.setattr(rung09, "without_maximum", broken)
    run(draw(128, 500), configuration(), machine=WILD)
    with pytest.raises(Fault):
        run(draw(128, 500, kind="rising", rows="every"), configuration(), machine=WILD)


def test_votes():
    """Any thread's condition reaches all; a thread that stays away is waited for; counts are of whole warps."""

    async def voter(wg, barrier, conditions, seen):
        seen.append(await barrier.vote(conditions))
        seen.append(await barrier.vote(np.zeros(128)))

    def outcome(*conditions):
        sm, seen = SM(), []
        barrier = sm.named_barrier(3, threads=128 * len(conditions))
        for i, condition in enumerate(conditions):
            sm.role(f"voter{i}", voter, barrier, condition, seen)
        sm.run()
        return seen

    one = np.arange(128) == 77
    assert outcome(one) == [True, False]
    assert outcome(np.zeros(128)) == [False, False]
    assert sorted(outcome(np.zeros(128), one)) == [False, False, True, True]
    for conditions, kind, words in ((one[:96], Kind.DEADLOCK, "96 of 128"), (one[:70], Kind.BAD_USE, "whole warps")):
        with pytest.raises(Fault, match=words) as verdict:
            outcome(conditions)
        assert verdict.value.kind == kind
