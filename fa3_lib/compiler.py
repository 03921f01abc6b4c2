"""Compiled kernels, kept in memory and on disk.

A kernel is compiled once per configuration and dtype (1.5 to 4 s), exported as an object file and loaded from there by
later processes without the compiler. `FA3_LIB_CACHE_DIR` names the folder (default `~/.cache/fa3_lib`); an empty value
keeps nothing on disk. A file is used only if its name (sources, versions, configuration) and its checksum match; anything
else is rebuilt. Processes that need the same kernel at once wait for the first one.
"""

import contextlib
import functools
import hashlib
import importlib
import os
import platform
import tempfile
import threading
import warnings
from importlib import metadata
from pathlib import Path

import torch
from filelock import FileLock

from fa3_lib.config import ForwardConfig

# two threads inside cute.compile crash the process
COMPILE_LOCK = threading.RLock()

SYMBOL = "fa3_lib_forward"
HOST_SOURCES = (
    "__init__.py",
    "checks.py",
    "fp8.py",
    "interface.py",
    "quantize.py",
    "quantize_triton.py",
    "reference.py",
    "tiled.py",
)
# every other file of the package may shape machine code: a file that nobody thought of costs a compilation, not a stale kernel
DEVICE_SOURCES = tuple(sorted(p.name for p in Path(__file__).parent.glob("*.py") if p.name not in HOST_SOURCES))
REQUIRED_MODULES = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}  # module: the package that brings it
VERSIONED_PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "torch")

_kernels: dict = {}


def forward_kernel(config: ForwardConfig, dtype: torch.dtype, with_lse: bool):
    """The launchable kernel, compiled or loaded on first use.

    It is called as `fn(q, k, v, out, lse, sinks, counter, softmax_scale, softcap, window_left, window_right, max_ctas)`:
    `lse` None without `with_lse`, `sinks` and `counter` None unless the configuration has them, tensors unpacked. `dtype` is that
    of the tensors. With an `Fp8Config` it is the output's, and the call is `forward_fp8_sm90.compile_forward`'s.

    Raises:
        ImportError: CuTe DSL is not installed; the message says what to install.
        RuntimeError: when a CUDA graph is being captured and the kernel is not loaded yet.
    """
    key = (config, dtype, with_lse)
    kernel = _kernels.get(key)
    if kernel is None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"fa3_lib has not compiled {config} for {dtype} yet and cannot do so while a CUDA graph is captured: "
                "call flash_attn_func once with these head dims, dtype and mask before the capture"
            )
        with COMPILE_LOCK:
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = _load_or_compile(*key)
    return kernel


def cache_dir() -> Path | None:
    """Folder of the compiled kernels, or None when caching on disk is switched off."""
    folder = os.environ.get("FA3_LIB_CACHE_DIR", "~/.cache/fa3_lib")
    return Path(folder).expanduser() if folder else None


def cache_key(config: ForwardConfig, dtype: torch.dtype, with_lse: bool) -> str:
    """Hash over everything that the machine code depends on."""
    return hashlib.sha256(f"{_source_and_versions()} {config} {dtype} {with_lse}".encode()).hexdigest()[:32]


@functools.cache
def _source_and_versions() -> str:
    digest = hashlib.sha256()
    for name in DEVICE_SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest() + platform.machine() + "".join(f" {p}={metadata.version(p)}" for p in VERSIONED_PACKAGES)


def _load_or_compile(*key):
    for module, package in REQUIRED_MODULES.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ImportError(
                f"fa3_lib compiles its kernels with CuTe DSL, and importing {module} failed ({error}): pip install {package}"
            ) from error
    folder = cache_dir()
    if folder is None:
        return _compile(*key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{cache_key(*key)}.o"
        with FileLock(path.with_suffix(".lock")):
            kernel = _load(path)
            if kernel is None:
                kernel = _compile(*key)
                _save(kernel, path)
            return kernel
    except OSError:  # a read-only or full disk costs the cache, not the kernel
        return _compile(*key)


def _compile(config: ForwardConfig, dtype: torch.dtype, with_lse: bool):
    if config.element_bytes == 1:
        from fa3_lib.forward_fp8_sm90 import compile_forward
    else:
        from fa3_lib.forward_sm90 import compile_forward

    with compiling():
        return compile_forward(config, dtype, "--enable-tvm-ffi", with_lse)


@contextlib.contextmanager
def compiling():
    """Around `cute.compile`: one thread at a time, without the DSL's advice on loops that are unrolled on purpose."""
    from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning

    with COMPILE_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore", DSLOptimizationWarning)
        yield


def _load(path: Path):
    """The kernel in `path`, or None if the file is missing, damaged or refused by the loader."""
    import cutlass.cute as cute

    try:
        checksum, content = path.with_suffix(".sha256").read_bytes(), path.read_bytes()
    except FileNotFoundError:
        return None
    # checked before loading: a truncated object file would crash the process instead of raising
    if hashlib.sha256(content).hexdigest().encode() != checksum:
        return None
    try:
        return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[SYMBOL]
    except (RuntimeError, AttributeError, KeyError, ValueError):
        return None


def _save(kernel, path: Path) -> None:
    """Writes beside the target, then renames: a reader never sees half a file."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        fresh = Path(scratch) / path.name
        kernel.export_to_c(str(fresh), function_name=SYMBOL)
        checksum = Path(scratch) / "checksum"
        checksum.write_text(hashlib.sha256(fresh.read_bytes()).hexdigest())
        os.replace(fresh, path)
        os.replace(checksum, path.with_suffix(".sha256"))
