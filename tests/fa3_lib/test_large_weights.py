"""Blocks without a maximum: scores that jump between key blocks, and rows that know nothing of each other.

On a CPU the same data go through the tiled algorithm, and through the kernel's protocol in `tests/simulated/test_rung09.py`.
"""

import functools
import itertools

import pytest
import torch

from fa3_lib import flash_attn_func
from fa3_lib.config import forward_config
from tests.fa3_lib.large_weights import KINDS, ROWS, add_courses, an_integer, assert_close_to_truth
from tests.tolerance import assert_repeats_are_bit_equal

GPU = pytest.mark.gpu
PLACES = [("cpu", 64), *(pytest.param("cuda", d, marks=GPU) for d in (64, 128, 256))]
DTYPES = (torch.float16, torch.bfloat16)
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (2400, 100)},
    "softcap": {"softcap": 50.0},
    "packed": {"pack_gqa": True},
    "everything": {"window_size": (-1, 5), "softcap": 40.0, "sinks": True, "pack_gqa": True},
}


def draw(b, sq, sk, h, hk, d, dtype=torch.bfloat16, device="cuda"):
    return [torch.randn(s, dtype=dtype, device=device) for s in ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, d))]


def attend(q, k, v, **arguments):
    """The call under test, on an allocator whose free blocks hold NaN: an element that is not written shows."""
    if q.is_cuda:
        poison = [torch.full((n,), torch.nan, device="cuda") for n in (q.numel() // 2 + 1, q[..., 0].numel())]
        del poison
    return flash_attn_func(q, k, v, return_attn_probs=True, **arguments)


def check(q, k, v, **arguments):
    if arguments.get("sinks"):
        arguments["sinks"] = torch.linspace(-2, 40, q.shape[2], device=q.device)
    out, lse = attend(q, k, v, **arguments)
    mask = {name: value for name, value in arguments.items() if name != "pack_gqa"}
    assert_close_to_truth(out, lse, q, k, v, **mask)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=("fp16", "bf16"))
@pytest.mark.parametrize("device, d", PLACES)
def test_scores_that_jump(device, dtype, d, mask):
    """One query and ragged tiles of them, rows whose first keys lie in a block without a mask (tile_n - 1, 63), 30 blocks."""
    tile_n = forward_config(d, d, False).tile_n
    shapes = [(1, 30 * tile_n + 7), (200, 30 * tile_n)]
    if mask in ("causal", "everything"):
        shapes += [(130, 130 + 5 * tile_n - 1), (200, 200 + 63 + 4 * tile_n), (200, 150)]
    if device == "cpu":
        shapes = [(70, 5 * tile_n + 7)]
    courses = list(itertools.product(shapes, KINDS, ROWS if device == "cuda" else ("random",)))
    for i in torch.randperm(len(courses))[:12].tolist():  # a dozen of them in each run
        shape, kind, rows = courses[i]
        heads = (16, 2) if "pack_gqa" in MASKS[mask] and device == "cuda" else (4, 2)
        q, k, v = draw(1, *shape, *heads, d, dtype, device)
        add_courses(q, k, kind, rows, tile_n)
        print(shape, kind, rows)
        check(q, k, v, **MASKS[mask])


@GPU
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("d", (64, 96, 128, 192, 256))
def test_many_tiles_of_scores_that_jump(d, causal):
    """Rings, turns and votes go on across the tiles of a CTA."""
    for sq, sk in ((1000, 2100), (2100, 2100)):
        q, k, v = draw(2, sq, sk, 12, 4, d)
        add_courses(q, k, "anywhere", "random", forward_config(d, d, causal).tile_n)
        check(q, k, v, causal=causal)


def spoil(x, garbage):
    """x, a query row, times 100, or with NaN or infinity in one of its columns."""
    if garbage == "times 100":
        return x * 100
    spoiled = x.clone()
    spoiled[..., 5] = garbage
    return spoiled


@pytest.mark.parametrize("arguments", ({}, {"causal": True}, {"causal": True, "pack_gqa": True}), ids=str)
@pytest.mark.parametrize("kind", (None, "anywhere"))
@pytest.mark.parametrize("device, d", PLACES)
def test_rows_know_nothing_of_each_other(device, kind, d, arguments):
    """One row's query, scaled by 100 or spoiled: its tile computes S once more, and all other bits stay."""
    tile_n = forward_config(d, d, False).tile_n
    sq, sk = (200, 12 * tile_n) if device == "cuda" else (70, 3 * tile_n)
    q, k, v = draw(1, sq, sk, 8, 2, d, device=device)
    if kind:
        add_courses(q, k, kind, "random", tile_n)
    out, lse = attend(q, k, v, **arguments)
    garbages = ("times 100", torch.nan, torch.inf, -torch.inf)
    rows = (0, 8, sq - 1, an_integer(sq)) if device == "cuda" else (8,)
    for garbage, row in itertools.product(garbages, rows):
        bad = q.clone()
        bad[0, row, 5] = spoil(q[0, row, 5], garbage)
        new_out, new_lse = attend(bad, k, v, **arguments)
        if garbage == "times 100":
            assert not torch.equal(new_lse, lse), "the row itself must change"
        elif garbage != garbage:
            assert new_out[0, row, 5].isnan().all() and new_lse[0, 5, row].isnan()
        new_out[0, row, 5], new_lse[0, 5, row] = out[0, row, 5], lse[0, 5, row]
        assert torch.equal(new_out, out) and torch.equal(new_lse, lse), f"{garbage} in row {row}"


@pytest.mark.parametrize("device, d", PLACES)
def test_rows_without_keys_are_empty_whatever_their_queries_hold(device, d):
    sq, sk = (700, 500) if device == "cuda" else (90, 40)
    for garbage in ("times 100", torch.nan, torch.inf):
        q, k, v = draw(1, sq, sk, 4, 2, d, device=device)
        q[:, : sq - sk] = spoil(q[:, : sq - sk], garbage)
        out, lse = attend(q, k, v, causal=True)
        assert not out[:, : sq - sk].any() and (lse[..., : sq - sk] == -torch.inf).all()
        assert_close_to_truth(out[:, sq - sk :], lse[..., sq - sk :], q[:, sq - sk :], k, v, causal=True)


@GPU
@pytest.mark.parametrize("d", (64, 128, 256))
def test_repeats_are_bit_equal(d):
    """Which block is computed twice depends on the data alone, never on which warp comes first."""
    tile_n = forward_config(d, d, False).tile_n
    for arguments in ({}, {"causal": True}):
        q, k, v = draw(2, 777, 15 * tile_n + 3, 6, 2, d)
        add_courses(q, k, "anywhere", "random", tile_n)
        call = functools.partial(attend, q, k, v, **arguments)
        assert_repeats_are_bit_equal(lambda run, call=call: call(sm_margin=run % 100), 200)
