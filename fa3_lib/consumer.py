"""The consumer's side: one warpgroup's products, softmax between them, and its output.

Each consumer has 64 query rows of every tile. Its main loop keeps two products in flight, S of a block and P V of the block
before, and does its softmax under the latter and under the products of the other consumers (with ping-pong they take turns
in issuing). Blocks that need no mask do without a maximum of their own: see `Consumer.finish_unmasked`.
"""

import enum
import math

import cutlass
import cutlass.cute as cute
import cutlass.cute.nvgpu as nvgpu
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from fa3_lib import softmax
from fa3_lib.config import WARPGROUP, WGMMA_M, ForwardConfig
from fa3_lib.loads import Ring, partition_tma
from fa3_lib.walk import Walk

WARP = 32


class NamedBarrier(enum.IntEnum):
    """Hardware barriers 1..15 of a CTA; 0 belongs to sync_threads()."""

    GROUP = 1  # + consumer: the warps of one consumer, for a vote and around its output tile
    TURN = 4  # + consumer: it may issue its GEMMs (the consumer waits, the one before it arrives)


class Scores:
    """What turns products into probabilities: the scale, the softcap and the mask of one call.

    Queries and keys are aligned at their ends: query i stands at key `i + seqlen_k - seqlen_q`, sees `left` keys before and
    `right` after it (causal: 0 after). `factor` is applied before the softcap's tanh, `scale_log2` after.
    """

    def __init__(self, config: ForwardConfig, seqlen_q, seqlen_k, scale_log2, factor, left, right):
        self.config, self.seqlen_q, self.seqlen_k = config, seqlen_q, seqlen_k
        self.scale_log2, self.factor = scale_log2, factor
        self.left, self.right = (left, right) if config.window else (None, Int32(0))

    def key_range(self, m_block: Int32):
        """(first, end) of the key blocks that a tile reads."""
        cfg, lengths = self.config, (self.seqlen_q, self.seqlen_k)
        end = cfg.key_blocks(m_block, *lengths, cutlass.min, cutlass.max, self.right)
        first = cfg.first_key_block(m_block, *lengths, self.left, cutlass.max) if cfg.window else Int32(0)
        return first, end

    def unmasked_range(self, m_block: Int32, consumer: Int32):
        """(first, end) of those that need no mask in this consumer."""
        cfg, lengths = self.config, (self.seqlen_q, self.seqlen_k)
        end = cfg.unmasked_key_blocks(m_block, *lengths, cutlass.min, cutlass.max, consumer, self.right)
        first = cfg.first_unmasked_key_block(m_block, *lengths, self.left, cutlass.max) if cfg.window else Int32(0)
        return first, end

    @cute.jit
    def prepare(
        self, acc_S, factor: Float32, thread: Int32, first_row: Int32, first_col: Int32, masked: cutlass.Constexpr
    ):
        """Softcap (its tanh after `factor`) and, if `masked`, -inf for keys that a row must not see."""
        cfg = self.config
        if const_expr(cfg.softcap):
            softmax.cap(acc_S, factor)
        if const_expr(masked):
            position = self.seqlen_k - self.seqlen_q
            right = self.right if const_expr(cfg.causal or cfg.window) else None
            softmax.mask(acc_S, thread, first_row, first_col, self.seqlen_k, position, self.left, right, cfg.pack_gqa)


class Consumer:
    """One consumer warpgroup. sQ `(64, d)`, sK `(tile_n, d, stage)`, sV `(dv, tile_n, stage)`, sO `(64, dv)` or None."""

    offset = 0  # P = exp2(scaled score - maximum + offset)

    def __init__(
        self,
        config: ForwardConfig,
        dtypes,
        walk: Walk,
        scores: Scores,
        consumer,
        Q: Ring,
        K: Ring,
        V: Ring,
        sQ,
        sK,
        sV,
        sO,
        descales=None,
        with_lse=True,
    ):
        """dtypes: of Q, K and V; P has V's unless a subclass says otherwise. with_lse: whether the LSE is to be stored."""
        self.config, self.walk, self.scores, self.consumer = config, walk, scores, consumer
        q_type, k_type, self.dtype = dtypes
        self.with_lse = with_lse
        self.Q, self.K, self.V, self.sO, self.descales = Q, K, V, sO, descales
        # of one thread's weights in one block: far from the end of P's type, far above what most rows ever reach
        self.largest_sum = 2.0**14 if self.dtype is cutlass.Float16 else 2.0**40
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP
        self.mma_qk, self.mma_qk_first, self.mma_pv = (
            make_mma_qk(config, (q_type, k_type), True),
            make_mma_qk(config, (q_type, k_type), False),
            make_mma_pv((self.p_type(), self.dtype), config.head_dim_v),
        )
        thr_qk, thr_pv = self.mma_qk.get_slice(self.thread), self.mma_pv.get_slice(self.thread)
        self.tSrQ = self.mma_qk.make_fragment_A(thr_qk.partition_A(sQ))
        self.tSrK = self.mma_qk.make_fragment_B(thr_qk.partition_B(sK))
        self.tOrV = self.mma_pv.make_fragment_B(thr_pv.partition_B(sV))

    def p_type(self):
        return self.dtype

    @cute.jit
    def run(self, tma_O, mO, mLSE, mSinks):
        """All tiles of the walk. mO `(rows, dv, heads, b)`, mLSE `(b, query heads, sq)` or None, mSinks `(query heads,)` or None."""
        cfg = self.config
        if const_expr(cfg.ping_pong):  # noqa: SIM102, decided while tracing; the next one while running
            if self.consumer == 0:  # the first turn is consumer 0's
                self.pass_turn(cfg.consumer_warpgroups - 1)
        taken, done, index = Int32(0), Int32(0), self.walk.first()  # tiles and blocks (the place in both rings) so far
        while index < self.walk.end:
            m_block, head, batch = self.walk.tile(index)
            first_row = m_block * cfg.tile_m + self.consumer * WGMMA_M
            first, end = self.scores.key_range(m_block)
            n_blocks = uniform(cutlass.max(end - first, 0))

            scales = self.scales(head, batch, first_row)
            self.Q.wait(taken)
            # `done` in a uniform register: the WGMMA descriptors of its stages are then computed there too
            acc_O, row_max, row_sum, sums = self.attend(
                m_block, first_row, end, n_blocks, taken, cute.arch.make_warp_uniform(done), scales
            )
            done += n_blocks

            sink_log2 = None
            if const_expr(cfg.sinks):
                sink_log2 = cute.make_rmem_tensor(softmax.ROWS_PER_THREAD, Float32)
                for r in cutlass.range_constexpr(softmax.ROWS_PER_THREAD):
                    row = first_row + softmax.row_in_tile(self.thread, r)
                    sink_log2[r] = mSinks[head * cfg.pack_gqa + row % cfg.pack_gqa] * math.log2(math.e)
            row_scale, row_lse = softmax.finalize(row_max, row_sum, sums, scales[0], sink_log2, self.offset)
            out_scale = self.out_scale(head, batch)
            if const_expr(out_scale is not None):
                for r in cutlass.range_constexpr(softmax.ROWS_PER_THREAD):
                    row_scale[r] = row_scale[r] * out_scale
            softmax.scale_rows(acc_O, row_scale)
            if const_expr(mLSE is not None):
                self.store_lse(mLSE[batch, None, None], head, row_lse, first_row)
            self.store_output(tma_O, acc_O, mO[None, None, head, batch], m_block)
            index = self.walk.next(index, taken)
            taken += 1
        if const_expr(cfg.own_output):
            self.wait_for_store()  # shared memory must outlive the last store

    def scales(self, head: Int32, batch: Int32, first_row: Int32):
        """Of one tile: the factor of its scores in exp2, and the one before the softcap's tanh."""
        return self.scores.scale_log2, self.scores.factor

    def out_scale(self, head: Int32, batch: Int32):
        """What the output is multiplied by beside 1 / sum, or None."""
        return None

    @cute.jit
    def attend(self, m_block, first_row, end, n_blocks, taken, done, scales):
        """One tile; returns acc_O, row_max, row_sum (this thread's part), not yet normalised, and None: no other sums.

        Blocks are counted in the order of their visit, j = 0 for the last keys. Those masked at their right come first,
        those masked by the window's left side last.
        """
        cfg, tile_n = self.config, self.config.tile_n
        scale_log2, factor = scales[:2]
        acc_S = cute.make_rmem_tensor(self.mma_qk.partition_shape_C((WGMMA_M, tile_n)), Float32)
        tOrP = cute.make_rmem_tensor(self.mma_pv.partition_shape_A((WGMMA_M, tile_n)), self.p_type())
        acc_O = cute.make_rmem_tensor(self.mma_pv.partition_shape_C((WGMMA_M, cfg.head_dim_v)), Float32)
        row_max = cute.make_rmem_tensor(softmax.ROWS_PER_THREAD, Float32)
        row_sum = cute.make_rmem_tensor(softmax.ROWS_PER_THREAD, Float32)
        acc_O.fill(0.0)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        state = (acc_S, tOrP, acc_O, row_max, row_sum)

        if n_blocks > 0:
            # block 0: S, and its softmax, with nothing of this tile to overlap with
            self.issue_qk(acc_S, done)
            warpgroup.wait_group(0)
            self.K.release(done)
            self.scores.prepare(acc_S, factor, self.thread, first_row, (end - 1) * tile_n, masked=True)
            softmax.step(acc_S, row_max, row_sum, scale_log2, True, self.offset)
            self.to_operand(acc_S, tOrP)

            first_unmasked, end_unmasked = self.scores.unmasked_range(m_block, self.consumer)
            n_right = cutlass.max(end - end_unmasked, 1)
            n_full = n_blocks
            if const_expr(cfg.window):
                n_right = cutlass.min(n_right, n_blocks)
                n_full = cutlass.max(cutlass.min(end - first_unmasked, n_blocks), n_right)
            n_right, n_full = cute.arch.make_warp_uniform(n_right), cute.arch.make_warp_uniform(n_full)
            for j in cutlass.range(1, n_right, unroll=1):
                self.start_pair(state, done + j)
                self.finish_with_max(state, done + j, first_row, (end - 1 - j) * tile_n, scale_log2, factor)
            for j in cutlass.range(n_right, n_full, unroll=1):
                self.start_pair(state, done + j)
                self.finish_unmasked(state, done + j, scale_log2, factor)
            if const_expr(cfg.window):
                for j in cutlass.range(n_full, n_blocks, unroll=1):
                    self.start_pair(state, done + j)
                    self.finish_with_max(state, done + j, first_row, (end - 1 - j) * tile_n, scale_log2, factor)

            self.Q.release(taken)
            self.issue_pv(tOrP, acc_O, done + n_blocks - 1)
            warpgroup.wait_group(0)
            self.V.release(done + n_blocks - 1)
        else:
            self.Q.release(taken)
        return acc_O, row_max, row_sum, None

    @cute.jit
    def start_pair(self, state, block):
        """In this consumer's turn: starts S = Q K^T of `block` and O += P V of the block before; returns when S is there."""
        acc_S, tOrP, acc_O, _, _ = state
        if const_expr(self.config.ping_pong):
            cute.arch.barrier(barrier_id=NamedBarrier.TURN + self.consumer, number_of_threads=2 * WARPGROUP)
        self.issue_qk(acc_S, block)
        self.issue_pv(tOrP, acc_O, block - 1)
        if const_expr(self.config.ping_pong):
            self.pass_turn(self.consumer)
        warpgroup.wait_group(1)

    @cute.jit
    def finish_with_max(self, state, block, first_row, first_col, scale_log2, factor, masked: cutlass.Constexpr = True):
        """The softmax of a block as the paper has it: mask, maximum, weights, O rescaled."""
        acc_S, tOrP, acc_O, row_max, row_sum = state
        self.K.release(block)
        self.scores.prepare(acc_S, factor, self.thread, first_row, first_col, masked)
        shrink = softmax.step(acc_S, row_max, row_sum, scale_log2, masked, self.offset)
        warpgroup.wait_group(0)
        self.V.release(block - 1)
        self.to_operand(acc_S, tOrP)
        softmax.scale_rows(acc_O, shrink)

    @cute.jit
    def finish_unmasked(self, state, block, scale_log2, factor):
        """The softmax of a block that every row sees, with the maximum of the blocks before it.

        Any number near the maximum serves as well: it cancels, and weights above 1 are as exact as those below. (Only the
        largest weight is no longer exactly 1: a row that one key dominates is off by P's rounding, 2^-9 in bf16.) So neither
        maximum nor rescaling is on the way, as long as no weight grows too large. Where one does, S is computed once more,
        and the rows concerned get their maximum; a row's bits depend on that row alone.
        """
        acc_S, tOrP, acc_O, row_max, row_sum = state
        self.scores.prepare(acc_S, factor, self.thread, 0, 0, masked=False)
        block_sum = softmax.weights(acc_S, row_max, scale_log2)
        # it needs every weight, so that none is computed later: the products would wait for it
        too_large = self.any_thread(not (block_sum[0] < self.largest_sum and block_sum[1] < self.largest_sum))
        warpgroup.wait_group(0)
        self.V.release(block - 1)
        if too_large:
            self.issue_qk(acc_S, block)
            warpgroup.wait_group(0)
            self.scores.prepare(acc_S, factor, self.thread, 0, 0, masked=False)
            excess = cute.make_rmem_tensor(softmax.ROWS_PER_THREAD, Float32)
            for r in cutlass.range_constexpr(softmax.ROWS_PER_THREAD):
                excess[r] = Float32(0.0) if block_sum[r] < self.largest_sum else Float32(1.0)  # NaN is too large
            shrink = softmax.raise_max(acc_S, row_max, excess, scale_log2)
            softmax.scale_rows(acc_O, shrink)
            new_sum = softmax.weights(acc_S, row_max, scale_log2)
            for r in cutlass.range_constexpr(softmax.ROWS_PER_THREAD):
                row_sum[r] = row_sum[r] * shrink[r]
                block_sum[r] = new_sum[r]
        self.K.release(block)
        for r in cutlass.range_constexpr(softmax.ROWS_PER_THREAD):
            row_sum[r] = row_sum[r] + block_sum[r]
        self.to_operand(acc_S, tOrP)

    def to_operand(self, acc_S, tOrP):
        softmax.to_operand(acc_S, tOrP)

    @cute.jit
    def any_thread(self, condition) -> cutlass.Boolean:
        """Whether `condition` holds in any thread of this consumer."""
        found = cute.arch.inline_ptx(
            "{ .reg .pred p, q; setp.ne.u32 p, {$r0}, 0; barrier.cta.red.or.pred q, {$r1}, 128, p; selp.u32 {$w0}, 1, 0, q; }",
            write_only_types=[Uint32],
            read_only_args=[Uint32(1) if condition else Uint32(0), Uint32(NamedBarrier.GROUP + self.consumer)],
        )
        return found != 0

    def stage(self, ring: Ring, block: Int32) -> Int32:
        """Of a block, in a uniform register, where WGMMA's descriptors are computed. Which of two ways leaves ptxas less to move
        depends on the head dim."""
        wide = max(self.config.head_dim, self.config.head_dim_v) > 128
        return (uniform if wide else cute.arch.make_warp_uniform)(ring.stage(block))

    @cute.jit
    def issue_qk(self, acc_S, block):
        self.K.wait(block)
        stage = self.stage(self.K, block)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(self.tSrQ, mode=[2])):
            mma = self.mma_qk_first if const_expr(k == 0) else self.mma_qk
            cute.gemm(mma, acc_S, self.tSrQ[None, None, k], self.tSrK[None, None, k, stage], acc_S)
        warpgroup.commit_group()

    @cute.jit
    def issue_pv(self, tOrP, acc_O, block):
        self.V.wait(block)
        stage = self.stage(self.V, block)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(tOrP, mode=[2])):
            cute.gemm(self.mma_pv, acc_O, tOrP[None, None, k], self.tOrV[None, None, k, stage], acc_O)
        warpgroup.commit_group()

    @cute.jit
    def pass_turn(self, consumer):
        following = (consumer + 1) % self.config.consumer_warpgroups
        cute.arch.barrier_arrive(barrier_id=NamedBarrier.TURN + following, number_of_threads=2 * WARPGROUP)

    # --- epilogue ------------------------------------------------------------------------------------------------

    @cute.jit
    def store_lse(self, gLSE, head, row_lse, first_row):
        """gLSE `(query heads, sq)` of one batch element."""
        pack = self.config.pack_gqa
        for r in cutlass.range_constexpr(softmax.ROWS_PER_THREAD):
            row = first_row + softmax.row_in_tile(self.thread, r)
            if self.thread % softmax.THREADS_PER_ROW == 0 and row < self.scores.seqlen_q * pack:
                gLSE[head * pack + row % pack, row // pack] = row_lse[r]

    @cute.jit
    def store_output(self, tma_O, acc_O, gO, m_block):
        """fp32 registers -> 16 bit -> the consumer's 64 rows of gO, `(rows, dv)` of one head."""
        cfg = self.config
        out_type = self.sO.element_type if const_expr(cfg.own_output) else gO.element_type
        rO = cute.make_rmem_tensor_like(acc_O, out_type)
        rO.store(acc_O.load().to(out_type))
        if const_expr(cfg.own_output):
            gO = cute.local_tile(gO, (WGMMA_M, cfg.head_dim_v), (None, 0))
            self.store_by_tma(tma_O, rO, gO[None, None, m_block * cfg.consumer_warpgroups + self.consumer])
        else:
            self.store_directly(rO, gO, m_block * cfg.tile_m + self.consumer * WGMMA_M)

    @cute.jit
    def store_by_tma(self, tma_O, rO, gO):
        """Registers -> stmatrix -> shared memory -> TMA store, which goes on while the next tile begins."""
        barrier = NamedBarrier.GROUP + self.consumer
        store = cute.make_copy_atom(nvgpu.warp.StMatrix8x8x16bOp(False, 4), self.sO.element_type)
        r2s = cute.make_tiled_copy_C(store, self.mma_pv)
        thr_r2s = r2s.get_slice(self.thread)
        self.wait_for_store()  # the output before has left the memory
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        cute.copy(r2s, thr_r2s.retile(rO), thr_r2s.partition_D(self.sO))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        if self.thread < WARP:
            tOsO, tOgO = partition_tma(tma_O, self.sO, gO)
            cute.copy(tma_O, tOsO, tOgO)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_directly(self, rO, gO, first_row):
        """Registers -> global memory, 8 bytes a thread. Of two groups of 8 columns, of which each thread has 2 columns, neighbouring
        threads exchange halves, so that a thread has 4 columns of one, and a row's four threads write a sector of 32 bytes."""
        words = cute.make_tensor(cute.recast_ptr(rO.iterator, dtype=Uint32), cute.make_layout(cute.size(rO) // 2))
        lane = self.thread % softmax.THREADS_PER_ROW
        odd = lane % 2 == 1
        rows, columns = gO.shape
        for r in cutlass.range_constexpr(softmax.ROWS_PER_THREAD):
            row = first_row + softmax.row_in_tile(self.thread, r)
            # all threads of a warp take part in the exchange, also where their row does not exist
            columns_of_row = columns if row < cute.size(rows) else 0
            pieces = cute.local_tile(gO[row, None], (4,), (None,))
            for group in cutlass.range_constexpr(0, self.config.head_dim_v // 8, 2):
                left, right = (
                    words[softmax.ROWS_PER_THREAD * group + r],
                    words[softmax.ROWS_PER_THREAD * (group + 1) + r],
                )
                received = cute.arch.shuffle_sync_bfly(left if odd else right, offset=1)
                pair = cute.make_rmem_tensor(2, Uint32)
                pair[0] = received if odd else left
                pair[1] = right if odd else received
                piece = 2 * (group + lane % 2) + lane // 2
                if 4 * piece < columns_of_row:
                    cute.autovec_copy(cute.recast_tensor(pair, gO.element_type), pieces[None, piece])

    @cute.jit
    def wait_for_store(self):
        """Until the storing warp's TMA store has read its shared memory."""
        if self.thread < WARP:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def uniform(x: Int32) -> Int32:
    """x, the same in all threads of a warp, from an instruction whose result is in a uniform register. What depends on it, ptxas keeps
    there too. After a division, which has no uniform instruction, it would compute descriptors per thread and move two words over
    for each product."""
    return cute.arch.warp_redux_sync(x, kind="or")


def make_mma_qk(config: ForwardConfig, dtypes, accumulate: bool) -> cute.TiledMma:
    """S (64, tile_n) = Q (64, d) K^T (d, tile_n), both operands K-major in shared memory; dtypes of Q and K."""
    mma = hopper.make_trivial_tiled_mma(
        *dtypes, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (WGMMA_M, config.tile_n)
    )
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    return mma


def make_mma_pv(dtypes, columns: int, accumulate: bool = True) -> cute.TiledMma:
    """O (64, columns) += P (64, tile_n) V (tile_n, columns): P from registers, V as it was loaded; dtypes of P and V.

    V's columns are contiguous (MN-major); of 8 bits WGMMA takes contiguous keys only (K-major), and V comes transposed.
    """
    v_major = OperandMajorMode.MN if dtypes[1].width == 16 else OperandMajorMode.K
    mma = hopper.make_trivial_tiled_mma(
        *dtypes, OperandMajorMode.K, v_major, Float32,
        (1, 1, 1), (WGMMA_M, columns), warpgroup.OperandSource.RMEM,
    )  # fmt: skip
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    return mma
