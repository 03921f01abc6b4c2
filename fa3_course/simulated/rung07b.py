"""Rung 7b on the simulated SM: the overlap of rung 7 without warp specialisation (an ablation row of the paper).

Takes from rung 7   the producer warp, setmaxnreg and the turns
Look at             consumer 0 starts the copies between its own GEMMs, and waits for consumer 1 before it may reuse a slot
"""

from fa3_course.simulated import parts
from fa3_lib.config import WGMMA_M
from hopper_sim import SM, Role


async def refill(wg: Role, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int], i: int, what: str) -> None:
    """Puts the i-th block of the tile into its slot of the K or V ring, once both consumers have freed it."""
    blocks, stages = p.blocks(tile[0]), p.config.stages
    if i >= len(blocks):
        return
    empty, load = (t.k_empty, parts.load_k) if what == "K" else (t.v_empty, parts.load_v)
    await empty[i % stages].wait(i // stages % 2 ^ 1)
    load(wg, p, t, tile, blocks[i], i % stages)


async def consumer(wg: Role, me: int, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    c, m = p.config, tile[0]
    acc_S = wg.registers("S", (WGMMA_M, c.tile_n))
    tOrP = wg.registers("P", (WGMMA_M, c.tile_n), p.q.dtype)
    acc_O = wg.registers("O", (WGMMA_M, c.head_dim_v))
    acc_O.write(0.0)
    rows = parts.OnlineSoftmax(wg, p, m, me, p.scale_log2)
    blocks = p.blocks(m)
    if me == 0:
        parts.load_q(wg, p, t, tile)
        for i in range(c.stages):
            await refill(wg, p, t, tile, i, "K")
            await refill(wg, p, t, tile, i, "V")

    await t.q_full[0].wait(0)
    for i in range(len(blocks) + 1):  # QK of block i, PV of block i - 1
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
            weights, shrink = await rows.step(acc_S.read(), blocks[i])
        if i > 0:
            await wg.wait_group(0)
            t.v_empty[last_slot].arrive(parts.WARPS)
        if i < len(blocks):
            tOrP.write(weights)
            await parts.rescale(wg, acc_O, shrink)
            if me == 0:
                await refill(wg, p, t, tile, i + c.stages, "K")
        if me == 0 and i > 0:
            await refill(wg, p, t, tile, i - 1 + c.stages, "V")
    await parts.epilogue(wg, p, parts.staging(p, t, me), tile, me, acc_O, rows)


def build(sm: SM, p: parts.Problem, tile: tuple[int, int, int]) -> None:
    """One CTA: tile_m query rows, no producer."""
    t = parts.make_tiles(sm, p, loader="consumer0")
    for me, name in enumerate(parts.consumer_names(p.config)):
        sm.role(name, consumer, me, p, t, tile)
