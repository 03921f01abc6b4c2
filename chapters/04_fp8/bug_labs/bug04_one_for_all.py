"""# 04.B4 One speaks for all

*Difficulty 2 of 3, 15 minutes, needs a laptop*

V is turned inside the kernel, by three warps: each reads the block, and writes every third group of 16 head dims of the turned
one. They do not run in step. A raw stage is free when all three have read it; its barrier counts **one** arrival, since one is cheaper than
three, and warp 0 speaks for all. `together` is a named barrier of the three warps, for whom it may concern.

1. **Predict** the verdict and write it into `verdict`. Candidates: "race", "overwrite before free", "read before full", "missing
   proxy fence", "deadlock", "too many arrivals".
2. **Check**, and read the verdict on your role: who overwrites what, and who still reads it?
3. **Mend** it. The barrier's count stays 1.
"""

import numpy as np

from fa3_course.simulated import parts, rung10
from hopper_sim import Role


def verdict() -> str:
    """The verdict of the simulated SM on the roles below, as they were handed out."""
    # region learner: return "?"
    # Read the roles and predict, before you check. The task has candidates.
    return "?"
    # endregion


async def turner(
    warp: Role, me: int, p: rung10.Problem8, t: parts.Tiles, raw, together, tile: tuple[int, int, int]
) -> None:
    """Warp `me` of the three that turn V's blocks."""
    c = p.config
    await warp.setmaxnreg(c.producer_registers)
    order = np.argsort(rung10.register_order(c.tile_n))
    for i in range(len(p.blocks(tile[0]))):
        slot, phase = i % c.stages, i // c.stages % 2
        # region learner
        # One block: wait, read, free the raw stage, wait, write, announce. All three run this.
        await raw.full[slot].wait(phase)
        v = await warp.load_shared(raw.tiles[slot])
        if me == 0:
            raw.empty[slot].arrive()
        await t.v_empty[slot].wait(phase ^ 1)
        for first in range(16 * me, c.head_dim_v, 48):
            dims = slice(first, first + 16)
            await warp.store_shared(t.v[slot][dims], v[order][:, dims].T)
        warp.fence_async_proxy()
        t.v_full[slot].arrive()
        # endregion
