import numpy as np
import torch

from fa3_course.checker import Exercise

EXERCISE = Exercise(
    "04.1",
    "ex01_decode.py",
    functions={"decode": 1},
    hints=(
        "`codes >> mantissa_bits` has the sign on top of the exponent field: mask it with `2**exponent_bits - 1`.",
        "np.ldexp(significand, exponent) is significand * 2^exponent, exactly. Exponent field 0 has the exponent of field 1.",
        "significand = (field > 0) + mantissa / 2**mantissa_bits; exponent = np.maximum(field, 1) - bias. "
        "Apply the sign to the end result, so that zero gets it, too.",
    ),
)
E4M3, E5M2 = (4, 3, False), (5, 2, True)


def spelled(code, exponent_bits, mantissa_bits, ieee):
    """One code, read as a string of bits."""
    bits = f"{code:08b}"
    sign, field, mantissa = bits[0], bits[1 : 1 + exponent_bits], bits[1 + exponent_bits :]
    if ieee and set(field) == {"1"}:
        value = float("nan") if "1" in mantissa else float("inf")
    elif not ieee and set(bits[1:]) == {"1"}:
        value = float("nan")
    else:
        hidden = "1" if "1" in field else "0"
        exponent = max(int(field, 2), 1) - (2 ** (exponent_bits - 1) - 1)
        value = int(hidden + mantissa, 2) * 2.0 ** (exponent - mantissa_bits)
    return -value if sign == "1" else value


def compare(t, decode, codes, fmt):
    codes = np.asarray(codes, np.uint8)
    got = np.asarray(decode(codes, *fmt))
    t.expect(got.dtype.kind == "f", f"the values have dtype {got.dtype}, expected floats")
    t.expect(got.shape == codes.shape, f"shape {got.shape}, expected {codes.shape}")
    for code, value in zip(codes.ravel(), got.ravel(), strict=True):
        want = spelled(int(code), *fmt)
        same = np.isnan(value) if np.isnan(want) else value == want and np.signbit(value) == np.signbit(want)
        t.expect(
            same, f"code {int(code):08b} of {fmt[0]} exponent bits, {fmt[1]} mantissa bits: {value}, expected {want}"
        )


@EXERCISE.holds("normal numbers of e4m3", "bias 7: code 0 0111 000 is worth 1")
def _(t, decode):
    codes = t.rng.permutation(np.arange(0x08, 0x7E)).reshape(2, -1)
    compare(t, decode, codes, E4M3)
    compare(t, decode, codes[0, :7], E4M3)


@EXERCISE.holds("subnormal numbers have no hidden one", "exponent field 0: 0 + M / 2^m, and the exponent of field 1")
def _(t, decode):
    for fmt in (E4M3, E5M2):
        compare(t, decode, t.rng.permutation(2 ** fmt[1]), fmt)


@EXERCISE.holds("the sign, on zero too", "bit 7 alone is -0.0: negate the value, do not subtract it from 0")
def _(t, decode):
    for fmt in (E4M3, E5M2):
        compare(t, decode, 0x80 + t.rng.permutation(0x78), fmt)


@EXERCISE.holds("what is no number", "e4m3: 0x7F and 0xFF only, 448 is a number; e5m2: the whole highest exponent")
def _(t, decode):
    for fmt in (E4M3, E5M2):
        compare(t, decode, [*range(0x78, 0x80), *range(0xF8, 0x100)], fmt)


@EXERCISE.holds("all codes agree with PyTorch's two formats", "the other properties say where they differ")
def _(t, decode):
    codes = t.rng.permutation(256).astype(np.uint8)
    for fmt, dtype in ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)):
        want = torch.from_numpy(codes.copy()).view(dtype).double().numpy()
        got = np.asarray(decode(codes, *fmt), dtype=np.float64)
        wrong = ~((got == want) | (np.isnan(got) & np.isnan(want)))
        t.expect(not wrong.any(), f"{dtype}: codes {', '.join(f'0x{c:02X}' for c in codes[wrong][:5])} differ")


@EXERCISE.holds("any split of the seven bits", "bias and masks follow from exponent_bits and mantissa_bits")
def _(t, decode):
    for exponent_bits in (2, 3, 5, 6):
        for ieee in (True, False):
            compare(t, decode, t.rng.permutation(256), (exponent_bits, 7 - exponent_bits, ieee))
