"""Device code of the online softmax on one warpgroup's accumulator fragment.

A 64 x N fp32 accumulator of WGMMA gives thread t (of 128) the rows `16 * (t // 32) + (t % 32) // 4 + 8 * r`, r = 0, 1, and in
each of them the columns `8 * j + 2 * (t % 4) + e`, j = 0..N/8-1, e = 0, 1. Four neighbouring threads share a row.
"""

import math
import struct

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

ROWS_PER_THREAD = 2
THREADS_PER_ROW = 4
CHAINS = 4  # independent partial maxima and sums per row: one chain would wait for each instruction's latency


def by_rows(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator fragment seen as (row of this thread, column of this thread)."""
    columns = cute.size(acc) // ROWS_PER_THREAD
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, columns // 2)), stride=(2, (1, 4))))


@cute.jit
def row_in_tile(thread: Int32, r: cutlass.Constexpr) -> Int32:
    return 16 * (thread // 32) + (thread % 32) // 4 + 8 * r


@cute.jit
def cap(acc_S: cute.Tensor, factor: Float32):
    """Each raw score s becomes tanh(s * factor), by the MUFU (absolute error up to 2^-11)."""
    for i in cutlass.range_constexpr(cute.size(acc_S)):
        acc_S[i] = cute.math.tanh(acc_S[i] * factor, fastmath=True)


@cute.jit
def mask(
    acc_S: cute.Tensor,
    thread: Int32,
    first_row: Int32,
    first_col: Int32,
    seqlen_k: Int32,
    shift: Int32,
    left: Int32 | None,
    right: Int32 | None,
    pack_gqa: cutlass.Constexpr,
):
    """Scores become -inf for keys that do not exist, or lie more than `right` after or `left` before a row's position.

    A row's position is the key `query + shift`; `None` is an unlimited side. first_row counts queries times pack_gqa.
    """
    scores = by_rows(acc_S)
    thread_col = first_col + 2 * (thread % THREADS_PER_ROW)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        # thread-relative limits: each element compares its own compile-time column against them
        position = (first_row + row_in_tile(thread, r)) // pack_gqa + shift
        end = seqlen_k if const_expr(right is None) else cutlass.min(seqlen_k, position + right + 1)
        end = end - thread_col
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            scores[r, c] = -Float32.inf if end <= 8 * (c // 2) + c % 2 else scores[r, c]
        if const_expr(left is not None):
            first = position - left - thread_col
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                scores[r, c] = -Float32.inf if first > 8 * (c // 2) + c % 2 else scores[r, c]


@cute.jit
def step(
    acc_S: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor | None,
    scale_log2: Float32,
    may_be_empty: cutlass.Constexpr,
    offset: cutlass.Constexpr = 0,
    key_scale: Float32 | None = None,
) -> cute.Tensor:
    """One key block: acc_S becomes P = exp2((S - row_max) * scale_log2 + offset); row_max and row_sum advance.

    row_max is the maximum of the raw scores (over all four threads of a row), row_sum this thread's part of the sum, or None
    if nobody needs it. Returns the factor per row by which earlier sums and outputs shrink. `may_be_empty`: a row may have
    seen no key yet (row_max = -inf), so that 0 is subtracted instead. key_scale, positive: the scores are acc_S times it.
    """
    scores = by_rows(acc_S)
    p_scale = scale_log2 if const_expr(key_scale is None) else scale_log2 * key_scale
    columns = cute.size(scores, mode=[1])
    scale = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
    early_p = Float32(0.0)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        old_max = row_max[r]
        maxima = [scores[r, c] for c in range(CHAINS)]
        if const_expr(r > 0):
            # the maximum with -inf * P of the row before: its exponentials start before this row's maximum, whose instructions
            # then run in the issue slots that the MUFU leaves free (2 to 5 % of the kernel's time at d128 and d256).
            # Where P is 0 or NaN the product is NaN, which fmax ignores
            tie = early_p * -Float32.inf
            maxima = [cute.arch.fmax(m, tie) for m in maxima]
        for c in cutlass.range_constexpr(CHAINS, columns):
            maxima[c % CHAINS] = cute.arch.fmax(maxima[c % CHAINS], scores[r, c])
        new_max = cute.arch.fmax(cute.arch.fmax(maxima[0], maxima[1]), cute.arch.fmax(maxima[2], maxima[3]))
        if const_expr(key_scale is not None):
            new_max = new_max * key_scale
        new_max = cute.arch.fmax(new_max, old_max)
        new_max = cute.arch.fmax(new_max, cute.arch.shuffle_sync_bfly(new_max, offset=2))
        new_max = cute.arch.fmax(new_max, cute.arch.shuffle_sync_bfly(new_max, offset=1))
        row_max[r] = new_max
        if const_expr(may_be_empty):
            new_max = Float32(0.0) if new_max == -Float32.inf else new_max
        max_scaled = new_max * scale_log2
        scale[r] = cute.math.exp2(old_max * scale_log2 - max_scaled, fastmath=True)
        if const_expr(offset):
            max_scaled = max_scaled - offset

        sums = [Float32(0.0)] * CHAINS
        if const_expr(row_sum is not None):
            sums[0] = row_sum[r] * scale[r]
        for c in cutlass.range_constexpr(columns):
            p = cute.math.exp2(scores[r, c] * p_scale - max_scaled, fastmath=True)
            scores[r, c] = p
            if const_expr(row_sum is not None):
                sums[c % CHAINS] = sums[c % CHAINS] + p
            if const_expr(c == CHAINS):
                early_p = p
        if const_expr(row_sum is not None):
            row_sum[r] = (sums[0] + sums[1]) + (sums[2] + sums[3])
    return scale


@cute.jit
def weights(
    acc_S: cute.Tensor,
    row_max: cute.Tensor,
    scale_log2: Float32,
    offset: cutlass.Constexpr = 0,
    key_scale: Float32 | None = None,
    sums_wanted: cutlass.Constexpr = True,
    software_exp2: cutlass.Constexpr = 0,
    keep_nan: cutlass.Constexpr = True,
) -> cute.Tensor | None:
    """acc_S becomes P as `step` has it, with the row_max of earlier blocks; returns this thread's sums of P, if they are wanted.

    software_exp2: of a thread's weights in a row every so manieth comes from `exp2_of`, without the MUFU; 0: none. These are 2^9
    instead of NaN unless keep_nan.
    """
    scores = by_rows(acc_S)
    p_scale = scale_log2 if const_expr(key_scale is None) else scale_log2 * key_scale
    block_sum = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32) if const_expr(sums_wanted) else None
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        max_scaled = row_max[r] * scale_log2
        if const_expr(offset):
            max_scaled = max_scaled - offset
        below_top = (max_scaled + EXP2_TOP) * (1 / EXP2_RANGE)
        sums = [Float32(0.0)] * CHAINS
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            if const_expr(is_multiple(c + 1, software_exp2)):
                x = scores[r, c] * p_scale - max_scaled
                scores[r, c] = exp2_of(scores[r, c], p_scale * (-1 / EXP2_RANGE), below_top)
                if const_expr(keep_nan):
                    scores[r, c] = x if x != x else scores[r, c]
            else:
                scores[r, c] = cute.math.exp2(scores[r, c] * p_scale - max_scaled, fastmath=True)
            if const_expr(sums_wanted):
                sums[c % CHAINS] = sums[c % CHAINS] + scores[r, c]
        if const_expr(sums_wanted):
            block_sum[r] = (sums[0] + sums[1]) + (sums[2] + sums[3])
    return block_sum


def is_multiple(x: int, n: int) -> bool:
    return n > 0 and x % n == 0


# 2^x for x = EXP2_TOP - EXP2_RANGE * y, y within [0, 1], without the MUFU. The integer that starts with x + 127 and goes on with the
# fraction of x is the float (1 + fraction) * 2^floor(x): too large by 0 to 6 %. Less EXP2_MEAN, it is right on average, and off
# by 3 % at most, where e4m3 rounds by 6 %.
EXP2_TOP = 9.0  # what is above, or NaN, becomes 2^9 (about), which the caller must not use
EXP2_MEAN = 0.0562
EXP2_RANGE = round((EXP2_TOP - EXP2_MEAN + 127) * 2**14) / 2**14  # y = 1 is the float 0


def exp2_of(score: Float32, scale: Float32, top: Float32) -> Float32:
    """2^x for y = score * scale + top, by two FFMA and a shift: y ends at 0 and 1, NaN is 0; the sum with 512 puts 14 digits of
    x's fraction, and those of its integer part, at the end of a mantissa."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 y; .reg .b32 word; fma.rn.sat.f32 y, {$r0}, {$r1}, {$r2}; "
        f"fma.rn.f32 y, y, {ptx_float(-EXP2_RANGE)}, {ptx_float(512 + EXP2_RANGE)}; "
        "mov.b32 word, y; shl.b32 word, word, 9; mov.b32 {$w0}, word; }",
        write_only_types=[Float32],
        read_only_args=[score, scale, top],
    )


def ptx_float(x: float) -> str:
    return "0f" + struct.pack(">f", x).hex()


@cute.jit
def raise_max(
    acc_S: cute.Tensor, row_max: cute.Tensor, excess: cute.Tensor, scale_log2: Float32, key_scale: Float32 | None = None
) -> cute.Tensor:
    """Where `excess` is above 0 in some thread of a row, row_max becomes the maximum; other rows keep theirs.

    Returns the factor per row by which earlier sums and outputs shrink, 1 where nothing changed.
    """
    scores = by_rows(acc_S)
    shrink = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        old_max, found = row_max[r], excess[r]
        block_max = scores[r, 0]
        for c in cutlass.range_constexpr(1, cute.size(scores, mode=[1])):
            block_max = cute.arch.fmax(block_max, scores[r, c])
        if const_expr(key_scale is not None):
            block_max = block_max * key_scale
        new_max = cute.arch.fmax(old_max, block_max)
        for offset in (2, 1):
            new_max = cute.arch.fmax(new_max, cute.arch.shuffle_sync_bfly(new_max, offset=offset))
            found = cute.arch.fmax(found, cute.arch.shuffle_sync_bfly(found, offset=offset))
        row_max[r] = new_max if found > 0.0 else old_max
        # the difference first: where nothing changed it is exactly 0, whatever a fused multiply-add would make of two products
        shrink[r] = cute.math.exp2((old_max - row_max[r]) * scale_log2, fastmath=True)
    return shrink


@cute.jit
def to_operand(acc_S: cute.Tensor, tOrP: cute.Tensor):
    """P as the A operand of the next WGMMA: the accumulator of 16 keys is, register by register, the fragment of one k-step.

    Element by element: converting the whole fragment at once holds a second copy of it in registers.
    """
    for i in cutlass.range_constexpr(cute.size(tOrP)):
        tOrP[i] = acc_S[i].to(tOrP.element_type)


@cute.jit
def finalize(
    row_max: cute.Tensor,
    row_sum: cute.Tensor | None,
    sums: cute.Tensor | None,
    scale_log2: Float32,
    sink_log2: cute.Tensor | None = None,
    offset: cutlass.Constexpr = 0,
):
    """(1 / sum, LSE) per row; (0, -inf) for a row that saw no key. `offset` is `step`'s.

    row_sum: this thread's part of the sum of P; without it there is no LSE (None).
    sums: the sum over all threads of what the output is to be divided by; None: row_sum's.
    sink_log2: per row a further logit of the sum, times log2(e), which belongs to no key; (0, sink) for a row that saw no key.
    """
    inverse = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
    lse = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32) if const_expr(row_sum is not None) else None
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        total = Float32(0.0)
        if const_expr(row_sum is not None):
            total = row_sum[r]
            total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
        divisor = total if const_expr(sums is None) else sums[r]
        top = row_max[r] * scale_log2
        if const_expr(offset):  # the sum is 2**offset times too large
            top = top - offset
        seen = Float32(1.0)
        if const_expr(sink_log2 is not None):
            new_top = cute.arch.fmax(top, sink_log2[r])
            subtracted = Float32(0.0) if new_top == -Float32.inf else new_top
            seen = cute.math.exp2(top - subtracted, fastmath=True)
            sink = cute.math.exp2(sink_log2[r] - subtracted, fastmath=True)
            total, divisor, top = total * seen + sink, divisor * seen + sink, new_top
        empty = divisor == 0.0  # a row with a key has a weight of 1 somewhere; NaN goes its way
        inverse[r] = Float32(0.0) if empty else seen * cute.arch.rcp_approx(divisor)
        if const_expr(row_sum is not None):
            lse[r] = -Float32.inf if empty else (top + cute.math.log2(total, fastmath=True)) * math.log(2.0)
    return inverse, lse


@cute.jit
def scale_rows(acc: cute.Tensor, scale: cute.Tensor):
    rows = by_rows(acc)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            rows[r, c] = rows[r, c] * scale[r]
