"""Rungs 0 to 2 of chapter 1 against the fp64 reference: shapes, masks, empty rows, extreme logits, errors by name."""

import importlib.util
import os
import secrets
import subprocess
import sys

import numpy as np
import pytest
import torch

from fa3_course import paths, rungs
from fa3_lib import reference

SEED = int(os.environ.get("FA3_TEST_SEED", secrets.randbelow(2**31)))  # printed in every test id
HAS_TRITON = importlib.util.find_spec("triton") is not None
NUMBERS = ["0", "1", pytest.param("2", marks=pytest.mark.skipif(not HAS_TRITON, reason="Triton has Linux wheels only"))]
DTYPES = {"0": torch.float16, "1": torch.float32, "2": torch.bfloat16}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v
SHAPES = [
    (1, 1, 1, 1, 1, 8, 8),
    (2, 129, 67, 4, 2, 40, 24),  # causal: rows without keys
    (1, 67, 300, 6, 2, 64, 128),
    (2, 128, 256, 2, 2, 128, 128),
    (1, 33, 200, 3, 1, 256, 256),
    (1, 5, 0, 2, 1, 64, 64),
    (1, 0, 5, 2, 1, 64, 64),
    (0, 5, 5, 2, 1, 64, 64),
]


def call(number, q, k, v, scale=None, causal=False):
    """The rung's own function on torch tensors; NumPy rungs get arrays, bf16 widened (exact)."""
    attention = rungs.find(number).load()
    if number != "1":
        return attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), scale, causal)
    arrays = ((x.float() if x.dtype == torch.bfloat16 else x).numpy() for x in (q, k, v))
    return tuple(torch.from_numpy(x) for x in attention(*arrays, scale, causal))


def draw(shape, dtype):
    b, sq, sk, h, hk, d, dv = shape
    g = torch.Generator().manual_seed(SEED)
    return tuple(torch.randn(b, s, n, x, generator=g).to(dtype) for s, n, x in ((sq, h, d), (sk, hk, d), (sk, hk, dv)))


def assert_close(got, inputs, scale, causal):
    """Out within twice the error of the same computation in PyTorch at this precision, LSE within fp32 rounding."""
    out, lse = (x.cpu() for x in got)
    want, want_lse = reference.attention(*inputs, scale, causal)
    eager, _ = rungs.find("0").load()(*inputs, scale, causal)
    assert out.shape == want.shape and lse.shape == want_lse.shape and lse.dtype == torch.float32
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))
    if out.numel() == 0 or inputs[1].numel() == 0:
        assert not out.any()
        return
    # the output's last bit, and what sums of some hundred products lose in fp32
    rounding = torch.finfo(inputs[0].dtype).eps * want.abs().max() + 3e-6 * inputs[2].double().abs().max()
    assert (out.double() - want).abs().max() <= 2 * (eager.double() - want).abs().max() + rounding
    seen = ~torch.isneginf(want_lse)
    torch.testing.assert_close(lse.double()[seen], want_lse[seen], rtol=1e-5, atol=1e-5)
    assert not out.transpose(1, 2)[~seen].any()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)) + f"-seed{SEED}")
@pytest.mark.parametrize("number", NUMBERS)
def test_rung_against_reference(number, shape, causal):
    inputs = draw(shape, DTYPES[number])
    got = call(number, *inputs, causal=causal)
    if number == "0":  # its LSE comes from scores that were rounded to fp16: judge it by that
        want, want_lse = reference.attention(*inputs, causal=causal)
        assert got[0].dtype == inputs[0].dtype
        torch.testing.assert_close(got[0].cpu().double(), want, rtol=0, atol=1e-2)
        torch.testing.assert_close(got[1].cpu().double(), want_lse, rtol=0, atol=1e-2)
    else:
        assert_close(got, inputs, None, causal)


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0], ids=lambda s: f"scale{s}-seed{SEED}")
@pytest.mark.parametrize("number", NUMBERS[1:])
def test_any_scale(number, scale):
    """A running maximum of raw scores is only right for a positive factor; zero and negative ones must work too."""
    inputs = draw((1, 40, 150, 2, 1, 32, 32), torch.float32)
    assert_close(call(number, *inputs, scale, True), inputs, scale, True)


@pytest.mark.parametrize("shift", [-1e4, 1e4])
@pytest.mark.parametrize("number", NUMBERS)
def test_logits_far_from_zero(number, shift):
    """All logits moved by the same amount: weights stay, LSE moves along, nothing overflows."""
    q, k, v = draw((1, 20, 140, 1, 1, 16, 16), torch.float32)
    q[..., 0], k[..., 0] = shift, 1.0
    out, lse = call(number, q, k, v, 1.0, True)
    want, want_lse = reference.attention(q, k, v, 1.0, True)
    torch.testing.assert_close(out.cpu().double(), want, rtol=0, atol=2e-2)  # fp32 scores near 1e4 step by 1e-3
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-5, atol=0)


@pytest.mark.parametrize("number", NUMBERS)
def test_nan_in_shows(number):
    """A NaN in a key that a row sees must come out as NaN there, and only there."""
    q, k, v = draw((1, 130, 130, 1, 1, 16, 16), torch.float32)
    k[0, 100] = float("nan")
    out, _ = call(number, q, k, v, causal=True)
    assert torch.isnan(out[0, 100:]).all() and torch.isfinite(out[0, :100]).all()


@pytest.mark.parametrize("tiles", [(1, 1), (7, 3), (64, 1000), (1000, 64)], ids=str)
def test_tiles_do_not_change_the_answer(tiles):
    attention = rungs.find("1").load()
    q, k, v = (x.double().numpy() for x in draw((2, 70, 90, 4, 2, 16, 8), torch.float32))
    out, lse = attention(q, k, v, causal=True, tile_m=tiles[0], tile_n=tiles[1])
    want, want_lse = attention(q, k, v, causal=True)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton has Linux wheels only")
def test_triton_takes_any_strides():
    q, k, v = draw((2, 70, 70, 2, 2, 32, 32), torch.float16)
    want = call("2", q, k, v, causal=True)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    views.append(v.transpose(1, 3).contiguous().transpose(1, 3))  # last dim not contiguous
    got = call("2", *views, causal=True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.skipif(not HAS_TRITON or torch.cuda.is_available(), reason="shows a fault of Triton's interpreter")
def test_interpreter_multiplies_bf16_wrongly():
    """Why rung 2 widens bf16 operands: once this fails, Triton has mended it and WIDEN can go."""
    rung = rungs.find("2").module()
    import triton
    import triton.language as tl

    def product(A, B, C, WIDEN: tl.constexpr):
        i = tl.arange(0, 16)
        at = i[:, None] * 16 + i[None, :]
        a, b = tl.load(A + at), tl.load(B + at)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        tl.store(C + at, tl.dot(a, b))

    product.__globals__["tl"] = tl  # the interpreter looks for the language among a kernel's globals
    kernel = triton.jit(product)
    a, b = (torch.randn(16, 16, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (SEED, SEED + 1))
    errors = []
    for widen in (False, True):
        c = torch.empty(16, 16)
        kernel[(1,)](a, b, c, widen)
        errors.append((c - a.float() @ b.float()).abs().max())
    assert rung.INTERPRETED and errors[0] > 1 and errors[1] < 1e-4


BAD = {
    "rank": (lambda q, k, v: (q[0], k, v), "q must be"),
    "heads": (lambda q, k, v: (q[:, :, :3], k, v), "not a multiple of the 2 KV heads"),
    "head_dim": (lambda q, k, v: (q, k[..., :8], v), "shapes do not fit"),
    "lengths": (lambda q, k, v: (q, k, v[:, :5]), "shapes do not fit"),
    "dtype": (lambda q, k, v: (q, k.int(), v), "k must be"),
    "wide": (lambda q, k, v: (q, k, torch.zeros(1, 10, 2, 264)), "v: head_dim must be 1..256, got 264"),
    "grad": (lambda q, k, v: (q, k.requires_grad_(), v), "k.requires_grad"),
}


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(number, case):
    if (case in {"wide", "grad"} and number != "2") or (case == "dtype" and number == "1"):
        pytest.skip("a limit of another rung")
    change, message = BAD[case]
    inputs = change(*draw((1, 10, 10, 4, 2, 16, 16), torch.float32))
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        call(number, *inputs)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton has Linux wheels only")
@pytest.mark.parametrize("shared_memory", [65_536, 101_376, 232_448])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_fit_smaller_cards(shared_memory, dtype):
    """Cards with less shared memory than a Hopper get smaller tiles, never an empty one."""
    for head_dim in (8, 40, 64, 128, 192, 256):
        o = rungs.find("2").module().launch_options(head_dim, head_dim, dtype, True, shared_memory)
        tiles = o["TILE_M"] * o["PADDED_D"] + o["num_stages"] * o["TILE_N"] * (o["PADDED_D"] + o["PADDED_V"])
        assert tiles * dtype.itemsize <= shared_memory and min(o["TILE_M"], o["TILE_N"]) >= 16 and o["num_stages"] >= 1


CROSS_COMPILE = """
import importlib.util, sys
import torch
torch.cuda.is_available = lambda: True  # else the rung asks for the interpreter
spec = importlib.util.spec_from_file_location("rung02", sys.argv[1])
rung = sys.modules["rung02"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rung)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
options = rung.launch_options(*map(int, sys.argv[2:4]), torch.bfloat16, sys.argv[4] == "True")
launch = {name: options.pop(name) for name in ("num_warps", "num_stages")}
names = rung.forward_kernel.arg_names
types = {**dict.fromkeys("QKVO", "*bf16"), "LSE": "*fp32", "scale_log2": "fp32", **dict.fromkeys(options, "constexpr")}
# what the launcher sees for ordinary tensors: 16-byte aligned pointers, strides and lengths that 16 divides
aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in ("heads", "group", "scale_log2", *options)}
source = ASTSource(
    rung.forward_kernel,
    {name: types.get(name, "i32") for name in names},
    constexprs={(names.index(name),): value for name, value in options.items()},
    attrs=aligned,
)
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
print(kernel.metadata.shared)
sys.stdout.flush()
sys.stdout.buffer.write(kernel.asm["cubin"])
"""


@pytest.mark.skipif(not HAS_TRITON, reason="Triton has Linux wheels only")
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=lambda d: f"d{d[0]}v{d[1]}")
def test_compiles_for_hopper_without_spills(head_dims, tmp_path):
    """Compiled for sm_90 on any machine: no local memory, tensor-core and exp2 instructions where they belong."""
    rung = paths.checkout() / "chapters/01_online_softmax/steps/rung02_triton_fa2.py"
    command = [sys.executable, "-c", CROSS_COMPILE, str(rung), *map(str, head_dims), "True"]
    env = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    shared, cubin = done.stdout.split(b"\n", 1)
    assert int(shared) <= 232_448
    (tmp_path / "rung02.cubin").write_bytes(cubin)
    import triton

    disassembler = f"{os.path.dirname(triton.__file__)}/backends/nvidia/bin/nvdisasm"
    sass = subprocess.run([disassembler, "-c", tmp_path / "rung02.cubin"], capture_output=True, text=True, check=True)
    assert "HGMMA" in sass.stdout and "MUFU.EX2" in sass.stdout
    assert "STL" not in sass.stdout and "LDL" not in sass.stdout
