"""The table of ratios: what it takes from a run, and what it makes of it."""

import random

from fa3_course import comparison
from fa3_course.results import Row, Run


def run_of(*rows) -> Run:
    return Run(date="2026-01-01T00:00:00Z", command="a test", gpu="a card", rows=rows)


def row(kernel, tflops, seqlen=2048, head_dim=64, causal=False, dtype="bf16") -> Row:
    return Row(
        kernel=kernel, direction="fwd", dtype=dtype, head_dim=head_dim, causal=causal, batch=1, seqlen=seqlen, heads=4,
        ms=1.0, tflops=tflops, timer="graph",
    )  # fmt: skip


def test_ratios_are_to_the_fastest_peer_of_the_same_shape():
    speeds = [random.uniform(100, 900) for _ in range(6)]
    run = run_of(
        row("fa3_lib", speeds[0]), row("fa3", speeds[1]), row("cudnn", speeds[2]),
        row("fa3_lib", speeds[3], causal=True), row("fa4", speeds[4], causal=True),
        row("fa3", speeds[5], head_dim=128), row("fa3_lib", 1.0, seqlen=512), row("rung05_warp_specialised", 1e4),
        row("fa3", 1e5, dtype="fp8"),
    )  # fmt: skip
    full, causal = comparison.shapes(run)
    assert (str(full), str(causal)) == ("d64 full 2048", "d64 causal 2048")
    assert full.ratio() == speeds[0] / max(speeds[1:3]) and full.ratio("cudnn") == speeds[0] / speeds[2]
    assert causal.peers == ["fa4"]
    mean = (full.ratio() * causal.ratio()) ** 0.5
    assert f"{mean:.2f} (d64 {mean:.2f})" in comparison.summary(run)
    lines = comparison.markdown(run).splitlines()
    assert len(lines) == 4 and lines[3].startswith(f"| d64 causal 2048 | {speeds[3]:.0f} | - | {speeds[4]:.0f} | - |")


def test_short_shapes_are_shown_but_do_not_count():
    run = run_of(row("fa3_lib", 300.0, seqlen=512), row("fa3", 100.0, seqlen=512), row("fa3_lib", 1.0), row("fa3", 2.0))
    assert "| d64 full 512 | 300 | 100 | 3.00 |" in comparison.markdown(run)
    assert "over 1 shapes" in comparison.summary(run) and "0.50" in comparison.summary(run)


def test_a_run_without_peers_has_no_table():
    assert comparison.markdown(run_of(row("fa3_lib", 1.0))) == "" == comparison.summary(run_of(row("fa3_lib", 1.0)))
