"""Compiled kernels on disk: found again, rebuilt when damaged or foreign, shared by processes. No GPU needed."""

import ast
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from fa3_lib import compiler
from fa3_lib.config import ForwardConfig

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl has wheels for Linux only")

KEY = (ForwardConfig(64, 64, 64, 64, own_output=True), torch.bfloat16, True)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FA3_LIB_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_kernels", {})
    return tmp_path


@pytest.fixture
def compiles(monkeypatch):
    """Counts compilations."""
    seen, real = [], compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda *key: seen.append(key) or real(*key))
    return seen


def again():
    compiler._kernels.clear()
    return compiler.forward_kernel(*KEY)


def test_compiled_once_in_memory_and_once_on_disk(cache, compiles):
    kernel = compiler.forward_kernel(*KEY)
    assert compiler.forward_kernel(*KEY) is kernel
    assert callable(again())
    assert len(compiles) == 1


@pytest.mark.parametrize("damage", (b"", b"no object file", "truncated", "flipped", "no checksum"))
def test_damaged_files_are_rebuilt(cache, compiles, damage):
    compiler.forward_kernel(*KEY)
    (path,) = cache.glob("*.o")
    content = path.read_bytes()
    if damage == "no checksum":
        path.with_suffix(".sha256").unlink()
    elif damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    else:
        path.write_bytes(damage)
    assert callable(again())
    assert len(compiles) == 2
    assert callable(again())
    assert len(compiles) == 2, "the rebuilt file is used"


def test_the_key_holds_everything_the_machine_code_depends_on(monkeypatch):
    keys = {compiler.cache_key(*KEY)}
    keys.add(compiler.cache_key(ForwardConfig(64, 64, 64, 64, own_output=True, causal=True), *KEY[1:]))
    keys.add(compiler.cache_key(KEY[0], torch.float16, True))
    keys.add(compiler.cache_key(*KEY[:2], False))
    for name, value in (("DEVICE_SOURCES", ("config.py",)), ("VERSIONED_PACKAGES", ("torch",))):
        compiler._source_and_versions.cache_clear()
        monkeypatch.setattr(compiler, name, value)
        keys.add(compiler.cache_key(*KEY))
    compiler._source_and_versions.cache_clear()
    assert len(keys) == 6


def test_the_kernel_takes_what_flash_attn_func_hands_over(cache):
    """Number, types and None of the arguments, as TVM FFI checks them: what it misses here is the device alone."""
    compiler.forward_kernel(*KEY)
    kernel = again()  # from disk; one that was just compiled for another machine than this does not check
    x, lse = torch.zeros(1, 8, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 4, 8)
    arguments = (x, x, x, x.clone(), lse, None, None, 0.125, 0.0, 16, 16, 132)
    with pytest.raises(ValueError, match=r"argument #0.*expected device_type=cuda"):
        kernel(*arguments)
    with pytest.raises(TypeError, match="12 parameters"):
        kernel(*arguments, 1)


def test_the_key_holds_every_file_that_the_kernel_imports():
    """From forward_sm90.py on: what is left out of the key on purpose must be out of the kernel's reach."""
    package = Path(compiler.__file__).parent
    reached, open_files = set(), {"forward_sm90"}
    while open_files:
        module = open_files.pop()
        reached.add(module)
        for node in ast.walk(ast.parse((package / f"{module}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                path = node.module.split(".")
                names = path[1:2] or [alias.name for alias in node.names]
                open_files |= set(names) - reached if path[0] == "fa3_lib" else set()
    assert {"config", "softmax", "compiler"} < reached
    assert {f"{name}.py" for name in reached} <= set(compiler.DEVICE_SOURCES)
    assert all((package / name).exists() for name in compiler.HOST_SOURCES)


@pytest.mark.parametrize("module, package", compiler.REQUIRED_MODULES.items())
def test_a_missing_dsl_says_what_to_install(cache, monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not there
    with pytest.raises(ImportError, match=rf"importing {module} failed.*pip install {package}"):
        again()


def test_the_dsls_advice_on_unrolled_loops_is_not_the_users_business(cache):
    from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with compiler.compiling():
            warnings.warn(DSLOptimizationWarning("unrolled"), stacklevel=1)
        again()
        assert [w for w in seen if w.category is DSLOptimizationWarning] == []
        warnings.warn(DSLOptimizationWarning("unrolled"), stacklevel=1)
    assert any(w.category is DSLOptimizationWarning for w in seen)


def test_a_folder_that_cannot_be_written_costs_the_cache_only(cache, monkeypatch, compiles):
    blocker = cache / "file"
    blocker.write_text("")
    for folder in (str(blocker / "below"), ""):
        monkeypatch.setenv("FA3_LIB_CACHE_DIR", folder)
        assert callable(again())
    assert len(compiles) == 2


def test_processes_do_not_collide(tmp_path):
    """Four processes want the same kernel at once: each gets it, and one file is left."""
    code = (
        "import torch; from fa3_lib import compiler; from fa3_lib.config import ForwardConfig;"
        "compiler.forward_kernel(ForwardConfig(64, 64, 64, 64, own_output=True), torch.bfloat16, True)"
    )
    env = {**os.environ, "FA3_LIB_CACHE_DIR": str(tmp_path)}
    workers = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(4)]
    deadline = time.monotonic() + 300
    assert [w.wait(max(1, deadline - time.monotonic())) for w in workers] == [0] * 4
    assert len(list(tmp_path.glob("*.o"))) == 1
