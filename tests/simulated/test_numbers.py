"""The simulated rungs compute attention: against fp64, and no worse than twice a same-precision computation."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fa3_course import simulated
from fa3_lib.reference import attention, attention_mask
from hopper_sim import HOPPER, GlobalTensor

SHAPES = [  # b, sq, sk, h, hk, d, causal
    (1, 256, 256, 1, 1, 128, False),
    (1, 200, 330, 2, 1, 64, True),
    (2, 130, 77, 2, 2, 64, True),  # rows without keys
    (1, 70, 500, 3, 1, 128, True),
    (1, 150, 190, 1, 1, 256, False),
    (1, 130, 200, 1, 1, 192, True),
    (1, 129, 161, 1, 1, 80, False),  # between two compiled head dims
]
SIXTEEN_BIT = [number for number, rung in simulated.RUNGS.items() if not rung.fp8]


def draw(seed, b, sq, sk, h, hk, d):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape) for shape in ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, d)))


def same_precision(q, k, v, causal, dtype):
    """Attention step by step in `dtype`, scores and softmax in fp32, P rounded: what a kernel may be twice as wrong as."""
    q, k, v = (torch.as_tensor(x).to(dtype) for x in (q, k, v))
    h, hk = q.shape[2], k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(h // hk, 1) for x in (k, v))
    scores = (q.float() @ k.float().transpose(-1, -2)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~attention_mask(q.shape[2], k.shape[2], causal), -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0).to(dtype)
    return (weights @ v).transpose(1, 2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("number", SIXTEEN_BIT)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_against_fp64(number, shape, dtype):
    *dims, causal = shape
    seed = hash((number, shape, dtype)) % 2**31
    print("seed", seed)
    q, k, v = draw(seed, *dims)
    problem = simulated.make_problem(number, q, k, v, causal, dtype=dtype)
    result = simulated.run(number, problem, seed=seed)
    rounded = [torch.from_numpy(x.numpy()) for x in (problem.q, problem.k, problem.v)]
    truth, lse = (x.numpy() for x in attention(*rounded, causal=causal))
    element = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    output = torch.from_numpy(truth).to(element)
    noise = ((output + 0.3 - 0.3).double() - output.double()).abs().max().item()  # as in tests/tolerance.py
    allowed = 2 * np.abs(same_precision(*rounded, causal, element).double().numpy() - truth).max() + 2 * noise
    assert np.abs(result.out - truth).max() <= allowed
    empty = np.isneginf(lse)
    assert np.array_equal(np.isneginf(result.lse), empty)
    assert np.abs(result.lse[~empty] - lse[~empty]).max() < 1e-5
    assert (result.out.transpose(0, 2, 1, 3)[empty] == 0).all()


@pytest.mark.parametrize("number", ["3", "4"])
def test_ctas_that_share_an_sm_give_the_same_bits_sooner(number):
    q, k, v = draw(3, 1, 256, 300, 2, 1, 64)
    resident = simulated.rung(number).resident_ctas(simulated.configuration(number, 64, True))
    assert resident > 1
    alone, shared = (simulated.simulate(number, q, k, v, True, ctas_per_sm=n) for n in (1, resident))
    assert np.array_equal(alone.out, shared.out) and np.array_equal(alone.lse, shared.lse)
    assert shared.report.cycles < alone.report.cycles and shared.report.flops == alone.report.flops


@pytest.mark.parametrize("number", ["10", "11"])
@pytest.mark.parametrize("shape", [(1, 200, 330, 2, 1, 64, True), (1, 140, 290, 1, 1, 128, False)], ids=str)
def test_fp8_against_fp64_of_what_it_was_given(number, shape):
    *dims, causal = shape
    q, k, v = draw(abs(hash(shape)) % 2**31, *dims)
    problem = simulated.make_problem(number, q, k, v, causal)
    result = simulated.run(number, problem)
    from fa3_course.simulated.rung10 import register_order

    # undo transpose, key order and descales: the values that the kernel really multiplies
    hk, sk, group = dims[4], dims[2], dims[3] // dims[4]
    v8 = (
        problem.v.numpy().transpose(0, 3, 1, 2)[:, register_order(problem.v.shape[3])][:, :sk]
        * problem.v_descale[:, None, :, None]
    )
    k8 = problem.k.numpy() * problem.k_descale[:, None, :, None]
    q8 = problem.q.numpy() * np.repeat(problem.q_descale, group, axis=1)[:, None, :, None]
    assert hk == k8.shape[2]
    truth, lse = (
        x.numpy() for x in attention(*(torch.from_numpy(x.astype(np.float64)) for x in (q8, k8, v8)), causal=causal)
    )
    assert np.linalg.norm(result.out - truth) / np.linalg.norm(truth) < 3e-2  # P has 3 mantissa bits
    seen = ~np.isneginf(lse)
    assert np.abs(result.lse[seen] - lse[seen]).max() < 2e-3  # the short accumulator cuts QK
    assert np.abs(q8 - q).max() < np.abs(q).max() / 16


def test_two_level_accumulation_repairs_a_long_sum():
    """V = 1, equal logits, no descale: the answer is 1. FA3 on an H200 gives 16,384 / keys."""
    keys = 17_408  # beyond the 16,384 at which equal terms of 2**8 stop counting
    q, k, v = np.zeros((1, 64, 1, 64)), np.ones((1, keys, 1, 64)), np.ones((1, keys, 1, 64))
    config, means = simulated.configuration("10", 64, False, tile_m=64, tile_n=256), []
    for number in ("10", "11"):
        problem = simulated.make_problem(number, q, k, v, config=config)
        ones = GlobalTensor.input("Vt", np.ones(problem.v.shape), "e4m3")
        problem = replace(problem, v=ones, v_descale=np.ones_like(problem.v_descale))
        means.append(simulated.run(number, problem).out.mean())
    assert abs(means[0] - 16_384 / keys) < 4e-3  # bf16 output
    assert means[1] == 1


@pytest.mark.parametrize("number", simulated.RUNGS)
def test_every_seed_gives_the_same_bits(number):
    """200 orders of events, latencies between nothing and twice their value: clean, and equal."""
    q, k, v = draw(7, 1, 100, 150, 1, 1, 64)
    config = simulated.configuration(number, 64, True, tile_n=32)
    wild, first = HOPPER.with_(jitter=1.0), None
    for seed in range(200):
        result = simulated.simulate(number, q, k, v, True, config=config, machine=wild, seed=seed)
        bits = result.out.tobytes() + result.lse.tobytes()
        first = bits if first is None else first
        assert bits == first, f"seed {seed} gives other bits"


def test_two_query_tiles_and_eight_key_tiles_take_seconds():
    """The size that a lesson runs; a bound on the events, not on the clock of this machine."""
    q, k, v = draw(1, 1, 256, 1024, 1, 1, 128)
    report = simulated.simulate("7", q, k, v).report
    assert report.flops == 4 * 256 * 1024 * 128
    assert len(report.timeline.events) < 5000


def test_refusals_say_what_to_do():
    q, k, v = draw(0, 1, 64, 64, 1, 1, 64)
    cases = [
        (lambda: simulated.simulate("2", q, k, v), "rung 2 has no simulated kernel; there are 3, 4"),
        (lambda: simulated.simulate("5", q, k[:, :, :, :32], v), "want"),
        (lambda: simulated.simulate("5", q[:, :0], k, v), "at least one query"),
        (lambda: simulated.configuration("5", 300, False), "multiple of 8 up to 256"),
        (lambda: simulated.configuration("5", 128, False, stages=4), "shared memory exceeded"),
        (lambda: simulated.configuration("11", 256, False), "take head_dim up to 128, or rung 10"),
        (
            lambda: simulated.simulate("5", q, k, v, True, config=simulated.configuration("5", 64, False)),
            "causal=False",
        ),
        (
            lambda: simulated.simulate(
                "5", q, k, v, config=replace(simulated.configuration("5", 64, False), head_dim_v=128)
            ),
            "would not fit",
        ),
    ]
    for call, match in cases:
        with pytest.raises(ValueError, match=match):
            call()
