"""The forward kernel's windows, softcap, sinks and packed heads on a Hopper against the fp64 truth."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from fa3_lib import checks, flash_attn_func, interface
from tests.fa3_lib.masked_truth import assert_close_to_truth, random_mask
from tests.tolerance import assert_repeats_are_bit_equal

pytestmark = pytest.mark.gpu

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
SHAPES = ((1, 1), (113, 203), (239, 1), (300, 300), (512, 256), (256, 512), (1023, 1024))
WINDOWS = ((0, 0), (64, 0), (100, 100), (33, -1), (-1, 17), (0, 5), (5, 2000), (2000, 3), (2000, 2000), (127, 128))


def draw(b, sq, sk, h, hk, d, dv=None, dtype=torch.bfloat16):
    dv = d if dv is None else dv
    return [torch.randn(s, dtype=dtype, device="cuda") for s in ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv))]


def attend(q, k, v, **arguments):
    """The call under test, on an allocator whose free blocks hold NaN: an element that is not written shows."""
    outputs = (q[..., 0].numel() * v.shape[-1] // 2 + 1, q[..., 0].numel())  # in fp32: the output's bytes and the LSE's
    poison = [torch.full((n,), torch.nan, device="cuda") for n in outputs]
    del poison
    return flash_attn_func(q, k, v, return_attn_probs=True, **arguments)


def check(q, k, v, pack_gqa=None, **mask):
    out, lse = attend(q, k, v, pack_gqa=pack_gqa, **mask)
    assert_close_to_truth(out, lse, q, k, v, **mask)
    return out, lse


def an_integer(end):
    return int(torch.randint(end, ()))


def one_of(choices):
    return choices[an_integer(len(choices))]


@pytest.mark.parametrize("d, dv", HEAD_DIMS)
def test_windows(d, dv):
    for shape, window in itertools.product(SHAPES, WINDOWS):
        q, k, v = draw(2, *shape, 4, 2, d, dv)
        check(q, k, v, pack_gqa=False, window_size=window)
    for window in ((200, 0), (700, 100)):  # long enough for the widest tiles, and for blocks that need no mask
        q, k, v = draw(1, 2300, 2500, 2, 1, d, dv)
        check(q, k, v, pack_gqa=False, window_size=window)
        check(q, k, v, pack_gqa=False, window_size=window, causal=True)


def test_windows_fp16():
    for shape, window in itertools.product(SHAPES, WINDOWS):
        check(*draw(2, *shape, 4, 2, 128, dtype=torch.float16), pack_gqa=False, window_size=window)


@pytest.mark.parametrize("mask", ({}, {"causal": True}, {"window_size": (70, 20)}), ids=str)
@pytest.mark.parametrize(
    "d, dv, dtype", ((64, 64, torch.bfloat16), (128, 128, torch.float16), (256, 256, torch.bfloat16))
)
def test_softcap(d, dv, dtype, mask):
    for shape, softcap in itertools.product(SHAPES, (0.5, 15.0, 50.0)):
        q, k, v = draw(2, *shape, 6, 6, d, dv, dtype)
        q *= softcap / 4  # scores that reach the cap
        check(q, k, v, softcap=softcap, **mask)


@pytest.mark.parametrize("mask", ({}, {"causal": True}, {"window_size": (70, 20)}), ids=str)
@pytest.mark.parametrize("d", (64, 128))
def test_sinks(d, mask):
    q, k, v = draw(2, 512, 256, 6, 2, d)  # with a mask at the right, the first rows see no key
    plain = attend(q, k, v, pack_gqa=False, **mask)
    none = check(q, k, v, pack_gqa=False, sinks=torch.full((6,), -torch.inf, device="cuda"), **mask)
    torch.testing.assert_close(none[1], plain[1], rtol=1e-6, atol=1e-6)
    sinks = torch.tensor([-torch.inf, -50.0, 0.0, 3.0, 1e4, 1e30], device="cuda")
    for shape in SHAPES:
        q, k, v = draw(2, *shape, 6, 2, d)
        check(q, k, v, pack_gqa=False, sinks=sinks, **mask)
        check(q, k, v, pack_gqa=False, sinks=torch.randn(6, device="cuda", dtype=torch.bfloat16), **mask)
        check(1e-3 * q, k, v, pack_gqa=False, sinks=sinks, **mask)
    out, lse = attend(q, k[:, :0], v[:, :0], sinks=sinks, **mask)
    assert not out.any() and torch.equal(lse, sinks[:, None].expand_as(lse))


@pytest.mark.parametrize("mask", ({}, {"causal": True}), ids=str)
@pytest.mark.parametrize("group", (2, 3, 4, 6, 8, 12, 64))
def test_packed_heads(group, mask):
    for sq in (1, 2, 63, 129, 300, *(1 + an_integer(300) for _ in range(3))):
        q, k, v = draw(2, sq, 1 + an_integer(400), 2 * group, 2, 128)
        packed, apart = check(q, k, v, True, **mask), check(q, k, v, False, **mask)
        torch.testing.assert_close(packed[1], apart[1], rtol=1e-5, atol=1e-5)
        check(q, k, v, None, **mask)


def test_packed_heads_of_strided_queries():
    q, k, v = draw(2, 77, 200, 16, 2, 128)
    expected = attend(q, k, v, causal=True, pack_gqa=True)
    head_major = q.transpose(1, 2).contiguous().transpose(1, 2)
    within = torch.full((3, 90, 20, 136), torch.nan, dtype=q.dtype, device="cuda")[:2, :77, 2:18, :128].copy_(q)
    for view in (head_major, within):
        again = attend(view, k, v, causal=True, pack_gqa=True)
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_gpt_oss():
    """Its attention: 64 query heads on 8, 64 columns, sinks, and in every second layer a window of 128 keys."""
    for sq, sk in ((1, 1000), (1000, 1000), (5, 131)):
        for mask in ({"causal": True}, {"causal": True, "window_size": (127, 0)}):
            q, k, v = draw(1, sq, sk, 64, 8, 64)
            sinks = torch.randn(64, device="cuda", dtype=torch.bfloat16)
            for pack_gqa in (None, True, False):
                check(q, k, v, pack_gqa, sinks=sinks, **mask)


@pytest.mark.parametrize("run", range(60))
def test_everything_at_random(run):
    """Any head dims, lengths, groups and masks at once; the seed that conftest prints repeats it."""
    d = 8 * (1 + an_integer(32))
    dv = one_of((d, 8 * (1 + an_integer(32))))
    sq, sk = (1 + an_integer(one_of((8, 300, 600))) for _ in range(2))
    hk, group = 1 + an_integer(3), one_of((1, 2, 3, 4, 5, 6, 8, 16))
    if run % 10 == 0:
        sq, sk, hk, group = 2100 + an_integer(500), 2000 + an_integer(800), 1, 1 + an_integer(2)
    q, k, v = draw(1 + an_integer(2), sq, sk, hk * group, hk, d, dv, one_of((torch.float16, torch.bfloat16)))
    mask = random_mask(sq, sk, hk * group, "cuda")
    if mask["softcap"]:
        q *= mask["softcap"] / 4
    if run % 3 == 0:
        mask["softmax_scale"] = one_of((0.01, 0.2))
    pack_gqa, sm_margin = one_of((None, True, False)), one_of((0, 100))
    print(f"q {tuple(q.shape)} v {tuple(v.shape)} {q.dtype} pack_gqa {pack_gqa} sm_margin {sm_margin} {mask}")
    out, lse = attend(q, k, v, pack_gqa=pack_gqa, sm_margin=sm_margin, **mask)
    assert_close_to_truth(out, lse, q, k, v, **mask)


@pytest.mark.parametrize("shape", ((88, 448), (448, 448), (448, 88)), ids=str)
def test_logits_far_from_zero_in_windows(shape):
    """A constant added to every score of some rows changes their LSE and nothing else; with sinks of the same size, too."""
    for shift in (-3e4, -100.0, 100.0, 3e4):
        q, k, v = draw(1, *shape, 14, 2, 120)
        q, k = (torch.cat((x, torch.zeros_like(x[..., :8])), -1) for x in (q, k))
        q[:, ::3, :, 120] = 256.0
        k[..., 120] = shift / 256.0 * 128**0.5
        for window in ((0, 0), (70, -1), (-1, 30), (200, 5)):
            check(q, k, v, False, window_size=window)
            check(q, k, v, False, window_size=window, sinks=torch.linspace(-abs(shift), shift, 14, device="cuda"))


FEATURES = (
    (64, {"causal": True, "sinks": True, "pack_gqa": True}),
    (128, {"window_size": (100, 30), "pack_gqa": False}),
    (128, {"window_size": (64, 0), "softcap": 5.0, "sinks": True, "pack_gqa": True}),
    (256, {"window_size": (64, 0), "softcap": 5.0, "sinks": True, "pack_gqa": False}),
)


def with_sinks(features, heads):
    sinks = torch.linspace(-2, 2, heads, device="cuda") if "sinks" in features else None
    return {**features, "sinks": sinks}


@pytest.mark.parametrize("d, features", FEATURES, ids=str)
def test_no_queries_and_no_keys(d, features):
    arguments = with_sinks(features, 4)
    mask = {name: value for name, value in arguments.items() if name != "pack_gqa"}
    for b, sq, sk in ((2, 5, 0), (2, 0, 5), (0, 5, 5), (2, 0, 0), (2, 799, 3)):
        q, k, v = draw(b, sq, sk, 4, 2, d)
        assert_close_to_truth(*attend(q, k, v, **arguments), q, k, v, **mask)


@pytest.mark.parametrize("d, features", FEATURES, ids=str)
def test_memory_beyond_the_tensors_is_not_seen(d, features):
    """NaN, inf and the dtype's maximum behind queries, keys, heads and head dim leave the bits as they are."""
    q, k, v = draw(2, 130, 200, 4, 2, d)
    arguments = with_sinks(features, 4)
    expected = attend(q, k, v, **arguments)
    for garbage in (torch.nan, torch.inf, torch.finfo(torch.bfloat16).max):
        views = []
        for x in (q, k, v):
            b, s, h, columns = x.shape
            big = torch.full((b + 1, s + 150, h + 1, columns + 8), garbage, dtype=x.dtype, device="cuda")
            views.append(big[:b, :s, :h, :columns].copy_(x))
        assert all(torch.equal(a, e) for a, e in zip(attend(*views, **arguments), expected, strict=True))


@pytest.mark.parametrize("d, features", (*FEATURES, (64, {}), (128, {"causal": True})), ids=str)
def test_nan_in_one_query_stays_there(d, features):
    """Rows r and r + 8 belong to one thread, four threads share a row: none of them hands it on."""
    q, k, v = draw(1, 200, 200, 4, 2, d)
    arguments = with_sinks(features, 4)
    expected = attend(q, k, v, **arguments)
    for garbage, row in itertools.product((torch.nan, torch.inf, -torch.inf), (0, 8, 77, 191, 199)):
        bad = q.clone()
        bad[0, row, 1, 5] = garbage
        out, lse = attend(bad, k, v, **arguments)
        out[0, row, 1], lse[0, 1, row] = expected[0][0, row, 1], expected[1][0, 1, row]
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]), f"{garbage} in row {row}"


@pytest.mark.parametrize("d, features", FEATURES, ids=str)
def test_repeats_are_bit_equal(d, features):
    """With any number of CTAs, too: a row's sums are formed in one order."""
    q, k, v = draw(3, 777, 777, 8, 2, d)
    arguments = with_sinks(features, 8)
    call = functools.partial(flash_attn_func, q, k, v, return_attn_probs=True, **arguments)
    assert_repeats_are_bit_equal(lambda run: call(sm_margin=run), 50)
    expected = call()
    alone = flash_attn_func(q, k, v, return_attn_probs=True, sm_margin=checks.hopper_sms(q.device) - 1, **arguments)
    assert all(torch.equal(a, e) for a, e in zip(alone, expected, strict=True))


def test_torch_compile_and_graphs():
    q, k, v = draw(2, 300, 300, 8, 2, 128)
    arguments = with_sinks(FEATURES[2][1], 8)
    expected = attend(q, k, v, **arguments)
    compiled = torch.compile(
        lambda q, k, v: flash_attn_func(q, k, v, return_attn_probs=True, **arguments), fullgraph=True
    )
    assert all(torch.equal(a, e) for a, e in zip(compiled(q, k, v), expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_attn_func(q, k, v, return_attn_probs=True, **arguments)
    arguments["sinks"] += 1.0
    q.normal_()
    graph.replay()
    mask = {name: value for name, value in arguments.items() if name != "pack_gqa"}
    assert_close_to_truth(out, lse, q, k, v, **mask)


def test_dynamic_tiles_under_streams_and_graphs(monkeypatch):
    """Counters of calls that run side by side: eager ones and replays of a graph on each of two streams."""
    choose = interface.forward_config
    monkeypatch.setattr(interface, "forward_config", lambda *a, **kw: replace(choose(*a, **kw), dynamic=True))
    interface._plan.cache_clear()
    interface._counter_ring.cache_clear()
    q, k, v = draw(2, 1000, 1000, 8, 8, 64)
    expected = check(q, k, v, causal=True)
    graphs, captured = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            captured.append(flash_attn_func(q, k, v, causal=True, return_attn_probs=True))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    results = []
    for _ in range(20):
        for stream, graph, (out, lse) in zip((torch.cuda.current_stream(), side), graphs, captured, strict=True):
            with torch.cuda.stream(stream):
                out.fill_(torch.nan)
                graph.replay()
                results += [(out.clone(), lse.clone()), flash_attn_func(q, k, v, causal=True, return_attn_probs=True)]
    torch.cuda.synchronize()
    for out, lse in results:
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    slots, _ = interface._counter_ring(q.device)
    assert not slots[0]._base.any(), "a launch left its counter behind"
    assert next(interface._captured_slots[q.device]).data_ptr() == slots[0].data_ptr() + 8 * (interface.COUNTERS + 2)
    interface._plan.cache_clear()
