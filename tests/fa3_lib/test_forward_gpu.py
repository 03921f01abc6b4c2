"""The forward kernel on a Hopper against the fp64 truth."""

import pytest
import torch

from fa3_lib import compiler, flash_attn_func
from fa3_lib.config import HEAD_DIMS
from tests.tolerance import assert_close_to_truth, assert_repeats_are_bit_equal

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16)
# lengths around, below and above the tiles, ragged, and more queries than keys (kernel_facts 7.66)
SHAPES = (
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211),
    (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
    (4096, 4096), (4224, 4224),
)  # fmt: skip


def draw(b, sq, sk, h, hk, d, dv=None, dtype=torch.bfloat16):
    dv = d if dv is None else dv
    shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv))
    return [torch.randn(s, dtype=dtype, device="cuda") for s in shapes]


def attend(q, k, v, **kwargs):
    """The call under test, on an allocator whose free blocks hold NaN: an element that is not written shows."""
    poison = [torch.full((n,), torch.nan, device="cuda") for n in (q.numel(), q.numel(), q[..., 0].numel())]
    del poison
    return flash_attn_func(q, k, v, return_attn_probs=True, **kwargs)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("d", (64, 128, 256))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grid(dtype, d, causal, shape):
    for hk in (6, 2, 1):
        q, k, v = draw(2 if max(shape) > 2048 else 9, *shape, 6, hk, d, dtype=dtype)
        assert_close_to_truth(*attend(q, k, v, causal=causal), q, k, v, causal=causal)


@pytest.mark.parametrize("d", range(8, 257, 8))
def test_every_head_dim(d):
    for dv in (d, int(torch.randint(1, 33, ())) * 8):
        for causal in (False, True):
            q, k, v = draw(2, 200, 333, 4, 2, d, dv)
            assert_close_to_truth(*attend(q, k, v, causal=causal), q, k, v, causal=causal)


@pytest.mark.parametrize("dv", HEAD_DIMS)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_every_pair_of_tiles(d, dv):
    """Several tiles for each CTA: an output that lies on anything but its own memory spoils the next tile."""
    for causal in (False, True):
        q, k, v = draw(2, 1500, 333, 16, 2, d, dv)
        assert_close_to_truth(*attend(q, k, v, causal=causal), q, k, v, causal=causal)


def test_softmax_scale():
    q, k, v = draw(2, 300, 300, 4, 4, 128)
    for scale in (1e-3, 0.3, 2.0):
        assert_close_to_truth(*attend(q, k, v, softmax_scale=scale), q, k, v, softmax_scale=scale)


@pytest.mark.parametrize("shift", (-3e4, -100.0, 100.0, 3e4))
@pytest.mark.parametrize("shape", ((88, 448), (448, 448), (448, 88)), ids=str)
def test_logits_far_from_zero(shape, shift):
    """A constant added to every score of some rows changes their LSE and nothing else, fully masked tiles or not."""
    q, k, v = draw(1, *shape, 14, 2, 120, dtype=torch.bfloat16)
    q, k = (torch.cat((x, torch.zeros_like(x[..., :8])), -1) for x in (q, k))
    q[:, ::3, :, 120] = 256.0
    k[..., 120] = shift / 256.0 * 128**0.5
    for causal in (False, True):
        assert_close_to_truth(*attend(q, k, v, causal=causal), q, k, v, causal=causal)


def test_no_keys_and_no_queries():
    for b, sq, sk in ((2, 5, 0), (2, 0, 5), (0, 5, 5), (2, 0, 0)):
        for causal in (False, True):
            q, k, v = draw(b, sq, sk, 4, 2, 64)
            assert_close_to_truth(*attend(q, k, v, causal=causal), q, k, v, causal=causal)


@pytest.mark.parametrize("d", (64, 96, 128, 256))
def test_memory_beyond_the_tensors_is_not_seen(d):
    """NaN, inf and the dtype's maximum behind the keys, the queries and the head dim leave the bits as they are."""
    q, k, v = draw(2, 130, 200, 4, 2, d)
    expected = attend(q, k, v, causal=True)
    for garbage in (torch.nan, torch.inf, torch.finfo(torch.bfloat16).max):
        views = []
        for x in (q, k, v):
            b, s, h, dd = x.shape
            big = torch.full((b + 1, s + 150, h + 1, dd + 8), garbage, dtype=x.dtype, device=x.device)
            view = big[:b, :s, :h, :dd]
            view.copy_(x)
            views.append(view)
        for a, e in zip(attend(*views, causal=True), expected, strict=True):
            assert torch.equal(a, e)


def test_strided_views_give_the_same_bits():
    q, k, v = draw(2, 300, 300, 4, 4, 128)
    k[:], v[:] = k[:, :, :1].clone(), v[:, :, :1].clone()  # equal heads, so that an expanded view has the same values
    expected = attend(q, k, v, causal=True)
    packed = torch.stack((q, k, v), dim=2)  # (b, s, 3, h, d)
    head_major = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    every_second = [torch.stack((x, torch.full_like(x, torch.nan)), dim=2).flatten(1, 2)[:, ::2] for x in (q, k, v)]
    one_head = [x[:, :, :1].expand(-1, -1, 4, -1) for x in (k, v)]
    for views in (packed.unbind(2), head_major, every_second, (q, *one_head)):
        for a, e in zip(attend(*views, causal=True), expected, strict=True):
            assert torch.equal(a, e)
    # expanded over batch and over keys, and the unused stride of a dim of size 1
    batch = [x[:1].expand(2, -1, -1, -1) for x in (q, k, v)]
    assert torch.equal(attend(*batch)[0], attend(*(x.contiguous() for x in batch))[0])
    keys = [q, *(x[:, :1].expand(-1, 300, -1, -1) for x in (k, v))]
    assert torch.equal(attend(*keys)[0], attend(*(x.contiguous() for x in keys))[0])
    single = [x[:1, :, :1].as_strided((1, 300, 1, 128), (3, 512, 5, 1)) for x in (q, k, v)]
    assert torch.equal(attend(*single)[0], attend(*(x.contiguous() for x in single))[0])


def test_offsets_beyond_32_bits():
    rows, d = 400, 64
    storage = torch.full((2, 2**31 // d + rows, 1, d), torch.nan, dtype=torch.bfloat16, device="cuda")
    q, k, v = draw(2, rows, rows, 1, 1, d)
    far = []
    for x in (q, k, v):
        view = storage[:, -rows:]
        view.copy_(x)
        far.append(view.clone() if x is not v else view)  # v stays behind 2^31 elements, its batches 2^31 apart
    assert torch.equal(attend(*far)[0], attend(q, k, v)[0])


def test_more_heads_and_sequences_than_a_grid_dimension():
    for b, h in ((70_000, 1), (1, 70_000)):
        q, k, v = draw(b, 16, 16, h, h, 64)
        out, lse = attend(q, k, v)
        pick = slice(-3, None)
        part = [x[pick] if b > h else x[:, :, pick] for x in (q, k, v)]
        out = out[pick] if b > h else out[:, :, pick]
        lse = lse[pick] if b > h else lse[:, pick]
        assert_close_to_truth(out, lse, *part)


@pytest.mark.parametrize("d", (64, 128, 192, 256))
def test_repeats_are_bit_equal(d):
    q, k, v = draw(4, 777, 777, 6, 2, d)
    assert_repeats_are_bit_equal(lambda run: flash_attn_func(q, k, v, causal=True, return_attn_probs=True), 1000)


def test_lse_on_demand_leaves_the_output_as_it_is():
    for causal in (False, True):
        q, k, v = draw(2, 300, 300, 4, 2, 128)
        assert torch.equal(flash_attn_func(q, k, v, causal=causal), attend(q, k, v, causal=causal)[0])


@pytest.mark.parametrize("seqlen", (1, 128, 129, 300, 1000, 3000))
@pytest.mark.parametrize("d", (64, 128, 256))
def test_more_tiles_than_ctas(d, seqlen):
    """Every CTA takes several tiles, an odd number of them too: no tile is left out or computed into another's place."""
    for causal in (False, True):
        q, k, v = draw(max(1, 3000 // seqlen), seqlen, seqlen + 5, 20, 10, d)
        assert_close_to_truth(*attend(q, k, v, causal=causal), q, k, v, causal=causal)


def test_one_compile_serves_all_shapes():
    compiler._kernels.clear()
    for b, s, h, hk, d in ((1, 64, 2, 2, 128), (3, 1000, 6, 6, 104), (2, 4096, 8, 2, 120)):
        q, k, v = draw(b, s, s + 7, h, hk, d)
        attend(q, k, v)
    assert len(compiler._kernels) == 1


def test_cuda_graph_replays_on_new_inputs():
    q, k, v = draw(2, 300, 300, 4, 4, 128)
    flash_attn_func(q, k, v, return_attn_probs=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    for _ in range(3):
        for x in (q, k, v):
            x.normal_()
        out.fill_(torch.nan)
        graph.replay()
        assert_close_to_truth(out, lse, q, k, v)


def test_cold_kernel_in_a_capture_is_refused_by_name():
    q, k, v = draw(2, 64, 64, 4, 4, 128)
    compiler._kernels.clear()
    with pytest.raises(RuntimeError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        flash_attn_func(q, k, v)
    torch.cuda.synchronize()


def test_side_stream():
    q, k, v = draw(2, 2048, 2048, 16, 16, 128)
    expected = flash_attn_func(q, k, v)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(q)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the copy below is late: a launch on another stream would read zeros
        late.copy_(q)
        out = flash_attn_func(late, k, v)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_torch_compile_fullgraph():
    q, k, v = draw(2, 300, 300, 4, 2, 128)
    compiled = torch.compile(lambda q, k, v: flash_attn_func(q, k, v, causal=True) * 2, fullgraph=True)
    assert torch.equal(compiled(q, k, v), flash_attn_func(q, k, v, causal=True) * 2)
    torch.library.opcheck(torch.ops.fa3_lib.flash_attn_fwd, (q, k, v, 0.1, True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one():
    q, k, v = draw(2, 300, 300, 4, 2, 128)
    expected = flash_attn_func(q, k, v)
    assert torch.cuda.current_device() == 0
    out = flash_attn_func(*(x.to("cuda:1") for x in (q, k, v)))
    assert out.device.index == 1 and torch.equal(out.cpu(), expected.cpu())
