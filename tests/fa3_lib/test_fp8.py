"""FP8 attention without a GPU: roundings on a CPU, refusals, layouts, and what ptxas made of every configuration."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from fa3_lib import flash_attn_func, fp8
from fa3_lib.config import REGISTER_FILE
from fa3_lib.fp8_config import HEAD_DIMS, fp8_config
from fa3_lib.quantize import transpose_v
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
        ((q, k.to(torch.bfloat16), v), {}, TypeError, "all torch.float8_e4m3fn is accepted"),
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
    assert torch.equal(flash_attn_func(q, k, v, two_level=False, **mask, **descales), result[0])  # a CPU adds in fp32

    def halved(q, k, v, **descales):
        return flash_attn_func(q, k, v, **mask, **descales) / 2

    compiled = torch.compile(halved, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v, **descales), result[0] / 2)
    arguments = (q, k, v, 0.1, True, -1, -1, 0.0, sinks, None, 0, *descales.values(), True)
    # its other checks compare float8 tensors, for which torch has no arithmetic
    torch.library.opcheck(torch.ops.fa3_lib.flash_attn_fp8_fwd, arguments, test_utils="test_faketensor")

    with pytest.raises(ValueError, match="two_level=False is given"):
        flash_attn_func(q.half(), k.half(), v.half(), two_level=False)


def test_configurations_without_room_are_refused():
    config = fp8_config(128, 128, False)
    for change, message in (
        ({"stages": 8}, "shared memory exceeded.*stages"),
        ({"tile_n": 256}, "accumulators leave fewer than 24.*S, P, T and O"),
        ({"tile_n": 48}, "tile_n must be a multiple of 32"),
        ({"own_output": False}, "own_output must be True"),
        ({"pv_columns": 48}, "pv_columns must be a multiple of 8 that divides head_dim_v"),
        ({"two_level": False}, "pv_columns must be head_dim_v"),
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
    for d in (128, 256):
        yield fp8_config(d, d, False, two_level=False, **EVERYTHING)
    yield fp8_config(64, 64, True, 64, pack_gqa=8)
    yield fp8_config(128, 128, True, 64, pack_gqa=8, two_level=False)
    yield fp8_config(64, 256, False)
    yield fp8_config(192, 128, True)


def name(c):
    features = ("causal", "window", "softcap", "sinks", "two_level", "overlap", "ping_pong")
    return f"d{c.head_dim}-dv{c.head_dim_v}-m{c.tile_m}-pack{c.pack_gqa}-" + "-".join(
        f for f in features if getattr(c, f)
    )


@needs_dsl
@pytest.mark.filterwarnings("ignore:This static loop has")
@pytest.mark.parametrize("config", list(configurations()), ids=name)
def test_machine_code(config):
    """No spill, no advisory, and exactly the Hopper instructions that the source asks for."""
    from fa3_course import sass
    from fa3_lib.forward_fp8_sm90 import compile_forward

    (report,) = sass.compile_report(lambda options: compile_forward(config, options=options))
    assert report.problems() == []
    assert report.count("USETMAXREG") == 2 and report.registers * config.threads <= REGISTER_FILE
    assert config.smem_bytes - 1024 < report.smem <= config.smem_bytes

    # the code of a key block: masked at the right, unmasked, masked at the left; with overlap S of the first and P V of the
    # last stand alone
    bodies = 2 + config.window + config.overlap
    half, columns = config.tile_n // 2, config.head_dim_v // 2  # numbers of S and of O that a thread has
    assert report.count("QGMMA") == bodies * (config.head_dim // 32 + config.parts * config.tile_n // 32)
    assert report.count("HGMMA") == 0
    assert report.count("MUFU.EX2") == bodies * (half + 2) + (4 if config.sinks else 0)
    assert report.count("MUFU.TANH") == (bodies * half if config.softcap else 0)
    # P is rounded two values at a time and never leaves its thread: shuffles are those of 2 rows' maxima and sums
    assert report.count("F2FP.SATFINITE.E4M3") == bodies * half // 2
    assert report.count("SHFL") == 4 * bodies + 4 and report.count("PRMT") == 0
    # turns pass before a block's softmax, with overlap but for the first block's, and once to begin; an output waits twice
    turns = bodies - config.overlap if config.ping_pong else 0
    assert report.count("BAR.ARV") == (turns + 1 if config.ping_pong else 0)
    assert report.count("BAR.SYNC") == turns + 3

    def boxes(size):  # a TMA box is one row of the swizzle wide: 128, 64 or 32 bytes
        return size // next(width for width in (128, 64, 32) if size % width == 0)

    assert report.count("UTMALDG") == boxes(config.head_dim) * (config.consumer_warpgroups + 1) + boxes(config.tile_n)
    assert report.count("UTMASTG") == config.head_dim_v // 64

    # O * shrink + T in one instruction; with one level O is multiplied instead, and in both once more at the end
    ffma = bodies * (half + (columns if config.two_level else 0))
    fmul = columns + (0 if config.two_level else (bodies - config.overlap) * columns)
    fmul += bodies * half if config.softcap else 0
    for opcode, expected in (("FFMA", ffma), ("FMUL", fmul)):
        # beside these: what is per row or per tile
        assert 0 <= report.count(opcode) - expected <= 32, (opcode, expected)


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
        qk = make_mma_qk(config, cutlass.Float8E4M3FN, True)
        pv = make_mma_pv(cutlass.Float8E4M3FN, config.pv_columns)
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
