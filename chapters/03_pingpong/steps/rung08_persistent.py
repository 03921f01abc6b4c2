"""Rung 8: one CTA per SM walks over tiles (persistent); a next tile's loads run under the epilogue of the one before.

Adds to rung 7      tile_of_round: which tile comes next, a long causal one and its short mirror image in turn;
                    rings and turns that go on from tile to tile; a warp of its own for Q, which waits for other things than
                    K and V do; memory of its own for O where it fits; fa3_lib's tiles (three consumers at d64)
Expect              no launch, no barrier initialisation and no first loads between tiles; SMs that end at the same time
Look for in SASS    HGMMA, MUFU.EX2 and UTMALDG as in rung 7, in one more loop

    role        threads              does, for every tile
    load_kv     warp 0               one thread starts the TMA copies of K(n), V(n) from the last block down
    load_q      warp 1               one thread starts the TMA copies of each consumer's 64 query rows
    consumer c  warpgroup 1 + c      64 query rows: S = Q K^T, online softmax in registers, O += P V, epilogue

    barrier     full when                      empty when
    Q           1 arrival + bytes, per c       q_empty_arrivals of its consumer
    K, V rings  1 arrival + bytes, per stage   one arrival per consumer warp, per stage
"""

import enum
import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.cute.nvgpu as nvgpu
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
import torch
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from fa3_course import device_softmax as softmax
from fa3_course import rung_host
from fa3_lib.config import WARPGROUP, WGMMA_M, ForwardConfig, ceil_div

WARP = 32
TILES = {64: (192, 128), 128: (128, 128), 192: (128, 112), 256: (128, 80)}  # (tile_m, tile_n) by head dim
STAGES = 2
SMS = 132  # of an H100 SXM or H200: the grid where no GPU is there to ask; every grid gives the right answer


class NamedBarrier(enum.IntEnum):
    """Hardware barriers 1..15 of a CTA; 0 belongs to sync_threads()."""

    EPILOGUE = 1  # + consumer: the warps of one consumer, around its output tile
    TURN = 4  # + consumer: it may issue its GEMMs (the consumer waits, the one before it arrives)


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
        gpu = torch.cuda.is_available()
        self.sms = torch.cuda.get_device_properties().multi_processor_count if gpu else SMS

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

        # swizzled shared-memory layouts: 64 rows of Q and of O per consumer, a K and a V tile per stage
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
            q_full: cute.struct.MemRange[cutlass.Int64, consumers]
            q_empty: cute.struct.MemRange[cutlass.Int64, consumers]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * cfg.stages]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * cfg.stages]
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sQ_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sK_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sV_layout)], 1024]
            o: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sO_layout) if cfg.own_output else 0], 1024]

        self.storage = SharedStorage
        tiles_per_unit = 2 if cfg.causal else 1
        units = ceil_div(ceil_div(mQ.shape[0], cfg.tile_m), tiles_per_unit) * mQ.shape[2] * mQ.shape[3]
        ctas = cutlass.min(units, self.sms)
        rounds = ceil_div(units, ctas) * tiles_per_unit  # tiles of the busiest CTA
        self.kernel(Q, K, V, O, mLSE, softmax_scale * math.log2(math.e), rounds).launch(
            grid=[ctas, 1, 1],
            block=[cfg.threads, 1, 1],
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
        rounds: Int32,
    ):
        cfg = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sQ = storage.q.get_tensor(Q.layout.outer, swizzle=Q.layout.inner)  # (64, d, consumer)
        sK = storage.k.get_tensor(K.layout.outer, swizzle=K.layout.inner)  # (tile_n, d, stage)
        sV = storage.v.get_tensor(V.layout.outer, swizzle=V.layout.inner)  # (dv, tile_n, stage)
        o_memory = storage.o if const_expr(cfg.own_output) else storage.q
        sO = o_memory.get_tensor(O.layout.outer, swizzle=O.layout.inner)  # (64, dv, consumer)

        q_full, q_empty = storage.q_full.data_ptr(), storage.q_empty.data_ptr()
        if warp == 0:
            for tma in (Q, K, V, O):
                cpasync.prefetch_descriptor(tma.atom)
            with cute.arch.elect_one():
                for c in cutlass.range_constexpr(cfg.consumer_warpgroups):
                    cute.arch.mbarrier_init(q_full + c, cfg.full_arrivals)
                    cute.arch.mbarrier_init(q_empty + c, cfg.q_empty_arrivals)
        pipe_K = self.make_ring(storage.k_barriers.data_ptr(), cfg.k_bytes, defer_sync=True)
        # fences all barriers' initialisation and synchronises the CTA
        pipe_V = self.make_ring(storage.v_barriers.data_ptr(), cfg.v_bytes, defer_sync=False)

        if warp < WARPGROUP // WARP:
            cute.arch.setmaxregister_decrease(cfg.producer_registers)
            if warp == 0:
                self.load_kv(K, V, sK, sV, pipe_K, pipe_V, Q.tensor, rounds)
            elif warp == 1:
                self.load_q(Q, sQ, q_full, q_empty, rounds)
        else:
            cute.arch.setmaxregister_increase(cfg.consumer_registers)
            consumer = warp // (WARPGROUP // WARP) - 1
            self.consume(
                sQ[None, None, consumer], sK, sV, q_full + consumer, q_empty + consumer, pipe_K, pipe_V,
                O, sO[None, None, consumer], mLSE, K.tensor.shape[0], consumer, scale_log2, rounds,
            )  # fmt: skip

    @cute.jit
    def tile_of_round(self, round_index: Int32, mQ: cute.Tensor):
        """(m_block, head, batch) of this CTA's tile in a round, by the same function for every role; m_block is -1 for none.

        Tiles of one head are neighbours, so that they find K and V in L2. Causal tiles differ in length: a CTA takes a
        long one and its short mirror image (the last rows and the first, and so on) in turn, every pair equally long.
        `mQ` is any (sq, ., h, b) tensor.
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
    def load_kv(self, K, V, sK, sV, pipe_K, pipe_V, mQ, rounds):
        """Warp 0. Every copy is started by one elected thread; its bytes complete the barrier it names."""
        cfg, mK, mV = self.config, K.tensor, V.tensor
        # the rings go on from tile to tile
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, cfg.stages)
        for r in cutlass.range(rounds, unroll=1):
            m_block, head, batch = self.tile_of_round(r, mQ)
            if m_block >= 0:
                kv_head = head // (mQ.shape[2] // mK.shape[2])
                gK = cute.local_tile(mK[None, None, kv_head, batch], (cfg.tile_n, cfg.head_dim), (None, 0))
                gV = cute.local_tile(mV[None, None, kv_head, batch], (cfg.head_dim_v, cfg.tile_n), (0, None))
                tKsK, tKgK = partition_tma(K.atom, sK, gK)
                tVsV, tVgV = partition_tma(V.atom, sV, gV)
                n_blocks = cfg.key_blocks(m_block, mQ.shape[0], mK.shape[0], cutlass.min, cutlass.max)
                for i in cutlass.range(n_blocks, unroll=1):
                    n = n_blocks - 1 - i
                    for pipe, tma, gmem, smem in ((pipe_K, K.atom, tKgK, tKsK), (pipe_V, V.atom, tVgV, tVsV)):
                        pipe.producer_acquire(state)  # wait until the stage is empty, then announce its bytes
                        barrier = pipe.producer_get_barrier(state)
                        cute.copy(tma, gmem[None, n], smem[None, state.index], tma_bar_ptr=barrier)
                        pipe.producer_commit(state)  # nothing left to do for TMA: the last byte completes the phase
                    state.advance()
        # no producer_tail: it waits for releases that come from other CTAs of a cluster, and there is no cluster

    @cute.jit
    def load_q(self, Q, sQ, q_full, q_empty, rounds):
        """Warp 1: per tile the 64 rows of each consumer, as soon as that consumer lets its last ones go."""
        cfg, mQ = self.config, Q.tensor
        visited = Int32(0)  # tiles so far
        for r in cutlass.range(rounds, unroll=1):
            m_block, head, batch = self.tile_of_round(r, mQ)
            if m_block >= 0:
                gQ = cute.local_tile(mQ[None, None, head, batch], (WGMMA_M, cfg.head_dim), (None, 0))
                tQsQ, tQgQ = partition_tma(Q.atom, sQ, gQ)
                for c in cutlass.range_constexpr(cfg.consumer_warpgroups):
                    row_tile = m_block * cfg.consumer_warpgroups + c
                    # of the other phase than the consumer's: passes at once the first time, no phase has ended yet
                    cute.arch.mbarrier_wait(q_empty + c, (visited & 1) ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(q_full + c, cfg.q_bytes // cfg.consumer_warpgroups)
                    cute.copy(Q.atom, tQgQ[None, row_tile], tQsQ[None, c], tma_bar_ptr=q_full + c)
                visited += 1

    @cute.jit
    def consume(
        self, sQ, sK, sV, q_full, q_empty, pipe_K, pipe_V, O, sO, mLSE, seqlen_k, consumer, scale_log2, rounds
    ):  # fmt: skip
        """One consumer warpgroup, tile by tile."""
        cfg, mO = self.config, O.tensor
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        mma_pv = self.make_mma_pv()
        if const_expr(cfg.ping_pong):  # noqa: SIM102, decided while tracing; the next one while running
            if consumer == 0:  # the first turn is consumer 0's
                self.pass_turn(cfg.consumer_warpgroups - 1)
        visited, done = Int32(0), Int32(0)  # tiles, and key blocks (the place in both rings), so far
        for r in cutlass.range(rounds, unroll=1):
            m_block, head, batch = self.tile_of_round(r, mO)
            if m_block >= 0:
                n_blocks = cfg.key_blocks(m_block, mO.shape[0], seqlen_k, cutlass.min, cutlass.max)
                n_unmasked = cfg.unmasked_key_blocks(m_block, mO.shape[0], seqlen_k, cutlass.min, cutlass.max)
                row_tile = m_block * cfg.consumer_warpgroups + consumer
                cute.arch.mbarrier_wait(q_full, visited & 1)
                # a counter that a tile loop carries lives in a vector register; WGMMA's descriptors want uniform ones.
                # make_warp_uniform once per tile saves an R2UR or two for every HGMMA (d192, d256)
                acc_O, row_max, row_sum = self.attend(
                    mma_pv, sQ, sK, sV, q_empty, pipe_K, pipe_V, thread, consumer, row_tile * WGMMA_M, mO.shape[0],
                    seqlen_k, n_blocks, n_unmasked, cute.arch.make_warp_uniform(done), scale_log2,
                )  # fmt: skip
                gO = cute.local_tile(mO[None, None, head, batch], (WGMMA_M, cfg.head_dim_v), (row_tile, 0))
                self.epilogue(
                    mma_pv, O.atom, acc_O, row_max, row_sum, scale_log2, sO, gO, mLSE[batch, head, None],
                    q_empty, thread, row_tile * WGMMA_M, mO.shape[0], NamedBarrier.EPILOGUE + consumer,
                )  # fmt: skip
                visited += 1
                done += n_blocks
        self.wait_for_store(thread)  # shared memory must outlive the last store's reads

    @cute.jit
    def attend(
        self, mma_pv, sQ, sK, sV, q_empty, pipe_K, pipe_V,
        thread, consumer, first_row, seqlen_q, seqlen_k, n_blocks, n_unmasked, done, scale_log2,
    ):  # fmt: skip
        """One tile of one consumer warpgroup, `done` key blocks into the rings.

        Returns acc_O, row_max, row_sum, not yet normalised.
        """
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

        tSrQ = self.q_operand(mmas_qk[0], thread, sQ)
        if n_blocks > 0:
            qk = (mmas_qk, tSrQ, tSrK, acc_S, pipe_K)
            pv = (mma_pv, tOrP, tOrV, acc_O, pipe_V)
            # block j of the visit is key block n_blocks - 1 - j; K's place in its ring is one block ahead of V's
            state_K, state_V = self.state_after(done), self.state_after(done)

            # the first block has no P V to run under
            self.issue_qk(qk, state_K)
            warpgroup.wait_group(0)
            pipe_K.consumer_release(state_K)
            state_K.advance()
            softmax.apply_mask(acc_S, thread, first_row, (n_blocks - 1) * cfg.tile_n, seqlen_q, seqlen_k, cfg.causal)
            softmax.step(acc_S, row_max, row_sum, scale_log2, may_be_empty=True)
            self.to_operand(acc_S, tOrP)

            # blocks that need the mask come first (the highest n), the others run without it
            n_masked = cutlass.max(n_blocks - n_unmasked, 1)
            for j in cutlass.range(1, n_masked, unroll=1):
                self.issue_pair(qk, pv, state_K, state_V, consumer)
                first_col = (n_blocks - 1 - j) * cfg.tile_n
                softmax.apply_mask(acc_S, thread, first_row, first_col, seqlen_q, seqlen_k, cfg.causal)
                shrink = softmax.step(acc_S, row_max, row_sum, scale_log2, may_be_empty=True)
                self.finish_pair(acc_S, pv, state_V, shrink)
                state_K.advance()
                state_V.advance()
            for _ in cutlass.range(n_masked, n_blocks, unroll=1):
                self.issue_pair(qk, pv, state_K, state_V, consumer)
                shrink = softmax.step(acc_S, row_max, row_sum, scale_log2, may_be_empty=False)
                self.finish_pair(acc_S, pv, state_V, shrink)
                state_K.advance()
                state_V.advance()

            self.release_q(q_empty)
            # the last block has no Q K^T to go with it
            self.issue_pv(pv, state_V)
            warpgroup.wait_group(0)
            pipe_V.consumer_release(state_V)
        else:
            self.release_q(q_empty)
        return acc_O, row_max, row_sum

    @cute.jit
    def state_after(self, blocks: Int32) -> pipeline.PipelineState:
        """A consumer's place in a ring of 1, 2, 4 or 8 stages that this many blocks have passed."""
        stages = self.config.stages
        return pipeline.PipelineState(stages, blocks, blocks & (stages - 1), (blocks >> (stages.bit_length() - 1)) & 1)

    @cute.jit
    def release_q(self, q_empty):
        """After a tile's last S: the next Q may come, unless the output is to take its place first."""
        if const_expr(self.config.own_output):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(q_empty)

    def q_operand(self, mma_qk, thread, sQ):
        """Q as WGMMA reads it: descriptors of its place in shared memory, from which every key block reads it anew."""
        return mma_qk.make_fragment_A(mma_qk.get_slice(thread).partition_A(sQ))

    @cute.jit
    def issue_pair(self, qk, pv, state_K, state_V, consumer):
        """One turn: starts S = Q K^T of a block and O += P V of the block before; returns when S is there, its K stage freed."""
        if const_expr(self.config.ping_pong):
            self.wait_turn(consumer)
        self.issue_qk(qk, state_K)
        self.issue_pv(pv, state_V)
        if const_expr(self.config.ping_pong):
            self.pass_turn(consumer)  # issued is enough: the tensor cores work in the order of issue
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
    def wait_turn(self, consumer):
        cute.arch.barrier(barrier_id=NamedBarrier.TURN + consumer, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_turn(self, consumer):
        """The next consumer's turn. Its barrier counts both warpgroups, the one that arrives and the one that waits."""
        following = (consumer + 1) % self.config.consumer_warpgroups
        cute.arch.barrier_arrive(barrier_id=NamedBarrier.TURN + following, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def epilogue(
        self, mma_pv, tma_O, acc_O, row_max, row_sum, scale_log2, sO, gO, gLSE, q_empty, thread, first_row, seqlen_q, barrier
    ):  # fmt: skip
        """Normalised O: registers -> stmatrix -> this warpgroup's 64 rows of shared memory -> TMA store."""
        own_output = self.config.own_output
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
        if const_expr(own_output):
            self.wait_for_store(thread)  # the output of the tile before
        # the memory is free: the output before has left it, or every warp of the warpgroup has read its last Q there
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        cute.copy(r2s, thr_r2s.retile(rO), thr_r2s.partition_D(sO))
        cute.arch.fence_proxy("async.shared", space="cta")  # TMA must see what the threads wrote
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        if thread < WARP:
            tOsO, tOgO = partition_tma(tma_O, sO, gO)
            cute.copy(tma_O, tOsO, tOgO)
            cute.arch.cp_async_bulk_commit_group()
        if const_expr(not own_output):
            self.wait_for_store(thread)
            if thread < WARP:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(q_empty)  # Q's memory is Q's again

    @cute.jit
    def wait_for_store(self, thread):
        """Until the storing warp's TMA store has read its shared memory."""
        if thread < WARP:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def make_tma(op, tensor, layout, box) -> Tma:
    """The descriptor that copies boxes of `tensor` to or from one tile (the last mode's index 0) of `layout`."""
    return Tma(*cpasync.make_tiled_tma_atom(op, tensor, cute.slice_(layout, (None, None, 0)), box), layout)


def partition_tma(atom, smem, gmem):
    """(smem, gmem) with the tile in one mode, as `cute.copy` of a TMA atom wants them; no multicast."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


def make_config(head_dim: int, causal: bool) -> ForwardConfig:
    """The tile shape for head dims up to `head_dim`; TMA fills the missing columns with zeros."""
    d = next(d for d in TILES if d >= head_dim)
    return ForwardConfig(d, d, *TILES[d], stages=STAGES, causal=causal, ping_pong=True).with_room().validate()


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
