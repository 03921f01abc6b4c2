"""What ptxas made of the configurations that `flash_attn_func` can choose. No GPU needed."""

import pytest
import torch

from fa3_course import sass
from fa3_lib import config as c

forward_sm90 = pytest.importorskip("fa3_lib.forward_sm90", reason="nvidia-cutlass-dsl has wheels for Linux only")

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
SHORT = {"seqlen_q": 64}
EVERYTHING = {"softcap": True, "sinks": True, "pack_gqa": 8}
# every head dim in these, and beside them what has the fewest registers left: (name, features of forward_config, head dims)
FEATURES = (
    ("full", {}, HEAD_DIMS),
    ("causal-short-softcap", {"causal": True, "softcap": True, **SHORT}, HEAD_DIMS),
    ("window-short-everything", {"window": True, **EVERYTHING, **SHORT}, HEAD_DIMS),
    ("window-sinks", {"window": True, "sinks": True}, HEAD_DIMS[:3]),  # longer tiles than short sequences have
    ("causal-packed-sinks", {"causal": True, "pack_gqa": 8, "sinks": True}, HEAD_DIMS[:3]),  # dynamic
    ("softcap", {"softcap": True}, HEAD_DIMS[:1]),
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CASES = [
    pytest.param(*dims, features, DTYPES[dtype], id=f"d{dims[0]}-{dims[1]}-{name}-{dtype}")
    for i, (name, features, head_dims) in enumerate(FEATURES)
    for j, dims in enumerate(head_dims)
    for dtype in [("bf16", "fp16")[(i + j) % 2]]
]


def compiled(config, dtype, with_lse=True):
    """The report, and every opcode in the order of the program."""
    (report,) = sass.compile_report(lambda options: forward_sm90.compile_forward(config, dtype, options, with_lse))
    return report, sass.program(report.listing)


def block_without_maximum(opcodes, config):
    """Places of its products S = Q K^T and of P V before it, and of its vote."""
    (vote,) = [i for i, name in enumerate(opcodes) if name.startswith("BAR.RED")]
    products = [i for i in range(vote) if opcodes[i].startswith("HGMMA")]
    return products[-(config.head_dim + config.tile_n) // 16 :], vote


def boxes(columns):
    """TMA instructions of one tile: a box is one swizzled row wide, 128 or 64 bytes."""
    return 2 * columns // next(width for width in (128, 64) if 2 * columns % width == 0)


def test_an_output_in_qs_place_is_another_kernels():
    config = c.ForwardConfig(64, 64, 128, 128)
    with pytest.raises(ValueError, match="set own_output or direct_output"):
        forward_sm90.compile_forward(config, torch.bfloat16)


def direct_stores(config):
    """Of 8 bytes a thread, each of which has two rows' share of 16 columns in as many of them."""
    return 2 * config.head_dim_v // 16 if config.direct_output else 0


@pytest.mark.filterwarnings("ignore:This static loop has")
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("d, dv", HEAD_DIMS)
def test_without_lse(d, dv, causal):
    """What most calls run."""
    config = c.forward_config(d, dv, causal)
    report, opcodes = compiled(config, torch.bfloat16, with_lse=False)
    assert report.problems() == []
    assert report.count("STG") == config.dynamic + direct_stores(config)  # the former resets the counter

    # ptxas knows that a stage is the same for the whole warp: it would else move each product's descriptors to uniform registers
    products, vote = block_without_maximum(opcodes, config)
    assert sum(name.startswith("R2UR") for name in opcodes[products[0] : vote]) < len(products)


@pytest.mark.filterwarnings("ignore:This static loop has")
@pytest.mark.parametrize("d, dv, features, dtype", CASES)
def test_machine_code(d, dv, features, dtype):
    config = c.forward_config(d, dv, **{"causal": False, **features})
    report, opcodes = compiled(config, dtype)
    assert report.problems() == []  # no spill, no stack, no local memory, no ptxas advisory
    # at launch the register file is shared evenly; setmaxnreg then moves registers to the consumers
    assert report.registers == config.launch_registers
    assert report.count("USETMAXREG") == 2
    assert config.q_and_o_bytes < report.smem <= config.smem_bytes

    # S = Q K^T stands in the code for the first block, masked ones (at either side), unmasked ones, and those computed again;
    # O += P V for masked, unmasked and last ones
    left = 1 if config.window else 0
    assert report.count("HGMMA") == (4 + left) * config.head_dim // 16 + (3 + left) * config.tile_n // 16
    half = config.tile_n // 2  # scores of a thread in one block
    exponentials = (4 + left) * half  # each S is followed by its own, and
    exponentials += 2 * (3 + left)  # by the factors of two rows, but for weights that keep the maximum
    of_sinks = report.count("MUFU.EX2") - exponentials
    assert of_sinks in ((4, 6) if config.sinks else (0,))  # two for each of two rows; at times ptxas doubles one
    assert report.count("MUFU.TANH") == ((4 + left) * half if config.softcap else 0)
    assert report.count("UTMALDG") == boxes(config.head_dim) * (config.consumer_warpgroups + 1) + boxes(
        config.head_dim_v
    )
    assert report.count("UTMASTG") == (boxes(config.head_dim_v) if config.own_output else 0)
    assert report.count("STG.E.64") == direct_stores(config) + config.dynamic

    # the block without a maximum: from its products to the vote, exponentials and no comparison of scores
    products, vote = block_without_maximum(opcodes, config)
    between = opcodes[products[-1] : vote]
    assert sum(name.startswith("MUFU.EX2") for name in between) == half
    assert not [name for name in between if name.startswith(("FMNMX", "SHFL"))]
