"""The FP8 forward kernel for Hopper (sm_90a): the 16-bit kernel's roles, walk and rings at half the bytes, other consumers.

    Q, K        e4m3, as they lie in memory; V transposed, its keys in the order of P's registers (`quantize.transpose_v`),
                since WGMMA takes 8-bit operands with contiguous keys only
    P           exp2(scaled score - maximum + 8), in (0, 256], rounded to e4m3 in the registers that S leaves
    T, O        T = P V of one key block starts at zero; O = O * shrink + T in fp32. A sum that stayed in the tensor core's
                accumulator, of about 13 bits, would stop growing (two_level=False does that)
    descales    per batch and KV head: q's times k's into the scale of the scores, v's into the last division

S, then P and T, live in the same registers, one after the other: a consumer's softmax runs under the products of the other
consumers alone, which have more rows in flight for it. With `overlap` they live side by side, and P V of a block runs under the
softmax of the next.
"""

import math

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Uint8, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from fa3_lib import softmax
from fa3_lib.compiler import COMPILE_LOCK
from fa3_lib.config import WARPGROUP, WGMMA_M
from fa3_lib.consumer import Consumer, NamedBarrier, make_mma_pv
from fa3_lib.forward_sm90 import ForwardSm90
from fa3_lib.fp8_config import EXPONENT_OFFSET, Fp8Config

SMALLEST_SCALE = 1e-30  # instead of 0, whose product with a masked score, -inf, would be NaN
OUTPUTS = {torch.bfloat16: BFloat16, torch.float16: cutlass.Float16}


class Fp8Consumer(Consumer):
    """One consumer warpgroup of the FP8 kernel. sV is `(dv, tile_n, stage)` with contiguous keys."""

    offset = EXPONENT_OFFSET

    def __init__(self, config: Fp8Config, dtype, walk, scores, consumer, Q, K, V, sQ, sK, sV, sO, descales):
        super().__init__(config, dtype, walk, scores, consumer, Q, K, V, sQ, sK, sV, sO, descales)
        # a product for each part of O's columns, the first k-step of which overwrites T
        self.mma_t = make_mma_pv(dtype, config.pv_columns)
        self.mma_t_first = make_mma_pv(dtype, config.pv_columns, accumulate=not config.two_level)
        thr_t = self.mma_t.get_slice(self.thread)
        parts = cute.flat_divide(sV, (config.pv_columns, config.tile_n))  # (pv_columns, tile_n, part, 1, stage)
        self.tTrV = [
            self.mma_t.make_fragment_B(thr_t.partition_B(parts[None, None, part, 0, None]))
            for part in range(config.parts)
        ]

    @cute.jit
    def scales(self, head: Int32, batch: Int32):
        q, k, _ = self.descales
        kv_head = self.kv_head(head)
        descale = q[batch, kv_head] * k[batch, kv_head]
        scale_log2, factor = self.scores.scale_log2, self.scores.factor
        if const_expr(self.config.softcap):
            factor = factor * descale
        else:
            scale_log2 = scale_log2 * descale
            scale_log2 = Float32(SMALLEST_SCALE) if scale_log2 == 0.0 else scale_log2
            # below 0 the largest score would have the smallest weight: NaN rather than a number that looks right
            scale_log2 = Float32(math.nan) if scale_log2 < 0.0 else scale_log2
        return scale_log2, factor

    def out_scale(self, head: Int32, batch: Int32) -> Float32:
        return self.descales[2][batch, self.kv_head(head)]

    def kv_head(self, head: Int32) -> Int32:
        return head // (self.walk.heads // self.descales[0].shape[1])

    @cute.jit
    def attend(self, m_block, first_row, end, n_blocks, taken, done, scale_log2, factor):
        """One tile; returns acc_O, row_max, row_sum, not yet normalised.

        Blocks are counted in the order of their visit, j = 0 for the last keys. Those masked at their right come first,
        those masked by the window's left side last.
        """
        cfg, tile_n = self.config, self.config.tile_n
        acc_O = cute.make_rmem_tensor(self.mma_pv.partition_shape_C((WGMMA_M, cfg.head_dim_v)), Float32)
        row_max = cute.make_rmem_tensor(softmax.ROWS_PER_THREAD, Float32)
        row_sum = cute.make_rmem_tensor(softmax.ROWS_PER_THREAD, Float32)
        acc_O.fill(0.0)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        state = (acc_O, row_max, row_sum)

        first_unmasked, end_unmasked = self.scores.unmasked_range(m_block, self.consumer)
        n_right, n_full = cutlass.min(end - end_unmasked, n_blocks), n_blocks
        if const_expr(cfg.window):
            n_full = cutlass.max(cutlass.min(end - first_unmasked, n_blocks), n_right)
        scales = (scale_log2, factor)
        for j in cutlass.range(0, n_right, unroll=1):
            self.block(state, done + j, first_row, (end - 1 - j) * tile_n, scales, masked=True)
        for j in cutlass.range(n_right, n_full, unroll=1):
            self.block(state, done + j, first_row, (end - 1 - j) * tile_n, scales, masked=False)
        if const_expr(cfg.window):
            for j in cutlass.range(n_full, n_blocks, unroll=1):
                self.block(state, done + j, first_row, (end - 1 - j) * tile_n, scales, masked=True)
        self.release_q(taken)
        return acc_O, row_max, row_sum

    @cute.jit
    def block(self, state, block, first_row, first_col, scales, masked: cutlass.Constexpr):
        """One key block: S, its softmax, P V."""
        acc_O, row_max, row_sum = state
        scale_log2, factor = scales
        # S and T are new in each block: as long as they held values from the last one, registers would
        acc_S = cute.make_rmem_tensor(self.mma_qk.partition_shape_C((WGMMA_M, self.config.tile_n)), Float32)
        tOrP = cute.make_rmem_tensor(self.mma_t.partition_shape_A((WGMMA_M, self.config.tile_n)), self.dtype)
        if const_expr(self.config.ping_pong):
            cute.arch.barrier(barrier_id=NamedBarrier.TURN + self.consumer, number_of_threads=2 * WARPGROUP)
        self.issue_qk(acc_S, block)
        if const_expr(self.config.ping_pong):
            self.pass_turn(self.consumer)
        warpgroup.wait_group(0)
        self.K.release(block)
        self.scores.prepare(acc_S, factor, self.thread, first_row, first_col, masked)
        shrink = softmax.step(acc_S, row_max, row_sum, scale_log2, masked, self.offset)
        to_operand(acc_S, tOrP)

        self.V.wait(block)
        if const_expr(not self.config.two_level):
            softmax.scale_rows(acc_O, shrink)
            self.issue_part(tOrP, acc_O, block, 0)
            warpgroup.wait_group(0)
        else:
            acc_T = cute.make_rmem_tensor(self.mma_t.partition_shape_C((WGMMA_M, self.config.pv_columns)), Float32)
            for part in cutlass.range_constexpr(self.config.parts):
                self.issue_part(tOrP, acc_T, block, part)
                warpgroup.wait_group(0)
                add_part(acc_O, acc_T, shrink, part)
        self.V.release(block)

    @cute.jit
    def issue_part(self, tOrP, acc_T, block, part: cutlass.Constexpr):
        """Starts T = P V (without two levels: T += P V) for one part of the columns."""
        stage = cute.arch.make_warp_uniform(self.V.stage(block))
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(tOrP, mode=[2])):
            mma = self.mma_t_first if const_expr(k == 0) else self.mma_t
            cute.gemm(mma, acc_T, tOrP[None, None, k], self.tTrV[part][None, None, k, stage], acc_T)
        warpgroup.commit_group()


class OverlappedFp8Consumer(Fp8Consumer):
    """Keeps two products in flight: S of a block and the first part of P V of the block before, under which softmax runs."""

    @cute.jit
    def attend(self, m_block, first_row, end, n_blocks, taken, done, scale_log2, factor):
        cfg, tile_n = self.config, self.config.tile_n
        acc_S = cute.make_rmem_tensor(self.mma_qk.partition_shape_C((WGMMA_M, tile_n)), Float32)
        tOrP = cute.make_rmem_tensor(self.mma_t.partition_shape_A((WGMMA_M, tile_n)), self.dtype)
        acc_O = cute.make_rmem_tensor(self.mma_pv.partition_shape_C((WGMMA_M, cfg.head_dim_v)), Float32)
        acc_T = acc_O
        if const_expr(cfg.two_level):
            acc_T = cute.make_rmem_tensor(self.mma_t.partition_shape_C((WGMMA_M, cfg.pv_columns)), Float32)
        row_max = cute.make_rmem_tensor(softmax.ROWS_PER_THREAD, Float32)
        row_sum = cute.make_rmem_tensor(softmax.ROWS_PER_THREAD, Float32)
        shrink = cute.make_rmem_tensor(
            softmax.ROWS_PER_THREAD, Float32
        )  # what O still has to shrink by before T is added
        acc_O.fill(0.0)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        shrink.fill(0.0)
        state = (acc_S, tOrP, acc_O, acc_T, row_max, row_sum, shrink)
        scales = (scale_log2, factor)

        if n_blocks > 0:
            # block 0: S, and its softmax, with nothing of this tile to overlap with
            self.issue_qk(acc_S, done)
            warpgroup.wait_group(0)
            self.K.release(done)
            self.scores.prepare(acc_S, factor, self.thread, first_row, (end - 1) * tile_n, masked=True)
            softmax.step(acc_S, row_max, row_sum, scale_log2, True, self.offset)
            to_operand(acc_S, tOrP)

            first_unmasked, end_unmasked = self.scores.unmasked_range(m_block, self.consumer)
            n_right = cutlass.max(end - end_unmasked, 1)
            n_full = n_blocks
            if const_expr(cfg.window):
                n_right = cutlass.min(n_right, n_blocks)
                n_full = cutlass.max(cutlass.min(end - first_unmasked, n_blocks), n_right)
            for j in cutlass.range(1, n_right, unroll=1):
                self.pair(state, done + j, first_row, (end - 1 - j) * tile_n, scales, masked=True)
            for j in cutlass.range(n_right, n_full, unroll=1):
                self.pair(state, done + j, first_row, (end - 1 - j) * tile_n, scales, masked=False)
            if const_expr(cfg.window):
                for j in cutlass.range(n_full, n_blocks, unroll=1):
                    self.pair(state, done + j, first_row, (end - 1 - j) * tile_n, scales, masked=True)

            self.release_q(taken)
            self.V.wait(done + n_blocks - 1)
            self.issue_part(tOrP, acc_T, done + n_blocks - 1, 0)
            self.finish(state, done + n_blocks - 1)
        else:
            self.release_q(taken)
        return acc_O, row_max, row_sum

    @cute.jit
    def pair(self, state, block, first_row, first_col, scales, masked: cutlass.Constexpr):
        """In this consumer's turn: starts S = Q K^T of `block` and P V of the block before; then, under the latter, the softmax
        of `block`."""
        acc_S, tOrP, acc_O, acc_T, row_max, row_sum, shrink = state
        scale_log2, factor = scales
        if const_expr(self.config.ping_pong):
            cute.arch.barrier(barrier_id=NamedBarrier.TURN + self.consumer, number_of_threads=2 * WARPGROUP)
        self.issue_qk(acc_S, block)
        self.V.wait(block - 1)
        self.issue_part(tOrP, acc_T, block - 1, 0)
        if const_expr(self.config.ping_pong):
            self.pass_turn(self.consumer)
        warpgroup.wait_group(1)
        self.K.release(block)
        self.scores.prepare(acc_S, factor, self.thread, first_row, first_col, masked)
        new_shrink = softmax.step(acc_S, row_max, row_sum, scale_log2, masked, self.offset)
        self.finish(state, block - 1)
        to_operand(acc_S, tOrP)
        if const_expr(self.config.two_level):
            for r in cutlass.range_constexpr(softmax.ROWS_PER_THREAD):
                shrink[r] = new_shrink[r]
        else:
            softmax.scale_rows(acc_O, new_shrink)

    @cute.jit
    def finish(self, state, block):
        """Waits for the first part, adds it to O, computes the other parts, frees the V stage."""
        _, tOrP, acc_O, acc_T, _, _, shrink = state
        warpgroup.wait_group(0)
        if const_expr(self.config.two_level):
            for part in cutlass.range_constexpr(self.config.parts):
                if const_expr(part > 0):
                    self.issue_part(tOrP, acc_T, block, part)
                    warpgroup.wait_group(0)
                add_part(acc_O, acc_T, shrink, part)
        self.V.release(block)


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


class ForwardFp8Sm90(ForwardSm90):
    """Compile-time facts of one configuration; `__call__` is the host function."""

    @property
    def consumer_type(self):
        return OverlappedFp8Consumer if self.config.overlap else Fp8Consumer

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (b, sq, h, d) bytes, as mK and mVt
        mK: cute.Tensor,  # (b, sk, hk, d)
        mVt: cute.Tensor,  # (b, hk, dv, sk padded to 32): quantize.transpose_v
        mO: cute.Tensor,  # (b, sq, h, dv) 16 bit
        mLSE: cute.Tensor | None,  # (b, h, sq) fp32, if wanted
        mSinks: cute.Tensor | None,  # (h,) fp32, with config.sinks
        mCounter: cute.Tensor | None,  # (2,) int32 zeros, with config.dynamic
        q_descale: cute.Tensor,  # (b, hk) fp32, as the other two
        k_descale: cute.Tensor,
        v_descale: cute.Tensor,
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        max_ctas: Int32,
        stream,
    ):
        # TMA sees (rows, columns, head, batch), V as (columns, keys, ...)
        mQ, mK, mV = (
            cute.make_tensor(cute.recast_ptr(x.iterator, dtype=self.dtype), cute.select(x.layout, mode=order))
            for x, order in ((mQ, [1, 3, 2, 0]), (mK, [1, 3, 2, 0]), (mVt, [2, 3, 1, 0]))
        )
        mO = cute.make_tensor(mO.iterator, cute.select(mO.layout, mode=[1, 3, 2, 0]))
        self.launch(
            mQ, mK, mV, mO, mLSE, mSinks, mCounter, (q_descale, k_descale, v_descale),
            softmax_scale, softcap, window_left, window_right, max_ctas, stream,
        )  # fmt: skip


def compile_forward(
    config: Fp8Config, out_dtype: torch.dtype = torch.bfloat16, options: str = "", with_lse: bool = True
):
    """Compiles one configuration for sm_90a without tensors and without launching; no GPU is needed.

    One result serves every batch, sequence length, head count, stride and head dim up to the configuration's.

    Args:
        config: the tile configuration.
        out_dtype: of the output, torch.bfloat16 or torch.float16.
        options: further options of `cute.compile` (`--enable-tvm-ffi`, `--keep-cubin`, `remarks{ptx}` ...).
        with_lse: whether the kernel writes the log-sum-exp; without it `lse` is None in calls.

    Returns:
        The compiled object; called as `fn(q, k, vt, out, lse, sinks, counter, q_descale, k_descale, v_descale, softmax_scale,
        softcap, window_left, window_right, max_ctas)` if compiled with `--enable-tvm-ffi`. q, k and vt are bytes
        (`view(torch.uint8)`), vt as `quantize.transpose_v` gives it; the descales are fp32 `(batch, kv_heads)` of any strides;
        the rest is as in `forward_sm90.compile_forward`.
    """
    b, sq, sk, h, hk, padded = (cute.sym_int() for _ in range(6))
    d, dv = cute.sym_int(divisibility=16), cute.sym_int(divisibility=16)

    def tensor(element, *shape):  # 16-byte strides, as TMA wants them
        strides = tuple(cute.sym_int64(divisibility=128 // element.width) for _ in range(3))
        return make_fake_tensor(element, shape, (*strides, 1), assumed_align=16)

    lse = make_fake_tensor(Float32, (b, h, sq), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)
    lse = lse if with_lse else None
    sinks = make_fake_tensor(Float32, (h,), (1,), assumed_align=4) if config.sinks else None
    counter = make_fake_tensor(Int32, (2,), (1,), assumed_align=8) if config.dynamic else None
    descales = [
        make_fake_tensor(Float32, (b, hk), (cute.sym_int64(), cute.sym_int64()), assumed_align=4) for _ in range(3)
    ]
    stream = make_fake_stream(use_tvm_ffi_env_stream="--enable-tvm-ffi" in options)
    with COMPILE_LOCK:
        return cute.compile(
            ForwardFp8Sm90(config, Float8E4M3FN, OUTPUTS[out_dtype]),
            tensor(Uint8, b, sq, h, d), tensor(Uint8, b, sk, hk, d), tensor(Uint8, b, hk, dv, padded),
            tensor(OUTPUTS[out_dtype], b, sq, h, dv), lse, sinks, counter, *descales,
            Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(1), stream,
            options=f"--gpu-arch sm_90a {options}",
        )  # fmt: skip
