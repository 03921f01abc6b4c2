"""Chapter 2: the GEMM and rungs 3 to 5. Machine code on any machine; numbers against fp64 on a Hopper."""

import functools
import importlib.util
import itertools
import math

import pytest
import torch

from fa3_course import paths, rungs
from tests.tolerance import assert_close_to_truth, assert_repeats_are_bit_equal

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("CuTe DSL has Linux wheels only", allow_module_level=True)

NUMBERS = ("3", "4", "5")
DTYPES = (torch.float16, torch.bfloat16)
CONSUMERS = {"3": 1, "4": 1, "5": 2}  # warpgroups that multiply


@functools.cache
def gemm():
    return rungs._module("chapters/02_tma_wgmma/steps/gemm_tile.py")


# --- machine code, no GPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("d", (64, 128, 192, 256))
@pytest.mark.parametrize("number", NUMBERS)
def test_machine_code(number, d, causal):
    """No spills, no advisories, and exactly the Hopper instructions that the rung's source asks for."""
    from fa3_course import sass

    rung = rungs.find(number).module()
    config = rung.make_config(d, causal)
    (report,) = sass.compile_report(lambda options: rung.compile_rung(config, torch.bfloat16, options))
    assert report.problems() == []
    # two loop bodies (masked and unmasked blocks), each with d / 16 k-steps for QK and tile_n / 16 for PV
    assert report.count("HGMMA") == 2 * (d // 16 + config.tile_n // 16)
    # a TMA box is one swizzled row wide, 64 columns; rung 3 has its K and V loads in both loop bodies
    boxes, bodies = d // 64, 2 if number == "3" else 1
    assert report.count("UTMALDG") == boxes * (CONSUMERS[number] + 2 * bodies)
    assert report.count("UTMASTG") == boxes
    assert report.count("USETMAXREG") == (2 if number == "5" else 0)
    assert report.count("LDGSTS") == report.count("HMMA") == 0
    # two rows of each thread: its scores and one factor per row, in both loop bodies
    assert report.count("MUFU.EX2") == 2 * (config.tile_n // 2 + 2)
    # what the launch asks for is what the configuration's budget says, up to barriers and alignment
    assert config.smem_bytes - 1024 < report.smem <= config.smem_bytes


@pytest.mark.parametrize("a_source", ("shared", "registers"))
@pytest.mark.parametrize("b_major", ("K", "MN"))
def test_gemm_machine_code(b_major, a_source):
    from fa3_course import sass

    module = gemm()
    (report,) = sass.compile_report(lambda options: module.compile_gemm(torch.bfloat16, b_major, a_source, options))
    assert report.problems() == []
    # 64-row instructions over 16 columns of k, for the whole tile
    assert report.count("HGMMA") == module.TILE_M // 64 * module.TILE_K // 16
    # MN-major B is 128 contiguous columns, two swizzled rows: one box more
    assert report.count("UTMALDG") == (2 if b_major == "K" else 3)
    assert (report.count("LDSM") > 0) == (a_source == "registers")
    assert report.count("HMMA") == report.count("LDGSTS") == 0


def test_a_configuration_that_does_not_fit_is_refused_with_the_sum():
    rung = rungs.find("5").module()
    from dataclasses import replace

    with pytest.raises(ValueError, match=r"shared memory exceeded.*stages"):
        rung.compile_rung(replace(rung.make_config(128, False), stages=4), torch.bfloat16)


BAD = {
    "rank": (lambda q, k, v: (q[0], k, v), "q must be"),
    "heads": (lambda q, k, v: (q[:, :, :3], k, v), "not a multiple of the 2 KV heads"),
    "head_dim": (lambda q, k, v: (q, k[..., :8], v), "shapes do not fit"),
    "odd": (lambda q, k, v: (q[..., :12], k[..., :12], v), "q: head_dim must be a multiple of 8"),
    "wide": (lambda q, k, v: (q, k, v.new_zeros(1, 10, 2, 264)), "v: head_dim must be a multiple of 8 up to 256, got 264"),
    "lengths": (lambda q, k, v: (q, k, v[:, :5]), "shapes do not fit"),
    "dtype": (lambda q, k, v: (q, k.float(), v), "k must be float16 or bfloat16"),
    "grad": (lambda q, k, v: (q, k.requires_grad_(), v), "k.requires_grad"),
    "device": (lambda q, k, v: (q, k, v), "q must be on a Hopper GPU"),
}  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(number, case):
    shapes = ((1, 10, 4, 16), (1, 10, 2, 16), (1, 10, 2, 16))
    inputs = BAD[case][0](*(torch.randn(s, dtype=torch.bfloat16) for s in shapes))
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=BAD[case][1]):
        rungs.find(number).module().attention(*inputs)


def test_gemm_errors_name_the_argument():
    a, b = torch.randn(8, 16, dtype=torch.float16), torch.randn(24, 16, dtype=torch.float16)
    for call, message in (
        (lambda: gemm().matmul(a, b[:, :8]), "want a"),
        (lambda: gemm().matmul(a.float(), b), "a and b must both be"),
        (lambda: gemm().matmul(a, b, "global"), "a_source must be"),
        (lambda: gemm().matmul(a[:, 1:], b[:, 1:]), "a with strides"),
        (lambda: gemm().matmul(a, b.repeat(1, 2)[:, ::2]), "b with strides"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()


# --- numbers, on the card ----------------------------------------------------------------------------------------------

SHAPES = (
    (1, 1),
    (64, 128),
    (128, 192),
    (239, 1),
    (113, 203),
    (108, 256),
    (640, 128),
    (512, 256),
    (1023, 1024),
    (2048, 2048),
)


def draw(b, sq, sk, h, hk, d, dv=None, dtype=torch.bfloat16):
    shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, d if dv is None else dv))
    return [torch.randn(s, dtype=dtype, device="cuda") for s in shapes]


def attend(number, q, k, v, scale=None, causal=False):
    """The rung on an allocator whose free blocks hold NaN: an element that is not written shows."""
    poison = [torch.full((n,), torch.nan, device="cuda") for n in (q.numel(), q.numel(), q[..., 0].numel())]
    del poison
    return rungs.find(number).module().attention(q, k, v, scale, causal)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("d", (64, 128, 192, 256))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", NUMBERS)
def test_grid(number, dtype, d, causal):
    """All shapes in one test, since they share one compilation."""
    for shape, hk in itertools.product(SHAPES, (6, 2, 1)):
        print(f"{shape}, {hk} KV heads")
        q, k, v = draw(3, *shape, 6, hk, d, dtype=dtype)
        assert_close_to_truth(*attend(number, q, k, v, None, causal), q, k, v, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("number", NUMBERS)
def test_other_head_dims_scales_and_strides(number):
    for d, dv in ((8, 8), (40, 24), (72, 128), (104, 104), (136, 200), (256, 64)):
        q, k, v = draw(2, 200, 333, 4, 2, d, dv)
        assert_close_to_truth(*attend(number, q, k, v, 0.3, True), q, k, v, 0.3, True)
    q, k, v = draw(2, 150, 150, 4, 4, 64)
    expected = attend(number, q, k, v, causal=True)
    packed = torch.stack((q, k, v), dim=2).unbind(2)  # strides that TMA reads as they are
    odd = [torch.cat((x, x[..., :3]), -1)[..., :64] for x in (q, k, v)]  # strides that it cannot read
    for views in (packed, odd):
        for got, want in zip(attend(number, *views, causal=True), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("number", NUMBERS)
def test_empty_tensors(number):
    for b, sq, sk in ((2, 5, 0), (2, 0, 5), (0, 5, 5)):
        q, k, v = draw(b, sq, sk, 4, 2, 64)
        assert_close_to_truth(*attend(number, q, k, v), q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("stages", (1, 2, 4))
@pytest.mark.parametrize("tile_n", (48, 64, 128))
@pytest.mark.parametrize("number", ("4", "5"))
def test_stages_and_tiles_do_not_change_the_answer(number, tile_n, stages):
    from dataclasses import replace

    from fa3_course import rung_host

    rung = rungs.find(number).module()
    config = replace(rung.make_config(64, True), tile_n=tile_n, stages=stages)
    q, k, v = draw(2, 777, 800, 4, 2, 64)
    out, lse = rung_host.run(rung.Attention, config, q, k, v, causal=True)
    assert_close_to_truth(out, lse, q, k, v, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("number", NUMBERS)
def test_repeats_are_bit_equal(number):
    """A race shows as bits that change from run to run."""
    for d in (64, 128, 256):
        q, k, v = draw(4, 777, 777, 6, 2, d)
        attention = rungs.find(number).module().attention
        call = functools.partial(attention, q, k, v, causal=True)
        assert_repeats_are_bit_equal(lambda run, call=call: call(), 200)


@pytest.mark.gpu
@pytest.mark.parametrize("a_source", ("shared", "registers"))
@pytest.mark.parametrize("b_major", ("K", "MN"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemm(dtype, b_major, a_source):
    for m, n, k in ((1, 8, 8), (128, 128, 64), (129, 136, 72), (300, 1000, 512), (64, 256, 2048)):
        a = torch.randn(m, k, dtype=dtype, device="cuda")
        b = torch.randn(n, k, dtype=dtype, device="cuda")
        if b_major == "MN":
            b = b.T.contiguous().T
        poison = torch.full((m * n,), torch.nan, device="cuda")
        del poison
        c, truth = gemm().matmul(a, b, a_source), a.double() @ b.double().T
        rounding = torch.finfo(dtype).eps * truth.abs().max() + 1e-6 * math.sqrt(k)
        assert c.dtype == dtype and (c.double() - truth).abs().max() <= rounding


def test_steps_are_where_the_lesson_looks():
    folder = paths.checkout() / "chapters/02_tma_wgmma/steps"
    assert {rungs.find(n).file for n in NUMBERS} <= {
        p.relative_to(paths.checkout()).as_posix() for p in folder.iterdir()
    }


def test_edited_rungs_say_what_they_do_not_find():
    from fa3_course import rung_host

    file = paths.checkout() / rungs.find("5").file
    with pytest.raises(ValueError, match=r"occurs 0 times in rung05_warp_specialised\.py"):
        rung_host.edited(file, ("setmaxregister_vanish", ""))
    assert rung_host.edited(file, ("TILE_M = 2 * WGMMA_M", "TILE_M = WGMMA_M")).TILE_M == 64
