"""The calculator's sums are the configuration's, and its cycles are what the simulated SM counts."""

import numpy as np
import pytest

from fa3_course import budget, simulated
from fa3_lib.config import SMEM_LIMIT, ForwardConfig, forward_config

SEED = np.random.SeedSequence().entropy % 2**32
rng = np.random.default_rng(SEED)


@pytest.mark.parametrize("head_dim", budget.HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_the_parts_add_up_to_the_configuration(head_dim, causal):
    config = forward_config(head_dim, head_dim, causal)
    found = budget.budget(config)
    assert sum(found.smem.values()) == config.smem_bytes and not found.refusal
    assert sum(found.registers.values()) == config.accumulator_registers + budget.OTHER_REGISTERS
    without = budget.budget(config, overlap=False)
    assert sum(found.registers.values()) - sum(without.registers.values()) == config.tile_n // 4


@pytest.mark.parametrize("shape", [(128, 128, 256), (256, 128, 96), (64, 192, 192)])
def test_what_does_not_fit_is_refused_as_the_configuration_refuses_it(shape):
    head_dim, tile_m, tile_n = shape
    config = ForwardConfig(head_dim, head_dim, tile_m, tile_n)
    found = budget.budget(config)
    with pytest.raises(ValueError) as error:
        config.validate()
    assert found.refusal and found.refusal in str(error.value) and found.refusal in found.words


@pytest.mark.parametrize("head_dim", budget.HEAD_DIMS)
def test_widest_is_the_last_that_validates(head_dim):
    n = budget.widest(head_dim, 128)
    ForwardConfig(head_dim, head_dim, 128, n).validate()
    with pytest.raises(ValueError):
        ForwardConfig(head_dim, head_dim, 128, n + 16).validate()
    assert budget.widest(256, 192) == 0, "O alone takes 128 of 160 registers"


def test_no_register_split_is_refused_by_name():
    with pytest.raises(ValueError, match="tile_m = 256"):
        budget.budget(ForwardConfig(64, 64, 256, 128))


@pytest.mark.parametrize("number, head_dim", [("5", 128), ("7", 64), ("7", 256)])
def test_cycles_are_those_that_the_simulated_units_work(number, head_dim):
    config = simulated.configuration(number, head_dim, False)
    busy = []
    for blocks in (2, 5):
        q = rng.standard_normal((1, config.tile_m, 1, head_dim))
        k, v = (rng.standard_normal((1, blocks * config.tile_n, 1, head_dim)) for _ in range(2))
        busy.append(simulated.simulate(number, q, k, v, config=config).report.busy)
    for unit, expected in budget.cycles(config).items():
        assert (busy[1][unit] - busy[0][unit]) / 3 == pytest.approx(expected, rel=1e-6), (unit, SEED)


def test_the_picture_says_when_something_does_not_fit():
    png, words = budget.picture(128, 128, 128, 2, True)
    assert png.startswith(b"\x89PNG") and words.startswith("fits")
    assert "shared memory exceeded" in budget.picture(256, 128, 128, 2, False)[1]
    assert f"{SMEM_LIMIT:,}" in words
