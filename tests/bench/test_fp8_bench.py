"""The FP8 benchmark without a card: what it would measure, and that its sweep knows which tiles fit."""

import pytest
import torch

from bench import fp8, kernels
from fa3_lib.fp8_config import HEAD_DIMS, ONE_LEVEL_TILES, TILES


def test_dry_run_lists_every_kernel_of_every_case(capsys):
    assert fp8.main(["--dry-run", "--grid", "small"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 19 and lines[0].endswith("cublas/fp8")
    for name in ("fa3/fp8", "fa3_lib/fp8", "fa3_lib one level/fp8", "fa3_lib kernel/fp8", "transpose_v/fp8"):
        assert all(name in line for line in lines[1:])
    assert fp8.main(["--dry-run", "--kernels", "fa3,transpose_v"]) == 0
    assert "fa3_lib" not in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where it cannot run")
def test_without_a_card_it_says_so(capsys):
    with pytest.raises(SystemExit):
        fp8.main([])
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_the_sweep_holds_the_chosen_tiles(d):
    tried = [v.config for v in fp8.variants(d, False) if not v.problem]
    assert len(tried) >= 5 and len(set(tried)) == len(tried)
    for two_level, chosen in ((True, TILES[d]), (False, ONE_LEVEL_TILES[d])):
        assert chosen in [(c.tile_m, c.tile_n, c.pv_columns, c.ping_pong) for c in tried if c.two_level == two_level]


def test_parts_of_the_call_give_its_output():
    """The kernel alone on a V that was transposed before, as it is measured apart."""
    q, k, v = (torch.randn(1, 40, 2, 64).to(torch.float8_e4m3fn) for _ in range(3))
    whole, kernel = (k for k in kernels.fp8_kernels() if k.name in ("fa3_lib", "fa3_lib kernel"))
    out = kernel.load()(*kernels.PARTS[kernel.name](q, k, v), causal=True)
    assert torch.equal(out, whole.load()(q, k, v, causal=True))
