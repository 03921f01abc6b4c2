"""Rung 6 on the simulated SM: the consumers take turns (ping-pong).

Adds to rung 5      one named barrier per consumer; a turn is PV of one key block and QK of the next
Look at             while one consumer has the tensor cores, the other does its softmax
"""

from dataclasses import replace

from fa3_course.simulated import parts, rung05
from fa3_lib.config import WGMMA_M
from hopper_sim import SM, Role


async def consumer(wg: Role, me: int, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    c, m = p.config, tile[0]
    await wg.setmaxnreg(c.consumer_registers)
    acc_S = wg.registers("S", (WGMMA_M, c.tile_n))
    tOrP = wg.registers("P", (WGMMA_M, c.tile_n), p.q.dtype)
    acc_O = wg.registers("O", (WGMMA_M, c.head_dim_v))
    acc_O.write(0.0)
    rows = parts.OnlineSoftmax(wg, p, m, me, p.scale_log2)
    mine, next_one = t.turns[me], t.turns[(me + 1) % len(t.turns)]
    if me == 0:
        mine.arrive()  # opens the first turn

    await t.q_full[0].wait(0)
    blocks = p.blocks(m)
    for i in range(len(blocks) + 1):  # turn i: PV of block i - 1, QK of block i
        slot, phase = i % c.stages, i // c.stages % 2
        last_slot, last_phase = (i - 1) % c.stages, (i - 1) // c.stages % 2
        await mine.sync()
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
        next_one.arrive()
        await wg.wait_group(0)
        if i > 0:
            t.v_empty[last_slot].arrive(parts.WARPS)
        if i < len(blocks):
            t.k_empty[slot].arrive(parts.WARPS)
            weights, shrink = await rows.step(acc_S.read(), blocks[i])
            tOrP.write(weights)
            await parts.rescale(wg, acc_O, shrink)
    await parts.epilogue(wg, p, parts.staging(p, t, me), tile, me, acc_O, rows)


def build(sm: SM, p: parts.Problem, tile: tuple[int, int, int]) -> None:
    """One CTA: tile_m query rows, at least two consumers."""
    t = replace(parts.make_tiles(sm, p), turns=parts.make_turns(sm, p.config))
    if not t.turns:
        raise ValueError("rung 6 takes turns: ping_pong=True, and tile_m of 128 or 192 for two or three consumers")
    sm.role("producer", rung05.producer, p, t, tile, threads=parts.WARP)
    for me, name in enumerate(parts.consumer_names(p.config)):
        sm.role(name, consumer, me, p, t, tile)
