"""Tile configurations of the FP8 forward kernel. Nothing here imports the DSL or torch."""

from dataclasses import dataclass

from fa3_lib.config import DYNAMIC_CAUSAL, SHORT_CAUSAL, WARPGROUP, ForwardConfig

KEY_GROUP = 32  # keys of one k-step of P V
HEAD_DIMS = (64, 128, 192, 256)  # compiled head dims; TMA zero-fills the columns between
EXPONENT_OFFSET = 8  # P lies in (0, 2**8]: e4m3 ends at 448, and small probabilities stay above its smallest number


@dataclass(frozen=True)
class Fp8Config(ForwardConfig):
    """One compiled shape of the FP8 forward kernel; the fields of `ForwardConfig`, and:

    Args:
        two_level: P V of each key block starts at zero, in T, and is added to O in fp32. Without it O stays in the tensor
            core's accumulator, which keeps about 13 bits: faster by little, and wrong over long sequences.
        pv_columns: columns of O that one product P V computes, which are T's; P V runs in `head_dim_v / pv_columns` parts.
        overlap: whether the softmax of a block runs under P V of the block before. It costs registers for S, P and T at
            once; without it S, and then P and T, have the same ones, and only products of other consumers run under softmax.
    """

    element_bytes: int = 1
    own_output: bool = True  # the 16-bit output has twice Q's bytes: in Q's place it would cover another consumer's Q
    two_level: bool = True
    pv_columns: int = 64
    overlap: bool = False

    @property
    def parts(self) -> int:
        """Products that one P V takes."""
        return self.head_dim_v // self.pv_columns

    @property
    def accumulator_registers(self) -> int:
        """32-bit registers per consumer thread for S (fp32), P (8 bit), T and O (fp32), as many as live at once."""
        s, p, o = self.tile_n // 2, self.tile_n // 8, self.head_dim_v // 2
        t = self.pv_columns // 2 if self.two_level else 0
        return o + (s + p + t if self.overlap else max(s, p + t))

    def budget(self) -> str:
        return super().budget().replace("S + P + O", "S, P, T and O")

    def validate(self) -> "Fp8Config":
        rules = (
            (self.element_bytes == 1 and self.output_bytes == 2, "element_bytes must be 1 and output_bytes 2"),
            (self.own_output, "own_output must be True: the output does not fit in Q's place"),
            (self.tile_n % KEY_GROUP == 0, f"tile_n must be a multiple of {KEY_GROUP}, the keys of one k-step of P V"),
            (
                self.pv_columns % 8 == 0 and self.pv_columns > 0 and self.head_dim_v % self.pv_columns == 0,
                "pv_columns must be a multiple of 8 that divides head_dim_v",
            ),
            (
                self.two_level or self.pv_columns == self.head_dim_v,
                "without two_level one product computes all columns: pv_columns must be head_dim_v",
            ),
        )
        for ok, rule in rules:
            if not ok:
                raise ValueError(f"{self}: {rule}")
        super().validate()
        return self


# (tile_m, tile_n, pv_columns, overlap, ping_pong) by compiled head dim, of Q and K and of V the larger one: the fastest on an
# H200 of those that fit (`python -m bench.fp8 --sweep`).
TILES = {
    64: (192, 128, 32, True, True),
    128: (192, 128, 64, False, True),
    192: (128, 128, 64, False, True),
    256: (128, 128, 128, False, False),
}
ONE_LEVEL_TILES = {  # pv_columns are all that V has
    64: (192, 128, 64, True, True),
    128: (128, 192, 128, True, True),
    192: (128, 128, 192, True, True),
    256: (128, 128, 256, True, True),
}


def fp8_config(
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    seqlen_q: int | None = None,
    *,
    two_level: bool = True,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    pack_gqa: int = 1,
) -> Fp8Config:
    """The configuration for tensors of these head dims (multiples of 16, at most 256); without `seqlen_q`, for long ones.

    `seqlen_q` counts queries. The other arguments are `Fp8Config`'s.
    """
    d, dv = (next(d for d in HEAD_DIMS if d >= x) for x in (head_dim, head_dim_v))
    tile_m, tile_n, pv_columns, overlap, ping_pong = (TILES if two_level else ONE_LEVEL_TILES)[max(d, dv)]
    rows = float("inf") if seqlen_q is None else seqlen_q * pack_gqa
    if (causal or window) and rows <= SHORT_CAUSAL:
        tile_m = min(tile_m, WARPGROUP)
    if tile_m == 192 and overlap and softcap:  # 160 registers have no room for it
        tile_m = WARPGROUP
    return Fp8Config(
        d, dv, tile_m, tile_n,
        causal=causal, ping_pong=ping_pong, window=window, softcap=softcap, sinks=sinks, pack_gqa=pack_gqa,
        dynamic=causal and max(d, dv) <= 128 and rows >= DYNAMIC_CAUSAL,
        two_level=two_level, pv_columns=min(pv_columns, dv) if two_level else dv, overlap=overlap,
    ).validate()  # fmt: skip
