"""`fa3 bundle`: what it chooses, that a second call goes on, and that the other machine can install from it alone."""

import json
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fa3_course import bundle, paths
from fa3_course.cli import app

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
PINS = [
    bundle.Requirement(line)
    for line in ("apache-tvm-ffi==1.0", "nvidia-cutlass-dsl==2.0", "rich==3.0", "torch==2.13.0")
]


def make_wheel(folder: Path, name: str, version: str) -> Path:
    """A whole, tiny wheel with one module that says its version."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{module}/__init__.py", f"VERSION = '{version}'\n")
        wheel.writestr(f"{module}/tests/test_it.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


class FakeIndex:
    """Stands for pip: makes wheels; refuses the name in `absent`."""

    def __init__(self, absent: str | None = None):
        self.absent, self.asked = absent, []

    def __call__(self, requirement, folder, target, with_dependencies):
        self.asked.append(requirement.name)
        if requirement.name == self.absent:
            raise RuntimeError(f"pip could not download {requirement}")
        make_wheel(folder, requirement.name, next(iter(requirement.specifier)).version)


def fill(out, index, parts=("kernels", "course"), python=HERE):
    return bundle.fill(
        out, parts, bundle.Target(python, platform.machine()), PINS, download=index, say=lambda line: None
    )


def test_parts_split_the_real_pins():
    pins = bundle.read_pins(paths.checkout() / "constraints.txt")
    parts = {part: {r.name for r in bundle.requirements(part, pins)} for part in bundle.PARTS}
    assert {"nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi"} <= parts["kernels"]
    assert {"jupyterlab", "pytest", "ruff", "typer"} <= parts["course"]
    assert not parts["kernels"] & parts["course"]
    assert parts["torch"] == {"torch", "triton"}
    everything = set().union(*parts.values()) | set(bundle.PRESENT) | set(bundle.LEFT_OUT)
    assert {r.name for r in pins} <= everything
    assert not parts["course"] & {"safetensors", "tokenizers"}  # the clone brings what they make


def test_a_broken_off_call_goes_on_where_it_ended(tmp_path):
    with pytest.raises(RuntimeError, match="rich"):
        fill(tmp_path, FakeIndex(absent="rich"))
    half = next((tmp_path / "wheels").glob("nvidia*"))
    half.write_bytes(half.read_bytes()[:40])  # as an interrupted copy leaves it
    index = FakeIndex()
    outcome = fill(tmp_path, index)
    assert index.asked == ["nvidia-cutlass-dsl", "rich"]
    assert [name.split("-")[0] for name in outcome.kept] == ["apache_tvm_ffi"]
    files = json.loads((tmp_path / "manifest.json").read_text())["files"]
    assert {name: entry["bytes"] for name, entry in files.items()} == {
        f.name: f.stat().st_size for f in (tmp_path / "wheels").iterdir()
    }


def test_another_target_needs_another_folder(tmp_path):
    fill(tmp_path, FakeIndex())
    with pytest.raises(ValueError, match="choose another folder"):
        fill(tmp_path, FakeIndex(), python="3.99")


def test_the_other_machine_installs_from_it_alone(tmp_path):
    fill(tmp_path, FakeIndex())
    assert "do not publish" in (tmp_path / "NOTICE").read_text()
    subprocess.run([tmp_path / "install.sh", sys.executable], check=True, capture_output=True, cwd="/")
    code = "import nvidia_cutlass_dsl as m; print(m.VERSION, m.__file__)"
    done = subprocess.run(
        ["sh", "-c", f". {tmp_path}/env.sh; {sys.executable} -c '{code}'"], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["2.0", str(tmp_path / "site" / "nvidia_cutlass_dsl" / "__init__.py")]


def test_install_refuses_another_python(tmp_path):
    fill(tmp_path, FakeIndex(), python="3.99")
    done = subprocess.run([tmp_path / "install.sh", sys.executable], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"for Python 3.99 on {platform.machine()}, {sys.executable} is Python {HERE}" in done.stderr
    assert not (tmp_path / "site").exists()


def test_archives_hold_the_unpacked_part(tmp_path):
    fill(tmp_path, FakeIndex())
    (path,) = bundle.archive(tmp_path, ["kernels"], PINS, say=lambda line: None)
    with tarfile.open(path) as tar:
        names = set(tar.getnames())
    assert {"./apache_tvm_ffi/__init__.py", "./nvidia_cutlass_dsl/__init__.py"} <= names
    assert not any("tests" in name or "rich" in name for name in names)
    assert bundle.archive(tmp_path, ["kernels"], PINS, say=lambda line: None) == []  # it is there already
    with pytest.raises(ValueError, match="too large"):
        bundle.archive(tmp_path, ["torch"], PINS)


@pytest.mark.parametrize(
    "arguments, message",
    [(["--part", "games"], "games"), (["--arch", "mips"], "x86_64 or aarch64"), (["--python", "2.7"], "3.11 or newer")],
)
def test_command_refuses(tmp_path, arguments, message):
    done = CliRunner().invoke(app, ["bundle", str(tmp_path / "b"), *arguments])
    assert done.exit_code == 2 and message in done.output
    assert not (tmp_path / "b").exists()
