"""Rung 10: attention in FP8: Q, K, V and P in e4m3, twice the tensor-core rate, and sums that do not stop growing.

Adds to rung 7      V comes transposed, its keys in the order of P's registers; P lies in (0, 256]; P V of a key block starts
                    at zero and is added to O in fp32 (two levels): the FP8 accumulator keeps only about 13 bits
Expect              the protocol of rung 7 at half the bytes; exponentials weigh twice as much beside the GEMMs
Look for in SASS    QGMMA instead of HGMMA; F2FP.SATFINITE.E4M3; no SHFL but those of the row maxima and sums

    role        threads              does
    producer    warp 0               one thread starts the TMA copies of Q, then of K(n), V(n) from the last block down
    consumer c  warpgroup 1 + c      64 query rows: S = Q K^T, online softmax in registers, T = P V, O = O * shrink + T

    barrier     full when                      empty when
    Q           1 arrival + q_bytes            never reused
    K, V rings  1 arrival + bytes, per stage   one arrival per consumer warp, per stage

The bf16 output has shared memory of its own: in Q's place, which has half the bytes, it would cover another consumer's Q. T takes
registers beside S, P and O: all of O's columns up to head dim 128, otherwise 64 columns at a time.
"""

import enum
import functools
import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.cute.nvgpu as nvgpu
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
import torch
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Uint8, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.tensor_utils import LayoutEnum

from fa3_course import device_softmax as softmax
from fa3_lib.compiler import COMPILE_LOCK
from fa3_lib.config import WARPGROUP, WGMMA_M, ForwardConfig, ceil_div

WARP = 32
TILES = {64: (128, 128), 128: (128, 128), 192: (128, 128), 256: (128, 64)}  # (tile_m, tile_n) by head dim
STAGES = 2
OFFSET = 8  # P lies in (0, 2**OFFSET]: e4m3 ends at 448, and small probabilities stay above its smallest number
KEY_GROUP = 32  # keys of one FP8 k-step, inside which V's keys are permuted
SMALLEST_SCALE = 1e-30  # instead of 0, whose product with a masked score, -inf, would be NaN


class NamedBarrier(enum.IntEnum):
    """Hardware barriers 1..15 of a CTA; 0 belongs to sync_threads()."""

    EPILOGUE = 1  # + consumer: the warps of one consumer, before its output tile leaves
    TURN = 4  # + consumer: it may issue its GEMMs (the consumer waits, the one before it arrives)


class Tma(NamedTuple):
    """A tensor in global memory, the copy that moves tiles of it, and their layout in shared memory."""

    atom: cute.CopyAtom
    tensor: cute.Tensor
    layout: cute.ComposedLayout


class Attention:
    """One compiled kernel: `__call__` runs on the host, everything else on the GPU.

    Args:
        config: the tiles, with one-byte elements and an output tile of its own.
        two_level: adds P V of each key block to O in fp32. Without it O stays in the tensor core's accumulator: less work, and
            wrong sums over long sequences.
    """

    def __init__(self, config: ForwardConfig, two_level: bool = True):
        if (config.element_bytes, config.output_bytes, config.own_output) != (1, 2, True):
            raise ValueError(f"{config}: this rung needs element_bytes=1, output_bytes=2, own_output=True")
        if config.tile_n % KEY_GROUP:
            raise ValueError(f"{config}: tile_n must be a multiple of {KEY_GROUP}, the keys of one FP8 k-step")
        self.config, self.two_level, self.dtype = config.validate(), two_level, Float8E4M3FN
        # columns of O that one P V computes
        self.pv_columns = 64 if two_level and config.head_dim_v > 128 else config.head_dim_v
        self.parts = config.head_dim_v // self.pv_columns
        registers = config.accumulator_registers + (self.pv_columns // 2 if two_level else 0)
        if registers + 24 > config.consumer_registers:
            raise ValueError(
                f"{config}: S + P + O + T = {registers} of {config.consumer_registers} registers per consumer thread leave "
                "fewer than 24 for the rest; take a smaller tile_n or tile_m"
            )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (b, sq, h, d) bytes of e4m3, as mK and mVt
        mK: cute.Tensor,  # (b, sk, hk, d)
        mVt: cute.Tensor,  # (b, hk, dv, sk padded to 32): transpose_v
        mO: cute.Tensor,  # (b, sq, h, dv) bf16
        mLSE: cute.Tensor,  # (b, h, sq) fp32
        q_descale: cute.Tensor,  # (b, hk) fp32, as the other two
        k_descale: cute.Tensor,
        v_descale: cute.Tensor,
        softmax_scale: Float32,
        stream,
    ):
        cfg, dtype, consumers = self.config, self.dtype, self.config.consumer_warpgroups
        # callers hand over bytes, since DLPack knew no FP8 types for long; TMA sees (rows, columns, head, batch), V transposed
        mQ, mK = (
            cute.make_tensor(cute.recast_ptr(x.iterator, dtype=dtype), cute.select(x.layout, mode=[1, 3, 2, 0]))
            for x in (mQ, mK)
        )
        mV = cute.make_tensor(cute.recast_ptr(mVt.iterator, dtype=dtype), cute.select(mVt.layout, mode=[2, 3, 1, 0]))
        mO = cute.make_tensor(mO.iterator, cute.select(mO.layout, mode=[1, 3, 2, 0]))

        # swizzled shared-memory layouts: 64 rows of Q and of O per consumer, a K and a V tile per stage
        tile_qk, tile_pv = (WGMMA_M, cfg.tile_n, cfg.head_dim), (WGMMA_M, cfg.head_dim_v, cfg.tile_n)
        sQ_layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile_qk, dtype, consumers)
        sK_layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile_qk, dtype, cfg.stages)
        sV_layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile_pv, dtype, cfg.stages)
        sO_layout = hopper.make_smem_layout_epi(BFloat16, LayoutEnum.ROW_MAJOR, tile_pv[:2], consumers)

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        Q = make_tma(load, mQ, sQ_layout, (WGMMA_M, cfg.head_dim))
        K = make_tma(load, mK, sK_layout, (cfg.tile_n, cfg.head_dim))
        V = make_tma(load, mV, sV_layout, (cfg.head_dim_v, cfg.tile_n))
        O = make_tma(store, mO, sO_layout, (WGMMA_M, cfg.head_dim_v))

        @cute.struct
        class SharedStorage:
            q_barrier: cute.struct.MemRange[cutlass.Int64, 1]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * cfg.stages]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * cfg.stages]
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sQ_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sK_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sV_layout)], 1024]
            o: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(sO_layout)], 1024]

        self.storage = SharedStorage
        scale_log2 = softmax_scale * math.log2(math.e)
        self.kernel(Q, K, V, O, mLSE, q_descale, k_descale, v_descale, scale_log2).launch(
            grid=[ceil_div(mQ.shape[0], cfg.tile_m) * mQ.shape[2] * mQ.shape[3], 1, 1],
            block=[cfg.threads, 1, 1],
            smem=SharedStorage.size_in_bytes(),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        Q: Tma,  # (sq, d, h, b)
        K: Tma,  # (sk, d, hk, b)
        V: Tma,  # (dv, sk padded, hk, b)
        O: Tma,  # (sq, dv, h, b)
        mLSE: cute.Tensor,  # (b, h, sq)
        q_descale: cute.Tensor,  # (b, hk)
        k_descale: cute.Tensor,
        v_descale: cute.Tensor,
        scale_log2: Float32,
    ):
        cfg = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sQ = storage.q.get_tensor(Q.layout.outer, swizzle=Q.layout.inner)  # (64, d, consumer)
        sK = storage.k.get_tensor(K.layout.outer, swizzle=K.layout.inner)  # (tile_n, d, stage)
        sV = storage.v.get_tensor(V.layout.outer, swizzle=V.layout.inner)  # (dv, tile_n, stage)
        sO = storage.o.get_tensor(O.layout.outer, swizzle=O.layout.inner)  # (64, dv, consumer)

        q_barrier = storage.q_barrier.data_ptr()
        if warp == 0:
            for tma in (Q, K, V, O):
                cpasync.prefetch_descriptor(tma.atom)
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(q_barrier, cfg.full_arrivals)
        pipe_K = self.make_ring(storage.k_barriers.data_ptr(), cfg.k_bytes, defer_sync=True)
        # fences all barriers' initialisation and synchronises the CTA
        pipe_V = self.make_ring(storage.v_barriers.data_ptr(), cfg.v_bytes, defer_sync=False)

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

        # both roles take the tile range from the same function; the length is K's, V is padded
        seqlen_q, seqlen_k = mQ.shape[0], mK.shape[0]
        n_blocks = cfg.key_blocks(m_block, seqlen_q, seqlen_k, cutlass.min, cutlass.max)
        n_unmasked = cfg.unmasked_key_blocks(m_block, seqlen_q, seqlen_k, cutlass.min, cutlass.max)

        if warp < WARPGROUP // WARP:
            cute.arch.setmaxregister_decrease(cfg.producer_registers)
            if warp == 0:
                self.load(Q.atom, K.atom, V.atom, gQ, gK, gV, sQ, sK, sV, q_barrier, pipe_K, pipe_V, m_block, n_blocks)
        else:
            cute.arch.setmaxregister_increase(cfg.consumer_registers)
            consumer = warp // (WARPGROUP // WARP) - 1
            thread = cute.arch.thread_idx()[0] % WARPGROUP
            row_tile = m_block * cfg.consumer_warpgroups + consumer
            scale_log2 = scale_log2 * q_descale[batch, kv_head] * k_descale[batch, kv_head]
            scale_log2 = Float32(SMALLEST_SCALE) if scale_log2 == 0.0 else scale_log2
            # below 0 the largest score would have the smallest weight: NaN rather than a number that looks right
            scale_log2 = Float32(math.nan) if scale_log2 < 0.0 else scale_log2
            acc_O, row_max, row_sum = self.attend(
                sQ[None, None, consumer], sK, sV, q_barrier, pipe_K, pipe_V,
                thread, consumer, row_tile * WGMMA_M, seqlen_q, seqlen_k, n_blocks, n_unmasked, scale_log2,
            )  # fmt: skip
            self.epilogue(
                O.atom, acc_O, row_max, row_sum, scale_log2, v_descale[batch, kv_head], sO[None, None, consumer],
                gO[None, None, row_tile], mLSE[batch, head, None], thread, row_tile * WGMMA_M, seqlen_q,
                NamedBarrier.EPILOGUE + consumer,
            )  # fmt: skip

    def make_mma_qk(self, accumulate: bool) -> cute.TiledMma:
        """S (64, tile_n) = Q (64, d) K^T (d, tile_n), both operands K-major in shared memory."""
        return self.make_mma(self.config.tile_n, warpgroup.OperandSource.SMEM, accumulate)

    def make_mma_pv(self, accumulate: bool) -> cute.TiledMma:
        """T (64, pv_columns) = P (64, tile_n) V (tile_n, pv_columns): P from registers, V with keys contiguous."""
        return self.make_mma(self.pv_columns, warpgroup.OperandSource.RMEM, accumulate)

    def make_mma(self, columns: int, source: warpgroup.OperandSource, accumulate: bool) -> cute.TiledMma:
        mma = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (WGMMA_M, columns), source
        )  # fmt: skip
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        return mma

    def make_ring(self, barriers: cute.Pointer, stage_bytes: int, defer_sync: bool) -> pipeline.PipelineTmaAsync:
        """Per stage a full barrier (one arrival and `stage_bytes`) and an empty barrier (one arrival per consumer warp)."""
        cfg = self.config
        return pipeline.PipelineTmaAsync.create(
            num_stages=cfg.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, cfg.full_arrivals),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, cfg.empty_arrivals),
            tx_count=stage_bytes,
            barrier_storage=barriers,
            defer_sync=defer_sync,
        )

    @cute.jit
    def load(self, tma_Q, tma_K, tma_V, gQ, gK, gV, sQ, sK, sV, q_barrier, pipe_K, pipe_V, m_block, n_blocks):
        """The producer warp. Every copy is started by one elected thread; its bytes complete the barrier it names."""
        cfg = self.config
        tQsQ, tQgQ = partition_tma(tma_Q, sQ, gQ)
        tKsK, tKgK = partition_tma(tma_K, sK, gK)
        tVsV, tVgV = partition_tma(tma_V, sV, gV)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(q_barrier, cfg.q_bytes)
        for c in cutlass.range_constexpr(cfg.consumer_warpgroups):
            cute.copy(tma_Q, tQgQ[None, m_block * cfg.consumer_warpgroups + c], tQsQ[None, c], tma_bar_ptr=q_barrier)

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, cfg.stages)
        for i in cutlass.range(n_blocks, unroll=1):
            n = n_blocks - 1 - i
            for pipe, tma, gmem, smem in ((pipe_K, tma_K, tKgK, tKsK), (pipe_V, tma_V, tVgV, tVsV)):
                pipe.producer_acquire(state)  # wait until the stage is empty, then announce its bytes
                barrier = pipe.producer_get_barrier(state)
                cute.copy(tma, gmem[None, n], smem[None, state.index], tma_bar_ptr=barrier)
                pipe.producer_commit(state)  # nothing left to do for TMA: the last byte completes the phase
            state.advance()
        # no producer_tail: it waits for releases that come from other CTAs of a cluster, and there is no cluster

    @cute.jit
    def attend(
        self, sQ, sK, sV, q_barrier, pipe_K, pipe_V,
        thread, consumer, first_row, seqlen_q, seqlen_k, n_blocks, n_unmasked, scale_log2,
    ):  # fmt: skip
        """The main loop of one consumer warpgroup; returns acc_O, row_max, row_sum, not yet normalised."""
        cfg = self.config
        mmas_qk = (self.make_mma_qk(accumulate=False), self.make_mma_qk(accumulate=True))
        mmas_pv = (self.make_mma_pv(accumulate=not self.two_level), self.make_mma_pv(accumulate=True))
        thr_qk, thr_pv = mmas_qk[0].get_slice(thread), mmas_pv[0].get_slice(thread)
        tSrQ = mmas_qk[0].make_fragment_A(thr_qk.partition_A(sQ))
        tSrK = mmas_qk[0].make_fragment_B(thr_qk.partition_B(sK))
        # per part of O's columns: (64 or dv columns, tile_n, stage)
        sV_parts = cute.flat_divide(sV, (self.pv_columns, cfg.tile_n))
        tOrV = tuple(
            mmas_pv[0].make_fragment_B(thr_pv.partition_B(sV_parts[None, None, part, 0, None]))
            for part in range(self.parts)
        )
        acc_S = cute.make_rmem_tensor(thr_qk.partition_shape_C((WGMMA_M, cfg.tile_n)), Float32)
        tOrP = cute.make_rmem_tensor(thr_pv.partition_shape_A((WGMMA_M, cfg.tile_n)), self.dtype)
        acc_O = cute.make_rmem_tensor(thr_pv.partition_shape_C((WGMMA_M, cfg.head_dim_v)), Float32)
        acc_T = acc_O
        if const_expr(self.two_level):
            acc_T = cute.make_rmem_tensor(thr_pv.partition_shape_C((WGMMA_M, self.pv_columns)), Float32)
        row_max = cute.make_rmem_tensor(softmax.ROWS, Float32)
        row_sum = cute.make_rmem_tensor(softmax.ROWS, Float32)
        shrink = cute.make_rmem_tensor(softmax.ROWS, Float32)  # what O still has to shrink by before T is added
        acc_O.fill(0.0)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        shrink.fill(0.0)

        cute.arch.mbarrier_wait(q_barrier, 0)
        if const_expr(cfg.ping_pong):  # noqa: SIM102, decided while tracing; the next one while running
            if consumer == 0:  # the first turn is consumer 0's
                self.pass_turn(cfg.consumer_warpgroups - 1)
        if n_blocks > 0:
            qk = (mmas_qk, tSrQ, tSrK, acc_S, pipe_K)
            pv = (mmas_pv, tOrP, tOrV, acc_O, acc_T, shrink, pipe_V)
            # block j of the visit is key block n_blocks - 1 - j; K's place in its ring is one block ahead of V's
            state_K = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)
            state_V = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)

            # the first block has no P V to run under
            self.issue_qk(qk, state_K)
            warpgroup.wait_group(0)
            pipe_K.consumer_release(state_K)
            state_K.advance()
            softmax.apply_mask(acc_S, thread, first_row, (n_blocks - 1) * cfg.tile_n, seqlen_q, seqlen_k, cfg.causal)
            softmax_step(acc_S, row_max, row_sum, scale_log2, may_be_empty=True)  # O is zero: nothing to shrink
            to_operand(acc_S, tOrP)

            # blocks that need the mask come first (the highest n), the others run without it
            n_masked = cutlass.max(n_blocks - n_unmasked, 1)
            for j in cutlass.range(1, n_masked, unroll=1):
                self.issue_pair(qk, pv, state_K, state_V, consumer)
                first_col = (n_blocks - 1 - j) * cfg.tile_n
                softmax.apply_mask(acc_S, thread, first_row, first_col, seqlen_q, seqlen_k, cfg.causal)
                new_shrink = softmax_step(acc_S, row_max, row_sum, scale_log2, may_be_empty=True)
                self.finish_pair(acc_S, pv, state_V, new_shrink)
                state_K.advance()
                state_V.advance()
            for _ in cutlass.range(n_masked, n_blocks, unroll=1):
                self.issue_pair(qk, pv, state_K, state_V, consumer)
                new_shrink = softmax_step(acc_S, row_max, row_sum, scale_log2, may_be_empty=False)
                self.finish_pair(acc_S, pv, state_V, new_shrink)
                state_K.advance()
                state_V.advance()

            # the last block has no Q K^T to go with it
            pipe_V.consumer_wait(state_V)
            self.issue_pv(pv, state_V, 0)
            self.finish_pv(pv, state_V)
        return acc_O, row_max, row_sum

    @cute.jit
    def issue_pair(self, qk, pv, state_K, state_V, consumer):
        """One turn: starts S = Q K^T of a block and P V of the block before; returns when S is there, its K stage freed."""
        if const_expr(self.config.ping_pong):
            self.wait_turn(consumer)
        self.issue_qk(qk, state_K)
        pv[-1].consumer_wait(state_V)
        self.issue_pv(pv, state_V, 0)
        if const_expr(self.config.ping_pong):
            self.pass_turn(consumer)  # issued is enough: the tensor cores work in the order of issue
        warpgroup.wait_group(1)  # groups end in the order of issue: all but the youngest, P V, are done
        qk[-1].consumer_release(state_K)

    @cute.jit
    def finish_pair(self, acc_S, pv, state_V, new_shrink):
        """Ends P V of the block before; then the new P is ready for the next pair, and O knows by how much to shrink."""
        _, tOrP, _, acc_O, _, shrink, _ = pv
        self.finish_pv(pv, state_V)
        to_operand(acc_S, tOrP)  # only now: P V read the old P until here
        if const_expr(self.two_level):
            for r in cutlass.range_constexpr(softmax.ROWS):
                shrink[r] = new_shrink[r]
        else:
            softmax.scale_rows(acc_O, new_shrink)

    @cute.jit
    def issue_qk(self, qk, state):
        mmas_qk, tSrQ, tSrK, acc_S, pipe_K = qk
        pipe_K.consumer_wait(state)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(tSrQ, mode=[2])):
            mma = mmas_qk[0] if const_expr(k == 0) else mmas_qk[1]
            cute.gemm(mma, acc_S, tSrQ[None, None, k], tSrK[None, None, k, state.index], acc_S)
        warpgroup.commit_group()

    @cute.jit
    def issue_pv(self, pv, state, part: cutlass.Constexpr):
        """Starts T = P V for one part of the columns (its first k-step overwrites T), or O += P V."""
        mmas_pv, tOrP, tOrV, _, acc_T, _, _ = pv
        # a fence for P and T: without it ptxas may serialise the products
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(tOrP, mode=[2])):
            mma = mmas_pv[0] if const_expr(k == 0) else mmas_pv[1]
            cute.gemm(mma, acc_T, tOrP[None, None, k], tOrV[part][None, None, k, state.index], acc_T)
        warpgroup.commit_group()

    @cute.jit
    def finish_pv(self, pv, state):
        """Waits for the first part, adds it to O, computes the other parts, frees the V stage."""
        _, _, _, acc_O, acc_T, shrink, pipe_V = pv
        warpgroup.wait_group(0)
        if const_expr(self.two_level):
            for part in cutlass.range_constexpr(self.parts):
                if const_expr(part > 0):
                    self.issue_pv(pv, state, part)
                    warpgroup.wait_group(0)
                add_part(acc_O, acc_T, shrink, part)
        pipe_V.consumer_release(state)

    @cute.jit
    def wait_turn(self, consumer):
        cute.arch.barrier(barrier_id=NamedBarrier.TURN + consumer, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_turn(self, consumer):
        """The next consumer's turn. Its barrier counts both warpgroups, the one that arrives and the one that waits."""
        following = (consumer + 1) % self.config.consumer_warpgroups
        cute.arch.barrier_arrive(barrier_id=NamedBarrier.TURN + following, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def epilogue(
        self, tma_O, acc_O, row_max, row_sum, scale_log2, v_descale, sO, gO, gLSE, thread, first_row, seqlen_q, barrier
    ):  # fmt: skip
        """Normalised O: registers -> bf16 -> stmatrix -> this warpgroup's 64 rows of shared memory -> TMA store."""
        inverse, lse = softmax.finish_rows(row_max, row_sum, scale_log2)
        for r in cutlass.range_constexpr(softmax.ROWS):
            inverse[r] = inverse[r] * v_descale  # 2**OFFSET is in O as in the sum: it cancels here, but not in LSE
            row = first_row + softmax.row_in_tile(thread, r)
            if thread % softmax.THREADS_PER_ROW == 0 and row < seqlen_q:
                gLSE[row] = lse[r] - OFFSET * math.log(2.0)
        softmax.scale_rows(acc_O, inverse)

        rO = cute.make_rmem_tensor_like(acc_O, BFloat16)
        rO.store(acc_O.load().to(BFloat16))
        store = cute.make_copy_atom(nvgpu.warp.StMatrix8x8x16bOp(False, 4), BFloat16)
        r2s = cute.make_tiled_copy_C(store, self.make_mma_pv(accumulate=True))
        thr_r2s = r2s.get_slice(thread)
        cute.copy(r2s, thr_r2s.retile(rO), thr_r2s.partition_D(sO))
        cute.arch.fence_proxy("async.shared", space="cta")  # TMA must see what the threads wrote
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        if thread < WARP:
            tOsO, tOgO = partition_tma(tma_O, sO, gO)
            cute.copy(tma_O, tOsO, tOgO)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the store's reads


# --- on one thread's registers -------------------------------------------------------------------------------------------


@cute.jit
def softmax_step(acc_S, row_max, row_sum, scale_log2: Float32, may_be_empty: cutlass.Constexpr) -> cute.Tensor:
    """`device_softmax.step` with P = exp2((S - row_max) * scale_log2 + OFFSET): one more subtraction per row.

    The row sum adds P before it is rounded to e4m3.
    """
    scores = softmax.by_rows(acc_S)
    columns = cute.size(scores, mode=[1])
    shrink = cute.make_rmem_tensor(softmax.ROWS, Float32)
    for r in cutlass.range_constexpr(softmax.ROWS):
        new_max = row_max[r]
        for c in cutlass.range_constexpr(columns):
            new_max = cute.arch.fmax(new_max, scores[r, c])
        for offset in (2, 1):  # the four threads of a row
            new_max = cute.arch.fmax(new_max, cute.arch.shuffle_sync_bfly(new_max, offset=offset))
        old_max, row_max[r] = row_max[r], new_max
        if const_expr(may_be_empty):
            new_max = Float32(0.0) if new_max == -Float32.inf else new_max  # -inf - -inf would be NaN
        max_scaled = new_max * scale_log2
        shrink[r] = cute.math.exp2(old_max * scale_log2 - max_scaled, fastmath=True)
        max_scaled = max_scaled - OFFSET
        # four independent partial sums: one chain of adds would wait for each add's latency
        sums = [row_sum[r] * shrink[r], Float32(0.0), Float32(0.0), Float32(0.0)]
        for c in cutlass.range_constexpr(columns):
            scores[r, c] = cute.math.exp2(scores[r, c] * scale_log2 - max_scaled, fastmath=True)
            sums[c % 4] = sums[c % 4] + scores[r, c]
        row_sum[r] = (sums[0] + sums[1]) + (sums[2] + sums[3])
    return shrink


def accumulator_index(operand_index: int) -> int:
    """Which register of the S accumulator becomes byte `operand_index` of P's fragment, both of the same thread.

    Per 32 keys the operand counts (byte 0..3, row 0..1, half 0..1), the accumulator (e 0..1, row 0..1, j 0..3); a byte is
    2 * (j % 2) + e, a half j // 2. That the bytes so filled belong to other keys than the operand means, V's order makes good.
    """
    group, i = divmod(operand_index, 16)
    byte, row, half = i % 4, i // 4 % 2, i // 8
    return 16 * group + 4 * (2 * half + byte // 2) + 2 * row + byte % 2


@cute.jit
def to_operand(acc_S, tOrP):
    """P as PV's A operand in e4m3, four values to a register; nothing leaves its thread."""
    words = cute.recast_tensor(tOrP, Int32)
    for w in cutlass.range_constexpr(cute.size(words)):
        words[w] = cute.arch.inline_ptx(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
            "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
            write_only_types=[Int32],
            read_only_args=[acc_S[accumulator_index(4 * w + byte)] for byte in range(4)],
        )


@cute.jit
def add_part(acc_O, acc_T, shrink, part: cutlass.Constexpr):
    """O = O * shrink + T on one part of O's columns: the FFMA takes the place of the multiplication that O needs anyway."""
    size = cute.size(acc_T)
    for i in cutlass.range_constexpr(size):
        acc_O[part * size + i] = acc_O[part * size + i] * shrink[i // 2 % 2] + acc_T[i]


# --- host ----------------------------------------------------------------------------------------------------------------


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
    d = next(d for d in TILES if d >= head_dim)
    return ForwardConfig(
        d, d, *TILES[d], stages=STAGES, causal=causal, ping_pong=True, own_output=True, element_bytes=1
    ).validate()


def compile_rung(config: ForwardConfig, dtype: torch.dtype, options: str = "", two_level: bool = True):
    """The compiled kernel; no GPU is needed. It takes Q, K and V as bytes (`tensor.view(torch.uint8)`).

    Args:
        config: as `make_config` gives it.
        dtype: torch.float8_e4m3fn.
        options: further options of `cute.compile`; with `--enable-tvm-ffi`, call the result with torch tensors.
        two_level: see `Attention`.
    """
    if dtype != torch.float8_e4m3fn:
        raise TypeError(f"rung 10 computes in torch.float8_e4m3fn, not in {dtype}")
    b, sq, sk, h, hk, padded = (cute.sym_int() for _ in range(6))
    d, dv = cute.sym_int(divisibility=16), cute.sym_int(divisibility=16)

    def tensor(element, *shape):  # 16-byte strides, as TMA wants them
        strides = tuple(cute.sym_int64(divisibility=128 // element.width) for _ in range(3))
        return make_fake_tensor(element, shape, (*strides, 1), assumed_align=16)

    lse = make_fake_tensor(Float32, (b, h, sq), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)
    descales = [
        make_fake_tensor(Float32, (b, hk), (cute.sym_int64(), cute.sym_int64()), assumed_align=4) for _ in range(3)
    ]
    stream = make_fake_stream(use_tvm_ffi_env_stream="--enable-tvm-ffi" in options)
    with COMPILE_LOCK:
        return cute.compile(
            Attention(config, two_level),
            tensor(Uint8, b, sq, h, d), tensor(Uint8, b, sk, hk, d), tensor(Uint8, b, hk, dv, padded),
            tensor(BFloat16, b, sq, h, dv), lse, *descales, Float32(1.0), stream,
            options=f"--gpu-arch sm_90a {options}",
        )  # fmt: skip


@functools.cache
def _compiled(config: ForwardConfig, two_level: bool):
    return compile_rung(config, torch.float8_e4m3fn, "--enable-tvm-ffi", two_level)


def transpose_v(v: torch.Tensor) -> torch.Tensor:
    """V as the kernel reads it: keys contiguous, in the order in which P lies in registers.

    In each group of 32 keys, key 16 half + 8 j + 2 quad + e goes to position 16 half + 4 quad + 2 j + e.

    Args:
        v: `(b, sk, hk, dv)`, one byte per element, any strides, any device.

    Returns:
        `(b, hk, dv, sk padded to 32)` like v, contiguous; 0 where there is no key.
    """
    if v.dim() != 4 or v.element_size() != 1:
        raise ValueError(f"v must be (b, sk, hk, dv) with one-byte elements, got {tuple(v.shape)} of {v.dtype}")
    b, sk, hk, dv = v.shape
    groups = ceil_div(sk, KEY_GROUP)
    keys = v.view(torch.uint8).new_zeros(b, groups * KEY_GROUP, hk, dv)
    keys[:, :sk] = v.view(torch.uint8)
    keys = keys.view(b, groups, 2, 2, 4, 2, hk, dv)  # half, j, quad, e
    return keys.permute(0, 6, 7, 1, 2, 4, 3, 5).reshape(b, hk, dv, groups * KEY_GROUP).view(v.dtype)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    two_level: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 attention on a Hopper GPU.

    Args:
        q: `(b, sq, h, d)`; k: `(b, sk, hk, d)`; v: `(b, sk, hk, dv)`; e4m3 (torch.float8_e4m3fn), head dims multiples of 16
            up to 256.
        softmax_scale: positive factor on the scores; `d ** -0.5` when None.
        causal: bottom-right aligned causal mask.
        q_descale, k_descale, v_descale: `(b, hk)` fp32, any strides: what a stored number stands for is its value times the
            factor of its batch and KV head; 1 when None. q's and k's product must not be negative (the answer would be NaN).
        two_level: see `Attention`.

    Returns:
        out `(b, sq, h, dv)` bf16 and lse `(b, h, sq)` fp32.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument.
    """
    check(q, k, v)
    (b, sq, h, d), (sk, hk, dv) = q.shape, v.shape[1:]
    descales = [
        check_descale(name, x, q.device, (b, hk))
        for name, x in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale))
    ]
    softmax_scale = d**-0.5 if softmax_scale is None else softmax_scale
    if not 0.0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale must be positive and finite, got {softmax_scale}")
    check_device(q, k, v)

    out = q.new_empty(b, sq, h, dv, dtype=torch.bfloat16)
    lse = q.new_empty(b, h, sq, dtype=torch.float32)
    if out.numel() == 0 or sk == 0:  # nothing to compute, and TMA knows no empty tensors
        return out.zero_(), lse.fill_(-math.inf)
    compiled = _compiled(make_config(max(d, dv), causal), two_level)
    with torch.cuda.device(q.device):
        compiled(as_bytes(q), as_bytes(k), as_bytes(transpose_v(v)), out, lse, *descales, float(softmax_scale))
    return out, lse


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """x as uint8, copied if TMA cannot read it where it lies: address and strides in 16 bytes, the last stride 1."""
    readable = x.data_ptr() % 16 == 0 and x.stride(3) == 1 and all(stride % 16 == 0 for stride in x.stride()[:3])
    return (x if readable else x.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def check_descale(name: str, x: torch.Tensor | None, device: torch.device, shape: tuple[int, int]) -> torch.Tensor:
    if x is None:
        return torch.ones(shape, device=device)
    if x.dtype != torch.float32 or tuple(x.shape) != shape or x.device != device:
        raise ValueError(f"{name} must be fp32 {shape} on {device}, got {x.dtype} {tuple(x.shape)} on {x.device}")
    return x


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises TypeError, ValueError or NotImplementedError, naming the argument."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be (batch, seqlen, heads, head_dim), got {tuple(x.shape)}")
        if x.dtype != torch.float8_e4m3fn:
            raise TypeError(f"{name} must be torch.float8_e4m3fn, got {x.dtype}; quantise it first")
        if not 0 < x.shape[3] <= max(TILES) or x.shape[3] % 16:
            raise ValueError(f"{name}: head_dim must be a multiple of 16 up to {max(TILES)}, got {x.shape[3]}")
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError(f"{name}.requires_grad: a rung has no backward pass; use torch.no_grad()")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of the {k.shape[2]} KV heads")


def check_device(*tensors: torch.Tensor) -> None:
    device = tensors[0].device
    for name, x in zip("qkv", tensors, strict=True):
        if x.device != device or not x.is_cuda or torch.cuda.get_device_capability(x.device) != (9, 0):
            raise ValueError(f"{name} must be on a Hopper GPU, all three on the same, got {x.device}")
