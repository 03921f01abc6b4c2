import random

import pytest

from bench.cases import CPU_CASES, ELEMENT_BYTES, GRIDS, HIDDEN, SEQLENS, TOKENS, Attention, Gemm, paper


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_flops_are_the_multiplications_and_additions_of_both_products(causal):
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    case = Attention(rng.choice([8, 64]), causal, rng.randint(1, 3), rng.randint(2, 40), rng.randint(1, 4))
    square = sum(2 * case.head_dim + 2 * case.head_dim for _ in range(case.seqlen**2)) * case.heads * case.batch
    assert case.flops == (square / 2 if causal else square), f"seed {seed}"


def test_bytes_are_those_of_the_tensors():
    case = Attention(64, False, 2, 100, 3)
    assert case.bytes("bf16") == 4 * (2 * 100 * 3 * 64) * 2
    assert Gemm(10).bytes("fp8") == 100 * (1 + 1 + 2)
    assert set(ELEMENT_BYTES) == {"bf16", "fp16", "fp8", "fp32"}


def test_the_full_grid_is_the_papers():
    shapes = [case for case in GRIDS["full"] if isinstance(case, Attention)]
    assert len(shapes) == len(set(shapes)) == 3 * 2 * len(SEQLENS)
    for case in shapes:
        assert case.heads * case.head_dim == HIDDEN
        assert case.batch * case.seqlen == max(TOKENS, case.seqlen)
    assert {(c.head_dim, c.causal, c.seqlen) for c in shapes} == {
        (d, m, s) for d in (64, 128, 256) for m in (False, True) for s in SEQLENS
    }


@pytest.mark.parametrize("name", sorted(GRIDS))
def test_a_time_limit_costs_the_least_wanted_first(name):
    gemm, first, second, *_ = GRIDS[name]
    assert isinstance(gemm, Gemm)
    assert first == paper(128, False, TOKENS) and second == paper(128, True, TOKENS)
    assert set(GRIDS[name]) <= set(GRIDS["full"])


def test_small_and_tiny_keep_what_a_kernel_is_compiled_for():
    for case in (*GRIDS["full"][1:], *CPU_CASES):
        for other in (case.small(), case.tiny()):
            assert (other.head_dim, other.causal) == (case.head_dim, case.causal)
        assert case.small().seqlen % 64, "the check must have a ragged last tile"
