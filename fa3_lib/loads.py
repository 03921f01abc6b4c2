"""The producer's side: rings of shared-memory stages, and the two warps that fill them by TMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from fa3_lib.config import WGMMA_M, ForwardConfig
from fa3_lib.walk import Walk


class Ring:
    """Stages with a full and an empty barrier each. Tiles are counted from 0; tile `i` lies in stage `i % stages`.

    `stages` is 1, 2, 4 ...; `tile_bytes` is what one phase of a full barrier must see.
    """

    def __init__(self, full: cute.Pointer, empty: cute.Pointer, stages: int, tile_bytes: int):
        self.full, self.empty, self.stages, self.tile_bytes = full, empty, stages, tile_bytes

    def stage(self, tile: Int32) -> Int32:
        return tile & (self.stages - 1)

    def phase(self, tile: Int32) -> Int32:
        return (tile >> (self.stages.bit_length() - 1)) & 1

    @cute.jit
    def load(self, atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, tile: Int32):
        """Waits until the stage of `tile` is free, announces its bytes and starts the copy. `target` has a mode of stages."""
        stage = self.stage(tile)
        full = self.full + stage
        self.acquire(tile)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.tile_bytes)
        cute.copy(atom, source, target[None, stage], tma_bar_ptr=full)

    @cute.jit
    def acquire(self, tile: Int32):
        """The producer's: until the stage of `tile` is free. Passes at once the first time: no phase has ended yet."""
        cute.arch.mbarrier_wait(self.empty + self.stage(tile), self.phase(tile) ^ 1)

    @cute.jit
    def fill(self, tile: Int32):
        """For warps that wrote `tile` themselves, one arrival per warp: it has come."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.full + self.stage(tile))

    @cute.jit
    def wait(self, tile: Int32):
        """The consumer's: until `tile` has come."""
        cute.arch.mbarrier_wait(self.full + self.stage(tile), self.phase(tile))

    @cute.jit
    def release(self, tile: Int32):
        """The consumer's, one arrival per warp: the stage of `tile` may be overwritten."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + self.stage(tile))


def init_rings(rings, full_arrivals: int, empty_arrivals: int):
    """One thread does this before any other uses the barriers."""
    for ring in rings:
        for stage in range(ring.stages):
            cute.arch.mbarrier_init(ring.full + stage, full_arrivals)
            cute.arch.mbarrier_init(ring.empty + stage, empty_arrivals)


def partition_tma(atom, smem, gmem):
    """(smem, gmem) with the tile in one mode, as `cute.copy` of a TMA atom wants them; no multicast."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


class Loads:
    """The loading warps of one CTA; K, V and, per consumer, Q: the rings they fill. `scores` says which keys a tile reads."""

    def __init__(self, config: ForwardConfig, walk: Walk, scores, K: Ring, V: Ring, Q: list[Ring]):
        self.config, self.walk, self.scores, self.K, self.V, self.Q = config, walk, scores, K, V, Q

    @cute.jit
    def load_kv(self, tma_K, mK, sK, tma_V, mV, sV):
        """K(n), V(n), from a tile's last key block down to its first.

        mK `(sk, d, kv_heads, b)`, mV `(dv, sk, kv_heads, b)`.
        """
        cfg = self.config
        group = self.walk.heads // mK.shape[2]
        loaded, taken, index = Int32(0), Int32(0), self.walk.first()
        while index < self.walk.end:
            m_block, head, batch = self.walk.tile(index)
            gK = cute.local_tile(mK[None, None, head // group, batch], (cfg.tile_n, cfg.head_dim), (None, 0))
            gV = cute.local_tile(mV[None, None, head // group, batch], (cfg.head_dim_v, cfg.tile_n), (0, None))
            tKsK, tKgK = partition_tma(tma_K, sK, gK)
            tVsV, tVgV = partition_tma(tma_V, sV, gV)
            first, end = self.scores.key_range(m_block)
            if end <= first:  # no row of the tile sees a key
                self.walk.ask()
            for j in cutlass.range(end - first, unroll=1):
                n = end - 1 - j
                if n == first:
                    self.walk.ask()
                self.K.load(tma_K, tKgK[None, n], tKsK, loaded + j)
                self.V.load(tma_V, tVgV[None, n], tVsV, loaded + j)
            loaded += cutlass.max(end - first, 0)
            index = self.walk.next(index, taken)
            taken += 1

    @cute.jit
    def load_q(self, tma_Q, mQ, sQ):
        """Each consumer's 64 rows as soon as it has done with its last ones. mQ `(rows, d, heads, b)`, sQ `(64, d, consumer)`."""
        cfg = self.config
        consumers = cfg.consumer_warpgroups
        taken, index = Int32(0), self.walk.first()
        while index < self.walk.end:
            m_block, head, batch = self.walk.tile(index)
            gQ = cute.local_tile(mQ[None, None, head, batch], (WGMMA_M, cfg.head_dim), (None, 0))
            for i in cutlass.range_constexpr(consumers):
                tQsQ, tQgQ = partition_tma(tma_Q, cute.local_tile(sQ, (WGMMA_M, cfg.head_dim, 1), (0, 0, i)), gQ)
                self.Q[i].load(tma_Q, tQgQ[None, m_block * consumers + i], tQsQ, taken)
            index = self.walk.next(index, taken)
            taken += 1
