"""What the simulated attention kernels share: the problem, the tiles of a CTA, the online softmax, the epilogue.

Stages, bytes, arrival counts and tile ranges come from `fa3_lib.config.ForwardConfig`, the object that the DSL kernel is
compiled from: a wrong count fails here first.
"""

from dataclasses import dataclass, field

import numpy as np

from fa3_lib.config import WGMMA_M, ForwardConfig
from hopper_sim import SM, GlobalTensor, Role, SharedTile
from hopper_sim.barriers import Mbarrier, NamedBarrier

LOG2E, LN2 = float(np.log2(np.e)), float(np.log(2.0))
WARPS = 4  # of a warpgroup: each arrives by itself when a stage is free
WARP = 32  # threads of the producer warp


@dataclass(frozen=True)
class Problem:
    """The tensors of one call and the configuration that serves them.

    Args:
        q: (b, sq, h, d). k: (b, sk, hk, d). v: (b, sk, hk, dv); of 16-bit formats.
        out: (b, sq, h, dv). lse: (b, h, sq) f32.
        scale_log2: softmax scale times log2(e).
    """

    config: ForwardConfig
    q: GlobalTensor
    k: GlobalTensor
    v: GlobalTensor
    out: GlobalTensor
    lse: GlobalTensor
    scale_log2: float

    @property
    def seqlens(self) -> tuple[int, int]:
        return self.q.shape[1], self.k.shape[1]

    @property
    def m_blocks(self) -> int:
        return -(-self.q.shape[1] // self.config.tile_m)

    def kv_head(self, head: int) -> int:
        return head // (self.q.shape[2] // self.k.shape[2])

    def blocks(self, m: int) -> range:
        """The key blocks that query tile m reads, from the highest down. Every role takes them from here."""
        return range(self.config.key_blocks(m, *self.seqlens) - 1, -1, -1)

    def tiles(self) -> list[tuple[int, int, int]]:
        """(m, head, batch) of every query tile, the ones with most keys first."""
        batch, _, heads, _ = self.q.shape
        tiles = [(m, h, b) for b in range(batch) for h in range(heads) for m in range(self.m_blocks)]
        return sorted(tiles, key=lambda tile: -len(self.blocks(tile[0])))

    def walk(self, cta: int, ctas: int) -> list[tuple[int, int, int]]:
        """(m, head, batch) of the tiles that one of `ctas` persistent CTAs visits, in its order."""
        heads, batch = self.q.shape[2], self.q.shape[0]
        tiles = walk(self.m_blocks, heads * batch, self.config.causal, cta, ctas)
        return [(m, sequence % heads, sequence // heads) for m, sequence in tiles]


def walk(m_blocks: int, sequences: int, causal: bool, cta: int, ctas: int) -> list[tuple[int, int]]:
    """(m, sequence) of one persistent CTA's tiles, as `fa3_lib.forward_sm90` numbers them; a sequence is a head of a batch.

    Tiles of one head are neighbours, so that they share K and V in L2. Causal tiles differ in length: a CTA takes a long
    one and its short mirror image in turn, so that every pair is equally long.
    """
    if not causal:
        return [(unit % m_blocks, unit // m_blocks) for unit in range(cta, m_blocks * sequences, ctas)]
    pairs = -(-m_blocks // 2)
    tiles = []
    for unit in range(cta, pairs * sequences, ctas):
        short, sequence = unit % pairs, unit // pairs
        long = m_blocks - 1 - short
        tiles += [(long, sequence)] if short == long else [(long, sequence), (short, sequence)]
    return tiles


@dataclass(frozen=True)
class Tiles:
    """Shared memory and barriers of one CTA."""

    q: SharedTile  # (consumer, 64, d); the output is staged in the same memory, or in `o`
    k: SharedTile  # (stage, tile_n, d)
    v: SharedTile  # (stage, tile_n, dv)
    q_full: list[Mbarrier]  # one for all consumers, or one each
    k_full: list[Mbarrier]
    k_empty: list[Mbarrier]
    v_full: list[Mbarrier]
    v_empty: list[Mbarrier]
    turns: list[NamedBarrier] = field(default_factory=list)
    q_empty: list[Mbarrier] = field(default_factory=list)
    o: SharedTile | None = None  # (consumer, 64, dv), where the output has memory of its own


def consumer_names(config: ForwardConfig) -> tuple[str, ...]:
    return tuple(f"consumer{i}" for i in range(config.consumer_warpgroups))


def make_tiles(sm: SM, p: Problem, loader: str = "producer", q_loader: str = "") -> Tiles:
    """The tiles that the configuration describes.

    Args:
        loader: the role that starts the copies. q_loader: another one that loads Q, for each consumer by itself.
    """
    c, consumers = p.config, consumer_names(p.config)
    if c.head_dim != c.head_dim_v:
        raise ValueError(
            f"head_dim {c.head_dim} and head_dim_v {c.head_dim_v} differ: O would not fit Q's memory, row by row"
        )
    return Tiles(
        q=sm.shared("Q", (c.consumer_warpgroups, WGMMA_M, c.head_dim), p.q.dtype),
        k=sm.shared("K", (c.stages, c.tile_n, c.head_dim), p.k.dtype),
        v=sm.shared("V", (c.stages, c.tile_n, c.head_dim_v), p.v.dtype),
        q_full=sm.mbarriers("Q full", len(consumers) if q_loader else 1, c.full_arrivals, by=(q_loader or loader,)),
        k_full=sm.mbarriers("K full", c.stages, c.full_arrivals, by=(loader,)),
        k_empty=sm.mbarriers("K empty", c.stages, c.empty_arrivals, by=consumers),
        v_full=sm.mbarriers("V full", c.stages, c.full_arrivals, by=(loader,)),
        v_empty=sm.mbarriers("V empty", c.stages, c.empty_arrivals, by=consumers),
    )


def make_turns(sm: SM, config: ForwardConfig, first: int = 1) -> list[NamedBarrier]:
    """Ping-pong: barrier `first` + i says that consumer i may issue its GEMMs; it waits there, the one before it arrives there.

    None when the configuration does not want turns, or there is nobody to take turns with.
    """
    names = consumer_names(config)
    if len(names) == 1 or not config.ping_pong:
        return []
    turns = []
    for i, name in enumerate(names):
        before = names[i - 1]
        # consumer 0 opens the first turn for itself, so its barrier is left with one arrival
        left_over = 128 if i == 0 else 0
        turns.append(
            sm.named_barrier(first + i, threads=256, name=f"TURN_WG{i}", by=(before, name), left_over=left_over)
        )
    return turns


def load_q(warp: Role, p: Problem, t: Tiles, tile: tuple[int, int, int]) -> None:
    """Starts the copies of a query tile, one per consumer."""
    m, head, batch = tile
    t.q_full[0].arrive_expect_tx(p.config.q_bytes)
    for i in range(p.config.consumer_warpgroups):
        row = m * p.config.tile_m + i * WGMMA_M
        warp.tma_load(t.q[i], p.q, (batch, row, head, 0), (1, WGMMA_M, 1, p.config.head_dim), t.q_full[0])


def load_k(warp: Role, p: Problem, t: Tiles, tile: tuple[int, int, int], n: int, slot: int) -> None:
    """Starts the copy of key block n into a slot of the K ring."""
    _, head, batch = tile
    t.k_full[slot].arrive_expect_tx(p.config.k_bytes)
    at, box = (batch, n * p.config.tile_n, p.kv_head(head), 0), (1, p.config.tile_n, 1, p.config.head_dim)
    warp.tma_load(t.k[slot], p.k, at, box, t.k_full[slot])


def load_v(warp: Role, p: Problem, t: Tiles, tile: tuple[int, int, int], n: int, slot: int) -> None:
    """Starts the copy of value block n into a slot of the V ring."""
    _, head, batch = tile
    t.v_full[slot].arrive_expect_tx(p.config.v_bytes)
    at, box = (batch, n * p.config.tile_n, p.kv_head(head), 0), (1, p.config.tile_n, 1, p.config.head_dim_v)
    warp.tma_load(t.v[slot], p.v, at, box, t.v_full[slot])


class OnlineSoftmax:
    """Row maximum and row sum of one consumer's 64 rows.

    Args:
        m: query tile; me: which 64 rows of it. scale_log2: as in the problem, descales included.
        offset: added to the exponent of P, so that 8-bit P uses its range; it cancels in the output.
    """

    def __init__(self, wg: Role, p: Problem, m: int, me: int, scale_log2: float, offset: float = 0.0):
        self.wg, self.p, self.m, self.me = wg, p, m, me
        self.scale_log2, self.offset = np.float32(scale_log2), np.float32(offset)
        self.first_row = m * p.config.tile_m + me * WGMMA_M
        self.max = np.full((WGMMA_M, 1), -np.inf, dtype=np.float32)
        self.sum = np.zeros((WGMMA_M, 1), dtype=np.float32)

    async def step(self, scores: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """One key block: P (64, tile_n), not yet rounded, and the factor (64, 1) by which earlier outputs shrink."""
        if n >= self.p.config.unmasked_key_blocks(self.m, *self.p.seqlens, consumer=self.me):
            scores = self._mask(scores, n)
            await self.wg.spend("softmax", alu=2 * scores.size)  # compare the column, select
        await self.wg.spend("softmax", alu=scores.size)  # row maximum
        new_max = np.maximum(self.max, scores.max(axis=1, keepdims=True))
        safe = np.where(np.isneginf(new_max), np.float32(0), new_max) * self.scale_log2  # rows that saw no key yet
        shrink = np.exp2(self.max * self.scale_log2 - safe)
        weights = np.exp2(scores * self.scale_log2 - safe + self.offset)
        await self.wg.spend("softmax", fma=2 * scores.size, mufu=scores.size)  # scale and exp2, row sum
        self.sum = self.sum * shrink + weights.sum(axis=1, keepdims=True, dtype=np.float32)
        self.max = new_max
        await self.wg.spend("softmax", alu=scores.size / 2)  # two elements per conversion
        return weights, shrink

    def _mask(self, scores: np.ndarray, n: int) -> np.ndarray:
        c, (seqlen_q, seqlen_k) = self.p.config, self.p.seqlens
        key = n * c.tile_n + np.arange(scores.shape[1])[None, :]
        allowed = key < seqlen_k
        if c.causal:
            row = self.first_row + np.arange(WGMMA_M)[:, None]
            allowed = allowed & (key <= row + seqlen_k - seqlen_q)
        return np.where(allowed, scores, np.float32(-np.inf))

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """1 / row sum (64, 1) and the natural-log LSE (64,); 0 and -inf for a row without keys."""
        empty = self.sum == 0
        total = np.where(empty, np.float32(1), self.sum)
        lse = (self.max * self.scale_log2 + np.log2(total) - self.offset) * np.float32(LN2)
        return np.where(empty, np.float32(0), 1 / total), np.where(empty, np.float32(-np.inf), lse)[:, 0]


async def rescale(wg: Role, acc_O, shrink: np.ndarray) -> None:
    """O *= shrink, row by row."""
    acc_O.write(acc_O.read() * shrink)
    await wg.spend("rescale O", fma=acc_O.shape[0] * acc_O.shape[1])


async def epilogue(
    wg: Role,
    p: Problem,
    staged: SharedTile | None,
    tile: tuple[int, int, int],
    me: int,
    acc_O,
    rows: OnlineSoftmax,
    factor: float = 1.0,
    wait: bool = True,
) -> None:
    """Normalises O, stages it as 16-bit numbers in `staged` and stores it; stores LSE.

    Args:
        staged: (64, dv) in shared memory that nobody else uses any more; None: O goes from registers to global memory. factor: on the output, the descale of V.
        wait: until the store has left `staged`; otherwise it stays in flight, and the next epilogue waits for it.
    """
    m, head, batch = tile
    inverse, lse = rows.finish()
    row = m * p.config.tile_m + me * WGMMA_M
    await wg.spend("epilogue", fma=acc_O.shape[0] * acc_O.shape[1], alu=acc_O.shape[0] * acc_O.shape[1] / 2)
    await wg.store_global(p.lse, (batch, head, row), lse[None, None])
    output = acc_O.read() * inverse * np.float32(factor)
    if staged is None:
        await wg.store_global(p.out, (batch, row, head, 0), output[None, :, None])
        return
    await wg.wait_store(0)  # an output before this one has left the memory
    await wg.store_shared(staged, output)
    wg.fence_async_proxy()
    wg.tma_store(staged, p.out, (batch, row, head, 0), (1, WGMMA_M, 1, p.config.head_dim_v))
    wg.commit_store()
    if wait:
        await wg.wait_store(0)


def staging(p: Problem, t: Tiles, me: int) -> SharedTile:
    """Memory for a consumer's output: its own, or the consumer's 64 rows of Q, which it alone reads."""
    if t.o is not None:
        return t.o[me]
    return t.q[me].reuse(f"O[{me}]", (WGMMA_M, p.config.head_dim_v), p.out.dtype)
