"""# 02.7 Rung 3 on the simulated SM: everything waits

*Difficulty 2 of 3, 15 minutes, needs a laptop*

One warpgroup, one slot for K and one for V. You write the loop over key blocks: start the copy of K, wait for it,
multiply, wait; softmax; start the copy of V, wait for it, multiply, wait.

Ready to use, from `fa3_course.simulated.parts`:

* `parts.load_k(wg, p, t, tile, n, slot=0)` announces the bytes of key block `n` on `t.k_full[0]` and starts its copy into
  `t.k[0]`; `parts.load_v` does the same with `t.v_full[0]` and `t.v[0]`;
* `weights, shrink = await rows.step(scores, n)` is the online softmax: P, and the factor by which O must shrink;
* `await parts.rescale(wg, acc_O, shrink)` multiplies O by it.

`acc_S` and `acc_O` are accumulators, `tOrP` is P as an operand in registers. `t.k[0].T` reads K as (d, keys).
"""

from fa3_course.simulated import parts
from fa3_lib.config import WGMMA_M
from hopper_sim import Role


async def warpgroup(wg: Role, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    """The only role: 64 query rows.

    Args:
        p: tensors and configuration. t: shared memory and barriers. tile: (m, head, batch) of the
            query tile.
    """
    c, m = p.config, tile[0]
    acc_S = wg.registers("S", (WGMMA_M, c.tile_n))
    tOrP = wg.registers("P", (WGMMA_M, c.tile_n), p.q.dtype)
    acc_O = wg.registers("O", (WGMMA_M, c.head_dim_v))
    acc_O.write(0.0)
    rows = parts.OnlineSoftmax(wg, p, m, 0, p.scale_log2)

    parts.load_q(wg, p, t, tile)
    await t.q_full[0].wait(0)
    for i, n in enumerate(p.blocks(m)):
        # region learner
        # K: load, wait. S = Q K^T: fence, wgmma(..., accumulate=False), commit, wait_group(0).
        # Softmax, tOrP.write(...). V: load, wait. O += P V: fence, wgmma, commit, wait_group(0).
        # Which phase does load i complete?
        parts.load_k(wg, p, t, tile, n, slot=0)
        await t.k_full[0].wait(i % 2)
        wg.wgmma_fence()
        wg.wgmma(acc_S, t.q[0], t.k[0].T, accumulate=False, label="QK")
        wg.commit()
        await wg.wait_group(0)

        weights, shrink = await rows.step(acc_S.read(), n)
        tOrP.write(weights)
        await parts.rescale(wg, acc_O, shrink)

        parts.load_v(wg, p, t, tile, n, slot=0)
        await t.v_full[0].wait(i % 2)
        wg.wgmma_fence()
        wg.wgmma(acc_O, tOrP, t.v[0], label="PV")
        wg.commit()
        await wg.wait_group(0)
        # endregion
    await parts.epilogue(wg, p, parts.staging(p, t, 0), tile, 0, acc_O, rows)
