"""Rung 7 on the simulated SM: inside a consumer, the softmax of a block runs under the PV of the block before.

Adds to rung 6      QK(n) is issued before PV(n + 1); the softmax of n starts when QK(n) is done and PV(n + 1) still runs
                    the producer loads in that order
Look at             wait_group(1): the younger of two groups may stay in flight
"""

from collections.abc import Callable
from dataclasses import replace

from fa3_course.simulated import parts
from fa3_lib.config import WGMMA_M
from hopper_sim import SM, RegisterTile, Role


async def load_blocks(
    warp: Role,
    p: parts.Problem,
    t: parts.Tiles,
    tile: tuple[int, int, int],
    first: int,
    after_first_k,
    load_v=parts.load_v,
) -> None:
    """K(n), then V(n + 1): the order in which the consumers use them. Calls `await after_first_k()` behind the first K."""
    stages, blocks = p.config.stages, p.blocks(tile[0])
    for i in range(len(blocks) + 1):
        slot, phase = (first + i) % stages, (first + i) // stages % 2
        last_slot, last_phase = (first + i - 1) % stages, (first + i - 1) // stages % 2
        if i < len(blocks):
            await t.k_empty[slot].wait(phase ^ 1)
            parts.load_k(warp, p, t, tile, blocks[i], slot)
        if i == 0:
            await after_first_k()
        else:
            await t.v_empty[last_slot].wait(last_phase ^ 1)
            load_v(warp, p, t, tile, blocks[i - 1], last_slot)


async def producer(warp: Role, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    async def query() -> None:
        parts.load_q(warp, p, t, tile)

    await warp.setmaxnreg(p.config.producer_registers)
    await load_blocks(warp, p, t, tile, 0, query)


async def attend(
    wg: Role,
    me: int,
    p: parts.Problem,
    t: parts.Tiles,
    m: int,
    first: int,
    acc_S: RegisterTile,
    tOrP: RegisterTile,
    acc_O: RegisterTile,
    after_last_qk: Callable[[], None] = lambda: None,
) -> parts.OnlineSoftmax:
    """The main loop of one query tile.

    Args:
        first: blocks that earlier tiles have put through the rings. after_last_qk: called when Q has been read for the last time.
    """
    c = p.config
    rows = parts.OnlineSoftmax(wg, p, m, me, p.scale_log2)
    blocks = p.blocks(m)
    if t.turns:
        mine, next_one = t.turns[me], t.turns[(me + 1) % len(t.turns)]

    for i in range(len(blocks) + 1):  # QK of block i, PV of block i - 1
        slot, phase = (first + i) % c.stages, (first + i) // c.stages % 2
        last_slot, last_phase = (first + i - 1) % c.stages, (first + i - 1) // c.stages % 2
        pair = 0 < i < len(blocks)  # two GEMMs: a turn
        if pair and t.turns:
            await mine.sync()
        if i < len(blocks):
            await t.k_full[slot].wait(phase)
            wg.wgmma_fence()
            wg.wgmma(acc_S, t.q[me], t.k[slot].T, accumulate=False, label="QK")
            wg.commit()
        else:
            after_last_qk()
        if i > 0:
            await t.v_full[last_slot].wait(last_phase)
            wg.wgmma_fence()
            wg.wgmma(acc_O, tOrP, t.v[last_slot], label="PV")
            wg.commit()
        if pair and t.turns:
            next_one.arrive()
        if i < len(blocks):
            await wg.wait_group(1 if i > 0 else 0)
            t.k_empty[slot].arrive(parts.WARPS)
            weights, shrink = await rows.step(acc_S.read(), blocks[i])
        if i > 0:
            await wg.wait_group(0)
            t.v_empty[last_slot].arrive(parts.WARPS)
        if i < len(blocks):
            tOrP.write(weights)  # only now: PV read the old P until here
            await parts.rescale(wg, acc_O, shrink)
    return rows


async def consumer(wg: Role, me: int, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    c = p.config
    await wg.setmaxnreg(c.consumer_registers)
    acc_S = wg.registers("S", (WGMMA_M, c.tile_n))
    tOrP = wg.registers("P", (WGMMA_M, c.tile_n), p.q.dtype)
    acc_O = wg.registers("O", (WGMMA_M, c.head_dim_v))
    acc_O.write(0.0)
    if t.turns and me == 0:
        t.turns[0].arrive()  # opens the first turn
    await t.q_full[0].wait(0)
    rows = await attend(wg, me, p, t, tile[0], 0, acc_S, tOrP, acc_O)
    await parts.epilogue(wg, p, parts.staging(p, t, me), tile, me, acc_O, rows)


def build(sm: SM, p: parts.Problem, tile: tuple[int, int, int]) -> None:
    """One CTA: tile_m query rows; turns if the configuration says so."""
    t = replace(parts.make_tiles(sm, p), turns=parts.make_turns(sm, p.config))
    sm.role("producer", producer, p, t, tile, threads=parts.WARP)
    for me, name in enumerate(parts.consumer_names(p.config)):
        sm.role(name, consumer, me, p, t, tile)
