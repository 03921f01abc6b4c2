"""The forward kernel for Hopper (sm_90a): TMA, WGMMA, warp specialisation, ping-pong, overlap, persistent CTAs.

One CTA per SM walks over tiles of `tile_m` query rows of one head. Its roles (counts and bytes are `ForwardConfig`'s):

    load_kv      warp 0: one thread starts the TMA loads of K(n), V(n), for n from the last key block down
    load_q       warp 1: one thread starts the TMA loads of each consumer's 64 query rows
    consume      warpgroups 1..: 64 query rows each, S = Q K^T and O += P V by WGMMA, online softmax in registers between
                 them, epilogue. Softmax(n) runs while the tensor cores work on the warpgroup's P V of the block before
                 and on the other warpgroups' GEMMs

Warpgroup 0 (the loads) hands its registers to the consumers by setmaxnreg. Barriers, all mbarriers in shared memory:

    barrier      one per              full when                        free when
    K ring       stage                1 arrival + k_bytes              one arrival per consumer warp
    V ring       stage                1 arrival + v_bytes              one arrival per consumer warp
    Q            consumer             1 arrival + its share of q_bytes q_empty_arrivals of its consumer
"""

import enum
import math

import cutlass
import cutlass.cute as cute
import cutlass.cute.nvgpu as nvgpu
import cutlass.utils.hopper_helpers as hopper
import torch
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.tensor_utils import LayoutEnum

from fa3_lib import softmax
from fa3_lib.compiler import COMPILE_LOCK
from fa3_lib.config import WARPGROUP, WGMMA_M, ForwardConfig, ceil_div

WARP = 32
WARPS_PER_GROUP = WARPGROUP // WARP
ALIGN_SWIZZLE = 1024  # bytes: 128-byte swizzled tiles start on the 8-row pattern's boundary


class NamedBarrier(enum.IntEnum):
    """Hardware barriers 1..15 of a CTA; 0 belongs to sync_threads()."""

    EPILOGUE = 1  # + consumer: the warps of one consumer, around its output tile
    TURN = 4  # + consumer: it may issue its GEMMs (the consumer waits, the one before it arrives)


class ForwardSm90:
    """Compile-time facts of one configuration; `__call__` is the host function, `kernel` the device function."""

    def __init__(self, config: ForwardConfig, dtype: type[cutlass.Numeric]):
        self.config = config.validate()
        self.dtype = dtype

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (b, sq, h, d)
        mK: cute.Tensor,  # (b, sk, hk, d)
        mV: cute.Tensor,  # (b, sk, hk, dv)
        mO: cute.Tensor,  # (b, sq, h, dv)
        mLSE: cute.Tensor | None,  # (b, h, sq) fp32, if wanted
        softmax_scale: Float32,
        max_ctas: Int32,
        stream,
    ):
        cfg, dtype = self.config, self.dtype
        consumers = cfg.consumer_warpgroups

        # TMA sees (rows, columns, head, batch); V as (columns, rows, ...): the B operand of PV is (N = dv, K = keys)
        mQ, mK, mO = (cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0])) for x in (mQ, mK, mO))
        mV = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[3, 1, 2, 0]))

        # Q has one 64-row tile per consumer; K and V one tile per stage
        row_major, col_major = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        sQ_layout = hopper.make_smem_layout_a(row_major, (WGMMA_M, cfg.tile_n, cfg.head_dim), dtype, consumers)
        sK_layout = hopper.make_smem_layout_b(row_major, (WGMMA_M, cfg.tile_n, cfg.head_dim), dtype, cfg.stages)
        sV_layout = hopper.make_smem_layout_b(col_major, (WGMMA_M, cfg.head_dim_v, cfg.tile_n), dtype, cfg.stages)
        sO_layout = hopper.make_smem_layout_epi(dtype, row_major, (WGMMA_M, cfg.head_dim_v), consumers)

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        one_tile = (None, None, 0)
        tma_Q, mQ = cpasync.make_tiled_tma_atom(load, mQ, cute.slice_(sQ_layout, one_tile), (WGMMA_M, cfg.head_dim))
        tma_K, mK = cpasync.make_tiled_tma_atom(load, mK, cute.slice_(sK_layout, one_tile), (cfg.tile_n, cfg.head_dim))
        tma_V, mV = cpasync.make_tiled_tma_atom(
            load, mV, cute.slice_(sV_layout, one_tile), (cfg.head_dim_v, cfg.tile_n)
        )
        tma_O, mO = cpasync.make_tiled_tma_atom(store, mO, cute.slice_(sO_layout, one_tile), (WGMMA_M, cfg.head_dim_v))

        @cute.struct
        class SharedStorage:
            q_full: cute.struct.MemRange[Int64, consumers]
            q_empty: cute.struct.MemRange[Int64, consumers]
            k_full: cute.struct.MemRange[Int64, cfg.stages]
            k_empty: cute.struct.MemRange[Int64, cfg.stages]
            v_full: cute.struct.MemRange[Int64, cfg.stages]
            v_empty: cute.struct.MemRange[Int64, cfg.stages]
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sQ_layout)], ALIGN_SWIZZLE]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sK_layout)], ALIGN_SWIZZLE]
            v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sV_layout)], ALIGN_SWIZZLE]
            o: cute.struct.Align[
                cute.struct.MemRange[dtype, cute.cosize(sO_layout) if cfg.own_output else 0], ALIGN_SWIZZLE
            ]

        self.shared_storage = SharedStorage

        # one-dimensional: the y and z limits of a grid (65,535) are within reach of heads times batch
        tiles_per_unit = 2 if const_expr(cfg.causal) else 1
        units = ceil_div(ceil_div(mQ.shape[0], cfg.tile_m), tiles_per_unit) * mQ.shape[2] * mQ.shape[3]
        ctas = cutlass.min(units, max_ctas)
        self.kernel(
            tma_Q, mQ, tma_K, mK, tma_V, mV, tma_O, mO, mLSE,
            sQ_layout, sK_layout, sV_layout, sO_layout,
            softmax_scale * math.log2(math.e), ceil_div(units, ctas) * tiles_per_unit,
        ).launch(
            grid=[ctas, 1, 1],
            block=[cfg.threads, 1, 1],
            smem=SharedStorage.size_in_bytes(),
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_Q: cute.CopyAtom,
        mQ: cute.Tensor,  # (sq, d, h, b)
        tma_K: cute.CopyAtom,
        mK: cute.Tensor,  # (sk, d, hk, b)
        tma_V: cute.CopyAtom,
        mV: cute.Tensor,  # (dv, sk, hk, b)
        tma_O: cute.CopyAtom,
        mO: cute.Tensor,  # (sq, dv, h, b)
        mLSE: cute.Tensor | None,  # (b, h, sq)
        sQ_layout: cute.ComposedLayout,
        sK_layout: cute.ComposedLayout,
        sV_layout: cute.ComposedLayout,
        sO_layout: cute.ComposedLayout,
        scale_log2: Float32,
        rounds: Int32,  # tiles of the busiest CTA
    ):
        cfg = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for tma in (tma_Q, tma_K, tma_V, tma_O):
                cpasync.prefetch_descriptor(tma)

        storage = cutlass.memory.SmemAllocator().allocate(self.shared_storage)
        sQ = storage.q.get_tensor(sQ_layout.outer, swizzle=sQ_layout.inner)  # (64, d, consumer)
        sK = storage.k.get_tensor(sK_layout.outer, swizzle=sK_layout.inner)  # (tile_n, d, stage)
        sV = storage.v.get_tensor(sV_layout.outer, swizzle=sV_layout.inner)  # (dv, tile_n, stage)
        o_memory = storage.o if const_expr(cfg.own_output) else storage.q
        sO = o_memory.get_tensor(sO_layout.outer, swizzle=sO_layout.inner)  # (64, dv, consumer)
        q_full, q_empty = storage.q_full.data_ptr(), storage.q_empty.data_ptr()
        k_full, k_empty = storage.k_full.data_ptr(), storage.k_empty.data_ptr()
        v_full, v_empty = storage.v_full.data_ptr(), storage.v_empty.data_ptr()
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(cfg.consumer_warpgroups):
                    cute.arch.mbarrier_init(q_full + i, cfg.full_arrivals)
                    cute.arch.mbarrier_init(q_empty + i, cfg.q_empty_arrivals)
                for stage in cutlass.range_constexpr(cfg.stages):
                    cute.arch.mbarrier_init(k_full + stage, cfg.full_arrivals)
                    cute.arch.mbarrier_init(k_empty + stage, cfg.empty_arrivals)
                    cute.arch.mbarrier_init(v_full + stage, cfg.full_arrivals)
                    cute.arch.mbarrier_init(v_empty + stage, cfg.empty_arrivals)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < WARPS_PER_GROUP:
            cute.arch.setmaxregister_decrease(cfg.producer_registers)
            if warp == 0:
                self.load_kv(tma_K, mK, sK, k_full, k_empty, tma_V, mV, sV, v_full, v_empty, mQ, rounds)
            elif warp == 1:
                self.load_q(tma_Q, mQ, sQ, q_full, q_empty, rounds)
        else:
            cute.arch.setmaxregister_increase(cfg.consumer_registers)
            consumer = warp // WARPS_PER_GROUP - 1
            self.consume(
                sQ[None, None, consumer], q_full + consumer, q_empty + consumer, sK, k_full, k_empty,
                sV, v_full, v_empty, tma_O, mO, sO[None, None, consumer], mLSE, mK.shape[0],
                scale_log2, consumer, rounds,
            )  # fmt: skip

    # --- the walk over tiles: all roles call the same functions ----------------------------------------------------

    @cute.jit
    def tile_of_round(self, round_index: Int32, mQ: cute.Tensor):
        """(m_block, head, batch) of this CTA's tile in a round; m_block is -1 if it has none. `mQ` is any (sq, ., h, b) tensor.

        Tiles of one head are neighbours, so that they share K and V in L2. Causal tiles differ in length: a CTA takes
        a long one and its short mirror image (the last rows and the first, and so on) in turn, every pair equally long.
        """
        m_blocks, heads = ceil_div(mQ.shape[0], self.config.tile_m), mQ.shape[2]
        ctas, cta = cute.arch.grid_dim()[0], cute.arch.block_idx()[0]
        if const_expr(self.config.causal):
            unit = (round_index >> 1) * ctas + cta
            pairs = ceil_div(m_blocks, 2)
            short, sequence = unit % pairs, unit // pairs
            m_block = m_blocks - 1 - short
            if round_index & 1:  # the middle tile of an odd number has no partner
                m_block = short if short < m_block else -1
        else:
            unit = round_index * ctas + cta
            m_block, sequence = unit % m_blocks, unit // m_blocks
        if sequence >= heads * mQ.shape[3]:
            m_block = -1
        return m_block, sequence % heads, sequence // heads

    # --- loads ---------------------------------------------------------------------------------------------------

    @cute.jit
    def load_kv(self, tma_K, mK, sK, k_full, k_empty, tma_V, mV, sV, v_full, v_empty, mQ, rounds):
        cfg = self.config
        group = mQ.shape[2] // mK.shape[2]  # query heads per KV head
        loaded = Int32(0)  # blocks so far: the place in both rings
        for r in cutlass.range(rounds, unroll=1):
            m_block, head, batch = self.tile_of_round(r, mQ)
            if m_block >= 0:
                gK = cute.local_tile(mK[None, None, head // group, batch], (cfg.tile_n, cfg.head_dim), (None, 0))
                gV = cute.local_tile(mV[None, None, head // group, batch], (cfg.head_dim_v, cfg.tile_n), (0, None))
                tKsK, tKgK = partition_tma(tma_K, sK, gK)
                tVsV, tVgV = partition_tma(tma_V, sV, gV)
                n_blocks = cfg.key_blocks(m_block, mQ.shape[0], mK.shape[0], cutlass.min, cutlass.max)
                for j in cutlass.range(n_blocks, unroll=1):
                    n = n_blocks - 1 - j
                    stage, phase = self.slot(loaded + j)
                    load_tile(
                        tma_K, tKgK[None, n], tKsK[None, stage], k_full + stage, k_empty + stage, phase, cfg.k_bytes
                    )
                    load_tile(
                        tma_V, tVgV[None, n], tVsV[None, stage], v_full + stage, v_empty + stage, phase, cfg.v_bytes
                    )
                loaded += n_blocks

    @cute.jit
    def load_q(self, tma_Q, mQ, sQ, q_full, q_empty, rounds):
        cfg = self.config
        consumers = cfg.consumer_warpgroups
        visited = Int32(0)
        for r in cutlass.range(rounds, unroll=1):
            m_block, head, batch = self.tile_of_round(r, mQ)
            if m_block >= 0:
                gQ = cute.local_tile(mQ[None, None, head, batch], (WGMMA_M, cfg.head_dim), (None, 0))
                tQsQ, tQgQ = partition_tma(tma_Q, sQ, gQ)
                for i in cutlass.range_constexpr(consumers):
                    rows = tQgQ[None, m_block * consumers + i]
                    load_tile(
                        tma_Q, rows, tQsQ[None, i], q_full + i, q_empty + i, visited & 1, cfg.q_bytes // consumers
                    )
                visited += 1

    @cute.jit
    def slot(self, block: Int32):
        """(stage, phase) of the block-th tile that passes through a ring of 1, 2, 4 ... stages."""
        stages = self.config.stages
        return block & (stages - 1), (block >> (stages.bit_length() - 1)) & 1

    # --- consumers -----------------------------------------------------------------------------------------------

    @cute.jit
    def consume(
        self, sQ, q_full, q_empty, sK, k_full, k_empty, sV, v_full, v_empty, tma_O, mO, sO, mLSE, seqlen_k,
        scale_log2, consumer, rounds,
    ):  # fmt: skip
        cfg = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        seqlen_q = mO.shape[0]
        mma_qk, mma_qk_first, mma_pv = self.make_mma_qk(True), self.make_mma_qk(False), self.make_mma_pv()
        thr_qk, thr_pv = mma_qk.get_slice(thread), mma_pv.get_slice(thread)
        tSrQ = mma_qk.make_fragment_A(thr_qk.partition_A(sQ))
        tSrK = mma_qk.make_fragment_B(thr_qk.partition_B(sK))
        tOrV = mma_pv.make_fragment_B(thr_pv.partition_B(sV))
        qk = (mma_qk_first, mma_qk, tSrQ, tSrK, k_full, k_empty)
        pv = (mma_pv, tOrV, v_full, v_empty)

        if const_expr(cfg.ping_pong):  # noqa: SIM102, decided while tracing; the next one while running
            if consumer == 0:  # the first turn is consumer 0's
                self.pass_turn(cfg.consumer_warpgroups - 1)
        visited, done = Int32(0), Int32(0)  # tiles, and blocks (the place in both rings), so far
        for r in cutlass.range(rounds, unroll=1):
            m_block, head, batch = self.tile_of_round(r, mO)
            if m_block >= 0:
                n_blocks = cfg.key_blocks(m_block, seqlen_q, seqlen_k, cutlass.min, cutlass.max)
                n_unmasked = cfg.unmasked_key_blocks(m_block, seqlen_q, seqlen_k, cutlass.min, cutlass.max, consumer)
                first_row = m_block * cfg.tile_m + consumer * WGMMA_M

                cute.arch.mbarrier_wait(q_full, visited & 1)
                # `done` in a uniform register: the WGMMA descriptors of its stages are then computed there too
                acc_O, row_max, row_sum = self.attend(
                    qk, pv, q_empty, thread, consumer, first_row, seqlen_q, seqlen_k, n_blocks, n_unmasked,
                    cute.arch.make_warp_uniform(done), scale_log2,
                )  # fmt: skip
                visited += 1
                done += n_blocks

                row_scale, row_lse = softmax.finalize(row_max, row_sum, scale_log2)
                softmax.scale_rows(acc_O, row_scale)
                if const_expr(mLSE is not None):
                    self.store_lse(mLSE[batch, head, None], row_lse, thread, first_row, seqlen_q)
                gO = cute.local_tile(mO[None, None, head, batch], (WGMMA_M, cfg.head_dim_v), (None, 0))
                gO = gO[None, None, m_block * cfg.consumer_warpgroups + consumer]
                self.store_output(mma_pv, tma_O, acc_O, sO, gO, q_empty, thread, consumer)
        self.wait_for_store(thread)  # shared memory must outlive the last store

    @cute.jit
    def attend(
        self, qk, pv, q_empty, thread, consumer, first_row, seqlen_q, seqlen_k, n_blocks, n_unmasked, done, scale_log2
    ):  # fmt: skip
        """One tile of one consumer; returns acc_O, row_max, row_sum, not yet normalised.

        Blocks are counted in the order of their visit, j = 0 for the last keys. Those that need the mask come first.
        """
        cfg = self.config
        acc_S = cute.make_rmem_tensor(qk[1].partition_shape_C((WGMMA_M, cfg.tile_n)), Float32)
        tOrP = cute.make_rmem_tensor(pv[0].partition_shape_A((WGMMA_M, cfg.tile_n)), self.dtype)
        acc_O = cute.make_rmem_tensor(pv[0].partition_shape_C((WGMMA_M, cfg.head_dim_v)), Float32)
        row_max = cute.make_rmem_tensor(softmax.ROWS_PER_THREAD, Float32)
        row_sum = cute.make_rmem_tensor(softmax.ROWS_PER_THREAD, Float32)
        acc_O.fill(0.0)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        state = (acc_S, tOrP, acc_O, row_max, row_sum)

        if n_blocks > 0:
            # block 0: S, and its softmax, with nothing of this tile to overlap with
            self.issue_qk(qk, acc_S, done)
            warpgroup.wait_group(0)
            self.release(qk[5], done)
            softmax.mask(acc_S, thread, first_row, (n_blocks - 1) * cfg.tile_n, seqlen_q, seqlen_k, cfg.causal)
            softmax.step(acc_S, row_max, row_sum, scale_log2, may_be_empty=True)
            softmax.to_operand(acc_S, tOrP)

            n_masked = cutlass.max(n_blocks - n_unmasked, 1)
            for j in cutlass.range(1, n_masked, unroll=1):
                self.issue_pair(qk, pv, state, done + j, consumer)
                first_col = (n_blocks - 1 - j) * cfg.tile_n
                softmax.mask(acc_S, thread, first_row, first_col, seqlen_q, seqlen_k, cfg.causal)
                self.finish_pair(pv, state, done + j, scale_log2, may_be_empty=True)
            for j in cutlass.range(n_masked, n_blocks, unroll=1):
                self.issue_pair(qk, pv, state, done + j, consumer)
                self.finish_pair(pv, state, done + j, scale_log2, may_be_empty=False)

            self.release_q(q_empty)
            self.issue_pv(pv, tOrP, acc_O, done + n_blocks - 1)
            warpgroup.wait_group(0)
            self.release(pv[3], done + n_blocks - 1)
        else:
            self.release_q(q_empty)
        return acc_O, row_max, row_sum

    @cute.jit
    def issue_pair(self, qk, pv, state, block, consumer):
        """In this consumer's turn: starts S = Q K^T of `block` and O += P V of the block before; returns when S is there."""
        acc_S, tOrP, acc_O, _, _ = state
        if const_expr(self.config.ping_pong):
            cute.arch.barrier(barrier_id=NamedBarrier.TURN + consumer, number_of_threads=2 * WARPGROUP)
        self.issue_qk(qk, acc_S, block)
        self.issue_pv(pv, tOrP, acc_O, block - 1)
        if const_expr(self.config.ping_pong):
            self.pass_turn(consumer)
        warpgroup.wait_group(1)
        self.release(qk[5], block)

    @cute.jit
    def finish_pair(self, pv, state, block, scale_log2, may_be_empty: cutlass.Constexpr):
        """The softmax of `block`, under P V of the block before; then P and O are ready for the next pair."""
        acc_S, tOrP, acc_O, row_max, row_sum = state
        scale = softmax.step(acc_S, row_max, row_sum, scale_log2, may_be_empty)
        warpgroup.wait_group(0)
        self.release(pv[3], block - 1)
        softmax.to_operand(acc_S, tOrP)
        softmax.scale_rows(acc_O, scale)

    @cute.jit
    def issue_qk(self, qk, acc_S, block):
        mma_qk_first, mma_qk, tSrQ, tSrK, k_full, _ = qk
        stage, phase = self.slot(block)
        cute.arch.mbarrier_wait(k_full + stage, phase)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(tSrQ, mode=[2])):
            mma = mma_qk_first if const_expr(k == 0) else mma_qk
            cute.gemm(mma, acc_S, tSrQ[None, None, k], tSrK[None, None, k, stage], acc_S)
        warpgroup.commit_group()

    @cute.jit
    def issue_pv(self, pv, tOrP, acc_O, block):
        mma_pv, tOrV, v_full, _ = pv
        stage, phase = self.slot(block)
        cute.arch.mbarrier_wait(v_full + stage, phase)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(tOrP, mode=[2])):
            cute.gemm(mma_pv, acc_O, tOrP[None, None, k], tOrV[None, None, k, stage], acc_O)
        warpgroup.commit_group()

    @cute.jit
    def release(self, empty, block):
        """One arrival per warp: the stage of `block` may be overwritten."""
        stage, _ = self.slot(block)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty + stage)

    @cute.jit
    def release_q(self, q_empty):
        """After the tile's last S: the next Q may come, unless the output is to take its place first."""
        if const_expr(self.config.own_output):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(q_empty)

    @cute.jit
    def pass_turn(self, consumer):
        following = (consumer + 1) % self.config.consumer_warpgroups
        cute.arch.barrier_arrive(barrier_id=NamedBarrier.TURN + following, number_of_threads=2 * WARPGROUP)

    # --- epilogue ------------------------------------------------------------------------------------------------

    @cute.jit
    def store_lse(self, gLSE, row_lse, thread, first_row, seqlen_q):
        for r in cutlass.range_constexpr(softmax.ROWS_PER_THREAD):
            row = first_row + softmax.row_in_tile(thread, r)
            if thread % softmax.THREADS_PER_ROW == 0 and row < seqlen_q:
                gLSE[row] = row_lse[r]

    @cute.jit
    def store_output(self, mma_pv, tma_O, acc_O, sO, gO, q_empty, thread, consumer):
        """fp32 registers -> 16 bit -> stmatrix -> the consumer's 64 rows of shared memory -> TMA store."""
        own_output = self.config.own_output
        barrier = NamedBarrier.EPILOGUE + consumer
        rO = cute.make_rmem_tensor_like(acc_O, self.dtype)
        rO.store(acc_O.load().to(self.dtype))
        r2s = cute.make_tiled_copy_C(cute.make_copy_atom(nvgpu.warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma_pv)
        thr_r2s = r2s.get_slice(thread)

        # the memory is free: the output before has left it, or every warp has read its last Q there
        if const_expr(own_output):
            self.wait_for_store(thread)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        cute.copy(r2s, thr_r2s.retile(rO), thr_r2s.partition_D(sO))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        if thread < WARP:
            tOsO, tOgO = partition_tma(tma_O, sO, gO)
            cute.copy(tma_O, tOsO, tOgO)
            cute.arch.cp_async_bulk_commit_group()
        if const_expr(not own_output):
            self.wait_for_store(thread)
            if thread < WARP:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(q_empty)

    @cute.jit
    def wait_for_store(self, thread):
        """Until the storing warp's TMA store has read its shared memory."""
        if thread < WARP:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    # --- tensor-core instructions ----------------------------------------------------------------------------------

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


def partition_tma(atom, smem, gmem):
    """(smem, gmem) with the tile in one mode, as `cute.copy` of a TMA atom wants them; no multicast."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


@cute.jit
def load_tile(atom, source, target, full, empty, phase, tile_bytes: cutlass.Constexpr):
    """Waits until `target` is free, announces its bytes and starts the copy. `phase` is the consumer's."""
    cute.arch.mbarrier_wait(empty, phase ^ 1)  # passes at once the first time: no phase has ended yet
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, tile_bytes)
    cute.copy(atom, source, target, tma_bar_ptr=full)


def compile_forward(config: ForwardConfig, dtype: torch.dtype, options: str = "", with_lse: bool = True):
    """Compiles one configuration for sm_90a without tensors and without launching; no GPU is needed.

    One result serves every batch, sequence length, head count, stride and head dim up to the configuration's.

    Args:
        config: the tile configuration.
        dtype: torch.float16 or torch.bfloat16.
        options: further options of `cute.compile` (`--enable-tvm-ffi`, `--keep-cubin`, `remarks{ptx}` ...).
        with_lse: whether the kernel writes the log-sum-exp; without it `lse` is None in calls.

    Returns:
        The compiled object; called as `fn(q, k, v, out, lse, softmax_scale, max_ctas)` if compiled with
        `--enable-tvm-ffi`. `max_ctas` is the number of SMs: a CTA fills one.
    """
    element = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}[dtype]
    b, sq, sk, h, hk = (cute.sym_int() for _ in range(5))
    d, dv = cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)

    def rows(seqlen, heads, columns):  # 16-byte strides, as TMA wants them
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return make_fake_tensor(element, (b, seqlen, heads, columns), (*strides, 1), assumed_align=16)

    lse = make_fake_tensor(Float32, (b, h, sq), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)
    lse = lse if with_lse else None
    stream = make_fake_stream(use_tvm_ffi_env_stream="--enable-tvm-ffi" in options)
    with COMPILE_LOCK:
        return cute.compile(
            ForwardSm90(config, element),
            rows(sq, h, d), rows(sk, hk, d), rows(sk, hk, dv), rows(sq, h, dv), lse, Float32(1.0), Int32(1), stream,
            options=f"--gpu-arch sm_90a {options}",
        )  # fmt: skip
