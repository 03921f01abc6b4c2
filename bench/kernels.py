"""Who is measured: peers, the course's rungs and the library, behind one call convention, and the check before the clock.

A loaded attention kernel is `call(q, k, v, causal) -> out` on `(batch, seqlen, heads, head_dim)` tensors; a loaded GEMM is
`call(a, b) -> a @ b.T`.
"""

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from bench.card import version
from bench.cases import Attention, Case, Gemm
from fa3_lib.reference import attention as truth

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}

# Largest relative error |out - truth| / |truth| that is still a right answer in this precision. An unfused 16-bit
# computation rounds scores and weights too; FP8 attention rounds the weights to 3 bits.
ERROR_LIMITS = {"fp32": 1e-4, "fp16": 4e-3, "bf16": 2e-2, "fp8": 1e-1}


@dataclass(frozen=True)
class Kernel:
    """A candidate.

    Args:
        name, dtype, rung, direction: as in `fa3_course.results.Row`.
        device: "cuda" or "cpu".
        load: imports the kernel and returns its call; raises where this machine cannot run it.
        timer: the timer to start with (see `bench.timing`).
        source: repository files that make it; empty for peers.
        bytes_per_score: extra memory per element of the score matrix, 0 for fused kernels.
        head_dim: the only one that is asked of it in this run; None for all.
    """

    name: str
    dtype: str
    load: Callable[[], Callable]
    direction: str = "fwd"
    device: str = "cuda"
    timer: str = "graph"
    rung: str | None = None
    source: tuple[str, ...] = ()
    bytes_per_score: int = 0
    head_dim: int | None = None
    as_numpy: bool = field(default=False, kw_only=True)

    @property
    def label(self) -> str:
        """Name and dtype: what tells two candidates apart."""
        return f"{self.name}/{self.dtype}"

    def bind(self, case: Case) -> Callable:
        """The call for one case: takes one input set, returns the output."""
        call = _loaded(self)
        if isinstance(case, Gemm):
            return call
        return functools.partial(call, causal=case.causal)

    def meant_for(self, case: Case) -> bool:
        """Whether this run wants the kernel to be measured on the case."""
        return self.direction == case.direction and self.head_dim in (None, getattr(case, "head_dim", None))

    def refuses(self, case: Case, free_bytes: int | None = None) -> str | None:
        """Why this case cannot be measured with this kernel, None if it can."""
        if isinstance(case, Attention) and self.bytes_per_score and free_bytes is not None:
            need = self.bytes_per_score * case.batch * case.heads * case.seqlen**2
            if need > 0.8 * free_bytes:
                return f"its score matrices need {need / 2**30:.0f} GiB, the card has {free_bytes / 2**30:.0f} GiB free"
        return None


@functools.cache
def _loaded(kernel: Kernel) -> Callable:
    return kernel.load()


def inputs(case: Case, dtype: str, device: str, seed: int, as_numpy: bool = False) -> tuple:
    """One input set from N(0, 1), drawn anew for each seed: `(q, k, v)` or `(a, b)`. Never constant data, which would let
    the card run cooler and faster."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = (
        [(case.n, case.n)] * 2 if isinstance(case, Gemm) else [(case.batch, case.seqlen, case.heads, case.head_dim)] * 3
    )
    # drawn in 16 bits on a card: fp32 samples of the largest shapes would double the peak memory
    drawn = torch.float32 if device == "cpu" else torch.float16
    tensors = tuple(torch.randn(s, generator=generator, device=device, dtype=drawn).to(DTYPES[dtype]) for s in shapes)
    return tuple(t.numpy() for t in tensors) if as_numpy else tensors


def check(kernel: Kernel, case: Case, seed: int) -> float:
    """Runs the kernel on a small case and returns its relative error against fp64; ValueError if the answer is wrong.

    Memory that the output is likely to get is filled with NaN first, so that a row never written shows.
    """
    case = case.small()
    given = inputs(case, kernel.dtype, kernel.device, seed, kernel.as_numpy)
    call = kernel.bind(case)
    call(*given)  # compiles; the call that counts then finds the poisoned memory
    tensors = [torch.from_numpy(x) if kernel.as_numpy else x.float() for x in given]
    if isinstance(case, Gemm):
        right = tensors[0].double() @ tensors[1].double().T
    else:
        right, _ = truth(*tensors, causal=case.causal)
    poison = [
        torch.full(right.shape, torch.nan, dtype=dt, device=kernel.device) for dt in (torch.bfloat16, torch.float32)
    ]
    del poison
    out = call(*given)
    out = torch.from_numpy(out) if kernel.as_numpy else out
    if out.shape != right.shape:
        raise ValueError(f"wrong: output of shape {tuple(out.shape)}, should be {tuple(right.shape)}")
    error = float((out.double() - right).norm() / right.norm())
    if not error <= ERROR_LIMITS[kernel.dtype]:  # NaN is wrong too
        raise ValueError(
            f"wrong: relative error {error:.2e} against fp64 on {case}, limit {ERROR_LIMITS[kernel.dtype]:.0e}"
        )
    return error


def first(result: object) -> object:
    """The output of a call that may return the log-sum-exp beside it."""
    return result[0] if isinstance(result, (tuple, list)) else result


def _cublas() -> Callable:
    return lambda a, b: torch.matmul(a, b.T)


def _cublas_fp8() -> Callable:
    one = torch.ones((), device="cuda")
    return lambda a, b: torch._scaled_mm(
        a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _sdpa(backend: str) -> Callable:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = getattr(SDPBackend, backend)

    def call(q, k, v, causal):
        with sdpa_kernel(chosen):  # raises if torch would have to take another backend
            out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
        return out.transpose(1, 2)

    return call


def _fa3() -> Callable:
    func = importlib.import_module("flash_attn_interface").flash_attn_func
    return lambda q, k, v, causal: first(func(q, k, v, causal=causal))


def _fa4() -> Callable:
    func = importlib.import_module("flash_attn.cute").flash_attn_func
    return lambda q, k, v, causal: first(func(q, k, v, causal=causal))


def peer_versions() -> dict[str, str]:
    """Versions of the peers' packages that are installed, by kernel name; cuDNN's and FA2's are torch's own."""
    packages = {"fa3": ("tokenspeed-fa3", "flash-attn-3"), "fa4": ("flash-attn-4",)}
    found = {name: version(*names) for name, names in packages.items()}
    return {name: text for name, text in found.items() if text}


def _peers(dtype: str) -> list[Kernel]:
    return [
        Kernel("cublas", dtype, _cublas, direction="gemm"),
        Kernel("cublas", "fp8", _cublas_fp8, direction="gemm"),
        Kernel("cudnn", dtype, functools.partial(_sdpa, "CUDNN_ATTENTION")),
        Kernel("fa2", dtype, functools.partial(_sdpa, "FLASH_ATTENTION")),
        Kernel("fa3", dtype, _fa3),
        Kernel("fa3", "fp8", _fa3),
        Kernel("fa4", dtype, _fa4),
    ]


FP8_SOURCE = (
    "fa3_lib/config.py", "fa3_lib/consumer.py", "fa3_lib/forward_fp8_sm90.py", "fa3_lib/forward_sm90.py", "fa3_lib/fp8.py",
    "fa3_lib/fp8_config.py", "fa3_lib/loads.py", "fa3_lib/quantize.py", "fa3_lib/quantize_triton.py", "fa3_lib/softmax.py",
    "fa3_lib/turn_v.py", "fa3_lib/walk.py",
)  # fmt: skip


def _fa3_lib_fp8(two_level: bool = True, transposed: bool = False) -> Callable:
    from fa3_lib import fp8

    def call(q, k, v, causal):
        scale = q.shape[-1] ** -0.5
        return fp8.forward(q, k, v, scale, causal, two_level=two_level, with_lse=False, transposed=transposed)[0]

    return call


def _transpose_v() -> Callable:
    from fa3_lib.quantize import transpose_v

    return lambda q, k, v, causal: transpose_v(v)


def _with_transposed_v(q, k, v):
    from fa3_lib.quantize import transpose_v

    return q, k, transpose_v(v)


# parts of the FP8 call, not measured as kernels of their own right: name -> what they get instead of (q, k, v)
PARTS = {"fa3_lib kernel": _with_transposed_v, "transpose_v": lambda *x: x}


def fp8_kernels() -> list[Kernel]:
    """Who is measured in FP8: the yardstick, FA3, the library with two levels and with one, and the parts of its call."""

    def library(name, load, **options):
        return Kernel(name, "fp8", functools.partial(load, **options), source=FP8_SOURCE)

    return [
        *(kernel for kernel in _peers("bf16") if kernel.dtype == "fp8"),
        library("fa3_lib", _fa3_lib_fp8),
        library("fa3_lib one level", _fa3_lib_fp8, two_level=False),
        library("fa3_lib kernel", _fa3_lib_fp8, transposed=True),
        library("transpose_v", _transpose_v),
    ]


def _from_rung(rung, dtype: str) -> Kernel:
    """A rung of the registry as a candidate; the library is its last entry."""

    def load() -> Callable:
        rung.device()  # raises RungUnavailable with the reason
        func = rung.load()
        return lambda q, k, v, causal: first(func(q, k, v, causal=causal))

    def load_library() -> Callable:
        from fa3_lib import flash_attn_func

        return lambda q, k, v, causal: first(flash_attn_func(q, k, v, causal=causal))

    library = rung.number == "lib"
    try:
        device = rung.device().type
    except RuntimeError:
        device = "cuda"  # load() will say why not
    numpy_rung = rung.needs == "numpy"
    eager = rung.needs == "torch" and not library
    return Kernel(
        name="fa3_lib" if library else rung.file.rpartition("/")[2].removesuffix(".py"),
        dtype="fp32" if numpy_rung else dtype,
        load=load_library if library else load,
        device=device,
        timer="cpu" if device == "cpu" else "events" if eager else "graph",
        rung=None if library else rung.number,
        source=tuple(rung.sources()),
        bytes_per_score=16 if eager else 0,  # scores and weights, some of them in fp32
        as_numpy=numpy_rung,
    )


def candidates(dtype: str = "bf16") -> list[Kernel]:
    """Every kernel that a run knows: cuBLAS, the peers, the rungs in order, the library, then rung 10 and the library in FP8."""
    from fa3_course.rungs import RUNG10, RUNGS

    fp8 = (_from_rung(RUNG10, "fp8"), Kernel("fa3_lib", "fp8", _fa3_lib_fp8, source=FP8_SOURCE))
    return [*_peers(dtype), *(_from_rung(rung, dtype) for rung in RUNGS), *fp8]


def chosen(kernels: Iterable[Kernel], names: str | None) -> list[Kernel]:
    """The kernels named in a comma-separated list (names, rung numbers, or `rungs`); all of them for None.

    `name@128` wants the kernel at head_dim 128 only, unless the list names it without a limit as well.

    Raises:
        ValueError: naming what is known, if a name is not.
    """
    kernels = list(kernels)
    if names is None:
        return kernels
    wanted = [(*name.strip().partition("@")[::2],) for name in names.split(",") if name.strip()]
    known = {key for k in kernels for key in _keys(k)}
    unknown = [name for name, dim in wanted if name not in known or (dim and not dim.isdigit())]
    if unknown:
        raise ValueError(
            f"unknown kernel {', '.join(unknown)}; known are {', '.join(sorted(known))}, each also as NAME@HEAD_DIM"
        )
    found = []
    for k in kernels:
        dims = {dim for name, dim in wanted if name in _keys(k)}
        if dims:
            found += [k] if "" in dims else [replace(k, head_dim=int(dim)) for dim in sorted(dims)]
    return found


def _keys(kernel: Kernel) -> set[str]:
    keys = {kernel.name, kernel.label}
    return keys | {kernel.rung, "rungs"} if kernel.rung is not None else keys
