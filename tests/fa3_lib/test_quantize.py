"""FP8 operands: numbers against chapter 4's emulation, rotation, edge cases, V's order; Triton against PyTorch."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from fa3_course import paths, rungs
from fa3_lib import quantize as lib
from fa3_lib import reference
from fa3_lib.quantize import dequantize, hadamard, quantize, quantize_qkv, rotation_signs, transpose_v

numerics = rungs._module("chapters/04_fp8/steps/fp8_numerics.py")
HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="Triton has Linux wheels only")
E4M3, E5M2 = lib.FP8
EMULATED = {E4M3: numerics.E4M3, E5M2: numerics.E5M2}
FP8 = pytest.mark.parametrize("fp8", lib.FP8, ids=["e4m3", "e5m2"])
FLOATS = pytest.mark.parametrize("dtype", lib.DTYPES, ids=["fp16", "bf16", "fp32"])
GROUPS = {"tensor": {"kv_heads": 2}, "head": {"kv_heads": 2}, "block": {"block": 48}}
GRANULARITIES = pytest.mark.parametrize("granularity", GROUPS)
POWER_OF_TWO = pytest.mark.parametrize("power_of_two", (False, True), ids=("any-factor", "power-of-two"))


def heavy(shape, dtype=torch.float32, device="cpu"):
    """Heavy tails; a batch entry has a head that begins with 60 zero rows."""
    x = torch.randn(shape, device=device) * torch.exp(2 * torch.randn(shape, device=device))
    x[-1, :60, 0] = 0
    return x.to(dtype)


def with_nonfinite(x):
    x[0, 3, 0, 5], x[0, 5, 1, 2], x[-1, 7, -1, 0] = torch.nan, -torch.inf, torch.inf
    return x


def same(a, b) -> bool:
    """The same numbers, zeros with their signs, NaN in the same places."""
    a, b = a.float(), b.float()
    number = ~a.isnan()
    return torch.equal(number, ~b.isnan()) and torch.equal(a[number].view(torch.int32), b[number].view(torch.int32))


# --- numbers -----------------------------------------------------------------------------------------------------------------


@FP8
@GRANULARITIES
@POWER_OF_TWO
def test_numbers_are_those_of_the_emulation(fp8, granularity, power_of_two):
    x, groups = with_nonfinite(heavy((2, 100, 4, 40))), GROUPS[granularity]
    x8, descale = quantize(x, fp8, granularity, power_of_two=power_of_two, **groups)
    assert x8.shape == x.shape and x8.dtype == fp8
    assert descale.shape == ((2, 4, 3) if granularity == "block" else (2, 2))
    block = groups.get("block", 128)
    factor = numerics.descales(x.numpy(), EMULATED[fp8], granularity, block, groups.get("kv_heads"), power_of_two)
    one = torch.ones_like(x).to(fp8)
    assert torch.equal(dequantize(one, descale, groups.get("block")), torch.from_numpy(factor).expand(x.shape))

    want = torch.from_numpy(numerics.to_grid(x.numpy() / factor, EMULATED[fp8]))
    assert torch.equal(x8.float().isnan(), x.isnan())
    other = (x8.float() != want) & ~x.isnan()
    if power_of_two:
        assert not other.any()
    # where x times the reciprocal and the quotient round apart, they lie on both sides of a tie
    quotient = (x.double() / torch.from_numpy(factor).double())[other]
    tie = (x8.double() + want.double())[other] / 2
    assert torch.allclose(quotient, tie, rtol=2**-22, atol=0)


@FP8
@FLOATS
@GRANULARITIES
def test_error_is_half_a_step(fp8, dtype, granularity):
    x, groups = heavy((2, 100, 4, 40), dtype), GROUPS[granularity]
    x8, descale = quantize(x, fp8, granularity, **groups)
    block = groups.get("block")
    back, size = dequantize(x8, descale, block).double(), x.double().abs()
    step = torch.finfo(fp8).smallest_normal * torch.finfo(fp8).eps  # of the subnormal numbers, before scaling
    factor = dequantize(torch.ones_like(x).to(fp8), descale, block).double()
    allowed = torch.maximum(size * torch.finfo(fp8).eps / 2, factor * step / 2) * (1 + 1e-5)
    assert ((back - x.double()).abs() <= allowed).all()
    # each group's largest number is one of the format's largest
    assert x8.float().abs().max() == torch.finfo(fp8).max


@FP8
@GRANULARITIES
def test_zeros_and_the_ends_of_fp32(fp8, granularity):
    groups, huge = GROUPS[granularity], 2.0**127
    zero = torch.zeros(1, 50, 2, 16)
    for x, factor in (
        (zero, 1.0),
        (torch.full_like(zero, torch.nan), 1.0),
        (torch.full_like(zero, -torch.inf), 1.0),
        (torch.full_like(zero, 1e-44), torch.finfo(torch.float32).tiny),
        (torch.full_like(zero, huge), huge / torch.finfo(fp8).max),
    ):
        for power_of_two in (False, True):
            x8, descale = quantize(x, fp8, granularity, power_of_two=power_of_two, **groups)
            if power_of_two and factor > 1:
                assert (descale.log2() == descale.log2().round()).all() and (descale >= factor).all()
                assert torch.isfinite(dequantize(x8, descale, groups.get("block"))).all()
            else:
                assert (descale == factor).all()
            assert torch.equal(x8.float().isnan(), x.isnan())
    assert (quantize(zero, fp8, granularity, **groups)[0].float() == 0).all()
    x8, _ = quantize(torch.full_like(zero, -torch.inf), fp8, granularity, **groups)
    assert (x8.float() == -torch.finfo(fp8).max).all()


@FP8
def test_a_given_descale_is_used_and_saturates(fp8):
    x = heavy((2, 30, 4, 16))
    x8, own = quantize(x, fp8, kv_heads=2)
    again, given = quantize(x, fp8, kv_heads=2, descale=own)
    assert same(x8, again) and torch.equal(own, given)
    x8, given = quantize(x, fp8, descale=own[:, :1] / 8)  # one for all heads of a batch entry
    assert given.shape == (2, 4) and torch.equal(given, (own[:, :1] / 8).expand(2, 4))
    scaled = x.double() / given.double()[:, None, :, None]
    limit = torch.finfo(fp8).max
    beyond = scaled.abs() > limit * 1.1
    assert beyond.any() and torch.equal(x8.double()[beyond], limit * scaled[beyond].sign())
    blocks = torch.rand(2, 4, 3) + 0.5
    x8, _ = quantize(x, fp8, "block", block=12, descale=blocks)
    assert same(x8, quantize(x / lib.per_row(blocks, 30, 4, 12), fp8, descale=torch.ones(1, 1))[0])


def test_small_groups_follow_the_data():
    """A row of outliers spoils the tensor's scale, not that of the other blocks."""
    x = torch.randn(1, 512, 2, 64)
    x[0, 300] *= 1e6
    error = {}
    for granularity in GROUPS:
        back = dequantize(*quantize(x, granularity=granularity))
        error[granularity] = (back - x)[0, :256].norm() / x[0, :256].norm()
    assert error["block"] < 0.04 and error["head"] > 0.9 and error["tensor"] > 0.9


def test_empty_tensors():
    x8, descale = quantize(torch.empty(2, 0, 3, 16), granularity="block")
    assert x8.shape == (2, 0, 3, 16) and descale.shape == (2, 3, 0)
    x8, descale = quantize(torch.empty(2, 0, 3, 16), signs=rotation_signs(16, 0))
    assert torch.equal(descale, torch.ones(2, 3))


# --- rotation ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", (8, 40, 64, 96, 128, 192, 256))
def test_rotation_is_exactly_orthogonal(d):
    """Times its norm, the matrix is whole numbers whose rows are orthogonal: Q K^T is invariant in exact arithmetic."""
    signs = rotation_signs(d, seed=torch.randint(2**31, ()).item())
    size = d & -d
    scaled = hadamard(torch.eye(d)[None, :, None], signs)[0, :, 0].double() * size**0.5
    matrix = scaled.round()
    assert torch.allclose(matrix, scaled, rtol=0, atol=1e-5)
    assert torch.equal(matrix @ matrix.T, size * torch.eye(d, dtype=torch.float64))
    x = torch.randn(2, 9, 3, d)
    want = numerics.hadamard(x.double().numpy() * signs.numpy())
    assert torch.allclose(hadamard(x, signs).double(), torch.from_numpy(want), rtol=0, atol=1e-5)


@FLOATS
def test_products_of_rotated_rows(dtype):
    """Within twice the error of the same products, rounded as the rotated rows are."""
    q, k = (torch.randn(1, 200, 2, 128).to(dtype) for _ in range(2))
    signs = rotation_signs(128, 1)
    truth = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double())
    rotated = [hadamard(x, signs) for x in (q, k)]
    assert all(x.dtype == dtype for x in rotated)
    got = torch.einsum("bqhd,bkhd->bhqk", *(x.double() for x in rotated))
    # one rounding of numbers that are as large as those of q and k
    rounded = [(x.double() * (1 + torch.finfo(dtype).eps * (torch.rand(x.shape) - 0.5))) for x in (q, k)]
    same_precision = torch.einsum("bqhd,bkhd->bhqk", *rounded)
    assert (got - truth).norm() <= 2 * (same_precision - truth).norm() + 1e-6 * truth.norm()
    assert not torch.allclose(rotated[0], q, atol=0.1)


def test_signs_belong_to_the_seed():
    a = rotation_signs(256, 5)
    assert a.dtype == torch.float32 and torch.equal(a.abs(), torch.ones(256)) and 64 < (a > 0).sum() < 192
    assert torch.equal(a, rotation_signs(256, 5)) and not torch.equal(a, rotation_signs(256, 6))


def test_rotation_spreads_outliers():
    """The paper's distribution (Table 3), Q and K alone in 8 bits: rotation takes a quarter of the output's error, and more."""
    q, k, v = (
        torch.randn(1, 1024, 2, 128) + 10 * torch.randn(1, 1024, 2, 128) * (torch.rand(1, 1024, 2, 128) < 1e-3)
        for _ in "qkv"
    )
    truth, _ = reference.attention(q, k, v)
    error = {}
    for signs in (None, rotation_signs(128, 0)):
        x = quantize_qkv(q, k, v, signs=signs)
        out, _ = reference.attention(dequantize(x.q, x.q_descale), dequantize(x.k, x.k_descale), v)
        error[signs is None] = (out - truth).norm() / truth.norm()
        assert same(x.v, quantize(v)[0])  # V is not rotated
    assert error[False] < 0.75 * error[True]


def test_rotation_fused_with_rounding_equals_both_in_turn():
    x, signs = torch.randn(2, 70, 4, 96), rotation_signs(96, 2)
    fused, apart = quantize(x, signs=signs), quantize(hadamard(x, signs))
    assert same(fused[0], apart[0]) and torch.equal(fused[1], apart[1])


@pytest.mark.parametrize("granularity", GROUPS)
def test_operands_of_one_attention(granularity):
    q, k, v = torch.randn(2, 70, 6, 64), 3 * torch.randn(2, 90, 2, 64), 5 * torch.randn(2, 90, 2, 32)
    blocks = {"block_q": 64, "block_kv": 32} if granularity == "block" else {}
    signs = rotation_signs(64, 0)
    got = quantize_qkv(q, k, v, E5M2, granularity, signs=signs, power_of_two=True, **blocks)
    assert list(got._asdict()) == ["q", "k", "v", "q_descale", "k_descale", "v_descale"]
    for name, x in (("q", hadamard(q, signs)), ("k", hadamard(k, signs)), ("v", v)):
        x8, descale = getattr(got, name), getattr(got, f"{name}_descale")
        block = blocks.get("block_q" if name == "q" else "block_kv")
        assert descale.shape == ((2, x.shape[2], -(-x.shape[1] // block)) if block else (2, 2))
        assert (dequantize(x8, descale, block) - x).norm() < 0.1 * x.norm()
        assert (descale.log2() == descale.log2().round()).all()


# --- V -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlen", (0, 1, 31, 32, 100))
def test_v_is_transposed_with_keys_in_the_order_of_p(seqlen):
    v = torch.randint(0, 256, (2, seqlen, 3, 48), dtype=torch.uint8).view(E4M3)
    vt = transpose_v(v)
    padded = (seqlen + 31) // 32 * 32
    assert vt.shape == (2, 3, 48, padded) and vt.dtype == E4M3 and vt.is_contiguous()
    got = vt.view(torch.uint8).view(2, 3, 48, -1, 32)
    order = torch.from_numpy(numerics.key_order())
    keys = torch.zeros(2, padded, 3, 48, dtype=torch.uint8)
    keys[:, :seqlen] = v.view(torch.uint8)
    assert torch.equal(got, keys.view(2, -1, 32, 3, 48)[:, :, order].permute(0, 3, 4, 1, 2))
    strided = v.view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).view(E4M3)
    assert torch.equal(transpose_v(strided).view(torch.uint8), vt.view(torch.uint8))


# --- arguments ---------------------------------------------------------------------------------------------------------------

X = torch.ones(2, 8, 4, 16)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: quantize(X.double()), TypeError, "x must be a tensor of fp16"),
        (lambda: quantize(X.to(E4M3)), TypeError, "float8"),
        (lambda: quantize([1.0]), TypeError, "got list"),
        (lambda: quantize(X[0]), ValueError, "batch, seqlen, heads, head_dim"),
        (lambda: quantize(X, torch.float16), TypeError, "dtype must be one of"),
        (lambda: quantize(X, granularity="row"), ValueError, "granularity must be one of"),
        (lambda: quantize(X, kv_heads=3), ValueError, "kv_heads must divide the 4 heads"),
        (lambda: quantize(X, block=64), ValueError, "only granularity='block'"),
        (lambda: quantize(X, granularity="block", kv_heads=2), ValueError, "leave it out"),
        (lambda: quantize(X, granularity="block", block=0), ValueError, "at least 1 row"),
        (lambda: quantize(X, descale=torch.ones(2, 3)), ValueError, "does not expand"),
        (lambda: quantize(X, descale=torch.ones(2, 4).half()), TypeError, "descale must be"),
        (lambda: quantize(X, descale=torch.ones(2, 4), power_of_two=True), ValueError, "given descale"),
        (lambda: quantize(X, signs=torch.ones(8)), ValueError, "signs must be contiguous"),
        (lambda: hadamard(X, torch.ones(16).half()), TypeError, "rotation_signs makes them"),
        (lambda: quantize(X.clone().requires_grad_()), NotImplementedError, "no backward pass"),
        (lambda: quantize_qkv(X, X[:, :, :2], X), ValueError, "shapes do not fit"),
        (lambda: dequantize(X, torch.ones(2, 4)), TypeError, "in FP8"),
        (lambda: dequantize(X.to(E4M3), torch.ones(2, 3)), ValueError, "cannot share 3 factors"),
        (lambda: dequantize(X.to(E4M3), torch.ones(2, 4), block=8), ValueError, "has no blocks"),
        (lambda: transpose_v(X), TypeError, "one-byte elements"),
        (lambda: transpose_v(X.to(E4M3)[0]), ValueError, "kv_heads, head_dim_v"),
    ],
)
def test_what_is_wrong_is_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_neither_triton_nor_a_gpu_is_needed():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from fa3_lib import quantize as f\n"
        "x = torch.randn(1, 40, 2, 64)\n"
        "f.transpose_v(f.quantize_qkv(x, x, x, signs=f.rotation_signs(64, 0)).v)\n"
        "assert 'fa3_lib.quantize_triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=paths.checkout())


# --- Triton ------------------------------------------------------------------------------------------------------------------


def by_triton(x, fp8, granularity, **groups):
    """`quantize` by the kernels, in Triton's interpreter, into memory full of NaN. The interpreter rounds to FP8 wrongly (a carry out
    of the mantissa is lost), so the kernels give the scaled numbers in fp32 and PyTorch rounds them."""
    from fa3_lib import quantize_triton

    _, factors = quantize(x, fp8, granularity, **groups)
    given = "descale" in groups
    shape = factors.shape if granularity == "block" else (*factors.shape, 1)
    poison = torch.full((1, 1, 1) if granularity == "tensor" else shape, torch.nan).expand(shape)
    factors = factors.view(shape) if given else poison
    out, largest = torch.full(x.shape, torch.nan), torch.finfo(fp8).max
    signs, power_of_two = groups.get("signs"), groups.get("power_of_two", False)
    quantize_triton.quantize(x, out, factors, largest, groups.get("block"), power_of_two, signs, given)
    assert torch.equal(out.isnan(), (x if signs is None else hadamard(x, signs)).isnan())
    return out.to(fp8), factors if granularity == "block" else factors[..., 0]


@NEEDS_TRITON
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles where there is a GPU")
@pytest.mark.parametrize("rotate", (False, True), ids=("plain", "rotated"))
@pytest.mark.parametrize(
    "shape, granularity, groups",
    [
        ((2, 70, 4, 64), "tensor", {"kv_heads": 2}),
        ((2, 150, 4, 64), "head", {"kv_heads": 2, "power_of_two": True}),
        ((1, 70, 2, 96), "block", {"block": 48}),
        ((1, 700, 2, 40), "block", {"block": 600}),  # no program holds such a block: two passes
        ((2, 61, 2, 8), "head", {"descale": torch.tensor([[0.5, 2.0]])}),
    ],
    ids=lambda x: None if isinstance(x, dict) else str(x),
)
def test_kernels_in_the_interpreter(shape, granularity, groups, rotate):
    for fp8, dtype in ((E4M3, torch.float32), (E5M2, torch.float16)):
        x = heavy(shape).clamp(-6e4, 6e4).to(dtype)
        x = x if rotate else with_nonfinite(x)
        signs = rotation_signs(shape[3], 1) if rotate else None
        want, factors = quantize(x, fp8, granularity, **groups, signs=signs)
        got, got_factors = by_triton(x, fp8, granularity, **groups, signs=signs)
        if rotate and dtype == torch.float16:  # another order of additions
            assert torch.allclose(got_factors, factors, rtol=1e-5, atol=0)
            assert (got.float() != want.float()).float().mean() < 1e-2
            assert torch.allclose(got.float(), want.float(), rtol=0.3, atol=1e-3)
        else:
            assert same(got, want) and torch.equal(got_factors, factors)
    if rotate:
        from fa3_lib import quantize_triton

        out = torch.full(shape, torch.nan, dtype=dtype)
        quantize_triton.hadamard(x, signs, out)
        assert torch.allclose(out, hadamard(x, signs), rtol=2e-3, atol=1e-2)


@NEEDS_TRITON
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles where there is a GPU")
@pytest.mark.parametrize("seqlen, heads, d", [(1, 1, 16), (100, 3, 64), (260, 2, 80), (33, 1, 256)])
def test_v_in_the_interpreter(seqlen, heads, d):
    from fa3_lib import quantize_triton

    v = torch.randint(0, 256, (2, heads, seqlen, d), dtype=torch.uint8).transpose(1, 2)
    out = torch.full((2, heads, d, (seqlen + 31) // 32 * 32), 123, dtype=torch.uint8)
    quantize_triton.transpose_v(v, out)
    assert torch.equal(out, transpose_v(v))


# what the launcher sees for ordinary tensors: addresses and strides that 16 divides, the last stride 1
CROSS_COMPILE = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fa3_lib import quantize_triton as kernels
name, head_dim, dtype, scale = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
kernel = getattr(kernels, name)
types = {"X": dtype, "SIGNS": "*fp32", "AMAX": "*i32", "DESCALE": "*fp32", "V": "*u8", "OUT": dtype}
if name == "transpose_v_kernel":
    constants = {"v_column": 1, "GROUP": 32, "HEAD_DIM": head_dim, "KEYS": kernels.TRANSPOSE_KEYS}
    constants |= {"COLUMNS": kernels.TRANSPOSE_COLUMNS, "num_warps": 4}
    types["OUT"] = "*u8"
else:
    x = torch.empty(1, 4096, 16, head_dim, dtype={"*bf16": torch.bfloat16, "*fp32": torch.float32}[dtype], device="meta")
    _, _, constants = kernels.tiling(x, 128 if scale == "own" else None, 128 if scale == "own" else None)
    constants["x_column"] = 1
    if name == "quantize_kernel":
        types["OUT"] = "*fp8e4nv"
        constants |= {"SCALE": scale, "LARGEST": 448.0, "POWER_OF_TWO": False}
warps = constants.pop("num_warps")
names = kernel.arg_names
types = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
numbers = (*kernels.NUMBERS, "groups")
aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in numbers and types[n] != "constexpr"}
constants = {(names.index(n),): value for n, value in constants.items()}
source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
sys.stdout.buffer.write(compiled.asm["cubin"])
"""


@NEEDS_TRITON
@pytest.mark.parametrize(
    "kernel, d, dtype, scale, wanted",
    [
        ("transpose_v_kernel", 128, "", "", ("LDG.E.128", "STG.E.128")),
        ("amax_kernel", 128, "*bf16", "", ("LDG.E.128", "GMMA")),
        ("quantize_kernel", 256, "*bf16", "amax", ("LDG.E.128", "STG.E.128", "GMMA", "F2FP.SATFINITE.E4M3")),
        ("quantize_kernel", 128, "*bf16", "own", ("LDG.E.128", "STG.E.128", "GMMA", "F2FP.SATFINITE.E4M3")),
        ("quantize_kernel", 192, "*fp32", "amax", ("LDG.E.128", "STG.E", "FADD", "F2FP.SATFINITE.E4M3")),
        ("hadamard_kernel", 64, "*bf16", "", ("LDG.E.128", "STG.E.128", "GMMA")),
    ],
)
def test_machine_code(kernel, d, dtype, scale, wanted, tmp_path):
    """Compiled for sm_90 on any machine: 16 bytes a load and a store, rotation on the tensor cores, no local memory."""
    command = [sys.executable, "-c", CROSS_COMPILE, kernel, str(d), dtype, scale]
    env = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, env=env, timeout=300, cwd=paths.checkout())
    assert done.returncode == 0, done.stderr.decode()
    (tmp_path / "kernel.cubin").write_bytes(done.stdout)
    import triton

    disassembler = f"{os.path.dirname(triton.__file__)}/backends/nvidia/bin/nvdisasm"
    sass = subprocess.run([disassembler, "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True)
    assert [name for name in wanted if name not in sass.stdout] == []
    assert "STL" not in sass.stdout and "LDL" not in sass.stdout and "LDG.E.U" not in sass.stdout


# --- on a Hopper -------------------------------------------------------------------------------------------------------------


def poison(*shapes):
    """Fills the memory that the next allocations of these sizes will get with NaN, or with bytes that are no zeros."""
    held = [torch.full(shape, 0xFF, dtype=torch.uint8, device="cuda") for shape in shapes]
    del held


def on_card(x, fp8, granularity, **groups):
    quantize(x, fp8, granularity, **groups)  # compiles
    poison(x.shape, (4096,), (512,))
    return quantize(x, fp8, granularity, **groups)


def views(x):
    """x as users hold it: contiguous, (batch, heads, seqlen, d), a third of a packed tensor, every second column."""
    b, s, h, d = x.shape
    packed = torch.randn(b, s, 3, h, d, device=x.device).to(x.dtype)
    packed[:, :, 1] = x
    wide = torch.randn(b, s, h, d, 2, device=x.device).to(x.dtype)
    wide[..., 0] = x
    return {
        "contiguous": x,
        "bhsd": x.transpose(1, 2).contiguous().transpose(1, 2),
        "packed": packed[:, :, 1],
        "columns": wide[..., 0],
    }


@pytest.mark.gpu
@GRANULARITIES
@pytest.mark.parametrize(
    "shape", [(2, 1, 4, 128), (2, 333, 4, 64), (1, 1000, 2, 96), (2, 257, 4, 256), (1, 65, 2, 40)], ids=str
)
def test_triton_is_pytorch_bit_by_bit(granularity, shape):
    dtype = lib.DTYPES[int(torch.randint(len(lib.DTYPES), ()))]  # one of them in each run: every one is compiled anew
    x = heavy(shape, device="cuda").clamp(-6e4, 6e4)
    x = (with_nonfinite(x) if shape[1] > 8 else x).to(dtype)
    for fp8, power_of_two, block in ((E4M3, False, 48), (E5M2, True, 600)):
        groups = {"block": block} if granularity == "block" else GROUPS[granularity]
        want, factors = quantize(x.cpu(), fp8, granularity, power_of_two=power_of_two, **groups)
        for name, view in views(x).items():
            got, got_factors = on_card(view, fp8, granularity, power_of_two=power_of_two, **groups)
            assert got.is_contiguous() and same(got.cpu(), want), name
            assert torch.equal(got_factors.cpu(), factors), name


@pytest.mark.gpu
@pytest.mark.parametrize(
    "d, dtype",
    [*((d, torch.bfloat16) for d in (8, 40, 64, 80, 96, 128, 192, 256)), (128, torch.float16)]
    + [(d, torch.float32) for d in (64, 192, 256)],
    ids=str,
)
def test_rotation_on_the_card(d, dtype):
    x = torch.randn(2, 300, 4, d, device="cuda") * torch.exp(torch.randn(2, 300, 4, 1, device="cuda"))
    x, signs = x.to(dtype), rotation_signs(d, 3, "cuda")
    x = views(x)["packed"]
    hadamard(x, signs)
    poison((x.numel() * x.itemsize,))
    y = hadamard(x, signs)
    truth = hadamard(x.cpu().float(), signs.cpu()).double()
    row = truth.norm(dim=-1, keepdim=True)
    assert y.dtype == dtype and y.is_contiguous()
    # half a step of the output, and the error of fp32 sums of numbers as large as the row
    assert ((y.cpu().double() - truth).abs() <= 0.51 * torch.finfo(dtype).eps * truth.abs() + 1e-6 * row).all()

    for fp8, granularity in ((E4M3, "head"), (E4M3, "block"), (E5M2, "tensor")):
        got, factors = on_card(x, fp8, granularity, signs=signs, **GROUPS[granularity])
        want, cpu_factors = quantize(x.cpu(), fp8, granularity, signs=signs.cpu(), **GROUPS[granularity])
        assert torch.allclose(factors.cpu(), cpu_factors, rtol=1e-5, atol=0)
        got, want = got.cpu().float(), want.float()
        # another order of additions lands on the other side of a tie, rarely, and by one step
        assert (got != want).double().mean() < 1e-3
        assert torch.allclose(got, want, rtol=torch.finfo(fp8).eps * 1.01, atol=torch.finfo(fp8).smallest_normal / 4)


@pytest.mark.gpu
def test_a_given_descale_on_the_card():
    x = heavy((2, 100, 4, 64), torch.bfloat16, "cuda")
    for descale in (torch.rand(2, 4, device="cuda") + 0.1, torch.tensor(0.25, device="cuda")):
        got, factors = on_card(x, E4M3, "head", descale=descale)
        assert same(got.cpu(), quantize(x.cpu(), descale=descale.cpu())[0])
        assert torch.equal(factors, descale.expand(2, 4))
    blocks = torch.rand(4, 2, 3, device="cuda").transpose(0, 1) + 0.1
    got, _ = on_card(x, E4M3, "block", block=48, descale=blocks)
    assert same(got.cpu(), quantize(x.cpu(), granularity="block", block=48, descale=blocks.cpu())[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(2, 1, 4, 128), (3, 333, 5, 64), (1, 128, 2, 80), (2, 1000, 1, 256), (1, 31, 2, 17)], ids=str
)
def test_v_on_the_card(shape):
    v = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    want = transpose_v(v.cpu().view(E4M3)).view(torch.uint8)
    for name, view in views(v).items():
        transpose_v(view.view(E4M3))
        poison(want.shape)
        got = transpose_v(view.view(E4M3))
        assert got.dtype == E4M3 and got.is_contiguous()
        assert torch.equal(got.view(torch.uint8).cpu(), want), name


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    shape = (1, 2**17 + 33, 128, 128)
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    signs = rotation_signs(128, 0, "cuda")
    tail = (slice(None), slice(2**17 - 31, None), slice(-2, None))
    for rotate in (None, signs):
        x8, descale = quantize(x, signs=rotate)
        y = x[tail].cpu() if rotate is None else hadamard(x[tail].contiguous(), rotate).cpu()
        back = dequantize(x8[tail].contiguous(), descale[:, -2:]).cpu()
        assert (back - y.float()).norm() < 0.04 * y.float().norm()
    vt = transpose_v(x8)
    want = transpose_v(x8[:, 2**17 :].contiguous())
    assert torch.equal(vt[..., 2**17 :].view(torch.uint8), want.view(torch.uint8))


@pytest.mark.gpu
def test_a_cuda_graph_follows_its_inputs():
    q, k, v = (torch.randn(2, 300, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    signs = rotation_signs(128, 0, "cuda")
    quantize_qkv(q, k, v, signs=signs)
    transpose_v(v.to(E4M3))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = quantize_qkv(q, k, v, signs=signs)
        vt = transpose_v(x.v)
    for scale in (8.0, 0.125):  # a maximum of an earlier replay must not stay
        for tensor in (q, k, v):
            tensor.normal_().mul_(scale)
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(x, quantize_qkv(q, k, v, signs=signs), strict=True):
            assert same(got, want)
        assert torch.equal(vt.view(torch.uint8), transpose_v(x.v).view(torch.uint8))
