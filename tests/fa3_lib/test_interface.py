"""flash_attn_func on CPU tensors, its errors, and its life under torch.compile."""

import inspect

import pytest
import torch

from fa3_lib import flash_attn_func, interface
from tests.tolerance import assert_close_to_truth


def draw(b=2, sq=70, sk=90, h=4, hk=2, d=64, dv=None, dtype=torch.bfloat16):
    dv = d if dv is None else dv
    return [torch.randn(s, dtype=dtype) for s in ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv))]


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("shape", ((1, 1), (113, 203), (239, 1), (260, 130), (0, 5), (5, 0)), ids=str)
def test_tiled_cpu_path_is_right(shape, dtype):
    for d, dv, hk in ((64, 64, 6), (40, 136, 2), (256, 8, 1)):
        for causal in (False, True):
            q, k, v = draw(2, *shape, 6, hk, d, dv, dtype)
            out, lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
            assert_close_to_truth(out, lse, q, k, v, causal=causal)


def test_signature_is_flash_attention_3s():
    names = ", ".join(inspect.signature(flash_attn_func).parameters)
    assert names == (
        "q, k, v, softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap, "
        "num_splits, pack_gqa, deterministic, sm_margin, return_attn_probs"
    )


def test_return_values():
    q, k, v = draw()
    out = flash_attn_func(q, k, v)
    again, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(out, again) and lse.shape == (2, 4, 70) and lse.dtype == torch.float32


def test_equal_spellings_of_the_mask_give_equal_results():
    q, k, v = draw()
    causal, full = flash_attn_func(q, k, v, causal=True), flash_attn_func(q, k, v)
    for window in ((-1, 0), (None, 0), (89, 0), (1000, 0)):
        assert torch.equal(flash_attn_func(q, k, v, window_size=window), causal)
        assert torch.equal(flash_attn_func(q, k, v, causal=True, window_size=window), causal)
    for window in ((None, None), (89, 69), (-1, 1000), [-1, -1]):
        assert torch.equal(flash_attn_func(q, k, v, window_size=tuple(window)), full)
        assert torch.equal(flash_attn_func(q, k, v, causal=True, window_size=tuple(window)), causal)
    assert torch.equal(flash_attn_func(q, k, v, num_splits=0, pack_gqa=False, deterministic=True), full)


UNSUPPORTED = {
    "qv": torch.zeros(1),
    "q_descale": torch.ones(1),
    "k_descale": torch.ones(1),
    "v_descale": torch.ones(1),
    "window_size": (3, 0),
    "attention_chunk": 16,
    "softcap": 15.0,
    "num_splits": 3,
    "pack_gqa": True,
    "sm_margin": 4,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_missing_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=name):
        flash_attn_func(*draw(), **{name: UNSUPPORTED[name]})


def test_every_argument_has_its_effect_or_is_refused():
    effective = {"q", "k", "v", "softmax_scale", "causal", "deterministic", "return_attn_probs"}
    assert effective | set(UNSUPPORTED) == set(inspect.signature(flash_attn_func).parameters)


def changed(index, change):
    tensors = draw()
    tensors[index] = change(tensors[index])
    return tensors


BAD = [
    ("q is a list", lambda: changed(0, lambda x: [1.0]), TypeError, "q is a list"),
    ("fp32", lambda: [x.float() for x in draw()], TypeError, r"torch\.float32.*torch\.float16 or all torch\.bfloat16"),
    ("mixed dtypes", lambda: changed(2, lambda x: x.half()), TypeError, r"torch\.bfloat16, torch\.float16"),
    ("rank 3", lambda: changed(1, lambda x: x[0]), ValueError, r"k has shape \(90, 2, 64\)"),
    ("mixed devices", lambda: changed(1, lambda x: x.to("meta")), ValueError, "cpu, meta"),
    ("heads do not divide", lambda: draw(h=4, hk=3), ValueError, "4 heads, k and v have 3"),
    ("no KV heads", lambda: draw(h=4, hk=0), ValueError, "k and v have 0"),
    ("batch", lambda: changed(2, lambda x: x[:1]), ValueError, "do not fit together"),
    ("key lengths", lambda: changed(2, lambda x: x[:, :7]), ValueError, "do not fit together"),
    ("head dims of q and k", lambda: changed(0, lambda x: x[..., :56]), ValueError, "do not fit together"),
    ("head_dim 60", lambda: draw(d=60), ValueError, "head_dim of q and k is 60.*multiple of 8"),
    ("head_dim 264", lambda: draw(d=264), ValueError, "head_dim of q and k is 264"),
    ("head_dim_v 12", lambda: draw(dv=12), ValueError, "head_dim of v is 12"),
    ("head_dim not contiguous", lambda: changed(1, lambda x: x.mT.contiguous().mT), ValueError, "k has strides"),
    ("gradient", lambda: changed(2, lambda x: x.requires_grad_()), NotImplementedError, "v requires grad"),
]


@pytest.mark.parametrize("make, error, message", [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_tensors_are_refused_with_name_value_and_what_is_accepted(make, error, message):
    with pytest.raises(error, match=message):
        flash_attn_func(*make())


@pytest.mark.parametrize("scale", (0.0, -1.0, float("nan"), float("inf")))
def test_bad_scales(scale):
    with pytest.raises(ValueError, match="softmax_scale"):
        flash_attn_func(*draw(), softmax_scale=scale)


def test_bad_window():
    with pytest.raises(ValueError, match="window_size"):
        flash_attn_func(*draw(), window_size=(-3, 0))


def test_gradients_are_fine_where_nobody_asks_for_them():
    q, k, v = changed(0, lambda x: x.requires_grad_())
    with torch.no_grad():
        flash_attn_func(q, k, v)


def test_strides_that_tma_cannot_use():
    """Checked here without a GPU: strides of 16 bytes, except where a dim of size 1 never uses its own."""
    assert interface._tma_strides("q", (2, 5, 4, 64), (1280, 256, 64, 1)) is None
    assert interface._tma_strides("q", (2, 5, 4, 64), (0, 256, 64, 1)) is None
    assert interface._tma_strides("q", (1, 5, 1, 64), (3, 64, 5, 1)) == (8, 64, 8, 1)
    with pytest.raises(ValueError, match=r"k has strides.*k\.contiguous"):
        interface._tma_strides("k", (2, 5, 4, 64), (1300, 260, 65, 1))


def test_misaligned_storage():
    q, k, v = draw()
    shifted = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)
    with pytest.raises(ValueError, match=r"k starts 2 bytes past a multiple of 16.*k\.clone"):
        interface._refuse_misaligned(q=q, k=shifted, v=v)


def test_strided_views_give_the_same_bits():
    q, k, v = draw(sk=70, hk=4)
    packed = torch.stack((q, k, v), dim=2).unbind(2)
    expanded = [x[:, :, :1].expand(-1, -1, 4, -1) for x in (q, k, v)]
    assert torch.equal(flash_attn_func(*packed), flash_attn_func(q, k, v))
    assert torch.equal(flash_attn_func(*expanded), flash_attn_func(*(x.contiguous() for x in expanded)))


@pytest.mark.parametrize("causal", (False, True))
def test_opcheck(causal):
    torch.library.opcheck(torch.ops.fa3_lib.flash_attn_fwd, (*draw(sq=9, sk=11, dv=128), 0.3, causal))


@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile_fullgraph(dynamic):
    compiled = torch.compile(
        lambda q, k, v: flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[0] * 2,
        fullgraph=True,
        dynamic=dynamic,
        backend="aot_eager",
    )
    for sq in (5, 70):
        q, k, v = draw(sq=sq)
        assert torch.equal(compiled(q, k, v), flash_attn_func(q, k, v, causal=True) * 2)


def test_errors_survive_torch_compile():
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="head_dim of q and k is 60"):
        compiled(*draw(d=60))


def test_a_gpu_that_is_no_hopper_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(RuntimeError, match=r"A100.*scaled_dot_product_attention"):
        interface._hopper_sms(torch.device("cuda:0"))
    with pytest.raises(RuntimeError, match="xpu"):
        interface._hopper_sms(torch.device("xpu"))
