"""The tile sweep, as far as it goes without a GPU: which variants there are, and that they compile."""

import pytest

from bench import tiles
from fa3_lib.config import TILES


def test_every_combination_is_a_variant_and_says_why_if_it_has_no_room():
    args = tiles.parse(
        ["--head-dim", "128", "--tile-m", "64,128", "--tile-n", "64,128", "--stages", "2,4", "--turns", "0,1"]
    )
    found = tiles.variants(args)
    assert len({v.config for v in found}) == len(found) == 16
    for variant in found:
        room = variant.config.tile_n == 64 or variant.config.stages == 2
        assert ("shared memory exceeded" in variant.problem) == (not room)


def test_left_out_lists_mean_the_librarys_tiles():
    (variant,) = tiles.variants(tiles.parse(["--head-dim", "192", "--causal"]))
    assert (variant.config.tile_m, variant.config.tile_n) == TILES[192, 192][:2] and variant.config.causal


def test_dry_run_compiles(capsys):
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl has wheels for Linux only")
    assert tiles.main(["--head-dim", "64", "--tile-m", "64", "--tile-n", "64", "--stages", "2,8", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("compiled, nothing spilled") == 2


def test_nothing_usable_is_a_failure(capsys):
    assert tiles.main(["--head-dim", "256", "--stages", "8", "--dry-run"]) == 1
    assert "shared memory exceeded" in capsys.readouterr().out


@pytest.mark.gpu
def test_on_a_card(capsys):
    assert (
        tiles.main(["--head-dim", "64", "--tile-n", "64,128", "--seqlen", "512", "--rounds", "1", "--burst-ms", "2"])
        == 0
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if "e-0" in line]
    assert len(lines) == 2
    for line in lines:
        speed, difference = map(float, line.split()[:2])
        assert speed > 0 and difference < 0.05
