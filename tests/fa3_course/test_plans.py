"""Plans of persistent kernels: complete, and the kept one is the kernel's."""

from collections import Counter

import numpy as np
import pytest

from fa3_course import plans
from fa3_lib.config import L2_BYTES, forward_config

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


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("section", [1, 3, 16])
def test_the_counter_gives_every_tile_once_and_the_longest_first(section, ahead):
    work = plans.causal_work(CONFIG, 4096)
    plan = plans.by_counter(work, 132, section, ahead)
    given = sorted(tile for tiles in plan for tile in tiles)
    assert given == sorted((head, n) for head in range(work.heads) for n in work.lengths)
    for tiles in plan:  # section by section
        assert tiles == sorted(tiles, key=lambda tile: (tile[0] // section, -tile[1]))
    if not ahead:
        loads = [sum(n for _, n in tiles) for tiles in plan]
        assert max(loads) - min(loads) <= max(work.lengths)


def test_a_tile_taken_ahead_waits_for_its_cta():
    """By hand: two CTAs, one head of 9, 2, 2, 2 and 2 blocks. Ahead, the CTA of the long tile also holds a short one."""
    work = plans.Work(1, (9, 2, 2, 2, 2), 1)
    long, short = (0, 9), (0, 2)
    assert plans.by_counter(work, 2, 1) == [[long], [short] * 4]
    assert plans.by_counter(work, 2, 1, ahead=True) == [[long, short], [short] * 3]


@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_library_s_sections_keep_its_sms_at_work(d):
    """Lengths of the paper's benchmark; what is lost is the model's, which knows no start of a tile."""
    for seqlen in (4096, 8192, 16_384, 32_768):
        config = forward_config(d, d, True, seqlen)
        work = plans.causal_work(config, seqlen)
        section = config.heads_of_section(seqlen, work.heads, work.heads, 1)
        late, ahead = (plans.balance(plans.by_counter(work, 132, section, x)) for x in (False, True))
        assert late > 0.985 and late >= ahead, (seqlen, section, late, ahead)


def test_sections_are_equal_and_fit_in_l2():
    for _ in range(300):
        seqlen = int(2 ** rng.uniform(7, 18))
        kv_heads, group, batch = (int(x) for x in rng.integers(1, 33, 3))
        section = CONFIG.heads_of_section(seqlen, kv_heads * group, kv_heads, batch)
        sequences, together = kv_heads * batch, section // group
        per_head = seqlen * 256 * CONFIG.element_bytes
        assert section % group == 0 and 1 <= together <= sequences, SEED
        assert together == 1 or together * per_head <= L2_BYTES, SEED
        sections = -(-sequences // together)
        assert sections * together - sequences < sections, SEED  # one less in each would not do
