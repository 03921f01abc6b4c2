"""Device code of the online softmax on one warpgroup's WGMMA accumulator; the ladder's CuTe rungs share it.

A 64 x N fp32 accumulator gives thread t (of 128) the rows `16 * (t // 32) + (t % 32) // 4 + 8 * r`, r = 0, 1, and in each of
them the columns `8 * j + 2 * (t % 4) + e`, j = 0..N/8-1, e = 0, 1. Four neighbouring threads share a row.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

ROWS = 2  # rows of an accumulator that one thread holds
THREADS_PER_ROW = 4


def by_rows(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator seen as (row of this thread, column of this thread)."""
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, cute.size(acc) // 4)), stride=(2, (1, 4))))


@cute.jit
def row_in_tile(thread: Int32, r: cutlass.Constexpr) -> Int32:
    return 16 * (thread // 32) + (thread % 32) // 4 + 8 * r


@cute.jit
def apply_mask(acc_S, thread, first_row, first_col, seqlen_q, seqlen_k, causal: cutlass.Constexpr):
    """Scores of keys that do not exist, or that a causal row (aligned bottom-right) must not see, become -inf."""
    scores = by_rows(acc_S)
    for r in cutlass.range_constexpr(ROWS):
        limit = seqlen_k
        if const_expr(causal):
            limit = cutlass.min(limit, first_row + row_in_tile(thread, r) + 1 + seqlen_k - seqlen_q)
        limit = limit - first_col - 2 * (thread % THREADS_PER_ROW)  # so that columns are compile-time constants
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            scores[r, c] = -Float32.inf if limit <= 8 * (c // 2) + c % 2 else scores[r, c]


@cute.jit
def step(acc_S, row_max, row_sum, scale_log2: Float32, may_be_empty: cutlass.Constexpr) -> cute.Tensor:
    """acc_S becomes P = exp2((S - row_max) * scale_log2); row_max and this thread's part of row_sum advance.

    Returns the factor per row by which earlier sums and outputs shrink. `may_be_empty`: a row may have seen no key yet.
    """
    scores = by_rows(acc_S)
    columns = cute.size(scores, mode=[1])
    shrink = cute.make_rmem_tensor(ROWS, Float32)
    for r in cutlass.range_constexpr(ROWS):
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
        # four independent partial sums: one chain of adds would wait for each add's latency
        sums = [row_sum[r] * shrink[r], Float32(0.0), Float32(0.0), Float32(0.0)]
        for c in cutlass.range_constexpr(columns):
            scores[r, c] = cute.math.exp2(scores[r, c] * scale_log2 - max_scaled, fastmath=True)
            sums[c % 4] = sums[c % 4] + scores[r, c]
        row_sum[r] = (sums[0] + sums[1]) + (sums[2] + sums[3])
    return shrink


@cute.jit
def finish_rows(row_max, row_sum, scale_log2: Float32):
    """(1 / row sum, LSE) per row over all its threads; (0, -inf) for a row that saw no key."""
    inverse, lse = cute.make_rmem_tensor(ROWS, Float32), cute.make_rmem_tensor(ROWS, Float32)
    for r in cutlass.range_constexpr(ROWS):
        total = row_sum[r]
        for offset in (2, 1):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
        empty = row_max[r] == -Float32.inf
        inverse[r] = Float32(0.0) if empty else cute.arch.rcp_approx(total)
        log_sum = row_max[r] * scale_log2 + cute.math.log2(total, fastmath=True)
        lse[r] = -Float32.inf if empty else log_sum * math.log(2.0)
    return inverse, lse


@cute.jit
def scale_rows(acc, factor):
    rows = by_rows(acc)
    for r in cutlass.range_constexpr(ROWS):
        for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            rows[r, c] = rows[r, c] * factor[r]
