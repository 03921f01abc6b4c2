"""Chapter 3: rungs 6, 7, 7b and 8. Machine code and configurations on any machine; numbers against fp64 on a Hopper."""

import functools
import importlib.util
import itertools
from dataclasses import replace

import pytest
import torch

from fa3_course import rungs, simulated
from fa3_lib.config import HEAD_DIMS, REGISTER_FILE, WARPGROUP
from tests.tolerance import assert_close_to_truth, assert_repeats_are_bit_equal

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("CuTe DSL has Linux wheels only", allow_module_level=True)

FILES = {
    "6": "rung06_pingpong",
    "7": "rung07_overlap",
    "7b": "rung07b_overlap_no_warp_specialisation",
    "8": "rung08_persistent",
}
TILES = (
    (64, 128),
    (64, 192),
    (128, 128),
    (192, 128),
    (256, 128),
)  # head dim, rows: two consumers, three where they fit


def step(number):
    return rungs._module(f"chapters/03_pingpong/steps/{FILES[number]}.py")


# --- no GPU --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", FILES)
def test_the_simulated_rung_has_the_same_configuration(number):
    for d in (8, 64, 96, 128, 192, 256):
        for causal in (False, True):
            assert step(number).make_config(d, causal) == simulated.configuration(number, d, causal)


@pytest.mark.filterwarnings("ignore:This static loop has")
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("d, tile_m", TILES)
@pytest.mark.parametrize("number", FILES)
def test_machine_code(number, d, tile_m, causal):
    """No spills, no advisories, and exactly the Hopper instructions that the rung's source asks for."""
    from fa3_course import sass

    rung = step(number)
    config = replace(rung.make_config(d, causal), tile_m=tile_m)
    (report,) = sass.compile_report(lambda options: rung.compile_rung(config, torch.bfloat16, options))
    assert report.problems() == []
    # loop bodies: masked and unmasked blocks; with overlap, one block's QK and one block's PV stand outside as well
    bodies = 2 if number == "6" else 3
    assert report.count("HGMMA") == bodies * (d // 16 + config.tile_n // 16)
    # two rows of each thread: its scores and one factor per row
    assert report.count("MUFU.EX2") == bodies * (config.tile_n // 2 + 2)

    # a TMA box is 64 columns wide; one copy of Q per consumer, one of K and V each
    boxes, copies = d // 64, config.consumer_warpgroups + 2
    if number == "7b":  # Q; K and V into every stage; then K in all bodies, V in those that have a PV before them
        copies = 1 + 2 * config.stages + 3 + 2
    assert report.count("UTMALDG") == boxes * copies
    assert report.count("UTMASTG") == boxes

    # turns are passed at the start, in every body (rung 6: and after the last PV), and waited for in every body
    turns = {"6": (4, 3), "7": (3, 2), "7b": (0, 0), "8": (3, 2)}[number]
    assert report.count("BAR.ARV") == turns[0]
    assert report.count("BAR.SYNC") == turns[1] + 3  # the CTA's start, and around the output in shared memory

    threads = WARPGROUP * (config.consumer_warpgroups + (number != "7b"))
    assert report.count("USETMAXREG") == (0 if number == "7b" else 2)
    assert report.registers * threads <= REGISTER_FILE
    assert config.smem_bytes - 1024 < report.smem <= config.smem_bytes
    if number == "8" and not causal:  # places in the rings are in uniform registers, not moved there for every HGMMA
        assert report.count("R2UR") < report.count("HGMMA")


@pytest.mark.parametrize("number", FILES)
def test_a_configuration_that_does_not_fit_is_refused_with_the_sum(number):
    rung = step(number)
    with pytest.raises(ValueError, match=r"shared memory exceeded.*stages"):
        rung.compile_rung(replace(rung.make_config(128, False), stages=4), torch.bfloat16)
    with pytest.raises(ValueError, match=r"accumulators leave fewer than 24 registers"):
        rung.compile_rung(replace(rung.make_config(128, False), tile_m=192, stages=1), torch.bfloat16)


@pytest.mark.parametrize("number", FILES)
def test_errors_name_the_argument(number):
    q, k, v = (torch.randn(1, 10, h, 16, dtype=torch.bfloat16) for h in (4, 2, 2))
    attention = step(number).attention
    for inputs, message in (
        ((q[:, :, :3], k, v), "not a multiple of the 2 KV heads"),
        ((q[..., :12], k[..., :12], v), "q: head_dim must be a multiple of 8"),
        ((q, k.float(), v), "k must be float16 or bfloat16"),
        ((q, k, v), "q must be on a Hopper GPU"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            attention(*inputs)


# --- numbers, on the card --------------------------------------------------------------------------------------------------

SHAPES = ((1, 1), (64, 128), (128, 192), (239, 1), (113, 203), (640, 128), (512, 256), (1023, 1024), (2048, 2048))


def draw(b, sq, sk, h, hk, d, dv=None, dtype=torch.bfloat16):
    shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, d if dv is None else dv))
    return [torch.randn(s, dtype=dtype, device="cuda") for s in shapes]


def attend(number, q, k, v, scale=None, causal=False, config=None, kernel=None):
    """The rung on an allocator whose free blocks hold NaN: an element that is not written shows."""
    from fa3_course import rung_host

    poison = [torch.full((n,), torch.nan, device="cuda") for n in (q.numel(), q.numel(), q[..., 0].numel())]
    del poison
    rung = step(number)
    return rung_host.run(kernel or rung.Attention, config or rung.make_config, q, k, v, scale, causal)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("number", FILES)
def test_grid(number, d, causal):
    """All shapes in one test, since they share one compilation."""
    for shape, hk in itertools.product(SHAPES, (6, 2, 1)):
        print(f"{shape}, {hk} KV heads")
        q, k, v = draw(3, *shape, 6, hk, d)
        assert_close_to_truth(*attend(number, q, k, v, None, causal), q, k, v, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("number", FILES)
def test_float16(number, d):
    for shape in ((113, 203), (1023, 1024)):
        q, k, v = draw(3, *shape, 6, 2, d, dtype=torch.float16)
        assert_close_to_truth(*attend(number, q, k, v, None, True), q, k, v, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("number", FILES)
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
@pytest.mark.parametrize("number", FILES)
def test_empty_tensors(number):
    for b, sq, sk in ((2, 5, 0), (2, 0, 5), (0, 5, 5)):
        q, k, v = draw(b, sq, sk, 4, 2, 64)
        assert_close_to_truth(*attend(number, q, k, v), q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("tile_n, stages", ((48, 1), (64, 4), (128, 2)))
@pytest.mark.parametrize("tile_m", (64, 128, 192))
@pytest.mark.parametrize("number", FILES)
def test_consumers_stages_and_tiles_do_not_change_the_answer(number, tile_m, tile_n, stages):
    config = replace(step(number).make_config(64, True), tile_m=tile_m, tile_n=tile_n, stages=stages)
    for sq, sk in ((777, 800), (800, 300)):  # the second has tiles whose rows see no key
        q, k, v = draw(2, sq, sk, 4, 2, 64)
        assert_close_to_truth(*attend(number, q, k, v, None, True, config), q, k, v, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("sms", (1, 5))
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_a_persistent_cta_with_many_tiles(d, sms):
    """Rings, Q and turns go on over many tiles: even and odd numbers of them, with and without keys."""

    class FewSms(step("8").Attention):
        def __init__(self, config, dtype):
            super().__init__(config, dtype)
            self.sms = sms

    for sq, sk in ((777, 800), (1100, 130), (128, 900)):
        for causal in (False, True):
            for own_output in {False, step("8").make_config(d, causal).own_output}:
                config = replace(step("8").make_config(d, causal), own_output=own_output)
                q, k, v = draw(3, sq, sk, 4, 2, d)
                assert_close_to_truth(*attend("8", q, k, v, None, causal, config, FewSms), q, k, v, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("number", FILES)
def test_repeats_are_bit_equal(number):
    """A race shows as bits that change from run to run."""
    for d in (64, 128, 256):
        q, k, v = draw(4, 777, 777, 6, 2, d)
        attention = step(number).attention
        call = functools.partial(attention, q, k, v, causal=True)
        assert_repeats_are_bit_equal(lambda run, call=call: call(), 200)
