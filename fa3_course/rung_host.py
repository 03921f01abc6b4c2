"""Host side of the ladder's CuTe rungs: compile without a GPU, check arguments, call. Kernels are handed over as classes.

A kernel class is constructed as `Kernel(config, element_type)` and called by the DSL with
`(mQ, mK, mV, mO, mLSE, softmax_scale, stream)`.
"""

import atexit
import importlib.util
import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from fa3_lib.compiler import COMPILE_LOCK
from fa3_lib.config import HEAD_DIMS, ForwardConfig

ELEMENTS = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}

_compiled: dict = {}


def compile_kernel(kernel: type, config: ForwardConfig, dtype: torch.dtype, options: str = ""):
    """Compiles a rung's kernel for sm_90a; any batch, length, head count and strides will do when it is called.

    Args:
        kernel: the rung's kernel class.
        config: the tiles.
        dtype: torch.float16 or torch.bfloat16.
        options: further options of `cute.compile`; with `--enable-tvm-ffi`, call the result with torch tensors.
    """
    element = ELEMENTS[dtype]
    b, sq, sk, h, hk = (cute.sym_int() for _ in range(5))
    d, dv = cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)

    def rows(seqlen, heads, columns):  # 16-byte strides, as TMA wants them
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return make_fake_tensor(element, (b, seqlen, heads, columns), (*strides, 1), assumed_align=16)

    lse = make_fake_tensor(Float32, (b, h, sq), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream="--enable-tvm-ffi" in options)
    with COMPILE_LOCK:
        return cute.compile(
            kernel(config, element),
            rows(sq, h, d), rows(sk, hk, d), rows(sk, hk, dv), rows(sq, h, dv), lse, Float32(1.0), stream,
            options=f"--gpu-arch sm_90a {options}",
        )  # fmt: skip


def run(
    kernel: type,
    config: ForwardConfig | Callable[[int, bool], ForwardConfig],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls a rung's kernel, compiled once per configuration and dtype.

    Args:
        kernel: the rung's kernel class.
        config: the tiles, or a function of (head_dim, causal) that gives them.
        q: `(b, sq, h, d)`; k: `(b, sk, hk, d)`; v: `(b, sk, hk, dv)`; fp16 or bf16 on a Hopper GPU.
        softmax_scale: positive factor on the scores; `d ** -0.5` when None.
        causal: bottom-right aligned causal mask.

    Returns:
        out `(b, sq, h, dv)` like q and lse `(b, h, sq)` fp32.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument.
    """
    check(q, k, v)
    (b, sq, h, d), (sk, dv) = q.shape, (v.shape[1], v.shape[3])
    if softmax_scale is None:
        softmax_scale = d**-0.5
    if not 0.0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale must be positive and finite, got {softmax_scale}")
    if not isinstance(config, ForwardConfig):
        config = config(max(d, dv), causal)
    if config.causal != causal or config.head_dim < d or config.head_dim_v < dv:
        raise ValueError(f"{config} does not serve head_dim {d}, head_dim_v {dv}, causal={causal}")

    out = q.new_empty(b, sq, h, dv)
    lse = q.new_empty(b, h, sq, dtype=torch.float32)
    if out.numel() == 0 or sk == 0:  # nothing to compute, and TMA knows no empty tensors
        return out.zero_(), lse.fill_(-math.inf)
    q, k, v = (x if tma_readable(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    key = (kernel, config, q.dtype)
    with COMPILE_LOCK:
        if key not in _compiled:
            _compiled[key] = compile_kernel(*key, "--enable-tvm-ffi")
    with torch.cuda.device(q.device):
        _compiled[key](q, k, v, out, lse, float(softmax_scale))
    return out, lse


def tma_readable(x: torch.Tensor) -> bool:
    """Whether TMA can read `x` where it lies: address and strides are multiples of 16 bytes, the last stride is 1."""
    return x.data_ptr() % 16 == 0 and x.stride(3) == 1 and all(stride % 8 == 0 for stride in x.stride()[:3])


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises TypeError, ValueError or NotImplementedError, naming the argument."""
    widest = max(HEAD_DIMS)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be (batch, seqlen, heads, head_dim), got {tuple(x.shape)}")
        if x.dtype not in ELEMENTS or x.dtype != q.dtype:
            raise TypeError(f"{name} must be float16 or bfloat16, and all three alike, got {x.dtype}")
        if not 0 < x.shape[3] <= widest or x.shape[3] % 8:
            raise ValueError(f"{name}: head_dim must be a multiple of 8 up to {widest}, got {x.shape[3]}")
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError(f"{name}.requires_grad: a rung has no backward pass; use torch.no_grad()")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of the {k.shape[2]} KV heads")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.device != q.device or not x.is_cuda or torch.cuda.get_device_capability(x.device) != (9, 0):
            raise ValueError(f"{name} must be on a Hopper GPU, all three on the same, got {x.device}")


def edited(file: Path, *changes: tuple[str, str]) -> ModuleType:
    """A rung's module with some of its text changed: to see what a line is worth, or what its absence breaks.

    Args:
        file: the rung's source.
        changes: (old, new); each old text must occur exactly once.

    Raises:
        ValueError: when a text to change is not there, or there more than once.
    """
    source = file.read_text(encoding="utf-8")
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"{old!r} occurs {source.count(old)} times in {file.name}, not once")
        source = source.replace(old, new)
    # the DSL reads a function's source from its file, so there has to be one, as long as the process lives
    folder = Path(tempfile.mkdtemp(prefix="fa3_edited_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / file.name
    path.write_text(source, encoding="utf-8")
    name = f"{folder.name}.{file.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
