"""Tile configurations: budgets, barrier counts and the tile ranges that every role shares."""

import random

import pytest

from fa3_lib import config as c

ALL = [
    c.forward_config(d, d, causal, seqlen_q) for d in c.HEAD_DIMS for causal in (False, True) for seqlen_q in (64, None)
]


@pytest.mark.parametrize("config", ALL, ids=str)
def test_budgets_hold(config):
    assert config.smem_bytes <= c.SMEM_LIMIT
    threads = c.WARPGROUP * (config.producer_registers + config.consumer_warpgroups * config.consumer_registers)
    assert threads <= c.REGISTER_FILE
    assert config.accumulator_registers < config.consumer_registers
    assert config.empty_arrivals * 32 == config.threads - c.WARPGROUP


@pytest.mark.parametrize("d", range(8, 257, 8))
def test_every_head_dim_has_the_narrowest_tile_that_holds_it(d):
    for dv in range(8, 257, 8):
        tile = c.forward_config(d, dv, False).head_dim
        assert tile >= max(d, dv)
        assert not [t for t in c.HEAD_DIMS if max(d, dv) <= t < tile]


@pytest.mark.parametrize("causal", (False, True))
def test_key_blocks_are_those_that_some_row_sees(causal):
    """Counted from the definition: block n is read iff some pair in it is allowed, and needs no mask iff all are."""
    for _ in range(300):
        config = c.ForwardConfig(64, 64, random.choice((64, 128, 192)), random.choice((16, 48, 80, 128)), causal=causal)
        seqlen_q, seqlen_k = random.randint(1, 500), random.randint(1, 500)
        m_block = random.randrange(c.ceil_div(seqlen_q, config.tile_m))
        consumer = random.randrange(config.consumer_warpgroups)
        offset = seqlen_k - seqlen_q
        # rows beyond seqlen_q are computed and thrown away: the range must be right for rows that exist
        last_row = (m_block + 1) * config.tile_m - 1
        first_row = m_block * config.tile_m + consumer * c.WGMMA_M
        seen_last, seen_first = (
            min(seqlen_k, max(row + 1 + offset, 0)) if causal else seqlen_k for row in (last_row, first_row)
        )
        read = c.ceil_div(seen_last, config.tile_n)
        unmasked = seen_first // config.tile_n
        assert config.key_blocks(m_block, seqlen_q, seqlen_k) == read
        assert config.unmasked_key_blocks(m_block, seqlen_q, seqlen_k, consumer=consumer) == unmasked


@pytest.mark.parametrize(
    "change, rule",
    [
        (dict(head_dim=72), "multiples of 64"),
        (dict(tile_m=96), "tile_m must be"),
        (dict(tile_m=256), "tile_m must be"),
        (dict(tile_n=264), "tile_n must be"),
        (dict(tile_n=24), "tile_n must be"),
        (dict(stages=3), "stages must be"),
        (dict(stages=4), "shared memory exceeded"),
        (dict(tile_m=192), "accumulators"),
    ],
    ids=str,
)
def test_broken_configurations_are_refused_with_the_budget(change, rule):
    good = dict(head_dim=128, head_dim_v=128, tile_m=128, tile_n=128)
    c.ForwardConfig(**good).validate()
    with pytest.raises(ValueError, match=rule) as error:
        c.ForwardConfig(**{**good, **change}).validate()
    if rule in ("shared memory exceeded", "accumulators"):
        assert "shared memory: Q and O" in str(error.value) and "registers: 128 x" in str(error.value)
