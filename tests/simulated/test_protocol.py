"""The simulated rungs share their counts with the DSL kernel, and a wrong count or a wrong line fails here, by name."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3_course import rungs, simulated
from fa3_course.simulated import parts, rung03, rung04, rung05, rung06, rung07, rung07b, rung08, rung10
from fa3_lib.config import ForwardConfig, forward_config
from fa3_lib.reference import attention
from hopper_sim import HOPPER, Fault, Kind, launch, patched

WILD = HOPPER.with_(jitter=1.0)


def run(number, config, seqlen_q=128, seqlen_k=200, seed=0, machine=HOPPER, d=64):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, s, 1, d)) for s in (seqlen_q, seqlen_k, seqlen_k))
    return simulated.simulate(number, q, k, v, config.causal, config=config, machine=machine, seed=seed)


@pytest.mark.parametrize("number", ["3", "4", "5", "6", "7", "7b", "8"])
def test_the_dsl_rung_is_compiled_from_the_same_configuration(number):
    pytest.importorskip("cutlass", reason="the rungs' files import the DSL")
    try:
        module = rungs.find(number).module()
    except KeyError:
        pytest.skip(f"rung {number} has no DSL kernel yet")
    for head_dim in (64, 96, 128, 192, 256):
        for causal in (False, True):
            assert module.make_config(head_dim, causal) == simulated.configuration(number, head_dim, causal)


def test_rung_9_is_the_library():
    for seqlen_q, d, causal in itertools.product((None, 512, 4096), (64, 128, 256), (False, True)):
        assert simulated.configuration("9", d, causal, seqlen_q) == forward_config(d, d, causal, seqlen_q)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_registers_of_rung_3_are_those_of_its_machine_code(head_dim):
    pytest.importorskip("cutlass", reason="the rungs' files import the DSL")
    from fa3_course import sass

    module, rung = rungs.find("3").module(), simulated.rung("3")
    config = module.make_config(head_dim, False)
    (report,) = sass.compile_report(lambda options: module.compile_rung(config, torch.bfloat16, options))
    assert rung.resident_ctas(config) == HOPPER.resident_ctas(128, report.registers, report.smem) > 1


@given(m_blocks=st.integers(1, 40), sequences=st.integers(1, 12), ctas=st.integers(1, 140), causal=st.booleans())
def test_the_walk_visits_every_tile_once_and_pairs_are_equally_long(m_blocks, sequences, ctas, causal):
    walks = [parts.walk(m_blocks, sequences, causal, cta, ctas) for cta in range(ctas)]
    visited = [tile for tiles in walks for tile in tiles]
    assert sorted(visited) == [(m, s) for m in range(m_blocks) for s in range(sequences)]
    if causal:
        for tiles in walks:
            for i, (m, sequence) in enumerate(tiles):
                mirror = (m_blocks - 1 - m, sequence)
                assert mirror == (m, sequence) or mirror in tiles[max(i - 1, 0) : i + 2]
    units = [len({(min(m, m_blocks - 1 - m) if causal else m, s) for m, s in tiles}) for tiles in walks]
    assert max(units) - min(units) <= 1


@pytest.mark.parametrize("own_output", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_persistent_ctas_share_the_work(own_output, causal):
    """Three CTAs of rung 8 at once: every tile written once, the numbers of one CTA alone, and Q's count is the configuration's."""
    config = simulated.configuration("8", 64, causal, tile_m=128, tile_n=32, own_output=own_output)
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((2, s, 2, 64)) for s in (330, 200, 200))
    alone = simulated.simulate("8", q, k, v, causal, config=config)
    p = simulated.make_problem("8", q, k, v, causal, config=config)
    launch(rung08.build, [(p, *p.walk(cta, 3)) for cta in range(3)], (p.out, p.lse), HOPPER, seed=1, ctas_per_sm=3)
    assert np.array_equal(p.out.numpy(), alone.out) and np.array_equal(p.lse.numpy(), alone.lse)

    release = "t.q_empty[me].arrive(parts.WARPS)" if own_output else "t.q_empty[me].arrive()"
    overtakes = {Kind.TOO_MANY_ARRIVALS, Kind.OVERWRITE_BEFORE_FREE}  # whichever comes first
    for broken, kinds in (("pass", {Kind.DEADLOCK}), (f"{release}, {release}", overtakes)):
        namespace = dict(vars(rung08), consumer=patched(rung08.consumer, release, broken))
        build = type(rung08.build)(rung08.build.__code__, namespace)
        with pytest.raises(Fault) as verdict:
            simulated.simulate("8", q, k, v, causal, config=config, build=build)
        assert verdict.value.kind in kinds, str(verdict.value)


# --- wrong counts in the configuration ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneConsumerFrees(ForwardConfig):
    @property
    def empty_arrivals(self):
        return 4


@dataclass(frozen=True)
class AllThreadsFree(ForwardConfig):
    @property
    def empty_arrivals(self):
        return 128 * self.consumer_warpgroups


@dataclass(frozen=True)
class TwoArrivalsFill(ForwardConfig):
    @property
    def full_arrivals(self):
        return 2


@dataclass(frozen=True)
class HalfOfK(ForwardConfig):
    @property
    def k_bytes(self):
        return super().k_bytes // 2


@dataclass(frozen=True)
class TwiceV(ForwardConfig):
    @property
    def v_bytes(self):
        return 2 * super().v_bytes


@dataclass(frozen=True)
class OneBlockFewer(ForwardConfig):
    def key_blocks(self, m_block, seqlen_q, seqlen_k):
        return max(super().key_blocks(m_block, seqlen_q, seqlen_k) - 1, 0)


WRONG_COUNTS = [
    (OneConsumerFrees, Kind.TOO_MANY_ARRIVALS),
    (AllThreadsFree, Kind.DEADLOCK),
    (TwoArrivalsFill, Kind.DEADLOCK),
    (HalfOfK, Kind.WRONG_BYTES),
    (TwiceV, Kind.WRONG_BYTES),
]


@pytest.mark.parametrize("wrong, kind", WRONG_COUNTS, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("number", ["5", "6", "7", "7b", "8", "9"])
def test_a_wrong_count_of_the_configuration_fails_here(number, wrong, kind):
    good = simulated.configuration(number, 64, False, tile_n=32)
    run(number, good)
    for seed in range(3):
        with pytest.raises(Fault) as verdict:
            run(number, wrong(**vars(good)), seed=seed, machine=WILD)
        assert verdict.value.kind == kind, str(verdict.value)


def test_a_wrong_tile_range_is_a_wrong_number():
    """Producer and consumers take the range from one function, so they agree; the result then misses a key block."""
    good = simulated.configuration("5", 64, False, tile_n=32)
    assert np.abs(run("5", good).out - run("5", OneBlockFewer(**vars(good))).out).max() > 0.05


# --- wrong lines in the roles ---------------------------------------------------------------------------------------------

# (rung, module of the function, function, old, new, verdict)
WRONG_LINES = [
    ("3", rung03, "warpgroup", "await t.k_full[0].wait(i % 2)", "await t.k_full[0].wait(0)", Kind.WRONG_PHASE),
    ("3", rung03, "warpgroup", "label=\"PV\")\n        wg.commit()\n        await wg.wait_group(0)", "label=\"PV\")\n        wg.commit()", Kind.ACCUMULATOR_IN_FLIGHT),
    ("4", rung04, "producer", "await t.v_empty[slot].wait(phase ^ 1)", "pass", Kind.OVERWRITE_BEFORE_FREE),
    ("4", rung04, "consumer", "await t.v_full[slot].wait(phase)", "pass", Kind.READ_BEFORE_FULL),
    ("4", rung04, "consumer", "await t.q_full[0].wait(0)", "pass", Kind.READ_BEFORE_FULL),
    ("5", rung05, "consumer", "p.config.consumer_registers", "p.config.producer_registers", Kind.REGISTER_BUDGET),
    ("5", rung04, "consumer", "slot, phase = i % c.stages, i // c.stages % 2", "slot, phase = i % c.stages, i % 2", Kind.DEADLOCK),
    ("5", rung04, "consumer", "t.v_empty[slot].arrive(parts.WARPS)", "t.v_empty[slot].arrive(parts.WARPS) if n else None", None),
    ("6", rung06, "consumer", "        next_one.arrive()\n        await", "        await", Kind.UNBALANCED_BARRIER),
    ("6", rung06, "consumer", "        mine.arrive()  # opens the first turn", "        pass", Kind.UNBALANCED_BARRIER),
    ("6", rung06, "consumer", "        await mine.sync()", "        if i:\n            await mine.sync()", Kind.UNBALANCED_BARRIER),
    ("7", rung07, "attend", "await wg.wait_group(1 if i > 0 else 0)", "await wg.wait_group(1)", Kind.ACCUMULATOR_IN_FLIGHT),
    ("7", rung07, "attend", "        if i > 0:\n            await wg.wait_group(0)\n            t.v_empty", "        if i > 0:\n            t.v_empty", Kind.OPERAND_IN_FLIGHT),
    ("7", rung07, "load_blocks", "parts.load_k(warp, p, t, tile, blocks[i], slot)", "parts.load_k(warp, p, t, tile, blocks[i], 0)", Kind.OVERWRITE_BEFORE_FREE),
    ("7b", rung07b, "refill", "await empty[i % stages].wait(i // stages % 2 ^ 1)", "pass", Kind.OVERWRITE_BEFORE_FREE),
    ("8", rung08, "load_kv", "await t.k_empty[slot].wait(phase ^ 1)", "pass", Kind.OVERWRITE_BEFORE_FREE),
    ("8", rung08, "consumer", "await wg.wait_store(0)  # shared memory", "pass  # shared memory", Kind.RETURNED_EARLY),
    ("8", rung08, "consumer", "for number, tile in enumerate(work)", "for number, tile in enumerate(work[1:])", Kind.ROLES_DISAGREE),
    ("8", rung08, "consumer", "await t.q_full[me].wait(number % 2)", "await t.q_full[me].wait(0)", Kind.WRONG_PHASE),
    ("10", rung10, "consumer", "t.v[last_slot].T", "t.v[last_slot]", Kind.NOT_K_MAJOR),
    ("10", rung10, "consumer", "if me == 0:\n            mine.arrive()", "if True:\n            mine.arrive()", Kind.UNBALANCED_BARRIER),
]  # fmt: skip


@pytest.mark.parametrize(
    "number, module, name, old, new, kind", WRONG_LINES, ids=[f"{w[0]}-{w[2]}-{i}" for i, w in enumerate(WRONG_LINES)]
)
def test_a_wrong_line_is_named(monkeypatch, number, module, name, old, new, kind):
    config = simulated.configuration(number, 64, True, tile_n=32)
    run(number, config, seqlen_q=200)
    monkeypatch.setattr(module, name, patched(getattr(module, name), old, new))
    for seed in range(4):
        if kind is None:
            run(number, config, seqlen_q=200, seed=seed)
            continue
        with pytest.raises(Fault) as verdict:
            run(number, config, seqlen_q=200, seed=seed, machine=WILD if seed % 2 else HOPPER)
        assert verdict.value.kind == kind, str(verdict.value)


# --- random configurations ------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_configuration_is_clean_and_right(data):
    number = data.draw(st.sampled_from([n for n, rung in simulated.RUNGS.items() if not rung.fp8]), label="rung")
    consumers = 1 if number in "34" else data.draw(st.integers(2, 3), label="consumers")
    causal, d = data.draw(st.booleans(), label="causal"), data.draw(st.sampled_from([40, 64, 128]), label="head dim")
    changes = {"tile_m": 64 * consumers, "tile_n": 16 * data.draw(st.integers(1, 4), label="tile_n / 16")}
    if number != "3":
        changes["stages"] = data.draw(st.integers(1, 4), label="stages")
    if number in "89":
        changes["own_output"] = data.draw(st.booleans(), label="own output")
        changes["direct_output"] = number == "9" and not changes["own_output"]
        changes["dynamic"] = number == "9" and causal
    config = replace(simulated.configuration(number, d, causal), **changes)
    if config.accumulator_registers + 24 > config.consumer_registers:
        return
    sq, sk = data.draw(st.integers(1, 260), label="queries"), data.draw(st.integers(1, 150), label="keys")
    hk = data.draw(st.integers(1, 2), label="KV heads")
    heads, seed = hk * data.draw(st.integers(1, 2), label="group"), data.draw(st.integers(0, 2**20), label="seed")
    jitter = data.draw(st.floats(0, 1), label="jitter")
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(s) for s in ((1, sq, heads, d), (1, sk, hk, d), (1, sk, hk, d)))
    problem = simulated.make_problem(number, q, k, v, causal, config=config, dtype="f16")
    result = simulated.run(number, problem, machine=HOPPER.with_(jitter=jitter), seed=seed)
    truth, lse = (
        x.numpy()
        for x in attention(*(torch.from_numpy(t.numpy()) for t in (problem.q, problem.k, problem.v)), causal=causal)
    )
    assert np.abs(result.out - truth).max() < 8e-3
    seen = ~np.isneginf(lse)
    assert np.array_equal(~np.isneginf(result.lse), seen)
    assert np.abs(result.lse[seen] - lse[seen]).max(initial=0) < 1e-5
