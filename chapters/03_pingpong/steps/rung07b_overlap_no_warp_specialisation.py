"""Rung 7b: the overlap of rung 7 without warp specialisation (a row of the paper's ablation).

Takes from rung 7   the producer warp, setmaxnreg and the turns; all that is left are the two warpgroups that multiply
Adds instead        copies started between the products: each warpgroup loads its Q, the first one K, the second one V
Expect              slower: before a stage is filled again, the warpgroup that loads waits for the other to have read it
Look for in SASS    no USETMAXREG; UTMALDG in the bodies of the loop, between the HGMMA groups

    role        threads              does
    consumer c  warpgroup c          64 query rows: S = Q K^T, online softmax in registers, O += P V, epilogue; its first
                                     warp starts the TMA copies of Q's 64 rows, and of K (c = 0) or V (c = 1)

    barrier     full when                      empty when
    Q           1 arrival + bytes, per c       never reused
    K, V rings  1 arrival + bytes, per stage   one arrival per consumer warp, per stage
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.cute.nvgpu as nvgpu
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
import torch
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from fa3_course import device_softmax as softmax
from fa3_course import rung_host
from fa3_lib.config import WARPGROUP, WGMMA_M, ForwardConfig, ceil_div

WARP = 32
TILE_M = 2 * WGMMA_M
TILE_N = {64: 128, 128: 128, 192: 96, 256: 80}  # by head dim: as wide as shared memory and registers allow
STAGES = 2


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
        cfg, dtype, consumers = self.config, self.dtype, self.config.consumer_warpgroups
        # TMA sees (rows, columns, head, batch); V as (columns, rows, ...): the B operand of PV is (N = dv, K = keys)
        mQ, mK, mO = (cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0])) for x in (mQ, mK, mO))
        mV = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[3, 1, 2, 0]))

        # swizzled shared-memory layouts: 64 rows of Q (and of O in their place) per consumer, a K and a V tile per stage
        tile_qk, tile_pv = (WGMMA_M, cfg.tile_n, cfg.head_dim), (WGMMA_M, cfg.head_dim_v, cfg.tile_n)
        sQ_layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile_qk, dtype, consumers)
        sK_layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile_qk, dtype, cfg.stages)
        sV_layout = hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, tile_pv, dtype, cfg.stages)
        sO_layout = hopper.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, tile_pv[:2], consumers)

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        Q = make_tma(load, mQ, sQ_layout, (WGMMA_M, cfg.head_dim))
        K = make_tma(load, mK, sK_layout, (cfg.tile_n, cfg.head_dim))
        V = make_tma(load, mV, sV_layout, (cfg.head_dim_v, cfg.tile_n))
        O = make_tma(store, mO, sO_layout, (WGMMA_M, cfg.head_dim_v))

        @cute.struct
        class SharedStorage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, consumers]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * cfg.stages]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * cfg.stages]
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sQ_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sK_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sV_layout)], 1024]

        self.storage = SharedStorage
        self.kernel(Q, K, V, O, mLSE, softmax_scale * math.log2(math.e)).launch(
            grid=[ceil_div(mQ.shape[0], cfg.tile_m) * mQ.shape[2] * mQ.shape[3], 1, 1],
            block=[WARPGROUP * consumers, 1, 1],  # cfg.threads less the producer's warpgroup
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
        sQ = storage.q.get_tensor(Q.layout.outer, swizzle=Q.layout.inner)  # (64, d, consumer)
        sK = storage.k.get_tensor(K.layout.outer, swizzle=K.layout.inner)  # (tile_n, d, stage)
        sV = storage.v.get_tensor(V.layout.outer, swizzle=V.layout.inner)  # (dv, tile_n, stage)
        sO = storage.q.get_tensor(O.layout.outer, swizzle=O.layout.inner)  # (64, dv, consumer): Q's memory

        q_barriers = storage.q_barriers.data_ptr()
        if warp == 0:
            for tma in (Q, K, V, O):
                cpasync.prefetch_descriptor(tma.atom)
            with cute.arch.elect_one():
                for c in cutlass.range_constexpr(cfg.consumer_warpgroups):
                    cute.arch.mbarrier_init(q_barriers + c, cfg.full_arrivals)
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

        seqlen_q, seqlen_k = mQ.shape[0], mK.shape[0]
        n_blocks = cfg.key_blocks(m_block, seqlen_q, seqlen_k, cutlass.min, cutlass.max)
        n_unmasked = cfg.unmasked_key_blocks(m_block, seqlen_q, seqlen_k, cutlass.min, cutlass.max)

        consumer = warp // (WARPGROUP // WARP)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        row_tile = m_block * cfg.consumer_warpgroups + consumer
        if warp % (WARPGROUP // WARP) == 0:
            self.load_q(Q.atom, gQ, sQ, q_barriers + consumer, row_tile, consumer)
        # ring r is filled by the first warp of consumer r, as far as there are consumers
        ring_K = (K.atom, *partition_tma(K.atom, sK, gK), pipe_K, warp == 0)
        v_warp = (1 % cfg.consumer_warpgroups) * (WARPGROUP // WARP)
        ring_V = (V.atom, *partition_tma(V.atom, sV, gV), pipe_V, warp == v_warp)
        self.fill(ring_K, n_blocks)
        self.fill(ring_V, n_blocks)

        mma_pv = self.make_mma_pv()
        acc_O, row_max, row_sum = self.attend(
            mma_pv, sQ[None, None, consumer], sK, sV, q_barriers + consumer, ring_K, ring_V,
            thread, row_tile * WGMMA_M, seqlen_q, seqlen_k, n_blocks, n_unmasked, scale_log2,
        )  # fmt: skip
        self.epilogue(
            mma_pv, O.atom, acc_O, row_max, row_sum, scale_log2, sO[None, None, consumer],
            gO[None, None, row_tile], mLSE[batch, head, None], thread, row_tile * WGMMA_M, seqlen_q, 1 + consumer,
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
    def load_q(self, tma_Q, gQ, sQ, q_barrier, row_tile, consumer):
        """A consumer's 64 rows of Q. The copy is started by one elected thread; its bytes complete the barrier it names."""
        cfg = self.config
        tQsQ, tQgQ = partition_tma(tma_Q, sQ, gQ)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(q_barrier, cfg.q_bytes // cfg.consumer_warpgroups)
        cute.copy(tma_Q, tQgQ[None, row_tile], tQsQ[None, consumer], tma_bar_ptr=q_barrier)

    @cute.jit
    def fill(self, ring, n_blocks):
        """Starts the copies of the last key blocks, one per stage."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.stages)
        for i in cutlass.range_constexpr(self.config.stages):
            self.refill(ring, state, n_blocks - 1 - i)
            state.advance()

    @cute.jit
    def refill(self, ring, state, n):
        """By the warp that fills this ring: starts the copy of key block n, if there is one, once the stage is empty.

        After the first round `state` is the consumer's of the block that has just left the stage: the wait is for its release.
        """
        tma, smem, gmem, pipe, loads = ring
        if loads and n >= 0:
            pipe.producer_acquire(state)  # wait until the stage is empty, then announce its bytes
            barrier = pipe.producer_get_barrier(state)
            cute.copy(tma, gmem[None, n], smem[None, state.index], tma_bar_ptr=barrier)
            pipe.producer_commit(state)  # nothing left to do for TMA: the last byte completes the phase

    @cute.jit
    def attend(
        self, mma_pv, sQ, sK, sV, q_barrier, ring_K, ring_V,
        thread, first_row, seqlen_q, seqlen_k, n_blocks, n_unmasked, scale_log2,
    ):  # fmt: skip
        """The main loop of one consumer warpgroup; returns acc_O, row_max, row_sum, not yet normalised."""
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
        pipe_K, pipe_V = ring_K[3], ring_V[3]
        if n_blocks > 0:
            qk = (mmas_qk, tSrQ, tSrK, acc_S, pipe_K)
            pv = (mma_pv, tOrP, tOrV, acc_O, pipe_V)
            # block j of the visit is key block n_blocks - 1 - j; K's place in its ring is one block ahead of V's
            state_K = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)
            state_V = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)

            # the first block has no P V to run under
            self.issue_qk(qk, state_K)
            warpgroup.wait_group(0)
            pipe_K.consumer_release(state_K)
            softmax.apply_mask(acc_S, thread, first_row, (n_blocks - 1) * cfg.tile_n, seqlen_q, seqlen_k, cfg.causal)
            softmax.step(acc_S, row_max, row_sum, scale_log2, may_be_empty=True)
            self.to_operand(acc_S, tOrP)
            self.refill(ring_K, state_K, n_blocks - 1 - cfg.stages)
            state_K.advance()

            # blocks that need the mask come first (the highest n), the others run without it
            n_masked = cutlass.max(n_blocks - n_unmasked, 1)
            for j in cutlass.range(1, n_masked, unroll=1):
                self.issue_pair(qk, pv, state_K, state_V)
                first_col = (n_blocks - 1 - j) * cfg.tile_n
                softmax.apply_mask(acc_S, thread, first_row, first_col, seqlen_q, seqlen_k, cfg.causal)
                shrink = softmax.step(acc_S, row_max, row_sum, scale_log2, may_be_empty=True)
                self.finish_pair(acc_S, pv, state_V, shrink)
                self.refill(ring_K, state_K, n_blocks - 1 - j - cfg.stages)
                self.refill(ring_V, state_V, n_blocks - j - cfg.stages)
                state_K.advance()
                state_V.advance()
            for j in cutlass.range(n_masked, n_blocks, unroll=1):
                self.issue_pair(qk, pv, state_K, state_V)
                shrink = softmax.step(acc_S, row_max, row_sum, scale_log2, may_be_empty=False)
                self.finish_pair(acc_S, pv, state_V, shrink)
                self.refill(ring_K, state_K, n_blocks - 1 - j - cfg.stages)
                self.refill(ring_V, state_V, n_blocks - j - cfg.stages)
                state_K.advance()
                state_V.advance()

            # the last block has no Q K^T to go with it
            self.issue_pv(pv, state_V)
            warpgroup.wait_group(0)
            pipe_V.consumer_release(state_V)
        return acc_O, row_max, row_sum

    def q_operand(self, mma_qk, thread, sQ):
        """Q as WGMMA reads it: descriptors of its place in shared memory, from which every key block reads it anew."""
        return mma_qk.make_fragment_A(mma_qk.get_slice(thread).partition_A(sQ))

    @cute.jit
    def issue_pair(self, qk, pv, state_K, state_V):
        """Starts S = Q K^T of a block and O += P V of the block before; returns when S is there, its K stage freed."""
        self.issue_qk(qk, state_K)
        self.issue_pv(pv, state_V)
        warpgroup.wait_group(1)  # groups end in the order of issue: all but the youngest, P V, are done
        qk[4].consumer_release(state_K)

    @cute.jit
    def finish_pair(self, acc_S, pv, state_V, shrink):
        """Waits for P V of the block before and frees its V stage; then the new P and O are ready for the next pair."""
        # ptxas moves this wait above the exponentials; holding it below them by a store that depends on them cost 1 to 4 %
        warpgroup.wait_group(0)
        pv[4].consumer_release(state_V)
        self.to_operand(acc_S, pv[1])  # only now: P V read the old P until here
        softmax.scale_rows(pv[3], shrink)

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
    def issue_pv(self, pv, state):
        mma_pv, tOrP, tOrV, acc_O, pipe_V = pv
        pipe_V.consumer_wait(state)
        # a fence for P and O: without it ptxas may serialise the products (C7519, seen with loop bounds of a tile loop)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(tOrP, mode=[2])):
            cute.gemm(mma_pv, acc_O, tOrP[None, None, k], tOrV[None, None, k, state.index], acc_O)
        warpgroup.commit_group()

    @cute.jit
    def to_operand(self, acc_S, tOrP):
        """P as PV's A operand: the accumulator fragment of 16 keys is, register by register, the A fragment of one k-step."""
        # element by element: a conversion of the whole vector keeps a second copy of it in registers (C7512)
        for i in cutlass.range_constexpr(cute.size(tOrP)):
            tOrP[i] = acc_S[i].to(self.dtype)

    @cute.jit
    def epilogue(
        self, mma_pv, tma_O, acc_O, row_max, row_sum, scale_log2, sO, gO, gLSE, thread, first_row, seqlen_q, barrier
    ):  # fmt: skip
        """Normalised O: registers -> stmatrix -> the 64 rows of Q's memory that this warpgroup alone read -> TMA store."""
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
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        cute.copy(r2s, thr_r2s.retile(rO), thr_r2s.partition_D(sO))
        cute.arch.fence_proxy("async.shared", space="cta")  # TMA must see what the threads wrote
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
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
