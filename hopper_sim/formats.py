"""Number formats as bytes: f32, f16, bf16, e4m3, e5m2, and i32 for counters. Shared memory and tensors hold real bytes, so byte counts are true.

Poison is 0xFF in every byte: it reads as NaN in f32, f16, bf16, e4m3 and e5m2 alike.
"""

import numpy as np

from hopper_sim.faults import misuse

STORAGE = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "e4m3": np.uint8, "e5m2": np.uint8, "i32": np.int32}
POISON = 0xFF


def element_bytes(dtype: str) -> int:
    """Bytes of one element. Raises `Fault` for a format that is not in STORAGE."""
    if dtype not in STORAGE:
        raise misuse(f"unknown format {dtype!r}: use one of {', '.join(STORAGE)}")
    return np.dtype(STORAGE[dtype]).itemsize


def _fp8_values(exponent_bits: int) -> np.ndarray:
    """The 128 non-negative values of an 8-bit format, NaN (and inf) included, indexed by code."""
    mantissa_bits, bias = 7 - exponent_bits, 2 ** (exponent_bits - 1) - 1
    code = np.arange(128)
    exponent, mantissa = code >> mantissa_bits, (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
    value = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    if exponent_bits == 4:  # e4m3: no infinity, one NaN
        value[127] = np.nan
    else:  # e5m2 follows IEEE
        value[124], value[125:] = np.inf, np.nan
    return value.astype(np.float32)


_FP8 = {"e4m3": _fp8_values(4), "e5m2": _fp8_values(5)}
_DECODE_FP8 = {name: np.concatenate([values, -values]) for name, values in _FP8.items()}


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounds to nearest even into the storage type; 8-bit formats saturate at their largest finite value, as cvt.satfinite does."""
    element_bytes(dtype)
    x = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "bf16":
        bits = x.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(x), 0xFFFF, rounded).astype(np.uint16)
    if dtype in _FP8:
        finite = _FP8[dtype][np.isfinite(_FP8[dtype])]
        magnitude = np.minimum(np.abs(x), finite[-1])
        middle = (finite[:-1] + finite[1:]) / 2
        code = np.searchsorted(middle, magnitude)
        tie = (code < len(middle)) & (magnitude == middle[np.minimum(code, len(middle) - 1)])
        code = code + (tie & (code % 2 == 1))
        code = np.where(np.isnan(x), 127, code)
        return (code | (np.signbit(x) << 7)).astype(np.uint8)
    with np.errstate(over="ignore"):
        return x.astype(STORAGE[dtype])


def decode(stored: np.ndarray, dtype: str) -> np.ndarray:
    """The stored elements as float32, exactly (i32: up to 2**24)."""
    if dtype == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if dtype in _FP8:
        return _DECODE_FP8[dtype][stored]
    return stored.astype(np.float32)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values after a round trip through `dtype`."""
    return decode(encode(values, dtype), dtype)
