import gc
import random
import time
import weakref

import numpy as np
import pytest
import torch

from bench import timing
from bench.card import Sampler

MIB = 1 << 20


def test_rotated_inputs_are_past_the_cache():
    for set_bytes in (MIB, 5 * MIB, 60 * MIB, 10_000 * MIB):
        sets = timing.input_sets(set_bytes, 60 * MIB)
        assert 2 <= sets <= timing.MAX_SETS
        assert sets == timing.MAX_SETS or sets * set_bytes >= 3 * 60 * MIB


@pytest.mark.parametrize("call_ms", [0.0, 1e-3, 0.15, 2.9, 3.1, 40.0])
@pytest.mark.parametrize("sets", [1, 2, 7, 32])
def test_a_graph_is_long_enough_and_uses_every_set_alike(call_ms, sets):
    calls = timing.graph_calls(call_ms, sets)
    assert calls % sets == 0 and calls >= sets
    assert calls * call_ms >= timing.GRAPH_MS or calls >= timing.MAX_GRAPH_CALLS
    assert calls - sets < timing.MAX_GRAPH_CALLS


def test_quartiles_are_numpys():
    seed = random.randrange(10**6)
    samples = np.random.default_rng(seed).lognormal(size=random.Random(seed).randint(1, 60)).tolist()
    np.testing.assert_allclose(timing.quartiles(samples), np.percentile(samples, [25, 50, 75]), err_msg=f"seed {seed}")


def test_every_item_comes_first_once():
    items = list("abcd")
    turns = [timing.rotated(items, turn) for turn in range(len(items))]
    assert sorted(turn[0] for turn in turns) == items and all(sorted(turn) == items for turn in turns)
    before = [dict(zip(turn[1:], turn, strict=False)) for turn in turns]
    assert all(len({turn.get(item) for turn in before}) > 2 for item in items), "never after the same one only"
    assert timing.rotated([], 3) == []


def test_the_wall_timer_goes_through_all_sets_and_measures_what_it_calls():
    seen = []

    def call(x):
        seen.append(x)
        time.sleep(0.01)

    timer = timing.WallTimer(call, [(0,), (1,), (2,)])
    samples = timer.burst(50)
    assert set(seen) == {0, 1, 2} and len(seen) == 2 + len(samples)
    assert all(sample >= 10 for sample in samples)


class FakeNvml:
    """Counts up, and has no power reading."""

    mhz = 1000

    def sm_mhz(self):
        self.mhz += 1
        return self.mhz

    def watts(self):
        return None


def test_clocks_belong_to_the_kernel_that_ran():
    with Sampler(FakeNvml(), period_s=0.001) as sampler:
        for name in ("a", "b"):
            with sampler.during(name):
                time.sleep(0.05)
            between = sampler.nvml.mhz
            time.sleep(0.02)
            assert sampler.nvml.mhz <= between + 1, "read while nothing was measured"
    (early, _), (late, watts) = sampler.take("a"), sampler.take("b")
    assert 1000 < early < late and watts is None
    assert sampler.take("a") == (None, None), "readings are taken once"


def test_a_run_without_nvml_has_no_clocks():
    with Sampler(None) as sampler, sampler.during("a"):
        pass
    assert sampler.take("a") == (None, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("timer", ["graph", "events"])
def test_the_cards_timers_call_on_every_set_and_give_samples(timer):
    sets = [(torch.randn(512, 512, device="cuda"), torch.zeros(1, device="cuda")) for _ in range(3)]

    def call(x, count):
        count += 1
        return x @ x

    used = timing.TIMERS[timer](call, sets)
    for _, count in sets:
        count.zero_()
    samples = used.burst(2.0)
    torch.cuda.synchronize()
    counts = [int(count.item()) for _, count in sets]
    assert min(counts) >= 1 and max(counts) - min(counts) <= 1
    assert samples and all(sample > 0 for sample in samples)
    assert timing.host_us(call, sets[0], calls=5, batches=3) > 0


@pytest.mark.gpu
def test_graph_timer_keeps_what_its_call_owns():
    """A graph reads addresses: were a tensor of the call's own freed, the next capture would give its memory back."""
    owned = torch.ones(1, device="cuda")
    seen = weakref.ref(owned)
    timer = timing.GraphTimer(lambda x, owned=owned: x + owned, [(torch.ones(8, device="cuda"),)] * 2)
    del owned
    gc.collect()
    assert seen() is not None and timer.burst(1.0)
