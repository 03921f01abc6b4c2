"""The library beside its peers, shape by shape, from the stored rows of one run: ratios, never speeds of different runs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fa3_course.results import Run

LIBRARY = "fa3_lib"
PEERS = {"fa3": "FA3 (C++)", "fa4": "FA4 (CuTe DSL)", "cudnn": "cuDNN", "fa2": "FA2 (PyTorch)"}
LONG = 1024  # from this sequence length on, a shape counts in the summary


@dataclass(frozen=True)
class Shape:
    """One shape of the grid: TFLOP/s by kernel, the library's among them."""

    head_dim: int
    causal: bool
    seqlen: int
    tflops: dict[str, float]

    def __str__(self) -> str:
        return f"d{self.head_dim} {'causal' if self.causal else 'full'} {self.seqlen}"

    def ratio(self, peer: str | None = None) -> float:
        """The library's speed over a peer's; over the fastest peer's without a name."""
        return self.tflops[LIBRARY] / (self.tflops[peer] if peer else max(self.tflops[p] for p in self.peers))

    @property
    def peers(self) -> list[str]:
        return [peer for peer in PEERS if peer in self.tflops]


def shapes(run: Run, dtype: str = "bf16") -> list[Shape]:
    """The shapes on which the run measured the library and at least one peer, by head dim, mask and length."""
    found: dict[tuple, dict[str, float]] = {}
    for row in run.select(direction="fwd", dtype=dtype):
        if row.kernel == LIBRARY or row.kernel in PEERS:
            found.setdefault((row.head_dim, row.causal, row.seqlen), {})[row.kernel] = row.tflops
    both = [Shape(*key, speeds) for key, speeds in sorted(found.items()) if LIBRARY in speeds]
    return [shape for shape in both if shape.peers]


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def mean_ratio(
    run: Run, kernel: str, other: str, head_dim: int | None = None, masks: tuple[bool, ...] = (False, True)
) -> float | None:
    """Geometric mean of one kernel's speed over another's, on the shapes from `LONG` tokens on that have both; None without any.

    head_dim: of these shapes, None for all. masks: causal or not.
    """
    found: dict[tuple, dict[str, float]] = {}
    for row in run.select(direction="fwd"):
        if (
            row.kernel in (kernel, other)
            and row.seqlen >= LONG
            and row.causal in masks
            and head_dim in (None, row.head_dim)
        ):
            found.setdefault((row.dtype, row.head_dim, row.causal, row.seqlen), {})[row.kernel] = row.tflops
    ratios = [speeds[kernel] / speeds[other] for speeds in found.values() if len(speeds) == 2]
    return geometric_mean(ratios) if ratios else None


def markdown(run: Run) -> str:
    """Every shape, every peer, the ratio to the fastest one. Empty where the run has no peers."""
    table = shapes(run)
    if not table:
        return ""
    peers = [peer for peer in PEERS if any(peer in shape.tflops for shape in table)]
    lines = [
        f"| | {LIBRARY} | {' | '.join(PEERS[p] for p in peers)} | to the fastest peer |",
        "|---|" + "---:|" * (len(peers) + 2),
    ]
    for shape in table:
        cells = [f"{shape.tflops[p]:.0f}" if p in shape.tflops else "-" for p in peers]
        lines.append(f"| {shape} | {shape.tflops[LIBRARY]:.0f} | {' | '.join(cells)} | {shape.ratio():.2f} |")
    return "\n".join(lines)


def summary(run: Run) -> str:
    """Geometric means of the ratios in one sentence, from `LONG` tokens on."""
    table = [shape for shape in shapes(run) if shape.seqlen >= LONG]
    if not table:
        return ""
    dims = sorted({shape.head_dim for shape in table})
    by_dim = ", ".join(f"d{d} {geometric_mean(s.ratio() for s in table if s.head_dim == d):.2f}" for d in dims)
    by_peer = ", ".join(
        f"{label} {geometric_mean(s.ratio(peer) for s in table if peer in s.tflops):.2f}"
        for peer, label in PEERS.items()
        if any(peer in s.tflops for s in table)
    )
    return (
        f"Geometric means of {LIBRARY}'s speed over {len(table)} shapes from {LONG} tokens on: to the fastest peer of each shape "
        f"{geometric_mean(s.ratio() for s in table):.2f} ({by_dim}); to {by_peer}."
    )
