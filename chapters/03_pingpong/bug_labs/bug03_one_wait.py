"""# 03.B3 Two products, one wait

*Difficulty 2 of 3, 12 minutes, needs a laptop*

Softmax under PV again. After `wait_group(1)` the consumer frees the slots that it has used in this round, K's and V's, in one place, as
tidy code does. On a card, such a kernel can be right in test after test.

1. **Predict** the verdict and write it into `verdict`. Candidates: "overwrite before free", "operand touched in flight",
   "read before full", "too many arrivals", "wrong phase", "race".
2. **Check**, and read the verdict on your role: who overwrites what, and who still reads it?
3. **Mend** it, *and keep the overlap*.
"""

from fa3_course.simulated import parts
from hopper_sim import Role


def verdict() -> str:
    """The verdict of the simulated SM on the roles below, as they were handed out."""
    # region learner: return "?"
    # Read the roles and predict, before you check. The task has candidates.
    return "?"
    # endregion


async def consumer(wg: Role, me: int, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    """Consumer `me`: 64 rows of the query tile."""
    c, blocks = p.config, p.blocks(tile[0])
    await wg.setmaxnreg(c.consumer_registers)
    acc_S, acc_O = wg.registers("S", (64, c.tile_n)), wg.registers("O", (64, c.head_dim_v))
    tOrP = wg.registers("P", (64, c.tile_n), p.q.dtype)
    acc_O.write(0.0)
    rows = parts.OnlineSoftmax(wg, p, tile[0], me, p.scale_log2)
    await t.q_full[0].wait(0)
    # region learner
    # Round i: QK of block i, PV of block i - 1.
    for i in range(len(blocks) + 1):
        slot, phase = i % c.stages, i // c.stages % 2
        last_slot, last_phase = (i - 1) % c.stages, (i - 1) // c.stages % 2
        if i < len(blocks):
            await t.k_full[slot].wait(phase)
            wg.wgmma_fence()
            wg.wgmma(acc_S, t.q[me], t.k[slot].T, accumulate=False, label="QK")
            wg.commit()
        if i > 0:
            await t.v_full[last_slot].wait(last_phase)
            wg.wgmma_fence()
            wg.wgmma(acc_O, tOrP, t.v[last_slot], label="PV")
            wg.commit()
        if i < len(blocks):
            await wg.wait_group(1 if i > 0 else 0)
            t.k_empty[slot].arrive(parts.WARPS)
            if i > 0:
                t.v_empty[last_slot].arrive(parts.WARPS)
            weights, shrink = await rows.step(acc_S.read(), blocks[i])
        if i > 0:
            await wg.wait_group(0)
            if i == len(blocks):
                t.v_empty[last_slot].arrive(parts.WARPS)
        if i < len(blocks):
            tOrP.write(weights)
            await parts.rescale(wg, acc_O, shrink)
    # endregion
    await parts.epilogue(wg, p, parts.staging(p, t, me), tile, me, acc_O, rows)
