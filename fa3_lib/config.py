"""Tile configurations of the forward kernel: the one source of tiles, stages, bytes, barrier counts and tile ranges.

The CuTe DSL kernel, the host code and the simulator's kernels all read the same frozen object, so that a wrong count
fails in the simulator before anyone needs a GPU. Nothing here imports the DSL or torch.
"""

from dataclasses import dataclass, replace

SMEM_LIMIT = 232_448  # bytes of dynamic shared memory that one CTA may use on sm_90 (227 KB)
REGISTER_FILE = 65_536  # 32-bit registers of one SM
WARPGROUP = 128  # threads of a warpgroup
WGMMA_M = 64  # rows of one warpgroup's WGMMA tile
SWIZZLE_BYTES = 64  # rows of a tile are whole numbers of this swizzle (or of the one of 128 bytes)
L2_BYTES = 32 * 2**20  # what K and V of a section of heads may fill of L2's 50 MB: Q, O and the next section want some
HEAD_DIMS = (64, 96, 128, 192, 256)  # compiled head dims; the columns between are zero-filled by TMA

# setmaxnreg (producer, consumer) by number of consumer warpgroups: the sums stay within what the launch allots
REGISTER_SPLIT = {1: (56, 256), 2: (24, 240), 3: (32, 160)}


def ceil_div(a, b):
    """ceil(a / b) for a >= 0, b > 0. Works on Python ints and on the DSL's dynamic integers alike."""
    return (a + b - 1) // b


@dataclass(frozen=True)
class ForwardConfig:
    """One compiled shape of the forward kernel.

    Args:
        head_dim: columns of the Q and K tiles (a multiple of 64; narrower tensors are zero-filled by TMA).
        head_dim_v: columns of the V and O tiles.
        tile_m: query rows of a CTA, 64 per consumer warpgroup (the paper's B_r).
        tile_n: keys of one step of the main loop (the paper's B_c).
        stages: slots of the K ring and of the V ring.
        causal: whether the kernel is compiled with the bottom-right aligned causal mask.
        window: whether it is compiled with a sliding window, whose two sides are arguments of the call; not with `causal`.
        softcap: whether scores become `softcap * tanh(score / softcap)`; the value is an argument of the call.
        sinks: whether each query head has a sink, a further logit in the sum of its rows that belongs to no key.
        pack_gqa: query heads of one KV head whose rows share a tile, 1, 2, 4 ... 64: row r of a packed tile is query
            `r // pack_gqa` of head `r % pack_gqa`. Every row count of this class (tile_m, seqlen_q of the tile ranges) is in queries
            times pack_gqa or says so.
        dynamic: whether CTAs take their tiles from a counter in global memory, the long ones first, instead of by plan.
        ping_pong: whether the consumer warpgroups take turns in issuing their GEMMs.
        own_output: whether the output tile has shared memory of its own.
        direct_output: whether it goes from registers to global memory. With neither it takes Q's place, and the next Q waits.
        element_bytes: bytes of one element of Q, K and V (2 for fp16 and bf16).
        output_bytes: bytes of one element of O.
    """

    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    stages: int = 2
    causal: bool = False
    ping_pong: bool = False
    own_output: bool = False
    direct_output: bool = False
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    pack_gqa: int = 1
    dynamic: bool = False
    element_bytes: int = 2
    output_bytes: int = 2

    # rows of ones below V in shared memory, which make the tensor core sum P; of FP8
    sum_rows = 0

    # --- roles ---------------------------------------------------------------------------------------------------

    @property
    def consumer_warpgroups(self) -> int:
        return self.tile_m // WGMMA_M

    @property
    def threads(self) -> int:
        """One producer warpgroup (of which one warp works) and the consumers."""
        return WARPGROUP * (1 + self.consumer_warpgroups)

    @property
    def producer_registers(self) -> int:
        return REGISTER_SPLIT[self.consumer_warpgroups][0]

    @property
    def consumer_registers(self) -> int:
        return REGISTER_SPLIT[self.consumer_warpgroups][1]

    @property
    def launch_registers(self) -> int:
        """Registers per thread that the launch allots, and setmaxnreg moves about; what is left of the file nobody gets."""
        return min(REGISTER_FILE // self.threads // 8 * 8, 255)

    @property
    def accumulator_registers(self) -> int:
        """32-bit registers per consumer thread for S (fp32), P (16 bit) and O (fp32)."""
        return self.tile_n // 2 + self.tile_n * self.element_bytes // 8 + self.head_dim_v // 2

    @property
    def turning_warps(self) -> int:
        """Warps of the producer's warpgroup that transpose V on its way: an FP8 configuration's, if any."""
        return 0

    @property
    def raw_stages(self) -> int:
        """Slots of the ring in which V comes to those warps."""
        return 0

    @property
    def mailbox_readers(self) -> int:
        """Warps that read the next tile of a dynamic walk: of K's and of Q's loads, and the consumers'. Where warps turn V, Q's
        is the scheduler itself."""
        return 4 * self.consumer_warpgroups + (1 + self.turning_warps if self.turning_warps else 2)

    # --- barriers ------------------------------------------------------------------------------------------------

    @property
    def full_arrivals(self) -> int:
        """Arrivals that fill a stage: the elected producer thread; the rest of the phase is transaction bytes."""
        return 1

    @property
    def empty_arrivals(self) -> int:
        """Arrivals that free a stage: one per consumer warp."""
        return 4 * self.consumer_warpgroups

    @property
    def q_empty_arrivals(self) -> int:
        """Arrivals that free a consumer's Q: each of its warps after the last S = Q K^T, or, where the output takes Q's
        place, the one warp that has seen it leave."""
        return 4 if self.own_output or self.direct_output else 1

    # --- bytes: what one barrier phase must see --------------------------------------------------------------------

    @property
    def q_bytes(self) -> int:
        return self.tile_m * self.head_dim * self.element_bytes

    @property
    def k_bytes(self) -> int:
        return self.tile_n * self.head_dim * self.element_bytes

    @property
    def v_bytes(self) -> int:
        return self.tile_n * self.head_dim_v * self.element_bytes

    @property
    def o_bytes(self) -> int:
        """The staged output tile, on its way from registers to global memory."""
        return self.tile_m * self.head_dim_v * self.output_bytes

    @property
    def q_and_o_bytes(self) -> int:
        if self.direct_output:
            return self.q_bytes
        return self.q_bytes + self.o_bytes if self.own_output else max(self.q_bytes, self.o_bytes)

    @property
    def smem_bytes(self) -> int:
        """Q, O, the K and V rings, and 1 KB for barriers and alignment."""
        ones = self.tile_n * self.sum_rows * self.element_bytes
        return self.q_and_o_bytes + self.stages * (self.k_bytes + self.v_bytes + ones) + 1024

    # --- tile ranges: producer, consumers and simulator call the same function --------------------------------------

    # (the kernel calls them on dynamic integers, for which Python's min and max cannot decide, and hands over the DSL's)

    def first_query(self, m_block, consumer=0):
        """The query of the first row of a consumer's 64 in tile `m_block`."""
        return (m_block * self.tile_m + consumer * WGMMA_M) // self.pack_gqa

    def last_query(self, m_block):
        """The query of the tile's last row, whether it exists or not."""
        return ((m_block + 1) * self.tile_m - 1) // self.pack_gqa

    def key_blocks(self, m_block, seqlen_q, seqlen_k, min=min, max=max, right=0):
        """The end of the key blocks that query tile `m_block` reads: first_key_block <= n < the returned number.

        Blocks are visited from the highest n down. Query i of a causal tile sees keys `<= i + seqlen_k - seqlen_q`, of one
        with a window `right` more.
        """
        blocks = ceil_div(seqlen_k, self.tile_n)
        if self.causal or self.window:
            visible = self.last_query(m_block) + 1 + seqlen_k - seqlen_q + right
            blocks = min(blocks, ceil_div(max(visible, 0), self.tile_n))
        return blocks

    def unmasked_key_blocks(self, m_block, seqlen_q, seqlen_k, min=min, max=max, consumer=0, right=0):
        """The end of those that need no mask at their right: every key exists and every row of `consumer` (and of the
        consumers after it) sees it, as far as the window's left side does not forbid. Consumer 0 stands for the whole tile."""
        blocks = seqlen_k // self.tile_n
        if self.causal or self.window:
            visible = self.first_query(m_block, consumer) + 1 + seqlen_k - seqlen_q + right
            blocks = min(blocks, max(visible, 0) // self.tile_n)
        return blocks

    def first_key_block(self, m_block, seqlen_q, seqlen_k, left, max=max):
        """The first key block that some row of the tile sees: query i sees keys `>= i + seqlen_k - seqlen_q - left`."""
        return max(self.first_query(m_block) + seqlen_k - seqlen_q - left, 0) // self.tile_n

    def first_unmasked_key_block(self, m_block, seqlen_q, seqlen_k, left, max=max):
        """The first key block whose keys the window's left side forbids to no row of the tile."""
        return ceil_div(max(self.last_query(m_block) + seqlen_k - seqlen_q - left, 0), self.tile_n)

    def heads_of_section(self, seqlen_k, heads, kv_heads, batch, min=min, max=max):
        """Query heads that a dynamic walk keeps together, long tiles first: as many as have their K and V in L2 at once, and
        sections as equal as they can be (a small last one would leave CTAs idle). `heads` are those of one batch entry."""
        per_head = seqlen_k * (self.head_dim + self.head_dim_v) * self.element_bytes
        sequences = kv_heads * batch
        fitting = max(min(L2_BYTES // per_head, sequences), 1)
        return ceil_div(sequences, ceil_div(sequences, fitting)) * (heads // kv_heads)

    # --- budget ----------------------------------------------------------------------------------------------------

    def budget(self) -> str:
        """The register and shared-memory sums in words."""
        regs = WARPGROUP * (self.producer_registers + self.consumer_warpgroups * self.consumer_registers)
        return (
            f"shared memory: Q and O {self.q_and_o_bytes} + {self.stages} stages x (K {self.k_bytes} + V {self.v_bytes})"
            f" + 1024 = {self.smem_bytes} of {SMEM_LIMIT} bytes; "
            f"registers: 128 x ({self.producer_registers} + {self.consumer_warpgroups} x {self.consumer_registers}) = {regs}"
            f" of {self.threads} x {self.launch_registers} = {self.threads * self.launch_registers}; "
            f"S + P + O = {self.accumulator_registers} of {self.consumer_registers} per consumer thread"
        )

    def with_room(self) -> "ForwardConfig":
        """Self, with memory of its own for the output where shared memory has room for it."""
        roomier = replace(self, own_output=True)
        return roomier if roomier.smem_bytes <= SMEM_LIMIT else self

    def validate(self) -> "ForwardConfig":
        """Returns self, or raises ValueError with the broken rule and, where it is one of room, the budget."""
        shape = (
            (
                self.head_dim * self.element_bytes % SWIZZLE_BYTES
                == 0
                == self.head_dim_v * self.element_bytes % SWIZZLE_BYTES,
                "head dims must be whole numbers of 64 bytes",
            ),
            (
                self.tile_m % WGMMA_M == 0 and self.consumer_warpgroups in REGISTER_SPLIT,
                "tile_m must be 64, 128 or 192",
            ),
            (self.tile_n % 16 == 0 and 16 <= self.tile_n <= 256, "tile_n must be a multiple of 16 in 16..256"),
            (self.stages in (1, 2, 4, 8), "stages must be 1, 2, 4 or 8"),
            (not (self.causal and self.window), "causal is the window whose right side is 0: one of them"),
            (self.pack_gqa in (1, 2, 4, 8, 16, 32, 64), "pack_gqa must be a power of two up to 64"),
            (
                not (self.own_output and self.direct_output),
                "an output with own_output goes through that memory: no direct_output",
            ),
            (self.causal or not self.dynamic, "dynamic tiles are for causal masks: without one all are equally long"),
        )
        for ok, rule in shape:
            if not ok:
                raise ValueError(f"{self}: {rule}")
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"{self}: shared memory exceeded. {self.budget()}")
        handed_out = self.producer_registers + self.consumer_warpgroups * self.consumer_registers
        if WARPGROUP * handed_out > self.threads * self.launch_registers:
            raise ValueError(
                f"{self}: setmaxnreg would wait for ever for registers that the launch has not allotted. {self.budget()}"
            )
        if self.accumulator_registers + 24 > self.consumer_registers:
            raise ValueError(f"{self}: accumulators leave fewer than 24 registers for the rest. {self.budget()}")
        return self


# (tile_m, tile_n, ping_pong) by compiled head dims of Q and K, and of V. As many keys as shared memory and registers allow
# (d256: 80, since two stages of 96 need more than 227 KB); three consumers where a row's output is narrow enough for 160
# registers; turns where the H200 measured them as faster (bench/NOTES.md).
TILES = {
    (64, 64): (192, 128, True),
    (96, 96): (192, 112, False),
    (128, 128): (128, 128, False),
    (192, 128): (128, 128, True),
    (192, 192): (128, 112, True),
    (256, 256): (128, 80, True),
}

# Causal tiles of 192 rows leave much of a short sequence masked: up to this many queries 128 rows are faster
# (H200, d64: 512 queries 39 %, 1024 12 %, 2048 8 %; 4096 and longer slower).
SHORT_CAUSAL = 2048
# From this many queries on, causal tiles come from a counter (H200: d64 3 to 5 %, d128 1 to 4 %; 5 % slower at 512); of head dims
# above 128 at any length (2 to 4 %).
DYNAMIC_CAUSAL = 1024
# From this many queries on, d128 without a mask takes 160 keys at a time (H200: 2 to 3 % at 16k, level at 4k and 32k).
LONG_FULL = 8192


def forward_config(
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    seqlen_q: int | None = None,
    *,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    pack_gqa: int = 1,
) -> ForwardConfig:
    """The configuration for tensors of these head dims (multiples of 8, at most 256); without `seqlen_q`, for long ones.

    `seqlen_q` counts queries. The other arguments are `ForwardConfig`'s.
    """
    tile_d, tile_dv = (next(d for d in HEAD_DIMS if d >= x) for x in (head_dim, head_dim_v))
    widest = max(tile_d, tile_dv)
    tile_m, tile_n, ping_pong = TILES.get((tile_d, tile_dv), TILES[widest, widest])
    rows = float("inf") if seqlen_q is None else seqlen_q * pack_gqa
    if (causal or window) and rows <= SHORT_CAUSAL:
        tile_m = min(tile_m, 128)
    if tile_m == 192 and (softcap or (window and widest > 64)):  # 160 registers have no room for it
        tile_m = 128
    if widest == 192 and window and pack_gqa > 1:  # 240 registers have no room for 112 keys with all of this
        tile_n = 96
    if (tile_d, tile_dv) == (128, 128) and not (causal or window or softcap) and rows >= LONG_FULL:
        tile_n = 160
    if causal and (tile_d, tile_dv) == (
        128,
        128,
    ):  # H200: 1 to 2 % faster with turns, whereas without a mask they cost 2 to 4 %
        ping_pong = True
    config = ForwardConfig(
        tile_d, tile_dv, tile_m, tile_n,
        causal=causal, ping_pong=ping_pong, window=window, softcap=softcap, sinks=sinks, pack_gqa=pack_gqa,
        dynamic=causal and (widest > 128 or rows >= DYNAMIC_CAUSAL),
    )  # fmt: skip
    config = config.with_room()
    return replace(config, direct_output=not config.own_output).validate()
