"""`fa3 doctor` on machines that are not at hand: what it calls red, and that red always comes with the mending command."""

import json
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from fa3_course import machine, paths
from fa3_course.cli import app

H100 = machine.Gpu("NVIDIA H100", (9, 0), 80.0, 79.0)
PINS = {"triton": "3.7.1", "ruff": "0.17.6"}


def statuses(findings) -> dict[str, str]:
    return {f.name: f.status for f in findings}


@pytest.mark.parametrize(
    "found, status",
    [("3.7.1", "ok"), ("3.7.1+git1", "ok"), ("3.6.0", "ok"), ("3.6.1", "warn"), ("3.5.0", "bad"), (None, "bad")],
    ids=["pin", "pin, other build", "tested too", "in range", "out of range", "missing"],
)
def test_package(found, status):
    installed = {"triton": found} if found else {}
    finding = machine.judge_package("core", Requirement("triton>=3.6"), installed, PINS, {"triton": {"3.6.0"}})
    assert finding.status == status
    assert ("pip install 'triton==3.7.1'" in finding.fix) == (status == "bad")


def test_a_missing_test_tool_is_no_reason_to_stop():
    assert machine.judge_package("test", Requirement("ruff>=0.12"), {}, PINS).status == "warn"


def test_the_mending_command_keeps_extras():
    finding = machine.judge_package(
        "core", Requirement("nvidia-cutlass-dsl[cu13]==4.8.1"), {}, {"nvidia-cutlass-dsl": "4.8.1"}
    )
    assert "'nvidia-cutlass-dsl[cu13]==4.8.1'" in finding.fix


@pytest.mark.parametrize(
    "gpu, driver, torch_cuda, expected",
    [
        (None, None, None, {"GPU": "ok"}),
        (H100, 13000, "13.0", {"Driver": "ok", "PyTorch's CUDA": "ok", "GPU": "ok"}),
        (None, 13000, None, {"Driver": "ok", "PyTorch's CUDA": "bad"}),
        (None, 13000, "13.0", {"Driver": "ok", "PyTorch's CUDA": "ok", "GPU": "bad"}),
        (H100, 12040, "12.8", {"Driver": "bad", "PyTorch's CUDA": "ok", "GPU": "ok"}),
        (
            machine.Gpu("NVIDIA A100", (8, 0), 80.0, 79.0),
            13000,
            "13.0",
            {"Driver": "ok", "PyTorch's CUDA": "ok", "GPU": "warn"},
        ),
        (
            machine.Gpu("NVIDIA H100", (9, 0), 80.0, 3.0, mig=True, processes=2),
            13000,
            "13.0",
            {
                "Driver": "ok",
                "PyTorch's CUDA": "ok",
                "GPU": "ok",
                "GPU memory": "warn",
                "MIG": "warn",
                "GPU alone": "warn",
            },
        ),
    ],
    ids=["laptop", "hopper", "cpu build beside a driver", "hidden gpu", "old driver", "ampere", "busy slice"],
)
def test_gpu(gpu, driver, torch_cuda, expected):
    findings = machine.judge_gpu(gpu, driver, torch_cuda)
    assert statuses(findings) == expected
    assert all(f.fix for f in findings if f.status != "ok")


def test_python_platform_disk_and_namesake():
    assert machine.judge_python((3, 10)).status == "bad" and "PYTHON=" in machine.judge_python((3, 10)).fix
    assert [machine.judge_python(v).status for v in ((3, 11), (3, 14))] == ["ok", "warn"]
    assert machine.judge_platform("Darwin", "arm64").status == "warn"
    assert machine.judge_disk(Path("/x"), 0.5).status == "bad" and "/x" in machine.judge_disk(Path("/x"), 0.5).fix
    (finding,) = machine.judge_namesake({"nvidia-cutlass": "4.2", "nvidia-cutlass-dsl": "4.8.1"})
    assert finding.status == "bad" and "uninstall -y nvidia-cutlass" in finding.fix
    assert machine.judge_namesake({"nvidia-cutlass-dsl": "4.8.1"}) == []


def test_every_direct_dependency_is_pinned_inside_its_range():
    requirements = machine.look_requirements(paths.checkout() / "pyproject.toml")
    pins = machine.look_pins(paths.checkout() / "constraints.txt")
    assert {group for group, _ in requirements} == {"core", "course", "test"}  # nobody else needs `activations`
    assert {r.name for _, r in requirements} <= set(pins)
    assert [r.name for _, r in requirements if not r.specifier.contains(pins[r.name], prereleases=True)] == []


def test_this_machine_json_and_exit_status():
    done = CliRunner().invoke(app, ["doctor", "--json", "--no-network"])
    findings = json.loads(done.stdout)
    bad = [f for f in findings if f["status"] == "bad"]
    assert done.exit_code == (1 if bad else 0)
    assert all(f["fix"] for f in bad)
    assert {"Python", "Platform", "torch", "Disk"} <= {f["name"] for f in findings}


def test_red_lines_show_their_command_unbroken(monkeypatch):
    fix = "pip install 'some-package[extra]==1.0' --with --many --options " + "x" * 80
    monkeypatch.setattr(
        machine, "examine", lambda network: [machine.Finding("some-package", "bad", "missing", "1.0", fix)]
    )
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert fix in done.stdout
    assert "1 to mend" in done.stdout
