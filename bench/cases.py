"""What is measured: shapes, their floating-point operations, and the grids. Nothing here needs torch."""

from dataclasses import dataclass, replace
from typing import ClassVar

HIDDEN = 2048  # heads times head_dim in the paper's grid
TOKENS = 16_384  # batch times seqlen; longer sequences run alone
SEQLENS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
HEAD_DIMS = (64, 128, 256)
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "fp32": 4}


@dataclass(frozen=True)
class Attention:
    """One forward pass: q, k and v `(batch, seqlen, heads, head_dim)`."""

    direction: ClassVar[str] = "fwd"
    head_dim: int
    causal: bool
    batch: int
    seqlen: int
    heads: int

    @property
    def flops(self) -> float:
        """Two GEMMs of 2 s^2 d per head; the causal mask needs half of them (the paper's count)."""
        full = 4 * self.seqlen**2 * self.head_dim * self.heads * self.batch
        return full / 2 if self.causal else full

    def bytes(self, dtype: str) -> int:
        """Bytes of q, k, v and of an output of the same size."""
        return 4 * self.batch * self.seqlen * self.heads * self.head_dim * ELEMENT_BYTES[dtype]

    @property
    def fields(self) -> dict:
        """The shape's fields of a result row."""
        names = ("head_dim", "causal", "batch", "seqlen", "heads")
        return {"direction": self.direction, **{name: getattr(self, name) for name in names}}

    def small(self) -> "Attention":
        """Same kernel, checked against fp64: ragged against every tile, two batches, several key tiles."""
        return replace(self, batch=2, seqlen=600, heads=4)

    def tiny(self) -> "Attention":
        """Same kernel on so little work that the host is the slower side."""
        return replace(self, batch=1, seqlen=128, heads=2)

    def __str__(self) -> str:
        return f"d{self.head_dim} {'causal' if self.causal else 'full'} b{self.batch} s{self.seqlen} h{self.heads}"


@dataclass(frozen=True)
class Gemm:
    """The yardstick: a square matrix product `a @ b.T`, both `(n, n)`."""

    direction: ClassVar[str] = "gemm"
    n: int

    @property
    def flops(self) -> float:
        return 2 * self.n**3

    def bytes(self, dtype: str) -> int:
        """Bytes of both operands and of the 16-bit product."""
        return self.n**2 * (2 * ELEMENT_BYTES[dtype] + 2)

    @property
    def fields(self) -> dict:
        return {"direction": self.direction, "seqlen": self.n}

    def small(self) -> "Gemm":
        return Gemm(640)

    def tiny(self) -> "Gemm":
        return Gemm(128)

    def __str__(self) -> str:
        return f"{self.n} cubed"


Case = Attention | Gemm
GEMM = Gemm(8192)


def paper(head_dim: int, causal: bool, seqlen: int) -> Attention:
    """One point of the paper's grid: 16k tokens in all, hidden size 2048 (section 4.1)."""
    return Attention(head_dim, causal, max(1, TOKENS // seqlen), seqlen, HIDDEN // head_dim)


def _grid(head_dims: tuple[int, ...], seqlens: tuple[int, ...]) -> tuple[Case, ...]:
    """The cases, most wanted first, so that a time limit costs the least: d128, long sequences, unmasked."""
    points = [(d, causal, s) for d in head_dims for s in seqlens for causal in (False, True)]
    points.sort(key=lambda p: (abs(p[2] - TOKENS), p[0] != 128, p[0], p[1]))
    return (GEMM, *(paper(*p) for p in points))


GRIDS: dict[str, tuple[Case, ...]] = {
    "quick": (
        GEMM,
        *(paper(128, causal, s) for s, causal in ((TOKENS, False), (TOKENS, True), (4096, False), (1024, True))),
    ),
    "small": _grid(HEAD_DIMS, (1024, 4096, TOKENS)),
    "full": _grid(HEAD_DIMS, SEQLENS),
}

# What runs on a CPU, in a run on a card too: the NumPy rungs of chapter 1 need seconds where a card needs microseconds.
CPU_CASES: tuple[Case, ...] = tuple(Attention(64, causal, 1, 512, 4) for causal in (False, True))
