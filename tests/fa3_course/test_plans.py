"""Plans of persistent kernels: complete, and the kept one is the kernel's."""

from collections import Counter

import numpy as np
import pytest

from fa3_course import plans
from fa3_lib.config import forward_config

SEED = np.random.SeedSequence().entropy % 2**32
rng = np.random.default_rng(SEED)
CONFIG = forward_config(128, 128, True)


@pytest.mark.parametrize("name", plans.PLANS)
def test_every_tile_is_taken_once(name):
    for _ in range(20):
        lengths = tuple(int(n) for n in rng.integers(1, 9, rng.integers(1, 12)))
        work, ctas = plans.Work(int(rng.integers(1, 9)), lengths, 1), int(rng.integers(1, 20))
        plan = plans.PLANS[name](work, ctas)
        want = Counter({(h, n): c for h in range(work.heads) for n, c in Counter(lengths).items()})
        assert Counter(tile for tiles in plan for tile in tiles) == want and len(plan) == ctas, SEED
        assert 0 < plans.balance(plan) <= 1
        most = plans.bytes_in_flight(plan, work)
        assert 0 < most <= min(work.heads, ctas)


@pytest.mark.parametrize("seqlen", [1024, 1152, 4096])
def test_pairs_are_those_of_the_kernel(seqlen):
    """`tile_of_round` of rung 8 and of the library, written out for whole numbers."""
    work, ctas = plans.causal_work(CONFIG, seqlen), 132
    count, pairs = len(work.lengths), -(-len(work.lengths) // 2)
    for cta, tiles in enumerate(plans.mirror_pairs(work, ctas)):
        mine = []
        for r in range(2 * -(-pairs * work.heads // ctas)):
            unit = (r >> 1) * ctas + cta
            short, head = unit % pairs, unit // pairs
            m = count - 1 - short
            if r & 1:
                m = short if short < m else -1
            if m >= 0 and head < work.heads:
                mine.append((head, work.lengths[m]))
        assert tiles == mine


def test_sorting_everything_balances_best_and_asks_for_most():
    work = plans.causal_work(CONFIG, 1024)
    judged = {name: plan(work, 132) for name, plan in plans.PLANS.items()}
    in_flight = {name: plans.bytes_in_flight(plan, work) for name, plan in judged.items()}
    assert max(in_flight, key=in_flight.get) == "all heads sorted"
    assert plans.balance(judged["all heads sorted"]) >= plans.balance(judged["as they come"])
