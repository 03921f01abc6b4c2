"""# 02.B4 Fenced, and still not seen

*Difficulty 2 of 3, 10 minutes, needs a laptop*

Two consumers stage their 64 rows of O side by side, meet at a named barrier, and the first one stores all 128 rows with
one TMA copy. It even thinks of the proxy fence. And still, on a card, rows of the other one may come out as the memory
was before.

1. **Predict** the verdict and write it into `verdict`. Candidates: "race", "missing proxy fence", "unbalanced named
   barrier", "element never written", "role returned early", "accumulator touched in flight".
2. **Check**, and read the verdict on your role: whose stores are meant?
3. **Mend** it. A fence covers what the thread knows of when it executes it.
"""

import numpy as np

from hopper_sim import GlobalTensor, RegisterTile, Role, SharedTile
from hopper_sim.barriers import NamedBarrier


def verdict() -> str:
    """The verdict of the simulated SM on the role below, as it was handed out."""
    # region learner: return "?"
    # Read the role and predict, before you check. The task has candidates.
    return "missing proxy fence"
    # endregion


async def epilogue(
    wg: Role,
    me: int,
    acc_O: RegisterTile,
    row_sum: np.ndarray,
    staged: SharedTile,
    out: GlobalTensor,
    both: NamedBarrier,
) -> None:
    """Consumer `me` (0 or 1) of two: normalises its rows; consumer 0 stores all of them.

    Args:
        acc_O: (64, d) f32. row_sum: (64,). staged: (2, 64, d) f16. out: (rows, d) f16, at most 128
            rows.
        both: a named barrier of 256 threads.
    """
    rows = staged.shape[0] * staged.shape[1]
    # region learner
    # Registers to shared memory; meet; shared memory to global memory.
    await wg.store_shared(staged[me], acc_O.read() / row_sum[:, None])
    wg.fence_async_proxy()
    if me == 1:
        both.arrive()
    else:
        await both.sync()
        wg.tma_store(staged, out, (0, 0), (rows, staged.shape[2]))
        wg.commit_store()
        await wg.wait_store(0)
    # endregion
