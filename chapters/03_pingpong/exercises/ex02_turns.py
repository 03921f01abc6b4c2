"""# 03.2 Ping-pong: take turns

*Difficulty 3 of 3, 15 minutes, needs a laptop*

The consumer below issues PV of one key block and QK of the next in one go, so that a whole softmax lies between two issues. What
is missing are the turns, for two consumers and for three. `t.turns[i]` is the barrier of consumer `i`, of 256 threads: it opens when
consumer i waits there (`await t.turns[i].sync()`) and 128 more threads have arrived (`t.turns[i].arrive()`). The turns go round: 0, 1, 0, 1;
or 0, 1, 2, 0.

A turn is for *issuing*: tensor cores work in the order of issue, so the turn can be passed on while the products still run.
"""

from fa3_course.simulated import parts
from hopper_sim import Role


async def consumer(wg: Role, me: int, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    """Consumer `me`: 64 rows of the query tile."""
    c, blocks = p.config, p.blocks(tile[0])
    await wg.setmaxnreg(c.consumer_registers)
    acc_S, acc_O = wg.registers("S", (64, c.tile_n)), wg.registers("O", (64, c.head_dim_v))
    tOrP = wg.registers("P", (64, c.tile_n), p.q.dtype)
    acc_O.write(0.0)
    rows = parts.OnlineSoftmax(wg, p, tile[0], me, p.scale_log2)
    # region learner
    # Before the loop: who waits where, who comes next, and who opens the first turn? The
    # names mine and next_one are for you. len(t.turns) is the number of consumers.
    raise NotImplementedError("03.2 is yours to write")
    # endregion
    await t.q_full[0].wait(0)
    for i in range(len(blocks) + 1):  # PV of block i - 1, QK of block i
        slot, phase = i % c.stages, i // c.stages % 2
        last_slot, last_phase = (i - 1) % c.stages, (i - 1) // c.stages % 2
        # region learner
        # Before the issue.
        raise NotImplementedError("03.2 is yours to write")
        # endregion
        if i > 0:
            await t.v_full[last_slot].wait(last_phase)
            wg.wgmma_fence()
            wg.wgmma(acc_O, tOrP, t.v[last_slot], label="PV")
            wg.commit()
        if i < len(blocks):
            await t.k_full[slot].wait(phase)
            wg.wgmma_fence()
            wg.wgmma(acc_S, t.q[me], t.k[slot].T, accumulate=False, label="QK")
            wg.commit()
        # region learner
        # After the issue: pass the turn on, and wait for both products, in the better order.
        raise NotImplementedError("03.2 is yours to write")
        # endregion
        if i > 0:
            t.v_empty[last_slot].arrive(parts.WARPS)
        if i < len(blocks):
            t.k_empty[slot].arrive(parts.WARPS)
            weights, shrink = await rows.step(acc_S.read(), blocks[i])
            tOrP.write(weights)
            await parts.rescale(wg, acc_O, shrink)
    await parts.epilogue(wg, p, parts.staging(p, t, me), tile, me, acc_O, rows)
