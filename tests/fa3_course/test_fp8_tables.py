"""The README's FP8 tables say what the rows say."""

from dataclasses import replace

import pytest

from fa3_course import fp8_tables
from fa3_course.results import Row, Run


def speed(kernel, tflops, d=128, causal=False, seqlen=16_384):
    return Row(kernel, "fwd", "fp8", head_dim=d, causal=causal, batch=1, seqlen=seqlen, heads=16, ms=1.0, tflops=tflops)


def error(question, who, value, keys=16_384):
    row = Row(f"{question}: {who}", "fwd", "fp8", head_dim=128, causal=False, batch=1, seqlen=keys, heads=1, ms=1.0)
    return replace(row, error=value)


RUN = Run("2026-11-30T00:00:00", "python -m bench.fp8", gpu="NVIDIA H200", commit="0123456789abcdef")


def test_speeds_are_compared_with_fa3_shape_by_shape():
    rows = [speed("fa3_lib", 900.0), speed("fa3_lib one level", 1100.0), speed("fa3", 1000.0)]
    rows += [
        speed(name, x, seqlen=1024, causal=True)
        for name, x in (("fa3_lib", 400.0), ("fa3_lib one level", 100.0), ("fa3", 100.0))
    ]
    rows += [speed("fa3_lib", 1.0, d=64)]  # without the others: not compared
    rows += [speed(name, 7.0, seqlen=512) for name in fp8_tables.WHO]  # too short for the mean
    text = fp8_tables.speed_tables(replace(RUN, rows=tuple(rows)))
    assert "| **fa3_lib** | 900 |" in text and "| FA3 (C++) | 1000 |" in text
    assert "fa3_lib 1.90 (d128 full 0.90, d128 causal 4.00), with `two_level=False` 1.05." in text
    assert "| d128 causal 1024 | 400 | 100 | 100 | 4.00 |" in text and "d64" not in text
    assert "NVIDIA H200, 2026-11-30, commit 0123456789." in text


def test_errors_stand_by_question_and_keys():
    rows = [error("V = 1", "fa3", 0.3074), error("V = 1", "fa3_lib", 0.0, keys=4096)]
    rows += [
        error("table 3", "one scale per block, rotated", 8.475e-3, keys=4096),
        error("MiniLM", "one scale per head", 0.04),
    ]
    text = fp8_tables.error_tables(replace(RUN, rows=tuple(rows)))
    assert "| V = 1: FA3 (C++) | - | 31 % | - | - |" in text and "| V = 1: **fa3_lib** | 0 % | - | - | - |" in text
    assert "| paper | 9.1e-03 |\n| **fa3_lib** | 8.5e-03 |" in text and "MiniLM" not in text


@pytest.mark.parametrize("fast, exact", [(None, None), (RUN, RUN)])
def test_without_rows_there_is_nothing(fast, exact):
    assert fp8_tables.markdown(fast, exact) == ""
