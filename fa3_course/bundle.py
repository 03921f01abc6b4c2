"""Packs what a machine without a network lacks into a folder, from the user's own pip downloads.

The folder holds `wheels/`, `install.sh` (installs them beside an environment that has PyTorch, changing nothing in it),
`manifest.json` and `NOTICE`. A second call downloads only what is missing. Nothing in it may be published: NVIDIA's
licence for CuTe DSL lets each user get the wheels from PyPI, not pass them on.
"""

import hashlib
import json
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

ARCHITECTURES = ("x86_64", "aarch64")
KERNELS = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "torch-c-dlpack-ext")  # and nvidia-cutlass-dsl-libs-*
TORCH = ("torch", "triton")
# what a machine with PyTorch has already; a second copy in front of its own would only make trouble
PRESENT = ("numpy", "setuptools", "cuda-bindings", "cuda-pathfinder")
LEFT_OUT = (
    "nvidia-cutlass-dsl-libs-cu12",  # 92 MB for CUDA 12 drivers; the course is tested with CUDA 13
    # of the group `activations`, which makes a file that the clone brings along
    *("click", "hf-xet", "httpcore2", "httpx2", "huggingface-hub", "safetensors", "tokenizers", "tqdm", "truststore"),
)
# other implementations to measure beside ours; not needed, hence not among the pins
PEERS = ("tokenspeed-fa3==3.0.0.post20260810", "flash-attn-4==4.0.0b36", "quack-kernels==0.6.5")

PARTS = {
    "kernels": "CuTe DSL and the launcher",
    "course": "JupyterLab, plots, tests",
    "peers": "FlashAttention-3 (C++) and FlashAttention-4, to measure beside",
    "torch": "PyTorch with CUDA and Triton, about 2.7 GB",
}

NOTICE = """\
These wheels were downloaded from PyPI by the person who made this folder, each under its own licence.
nvidia-cutlass-dsl and its libraries are under NVIDIA's own licence (file LICENSE in the wheel): take this folder to your
own machines, do not publish it, do not put it into an image or a repository that others can fetch.
"""

INSTALL = """\
#!/bin/sh
# Installs the wheels beside an environment that has PyTorch; nothing in that environment changes.
#   ./install.sh [PYTHON]        then, in each shell:  . {here}/env.sh
set -eu
cd "$(dirname "$0")"
python=${{1:-python3}}
have=$("$python" -c 'import platform, sys; print("%d.%d" % sys.version_info[:2], platform.machine())')
if [ "$have" != "{python} {arch}" ]; then
  echo "these wheels are for Python {python} on {arch}, $python is Python $have: fa3 bundle --python ... --arch ..." >&2
  exit 1
fi
rm -rf site
"$python" -m pip install --disable-pip-version-check --no-index --no-deps --no-warn-script-location --target site wheels/*.whl
here=$(pwd)
cat >env.sh <<END
export PYTHONPATH="$here/site:$here/site/nvidia_cutlass_dsl/dsl_packages\\${{PYTHONPATH:+:\\$PYTHONPATH}}"
export PATH="$here/site/bin:\\$PATH"
END
echo "Installed. In each shell:  . $here/env.sh    then, in the clone:  make demo PY=$python"
"""


@dataclass(frozen=True)
class Target:
    """The machine that the bundle is for.

    Args:
        python: "3.11", "3.12", ...
        arch: "x86_64" or "aarch64" (Linux).
    """

    python: str = "3.12"
    arch: str = "x86_64"

    def pip_options(self) -> list[str]:
        """Options that make pip choose wheels for the target instead of for this machine."""
        version = self.python.replace(".", "")
        # pip matches platform tags exactly, so every glibc up to the target's is named
        glibcs = [f"manylinux_2_{minor}_{self.arch}" for minor in range(28, 4, -1)]
        old = [f"manylinux{year}_{self.arch}" for year in ("2014", "2010", "1")]
        options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", self.python]
        for abi in (f"cp{version}", "abi3", "none"):
            options += ["--abi", abi]
        for platform in (*glibcs, *old, f"linux_{self.arch}"):
            options += ["--platform", platform]
        return options


@dataclass
class Outcome:
    """What a call did: wheels that were there, wheels that came, bytes of each part."""

    kept: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)


def requirements(part: str, pins: Iterable[Requirement]) -> list[Requirement]:
    """The pinned requirements of a part; `pins` are the lines of constraints.txt."""
    if part == "peers":
        return [Requirement(line) for line in PEERS]
    chosen = {r.name: r for r in pins}
    kernels = {name for name in chosen if name in KERNELS or name.startswith("nvidia-cutlass-dsl-libs-")}
    names = {
        "kernels": kernels - set(LEFT_OUT),
        "torch": set(TORCH),
        "course": set(chosen) - kernels - set(TORCH) - set(PRESENT) - set(LEFT_OUT),
    }[part]
    return [chosen[name] for name in sorted(names)]


def read_pins(constraints: Path) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in constraints.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def present(folder: Path) -> dict[tuple[str, Version], Path]:
    """(name, version) -> whole wheel. A file that is not a whole zip (an interrupted copy) is removed."""
    found = {}
    for file in sorted(folder.glob("*.whl")):
        if not zipfile.is_zipfile(file):
            file.unlink()
            continue
        name, version, _, _ = parse_wheel_filename(file.name)
        found[name, Version(version.public)] = file
    return found


def _key(requirement: Requirement) -> tuple[str, Version]:
    version = next(iter(requirement.specifier)).version
    return canonicalize_name(requirement.name), Version(version)


def pip_download(requirement: Requirement, folder: Path, target: Target, with_dependencies: bool) -> None:
    """One requirement into `folder`, by pip. Raises RuntimeError with pip's words when it does not come."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-q", "--progress-bar", "off"]
    if not with_dependencies:
        command.append("--no-deps")
    done = subprocess.run(
        [*command, *target.pip_options(), "-d", str(folder), str(requirement)], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(
            f"pip could not download {requirement} for Python {target.python} on {target.arch}:\n{done.stderr.strip()}"
        )


def fill(
    out: Path,
    parts: Iterable[str],
    target: Target,
    pins: list[Requirement],
    download: Callable[[Requirement, Path, Target, bool], None] = pip_download,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Downloads what is missing in `out/wheels` and writes install.sh, NOTICE and manifest.json.

    Args:
        out: the bundle's folder; may hold an earlier bundle for the same target.
        parts: names of PARTS.
        target: the machine it is for.
        pins: lines of constraints.txt.
        download: fetches one requirement (tests put their own here).
        say: called with a line per wheel.

    Raises:
        ValueError: when `out` holds a bundle for another target.
        RuntimeError: when a download fails; what came so far is kept for the next call.
    """
    manifest = out / "manifest.json"
    if manifest.is_file():
        before = json.loads(manifest.read_text())
        if (before["python"], before["arch"]) != (target.python, target.arch):
            raise ValueError(
                f"{out} is a bundle for Python {before['python']} on {before['arch']}: choose another folder"
            )
    wheels = out / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    # written first, so that an interrupted bundle still knows whom it is for
    manifest.write_text(json.dumps({"python": target.python, "arch": target.arch}))
    outcome = Outcome()
    for part in parts:
        total = 0
        wanted = requirements(part, pins)
        for number, requirement in enumerate(wanted, 1):
            whole = part == "torch"  # NVIDIA's libraries are pinned by torch itself
            file = present(wheels).get(_key(requirement))
            if file and not whole:
                outcome.kept.append(file.name)
            else:
                before = set(wheels.glob("*.whl"))
                download(requirement, wheels, target, whole)
                file = present(wheels).get(_key(requirement))
                if file is None:
                    raise RuntimeError(f"pip said nothing, and {requirement} is not in {wheels}")
                outcome.fetched += sorted(f.name for f in set(wheels.glob("*.whl")) - before)
            total += file.stat().st_size
            say(f"{part} {number}/{len(wanted)}  {file.name}  {megabytes(file.stat().st_size)}")
        outcome.sizes[part] = total
    (out / "NOTICE").write_text(NOTICE)
    install = out / "install.sh"
    install.write_text(INSTALL.format(python=target.python, arch=target.arch, here=out.name))
    install.chmod(0o755)
    files = {f.name: {"bytes": f.stat().st_size, "sha256": _sha256(f)} for f in sorted(wheels.glob("*.whl"))}
    manifest.write_text(json.dumps({"python": target.python, "arch": target.arch, "files": files}, indent=1) + "\n")
    return outcome


def archive(out: Path, parts: Iterable[str], pins: list[Requirement], say: Callable[[str], None] = print) -> list[Path]:
    """Packs each part, unpacked, into `out/PART.tar.xz`: a third of the wheels' size, for narrow ways. Existing ones stay.

    To use one: `mkdir site && tar xJf PART.tar.xz -C site`, then PYTHONPATH as in install.sh. The part "torch" is refused.
    """
    made = []
    wheels = present(out / "wheels")
    for part in parts:
        if part == "torch":
            raise ValueError("PyTorch is too large for an archive: take its wheels, or leave the part out")
        path = out / f"{part}.tar.xz"
        if path.is_file():
            say(f"{path.name}  {megabytes(path.stat().st_size)}  (there already)")
            continue
        say(f"packing {path.name}; CuTe DSL takes about five minutes")
        with tempfile.TemporaryDirectory() as folder:
            for requirement in requirements(part, pins):
                with zipfile.ZipFile(wheels[_key(requirement)]) as wheel:
                    wheel.extractall(folder)
            _pack(Path(folder), path)
        say(f"{path.name}  {megabytes(path.stat().st_size)}")
        made.append(path)
    return made


def _pack(folder: Path, path: Path) -> None:
    """tar of a tree without what is not needed to run, compressed as hard as xz can; appears whole or not at all."""
    # x86 code packs better after its filter; a large dictionary sees the same tables in several libraries
    filters = [
        {"id": lzma.FILTER_X86},
        {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 192 << 20},
    ]

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = Path(entry.name).parts
        return None if entry.name.endswith(".a") or "tests" in parts or "__pycache__" in parts else entry

    partial = path.with_suffix(".part")
    with (
        lzma.open(partial, "wb", format=lzma.FORMAT_XZ, filters=filters) as stream,
        tarfile.open(fileobj=stream, mode="w|") as tar,
    ):
        tar.add(folder, arcname=".", filter=wanted)
    partial.replace(path)


def megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
