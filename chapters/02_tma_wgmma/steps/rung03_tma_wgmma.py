"""Rung 3: Hopper's copies and products, one warpgroup, everything waits.

Adds to rung 2      TMA: one thread copies whole tiles, swizzled, and an mbarrier counts their bytes;
                    WGMMA: four warps multiply 64-row tiles straight from shared memory. No compiler chooses for us
Expect              right, and slow: whichever unit works, the others stand still
Look for in SASS    UTMALDG, HGMMA, SYNCS (mbarriers); no LDGSTS, no HMMA; no STL or LDL

    role        threads              does
    warpgroup   0..127               per key block: copy K, wait, S = Q K^T, wait, softmax, copy V, wait, O += P V, wait

    barrier     full when            reused when
    Q           1 arrival + q_bytes  never
    K, V        1 arrival + bytes    every thread has passed the sync_threads() at the end of the key block
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.cute.nvgpu as nvgpu
import cutlass.utils.hopper_helpers as hopper
import torch
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from fa3_course import device_softmax as softmax
from fa3_course import rung_host
from fa3_lib.config import WARPGROUP, WGMMA_M, ForwardConfig, ceil_div

WARP = 32
TILE_M = WGMMA_M
TILE_N = {64: 128, 128: 128, 192: 96, 256: 80}  # by head dim: as wide as shared memory and registers allow
STAGES = 1


class Tma(NamedTuple):
    """A tensor in global memory, the copy that moves tiles of it, and their layout in shared memory."""

    atom: cute.CopyAtom
    tensor: cute.Tensor
    layout: cute.ComposedLayout


class Attention:
    """One compiled kernel: `__call__` runs on the host, everything else on the GPU."""

    min_smem = 0  # bytes; experiments raise it to keep a second CTA off the SM

    def __init__(self, config: ForwardConfig, dtype: type[cutlass.Numeric]):
        self.config, self.dtype = config.validate(), dtype

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (b, sq, h, d)
        mK: cute.Tensor,  # (b, sk, hk, d)
        mV: cute.Tensor,  # (b, sk, hk, dv)
        mO: cute.Tensor,  # (b, sq, h, dv)
        mLSE: cute.Tensor,  # (b, h, sq) fp32
        softmax_scale: Float32,
        stream,
    ):
        cfg, dtype = self.config, self.dtype
        # TMA sees (rows, columns, head, batch); V as (columns, rows, ...): the B operand of PV is (N = dv, K = keys)
        mQ, mK, mO = (cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0])) for x in (mQ, mK, mO))
        mV = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[3, 1, 2, 0]))

        # swizzled shared-memory layouts: Q (and O in its place), a K and a V tile per stage
        tile_qk, tile_pv = (WGMMA_M, cfg.tile_n, cfg.head_dim), (WGMMA_M, cfg.head_dim_v, cfg.tile_n)
        sQ_layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile_qk, dtype, 1)
        sK_layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile_qk, dtype, cfg.stages)
        sV_layout = hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, tile_pv, dtype, cfg.stages)
        sO_layout = hopper.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, tile_pv[:2], 1)

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        Q = make_tma(load, mQ, sQ_layout, (WGMMA_M, cfg.head_dim))
        K = make_tma(load, mK, sK_layout, (cfg.tile_n, cfg.head_dim))
        V = make_tma(load, mV, sV_layout, (cfg.head_dim_v, cfg.tile_n))
        O = make_tma(store, mO, sO_layout, (WGMMA_M, cfg.head_dim_v))

        @cute.struct
        class SharedStorage:
            barriers: cute.struct.MemRange[cutlass.Int64, 3]
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sQ_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sK_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sV_layout)], 1024]

        self.storage = SharedStorage
        self.kernel(Q, K, V, O, mLSE, softmax_scale * math.log2(math.e)).launch(
            grid=[ceil_div(mQ.shape[0], cfg.tile_m) * mQ.shape[2] * mQ.shape[3], 1, 1],
            block=[WARPGROUP, 1, 1],
            smem=max(SharedStorage.size_in_bytes(), self.min_smem),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        Q: Tma,  # (sq, d, h, b)
        K: Tma,  # (sk, d, hk, b)
        V: Tma,  # (dv, sk, hk, b)
        O: Tma,  # (sq, dv, h, b)
        mLSE: cute.Tensor,  # (b, h, sq)
        scale_log2: Float32,
    ):
        cfg = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sQ = storage.q.get_tensor(Q.layout.outer, swizzle=Q.layout.inner)  # (64, d, 1)
        sK = storage.k.get_tensor(K.layout.outer, swizzle=K.layout.inner)  # (tile_n, d, stage)
        sV = storage.v.get_tensor(V.layout.outer, swizzle=V.layout.inner)  # (dv, tile_n, stage)
        sO = storage.q.get_tensor(O.layout.outer, swizzle=O.layout.inner)  # (64, dv, 1): Q's memory

        q_barrier = storage.barriers.data_ptr()
        k_barrier, v_barrier = q_barrier + 1, q_barrier + 2
        if warp == 0:
            for tma in (Q, K, V, O):
                cpasync.prefetch_descriptor(tma.atom)
            with cute.arch.elect_one():
                for barrier in (q_barrier, k_barrier, v_barrier):
                    cute.arch.mbarrier_init(barrier, cfg.full_arrivals)
        cute.arch.mbarrier_init_fence()  # the copies' unit must see the barriers, too
        cute.arch.sync_threads()

        mQ, mK, mV, mO = Q.tensor, K.tensor, V.tensor, O.tensor
        # query tiles of one head are neighbours in the grid, so that they find K and V in L2
        m_blocks = ceil_div(mQ.shape[0], cfg.tile_m)
        m_block, head = cute.arch.block_idx()[0] % m_blocks, cute.arch.block_idx()[0] // m_blocks
        if const_expr(cfg.causal):
            m_block = m_blocks - 1 - m_block  # the longest rows first: short ones fill the end of the grid
        head, batch = head % mQ.shape[2], head // mQ.shape[2]
        kv_head = head // (mQ.shape[2] // mK.shape[2])
        gQ = cute.local_tile(mQ[None, None, head, batch], (WGMMA_M, cfg.head_dim), (None, 0))  # (64, d, 64-row tile)
        gO = cute.local_tile(mO[None, None, head, batch], (WGMMA_M, cfg.head_dim_v), (None, 0))
        gK = cute.local_tile(mK[None, None, kv_head, batch], (cfg.tile_n, cfg.head_dim), (None, 0))  # (tile_n, d, n)
        gV = cute.local_tile(mV[None, None, kv_head, batch], (cfg.head_dim_v, cfg.tile_n), (0, None))  # (dv, tile_n, n)

        seqlen_q, seqlen_k = mQ.shape[0], mK.shape[0]
        n_blocks = cfg.key_blocks(m_block, seqlen_q, seqlen_k, cutlass.min, cutlass.max)
        n_unmasked = cfg.unmasked_key_blocks(m_block, seqlen_q, seqlen_k, cutlass.min, cutlass.max)

        copy_Q = (Q.atom, *partition_tma(Q.atom, sQ, gQ), q_barrier, cfg.q_bytes)
        copy_K = (K.atom, *partition_tma(K.atom, sK, gK), k_barrier, cfg.k_bytes)
        copy_V = (V.atom, *partition_tma(V.atom, sV, gV), v_barrier, cfg.v_bytes)
        self.load(copy_Q, m_block)
        thread = cute.arch.thread_idx()[0]
        mma_pv = self.make_mma_pv()
        acc_O, row_max, row_sum = self.attend(
            mma_pv, sQ[None, None, 0], sK, sV, q_barrier, copy_K, copy_V,
            thread, m_block * WGMMA_M, seqlen_q, seqlen_k, n_blocks, n_unmasked, scale_log2,
        )  # fmt: skip
        self.epilogue(
            mma_pv, O.atom, acc_O, row_max, row_sum, scale_log2, sO[None, None, 0],
            gO[None, None, m_block], mLSE[batch, head, None], thread, m_block * WGMMA_M, seqlen_q,
        )  # fmt: skip

    def make_mma_qk(self, accumulate: bool) -> cute.TiledMma:
        """S (64, tile_n) = Q (64, d) K^T (d, tile_n), both operands K-major in shared memory."""
        mma = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32,
            (1, 1, 1), (WGMMA_M, self.config.tile_n),
        )  # fmt: skip
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        return mma

    def make_mma_pv(self) -> cute.TiledMma:
        """O (64, dv) += P (64, tile_n) V (tile_n, dv): P from registers, V as it was loaded (dv contiguous, MN-major)."""
        mma = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32,
            (1, 1, 1), (WGMMA_M, self.config.head_dim_v), warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        mma.set(warpgroup.Field.ACCUMULATE, True)
        return mma

    @cute.jit
    def load(self, copy, tile):
        """One elected thread of warp 0 announces the bytes and starts the copy; it returns before they have landed."""
        tma, smem, gmem, barrier, tile_bytes = copy
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, tile_bytes)
            cute.copy(tma, gmem[None, tile], smem[None, 0], tma_bar_ptr=barrier)

    @cute.jit
    def attend(
        self, mma_pv, sQ, sK, sV, q_barrier, copy_K, copy_V,
        thread, first_row, seqlen_q, seqlen_k, n_blocks, n_unmasked, scale_log2,
    ):  # fmt: skip
        """The main loop; returns acc_O, row_max, row_sum, not yet normalised."""
        cfg = self.config
        mmas_qk = (self.make_mma_qk(accumulate=False), self.make_mma_qk(accumulate=True))
        thr_qk, thr_pv = mmas_qk[0].get_slice(thread), mma_pv.get_slice(thread)
        tSrK = mmas_qk[0].make_fragment_B(thr_qk.partition_B(sK))
        tOrV = mma_pv.make_fragment_B(thr_pv.partition_B(sV))
        acc_S = cute.make_rmem_tensor(thr_qk.partition_shape_C((WGMMA_M, cfg.tile_n)), Float32)
        tOrP = cute.make_rmem_tensor(thr_pv.partition_shape_A((WGMMA_M, cfg.tile_n)), self.dtype)
        acc_O = cute.make_rmem_tensor(thr_pv.partition_shape_C((WGMMA_M, cfg.head_dim_v)), Float32)
        row_max = cute.make_rmem_tensor(softmax.ROWS, Float32)
        row_sum = cute.make_rmem_tensor(softmax.ROWS, Float32)
        acc_O.fill(0.0)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)

        cute.arch.mbarrier_wait(q_barrier, 0)
        tSrQ = self.q_operand(mmas_qk[0], thread, sQ)
        phase = Int32(0)  # of the K and V barriers: it flips with every tile
        # blocks that need the mask come first (the highest n), the others run without it
        for i in cutlass.range(n_blocks - n_unmasked, unroll=1):
            n = n_blocks - 1 - i
            self.qk(mmas_qk, tSrQ, tSrK, acc_S, copy_K, n, phase)
            softmax.apply_mask(acc_S, thread, first_row, n * cfg.tile_n, seqlen_q, seqlen_k, cfg.causal)
            shrink = softmax.step(acc_S, row_max, row_sum, scale_log2, may_be_empty=True)
            self.pv(mma_pv, acc_S, tOrP, tOrV, acc_O, shrink, copy_V, n, phase)
            phase ^= 1
        for i in cutlass.range(n_unmasked, unroll=1):
            n = n_unmasked - 1 - i
            self.qk(mmas_qk, tSrQ, tSrK, acc_S, copy_K, n, phase)
            shrink = softmax.step(acc_S, row_max, row_sum, scale_log2, may_be_empty=False)
            self.pv(mma_pv, acc_S, tOrP, tOrV, acc_O, shrink, copy_V, n, phase)
            phase ^= 1
        return acc_O, row_max, row_sum

    def q_operand(self, mma_qk, thread, sQ):
        """Q as WGMMA reads it: descriptors of its place in shared memory, from which every key block reads it anew."""
        return mma_qk.make_fragment_A(mma_qk.get_slice(thread).partition_A(sQ))

    @cute.jit
    def qk(self, mmas_qk, tSrQ, tSrK, acc_S, copy_K, n, phase):
        """S = Q K^T of key block n."""
        self.load(copy_K, n)
        cute.arch.mbarrier_wait(copy_K[3], phase)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(tSrQ, mode=[2])):
            mma = mmas_qk[0] if const_expr(k == 0) else mmas_qk[1]
            cute.gemm(mma, acc_S, tSrQ[None, None, k], tSrK[None, None, k, 0], acc_S)
        warpgroup.commit_group()
        warpgroup.wait_group(0)

    @cute.jit
    def pv(self, mma_pv, acc_S, tOrP, tOrV, acc_O, shrink, copy_V, n, phase):
        """O = O * shrink + P V of key block n."""
        # the accumulator fragment of 16 keys is, register by register, the A fragment of one k-step
        for i in cutlass.range_constexpr(cute.size(tOrP)):
            tOrP[i] = acc_S[i].to(self.dtype)
        softmax.scale_rows(acc_O, shrink)
        self.load(copy_V, n)
        cute.arch.mbarrier_wait(copy_V[3], phase)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(tOrP, mode=[2])):
            cute.gemm(mma_pv, acc_O, tOrP[None, None, k], tOrV[None, None, k, 0], acc_O)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.arch.sync_threads()  # all warps have read K and V: the next copies may overwrite them

    @cute.jit
    def epilogue(
        self, mma_pv, tma_O, acc_O, row_max, row_sum, scale_log2, sO, gO, gLSE, thread, first_row, seqlen_q
    ):  # fmt: skip
        """Normalised O: registers -> stmatrix -> Q's memory -> TMA store."""
        inverse, lse = softmax.finish_rows(row_max, row_sum, scale_log2)
        softmax.scale_rows(acc_O, inverse)
        for r in cutlass.range_constexpr(softmax.ROWS):
            row = first_row + softmax.row_in_tile(thread, r)
            if thread % softmax.THREADS_PER_ROW == 0 and row < seqlen_q:
                gLSE[row] = lse[r]

        rO = cute.make_rmem_tensor_like(acc_O, self.dtype)
        rO.store(acc_O.load().to(self.dtype))
        r2s = cute.make_tiled_copy_C(cute.make_copy_atom(nvgpu.warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma_pv)
        thr_r2s = r2s.get_slice(thread)
        # every warp of the warpgroup has read its last Q
        cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP)
        cute.copy(r2s, thr_r2s.retile(rO), thr_r2s.partition_D(sO))
        cute.arch.fence_proxy("async.shared", space="cta")  # TMA must see what the threads wrote
        cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP)
        if thread < WARP:
            tOsO, tOgO = partition_tma(tma_O, sO, gO)
            cute.copy(tma_O, tOsO, tOgO)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the store's reads


def make_tma(op, tensor, layout, box) -> Tma:
    """The descriptor that copies boxes of `tensor` to or from one tile (the last mode's index 0) of `layout`."""
    return Tma(*cpasync.make_tiled_tma_atom(op, tensor, cute.slice_(layout, (None, None, 0)), box), layout)


def partition_tma(atom, smem, gmem):
    """(smem, gmem) with the tile in one mode, as `cute.copy` of a TMA atom wants them; no multicast."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


def make_config(head_dim: int, causal: bool) -> ForwardConfig:
    """This rung's tiles for head dims up to `head_dim`; TMA fills the missing columns with zeros."""
    d = next(d for d in TILE_N if d >= head_dim)
    return ForwardConfig(d, d, TILE_M, TILE_N[d], stages=STAGES, causal=causal).validate()


def compile_rung(config: ForwardConfig, dtype: torch.dtype, options: str = ""):
    """The compiled kernel; no GPU is needed."""
    return rung_host.compile_kernel(Attention, config, dtype, options)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention on CUDA tensors: q `(b, sq, h, d)`, k `(b, sk, hk, d)`, v `(b, sk, hk, dv)` -> (out, lse)."""
    return rung_host.run(Attention, make_config, q, k, v, softmax_scale, causal)
