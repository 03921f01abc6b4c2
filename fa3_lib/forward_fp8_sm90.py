"""The FP8 forward kernel for Hopper (sm_90a): the 16-bit kernel's roles, walk and rings at half the bytes, other consumers.

    Q, K        e4m3 or e5m2, as they lie in memory; V transposed, its keys in the order of P's registers
                (`quantize.transpose_v`), since WGMMA takes 8-bit operands with contiguous keys only; or as it
                lies in memory, and warps transpose it on its way (`turn_v.py`)
    P           exp2(scaled score - maximum + offset), rounded to e4m3 in the registers that S leaves; with two levels and without an LSE
                every third one by two FFMA and a shift, to 3 %, since the MUFU is the longest queue (`softmax.exp2_of`)
    T, O        T = P V of one key block starts at zero; O = O * shrink + T in fp32. A sum that stayed in the tensor core's
                accumulator, of about 13 bits, would stop growing (two_level=False does that)
    sums        V has 8 rows of ones below it: T's last columns are the sums of rounded P, which the output is divided by. No
                instruction adds weights, and roundings of P that all keys share cancel
    descales    per batch and KV head: q's times k's into the scale of the scores, v's into the last division. Or per block of
                128 rows: k's into each block's exp2, v's into O + T, which takes the same instructions

With two levels a consumer's softmax runs under the products of the other consumers alone: S, and then P and T, live in the
same registers. With one level S, P and O live side by side, and P V of a block runs under the softmax of the next.
"""

import math

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float8E4M3FN, Float8E5M2, Float32, Int32, Uint8, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from fa3_lib import softmax
from fa3_lib.compiler import COMPILE_LOCK
from fa3_lib.config import WARPGROUP, WGMMA_M
from fa3_lib.consumer import Consumer, NamedBarrier, make_mma_pv
from fa3_lib.forward_sm90 import ForwardSm90
from fa3_lib.fp8_config import SCALE_BLOCK, Fp8Config
from fa3_lib.turn_v import Scheduler, Turner

SMALLEST_SCALE = 1e-18  # instead of 0; the product of two is still a normal number
TOO_LARGE = -0x7F7F7F80  # 0x80808080: the sign of each byte of a word
P_TYPE = Float8E4M3FN
ELEMENTS = {"e4m3": Float8E4M3FN, "e5m2": Float8E5M2}
ONE = {"e4m3": 0x38, "e5m2": 0x3C}  # 1.0
OUTPUTS = {torch.bfloat16: BFloat16, torch.float16: cutlass.Float16}


class Fp8Operands:
    """What both consumers of the FP8 kernel know of its operands: descales, P in e4m3 and its exponents.

    scales: (scale_log2, factor, k's and v's descales by key block or None).
    """

    @property
    def offset(self) -> int:
        return self.config.offset

    def p_type(self):
        return P_TYPE

    def to_operand(self, acc_S, tOrP):
        pack(acc_S, words_of(tOrP))

    @cute.jit
    def scales(self, head: Int32, batch: Int32, first_row: Int32):
        q, k, v = self.descales
        kv_head = self.kv_head(head, k)
        scale_log2, factor = self.scores.scale_log2, self.scores.factor
        if const_expr(self.config.block_scales):
            descale = q[batch, head, cutlass.min(first_row // SCALE_BLOCK, q.shape[2] - 1)]
            k_scales, v_scales = k[batch, kv_head, None], v[batch, kv_head, None]
        else:
            descale, k_scales, v_scales = q[batch, kv_head] * k[batch, kv_head], None, None
        if const_expr(self.config.softcap):
            factor = factor * descale
        else:
            scale_log2 = usable_scale(scale_log2 * descale)
        return scale_log2, factor, k_scales, v_scales

    def out_scale(self, head: Int32, batch: Int32):
        v = self.descales[2]
        return None if self.config.block_scales else v[batch, self.kv_head(head, v)]

    def kv_head(self, head: Int32, descale) -> Int32:
        return head // (self.walk.heads // descale.shape[1])


class Fp8Consumer(Fp8Operands, Consumer):
    """One consumer warpgroup with two levels of sums. sV is `(dv + sum_rows, tile_n, stage)` with contiguous keys.

    S, then P and T, live in the same registers, one after the other. state: (acc_O, sums, row_max, row_sum): O and the sums of
    rounded P in fp32; row_max in units of the scores; row_sum, of unrounded P, with an LSE, or None.
    """

    def __init__(self, config: Fp8Config, dtypes, walk, scores, consumer, Q, K, V, sQ, sK, sV, sO, descales, with_lse):
        super().__init__(
            config, dtypes, walk, scores, consumer, Q, K, V, sQ, sK,
            rows_of(sV, 0, config.head_dim_v), sO, descales, with_lse,
        )  # fmt: skip
        # a product for each part of O's columns, the first k-step of which overwrites T; the last one also sums P
        self.mma_t, self.mma_t_first, self.tTrV = [], [], []
        for part in range(config.parts):
            width = config.part_columns(part)
            self.mma_t.append(make_mma_pv((P_TYPE, self.dtype), width))
            self.mma_t_first.append(make_mma_pv((P_TYPE, self.dtype), width, accumulate=False))
            rows = self.mma_t[part].get_slice(self.thread).partition_B(rows_of(sV, part * config.pv_columns, width))
            self.tTrV.append(self.mma_t[part].make_fragment_B(rows))

    @property
    def software_exp2(self) -> int:
        """Not where an LSE is wanted: the logarithm of a sum that one weight dominates would be as wrong as that weight, by 3 %."""
        return 0 if self.with_lse else self.config.software_exp2

    def block_scales(self, scales, n):
        """The scale of exp2, the softcap's factor, k's and v's descale of key block n; where these are not used, None.

        Asked for before the products start: the numbers arrive while these run.
        """
        scale_log2, factor, k_scales, v_scales = scales
        if not self.config.block_scales:
            return scale_log2, factor, None, None
        if self.config.softcap:
            return scale_log2, factor * k_scales[n], None, v_scales[n]
        return scale_log2, factor, usable_scale(k_scales[n]), v_scales[n]

    @cute.jit
    def attend(self, m_block, first_row, end, n_blocks, taken, done, scales):
        """One tile; returns acc_O, row_max, row_sum, sums, not yet normalised.

        Blocks are visited from the last keys on. Those masked at their right come first, those masked by the window's left side
        last. One block more than the former gets a maximum of its own: the first of all has none before it, and on the diagonal
        a row sees too few keys for a maximum that holds.
        """
        cfg = self.config
        acc_O = cute.make_rmem_tensor(self.mma_pv.partition_shape_C((WGMMA_M, cfg.head_dim_v)), Float32)
        sums = cute.make_rmem_tensor(softmax.ROWS_PER_THREAD, Float32)
        row_max = cute.make_rmem_tensor(softmax.ROWS_PER_THREAD, Float32)
        row_sum = cute.make_rmem_tensor(softmax.ROWS_PER_THREAD, Float32) if const_expr(self.with_lse) else None
        acc_O.fill(0.0)
        sums.fill(0.0)
        row_max.fill(-Float32.inf)
        if const_expr(self.with_lse):
            row_sum.fill(0.0)
        state = (acc_O, sums, row_max, row_sum)

        first_unmasked, end_unmasked = self.scores.unmasked_range(m_block, self.consumer)
        n_right, n_full = cutlass.min(cutlass.max(end - end_unmasked, 0) + 1, n_blocks), n_blocks
        if const_expr(cfg.window):
            n_full = cutlass.max(cutlass.min(end - first_unmasked, n_blocks), n_right)
        # the sum of a block's number and its place in the rings, so that one of them needs a register
        last = done + end - 1
        for block in cutlass.range(done, done + n_right, unroll=1):
            self.block(state, last - block, block, first_row, scales, masked=True)
        for block in cutlass.range(done + n_right, done + n_full, unroll=1):
            self.block(state, last - block, block, first_row, scales, masked=False)
        if const_expr(cfg.window):
            for block in cutlass.range(done + n_full, done + n_blocks, unroll=1):
                self.block(state, last - block, block, first_row, scales, masked=True)
        self.Q.release(taken)  # after the tile's last S: the next Q may come
        return acc_O, row_max, row_sum, sums

    @cute.jit
    def block(self, state, n, block, first_row, scales, masked: cutlass.Constexpr):
        """Key block n, at the place `block` of the rings: S, its softmax, P V."""
        cfg = self.config
        acc_O, sums, row_max, row_sum = state
        scale_log2, factor, k_scale, v_scale = self.block_scales(scales, n)
        # S and T are new in each block: as long as they held values from the last one, registers would
        acc_S = cute.make_rmem_tensor(self.mma_qk.partition_shape_C((WGMMA_M, cfg.tile_n)), Float32)
        tOrP = cute.make_rmem_tensor(self.mma_t[0].partition_shape_A((WGMMA_M, cfg.tile_n)), P_TYPE)
        if const_expr(cfg.ping_pong):
            cute.arch.barrier(barrier_id=NamedBarrier.TURN + self.consumer, number_of_threads=2 * WARPGROUP)
        self.issue_qk(acc_S, block)
        if const_expr(cfg.ping_pong):
            self.pass_turn(self.consumer)
        warpgroup.wait_group(0)
        shrink = None
        if const_expr(masked):
            self.K.release(block)
            self.scores.prepare(acc_S, factor, self.thread, first_row, n * cfg.tile_n, masked=True)
            shrink = softmax.step(acc_S, row_max, row_sum, scale_log2, True, self.offset, k_scale)
            pack(acc_S, words_of(tOrP))
        else:
            self.scores.prepare(acc_S, factor, self.thread, 0, 0, masked=False)
            block_sum = softmax.weights(
                acc_S, row_max, scale_log2, self.offset, k_scale, self.with_lse, self.software_exp2, keep_nan=False
            )
            excess = pack(acc_S, words_of(tOrP))
            if const_expr(not cfg.votes_under_pv):
                self.mend_weights(state, acc_S, tOrP, None, excess, block_sum, block, scale_log2, factor, k_scale)
                self.K.release(block)

        self.V.wait(block)
        T = []
        for part in cutlass.range_constexpr(cfg.parts):
            T.append(
                cute.make_rmem_tensor(self.mma_t[part].partition_shape_C((WGMMA_M, cfg.part_columns(part))), Float32)
            )
            self.issue_part(tOrP, T[part], block, part)
            if const_expr(not masked and cfg.votes_under_pv):
                self.mend_weights(state, acc_S, tOrP, T[0], excess, block_sum, block, scale_log2, factor, k_scale)
                self.K.release(block)
            if const_expr(part + 1 >= cfg.parts_in_flight):
                warpgroup.wait_group(cfg.parts_in_flight - 1)
                finished = part + 1 - cfg.parts_in_flight
                self.add(acc_O, sums, T[finished], finished, v_scale, shrink)
        warpgroup.wait_group(0)
        self.V.release(block)
        for part in cutlass.range_constexpr(cfg.parts + 1 - cfg.parts_in_flight, cfg.parts):
            self.add(acc_O, sums, T[part], part, v_scale, shrink)

    @cute.jit
    def mend_weights(self, state, acc_S, tOrP, acc_T, excess, block_sum, block, scale_log2, factor, k_scale):
        """Ends the softmax of a block that every row sees: its weights, in tOrP, have the maximum of the blocks before it.

        As in `Consumer.finish_unmasked`; but weights may grow to 2^(8 - offset) times the one of the maximum only: not far
        above, e4m3 would saturate. Every row whose rounded weights say so is raised, and no other, so that a row's bits depend on
        that row alone. That the largest weight is rounded matters little here: the divisor is the sum of rounded weights.

        With acc_T, P V is under way in it, one product, and computed once more where a weight was too large. It is there on return.
        """
        acc_O, sums, row_max, row_sum = state
        too_large = self.any_thread((excess[0] | excess[1]) & TOO_LARGE != 0)
        if const_expr(acc_T is not None):
            warpgroup.wait_group(0)
        if too_large:
            self.issue_qk(acc_S, block)
            warpgroup.wait_group(0)
            self.scores.prepare(acc_S, factor, self.thread, 0, 0, masked=False)
            concerned = cute.make_rmem_tensor(softmax.ROWS_PER_THREAD, Float32)
            for r in cutlass.range_constexpr(softmax.ROWS_PER_THREAD):
                concerned[r] = Float32(0.0) if excess[r] & TOO_LARGE == 0 else Float32(1.0)
            shrink = softmax.raise_max(acc_S, row_max, concerned, scale_log2, k_scale)
            new_sum = softmax.weights(
                acc_S, row_max, scale_log2, self.offset, k_scale, self.with_lse, self.software_exp2
            )
            pack(acc_S, words_of(tOrP))
            if const_expr(acc_T is not None):
                self.issue_part(tOrP, acc_T, block, 0)
            softmax.scale_rows(acc_O, shrink)
            for r in cutlass.range_constexpr(softmax.ROWS_PER_THREAD):
                sums[r] = sums[r] * shrink[r]
                if const_expr(self.with_lse):
                    row_sum[r] = row_sum[r] * shrink[r]
                    block_sum[r] = new_sum[r]
            if const_expr(acc_T is not None):
                warpgroup.wait_group(0)
        if const_expr(self.with_lse):
            for r in cutlass.range_constexpr(softmax.ROWS_PER_THREAD):
                row_sum[r] = row_sum[r] + block_sum[r]

    @cute.jit
    def issue_part(self, tOrP, acc_T, block, part: cutlass.Constexpr):
        """Starts T = P V for one part of the columns."""
        stage = cute.arch.make_warp_uniform(self.V.stage(block))
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(tOrP, mode=[2])):
            mma = self.mma_t_first[part] if const_expr(k == 0) else self.mma_t[part]
            cute.gemm(mma, acc_T, tOrP[None, None, k], self.tTrV[part][None, None, k, stage], acc_T)
        warpgroup.commit_group()

    @cute.jit
    def add(self, acc_O, sums, acc_T, part: cutlass.Constexpr, v_scale, shrink):
        """O = O * shrink + T * v_scale on one part of O's columns, and the same without v_scale for the sums of P.

        With one of the factors one instruction a number: it takes the place of the multiplication that O needs anyway.
        """
        first = part * self.config.pv_columns // 2
        for i in cutlass.range_constexpr(self.config.pv_columns // 2):
            t = acc_T[i] if const_expr(v_scale is None) else acc_T[i] * v_scale
            acc_O[first + i] = shrunk(acc_O[first + i], shrink, i // 2 % softmax.ROWS_PER_THREAD) + t
        if const_expr(part == self.config.parts - 1):
            for r in cutlass.range_constexpr(softmax.ROWS_PER_THREAD):
                sums[r] = shrunk(sums[r], shrink, r) + sums_of(acc_T)[r]


class OneLevelFp8Consumer(Fp8Operands, Consumer):
    """O stays in the tensor core's accumulator, so that registers allow the 16-bit kernel's loop. Every block gets its maximum.

    Where the divisor is the sum of unrounded P, the largest weight must be a number that e4m3 has: for a row that one key
    dominates its rounding is all that counts, and only with the row's own maximum is it 2^offset.
    """

    @cute.jit
    def finish_unmasked(self, state, block, scale_log2, factor):
        self.finish_with_max(state, block, 0, 0, scale_log2, factor, masked=False)


def accumulator_index(operand_index: int) -> int:
    """Which register of the S accumulator becomes byte `operand_index` of P's fragment, both of the same thread.

    Per 32 keys the operand counts (byte 0..3, row 0..1, half 0..1), the accumulator (e 0..1, row 0..1, j 0..3); a byte is
    2 * (j % 2) + e, a half j // 2. That the bytes so filled belong to other keys than the operand means, V's order makes good.
    """
    group, i = divmod(operand_index, 16)
    byte, row, half = i % 4, i // 4 % 2, i // 8
    return 16 * group + 4 * (2 * half + byte // 2) + 2 * row + byte % 2


@cute.jit
def pack(acc_S, words):
    """P in e4m3, four values to a word, in the order of PV's A operand; nothing leaves its thread.

    words: `(tile_n / 8,)` Int32. Returns per row Int32 in which a bit of TOO_LARGE is set if a rounded value is 256 or more, or NaN.
    """
    excess = cute.make_rmem_tensor(softmax.ROWS_PER_THREAD, Int32)
    excess.fill(0)
    for w in cutlass.range_constexpr(cute.size(words)):
        words[w] = cute.arch.inline_ptx(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
            "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
            write_only_types=[Int32],
            read_only_args=[acc_S[accumulator_index(4 * w + byte)] for byte in range(4)],
        )
        # 0x78 is 256: from there on an addition carries into the byte's sign, which P does not use
        excess[w % softmax.ROWS_PER_THREAD] = excess[w % softmax.ROWS_PER_THREAD] | (words[w] + 0x08080808)
    return excess


def words_of(tOrP):
    return cute.recast_tensor(tOrP, Int32)


def sums_of(acc_T):
    """Per row the sum of P that the last columns of T hold: all of them the same number."""
    return cute.make_tensor(acc_T.iterator + cute.size(acc_T) - 4, cute.make_layout(2, stride=2))


def rows_of(sV, first: int, count: int):
    """`count` rows of V's tile from `first` on, both multiples of the 8 rows of a swizzle."""
    (_, groups), _, _ = sV.stride
    return cute.make_tensor(sV.iterator + first // 8 * groups, with_rows(sV.layout, count))


def with_rows(layout: cute.Layout, count: int) -> cute.Layout:
    """V's layout `((8, groups), keys, stages)` with `count` rows, a multiple of 8."""
    _, keys, stages = layout.shape
    return cute.make_layout(((8, count // 8), keys, stages), stride=layout.stride)


def shrunk(x, shrink, r: int):
    return x if shrink is None else x * shrink[r]


@cute.jit
def usable_scale(scale: Float32) -> Float32:
    """Not 0, whose product with a masked score, -inf, would be NaN; below 0 the largest score would have the smallest weight: NaN
    rather than a number that looks right."""
    scale = Float32(SMALLEST_SCALE) if scale == 0.0 else scale
    return Float32(math.nan) if scale < 0.0 else scale


class ForwardFp8Sm90(ForwardSm90):
    """Compile-time facts of one configuration; `__call__` is the host function."""

    turner_type, scheduler_type = Turner, Scheduler

    def __init__(self, config: Fp8Config, out_dtype: type[cutlass.Numeric]):
        super().__init__(config, Float8E4M3FN, out_dtype)
        self.dtypes = tuple(ELEMENTS[name] for name in (config.q_format, config.k_format, config.v_format))

    @property
    def consumer_type(self):
        return Fp8Consumer if self.config.two_level else OneLevelFp8Consumer

    def loaded_part(self, sV_layout: cute.ComposedLayout) -> cute.ComposedLayout:
        return cute.make_composed_layout(sV_layout.inner, 0, with_rows(sV_layout.outer, self.config.head_dim_v))

    @cute.jit
    def write_constants(self, storage, sV_layout: cute.ComposedLayout):
        """Rows of ones below V: P V then has columns that sum P."""
        cfg = self.config
        if const_expr(cfg.sum_rows):
            sV = storage.v.get_tensor(sV_layout.outer, sV_layout.inner, Uint8)
            ones = rows_of(sV, cfg.head_dim_v, cfg.sum_rows)
            size = cfg.sum_rows * cfg.tile_n * cfg.stages
            for i in cutlass.range(cute.arch.thread_idx()[0], size, cfg.threads, unroll=1):
                column = i // cfg.sum_rows
                ones[i % cfg.sum_rows, column % cfg.tile_n, column // cfg.tile_n] = Uint8(ONE[cfg.v_format])
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (b, sq, h, d) bytes, as mK and mVt
        mK: cute.Tensor,  # (b, sk, hk, d)
        mVt: cute.Tensor,  # (b, hk, dv, sk padded to 32): quantize.transpose_v; with config.transposes_v (b, sk, hk, dv)
        mO: cute.Tensor,  # (b, sq, h, dv) 16 bit
        mLSE: cute.Tensor | None,  # (b, h, sq) fp32, if wanted
        mSinks: cute.Tensor | None,  # (h,) fp32, with config.sinks
        mCounter: cute.Tensor | None,  # (2,) int32 zeros, with config.dynamic
        q_descale: cute.Tensor,  # (b, hk) fp32, as the other two; with config.block_scales (b, h, blocks of q)
        k_descale: cute.Tensor,  # with config.block_scales (b, hk, blocks of k), as v's
        v_descale: cute.Tensor,
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        max_ctas: Int32,
        stream,
    ):
        # TMA sees (rows, columns, head, batch), V as (columns, keys, ...)
        v_order = [3, 1, 2, 0] if self.config.transposes_v else [2, 3, 1, 0]
        mQ, mK, mV = (
            cute.make_tensor(cute.recast_ptr(x.iterator, dtype=self.dtype), cute.select(x.layout, mode=order))
            for x, order in ((mQ, [1, 3, 2, 0]), (mK, [1, 3, 2, 0]), (mVt, v_order))
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
        (`view(torch.uint8)`), vt as `quantize.transpose_v` gives it or, with `transposes_v`, v itself; the
        descales are fp32 `(batch, kv_heads)` of any strides, with `block_scales` `(batch, heads, blocks)`; the rest is as in `forward_sm90.compile_forward`.
    """
    b, sq, sk, h, hk, padded = (cute.sym_int() for _ in range(6))
    d, dv = cute.sym_int(divisibility=16), cute.sym_int(divisibility=16)

    def tensor(element, *shape):  # 16-byte strides, as TMA wants them
        strides = tuple(cute.sym_int64(divisibility=128 // element.width) for _ in range(3))
        return make_fake_tensor(element, shape, (*strides, 1), assumed_align=16)

    v_shape = (b, sk, hk, dv) if config.transposes_v else (b, hk, dv, padded)
    lse = make_fake_tensor(Float32, (b, h, sq), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)
    lse = lse if with_lse else None
    sinks = make_fake_tensor(Float32, (h,), (1,), assumed_align=4) if config.sinks else None
    counter = make_fake_tensor(Int32, (2,), (1,), assumed_align=8) if config.dynamic else None
    k_blocks = cute.sym_int()
    shapes = ((b, h, cute.sym_int()), (b, hk, k_blocks), (b, hk, k_blocks)) if config.block_scales else ((b, hk),) * 3
    descales = [make_fake_tensor(Float32, x, [cute.sym_int64() for _ in x], assumed_align=4) for x in shapes]
    stream = make_fake_stream(use_tvm_ffi_env_stream="--enable-tvm-ffi" in options)
    with COMPILE_LOCK:
        return cute.compile(
            ForwardFp8Sm90(config, OUTPUTS[out_dtype]),
            tensor(Uint8, b, sq, h, d), tensor(Uint8, b, sk, hk, d), tensor(Uint8, *v_shape),
            tensor(OUTPUTS[out_dtype], b, sq, h, dv), lse, sinks, counter, *descales,
            Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(1), stream,
            options=f"--gpu-arch sm_90a {options}",
        )  # fmt: skip
