"""FP8 attention without a GPU: roundings on a CPU, refusals, layouts, and what ptxas made of every configuration."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from fa3_lib import flash_attn_func, fp8, reference
from fa3_lib.fp8_config import HEAD_DIMS, fp8_config
from fa3_lib.quantize import FP8, GRANULARITIES, quantize_qkv, rotation_signs, transpose_v
from tests.fa3_lib.fp8_truth import E4M3, assert_right, draw
from tests.fa3_lib.masked_truth import random_mask

needs_dsl = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="CuTe DSL has wheels for Linux only")


# --- on a CPU --------------------------------------------------------------------------------------------------------


def attend(q, k, v, softmax_scale=None, window_size=(-1, -1), **arguments):
    left, right = window_size
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return fp8.forward(q, k, v, scale, left=left, right=right, **arguments)


@pytest.mark.parametrize("trial", range(20))
def test_cpu_against_the_truth(trial):
    sq, sk, group = (int(x) for x in torch.randint(1, 300, (3,)))
    heads = 2 * (group % 5 + 1)
    mask = random_mask(sq, sk, heads)
    print(f"sq {sq} sk {sk} heads {heads} {mask}")
    tensors, descales = draw(2, sq, sk, heads, 2, 48, 80)
    assert_right(attend(*tensors, **mask, **descales), *tensors, **mask, **descales)


@pytest.mark.parametrize("trial", range(6))
def test_cpu_formats_and_descales_of_blocks(trial):
    sq, sk, heads = (int(x) for x in torch.randint(1, 400, (3,)))
    heads, dtypes = 2 * (heads % 3 + 1), tuple(FP8[i] for i in torch.randint(2, (3,)))
    tensors, descales = draw(2, sq, sk, heads, 2, 32, dtypes=dtypes, by_block=True)
    out_dtype = (torch.float16, torch.bfloat16)[trial % 2]
    mask = {"causal": bool(trial % 3)}
    result = attend(*tensors, out_dtype=out_dtype, **mask, **descales)
    assert_right(result, *tensors, out_dtype=out_dtype, **mask, **descales)


def test_quantised_blocks_are_what_the_call_takes():
    """`quantize_qkv` with a factor for each 128 rows and a rotation, end to end: large rows spoil the factor of their block alone."""
    q, k, v = (torch.randn(1, 300, 2, 64) for _ in range(3))
    v[:, :128] *= 1e5
    mask = {"window_size": (20, 0)}  # queries from 160 on see none of those
    truth, _ = reference.attention(q, k, v, **mask)
    signs = rotation_signs(64, 0)
    errors = {}
    for granularity in GRANULARITIES:
        packed = quantize_qkv(q, k, v, granularity=granularity, signs=signs)
        assert packed.k_descale.dim() == (3 if granularity == "block" else 2)
        out = flash_attn_func(**packed._asdict(), **mask)
        errors[granularity] = float((out.double() - truth)[:, 160:].square().mean().sqrt())
    assert errors["block"] < 0.05 < 2 * errors["tensor"], errors


def test_cpu_takes_what_transpose_v_makes():
    for sk in (1, 32, 100):
        (q, k, v), descales = draw(2, 50, sk, 4, 2, 64, 32)
        out, lse = attend(q, k, v, **descales)
        again = attend(q, k, transpose_v(v), transposed=True, **descales)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def test_empty_tensors():
    for b, sq, sk in ((2, 5, 0), (2, 0, 5), (0, 5, 5)):
        tensors, descales = draw(b, sq, sk, 4, 2, 64)
        assert_right(attend(*tensors, **descales), *tensors, **descales)


def test_refusals_name_the_argument():
    (q, k, v), _ = draw(1, 10, 10, 4, 2, 32)
    vt = transpose_v(v)
    for tensors, arguments, error, message in (
        ((q[:, :, :3], k, v), {}, ValueError, "a multiple of the KV heads"),
        ((q[..., :24], k[..., :24], v), {}, ValueError, "head_dim of q and k is 24.*multiple of 16"),
        ((q, k, v[..., :24]), {}, ValueError, "head_dim of v is 24"),
        ((q, k.to(torch.bfloat16), v), {}, TypeError, "torch.float8_e4m3fn or torch.float8_e5m2 is accepted"),
        ((q, k, v), {"out_dtype": torch.float32}, TypeError, "out_dtype is torch.float32.*bfloat16"),
        ((q, k[:, :9], v), {}, ValueError, "do not fit together"),
        ((q, k, v), {"transposed": True}, ValueError, r"do not fit together.*whole groups of 32"),
        (
            (q, k, vt.transpose(2, 3).contiguous().transpose(2, 3)),
            {"transposed": True},
            ValueError,
            "must be contiguous",
        ),
        ((q, k, v), {"sinks": torch.zeros(3)}, ValueError, r"sinks has shape \(3,\)"),
        ((q.transpose(1, 3).contiguous().transpose(1, 3), k, v), {}, ValueError, "q has strides"),
    ):
        with pytest.raises(error, match=message):
            attend(*tensors, **arguments)


def test_flash_attn_func_takes_float8():
    (q, k, v), descales = draw(2, 60, 90, 4, 2, 64)
    sinks = torch.randn(4)
    mask = {"window_size": (40, 5), "softcap": 3.0, "sinks": sinks}
    result = flash_attn_func(q, k, v, return_attn_probs=True, **mask, **descales)
    assert_right(result, q, k, v, **mask, **descales)
    one_level = flash_attn_func(q, k, v, two_level=False, return_attn_probs=True, **mask, **descales)
    assert_right(one_level, q, k, v, **mask, **descales)

    def halved(q, k, v, **descales):
        return flash_attn_func(q, k, v, **mask, **descales) / 2

    compiled = torch.compile(halved, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v, **descales), result[0] / 2)
    arguments = (q, k, v, 0.1, True, -1, -1, 0.0, sinks, None, 0, *descales.values(), True, torch.float16)
    for with_lse in (True, False):  # its other checks compare float8 tensors, for which torch has no arithmetic
        operator = torch.ops.fa3_lib.flash_attn_fp8_fwd
        torch.library.opcheck(operator, (*arguments, with_lse), test_utils="test_faketensor")

    blocks, by_block = draw(1, 130, 130, 4, 2, 32, by_block=True)
    for change, message in (
        ({"two_level": False}, "two_level=False is given with descales of blocks"),
        ({"pack_gqa": True}, "pack_gqa=True is given with descales of blocks"),
        ({"v_descale": None}, "v_descale is None beside descales of blocks"),
        (
            {"k_descale": by_block["q_descale"]},
            r"k_descale has shape \(1, 4, 2\); .*blocks of 128 rows.* = \(1, 2, 2\)",
        ),
        ({"k_descale": torch.ones(1, 2)}, r"k_descale has shape \(1, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attn_func(*blocks, **by_block | change)
    with pytest.raises(TypeError, match=r"out_dtype is torch.float16 and q is torch.bfloat16"):
        flash_attn_func(q.bfloat16(), k.bfloat16(), v.bfloat16(), out_dtype=torch.float16)
    with pytest.raises(ValueError, match="two_level=False is given"):
        flash_attn_func(q.half(), k.half(), v.half(), two_level=False)


def test_configurations_without_room_are_refused():
    config = fp8_config(128, 128, False)
    for change, message in (
        ({"stages": 8}, "shared memory exceeded.*stages"),
        ({"tile_n": 256}, "accumulators leave fewer than 24.*S, P, T and O"),
        ({"block_scales": True, "tile_n": 96}, "block_scales need two_level"),
        ({"k_format": "e3m4"}, "must be one of e4m3, e5m2"),
        ({"tile_n": 48}, "tile_n must be a multiple of 32"),
        ({"own_output": False}, "own_output must be True"),
        ({"pv_columns": 48}, "pv_columns must be a multiple of 8 that divides head_dim_v"),
        ({"two_level": False}, "software_exp2 must be 0 or, with two_level"),
        ({"software_exp2": -1}, "software_exp2 must be 0 or"),
        ({"two_level": False, "software_exp2": 0}, "pv_columns must be head_dim_v"),
        ({"element_bytes": 2}, "element_bytes must be 1"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(config, **change).validate()


# --- machine code ----------------------------------------------------------------------------------------------------


EVERYTHING = {"window": True, "softcap": True, "sinks": True}


def configurations():
    """Every head dim at both levels, and beside them what has the fewest registers left."""
    for i, d in enumerate(HEAD_DIMS):
        for two_level in (True, False):
            yield fp8_config(d, d, two_level == bool(i % 2), two_level=two_level)
        yield fp8_config(d, d, False, **EVERYTHING)
        yield fp8_config(d, d, bool(i % 2), block_scales=True, softcap=d == 128)
    for d in (128, 256):
        yield fp8_config(d, d, False, two_level=False, **EVERYTHING)
    for d in (64, 192):  # the other mask than above
        yield fp8_config(d, d, True)
    yield fp8_config(128, 128, False)
    yield fp8_config(64, 64, True, 64, pack_gqa=8)
    yield fp8_config(128, 128, True, 64, pack_gqa=8, two_level=False)
    yield fp8_config(64, 256, False, formats=("e5m2", "e4m3", "e5m2"))
    yield fp8_config(192, 128, True)
    yield fp8_config(256, 192, False)


def name(c):
    features = ("causal", "window", "softcap", "sinks", "two_level", "block_scales", "ping_pong")
    return f"d{c.head_dim}-dv{c.head_dim_v}-m{c.tile_m}-pack{c.pack_gqa}-{c.q_format}-" + "-".join(
        f for f in features if getattr(c, f)
    )


@needs_dsl
@pytest.mark.filterwarnings("ignore:This static loop has")
@pytest.mark.parametrize("config", list(configurations()), ids=name)
def test_machine_code(config):
    """No spill, no advisory, and exactly the Hopper instructions that the source asks for."""
    from fa3_course import sass
    from fa3_lib.forward_fp8_sm90 import compile_forward

    # every second one with an LSE, which needs the sums of unrounded weights
    with_lse = bool(list(configurations()).index(config) % 2)
    (report,) = sass.compile_report(lambda options: compile_forward(config, options=options, with_lse=with_lse))
    assert report.problems() == []
    assert report.count("USETMAXREG") == 2 and report.registers == config.launch_registers
    assert config.smem_bytes - 1024 < report.smem <= config.smem_bytes

    # the code of a key block: masked at the right, unmasked, masked at the left; with one level S of the first and P V of the
    # last stand alone. With two levels unmasked blocks have no maximum, but a rare second S
    two = config.two_level
    bodies = 2 + config.window + (not two)
    weights, maxima = (bodies + 1, bodies) if two else (bodies, bodies)
    half, columns = config.tile_n // 2, config.head_dim_v // 2  # numbers of S and of O that a thread has
    qk, pv = config.head_dim // 32, config.parts * config.tile_n // 32
    assert report.count("QGMMA") == bodies * (qk + pv) + (qk if two else 0) + (
        pv if config.votes_under_pv and two else 0
    )
    assert report.count("HGMMA") == 0
    widths = {f"64x{config.part_columns(part)}x32" for part in range(config.parts)} | {f"64x{config.tile_n}x32"}
    assert {
        next(x for x in opcode.split(".") if x[:2] == "64") for opcode in report.opcodes if "QGMMA" in opcode
    } == widths
    assert ("E5M2" in str(report.opcodes)) == ("e5m2" in (config.q_format, config.k_format, config.v_format))
    # of a thread's two rows; in a block without a mask, and where it is mended
    software = 0 if with_lse or not config.software_exp2 else 2 * (half // 2 // config.software_exp2)
    assert report.count("MUFU.EX2") == weights * half - 2 * software + 2 * maxima + (4 if config.sinks else 0)
    assert report.count("MUFU.TANH") == (weights * half if config.softcap else 0)
    # P is rounded two values at a time and never leaves its thread: shuffles are those of 2 rows' maxima, votes and sums
    assert report.count("F2FP.SATFINITE.E4M3") == weights * half // 2
    assert report.count("SHFL") == 4 * maxima + (4 if two else 0) + (4 if with_lse or not two else 0)
    assert report.count("PRMT") == 0
    # turns pass before a block's softmax, with one level but for the first block's, and once to begin; an output waits twice
    turns = bodies - (not two) if config.ping_pong else 0
    assert report.count("BAR.ARV") == (turns + 1 if config.ping_pong else 0)
    assert report.count("BAR.SYNC") == turns + 3
    assert report.count("BAR.RED") == (1 if two else 0)

    def boxes(size):  # a TMA box is one row of the swizzle wide: 128, 64 or 32 bytes
        return size // next(width for width in (128, 64, 32) if size % width == 0)

    assert report.count("UTMALDG") == boxes(config.head_dim) * (config.consumer_warpgroups + 1) + boxes(config.tile_n)
    assert report.count("UTMASTG") == config.head_dim_v // 64

    # no instruction adds weights unless their exact sum is asked for. With two levels T is added to O: FADD where nothing
    # shrinks, FFMA where it does or where V has a scale for each block
    sums = weights * half if with_lse or not two else 0
    unshrunk = 1 if two and not config.block_scales else 0
    fadd = sums + unshrunk * columns
    # one more for an exponential without the MUFU, and where it is mended another one, whose NaN counts
    ffma = weights * half + 3 * software + (bodies - unshrunk) * columns * two
    if config.block_scales:  # T is multiplied first where O shrinks
        assert report.count("FMUL") >= (bodies - 1) * columns
    for opcode, expected in (("FADD", fadd), ("FFMA", ffma)):
        # beside these: what is per row or per tile
        assert 0 <= report.count(opcode) - expected <= 48, (opcode, expected, report.count(opcode))


@needs_dsl
@pytest.mark.filterwarnings("ignore:This static loop has")
@pytest.mark.parametrize("trial", range(8))
def test_nothing_that_a_call_can_choose_spills(trial):
    """A few of all combinations in each run."""
    from fa3_course import sass
    from fa3_lib.forward_fp8_sm90 import compile_forward

    def one_of(*choices):
        return choices[int(torch.randint(len(choices), ()))]

    d, two_level, with_lse = HEAD_DIMS[trial % 4], one_of(True, True, False), one_of(False, True)
    causal, window = one_of((False, False), (True, False), (True, False), (False, True))
    block_scales = two_level and one_of(False, False, True)
    features = {
        "window": window, "softcap": one_of(False, True), "sinks": one_of(False, True), "block_scales": block_scales,
        "pack_gqa": 1 if block_scales else one_of(1, 1, 2, 8), "two_level": two_level, "transposes_v": one_of(False, True),
    }  # fmt: skip
    config = fp8_config(d, one_of(d, d, 64), causal, one_of(64, 512, 1024, 4096), **features)
    print(config, "with_lse", with_lse)
    (report,) = sass.compile_report(lambda options: compile_forward(config, options=options, with_lse=with_lse))
    assert report.problems() == []


@needs_dsl
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_packed_registers_times_transposed_v_are_p_times_v(d):
    """Each thread packs its own registers of P, the tensor core reads them as A, V comes from transpose_v: exactly P V."""
    import cutlass
    import cutlass.cute as cute

    from fa3_lib.consumer import make_mma_pv, make_mma_qk
    from fa3_lib.forward_fp8_sm90 import accumulator_index

    config, found = fp8_config(d, d, False), {}
    n = config.tile_n

    @cute.jit
    def look():
        qk = make_mma_qk(config, (cutlass.Float8E4M3FN,) * 2, True)
        pv = make_mma_pv((cutlass.Float8E4M3FN,) * 2, config.pv_columns)
        acc = cute.make_rmem_tensor(qk.get_slice(0).partition_shape_C((64, n)), cutlass.Float32)
        operand = cute.make_rmem_tensor(pv.get_slice(0).partition_shape_A((64, n)), cutlass.Float8E4M3FN)
        # tiles are column-major in a tile of 64 rows: row = index % 64
        for name, layout, fragment, values in (
            ("S", qk.tv_layout_C_tiled, acc, n // 2),
            ("P", pv.tv_layout_A_tiled, operand, 16),
        ):
            threads = [cute.crd2idx((t, 0), layout) for t in range(128)]
            registers = {cute.crd2idx((v, 0, 0), fragment.layout): cute.crd2idx((0, v), layout) for v in range(values)}
            found[name] = torch.tensor([[t + registers[r] for r in range(values)] for t in threads])
        assert [cute.crd2idx((0, 0, k), operand.layout) for k in range(n // 32)] == [16 * k for k in range(n // 32)]

    cute.compile(look, options="--gpu-arch sm_90a")
    P = torch.randint(100, (64, n)).double()
    V = torch.randint(100, (1, n, 1, d)).to(torch.uint8)
    S = P[found["S"] % 64, found["S"] // 64]  # (thread, register)
    packed = torch.stack([S[:, accumulator_index(i)] for i in range(n // 2)], dim=1)
    A = torch.full_like(P, torch.nan)
    for k in range(n // 32):
        A[found["P"] % 64, found["P"] // 64 + 32 * k] = packed[:, 16 * k : 16 * (k + 1)]
    Vt = transpose_v(V.view(E4M3))[0, 0].view(torch.uint8).double()  # (dv, position)
    assert torch.equal(A @ Vt.T, P @ V[0, :, 0].double())
