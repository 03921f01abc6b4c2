"""flash_attn_func on CPU tensors, its errors, and its life under torch.compile."""

import inspect
from dataclasses import replace

import pytest
import torch

from fa3_lib import checks, flash_attn_func, interface
from fa3_lib.reference import attention_mask
from tests.fa3_lib.masked_truth import assert_close_to_truth, random_mask


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


@pytest.mark.parametrize("d, dv", ((64, 64), (96, 40), (128, 128), (192, 128), (256, 256)))
def test_masks_at_random(d, dv):
    """Windows, causal, softcap, sinks and packing in every mixture, more queries than keys and fewer, group sizes of all kinds."""
    for _ in range(8):
        sq, sk = torch.randint(1, 300, (2,)).tolist()
        group = (1, 2, 3, 4, 6, 8)[int(torch.randint(6, ()))]
        q, k, v = draw(1, sq, sk, 2 * group, 2, d, dv, (torch.float16, torch.bfloat16)[int(torch.randint(2, ()))])
        mask = random_mask(sq, sk, 2 * group)
        if mask["softcap"]:
            q *= mask["softcap"] / 4
        pack = (None, True, False)[int(torch.randint(3, ()))]
        print(f"sq {sq} sk {sk} group {group} {q.dtype} pack_gqa {pack} {mask}")
        out, lse = flash_attn_func(q, k, v, pack_gqa=pack, return_attn_probs=True, **mask)
        assert_close_to_truth(out, lse, q, k, v, **mask)


@pytest.mark.parametrize("shape", ((88, 448), (448, 448), (448, 88)), ids=str)
def test_logits_far_from_zero_in_windows(shape):
    """Every score of some rows shifted by a constant: fully masked blocks, sinks and all."""
    for shift in (-3e4, -100.0, 100.0, 3e4):
        q, k, v = draw(1, *shape, 2, 1, 120)
        q, k = (torch.cat((x, torch.zeros_like(x[..., :8])), -1) for x in (q, k))
        q[:, ::3, :, 120] = 256.0
        k[..., 120] = shift / 256.0 * 128**0.5
        for window in ((0, 0), (70, -1), (-1, 30), (200, 5)):
            for sinks in (None, torch.tensor([0.5, shift])):
                out, lse = flash_attn_func(q, k, v, window_size=window, sinks=sinks, return_attn_probs=True)
                assert_close_to_truth(out, lse, q, k, v, window_size=window, sinks=sinks)


def test_sinks():
    q, k, v = draw(sq=130, sk=70)  # the first 60 rows see no key
    plain = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    none = flash_attn_func(q, k, v, causal=True, sinks=torch.full((4,), -torch.inf), return_attn_probs=True)
    assert all(torch.equal(a, b) for a, b in zip(none, plain, strict=True))
    sinks = torch.tensor([0.5, -torch.inf, 1e4, 1e30])
    out, lse = flash_attn_func(q, k, v, causal=True, sinks=sinks, return_attn_probs=True)
    assert_close_to_truth(out, lse, q, k, v, causal=True, sinks=sinks)
    assert torch.equal(lse[:, :, 0], sinks.expand(2, 4)) and not out[:, :, 2:].any()
    for same in (sinks.double(), torch.stack((sinks, sinks), 1)[:, 0]):
        assert torch.equal(flash_attn_func(q, k, v, causal=True, sinks=same), out)
    out, lse = flash_attn_func(q, *draw(sk=0)[1:], sinks=sinks, return_attn_probs=True)
    assert not out.any() and torch.equal(lse, sinks[:, None].expand(2, 4, 130))


def test_nan_in_one_query_stays_there():
    q, k, v = draw(sq=200, sk=200)
    mask = {"window_size": (64, 0), "softcap": 5.0, "sinks": torch.zeros(4)}
    expected = flash_attn_func(q, k, v, return_attn_probs=True, **mask)
    for garbage in (torch.nan, torch.inf):
        bad = q.clone()
        bad[0, 77, 1, 5] = garbage
        out, lse = flash_attn_func(bad, k, v, return_attn_probs=True, **mask)
        out[0, 77, 1], lse[0, 1, 77] = expected[0][0, 77, 1], expected[1][0, 1, 77]
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_signature_is_flash_attention_3s():
    names = ", ".join(inspect.signature(flash_attn_func).parameters)
    assert names == (
        "q, k, v, softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap, "
        "num_splits, pack_gqa, deterministic, sm_margin, return_attn_probs, sinks, two_level, out_dtype"
    )
    for ours in ("sinks", "two_level", "out_dtype"):
        assert inspect.signature(flash_attn_func).parameters[ours].kind is inspect.Parameter.KEYWORD_ONLY


def test_return_values():
    q, k, v = draw()
    out = flash_attn_func(q, k, v)
    again, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(out, again) and lse.shape == (2, 4, 70) and lse.dtype == torch.float32


def test_equal_spellings_of_the_mask_give_equal_results():
    q, k, v = draw()
    causal, full = flash_attn_func(q, k, v, causal=True), flash_attn_func(q, k, v)
    near = flash_attn_func(q, k, v, window_size=(20, 0))
    assert torch.equal(flash_attn_func(q, k, v, causal=True, window_size=(20, 30)), near)
    assert torch.equal(flash_attn_func(q, k, v, window_size=(20, -1)), flash_attn_func(q, k, v, window_size=(20, 69)))
    assert not torch.equal(near, causal)
    for window in ((-1, 0), (None, 0), (89, 0), (1000, 0)):
        assert torch.equal(flash_attn_func(q, k, v, window_size=window), causal)
        assert torch.equal(flash_attn_func(q, k, v, causal=True, window_size=window), causal)
    for window in ((None, None), (89, 69), (-1, 1000), [-1, -1]):
        assert torch.equal(flash_attn_func(q, k, v, window_size=tuple(window)), full)
        assert torch.equal(flash_attn_func(q, k, v, causal=True, window_size=tuple(window)), causal)
    assert torch.equal(flash_attn_func(q, k, v, num_splits=0, pack_gqa=False, deterministic=True), full)


def test_windows_that_forbid_nothing_are_no_masks():
    """Against the mask's definition: sides stay only if they have an effect, and the kernel's configuration follows."""
    for _ in range(300):
        sq, sk = torch.randint(1, 9, (2,)).tolist()
        left, right = torch.randint(-1, 9, (2,)).tolist()
        causal = bool(torch.randint(0, 2, ()))
        mask = attention_mask(sq, sk, causal, (left, right))
        effective = interface.effective_window(left, right, causal, sq, sk)
        assert torch.equal(attention_mask(sq, sk, False, effective), mask)
        for side, full in ((0, (effective[0], -1)), (1, (-1, effective[1]))):
            assert (effective[side] == -1) == bool(attention_mask(sq, sk, False, full).all())
        q, k, v = draw(1, sq, sk, 1, 1)
        plan = interface._plan(
            *interface._facts(q), *interface._facts(k), *interface._facts(v), causal, left, right, False, None, None, 0
        )
        config = plan.config
        assert (config.causal, config.window) == (effective == (-1, 0), effective not in ((-1, -1), (-1, 0)))
        kernel_window = (plan.window_left, plan.window_right)
        assert min(kernel_window) >= 0 and torch.equal(attention_mask(sq, sk, False, kernel_window), mask)


def test_what_is_packed():
    """FlashAttention-3's rule on tiles of 128 rows: pack where that fills them better by a tenth."""
    table = [
        # pack_gqa, group, seqlen_q, packed heads
        (None, 8, 1, 8), (None, 128, 1, 64), (None, 12, 7, 4), (None, 1, 1, 1), (None, 7, 1, 1),
        (None, 8, 128, 1), (None, 8, 129, 8), (None, 2, 64, 2), (None, 2, 4096, 1), (None, 4, 4097, 1), (None, 4, 0, 1),
        (True, 8, 4096, 8), (True, 6, 1, 2), (True, 3, 1, 1), (False, 8, 1, 1), (True, 0, 1, 1),
    ]  # fmt: skip
    for pack_gqa, group, seqlen_q, expected in table:
        assert interface.choose_pack_gqa(pack_gqa, group, seqlen_q, 128) == expected, (pack_gqa, group, seqlen_q)


UNSUPPORTED = {"qv": torch.zeros(1), "attention_chunk": 16, "num_splits": 3}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_missing_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=rf"{name}.*pass (None|0|1)"):
        flash_attn_func(*draw(), **{name: UNSUPPORTED[name]})


def test_every_argument_has_its_effect_or_is_refused():
    effective = {"q", "k", "v", "softmax_scale", "causal", "window_size", "softcap", "pack_gqa", "sm_margin", "sinks"}
    effective |= {"deterministic", "return_attn_probs"}
    of_float8 = {"q_descale", "k_descale", "v_descale", "two_level", "out_dtype"}
    assert effective | of_float8 | set(UNSUPPORTED) == set(inspect.signature(flash_attn_func).parameters)


class LaunchedKernel:
    """Stands for a Hopper: `call(...)` runs flash_attn_func's GPU path on meta tensors and returns what the kernel is called with."""

    def __init__(self, monkeypatch):
        self.seen = []
        monkeypatch.setattr(checks, "hopper_sms", lambda device: 132)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # a meta device has no index
        monkeypatch.setattr(interface, "forward_kernel", self.compiled)
        interface._plan.cache_clear()

    def compiled(self, *key):
        return lambda *arguments: self.seen.append((key, arguments))

    def call(self, *tensors, **arguments):
        tensors = [x.to("meta") for x in tensors]
        out = flash_attn_func(*tensors, **{n: x.to("meta") if n == "sinks" else x for n, x in arguments.items()})
        return (out, *self.seen.pop())


@pytest.fixture
def hopper(monkeypatch):
    yield LaunchedKernel(monkeypatch)
    interface._plan.cache_clear()


def test_what_the_kernel_is_called_with(hopper):
    q, k, v = draw(2, 70, 90, 12, 3, 128)
    out, (config, dtype, with_lse), arguments = hopper.call(q, k, v)
    assert config == interface.forward_config(128, 128, False, 70, pack_gqa=4)
    assert (dtype, with_lse) == (torch.bfloat16, False)
    assert arguments[3] is out and arguments[4:7] == (None, None, None)  # lse, sinks, counter
    assert arguments[7:] == (128**-0.5, 0.0, 160, 160, 132)  # scale, softcap, window, CTAs

    (out, lse), (config, _, with_lse), arguments = hopper.call(
        q, k, v, softmax_scale=0.5, sinks=torch.zeros(12).half(), softcap=7, window_size=(20, None), sm_margin=100, pack_gqa=False,
        return_attn_probs=True,
    )  # fmt: skip
    assert config == interface.forward_config(128, 128, False, 70, window=True, softcap=True, sinks=True)
    assert with_lse and arguments[3] is out and arguments[4] is lse
    sinks = arguments[5]
    assert (sinks.dtype, sinks.shape, sinks.stride()) == (torch.float32, (12,), (1,))
    assert arguments[6:] == (None, 0.5, 7.0, 20, 160, 32)

    _, (config, _, _), arguments = hopper.call(q, k, v, causal=True, window_size=(500, 3), pack_gqa=False)
    assert config == interface.forward_config(128, 128, True, 70)
    assert arguments[9:] == (160, 0, 132)

    with pytest.raises(ValueError, match=r"sm_margin=132; 0 to 131 is accepted"):
        hopper.call(q, k, v, sm_margin=132)


def test_dynamic_tiles_get_a_counter_of_their_own(hopper, monkeypatch):
    """A ring of zeros for eager calls; in captures slots that nobody else ever gets, and fresh zeros when they are used up."""
    choose = interface.forward_config
    monkeypatch.setattr(interface, "forward_config", lambda *a, **kw: replace(choose(*a, **kw), dynamic=True))
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.Stream("cpu"))
    interface._counter_ring.cache_clear()
    counters = [hopper.call(*draw(), causal=True)[2][6] for _ in range(3)]
    assert all((c.dtype, c.shape, c.device.type) == (torch.int32, (2,), "meta") for c in counters)
    assert [c.storage_offset() for c in counters] == [0, 2, 4]

    cpu, fresh = torch.device("cpu"), []
    monkeypatch.setattr(torch, "zeros", lambda *a, zeros=torch.zeros, **kw: fresh.append(a) or zeros(*a, **kw))
    monkeypatch.setattr(interface, "CAPTURED_COUNTERS", 3)
    interface._captured_slots.pop(cpu, None)
    capturing = True
    assert interface._counter(cpu).tolist() == [0, 0] and fresh == [
        (2,)
    ]  # no ring yet, and none can be made in a capture
    capturing = False
    eager = [interface._counter(cpu) for _ in range(interface.COUNTERS)]
    assert interface._counter(cpu) is eager[0]
    capturing = True
    captured = [interface._counter(cpu) for _ in range(3)]
    assert fresh[1:] == [(interface.COUNTERS + 3, 2)]  # one allocation for all of them
    slots = [*eager, *captured]
    assert len({c.data_ptr() for c in slots}) == len(slots) and not torch.stack(slots).any()
    assert all(c.data_ptr() % 8 == 0 and c.is_contiguous() for c in slots)
    late = [interface._counter(cpu) for _ in range(2)]
    assert fresh[2:] == [(2,), (2,)] and not {c.data_ptr() for c in late} & {c.data_ptr() for c in slots}
    capturing = False
    assert interface._counter(cpu) is eager[1]  # captures take no eager slot
    interface._counter_ring.cache_clear()


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
    (
        "float8 beside 16 bits",
        lambda: changed(0, lambda x: x.to(torch.float8_e5m2)),
        TypeError,
        r"torch\.float8_e4m3fn or torch\.float8_e5m2 is accepted",
    ),
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


BAD_VALUES = [
    ({"window_size": (-3, 0)}, ValueError, r"window_size=\(-3, 0\)"),
    ({"window_size": (1.5, 0)}, ValueError, r"window_size=\(1\.5, 0\)"),
    ({"window_size": (1, 2, 3)}, ValueError, r"window_size=\(1, 2, 3\); two sides"),
    ({"softcap": -1.0}, ValueError, "softcap is -1"),
    ({"softcap": float("nan")}, ValueError, "softcap is nan"),
    ({"softcap": float("inf")}, ValueError, "softcap is inf"),
    ({"sm_margin": -1}, ValueError, "sm_margin=-1"),
    ({"sm_margin": 0.5}, ValueError, r"sm_margin=0\.5"),
    ({"sinks": [0.0] * 4}, TypeError, "sinks is a list"),
    ({"sinks": torch.zeros(3)}, ValueError, r"sinks has shape \(3,\).*\(4,\)"),
    ({"sinks": torch.zeros(4, dtype=torch.int32)}, TypeError, r"sinks is torch\.int32"),
    ({"sinks": torch.zeros(4, device="meta")}, ValueError, "sinks is on meta, q on cpu"),
    ({"sinks": torch.zeros(4, requires_grad=True)}, NotImplementedError, "sinks requires grad"),
    *(
        ({n: torch.ones(2, 2)}, ValueError, rf"{n} is given.*pass None")
        for n in ("q_descale", "k_descale", "v_descale")
    ),
]


@pytest.mark.parametrize("arguments, error, message", BAD_VALUES, ids=[b[2] for b in BAD_VALUES])
def test_bad_values_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        flash_attn_func(*draw(), **arguments)


def test_descales_of_float8_tensors_are_checked():
    q, k, _ = (x.to(torch.float8_e4m3fn) for x in draw(b=3))
    good = torch.ones(3, 4)[:, ::2]
    checks.check_descales(q, k, q_descale=good, k_descale=None, v_descale=torch.ones(1, 1).expand(3, 2))
    for bad, error, message in (
        (torch.ones(3, 4), ValueError, r"k_descale has shape \(3, 4\).*\(3, 2\)"),
        (good.double(), TypeError, r"k_descale is torch\.float64"),
        (good.to("meta"), ValueError, "k_descale is on meta"),
        (1.0, TypeError, "k_descale is a float"),
    ):
        with pytest.raises(error, match=message):
            checks.check_descales(q, k, q_descale=good, k_descale=bad)


def test_gradients_are_fine_where_nobody_asks_for_them():
    q, k, v = changed(0, lambda x: x.requires_grad_())
    with torch.no_grad():
        flash_attn_func(q, k, v)


def test_strides_that_tma_cannot_use():
    """Checked here without a GPU: strides of 16 bytes, except where a dim of size 1 never uses its own."""
    assert checks.tma_strides("q", (2, 5, 4, 64), (1280, 256, 64, 1)) is None
    assert checks.tma_strides("q", (2, 5, 4, 64), (0, 256, 64, 1)) is None
    assert checks.tma_strides("q", (1, 5, 1, 64), (3, 64, 5, 1)) == (8, 64, 8, 1)
    with pytest.raises(ValueError, match=r"k has strides.*k\.contiguous"):
        checks.tma_strides("k", (2, 5, 4, 64), (1300, 260, 65, 1))


def test_misaligned_storage():
    q, k, v = draw()
    shifted = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)
    with pytest.raises(ValueError, match=r"k starts 2 bytes past a multiple of 16.*k\.clone"):
        checks.refuse_misaligned(q=q, k=shifted, v=v)


def test_strided_views_give_the_same_bits():
    q, k, v = draw(sk=70, hk=4)
    packed = torch.stack((q, k, v), dim=2).unbind(2)
    expanded = [x[:, :, :1].expand(-1, -1, 4, -1) for x in (q, k, v)]
    assert torch.equal(flash_attn_func(*packed), flash_attn_func(q, k, v))
    assert torch.equal(flash_attn_func(*expanded), flash_attn_func(*(x.contiguous() for x in expanded)))


@pytest.mark.parametrize("causal", (False, True))
def test_opcheck(causal):
    tensors = draw(sq=9, sk=11, dv=128)
    torch.library.opcheck(torch.ops.fa3_lib.flash_attn_fwd, (*tensors, 0.3, causal))
    rest = (2, 5, 4.0, torch.zeros(4), True, 3)  # left, right, softcap, sinks, pack_gqa, sm_margin
    torch.library.opcheck(torch.ops.fa3_lib.flash_attn_fwd, (*tensors, 0.3, causal, *rest))


@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile_fullgraph(dynamic):
    sinks = torch.randn(4)
    more = {"window_size": (33, None), "softcap": 4.0, "sinks": sinks, "pack_gqa": True, "sm_margin": 1}
    for arguments in ({"causal": True}, more):
        compiled = torch.compile(
            lambda q, k, v, arguments=arguments: flash_attn_func(q, k, v, **arguments, return_attn_probs=True)[0] * 2,
            fullgraph=True,
            dynamic=dynamic,
            backend="aot_eager",
        )
        for sq in (5, 70):
            q, k, v = draw(sq=sq)
            assert torch.equal(compiled(q, k, v), flash_attn_func(q, k, v, **arguments) * 2)


def test_errors_survive_torch_compile():
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="head_dim of q and k is 60"):
        compiled(*draw(d=60))
    with pytest.raises(Exception, match=r"sinks has shape \(3,\)"):
        compiled(*draw(), sinks=torch.zeros(3))
    with pytest.raises(Exception, match="window_size"):
        compiled(*draw(), window_size=(-2, 0))


def test_a_gpu_that_is_no_hopper_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(RuntimeError, match=r"A100.*scaled_dot_product_attention"):
        checks.hopper_sms(torch.device("cuda:0"))
    with pytest.raises(RuntimeError, match="xpu"):
        checks.hopper_sms(torch.device("xpu"))
