"""What ptxas made of every configuration that `flash_attn_func` can choose. No GPU needed."""

import pytest
import torch

from fa3_course import sass
from fa3_lib import config as c

forward_sm90 = pytest.importorskip("fa3_lib.forward_sm90", reason="nvidia-cutlass-dsl has wheels for Linux only")

CONFIGS = sorted(
    {c.forward_config(d, d, causal, sq) for d in c.HEAD_DIMS for causal in (False, True) for sq in (64, None)}, key=str
)


@pytest.mark.filterwarnings("ignore:This static loop has")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))
@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda k: f"d{k.head_dim}-m{k.tile_m}-{'causal' if k.causal else 'full'}"
)
def test_machine_code(config, dtype):
    (report,) = sass.compile_report(lambda options: forward_sm90.compile_forward(config, dtype, options))
    assert report.problems() == []  # no spill, no stack, no local memory, no ptxas advisory
    # at launch the register file is shared evenly; setmaxnreg then moves registers to the consumers
    assert report.registers == c.REGISTER_FILE // config.threads // 8 * 8
    assert report.count("USETMAXREG") == 2
    assert config.q_and_o_bytes < report.smem <= config.smem_bytes

    # S = Q K^T stands in the code three times (first block, masked, unmasked), O += P V as well (masked, unmasked, last)
    k_steps = config.head_dim // 16 + config.tile_n // 16
    assert report.count("HGMMA") == 3 * k_steps
    # one TMA instruction per 64 columns: the consumers' Q, K, V; and O
    slabs = config.head_dim // 64
    assert report.count("UTMALDG") == slabs * (config.consumer_warpgroups + 2)
    assert report.count("UTMASTG") == slabs
    # one exponential per score and thread, and two row scales, in each of the three softmaxes
    assert report.count("MUFU.EX2") == 3 * (config.tile_n // 2 + 2)
