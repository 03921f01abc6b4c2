"""Tile configurations of the FP8 forward kernel. Nothing here imports the DSL or torch."""

from dataclasses import dataclass, replace

from fa3_lib.config import DYNAMIC_CAUSAL, REGISTER_SPLIT, SHORT_CAUSAL, SMEM_LIMIT, WARPGROUP, ForwardConfig

KEY_GROUP = 32  # keys of one k-step of P V
HEAD_DIMS = (64, 128, 192, 256)  # compiled head dims; TMA zero-fills the columns between
# The weight of a row's maximum is 2**8 with one level, as in FA3: e4m3 is normal down to 2**-6 and ends at 448. With two levels, blocks
# without a mask do without a maximum of their own: it is 2**4, and up to 2**8 weights may grow before that is noticed and mended.
ONE_LEVEL_OFFSET, TWO_LEVEL_OFFSET = 8, 4
SCALE_BLOCK = 128  # rows of Q, of K and of V that share a factor under block scales
FORMATS = ("e4m3", "e5m2")
MAX_WGMMA_N = 256  # columns of one product
TURNING_WARPS = 2  # of the producer's warpgroup, that transpose V inside the kernel
RAW_STAGES = 2  # slots for V as it lies in memory
# setmaxnreg where warps turn V, for which 24 registers are too few
TURNING_SPLIT = REGISTER_SPLIT | {2: (40, 232)}


@dataclass(frozen=True)
class Fp8Config(ForwardConfig):
    """One compiled shape of the FP8 forward kernel; the fields of `ForwardConfig`, and:

    Args:
        two_level: P V of each key block starts at zero, in T, and is added to O in fp32. Without it O stays in the tensor
            core's accumulator, which keeps about 13 bits: faster by little, and wrong over long sequences.
        pv_columns: columns of O that one product P V computes, which are T's; P V runs in `head_dim_v / pv_columns` parts.
        software_exp2: with two levels and without an LSE, in blocks without a mask, every so manieth exponential of a thread is computed without the MUFU, to
            3 % (e4m3 rounds P by 6 %); 0: none.
        block_scales: whether descales are per head and block of 128 rows (of q, k and v) instead of per KV head.
        q_format, k_format, v_format: "e4m3" or "e5m2".
        transposes_v: whether V comes as it lies in memory, and two warps transpose it tile by tile (`turn_v.py`), once for each
            tile of queries. Otherwise it comes transposed.
    """

    element_bytes: int = 1
    own_output: bool = True  # the 16-bit output has twice Q's bytes: in Q's place it would cover another consumer's Q
    two_level: bool = True
    pv_columns: int = 64
    software_exp2: int = 0
    block_scales: bool = False
    q_format: str = "e4m3"
    k_format: str = "e4m3"
    v_format: str = "e4m3"
    transposes_v: bool = False

    @property
    def sum_rows(self) -> int:
        """Rows of ones below V: the last part of P V has as many columns more, each of them the sum of the rounded P. Not without
        two levels: a sum of positive numbers is what the accumulator's 13 bits cut most."""
        return 8 if self.two_level else 0

    @property
    def offset(self) -> int:
        """The exponent of the weight that a row's maximum has."""
        return TWO_LEVEL_OFFSET if self.two_level else ONE_LEVEL_OFFSET

    def part_columns(self, part: int) -> int:
        """Columns of one part of P V, those of the sum included."""
        return self.pv_columns + (self.sum_rows if part == self.parts - 1 else 0)

    @property
    def votes_under_pv(self) -> bool:
        """Whether P V starts before it is known that no weight is too large. It is then computed again if one was. Where T has several
        parts, registers are short (spills at head dim 256), or the other consumers fill the gap (d128: slower)."""
        return self.parts == 1

    @property
    def turning_warps(self) -> int:
        return TURNING_WARPS if self.transposes_v else 0

    @property
    def raw_stages(self) -> int:
        return RAW_STAGES if self.transposes_v else 0

    @property
    def register_split(self) -> tuple[int, int]:
        return (TURNING_SPLIT if self.transposes_v else REGISTER_SPLIT)[self.consumer_warpgroups]

    @property
    def producer_registers(self) -> int:
        return self.register_split[0]

    @property
    def consumer_registers(self) -> int:
        return self.register_split[1]

    @property
    def smem_bytes(self) -> int:
        return super().smem_bytes + self.raw_stages * self.v_bytes

    @property
    def parts(self) -> int:
        """Products that one P V takes."""
        return self.head_dim_v // self.pv_columns

    @property
    def accumulator_registers(self) -> int:
        """32-bit registers per consumer thread for S (fp32), P (8 bit), T and O (fp32), as many as live at once: with two levels
        S, and then P and T, have the same ones."""
        s, p, o = self.tile_n // 2, self.tile_n // 8, self.head_dim_v // 2
        return o + (max(s, p + self.parts_in_flight * self.pv_columns // 2) if self.two_level else s + p)

    @property
    def parts_in_flight(self) -> int:
        """Parts that have a T at the same time: two, where registers allow, one added while the next one runs."""
        registers = self.head_dim_v // 2 + self.tile_n // 8 + self.pv_columns
        return 2 if self.parts > 1 and registers + 40 <= self.consumer_registers else 1

    def budget(self) -> str:
        words = super().budget().replace("S + P + O", "S, P, T and O")
        return words.replace(" + 1024", f" + {self.raw_stages} x V {self.v_bytes} + 1024") if self.raw_stages else words

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
                self.part_columns(self.parts - 1) <= MAX_WGMMA_N,
                f"one product has at most {MAX_WGMMA_N} columns: pv_columns",
            ),
            (
                {self.q_format, self.k_format, self.v_format} <= set(FORMATS),
                f"q_format, k_format and v_format must be one of {', '.join(FORMATS)}",
            ),
            (
                self.software_exp2 >= 0 and (self.two_level or self.software_exp2 == 0),
                "software_exp2 must be 0 or, with two_level, a positive number",
            ),
            (
                not self.block_scales or (self.two_level and self.tile_n == SCALE_BLOCK and self.pack_gqa == 1),
                f"block_scales need two_level, a tile_n of {SCALE_BLOCK}, the keys of a block, and no pack_gqa",
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


# (tile_m, tile_n, pv_columns, ping_pong) by compiled head dim, of Q and K and of V the larger one: the fastest on an H200 of those
# that fit (`python -m bench.fp8 --sweep`).
TILES = {
    64: (192, 128, 64, True),
    128: (192, 128, 64, True),
    192: (128, 128, 64, True),
    256: (128, 128, 128, True),
}
ONE_LEVEL_TILES = {  # pv_columns are all that V has
    64: (192, 128, 64, True),
    128: (128, 192, 128, True),
    192: (128, 128, 192, True),
    256: (128, 128, 256, True),
}

# Every third exponential without the MUFU, where no LSE is wanted (H200, 16k full: d64 17 % faster, d128 13 %, d256 6 %; causal d128 14 %; P V's error against
# fp64 2.83e-2 instead of 2.67e-2). Every second one: d64 4 % more, 2.92e-2.
SOFTWARE_EXP2 = 3

# Up to this many queries, causal or with a window, tiles have 128 rows, by head dim. Fewer than with one level: two consumers that do
# not overlap with themselves lose more (H200, full, d128, 2k: 771 against 990 TFLOP/s) than a wide tile's masked part. At 128, 1024:
# of 128 rows, a tile leaves registers for V to be transposed inside (below; causal 1k 510 TFLOP/s, of 192 rows 468).
SHORT_TWO_LEVEL = {64: 512, 128: 1024}

# Up to this many queries without a causal mask, over all heads that read one KV head, V is transposed inside the kernel: again for each
# tile of queries, but without a kernel of its own, which takes 20 us for 16k tokens (H200, TFLOP/s, inside, against that kernel and
# this one: d64 full 512 415 / 392, 1k 466 / 497, 2k 553 / 613; causal 1k 313 / 291; d128 full 512 661 / 600, 1k 763 / 734, causal 1k 510 / 458).
IN_KERNEL_QUERIES = {64: 512, 128: 1024, 192: 1024}  # at 256, shared memory has no room for it


def few_queries(head_dim: int, head_dim_v: int, queries: int, causal: bool = False) -> bool:
    """Whether `queries`, those of one KV head, are so few that V is transposed inside the kernel. Causal ones read half of V."""
    limit = IN_KERNEL_QUERIES.get(next(d for d in HEAD_DIMS if d >= max(head_dim, head_dim_v)), 0)
    return queries <= (2 * limit if causal else limit)


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
    block_scales: bool = False,
    formats: tuple[str, str, str] = ("e4m3", "e4m3", "e4m3"),
    transposes_v: bool = False,
) -> Fp8Config:
    """The configuration for tensors of these head dims (multiples of 16, at most 256); without `seqlen_q`, for long ones.

    `seqlen_q` counts queries. formats: of q, k and v. transposes_v: `Fp8Config`'s where there is room for it
    (`few_queries` says when it pays). The other arguments are `Fp8Config`'s.
    """
    d, dv = (next(d for d in HEAD_DIMS if d >= x) for x in (head_dim, head_dim_v))
    tile_m, tile_n, widest_part, ping_pong = (TILES if two_level else ONE_LEVEL_TILES)[max(d, dv)]
    rows = float("inf") if seqlen_q is None else seqlen_q * pack_gqa
    if (causal or window) and rows <= (SHORT_TWO_LEVEL.get(max(d, dv), 0) if two_level else SHORT_CAUSAL):
        tile_m = min(tile_m, WARPGROUP)
    if max(d, dv) == 256 and softcap and not two_level:  # 240 registers have no room for 128 keys with it
        tile_n = 64
    # the 160 registers of three consumers have no room for these
    wide = max(d, dv) > 64
    if tile_m == 192 and (softcap if not two_level else wide and (causal or window) and (pack_gqa > 1 or block_scales)):
        tile_m = WARPGROUP
    pv_columns = next(x for x in (widest_part, 96, 64, 32) if x <= widest_part and dv % x == 0) if two_level else dv
    config = Fp8Config(
        d, dv, tile_m, tile_n,
        causal=causal, ping_pong=ping_pong, window=window, softcap=softcap, sinks=sinks, pack_gqa=pack_gqa,
        dynamic=causal and (max(d, dv) > 128 or rows >= DYNAMIC_CAUSAL),
        two_level=two_level, pv_columns=pv_columns, software_exp2=SOFTWARE_EXP2 if two_level else 0,
        block_scales=block_scales, **dict(zip(("q_format", "k_format", "v_format"), formats, strict=True)),
    )  # fmt: skip
    registers_left = not causal or not wide or (tile_m == WARPGROUP and max(d, dv) <= 128)
    turning = replace(config, transposes_v=transposes_v and registers_left)
    return (turning if turning.smem_bytes <= SMEM_LIMIT else config).validate()
