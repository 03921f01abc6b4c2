"""Tile configurations: budgets, barrier counts and the tile ranges that every role shares."""

import itertools
import random

import pytest

from fa3_lib import config as c

MASKS = ({}, {"causal": True}, {"window": True, "softcap": True, "sinks": True})
ALL = sorted(
    {
        c.forward_config(d, dv, **{"causal": False, **mask}, seqlen_q=seqlen_q, pack_gqa=pack_gqa)
        for d, dv in itertools.product(c.HEAD_DIMS, repeat=2)
        for mask in MASKS
        for seqlen_q in (64, None)
        for pack_gqa in (1, 64)
    },
    key=str,
)


def test_budgets_hold():
    for config in ALL:
        assert config.smem_bytes <= c.SMEM_LIMIT, config.budget()
        registers = config.producer_registers + config.consumer_warpgroups * config.consumer_registers
        assert registers <= {1: 512, 2: 504, 3: 512}[config.consumer_warpgroups], config.budget()
        assert config.accumulator_registers < config.consumer_registers, config.budget()
        assert config.empty_arrivals * 32 == config.threads - c.WARPGROUP


def test_every_head_dim_has_the_narrowest_tile_that_holds_it():
    for d, dv in itertools.product(range(8, 257, 8), repeat=2):
        config = c.forward_config(d, dv, False)
        for dim, tile in ((d, config.head_dim), (dv, config.head_dim_v)):
            assert tile >= dim and not [t for t in c.HEAD_DIMS if dim <= t < tile]


@pytest.mark.parametrize("mask", ("full", "causal", "window"))
def test_key_blocks_are_those_that_some_row_sees(mask):
    """Counted from the definition: block n is read if some pair in it is allowed, and needs no mask if all are."""
    for _ in range(300):
        pack = random.choice((1, 1, 2, 16, 64))
        config = c.ForwardConfig(
            64, 64, random.choice((64, 128, 192)), random.choice((16, 48, 80, 128)),
            causal=mask == "causal", window=mask == "window", pack_gqa=pack,
        )  # fmt: skip
        seqlen_q, seqlen_k = random.randint(1, 500), random.randint(1, 500)
        sides = {
            "full": (10**6, 10**6),
            "causal": (10**6, 0),
            "window": (random.randint(0, 300), random.randint(0, 300)),
        }
        left, right = sides[mask]
        m_block = random.randrange(c.ceil_div(seqlen_q * pack, config.tile_m))
        consumer = random.randrange(config.consumer_warpgroups)
        # rows beyond seqlen_q are computed and thrown away; the ranges hold for them as for the others
        rows = range(m_block * config.tile_m, (m_block + 1) * config.tile_m)
        tile = [row // pack + seqlen_k - seqlen_q for row in rows]  # each row's own position among the keys
        own = tile[consumer * c.WGMMA_M :]
        blocks = c.ceil_div(seqlen_k, config.tile_n)

        def keys(n, config=config):
            return n * config.tile_n, (n + 1) * config.tile_n - 1  # first and last

        seen_right = [any(keys(n)[0] <= p + right for p in tile) for n in range(blocks)]
        all_right = [keys(n)[1] < seqlen_k and all(keys(n)[1] <= p + right for p in own) for n in range(blocks)]
        assert config.key_blocks(m_block, seqlen_q, seqlen_k, right=right) == sum(seen_right)
        unmasked = config.unmasked_key_blocks(m_block, seqlen_q, seqlen_k, consumer=consumer, right=right)
        assert unmasked == sum(all_right)
        seen_left = [any(keys(n)[1] >= p - left for p in tile) for n in range(blocks)]
        all_left = [all(keys(n)[0] >= p - left for p in tile) for n in range(blocks)]
        assert config.first_key_block(m_block, seqlen_q, seqlen_k, left) == seen_left.index(True)
        first_unmasked = config.first_unmasked_key_block(m_block, seqlen_q, seqlen_k, left)
        assert min(first_unmasked, blocks) == (all_left.index(True) if True in all_left else blocks)


def test_packed_tiles_count_queries_by_their_rows():
    config = c.ForwardConfig(64, 64, 128, 128, pack_gqa=16)
    assert [config.first_query(1, consumer) for consumer in (0, 1)] == [8, 12]
    assert config.last_query(1) == 15


@pytest.mark.parametrize(
    "change, rule",
    [
        (dict(head_dim=72), "whole numbers of 64 bytes"),
        (dict(tile_m=96), "tile_m must be"),
        (dict(tile_m=256), "tile_m must be"),
        (dict(tile_n=264), "tile_n must be"),
        (dict(tile_n=24), "tile_n must be"),
        (dict(stages=3), "stages must be"),
        (dict(causal=True, window=True), "one of them"),
        (dict(pack_gqa=3), "power of two"),
        (dict(dynamic=True), "dynamic tiles are for causal"),
        (dict(own_output=True, direct_output=True), "no direct_output"),
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
