"""The card during a run: SM clock and power through NVML, and the facts that a run records about its machine."""

import contextlib
import ctypes
import os
import platform
import statistics
import subprocess
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from fa3_course.results import ROOT

_SM_CLOCK = 1  # NVML_CLOCK_SM
_POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT; nvmlDeviceGetPowerUsage is a mean over a second on Hopper


class _FieldValue(ctypes.Structure):
    """nvmlFieldValue_t; the value is a union of 8 bytes, of which power uses an unsigned int."""

    _fields_ = (
        ("field", ctypes.c_uint32),
        ("scope", ctypes.c_uint32),
        ("timestamp", ctypes.c_int64),
        ("latency_us", ctypes.c_int64),
        ("kind", ctypes.c_uint32),
        ("status", ctypes.c_uint32),
        ("value", ctypes.c_uint64),
    )


class Nvml:
    """The few NVML calls that are needed, on the driver's own library: no package to install.

    Raises OSError where there is no NVIDIA driver, RuntimeError where NVML does not know the device.
    """

    def __init__(self, device: int = 0):
        self.lib = self._library()
        self._check(self.lib.nvmlInit_v2(), "nvmlInit")
        self.handle = ctypes.c_void_p()
        # by UUID: CUDA_VISIBLE_DEVICES renumbers CUDA's devices but not NVML's
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        self._check(self.lib.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self.handle)), "nvmlDeviceGetHandleByUUID")

    @staticmethod
    def _library() -> ctypes.CDLL:
        """The driver's NVML: on the loader's path, or beside the libcuda that this process has loaded."""
        name = "libnvidia-ml.so.1"
        try:
            return ctypes.CDLL(name)
        except OSError:
            lines = Path("/proc/self/maps").read_text().splitlines()
            loaded = next((line.split()[-1] for line in lines if "/libcuda.so" in line), name)
            return ctypes.CDLL(str(Path(loaded).with_name(name)))

    @staticmethod
    def _check(status: int, name: str) -> None:
        if status:
            raise RuntimeError(f"{name} returned {status}")

    def _uint(self, name: str, *args: object) -> int | None:
        value = ctypes.c_uint()
        return None if getattr(self.lib, name)(self.handle, *args, ctypes.byref(value)) else value.value

    def sm_mhz(self) -> float | None:
        return self._uint("nvmlDeviceGetClockInfo", _SM_CLOCK)

    def watts(self) -> float | None:
        field = _FieldValue(field=_POWER_INSTANT)
        status = self.lib.nvmlDeviceGetFieldValues(self.handle, 1, ctypes.byref(field))
        if status == 0 and field.status == 0:
            return (field.value & 0xFFFFFFFF) / 1e3
        milliwatts = self._uint("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1e3

    def power_limit_w(self) -> float | None:
        milliwatts = self._uint("nvmlDeviceGetEnforcedPowerLimit")
        return None if milliwatts is None else milliwatts / 1e3

    def driver(self) -> str | None:
        text = ctypes.create_string_buffer(96)
        return None if self.lib.nvmlSystemGetDriverVersion(text, 96) else text.value.decode()


def open_nvml() -> Nvml | None:
    """NVML for the current device; None without a card or where the driver refuses."""
    if not torch.cuda.is_available():
        return None
    try:
        return Nvml(torch.cuda.current_device())
    except (OSError, RuntimeError, AttributeError) as error:
        print(f"no clocks and power in this run: {error}", flush=True)
        return None


class Sampler:
    """Reads clock and power every few milliseconds in a thread, but only `during` a measurement, so that the host times
    between measurements are not disturbed."""

    def __init__(self, nvml: object | None, period_s: float = 0.005):
        self.nvml, self.period_s = nvml, period_s
        self._now: str | None = None
        self._readings: dict[str, list[tuple[float | None, float | None]]] = {}  # name -> (MHz, W)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Sampler":
        if self.nvml is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self.nvml is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self.period_s):
            name = self._now
            if name is not None:
                reading = self.nvml.sm_mhz(), self.nvml.watts()
                if self._now == name:
                    self._readings.setdefault(name, []).append(reading)

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Readings inside the block belong to `name`."""
        self._now = name
        try:
            yield
        finally:
            self._now = None

    def take(self, name: str) -> tuple[float | None, float | None]:
        """Medians (MHz, W) of all readings of `name`, which are then forgotten; None where there were none."""
        columns = list(zip(*self._readings.pop(name, []), strict=True)) or [(), ()]
        mhz, watts = ([x for x in column if x is not None] for column in columns)
        return (statistics.median(mhz) if mhz else None), (statistics.median(watts) if watts else None)


def version(*packages: str) -> str | None:
    """Version of the first of the packages that is installed."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def git_state() -> tuple[str | None, bool | None]:
    """(commit, whether tracked files differ from it). FA3_BENCH_COMMIT, where it is set, names the commit that a copy without the
    checkout's history was made from; nothing is known of differences then. Neither: None."""
    if os.environ.get("FA3_BENCH_COMMIT"):
        return os.environ["FA3_BENCH_COMMIT"], None
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
        )
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    return commit.stdout.strip(), bool(status.stdout.strip())


def machine() -> dict:
    """The fields of `fa3_course.results.Run` that describe card and software."""
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cutlass_dsl": version("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base"),
    }
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(torch.cuda.current_device())
        nvml = open_nvml()
        facts |= {
            "gpu": card.name,
            "cuda": torch.version.cuda,
            "cudnn": str(torch.backends.cudnn.version()),
            "driver": nvml.driver() if nvml else None,
            "power_limit_w": nvml.power_limit_w() if nvml else None,
            "l2_bytes": card.L2_cache_size,
            "sms": card.multi_processor_count,
        }
    return facts
