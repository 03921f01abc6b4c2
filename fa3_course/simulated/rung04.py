"""Rung 4 on the simulated SM: a producer warp keeps a ring of K and V tiles full.

Adds to rung 3      a second role; per slot one barrier that says "full" and one that says "empty"
"""

from fa3_course.simulated import parts
from fa3_lib.config import WGMMA_M
from hopper_sim import SM, Role


async def producer(warp: Role, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    parts.load_q(warp, p, t, tile)
    for i, n in enumerate(p.blocks(tile[0])):
        slot, phase = i % p.config.stages, i // p.config.stages % 2
        await t.k_empty[slot].wait(phase ^ 1)  # of a fresh barrier, phase 1 counts as complete: the ring starts empty
        parts.load_k(warp, p, t, tile, n, slot)
        await t.v_empty[slot].wait(phase ^ 1)
        parts.load_v(warp, p, t, tile, n, slot)


async def consumer(wg: Role, me: int, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    c, m = p.config, tile[0]
    acc_S = wg.registers("S", (WGMMA_M, c.tile_n))
    tOrP = wg.registers("P", (WGMMA_M, c.tile_n), p.q.dtype)
    acc_O = wg.registers("O", (WGMMA_M, c.head_dim_v))
    acc_O.write(0.0)
    rows = parts.OnlineSoftmax(wg, p, m, me, p.scale_log2)

    await t.q_full[0].wait(0)
    for i, n in enumerate(p.blocks(m)):
        slot, phase = i % c.stages, i // c.stages % 2
        await t.k_full[slot].wait(phase)
        wg.wgmma_fence()
        wg.wgmma(acc_S, t.q[me], t.k[slot].T, accumulate=False, label="QK")
        wg.commit()
        await wg.wait_group(0)
        t.k_empty[slot].arrive(parts.WARPS)

        weights, shrink = await rows.step(acc_S.read(), n)
        tOrP.write(weights)
        await parts.rescale(wg, acc_O, shrink)

        await t.v_full[slot].wait(phase)
        wg.wgmma_fence()
        wg.wgmma(acc_O, tOrP, t.v[slot], label="PV")
        wg.commit()
        await wg.wait_group(0)
        t.v_empty[slot].arrive(parts.WARPS)
    await parts.epilogue(wg, p, parts.staging(p, t, me), tile, me, acc_O, rows)


def build(sm: SM, p: parts.Problem, tile: tuple[int, int, int]) -> None:
    """One CTA: 64 query rows per consumer (the rung has one)."""
    t = parts.make_tiles(sm, p)
    sm.role("producer", producer, p, t, tile, threads=parts.WARP)
    for me, name in enumerate(parts.consumer_names(p.config)):
        sm.role(name, consumer, me, p, t, tile)
