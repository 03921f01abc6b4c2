"""The forward kernel for Hopper (sm_90a): TMA, WGMMA, warp specialisation.

One CTA computes `tile_m` query rows of one head. Its roles (counts and bytes are `ForwardConfig`'s):

    producer     warp 0 of warpgroup 0: one thread starts the TMA loads of Q, then K(n), V(n) for n from the last key
                 block down; gives its registers to the consumers (setmaxnreg)
    consumers    warpgroups 1..: 64 query rows each, independent of one another: S = Q K^T (both from shared memory),
                 online softmax in registers, O += P V (P from registers), epilogue through the warpgroup's own Q memory

    barrier      full when                      free when
    Q            1 arrival + q_bytes            never reused
    K ring       1 arrival + k_bytes per stage  one arrival per consumer warp
    V ring       1 arrival + v_bytes per stage  one arrival per consumer warp
"""

import enum
import math

import cutlass
import cutlass.cute as cute
import cutlass.cute.nvgpu as nvgpu
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
import torch
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.tensor_utils import LayoutEnum

from fa3_lib import softmax
from fa3_lib.compiler import COMPILE_LOCK
from fa3_lib.config import WARPGROUP, WGMMA_M, ForwardConfig, ceil_div

WARP = 32
ALIGN_SWIZZLE = 1024  # bytes: 128-byte swizzled tiles start on the 8-row pattern's boundary


class NamedBarrier(enum.IntEnum):
    """Hardware barriers 1..15 of a CTA; 0 belongs to sync_threads()."""

    EPILOGUE = 1  # + consumer index: the warps of one consumer warpgroup, around its output tile


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
        mLSE: cute.Tensor,  # (b, h, sq) fp32
        softmax_scale: Float32,
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

        load = cpasync.CopyBulkTensorTileG2SOp()
        store = cpasync.CopyBulkTensorTileS2GOp()
        one_stage = (None, None, 0)
        tma_Q, mQ = cpasync.make_tiled_tma_atom(
            load, mQ, cute.slice_(sQ_layout, one_stage), (WGMMA_M, cfg.head_dim)
        )
        tma_K, mK = cpasync.make_tiled_tma_atom(
            load, mK, cute.slice_(sK_layout, one_stage), (cfg.tile_n, cfg.head_dim)
        )
        tma_V, mV = cpasync.make_tiled_tma_atom(
            load, mV, cute.slice_(sV_layout, one_stage), (cfg.head_dim_v, cfg.tile_n)
        )
        tma_O, mO = cpasync.make_tiled_tma_atom(
            store, mO, cute.slice_(sO_layout, one_stage), (WGMMA_M, cfg.head_dim_v)
        )

        @cute.struct
        class SharedStorage:
            q_barrier: cute.struct.MemRange[cutlass.Int64, 1]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * cfg.stages]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * cfg.stages]
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sQ_layout)], ALIGN_SWIZZLE]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sK_layout)], ALIGN_SWIZZLE]
            v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sV_layout)], ALIGN_SWIZZLE]

        self.shared_storage = SharedStorage

        # one-dimensional: the y and z limits of a grid (65,535) are within reach of heads times batch
        m_blocks = ceil_div(mQ.shape[0], cfg.tile_m)
        self.kernel(
            tma_Q, mQ, tma_K, mK, tma_V, mV, tma_O, mO, mLSE,
            sQ_layout, sK_layout, sV_layout, sO_layout, softmax_scale * math.log2(math.e),
        ).launch(  # fmt: skip
            grid=[m_blocks * mQ.shape[2] * mQ.shape[3], 1, 1],
            block=[cfg.threads, 1, 1],
            smem=SharedStorage.size_in_bytes(),
            stream=stream,
            min_blocks_per_mp=1,
        )

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
        mLSE: cute.Tensor,  # (b, h, sq)
        sQ_layout: cute.ComposedLayout,
        sK_layout: cute.ComposedLayout,
        sV_layout: cute.ComposedLayout,
        sO_layout: cute.ComposedLayout,
        scale_log2: Float32,
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
        sO = storage.q.get_tensor(sO_layout.outer, swizzle=sO_layout.inner)  # (64, dv, consumer): Q's memory

        q_barrier = storage.q_barrier.data_ptr()
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(q_barrier, cfg.full_arrivals)
        # the second ring's creation fences the barriers' initialisation and synchronises the CTA
        pipe_K = self.make_ring(storage.k_barriers.data_ptr(), cfg.k_bytes, defer_sync=True)
        pipe_V = self.make_ring(storage.v_barriers.data_ptr(), cfg.v_bytes, defer_sync=False)

        m_block, head, batch = self.tile_coordinates(mQ)
        group = mQ.shape[2] // mK.shape[2]  # query heads per KV head
        gQ = cute.local_tile(mQ[None, None, head, batch], (WGMMA_M, cfg.head_dim), (None, 0))  # (64, d, 64-row tile)
        gO = cute.local_tile(mO[None, None, head, batch], (WGMMA_M, cfg.head_dim_v), (None, 0))
        gK = cute.local_tile(mK[None, None, head // group, batch], (cfg.tile_n, cfg.head_dim), (None, 0))
        gV = cute.local_tile(mV[None, None, head // group, batch], (cfg.head_dim_v, cfg.tile_n), (0, None))

        # both roles take the tile range from the same function
        seqlen_q, seqlen_k = mQ.shape[0], mK.shape[0]
        n_blocks = cfg.key_blocks(m_block, seqlen_q, seqlen_k, cutlass.min, cutlass.max)
        n_unmasked = cfg.unmasked_key_blocks(m_block, seqlen_q, seqlen_k, cutlass.min, cutlass.max)

        if warp < WARPGROUP // WARP:
            cute.arch.setmaxregister_decrease(cfg.producer_registers)
            if warp == 0:
                self.load(tma_Q, tma_K, tma_V, gQ, gK, gV, sQ, sK, sV, q_barrier, pipe_K, pipe_V, m_block, n_blocks)
        else:
            cute.arch.setmaxregister_increase(cfg.consumer_registers)
            consumer = warp // (WARPGROUP // WARP) - 1
            thread = cute.arch.thread_idx()[0] % WARPGROUP
            first_row = m_block * cfg.tile_m + consumer * WGMMA_M
            mma_pv = self.make_mma_pv()
            acc_O, row_max, row_sum = self.attend(
                mma_pv, sQ[None, None, consumer], sK, sV, q_barrier, pipe_K, pipe_V,
                thread, first_row, seqlen_q, seqlen_k, n_blocks, n_unmasked, scale_log2,
            )  # fmt: skip
            row_scale, row_lse = softmax.finalize(row_max, row_sum, scale_log2)
            softmax.scale_rows(acc_O, row_scale)
            self.store_lse(mLSE[batch, head, None], row_lse, thread, first_row, seqlen_q)
            self.store_output(
                mma_pv, tma_O, acc_O, sO[None, None, consumer],
                gO[None, None, m_block * cfg.consumer_warpgroups + consumer], thread, consumer,
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
    def tile_coordinates(self, mQ: cute.Tensor):
        """(m_block, head, batch) of this CTA: query tiles of one head are neighbours, so that they share K and V in L2."""
        m_blocks = ceil_div(mQ.shape[0], self.config.tile_m)
        index = cute.arch.block_idx()[0]
        m_block, head = index % m_blocks, index // m_blocks
        if const_expr(self.config.causal):
            m_block = m_blocks - 1 - m_block  # the longest rows first: short ones fill the end of the grid
        return m_block, head % mQ.shape[2], head // mQ.shape[2]

    # --- producer ------------------------------------------------------------------------------------------------

    @cute.jit
    def load(
        self, tma_Q, tma_K, tma_V, gQ, gK, gV, sQ, sK, sV, q_barrier, pipe_K, pipe_V, m_block, n_blocks
    ):  # fmt: skip
        cfg = self.config
        tQsQ, tQgQ = partition_tma(tma_Q, sQ, gQ)
        tKsK, tKgK = partition_tma(tma_K, sK, gK)
        tVsV, tVgV = partition_tma(tma_V, sV, gV)

        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(q_barrier, cfg.q_bytes)
        for consumer in cutlass.range_constexpr(cfg.consumer_warpgroups):
            tile = m_block * cfg.consumer_warpgroups + consumer
            cute.copy(tma_Q, tQgQ[None, tile], tQsQ[None, consumer], tma_bar_ptr=q_barrier)

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, cfg.stages)
        for i in cutlass.range(n_blocks, unroll=1):
            n = n_blocks - 1 - i
            pipe_K.producer_acquire(state)
            cute.copy(
                tma_K, tKgK[None, n], tKsK[None, state.index], tma_bar_ptr=pipe_K.producer_get_barrier(state)
            )
            pipe_V.producer_acquire(state)
            cute.copy(
                tma_V, tVgV[None, n], tVsV[None, state.index], tma_bar_ptr=pipe_V.producer_get_barrier(state)
            )
            state.advance()

    # --- consumers -----------------------------------------------------------------------------------------------

    @cute.jit
    def attend(
        self, mma_pv, sQ, sK, sV, q_barrier, pipe_K, pipe_V,
        thread, first_row, seqlen_q, seqlen_k, n_blocks, n_unmasked, scale_log2,
    ):  # fmt: skip
        """The main loop of one consumer warpgroup; returns acc_O, row_max, row_sum, not yet normalised."""
        cfg = self.config
        mma_qk, mma_qk_first = self.make_mma_qk(accumulate=True), self.make_mma_qk(accumulate=False)
        thr_qk, thr_pv = mma_qk.get_slice(thread), mma_pv.get_slice(thread)
        tSrQ = mma_qk.make_fragment_A(thr_qk.partition_A(sQ))
        tSrK = mma_qk.make_fragment_B(thr_qk.partition_B(sK))
        tOrV = mma_pv.make_fragment_B(thr_pv.partition_B(sV))
        acc_S = cute.make_rmem_tensor(thr_qk.partition_shape_C((WGMMA_M, cfg.tile_n)), Float32)
        tOrP = cute.make_rmem_tensor(thr_pv.partition_shape_A((WGMMA_M, cfg.tile_n)), self.dtype)
        acc_O = cute.make_rmem_tensor(thr_pv.partition_shape_C((WGMMA_M, cfg.head_dim_v)), Float32)
        row_max = cute.make_rmem_tensor(softmax.ROWS_PER_THREAD, Float32)
        row_sum = cute.make_rmem_tensor(softmax.ROWS_PER_THREAD, Float32)
        acc_O.fill(0.0)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)

        cute.arch.mbarrier_wait(q_barrier, 0)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)
        # blocks that need the mask come first (the highest n), the others run without it
        for i in cutlass.range(n_blocks - n_unmasked, unroll=1):
            n = n_blocks - 1 - i
            self.qk(mma_qk_first, mma_qk, tSrQ, tSrK, acc_S, pipe_K, state)
            softmax.mask(acc_S, thread, first_row, n * cfg.tile_n, seqlen_q, seqlen_k, cfg.causal)
            scale = softmax.step(acc_S, row_max, row_sum, scale_log2, may_be_empty=True)
            self.pv(mma_pv, acc_S, tOrP, tOrV, acc_O, scale, pipe_V, state)
            state.advance()
        for _ in cutlass.range(n_unmasked, unroll=1):
            self.qk(mma_qk_first, mma_qk, tSrQ, tSrK, acc_S, pipe_K, state)
            scale = softmax.step(acc_S, row_max, row_sum, scale_log2, may_be_empty=False)
            self.pv(mma_pv, acc_S, tOrP, tOrV, acc_O, scale, pipe_V, state)
            state.advance()
        return acc_O, row_max, row_sum

    @cute.jit
    def qk(self, mma_qk_first, mma_qk, tSrQ, tSrK, acc_S, pipe_K, state):
        """S = Q K^T of one key block; frees the K stage."""
        pipe_K.consumer_wait(state)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(tSrQ, mode=[2])):
            mma = mma_qk_first if const_expr(k == 0) else mma_qk
            cute.gemm(mma, acc_S, tSrQ[None, None, k], tSrK[None, None, k, state.index], acc_S)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        pipe_K.consumer_release(state)

    @cute.jit
    def pv(self, mma_pv, acc_S, tOrP, tOrV, acc_O, scale, pipe_V, state):
        """O = O * scale + P V of one key block; frees the V stage."""
        # the accumulator fragment of 16 keys is, register by register, the A fragment of one k-step
        cute.make_tensor(tOrP.iterator, acc_S.layout).store(acc_S.load().to(self.dtype))
        softmax.scale_rows(acc_O, scale)
        pipe_V.consumer_wait(state)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(tOrP, mode=[2])):
            cute.gemm(mma_pv, acc_O, tOrP[None, None, k], tOrV[None, None, k, state.index], acc_O)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        pipe_V.consumer_release(state)

    # --- epilogue ------------------------------------------------------------------------------------------------

    @cute.jit
    def store_lse(self, gLSE, row_lse, thread, first_row, seqlen_q):
        for r in cutlass.range_constexpr(softmax.ROWS_PER_THREAD):
            row = first_row + softmax.row_in_tile(thread, r)
            if thread % softmax.THREADS_PER_ROW == 0 and row < seqlen_q:
                gLSE[row] = row_lse[r]

    @cute.jit
    def store_output(self, mma_pv, tma_O, acc_O, sO, gO, thread, consumer):
        """fp32 registers -> 16 bit -> stmatrix -> the warpgroup's own 64 rows of Q's memory -> TMA store."""
        barrier = NamedBarrier.EPILOGUE + consumer
        rO = cute.make_rmem_tensor_like(acc_O, self.dtype)
        rO.store(acc_O.load().to(self.dtype))
        r2s = cute.make_tiled_copy_C(cute.make_copy_atom(nvgpu.warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma_pv)
        thr_r2s = r2s.get_slice(thread)

        # every warp of the warpgroup has read its last Q
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        cute.copy(r2s, thr_r2s.retile(rO), thr_r2s.partition_D(sO))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        if thread < WARP:
            tOsO, tOgO = partition_tma(tma_O, sO, gO)
            cute.copy(tma_O, tOsO, tOgO)
            cute.arch.cp_async_bulk_commit_group()
            # shared memory must outlive the store's reads
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def partition_tma(atom, smem, gmem):
    """(smem, gmem) with the tile in one mode, as `cute.copy` of a TMA atom wants them; no multicast."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


def compile_forward(config: ForwardConfig, dtype: torch.dtype, options: str = ""):
    """Compiles one configuration for sm_90a without tensors and without launching; no GPU is needed.

    One result serves every batch, sequence length, head count, stride and head dim up to the configuration's.

    Args:
        config: the tile configuration.
        dtype: torch.float16 or torch.bfloat16.
        options: further options of `cute.compile` (`--enable-tvm-ffi`, `--keep-cubin`, `remarks{ptx}` ...).

    Returns:
        The compiled object; called as `fn(q, k, v, out, lse, softmax_scale)` if compiled with `--enable-tvm-ffi`.
    """
    element = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}[dtype]
    b, sq, sk, h, hk = (cute.sym_int() for _ in range(5))
    d, dv = cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)

    def rows(seqlen, heads, columns):  # 16-byte strides, as TMA wants them
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return make_fake_tensor(element, (b, seqlen, heads, columns), (*strides, 1), assumed_align=16)

    lse = make_fake_tensor(Float32, (b, h, sq), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream="--enable-tvm-ffi" in options)
    with COMPILE_LOCK:
        return cute.compile(
            ForwardSm90(config, element),
            rows(sq, h, d), rows(sk, hk, d), rows(sk, hk, dv), rows(sq, h, dv), lse, Float32(1.0), stream,
            options=f"--gpu-arch sm_90a {options}",
        )  # fmt: skip
