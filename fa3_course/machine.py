"""What this machine has, what is missing, and the command that mends it: the findings of `fa3 doctor`.

Looking (the `look_*` functions) is kept apart from judging (the `judge_*` functions, pure), so that tests can judge
machines that are not at hand.
"""

import ctypes
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

from fa3_course import paths

PIP = f"{sys.executable} -m pip"
TESTED_PYTHON = ((3, 11), (3, 12))
TESTED_CUDA_DRIVER = 13  # CUDA major of the drivers that the kernels were run with
FREE_DISK_GB = 2.0  # compiled kernels, notebooks, benchmark rows
FREE_GPU_GB = 8.0  # the largest shape of the paper's grid, with inputs rotated past L2

Status = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fix` is a command, or an instruction, and stands on every line that is "bad"."""

    name: str
    status: Status
    found: str
    expected: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Gpu:
    """What the driver and PyTorch say about the first GPU."""

    name: str
    capability: tuple[int, int]
    memory_gb: float
    free_gb: float
    mig: bool = False
    processes: int = 0


# --- Python and packages ---------------------------------------------------------------------------------------------


def judge_python(version: tuple[int, int]) -> Finding:
    found = ".".join(map(str, version))
    tested = ", ".join(".".join(map(str, v)) for v in TESTED_PYTHON)
    if version < TESTED_PYTHON[0]:
        return Finding(
            "Python", "bad", found, ">= 3.11", "install Python 3.11 or newer, then: make PYTHON=python3.11 demo"
        )
    return Finding("Python", "ok" if version in TESTED_PYTHON else "warn", found, f"tested: {tested}")


def judge_platform(system: str, machine: str) -> Finding:
    found = f"{system} {machine}"
    if system == "Linux" and machine in ("x86_64", "aarch64"):
        return Finding("Platform", "ok", found)
    return Finding(
        "Platform",
        "warn",
        found,
        "Linux on x86-64 or arm64",
        "here run chapter 1's NumPy rungs and the simulator; Triton and CuTe DSL have wheels for Linux only",
    )


def look_requirements(pyproject: Path) -> list[tuple[str, Requirement]]:
    """(group, requirement) for every direct dependency that applies on this platform; groups: core, course, test.

    Other groups, such as `activations`, are for who maintains the course; a machine without them lacks nothing.
    """
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    groups = {"core": project["dependencies"], "course": extras["course"], "test": extras["test"]}
    parsed = [(group, Requirement(line)) for group, lines in groups.items() for line in lines]
    return [(group, r) for group, r in parsed if r.marker is None or r.marker.evaluate()]


def look_pins(constraints: Path) -> dict[str, str]:
    """Package -> the version that `make` installs and the tests run with."""
    lines = (line.partition("#")[0].strip() for line in constraints.read_text().splitlines())
    return {r.name: next(iter(r.specifier)).version for r in map(Requirement, filter(None, lines))}


def look_also_tested(pyproject: Path) -> dict[str, set[str]]:
    """Package -> other versions that were tested."""
    found: dict[str, set[str]] = {}
    for line in tomllib.loads(pyproject.read_text())["tool"]["fa3-doctor"]["also-tested"]:
        name, version = line.split("==")
        found.setdefault(name, set()).add(version)
    return found


def look_installed(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def judge_package(
    group: str,
    requirement: Requirement,
    installed: Mapping[str, str],
    pins: Mapping[str, str],
    also_tested: Mapping[str, set[str]] = MappingProxyType({}),
) -> Finding:
    """Missing or outside the supported range is bad (for what only tests need, a warning); untested is a warning."""
    name, pin = requirement.name, pins.get(requirement.name, "")
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    fix = f"{PIP} install '{name}{extras}{f'=={pin}' if pin else requirement.specifier}'"
    tested = {Version(v).public for v in (pin, *also_tested.get(name, ())) if v}
    expected = f"tested: {', '.join(sorted(tested, reverse=True))}" if tested else str(requirement.specifier)
    serious: Status = "warn" if group == "test" else "bad"
    found = installed.get(name)
    if found is None:
        return Finding(name, serious, "missing", expected, fix)
    if not requirement.specifier.contains(found, prereleases=True):
        return Finding(name, serious, found, f"{requirement.specifier} ({expected})", fix)
    # 2.13.0+cpu is the tested 2.13.0 in another build
    if tested and Version(found).public not in tested:
        return Finding(name, "warn", found, expected)
    return Finding(name, "ok", found, expected)


def judge_namesake(installed: Mapping[str, str]) -> list[Finding]:
    """`nvidia-cutlass` is another package that also installs modules named cutlass*."""
    if "nvidia-cutlass" not in installed:
        return []
    return [
        Finding(
            "nvidia-cutlass",
            "bad",
            installed["nvidia-cutlass"],
            "absent: the DSL is nvidia-cutlass-dsl",
            f"{PIP} uninstall -y nvidia-cutlass",
        )
    ]


def look_dsl() -> Finding:
    """Imports CuTe DSL in a process of its own: a broken native library must not end the report."""
    name = "CuTe DSL imports"
    code = "import cutlass, cutlass.cute; print(cutlass.__version__)"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return Finding(
            name, "bad", "no answer within 120 s", fix=f"{sys.executable} -X importtime -c 'import cutlass.cute'"
        )
    if done.returncode == 0:
        return Finding(name, "ok", done.stdout.strip().splitlines()[-1])
    reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    pin = look_pins(paths.checkout() / "constraints.txt").get("nvidia-cutlass-dsl", "")
    return Finding(name, "bad", reason, fix=f"{PIP} install --force-reinstall 'nvidia-cutlass-dsl[cu13]=={pin}'")


# --- GPU, driver, CUDA -----------------------------------------------------------------------------------------------


def look_driver() -> int | None:
    """CUDA version that the driver supports (13000 for 13.0), or None without a driver."""
    try:
        version = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return version.value


def look_gpu() -> Gpu | None:
    """The first GPU that PyTorch can use, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(0)
    mig, processes = False, 0
    if smi := shutil.which("nvidia-smi"):

        def ask(query: str) -> str:
            done = subprocess.run([smi, "-i", "0", query, "--format=csv,noheader"], capture_output=True, text=True)
            return done.stdout.strip()

        mig = ask("--query-gpu=mig.mode.current") == "Enabled"
        processes = len(ask("--query-compute-apps=pid").split())
    return Gpu(
        torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0), total / 1e9, free / 1e9, mig, processes
    )


def judge_gpu(gpu: Gpu | None, driver: int | None, torch_cuda: str | None) -> list[Finding]:
    """The GPU lines. No GPU at all is fine (the laptop door); a GPU that PyTorch cannot use is not."""
    if driver is None:
        return [
            Finding(
                "GPU",
                "ok",
                "none",
                "rungs run in NumPy and Triton's interpreter; kernels compile, and run on a Hopper only",
            )
        ]
    version = f"{driver // 1000}.{driver % 1000 // 10}"
    findings = [
        Finding("Driver", "ok", f"CUDA {version}", f"tested: CUDA {TESTED_CUDA_DRIVER}")
        if driver // 1000 >= TESTED_CUDA_DRIVER
        else Finding(
            "Driver",
            "bad",
            f"CUDA {version}",
            f"CUDA {TESTED_CUDA_DRIVER}",
            "install NVIDIA driver 580 or newer and reboot",
        )
    ]
    if torch_cuda is None:
        fix = f"PIP_EXTRA_INDEX_URL= {PIP} install --force-reinstall -c constraints.txt torch"
        return [
            *findings,
            Finding(
                "PyTorch's CUDA", "bad", "PyTorch is a CPU build", "a CUDA build, since this machine has a driver", fix
            ),
        ]
    findings.append(Finding("PyTorch's CUDA", "ok", torch_cuda))
    if gpu is None:
        return [
            *findings,
            Finding(
                "GPU",
                "bad",
                "PyTorch sees none",
                "a visible GPU",
                "nvidia-smi; echo $CUDA_VISIBLE_DEVICES (unset it if empty)",
            ),
        ]
    capability = ".".join(map(str, gpu.capability))
    found = f"{gpu.name}, sm_{gpu.capability[0]}{gpu.capability[1]}, {gpu.memory_gb:.0f} GB"
    if gpu.capability == (9, 0):
        findings.append(Finding("GPU", "ok", found))
    else:
        findings.append(
            Finding(
                "GPU",
                "warn",
                found,
                f"Hopper (9.0) for the CuTe kernels, this is {capability}",
                "Triton rungs run here; the rest needs an H100 or H200",
            )
        )
    if gpu.free_gb < FREE_GPU_GB:
        findings.append(
            Finding(
                "GPU memory",
                "warn",
                f"{gpu.free_gb:.1f} GB free",
                f"{FREE_GPU_GB:.0f} GB for the benchmarks",
                "nvidia-smi  # who holds it",
            )
        )
    if gpu.mig:
        findings.append(
            Finding(
                "MIG",
                "warn",
                "enabled",
                "a slice is slower than the stored rows",
                "ask the machine's owner for a whole GPU",
            )
        )
    if gpu.processes:
        findings.append(
            Finding(
                "GPU alone",
                "warn",
                f"{gpu.processes} other processes",
                "none while measuring",
                "nvidia-smi  # who they are",
            )
        )
    return findings


def look_torch() -> list[Finding]:
    """Imports PyTorch and judges the GPU with it."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of CUDA is missing or of another version
        fix = f"{PIP} install --force-reinstall -c constraints.txt torch"
        return [Finding("PyTorch imports", "bad", str(error).splitlines()[0], fix=fix)]
    return judge_gpu(look_gpu(), look_driver(), torch.version.cuda)


# --- tools, disk, network --------------------------------------------------------------------------------------------


def look_nvdisasm() -> Finding:
    from fa3_course.sass import ToolMissing, nvdisasm

    try:
        return Finding("nvdisasm", "ok", nvdisasm())
    except ToolMissing:
        return Finding("nvdisasm", "bad", "missing", "for `fa3 sass`", f"{PIP} install nvidia-cuda-nvdisasm")


def judge_disk(folder: Path, free_gb: float) -> Finding:
    if free_gb >= FREE_DISK_GB:
        return Finding("Disk", "ok", f"{free_gb:.0f} GB free")
    return Finding(
        "Disk",
        "bad",
        f"{free_gb:.1f} GB free at {folder}",
        f"{FREE_DISK_GB:.0f} GB",
        f"{PIP} cache purge; df -h {folder}",
    )


def look_network() -> Finding:
    """Asks pip's own index, so that a proxy or a mirror counts as it is set up."""
    expected = "only installing needs it"
    ask = [sys.executable, "-m", "pip", "index", "versions", "nvidia-cutlass-dsl"]
    try:
        done = subprocess.run([*ask, "--timeout", "5", "--retries", "0"], capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        done = None
    if done is not None and done.returncode == 0:
        return Finding("Package index", "ok", "reachable", expected)
    return Finding(
        "Package index", "warn", "not reachable", expected, "on a machine with a network: fa3 bundle OUT; copy OUT here"
    )


# --- everything -----------------------------------------------------------------------------------------------------


def examine(network: bool = True) -> list[Finding]:
    """Every finding for this machine, in the order in which they are shown."""
    root = paths.checkout()
    requirements = look_requirements(root / "pyproject.toml")
    pins, also_tested = look_pins(root / "constraints.txt"), look_also_tested(root / "pyproject.toml")
    installed = look_installed([r.name for _, r in requirements] + ["nvidia-cutlass"])
    findings = [judge_python(sys.version_info[:2]), judge_platform(platform.system(), platform.machine())]
    if "torch" in installed:
        findings += look_torch()
    findings += [judge_package(group, r, installed, pins, also_tested) for group, r in requirements]
    findings += judge_namesake(installed)
    if "nvidia-cutlass-dsl" in installed:
        findings.append(look_dsl())
    if platform.system() == "Linux":
        findings.append(look_nvdisasm())
    findings.append(judge_disk(root, shutil.disk_usage(root).free / 1e9))
    if network:
        findings.append(look_network())
    return findings
