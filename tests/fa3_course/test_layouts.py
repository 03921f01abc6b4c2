"""The formulas behind chapter 2's drawings, against CuTe's own layouts and against counting by hand."""

import importlib.util

import numpy as np
import pytest

from fa3_course import layouts
from fa3_course.timeline import Event, Timeline

HAS_CUTE = importlib.util.find_spec("cutlass") is not None


@pytest.mark.skipif(not HAS_CUTE, reason="CuTe DSL has Linux wheels only")
@pytest.mark.parametrize("columns", (8, 64, 176))
def test_accumulator_is_cutes(columns):
    """Element by element: CuTe's thread-value layout of WGMMA's C operand, evaluated while a host function is traced."""
    import cutlass.cute as cute
    import cutlass.utils.hopper_helpers as hopper
    from cutlass import BFloat16, Float32
    from cutlass.cute.nvgpu import OperandMajorMode
    from cutlass.cute.runtime import make_fake_stream

    from fa3_lib.compiler import COMPILE_LOCK

    found = {}

    @cute.jit
    def trace(stream):
        k = OperandMajorMode.K
        mma = hopper.make_trivial_tiled_mma(BFloat16, BFloat16, k, k, Float32, (1, 1, 1), (64, columns))
        # a comprehension runs in Python; a for statement would become a loop of the kernel
        layout, registers = mma.tv_layout_C_tiled, columns // 2
        found.update({(t, r): cute.crd2idx((t, r), layout) for t in range(128) for r in range(registers)})

    with COMPILE_LOCK:
        cute.compile(trace, make_fake_stream(), options="--gpu-arch sm_90a")
    assert sorted(found.values()) == list(range(64 * columns))
    for owner, index in found.items():
        assert layouts.accumulator_owner(index % 64, index // 64) == owner


def test_accumulator_owner_covers_every_register_once():
    row, column = np.mgrid[0:64, 0:128]
    thread, register = layouts.accumulator_owner(row, column)
    assert len({*zip(thread.ravel(), register.ravel(), strict=True)}) == 64 * 128
    assert thread.max() == 127 and register.max() == 63


@pytest.mark.parametrize("column", range(8))
def test_swizzle_spreads_a_column_over_all_banks(column):
    address = np.arange(8) * 128 + column * 16
    assert layouts.transactions(address.tolist()) == 8
    assert layouts.transactions(layouts.swizzle128(address).tolist()) == 1


def test_swizzle_permutes_inside_each_row():
    address = np.arange(0, 4096, 16)
    moved = layouts.swizzle128(address)
    assert sorted(moved) == sorted(address) and (moved // 128 == address // 128).all()
    assert (layouts.swizzle128(moved) == address).all()


def test_same_word_is_served_once():
    assert layouts.transactions([0] * 32, 4) == 1
    assert layouts.transactions([128 * i for i in range(32)], 4) == 32


@pytest.fixture
def ax():
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots()
    yield ax
    plt.close(fig)


@pytest.mark.parametrize("swizzled, turns", ((False, 8), (True, 1)))
def test_banks_are_counted(ax, swizzled, turns):
    assert layouts.draw_banks(ax, swizzled, column=3) == turns


@pytest.mark.parametrize(
    "at, copied", (((0, 0), 64 * 64), ((64, 0), 36 * 64), ((-10, 70), 54 * 10), ((200, 0), 0)), ids=str
)
def test_box_counts_what_exists(ax, at, copied):
    assert layouts.draw_box(ax, (100, 80), at, (64, 64)) == (copied, 64 * 64 - copied)


def test_waits_add_up():
    events = (
        Event("consumer0", "wait K full[0]", 0, 30, kind="wait"),
        Event("consumer0", "QK", 30, 40),
        Event("consumer0", "wait WGMMA", 40, 90, kind="wait"),
        Event("consumer0", "softmax", 90, 100),
    )
    shares = layouts.waits(Timeline("cycles", ("consumer0",), events), ["consumer0"])["consumer0"]
    assert shares == pytest.approx({"K full": 0.3, "at work": 0.2, "its GEMM": 0.5})
    with pytest.raises(ValueError, match="nothing happens on the lane 'producer'"):
        layouts.waits(Timeline("cycles", ("consumer0",), events), ["producer"])
