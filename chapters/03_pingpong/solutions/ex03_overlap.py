"""# 03.3 Softmax under PV

*Difficulty 3 of 3, 18 minutes, needs a laptop*

Inside one consumer, QK of block i is issued *before* PV of block i - 1, and softmax of block i starts when QK is done and PV
still runs. Both products are in flight, in one order of commits, and `wait_group(n)` returns when at most n groups are left.

Write the body of the loop. Its round `i` runs from 0 to `len(blocks)`, both included: round 0 has no PV, the last round has no QK.
`issue_qk` and `issue_pv` fence, issue and commit; `rows.step` is the softmax. Three rules decide the order of the rest:

* a slot may be freed when the product that reads it is done, and should be freed as soon as it is;
* PV reads P in the registers until it is done: the next P must wait;
* PV writes O until it is done: O may be rescaled only then.
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

    async def issue_qk(i: int) -> None:
        await t.k_full[i % c.stages].wait(i // c.stages % 2)
        wg.wgmma_fence()
        wg.wgmma(acc_S, t.q[me], t.k[i % c.stages].T, accumulate=False, label="QK")
        wg.commit()

    async def issue_pv(i: int) -> None:
        await t.v_full[i % c.stages].wait(i // c.stages % 2)
        wg.wgmma_fence()
        wg.wgmma(acc_O, tOrP, t.v[i % c.stages], label="PV")
        wg.commit()

    def release(empty: list, i: int) -> None:
        empty[i % c.stages].arrive(parts.WARPS)

    await t.q_full[0].wait(0)
    for i in range(len(blocks) + 1):
        # region learner
        # Issue QK(i) and PV(i - 1), where they exist. Then, in the right order and with the right
        # waits: release(t.k_empty, i); release(t.v_empty, i - 1); weights, shrink = await
        # rows.step(acc_S.read(), blocks[i]); tOrP.write(weights); await parts.rescale(wg, acc_O,
        # shrink).
        if i < len(blocks):
            await issue_qk(i)
        if i > 0:
            await issue_pv(i - 1)
        if i < len(blocks):
            await wg.wait_group(1 if i > 0 else 0)
            release(t.k_empty, i)
            weights, shrink = await rows.step(acc_S.read(), blocks[i])
        if i > 0:
            await wg.wait_group(0)
            release(t.v_empty, i - 1)
        if i < len(blocks):
            tOrP.write(weights)
            await parts.rescale(wg, acc_O, shrink)
        # endregion
    await parts.epilogue(wg, p, parts.staging(p, t, me), tile, me, acc_O, rows)
