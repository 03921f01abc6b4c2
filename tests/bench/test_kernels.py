"""The check before the clock: a kernel with a wrong answer gets no time."""

import random

import pytest
import torch

from bench import kernels
from bench.cases import CPU_CASES, GEMM, paper
from bench.kernels import Kernel
from fa3_lib.reference import attention

FULL, CAUSAL = CPU_CASES


def right(q, k, v, causal):
    return attention(q, k, v, causal=causal)[0].to(q.dtype)


def cpu_kernel(call, name="mine", dtype="bf16", **more):
    return Kernel(name, dtype, lambda: call, device="cpu", timer="cpu", **more)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("case", [FULL, CAUSAL], ids=str)
def test_a_right_kernel_passes(case, dtype):
    seed = random.randrange(10**6)
    error = kernels.check(cpu_kernel(right, dtype=dtype), case, seed)
    assert 0 < error < kernels.ERROR_LIMITS[dtype] / 4, f"seed {seed}"


def test_a_right_gemm_passes():
    product = cpu_kernel(lambda a, b: (a.double() @ b.double().T).to(a.dtype), direction="gemm")
    assert 0 < kernels.check(product, GEMM, random.randrange(10**6)) < 4e-3


@pytest.mark.parametrize("case", [FULL, CAUSAL], ids=str)
def test_torchs_attention_behind_the_call_convention(case):
    """The peers' adapter, with the one backend that runs on a CPU."""
    peer = Kernel("math", "bf16", lambda: kernels._sdpa("MATH"), device="cpu", timer="cpu")
    assert 0 < kernels.check(peer, case, random.randrange(10**6)) < 1e-2
    for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        assert callable(kernels._sdpa(backend))


def unwritten_tail(q, k, v, causal):
    out = right(q, k, v, causal)
    out[:, 512:] = torch.nan  # what a poisoned buffer shows where a kernel forgot its ragged last tile
    return out


cached = []


def first_answer_again(q, k, v, causal):
    cached.append(right(q, k, v, causal))
    return cached[0]


WRONG = {
    "zeros": lambda q, k, v, causal: torch.zeros_like(q),
    "NaN tail": unwritten_tail,
    "mask ignored": lambda q, k, v, causal: right(q, k, v, False),
    "no scale": lambda q, k, v, causal: attention(q, k, v, softmax_scale=1.0, causal=causal)[0],
    "heads swapped": lambda q, k, v, causal: right(q, k, v, causal).flip(2),
    "layout": lambda q, k, v, causal: right(q, k, v, causal).transpose(1, 2),
    "cached": first_answer_again,
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_wrong_kernel_is_refused(name):
    seed = random.randrange(10**6)
    kernel = cpu_kernel(WRONG[name], name)
    with pytest.raises(ValueError, match="wrong: "):
        for turn in range(2):  # a cached answer is right once
            kernels.check(kernel, CAUSAL, seed + turn)


def test_inputs_are_drawn_anew_for_each_seed_and_the_same_for_one():
    one, again, other = (kernels.inputs(FULL, "bf16", "cpu", seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0], one[1])
    assert one[0].shape == (FULL.batch, FULL.seqlen, FULL.heads, FULL.head_dim)


def test_unknown_kernels_are_refused_with_those_known():
    known = kernels.candidates()
    with pytest.raises(ValueError, match=r"unknown kernel fa9; known are .*fa3_lib"):
        kernels.chosen(known, "fa3,fa9")
    assert [k.label for k in kernels.chosen(known, "fa3")] == ["fa3/bf16", "fa3/fp8"]
    assert [k.label for k in kernels.chosen(known, "fa3/fp8")] == ["fa3/fp8"]
    assert [k.label for k in kernels.chosen(known, "10,fa3_lib")] == ["fa3_lib/bf16", "rung10_fp8/fp8", "fa3_lib/fp8"]
    assert [k.rung for k in kernels.chosen(known, "0,1")] == ["0", "1"]
    at_128, at_64 = paper(128, True, 1024), paper(64, False, 1024)
    (limited,) = kernels.chosen(known, "fa3/bf16@128")
    assert limited.meant_for(at_128) and not limited.meant_for(at_64)
    (unlimited,) = kernels.chosen(known, "fa3/bf16@128,fa3/bf16")
    assert unlimited.meant_for(at_128) and unlimited.meant_for(at_64)
    with pytest.raises(ValueError, match="fa3"):
        kernels.chosen(known, "fa3@x")
    assert kernels.chosen(known, None) == known
    rungs = kernels.chosen(known, "rungs")
    assert len(rungs) >= 3 and all(k.source for k in rungs) and "fa3_lib" not in [k.name for k in rungs]


def test_unfused_kernels_are_refused_before_they_fill_the_card():
    eager = cpu_kernel(right, bytes_per_score=16)
    assert "GiB" in eager.refuses(paper(64, False, 16384), free_bytes=100 << 30)
    assert eager.refuses(paper(64, False, 1024), free_bytes=100 << 30) is None
    assert cpu_kernel(right).refuses(paper(64, False, 32768), free_bytes=1) is None
