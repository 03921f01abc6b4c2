"""Number formats against PyTorch's own."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hopper_sim import Fault, formats

TORCH = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
LARGEST = {"f16": 65504.0, "bf16": 2.0**127, "e4m3": 448.0, "e5m2": 57344.0}


@pytest.mark.parametrize("dtype", TORCH)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_rounding_is_pytorchs(dtype, data):
    floats = st.floats(-LARGEST[dtype], LARGEST[dtype], width=32)
    x = np.array(data.draw(st.lists(floats, min_size=1, max_size=50)), dtype=np.float32)
    want = torch.from_numpy(x).to(TORCH[dtype]).float().numpy()
    np.testing.assert_array_equal(formats.rounded(x, dtype), want)


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_every_code_and_every_tie(dtype):
    codes = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(codes).view(TORCH[dtype]).float().numpy()
    np.testing.assert_array_equal(formats.decode(codes, dtype), want)
    finite = np.sort(want[np.isfinite(want)])
    middle = (finite[:-1] + finite[1:]) / 2
    np.testing.assert_array_equal(
        formats.rounded(middle, dtype), torch.from_numpy(middle).to(TORCH[dtype]).float().numpy()
    )


def test_eight_bit_formats_saturate_and_keep_nan():
    got = formats.rounded(np.array([1e9, -1e9, np.inf, np.nan]), "e4m3")
    np.testing.assert_array_equal(got, [448.0, -448.0, 448.0, np.nan])


@pytest.mark.parametrize("dtype", [name for name in formats.STORAGE if name != "i32"])
def test_poison_is_nan(dtype):
    raw = np.full(16 * formats.element_bytes(dtype), formats.POISON, dtype=np.uint8)
    assert np.isnan(formats.decode(raw.view(formats.STORAGE[dtype]), dtype)).all()


def test_unknown_format_is_refused_by_name():
    with pytest.raises(Fault, match=r"unknown format 'f64'.*bf16"):
        formats.element_bytes("f64")
