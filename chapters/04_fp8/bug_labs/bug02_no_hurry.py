"""# 04.B2 No hurry with T

*Difficulty 1 of 3, 10 minutes, needs a laptop*

Two levels, with the softmax under PV as in chapter 3: `T = P V` of the block before and `S = Q K^T` of this block are in flight. The
add `O = O * shrink + T` takes fp32 instructions, and so does the softmax. Somebody puts the add first: the softmax's first
exponentials would only wait for the row maximum anyway.

1. **Predict** the verdict and write it into `verdict`. Candidates: "race", "operand touched in flight", "accumulator touched in
   flight", "read before full", "overwrite before free", "missing wgmma fence".
2. **Check**, and read the verdict on your role.
3. **Mend** it, *and keep the overlap*: the softmax must still run while PV does.
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


async def consumer(wg: Role, me: int, p: rung10.Problem8, t: parts.Tiles, tile: tuple[int, int, int], staged) -> None:
    """Consumer `me`: 64 rows of the query tile."""
    c, blocks, kv = p.config, p.blocks(tile[0]), (tile[2], p.kv_head(tile[1]))
    await wg.setmaxnreg(c.consumer_registers)
    acc_S = wg.registers("S", (64, c.tile_n))
    acc_O, acc_T = (wg.registers(name, (64, c.head_dim_v)) for name in "OT")
    tOrP = wg.registers("P", (64, c.tile_n), p.q.dtype)
    acc_O.write(0.0)
    rows = parts.OnlineSoftmax(wg, p, tile[0], me, p.scale_log2 * p.q_descale[kv] * p.k_descale[kv], rung10.MAX_OFFSET)
    order, shrink = np.argsort(rung10.register_order(c.tile_n)), np.ones((64, 1), np.float32)
    await t.q_full[0].wait(0)
    # region learner
    # Round i: QK of block i, PV of block i - 1 into T. When may T be read?
    for i in range(len(blocks) + 1):
        slot, phase = i % c.stages, i // c.stages % 2
        last_slot, last_phase = (i - 1) % c.stages, (i - 1) // c.stages % 2
        if i < len(blocks):
            await t.k_full[slot].wait(phase)
            wg.wgmma_fence()
            wg.wgmma(acc_S, t.q[me], t.k[slot].T, accumulate=False, label="QK", short_accumulator=True)
            wg.commit()
        if i > 0:
            await t.v_full[last_slot].wait(last_phase)
            wg.wgmma_fence()
            wg.wgmma(acc_T, tOrP, t.v[last_slot].T, accumulate=False, label="PV", short_accumulator=True)
            wg.commit()
        if i < len(blocks):
            await wg.wait_group(1 if i > 0 else 0)
            t.k_empty[slot].arrive(parts.WARPS)
            if i > 0:
                await rung10.fold(wg, acc_O, acc_T, shrink)
            weights, next_shrink = await rows.step(acc_S.read(), blocks[i])
        if i > 0:
            await wg.wait_group(0)
            t.v_empty[last_slot].arrive(parts.WARPS)
            if i == len(blocks):
                await rung10.fold(wg, acc_O, acc_T, shrink)
        if i < len(blocks):
            tOrP.write(weights[:, order])
            shrink = next_shrink
    # endregion
    await parts.epilogue(wg, p, staged[me], tile, me, acc_O, rows, p.v_descale[kv])
