"""What `fa3_course.sass` says about kernels whose machine code is known to have, or not to have, something."""

import json
import math

import pytest
from typer.testing import CliRunner

from fa3_course import rungs, sass
from fa3_course.cli import app
from fa3_course.commands.sass import NoMachineCode, report_rung

cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl has wheels for Linux only")
import cutlass.cute as cute  # noqa: E402 (only after the check above)
from cutlass import Float32  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream  # noqa: E402


class Exchange:
    """Each of `threads` threads holds `values` floats at once and multiplies them in two orders."""

    def __init__(self, threads: int, values: int, smem: int):
        self.threads, self.values, self.smem = threads, values, smem

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=[1, 1, 1], block=[self.threads, 1, 1], smem=self.smem, stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        held = cute.make_rmem_tensor((self.values,), Float32)
        for i in cutlass.range_constexpr(self.values):
            held[i] = cute.math.exp2(x[thread + i * self.threads], fastmath=True)
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(self.values):
            y[thread + i * self.threads] = held[i] * held[(7 * i + 3) % self.values]


def report_of(threads: int, values: int, smem: int = 0) -> sass.KernelReport:
    x = make_fake_compact_tensor(Float32, (cute.sym_int(),), assumed_align=16)

    def compile_fn(options: str):
        kernel = Exchange(threads, values, smem)
        return cute.compile(kernel, x, x, make_fake_stream(), options=f"--gpu-arch sm_90a {options}")

    (report,) = sass.compile_report(compile_fn)
    return report


def test_a_small_kernel_is_clean():
    report = report_of(threads=128, values=8, smem=4096)
    assert report.problems() == []
    assert (report.stack, report.spill_store, report.spill_load, report.smem) == (0, 0, 0, 4096)
    assert report.count("MUFU.EX2") == 8 == report.count("LDG")
    assert report.count("BAR") == 1
    assert 8 < report.registers < 64
    assert report.as_dict()["landmarks"]["MUFU.EX2"] == 8


@pytest.mark.filterwarnings("ignore:This static loop has")
def test_a_spill_is_seen():
    """1024 threads leave 64 registers each: 160 live values cannot fit."""
    report = report_of(threads=1024, values=160)
    assert report.registers <= 64
    assert report.stack > 0 and report.spill_store > 0 and report.spill_load > 0
    assert report.count("STL") > 0 and report.count("LDL") > 0
    assert any("spills" in problem for problem in report.problems())


def test_too_much_shared_memory_is_seen():
    """Nothing else says so before the launch fails."""
    assert any("shared memory: 240000" in problem for problem in report_of(128, 8, smem=240_000).problems())


def test_prefixes_end_at_a_dot():
    report = sass.KernelReport(
        "k", 1, 0, sass.Counter({"BAR.SYNC": 2, "BARX": 4, "BAR": 1, "MUFU.EX2": 3, "MUFU.RCP": 5})
    )
    assert report.count("BAR") == 3
    assert report.count("MUFU.EX2") == 3
    assert report.count("MUFU") == 8
    assert report.instructions == 15


@pytest.mark.parametrize("content", [b"", b"not a cubin", b"\x7fELF"], ids=["empty", "text", "cut off"])
def test_other_bytes_are_refused(content):
    with pytest.raises(ValueError, match="cubin"):
        sass.cubin_report(content)


def test_without_a_disassembler_the_command_is_named(monkeypatch):
    def missing(name):
        raise sass.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(sass.metadata, "files", missing)
    monkeypatch.setattr(sass.shutil, "which", lambda name: None)
    monkeypatch.setattr(sass.util, "find_spec", lambda name: None)
    with pytest.raises(sass.ToolMissing, match="pip install nvidia-cuda-nvdisasm"):
        sass.nvdisasm()


@pytest.mark.parametrize(
    "rung", [r.number for r in rungs.RUNGS if r.needs in ("triton", "hopper") or r.number == "lib"]
)
def test_command(rung, tmp_path):
    """Every kernel: none spills, the synchronous rung has no TMA, all later ones load by TMA."""
    dump = tmp_path / "kernel.sass"
    done = CliRunner().invoke(
        app, ["sass", rung, "--d", "64", "--causal", "--dtype", "bf16", "--json", "--dump", str(dump)]
    )
    (report,) = json.loads(done.stdout)
    found = report["landmarks"]
    assert done.exit_code == 0 and report["problems"] == []
    assert found["HGMMA"] > 0 and found["MUFU.EX2"] > 0
    assert (found["UTMALDG"] > 0) == (rung != "2")
    assert dump.read_text().count("HGMMA") == found["HGMMA"]


def test_rung_10_has_eight_bit_products():
    done = CliRunner().invoke(app, ["sass", "10", "--d", "64", "--json"])
    (report,) = json.loads(done.stdout)
    assert done.exit_code == 0 and report["problems"] == []
    assert report["landmarks"]["QGMMA"] > 0 and report["landmarks"]["UTMALDG"] > 0


@pytest.mark.parametrize(
    "arguments, message",
    [(["0"], "no kernel of its own"), (["17"], "no rung '17'"), (["lib", "--d", "12"], "multiple of 8"), (["--dtype", "fp4"], "fp16 or bf16"), (["6", "--dtype", "fp8"], "no fp8 kernel"), (["10", "--dtype", "bf16"], "no bf16 kernel")],
)  # fmt: skip
def test_command_refuses(arguments, message):
    done = CliRunner().invoke(app, ["sass", *arguments])
    assert done.exit_code != 0
    assert message in " ".join((done.output + str(done.exception)).split())


def test_one_triton_source_gives_each_card_its_own_product():
    """Ampere: a warp's mma.sync (HMMA). Hopper: a warpgroup's WGMMA (HGMMA). The same multiply-adds in both."""
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    found = {}
    for capability in (80, 90):
        (report,) = report_rung("2", head_dim=64, causal=False, dtype="bf16", capability=capability)
        names = [name for name in report.opcodes if "MMA" in name]
        assert all(name.startswith("HMMA." if capability == 80 else "HGMMA.") for name in names) and names
        found[capability] = {name.split(".")[1]: report.opcodes[name] for name in names}
    assert list(found[80]) == ["16816"]  # 16 x 8 x 16, by each of the 4 warps that form a warpgroup on Hopper
    hopper = sum(math.prod(map(int, shape.split("x"))) * count for shape, count in found[90].items())
    assert found[80]["16816"] * 16 * 8 * 16 * 4 == hopper


def test_a_cute_kernel_is_for_hopper_only():
    with pytest.raises(NoMachineCode, match="sm_80"):
        report_rung("lib", head_dim=128, causal=False, dtype="bf16", capability=80)
