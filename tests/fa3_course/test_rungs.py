"""The ladder's registry: complete, honest about machines, and one call for every kind of rung."""

import importlib.util

import pytest
import torch

from fa3_course import paths, rungs
from fa3_lib import reference


def test_every_rung_file_is_registered_under_its_own_number():
    files = {p.relative_to(paths.checkout()).as_posix() for p in paths.checkout().glob("chapters/*/steps/rung*.py")}
    every = (*rungs.RUNGS, rungs.RUNG10)
    assert files == {r.file for r in every if r.number != "lib"}
    for rung in every:
        if rung.number != "lib":
            source = (paths.checkout() / rung.file).read_text()
            assert source.startswith(f'"""Rung {rung.number}: ')
            assert f"/{rung.chapter:02d}_" in rung.file


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("rung", rungs.RUNGS, ids=lambda r: f"rung{r.number}")
def test_run_takes_and_returns_torch_tensors_whatever_the_rung(rung, causal, dtype):
    q, k, v = torch.randn(2, 37, 4, 24), torch.randn(2, 50, 2, 24), torch.randn(2, 50, 2, 24)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    try:
        out, lse = rung.run(q, k, v, 0.3, causal)
    except (rungs.RungUnavailable, ImportError) as reason:
        pytest.skip(str(reason))
    truth, true_lse = reference.attention(q, k, v, 0.3, causal)
    assert (out.dtype, out.device, lse.dtype) == (dtype, q.device, torch.float32)
    # rounding of the output and of P: a few units in the last place
    torch.testing.assert_close(out.double(), truth, atol=8 * torch.finfo(dtype).eps, rtol=4 * torch.finfo(dtype).eps)
    # rung 0 rounds its scores to the tensors' precision
    score = (0.3 * q.float().transpose(1, 2) @ k.float().repeat_interleave(2, 2).permute(0, 2, 3, 1)).abs().max()
    limit = float(score) * torch.finfo(dtype).eps if rung.number == "0" else 1e-4
    torch.testing.assert_close(lse.double(), true_lse, atol=limit, rtol=0)


@pytest.mark.gpu
def test_run_gives_rung_10_its_own_dtypes():
    q, k, v = (torch.randn(2, 130, 2, 64).to(torch.float8_e4m3fn) for _ in range(3))
    out, lse = rungs.find("10").run(q, k, v, causal=True)
    truth, true_lse = reference.attention(q, k, v, causal=True)
    assert (out.dtype, out.device, lse.dtype) == (torch.bfloat16, q.device, torch.float32)
    assert (out.double() - truth).norm() < 0.1 * truth.norm() and (lse.double() - true_lse).abs().max() < 0.05
    with pytest.raises(TypeError, match="quantise it first"):
        rungs.find("10").run(*(x.half() for x in (q, k, v)))


def test_a_rung_that_cannot_run_here_says_what_would_change_it(monkeypatch):
    hopper = rungs.Rung("5", "warp-specialised", 2, "", "nowhere.py", "hopper")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(rungs.RungUnavailable, match=r"Hopper GPU .*fa3 sim"):
        hopper.device()
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else real(name))
    with pytest.raises(rungs.RungUnavailable, match="Linux only"):
        rungs.find("2").where()


@pytest.mark.parametrize("capability, library", [((9, 0), "cuda"), ((8, 0), "cpu"), ((10, 0), "cpu")])
def test_where_a_gpu_of_another_kind_is_used(monkeypatch, capability, library):
    """The library refuses CUDA tensors on other GPUs, so it runs on the CPU beside them; Triton and PyTorch use them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert rungs.find("lib").device().type == library
    assert rungs.find("0").device().type == "cuda"
    assert rungs.find("1").device().type == "cpu"


def test_find():
    assert rungs.find("02") is rungs.find("2")
    assert rungs.find("0").name == "eager"
    assert rungs.find("07b").name == "overlap alone"
    assert rungs.find("10") is rungs.RUNG10


def test_the_hash_follows_the_source(monkeypatch, tmp_path):
    (tmp_path / "chapters").mkdir()
    file = tmp_path / "chapters" / "r.py"
    file.write_text("a")
    monkeypatch.setattr(paths, "checkout", lambda: tmp_path)
    rung = rungs.Rung("1", "r", 1, "", "chapters/r.py", "numpy")
    before = rung.source_hash()
    assert rung.source_hash() == before
    file.write_text("b")
    assert rung.source_hash() != before
