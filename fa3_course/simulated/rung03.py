"""Rung 3 on the simulated SM: TMA and WGMMA, one warpgroup, one stage, everything waits.

One role loads a tile, waits for it, multiplies, waits, and so on: whatever unit works, all others stand still.
"""

from fa3_course.simulated import parts
from fa3_lib.config import WGMMA_M
from hopper_sim import SM, Role


async def warpgroup(wg: Role, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    c, m = p.config, tile[0]
    acc_S = wg.registers("S", (WGMMA_M, c.tile_n))
    tOrP = wg.registers("P", (WGMMA_M, c.tile_n), p.q.dtype)
    acc_O = wg.registers("O", (WGMMA_M, c.head_dim_v))
    acc_O.write(0.0)
    rows = parts.OnlineSoftmax(wg, p, m, 0, p.scale_log2)

    parts.load_q(wg, p, t, tile)
    await t.q_full[0].wait(0)
    for i, n in enumerate(p.blocks(m)):
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
    await parts.epilogue(wg, p, parts.staging(p, t, 0), tile, 0, acc_O, rows)


def build(sm: SM, p: parts.Problem, tile: tuple[int, int, int]) -> None:
    """One CTA: 64 query rows."""
    t = parts.make_tiles(sm, p, loader="consumer0")
    sm.role("consumer0", warpgroup, p, t, tile)
