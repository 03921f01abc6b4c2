"""The `fa3` command as a whole, the demo, and the ladder that README shows."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fa3_course import cli, demo_view, ladder, paths, results, rungs
from fa3_course.commands import bench, demo

ROOT = paths.checkout()


def fa3(*arguments: str):
    return CliRunner().invoke(cli.app, list(arguments))


# --- the frame -------------------------------------------------------------------------------------------------------


def test_help_names_every_command_and_imports_none():
    code = "import sys, fa3_course.cli as c; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout.split()
        == ["False"] * 2
    )
    done = fa3("--help")
    assert done.exit_code == 0
    assert all(f" {name} " in done.output for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_its_own_help(name):
    done = subprocess.run(
        [sys.executable, "-m", "fa3_course", name, "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_unknown_command_and_option():
    assert fa3("nonsense").exit_code == 2
    done = fa3("ladder", "--nonsense")
    assert done.exit_code == 2 and "--nonsense" in done.output


@pytest.mark.parametrize(
    "missing, message",
    [
        ("torch", "torch is not installed; `fa3 doctor`"),
        ("fa3_course.commands.demo", "this version of the course has no module"),
    ],
)
def test_what_is_missing_is_one_line(monkeypatch, missing, message):
    monkeypatch.delitem(sys.modules, "fa3_course.commands.demo", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)  # importing it raises ModuleNotFoundError
    monkeypatch.setattr(sys, "argv", ["fa3", "demo"])
    with pytest.raises(SystemExit, match=message):
        cli.main()


def test_without_a_checkout_one_line_says_so(monkeypatch):
    monkeypatch.setattr(paths, "_is_checkout", lambda folder: False)
    monkeypatch.setattr(sys, "argv", ["fa3", "ladder"])
    with pytest.raises(SystemExit, match=r"fa3: this needs the repository .*clone it"):
        cli.main()


@pytest.mark.parametrize("command", [("ladder", "--plot"), ("sass", "2", "--d", "64", "--dump")])
def test_a_file_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, command):
    (tmp_path / "file").touch()
    if command[0] == "sass":
        pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    monkeypatch.setattr(sys, "argv", ["fa3", *command, str(tmp_path / "file" / "x")])
    with pytest.raises(SystemExit, match=rf"^fa3 {command[0]}: .*{tmp_path.name}"):
        cli.main()


def test_bench_gets_its_arguments_as_they_are(monkeypatch):
    calls = []

    def run(command, cwd):
        calls.append((command, cwd))
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(bench.subprocess, "run", run)
    assert fa3("bench", "--quick", "--kernels", "fa3_lib,2", "--help").exit_code == 3
    assert calls == [([sys.executable, "-m", "bench.forward", "--quick", "--kernels", "fa3_lib,2", "--help"], ROOT)]


# --- the demo --------------------------------------------------------------------------------------------------------


def test_demo_runs_what_this_machine_can_run(tmp_path):
    plot = tmp_path / "demo.png"
    done = fa3("demo", "--json", "--plot", str(plot))
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    by_number = {o["number"]: o for o in shown["rungs"]}
    assert list(by_number) == [r.number for r in rungs.RUNGS]
    for rung in rungs.RUNGS:
        outcome = by_number[rung.number]
        try:
            rung.device(), rung.load()
        except (rungs.RungUnavailable, ImportError):
            assert outcome["error"] is None and outcome["where"]
            continue
        assert outcome["allowed"] and 0 < outcome["error"] <= 2 * shown["yardstick_error"]
        assert outcome["lse_error"] < 5e-2 and outcome["ms"] > 0
    if shown["kernel"]:
        assert shown["kernel"]["spill_store"] == 0 and shown["kernel"]["landmarks"]["HGMMA"] > 0
    with Image.open(plot) as image:
        assert image.width > 1000 and len(image.convert("RGB").getcolors(1 << 24)) > 50


@pytest.mark.parametrize("fault", ["zeros", "nan", "one row"])
def test_demo_refuses_a_wrong_rung(monkeypatch, tmp_path, fault):
    right = rungs.find("lib").load()

    def wrong(q, k, v, softmax_scale=None, causal=False):
        out, lse = right(q, k, v, softmax_scale, causal)
        if fault == "zeros":
            out = torch.zeros_like(out)
        elif fault == "nan":
            out[0, 0, 0, 0] = torch.nan
        else:
            out[0, 5, 0] = out[0, 6, 0]
        return out, lse

    monkeypatch.setattr(rungs, "_library", wrong)
    monkeypatch.setattr(rungs, "RUNGS", (rungs.find("lib"),))
    monkeypatch.setattr(demo, "compile_kernel", lambda: (_ for _ in ()).throw(ImportError("left out in this test")))
    done = fa3("demo", "--plot", str(tmp_path / "x.png"))
    assert done.exit_code == 1
    assert "rung lib is wrong" in done.output
    assert "left out in this test" in done.output


def test_the_map_shows_the_head_and_the_words_that_find_each_other():
    """Against weights computed head by head and sums over pairs of equal words."""
    data = demo.Activations.load()
    words, shown = data.tokens, demo_view.WORDS_SHOWN
    pairs = [
        (i, j)
        for i, a in enumerate(words)
        for j, b in enumerate(words)
        if i != j and a == b and a.removeprefix("##").isalnum()
    ]
    mass = {}
    for layer in range(data.q.shape[0]):
        for head in range(data.q.shape[2]):
            q, k = data.q[layer, :, head].double(), data.k[layer, :, head].double()
            weights = torch.softmax(q @ k.T * q.shape[-1] ** -0.5, -1).tolist()
            for start in range(len(words) - shown + 1):
                inside = range(start, start + shown)
                mass[layer, head, start] = sum(weights[i][j] for i, j in pairs if i in inside and j in inside)
    assert mass[demo_view.strongest_echo(data)] == pytest.approx(max(mass.values()), rel=1e-4)


# --- the ladder ------------------------------------------------------------------------------------------------------


def row(kernel: str, tflops: float, **fields) -> results.Row:
    shape = dict(direction="fwd", dtype="bf16", head_dim=128, causal=False, batch=1, seqlen=16_384, heads=16) | fields
    return results.Row(kernel, ms=1.0, ms_p25=0.9, ms_p75=1.2, tflops=tflops, host_us=12.0, error=2e-3, **shape)


RUN = results.Run(
    "2026-01-02T00:00:00Z",
    "python -m bench.forward",
    gpu="NVIDIA H200",
    rows=(
        results.Row("cublas", "gemm", "bf16", seqlen=8192, ms=1.0, ms_p25=1.0, ms_p75=1.0, tflops=800.0),
        row("fa4", 640.0),
        row("fa3_lib", 600.0, source=("fa3_lib/config.py",), source_hash="of another source"),
        row("fa3_lib", 500.0, causal=True, seqlen=1024),
        row("rung10_fp8", 900.0, rung="10", dtype="fp8"),
        row("rung02_triton_fa2", 320.0, rung="2"),
        results.Row("fa3", "fwd", "bf16", skipped="not installed"),
    ),
)


@pytest.fixture
def stored(monkeypatch, tmp_path):
    """A folder of results with one newer run on a GPU, an older one, and one on a CPU."""
    monkeypatch.setattr(paths, "results", lambda: tmp_path)
    results.write(tmp_path / "new.json", RUN)
    results.write(tmp_path / "old.json", replace(RUN, date="2025-01-02T00:00:00Z", gpu="NVIDIA H100"))
    results.write(tmp_path / "cpu.json", replace(RUN, date="2026-05-02T00:00:00Z", gpu=None))
    return tmp_path


def test_ladder_comes_from_the_newest_gpu_run(stored):
    shown = json.loads(fa3("ladder", "--json").stdout)
    assert (shown["run"], shown["gpu"], shown["seqlen"], shown["cublas_tflops"]) == (
        "new.json",
        "NVIDIA H200",
        16_384,
        {"bf16": 800},
    )
    assert [k["kernel"] for k in shown["kernels"]] == ["rung02_triton_fa2", "rung10_fp8", "fa3_lib", "fa4"]
    library = shown["kernels"][2]
    assert library["tflops"] == {"d128 full": 600} and library["stale"]
    assert json.loads(fa3("ladder", "--json", "--run", "old").stdout)["gpu"] == "NVIDIA H100"
    assert json.loads(fa3("ladder", "--json", "--seqlen", "1024").stdout)["kernels"][2]["tflops"] == {
        "d128 causal": 500
    }


def test_ladder_shows_shares_of_cublas_and_stale_rows(stored, tmp_path):
    done = CliRunner().invoke(cli.app, ["ladder", "--plot", str(tmp_path / "p.png")], env={"COLUMNS": "120"})
    assert done.exit_code == 0
    assert "600 75%" in done.output and "320 40%" in done.output
    assert "fa3_lib *" in done.output and "has changed since" in done.output
    assert Image.open(tmp_path / "p.png").width > 500


def test_ladder_refusals(stored):
    assert "no rows at seqlen 77; there are: 1024, 16384" in fa3("ladder", "--seqlen", "77").output.replace("\n", " ")
    assert "no stored run" in fa3("ladder", "--run", "absent").output
    assert fa3("ladder", "--readme", "--seqlen", "1024").exit_code == 2
    for file in stored.glob("*.json"):
        file.unlink()
    assert fa3("ladder").exit_code == 1


def test_markdown_of_a_run():
    text = ladder.readme_block(RUN)
    assert "| **fa3_lib** | 600 (75%) | 12 us | 2e-03 |" in text
    assert "| FA4 (CuTe DSL) | 640 (80%) | 12 us | 2e-03 |" in text
    assert "cuBLAS: bf16 800" in text and "NVIDIA H200" in text
    assert "No run is stored yet" in ladder.readme_block(None)


def test_readme_shows_the_newest_stored_run():
    """When this fails, a new run was stored: `fa3 ladder --readme`."""
    newest = ladder.chosen_run()
    (block,) = ladder.README_BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert block == ladder.readme_block(newest), "run: fa3 ladder --readme"
    if newest is not None:
        with Image.open(ROOT / ladder.PLOT) as image:
            assert image.text["Source"] == newest.path.name, "run: fa3 ladder --readme"
