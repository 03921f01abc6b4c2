"""Chapter 4: rung 10. Machine code, layouts and V's order on any machine; numbers against fp64 on a Hopper."""

import functools
import importlib.util
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fa3_course import rungs
from fa3_lib import reference
from fa3_lib.config import REGISTER_FILE
from tests.tolerance import (
    about_empty_rows,
    assert_at_most,
    assert_repeats_are_bit_equal,
    largest_error,
    lse_error_and_allowed,
    rounding_noise,
)

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("CuTe DSL has Linux wheels only", allow_module_level=True)

rung = rungs._module("chapters/04_fp8/steps/rung10_fp8.py")
fp8 = rungs._module("chapters/04_fp8/steps/fp8_numerics.py")
E4M3 = torch.float8_e4m3fn
FULL_CAUSAL = pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
HEAD_DIMS = pytest.mark.parametrize("d", rung.TILES, ids=lambda d: f"d{d}")
LEVELS = pytest.mark.parametrize("two_level", (True, False), ids=("two-level", "straight"))


@pytest.fixture
def rng(request):
    """Fresh numbers each time; a failing test shows its seed."""
    seed = np.random.SeedSequence().entropy % 2**32
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return np.random.default_rng(seed)


# --- no GPU --------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This static loop has")
@FULL_CAUSAL
@LEVELS
@pytest.mark.parametrize("d, tile_m, tile_n", [(d, *tile) for d, tile in rung.TILES.items()] + [(64, 192, 96)])
def test_machine_code(d, tile_m, tile_n, two_level, causal):
    """No spills, no advisories, and exactly the Hopper instructions that the rung's source asks for."""
    from fa3_course import sass

    config = replace(rung.make_config(d, causal), tile_m=tile_m, tile_n=tile_n)
    (report,) = sass.compile_report(lambda options: rung.compile_rung(config, E4M3, options, two_level))
    assert report.problems() == []
    bodies = 3  # masked and unmasked blocks; one block's QK and one block's PV stand outside
    parts = rung.Attention(config, two_level).parts  # of O's columns, each with its own pass over P
    assert report.count("QGMMA") == bodies * (d // 32 + parts * tile_n // 32)
    assert report.count("HGMMA") == 0
    assert report.count("MUFU.EX2") == bodies * (tile_n // 2 + 2)
    # P is rounded two values at a time and never leaves its thread: shuffles are those of 2 rows' maxima and sums
    assert report.count("F2FP.SATFINITE.E4M3") == bodies * tile_n // 4
    assert report.count("SHFL") == 4 * bodies + 4
    assert report.count("PRMT") == 0

    # a TMA box is one row of the swizzle wide: 128, 64 or 32 bytes
    def boxes(size):
        return size // next(width for width in (128, 64, 32) if size % width == 0)

    assert report.count("UTMALDG") == boxes(d) * (config.consumer_warpgroups + 1) + boxes(tile_n)
    assert report.count("UTMASTG") == d // 64
    assert report.count("BAR.ARV") == 3 and report.count("BAR.SYNC") == 2 + 2  # turns; the CTA's start, the output
    assert report.count("USETMAXREG") == 2
    assert report.registers * config.threads <= REGISTER_FILE
    assert config.smem_bytes - 1024 < report.smem <= config.smem_bytes
    if two_level:  # O * shrink + T in one instruction, in each body, on top of one per exponential
        assert report.count("FFMA") >= bodies * (d // 2 + tile_n // 2)


def register_maps(config):
    """(row, column) of S per (thread, accumulator register), (row, position) of P per (thread, operand byte), from CuTe."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32

    kernel, found = rung.Attention(config), {}

    def table(layout, registers, order):
        threads = np.array([cute.crd2idx((t, 0), layout) for t in range(128)])
        values = np.empty(registers, int)
        for v in range(registers):
            values[order(v)] = cute.crd2idx((0, v), layout)
        index = threads[:, None] + values  # column-major in a tile of 64 rows
        return index % 64, index // 64

    @cute.jit
    def look():
        qk, pv = kernel.make_mma_qk(False), kernel.make_mma_pv(True)
        n = config.tile_n
        acc = cute.make_rmem_tensor(qk.get_slice(0).partition_shape_C((64, n)), Float32)
        operand = cute.make_rmem_tensor(pv.get_slice(0).partition_shape_A((64, n)), cutlass.Float8E4M3FN)
        found["S"] = table(qk.tv_layout_C_tiled, n // 2, lambda v: cute.crd2idx((v, 0, 0), acc.layout))
        row, column = table(pv.tv_layout_A_tiled, 16, lambda v: cute.crd2idx((v, 0, 0), operand.layout))
        steps = [cute.crd2idx((0, 0, k), operand.layout) for k in range(n // 32)]
        assert steps == [16 * k for k in range(n // 32)]
        found["P"] = np.tile(row, n // 32), np.concatenate([column + 32 * k for k in range(n // 32)], axis=1)

    cute.compile(look, options="--gpu-arch sm_90a")
    return found["S"], found["P"]


@HEAD_DIMS
def test_packed_registers_times_transposed_v_are_p_times_v(d, rng):
    """Each thread packs its own registers of P, the tensor core reads them as A, V comes from transpose_v: exactly P V."""
    config = rung.make_config(d, False)
    accumulator, operand = register_maps(config)
    P = rng.integers(0, 100, (64, config.tile_n)).astype(float)
    V = rng.integers(0, 100, (1, config.tile_n, 1, d)).astype(np.uint8)

    S = P[accumulator]  # (thread, register)
    assert S.shape == (128, config.tile_n // 2)
    packed = np.stack([S[:, rung.accumulator_index(i)] for i in range(config.tile_n // 2)], axis=1)
    A = np.full_like(P, np.nan)
    A[operand] = packed
    Vt = rung.transpose_v(torch.from_numpy(V))[0, 0].numpy().astype(float)  # (dv, position)
    assert np.array_equal(A @ Vt.T, P @ V[0, :, 0].astype(float))
    # the chapter's own tables say the same
    assert np.array_equal(A, P.reshape(64, -1, 32)[:, :, fp8.key_order()].reshape(P.shape))


@pytest.mark.parametrize("sk", (1, 31, 32, 33, 200))
def test_transpose_v_against_a_loop(sk, rng):
    b, hk, dv = 2, 3, 16
    v = torch.from_numpy(rng.integers(1, 255, (b, hk, sk, dv)).astype(np.uint8)).transpose(1, 2).view(E4M3)
    got, order = rung.transpose_v(v), fp8.key_order()
    assert got.dtype == E4M3 and got.is_contiguous() and got.shape == (b, hk, dv, math.ceil(sk / 32) * 32)
    got, v = got.view(torch.uint8), v.view(torch.uint8)
    for position in range(got.shape[3]):
        key = 32 * (position // 32) + order[position % 32]
        want = v[:, key] if key < sk else torch.zeros(b, hk, dv, dtype=torch.uint8)
        assert torch.equal(got[..., position], want)


def test_a_configuration_that_does_not_fit_is_refused():
    config = rung.make_config(128, False)
    for change, message in (
        ({"stages": 8}, r"shared memory exceeded.*stages"),
        ({"tile_n": 160}, r"S \+ P \+ O \+ T = 228 of 240"),
        ({"tile_n": 48}, "tile_n must be a multiple of 32"),
        ({"own_output": False}, "own_output=True"),
    ):
        with pytest.raises(ValueError, match=message):
            rung.compile_rung(replace(config, **change), E4M3)
    with pytest.raises(TypeError, match=r"float8_e4m3fn, not in torch\.bfloat16"):
        rung.compile_rung(config, torch.bfloat16)


def test_errors_name_the_argument():
    q, k, v = (torch.randn(1, 10, h, 32).to(E4M3) for h in (4, 2, 2))
    for inputs, options, message in (
        ((q[:, :, :3], k, v), {}, "not a multiple of the 2 KV heads"),
        ((q[..., :24], k[..., :24], v), {}, "q: head_dim must be a multiple of 16"),
        ((q, k.to(torch.bfloat16), v), {}, "k must be torch.float8_e4m3fn"),
        ((q, k[:, :9], v), {}, "shapes do not fit"),
        ((q, k, v), {"k_descale": torch.ones(1, 4)}, r"k_descale must be fp32 \(1, 2\)"),
        ((q, k, v), {"v_descale": torch.ones(1, 2).double()}, "v_descale must be fp32"),
        ((q, k, v), {"softmax_scale": -1.0}, "softmax_scale must be positive"),
        ((q, k, v), {}, "q must be on a Hopper GPU"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            rung.attention(*inputs, **options)
    with pytest.raises(ValueError, match=r"v must be .* one-byte elements"):
        rung.transpose_v(torch.zeros(1, 2, 3, 16))


# --- numbers, on the card ------------------------------------------------------------------------------------------------

SHAPES = ((1, 1), (64, 128), (128, 192), (239, 1), (113, 203), (640, 128), (512, 256), (1023, 1024), (2048, 2048))


def draw(b, sq, sk, h, hk, d, dv=None):
    """q, k, v, and descales in [0, 2), all different and with strides of their own."""
    shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, d if dv is None else dv))
    descales = [torch.rand(hk, b, 3, device="cuda")[..., i].T * 2 for i in range(3)]
    return [torch.randn(s, device="cuda").to(E4M3) for s in shapes], descales


def attend(q, k, v, scale=None, causal=False, descales=(), **options):
    """The rung on an allocator whose free blocks hold NaN: an element that is not written shows."""
    poison = [torch.full((n,), torch.nan, device="cuda") for n in (q.numel(), q.numel(), q[..., 0].numel())]
    del poison
    return rung.attention(q, k, v, scale, causal, *descales, **options)


def dequantised(x, descale):
    return x.double() if descale is None else x.double() * descale[:, None, :, None].double()


def truth_and_rounded_p(q, k, v, scale, causal, descales):
    """(out, lse) in fp64, and out by plain PyTorch in fp32 with P, in (0, 256], rounded to e4m3 and out to bf16."""
    group = q.shape[2] // k.shape[2]
    q_factor, k_factor, v_factor = descales or (None,) * 3
    q_factor = None if q_factor is None else q_factor.repeat_interleave(group, dim=1)
    q, k, v = dequantised(q, q_factor), dequantised(k, k_factor), dequantised(v, v_factor)
    out, lse = reference.attention(q, k, v, scale, causal)
    if q.numel() == 0 or k.numel() == 0:  # nothing to round, and amax knows no empty rows
        return out, lse, out.to(torch.bfloat16)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    qt, kt, vt = (x.float().transpose(1, 2) for x in (q, k, v))
    kt, vt = (x.repeat_interleave(group, dim=1) for x in (kt, vt))
    allowed = reference.attention_mask(q.shape[1], k.shape[1], causal, device=q.device)
    scores = (qt @ kt.transpose(-1, -2) * scale).masked_fill(~allowed, -torch.inf)
    P = (scores - scores.amax(-1, keepdim=True)).exp().nan_to_num(0.0) * 2.0**rung.OFFSET
    rounded = (P.to(E4M3).float() @ vt / P.sum(-1, keepdim=True)).nan_to_num(0.0)
    return out, lse, rounded.transpose(1, 2).to(torch.bfloat16)


def score_error(q, k, scale, descales):
    """What may be wrong in a score, and so in LSE: each step of an FP8 product keeps 13 bits below its largest term.

    On random inputs the cuts of all steps add up to at most 1.6 * 2^-13 of sum |q_i k_i| (fp8_numerics.tensor_core).
    """
    group = q.shape[2] // k.shape[2]
    q_factor, k_factor, _ = descales or (None,) * 3
    q_factor = None if q_factor is None else q_factor.repeat_interleave(group, dim=1)
    q, k = (dequantised(x, factor).abs().transpose(1, 2) for x, factor in ((q, q_factor), (k, k_factor)))
    largest = (q @ k.repeat_interleave(group, dim=1).transpose(-1, -2)).amax()
    return 2.0**-11 * largest * (q.shape[-1] ** -0.5 if scale is None else scale) + 1e-4  # and exp2's own error


def assert_right(result, q, k, v, scale=None, causal=False, descales=()):
    """FA3's own rule: at most twice the error of a computation that rounds P as well, plus the output's rounding."""
    out, lse = result
    true_out, true_lse, rounded_p = truth_and_rounded_p(q, k, v, scale, causal, descales)
    assert out.dtype == torch.bfloat16 and out.shape == true_out.shape
    assert lse.dtype == torch.float32 and lse.shape == true_lse.shape
    claims = [*about_empty_rows(out, lse, true_lse, (true_lse == -torch.inf).transpose(1, 2))]
    if out.numel() and k.numel():
        noise = rounding_noise(true_out, torch.bfloat16)
        lse_error, _ = lse_error_and_allowed(lse, true_lse)
        claims += [
            ("out: error", largest_error(out, true_out), 2 * largest_error(rounded_p, true_out) + 2 * noise),
            ("lse: error", lse_error, score_error(q, k, scale, descales)),
        ]
    assert_at_most(claims)


@pytest.mark.gpu
@FULL_CAUSAL
@HEAD_DIMS
def test_grid(d, causal, rng):
    """All shapes in one test, since they share two compilations."""
    for shape, hk in itertools.product(SHAPES, (6, 2, 1)):
        print(f"{shape}, {hk} KV heads")
        (q, k, v), descales = draw(3, *shape, 6, hk, d)
        assert_right(attend(q, k, v, None, causal, descales), q, k, v, None, causal, descales)
        assert_right(attend(q, k, v, None, causal), q, k, v, None, causal)
        straight = attend(q, k, v, None, causal, descales, two_level=False)
        assert_right(straight, q, k, v, None, causal, descales)


@pytest.mark.gpu
def test_other_head_dims_scales_and_strides(rng):
    for d, dv in ((16, 16), (48, 32), (80, 128), (112, 112), (144, 208), (256, 64)):
        (q, k, v), descales = draw(2, 200, 333, 4, 2, d, dv)
        assert_right(attend(q, k, v, 0.3, True, descales), q, k, v, 0.3, True, descales)
    (q, k, v), descales = draw(2, 150, 150, 4, 4, 64)
    expected = attend(q, k, v, None, True, descales)
    packed = torch.stack([x.view(torch.uint8) for x in (q, k, v)], dim=2).unbind(2)  # TMA reads these as they are
    odd = [torch.cat((x, x[..., :3]), -1)[..., :64] for x in packed]  # strides that it cannot read
    for views in (packed, odd):
        for got, want in zip(attend(*(x.view(E4M3) for x in views), None, True, descales), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu
def test_empty_tensors():
    for b, sq, sk in ((2, 5, 0), (2, 0, 5), (0, 5, 5)):
        (q, k, v), descales = draw(b, sq, sk, 4, 2, 64)
        assert_right(attend(q, k, v, None, False, descales), q, k, v, None, False, descales)


@pytest.mark.gpu
@FULL_CAUSAL
@HEAD_DIMS
@LEVELS
def test_close_to_the_emulated_kernel(two_level, d, causal, rng):
    """fp8_numerics goes through the same tiles with the same roundings; what is left is the order of sums and exp2."""
    (q, k, v), descales = draw(1, 200, 600, 2, 1, d)
    out, lse = attend(q, k, v, None, causal, descales, two_level=two_level)
    tile_m, tile_n = rung.TILES[d]
    recipe = fp8.Recipe(scales="none", two_level=two_level, tile_m=tile_m, tile_n=tile_n)
    q_factor, k_factor, v_factor = (float(x) for x in descales)
    arrays = [x.float().cpu().numpy() for x in (q, k, v)]
    emulated, emulated_lse = fp8.attention(*arrays, d**-0.5 * q_factor * k_factor, causal, recipe)
    true_out, _, _ = truth_and_rounded_p(q, k, v, None, causal, descales)
    emulated = torch.from_numpy(emulated * v_factor).cuda()
    # much nearer to each other than FP8 is to the truth
    rms = [float((x.double() - y.double()).square().mean().sqrt()) for x, y in ((out, emulated), (emulated, true_out))]
    assert rms[0] <= rms[1] / 2, rms
    torch.testing.assert_close(lse.cpu(), torch.from_numpy(emulated_lse), atol=0.01, rtol=0)


@pytest.mark.gpu
@HEAD_DIMS
def test_v_of_ones_over_a_long_context(d, rng):
    """The weights sum to 1 whatever the scores are; an accumulator of 13 bits forgets most of 64k keys."""
    q, k = (torch.randn(1, s, 2, d, device="cuda").to(E4M3) for s in (256, 65_536))
    v = torch.ones_like(k.float()).to(E4M3)
    for queries in (q, torch.zeros_like(q.float()).to(E4M3)):  # also with all weights equal
        out, _ = attend(queries, k, v)
        assert (out.float() - 1).abs().max() <= 0.005
        assert attend(queries, k, v, two_level=False)[0].float().mean() < 0.9


@pytest.mark.gpu
def test_extreme_descales(rng):
    """A factor of 0 makes all scores equal; a negative or NaN one must not give numbers that look right."""
    (q, k, v), (q_factor, k_factor, v_factor) = draw(2, 100, 300, 4, 2, 64)
    q_factor = torch.zeros_like(q_factor)
    for causal in (False, True):
        descales = (q_factor, k_factor, v_factor)
        assert_right(attend(q, k, v, None, causal, descales), q, k, v, None, causal, descales)
    for bad in (-1.0, math.nan):
        out, _ = attend(q, k, v, None, False, (torch.full_like(q_factor, bad), k_factor, v_factor))
        assert out.isnan().all()


@pytest.mark.gpu
@LEVELS
@pytest.mark.parametrize("tile_m, tile_n, stages", ((64, 32, 1), (128, 192, 4), (192, 96, 2), (192, 64, 4)))
def test_consumers_stages_and_tiles(tile_m, tile_n, stages, two_level, rng, monkeypatch):
    config = replace(rung.make_config(64, True), tile_m=tile_m, tile_n=tile_n, stages=stages, ping_pong=tile_m > 64)
    monkeypatch.setattr(rung, "make_config", lambda head_dim, causal: config)
    for sq, sk in ((777, 800), (800, 300)):  # the second has tiles whose rows see no key
        (q, k, v), descales = draw(2, sq, sk, 4, 2, 64)
        got = attend(q, k, v, None, True, descales, two_level=two_level)
        assert_right(got, q, k, v, None, True, descales)


@pytest.mark.gpu
def test_repeats_are_bit_equal(rng):
    """A race shows as bits that change from run to run."""
    for d in rung.TILES:
        (q, k, v), descales = draw(4, 777, 777, 6, 2, d)
        call = functools.partial(rung.attention, q, k, v, None, True, *descales)
        assert_repeats_are_bit_equal(lambda run, call=call: call(), 100)
