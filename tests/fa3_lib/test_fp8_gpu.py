"""The FP8 kernel on a Hopper against the fp64 truth of the numbers that its operands stand for."""

import functools
import itertools

import pytest
import torch

from fa3_lib import flash_attn_func, fp8
from fa3_lib.fp8_config import HEAD_DIMS, fp8_config
from fa3_lib.quantize import FP8, transpose_v
from tests.fa3_lib import fp8_truth
from tests.fa3_lib.fp8_truth import E4M3, assert_right
from tests.fa3_lib.masked_truth import random_mask
from tests.tolerance import assert_repeats_are_bit_equal

pytestmark = pytest.mark.gpu

# lengths around, below and above the tiles, ragged, and more queries than keys (kernel_facts 7.66)
SHAPES = (
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211),
    (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (4096, 4096),
    (4224, 4224),
)  # fmt: skip

KERNELS = ((True, True), (True, False), (False, True))  # two_level, with_lse


def draw(*shape, **options):
    return fp8_truth.draw(*shape, device="cuda", **options)


def attend(q, k, v, softmax_scale=None, window_size=(-1, -1), **arguments):
    """The call under test, on an allocator whose free blocks hold NaN: an element that is not written shows."""
    sizes = (q[..., 0].numel() * v.shape[-1] // 2 + 1, q[..., 0].numel())  # in fp32: the output's bytes and the LSE's
    poison = [torch.full((n,), torch.nan, device="cuda") for n in sizes]
    del poison
    left, right = window_size
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return fp8.forward(q, k, v, scale, left=left, right=right, **arguments)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_grid(d, causal, shape):
    for hk in (6, 2, 1):
        tensors, descales = draw(2 if max(shape) > 2048 else 9, *shape, 6, hk, d)
        # one level is for short contexts: its accumulator's 13 bits show from some thousand keys on
        for two_level, with_lse in KERNELS if shape[1] <= 2048 else KERNELS[:2]:
            result = attend(*tensors, causal=causal, two_level=two_level, with_lse=with_lse, **descales)
            assert_right(result, *tensors, causal=causal, **descales)


@pytest.mark.parametrize("trial", range(40))
def test_masks_drawn_at_random(trial):
    def one_of(choices):
        return choices[int(torch.randint(len(choices), ()))]

    sq, sk = (one_of((1, 17, 100, 128, 300, 1000)) for _ in range(2))
    group = one_of((1, 3, 4, 8))
    heads, pack_gqa = 2 * group, one_of((None, True, False))
    mask = random_mask(sq, sk, heads, "cuda")
    d, dv = one_of(HEAD_DIMS), one_of(HEAD_DIMS)
    print(f"sq {sq} sk {sk} heads {heads} d {d} dv {dv} pack_gqa {pack_gqa} {mask}")
    tensors, descales = draw(2, sq, sk, heads, 2, d, dv)
    for with_lse in (True, False):  # different kernels: the latter computes some exponentials without the MUFU
        result = attend(*tensors, pack_gqa=pack_gqa, with_lse=with_lse, **mask, **descales)
        assert_right(result, *tensors, **mask, **descales)


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_formats_and_descales_of_blocks(d):
    """Mixes of e4m3 and e5m2, four of the eight in each run, a factor for each 128 rows of a head, both outputs, masks."""
    mixes = list(itertools.product(FP8, repeat=3))
    for i, dtypes in enumerate(mixes[j] for j in torch.randperm(len(mixes))[:4].tolist()):
        mask = (
            {"causal": False}, {"causal": True}, {"causal": True, "softcap": 5.0}, {"window_size": (150, 20)},
        )[i % 4]  # fmt: skip
        out_dtype = (torch.bfloat16, torch.float16)[i % 2]
        for by_block in (False, True):
            tensors, descales = draw(2, 300, 461, 6, 2, d, dtypes=dtypes, by_block=by_block)
            with_lse = by_block == bool(i % 2)  # each mask once with one
            result = attend(*tensors, out_dtype=out_dtype, with_lse=with_lse, **mask, **descales)
            assert_right(result, *tensors, out_dtype=out_dtype, **mask, **descales)


@pytest.mark.parametrize("by_block", (False, True), ids=("head", "block"))
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_scores_that_jump(d, by_block):
    """Blocks without a maximum of their own meet scores far above those before them, in some rows and at many places."""
    (q, k, v), descales = draw(1, 260, 1200, 4, 2, d, by_block=by_block)
    descales = {name: 0.5 + x / 4 for name, x in descales.items()}
    boost = torch.ones(1, 1200, 2, 1, device="cuda")
    for spot in torch.randint(1200, (12,)).tolist():  # visited from the last key to the first
        boost[:, spot] = 4.0 * (1200 - spot) / 1200 + 1.0
    k = (k.float() * boost).to(E4M3)
    for causal, with_lse in itertools.product((False, True), (True, False)):
        result = attend(q, k, v, causal=causal, with_lse=with_lse, **descales)
        assert_right(result, q, k, v, causal=causal, **descales)


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_rows_know_nothing_of_each_other(d):
    """A row's bits are the same whatever the other rows of its tile make the kernel do."""
    (q, k, v), descales = draw(1, 192, 1500, 2, 2, d)
    expected, expected_lse = attend(q, k, v, **descales)
    wild = q.clone()
    wild[:, ::3] = (torch.randn(1, 64, 2, d, device="cuda") * 30).to(E4M3)
    out, lse = attend(wild, k, v, **descales)
    keep = torch.arange(192, device="cuda") % 3 != 0
    assert torch.equal(out[:, keep], expected[:, keep]) and torch.equal(lse[:, :, keep], expected_lse[:, :, keep])
    out, expected = (attend(x, k, v, with_lse=False, **descales)[0] for x in (wild, q))
    assert torch.equal(out[:, keep], expected[:, keep])


def test_other_head_dims_scales_and_no_descales():
    for d, dv in ((16, 16), (48, 32), (80, 128), (112, 112), (144, 208), (256, 64)):
        tensors, descales = draw(2, 200, 333, 4, 2, d, dv)
        mask = {"softmax_scale": 0.3, "causal": True}
        assert_right(attend(*tensors, **mask, **descales), *tensors, **mask, **descales)
        assert_right(attend(*tensors), *tensors)


def test_no_keys_and_no_queries():
    for b, sq, sk in ((2, 5, 0), (2, 0, 5), (0, 5, 5), (2, 0, 0)):
        tensors, descales = draw(b, sq, sk, 4, 2, 64)
        for sinks in (None, torch.randn(4, device="cuda")):
            assert_right(attend(*tensors, sinks=sinks, **descales), *tensors, sinks=sinks, **descales)


def test_strided_views_and_a_transposed_v_give_the_same_bits():
    (q, k, v), descales = draw(2, 300, 300, 4, 4, 128)
    out, lse = attend(q, k, v, causal=True, **descales)
    packed = torch.stack([x.view(torch.uint8) for x in (q, k, v)], dim=2).unbind(2)
    head_major = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for views in ([x.view(E4M3) for x in packed], head_major):
        for got, want in zip(attend(*views, causal=True, **descales), (out, lse), strict=True):
            assert torch.equal(got, want)
    for got, want in zip(
        attend(q, k, transpose_v(v), causal=True, transposed=True, **descales), (out, lse), strict=True
    ):
        assert torch.equal(got, want)
    fast, none = attend(q, k, v, causal=True, with_lse=False, **descales)
    assert none is None
    public = functools.partial(flash_attn_func, causal=True)
    for call in (public, torch.compile(public, fullgraph=True)):
        assert torch.equal(call(q, k, v, **descales), fast)
        for got, want in zip(call(q, k, v, return_attn_probs=True, **descales), (out, lse), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("d", (64, 80, 128, 256))
def test_memory_beyond_the_tensors_is_not_seen(d):
    """NaN and the largest number behind the keys, the queries and the head dim leave the bits as they are."""
    tensors, descales = draw(2, 130, 200, 4, 2, d)
    expected = attend(*tensors, causal=True, **descales)
    for garbage in (0x7F, 0x7E):
        views = []
        for x in tensors:
            b, s, h, width = x.shape
            big = torch.full((b + 1, s + 150, h + 1, width + 16), garbage, dtype=torch.uint8, device="cuda").view(E4M3)
            view = big[:b, :s, :h, :width]
            view.view(torch.uint8).copy_(x.view(torch.uint8))
            views.append(view)
        for got, want in zip(attend(*views, causal=True, **descales), expected, strict=True):
            assert torch.equal(got, want)


TURNED = (  # b, sq, sk, heads, kv_heads
    (1, 64, 128, 1, 1), (2, 200, 300, 4, 2), (3, 1, 77, 4, 2), (2, 1000, 999, 6, 6), (2, 300, 17, 4, 4), (4, 512, 1024, 8, 4),
    (3, 1024, 2048, 16, 16),
)  # fmt: skip


@pytest.mark.parametrize("mask", ({}, {"causal": True}, {"window_size": (90, 7)}), ids=str)
@pytest.mark.parametrize("d, dv, two_level", ((64, 64, True), (128, 128, True), (192, 192, True), (80, 112, False)))
def test_v_turned_inside_the_kernel_gives_the_same_bits(d, dv, two_level, mask, monkeypatch):
    kernel = {"two_level": two_level, "window": "window_size" in mask, "transposes_v": True}
    shapes = [s for s in TURNED if fp8_config(d, dv, "causal" in mask, s[1], **kernel).transposes_v]
    if not shapes:
        pytest.skip("registers have no room for it")
    assert len(shapes) >= len(TURNED) - 2
    monkeypatch.setattr(fp8, "few_queries", lambda *_: True)
    monkeypatch.setattr(fp8, "_plan", functools.cache(fp8._plan.__wrapped__))  # without plans made before
    for b, sq, sk, heads, kv_heads in shapes:
        (q, k, v), descales = draw(b, sq, sk, heads, kv_heads, d, dv)
        storage = torch.full((b, sk + 3, kv_heads + 2, dv + 48), 0x7F, dtype=torch.uint8, device="cuda")  # NaN
        view = storage[:, 1 : sk + 1, 1 : kv_heads + 1, 16 : dv + 16].view(E4M3)
        view.view(torch.uint8).copy_(v.view(torch.uint8))
        call = functools.partial(attend, q, k, two_level=two_level, pack_gqa=False, **mask, **descales)
        expected = call(transpose_v(v), transposed=True)
        with monkeypatch.context() as patch:
            patch.setattr(fp8, "transpose_v", None)
            for turned in (v, view):
                for got, want in zip(call(turned), expected, strict=True):
                    assert torch.equal(got, want)


def test_a_v_that_tma_cannot_read():
    (q, k, v), descales = draw(2, 100, 200, 4, 4, 64)
    expected = attend(q, k, v, **descales)
    flat = torch.zeros(v.numel() + 8, dtype=torch.uint8, device="cuda").view(E4M3)
    misaligned = flat[8:].view(v.shape)
    misaligned.view(torch.uint8).copy_(v.view(torch.uint8))
    for other in (misaligned, v.transpose(1, 3).contiguous().transpose(1, 3)):
        for got, want in zip(attend(q, k, other, **descales), expected, strict=True):
            assert torch.equal(got, want)


def test_offsets_beyond_32_bits():
    rows, d = 400, 64
    (q, k, v), descales = draw(2, rows, rows, 1, 1, d)
    storage = torch.full((2, 2**31 // d + rows, 1, d), 0x7F, dtype=torch.uint8, device="cuda").view(E4M3)
    expected = attend(q, k, v, **descales)[0]
    for which in range(3):
        tensors = [q, k, v]
        view = storage[:, -rows:]  # behind 2^31 elements, its batches 2^31 apart
        view.view(torch.uint8).copy_(tensors[which].view(torch.uint8))
        tensors[which] = view
        assert torch.equal(attend(*tensors, **descales)[0], expected)


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_largest_numbers_and_zeros(d):
    tensors, _ = draw(2, 100, 300, 4, 2, d)
    q, k, v = tensors
    signs = torch.randint(2, k.shape, device="cuda") * 2.0 - 1
    largest = (
        torch.full(q.shape, 448.0, device="cuda").to(E4M3),
        (448 * signs).to(E4M3),
        torch.full_like(v.float(), 448.0),
    )
    out, lse = attend(largest[0], largest[1], largest[2].to(E4M3))  # logits of 10^6 and more
    # fp32 has no bits left for differences of such logits: P is a number near 256, whose rounding alone shows
    assert ((out.float() / 448 - 1).abs() <= 2**-4).all() and lse.isfinite().all()
    zeros = torch.zeros_like(q.float()).to(E4M3)
    for mask in ({"causal": False}, {"causal": True}):
        assert_right(attend(zeros, k, v, **mask), zeros, k, v, **mask)
        assert_right(attend(q, torch.zeros_like(k.float()).to(E4M3), v, **mask), zeros, k, v, **mask)


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_nan_in_a_query_stays_in_its_row(d):
    (q, k, v), descales = draw(1, 200, 300, 2, 2, d)
    for causal in (False, True):
        expected = attend(q, k, v, causal=causal, **descales)
        bad = q.clone()
        bad.view(torch.uint8)[0, 100, 1, 3] = 0x7F
        out, lse = attend(bad, k, v, causal=causal, **descales)
        assert out[0, 100, 1].isnan().all() and lse[0, 1, 100].isnan()
        out[0, 100, 1], lse[0, 1, 100] = expected[0][0, 100, 1], expected[1][0, 1, 100]
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_nan_in_a_key_reaches_every_row(d):
    """Wherever it stands in its block: also where an exponential is computed that knows no NaN."""
    (q, k, v), descales = draw(1, 200, 300, 1, 1, d)
    for key in [*torch.randperm(24)[:12].tolist(), 130, 299]:
        bad = k.clone()
        bad.view(torch.uint8)[0, key, 0, 5] = 0x7F
        for with_lse in (True, False):
            assert attend(q, bad, v, with_lse=with_lse, **descales)[0].isnan().all(), key


def test_extreme_descales():
    """A factor of 0 makes all scores equal; a negative or NaN one must not give numbers that look right."""
    tensors, descales = draw(2, 100, 300, 4, 2, 64)
    nothing = torch.zeros_like(descales["q_descale"])
    for mask in ({"causal": False}, {"causal": True}, {"softcap": 5.0, "causal": True}):
        zero = descales | {"q_descale": nothing}
        assert_right(attend(*tensors, **mask, **zero), *tensors, **mask, **zero)
    for bad in (-1.0, torch.nan):
        assert attend(*tensors, **descales | {"k_descale": torch.full_like(nothing, bad)})[0].isnan().all()


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_v_of_ones_over_a_long_context(d):
    """The weights sum to 1 whatever the scores are; an accumulator of 13 bits forgets most of 64k keys."""
    q, k = (torch.randn(1, s, 2, d, device="cuda").to(E4M3) for s in (256, 65_536))
    v = torch.ones_like(k.float()).to(E4M3)
    for queries in (q, torch.zeros_like(q.float()).to(E4M3)):  # also with all weights equal
        for with_lse in (True, False):
            assert (attend(queries, k, v, with_lse=with_lse)[0].float() - 1).abs().max() <= 0.005
        print("one level:", attend(queries, k, v, two_level=False)[0].float().mean())


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_a_decoded_row_is_the_row_of_a_prefill(d):
    """One query after 1000 keys, packed or not, against the last row of all 1000: at most the output's last bit differs."""
    (q, k, v), descales = draw(2, 1000, 1000, 8, 2, d)
    out, lse = attend(q, k, v, causal=True, **descales)
    for pack_gqa in (False, True):
        row, row_lse = attend(q[:, -1:], k, v, causal=True, pack_gqa=pack_gqa, **descales)
        torch.testing.assert_close(row.float(), out[:, -1:].float(), rtol=2**-7, atol=1e-4)
        torch.testing.assert_close(row_lse, lse[:, :, -1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_repeats_are_bit_equal(d):
    """A race shows as bits that change from run to run."""
    for causal in (False, True):
        (q, k, v), descales = draw(4, 777, 777, 6, 2, d)
        call = functools.partial(fp8.forward, q, k, v, d**-0.5, causal, **descales)
        assert_repeats_are_bit_equal(lambda run, call=call: call(), 200)
        assert_repeats_are_bit_equal(lambda run, call=call: call(with_lse=False)[:1], 200)


def test_cuda_graph_replays_on_new_inputs():
    (q, k, v), descales = draw(2, 300, 300, 4, 4, 128)
    attend(q, k, v, **descales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fp8.forward(q, k, v, 128**-0.5, **descales)
    for _ in range(3):
        for x in (q, k, v):
            x.copy_(torch.randn(x.shape, device="cuda").to(E4M3))
        result[0].fill_(torch.nan)
        graph.replay()
        assert_right(result, q, k, v, **descales)
