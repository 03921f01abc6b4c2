"""# 02.11 The epilogue: normalise, stage, fence, store

*Difficulty 2 of 3, 15 minutes, needs a laptop*

After the loop a consumer holds O, not yet normalised, and per row the maximum of the raw scores and the sum of the
exponentials. What leaves the chip is O / sum in 16 bits, through shared memory and a TMA store, and the LSE, by ordinary
stores. The threads write the staged tile with *ordinary* stores, TMA reads it through the *asynchronous* proxy: between the
two stands a fence. And shared memory must live until the store has read it.

With P = exp2(scale_log2 * (s - max)), the natural-log LSE of a row is ln(2) * (scale_log2 * max + log2(sum)). A row that
saw no key has sum 0 and maximum -inf: out is 0 and LSE -inf there.
"""

import numpy as np

from hopper_sim import GlobalTensor, RegisterTile, Role, SharedTile


async def epilogue(
    wg: Role,
    acc_O: RegisterTile,
    row_max: np.ndarray,
    row_sum: np.ndarray,
    scale_log2: float,
    staged: SharedTile,
    out: GlobalTensor,
    lse: GlobalTensor,
    first_row: int,
) -> None:
    """Stores 64 rows.

    Args:
        acc_O: (64, d) f32, not normalised: `acc_O.read()`.
        row_max, row_sum: (64,) float32.
        staged: (64, d) f16 in shared memory, free.
        out: (rows, d) f16. lse: (rows,) f32. Rows past the end are dropped by both kinds of stores.
        first_row: of the 64 rows.
    """
    # region learner
    # Numbers: 1 / row_sum and the LSE, both with care for empty rows. `await wg.store_global(lse,
    # (first_row,), values)`. O: `await wg.store_shared(staged, values)`, fence_async_proxy,
    # `wg.tma_store(staged, out, (first_row, 0), staged.shape)`, commit_store, `await
    # wg.wait_store(0)`.
    empty = row_sum == 0
    total = np.where(empty, np.float32(1), row_sum)
    log2_sum = np.where(empty, 0, row_max) * scale_log2 + np.log2(total)
    await wg.store_global(lse, (first_row,), np.where(empty, -np.inf, np.log(2.0) * log2_sum))
    await wg.store_shared(staged, acc_O.read() / total[:, None])
    wg.fence_async_proxy()
    wg.tma_store(staged, out, (first_row, 0), staged.shape)
    wg.commit_store()
    await wg.wait_store(0)
    # endregion
