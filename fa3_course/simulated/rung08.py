"""Rung 8 on the simulated SM: one CTA stays and works through a list of query tiles.

Adds to rung 7      the rings and turns go on across tiles; a barrier says when Q's memory (and the output staged in it) is
                    free; the tiles with most keys come first
Look at             the producer fetches K of the next tile while the consumers still finish the last one
"""

from dataclasses import replace

from fa3_course.simulated import parts, rung07
from fa3_lib.config import WGMMA_M
from hopper_sim import SM, Role

Work = list[tuple[int, int, int]]


async def producer(warp: Role, p: parts.Problem, t: parts.Tiles, work: Work) -> None:
    await warp.setmaxnreg(p.config.producer_registers)
    count = 0  # blocks put through the rings so far
    for number, tile in enumerate(work):

        async def query(number: int = number, tile: tuple[int, int, int] = tile) -> None:
            # behind the first K, whose slot is free before Q's memory is
            await t.q_empty.wait(number % 2 ^ 1)
            parts.load_q(warp, p, t, tile)

        await rung07.load_blocks(warp, p, t, tile, count, query)
        count += len(p.blocks(tile[0]))


async def consumer(wg: Role, me: int, p: parts.Problem, t: parts.Tiles, work: Work) -> None:
    c = p.config
    await wg.setmaxnreg(c.consumer_registers)
    acc_S = wg.registers("S", (WGMMA_M, c.tile_n))
    tOrP = wg.registers("P", (WGMMA_M, c.tile_n), p.q.dtype)
    acc_O = wg.registers("O", (WGMMA_M, c.head_dim_v))
    if t.turns and me == len(t.turns) - 1:
        t.turns[0].arrive()
    count = 0
    for number, tile in enumerate(work):
        acc_O.write(0.0)
        await t.q_full.wait(number % 2)
        rows = await rung07.attend(wg, me, p, t, tile[0], count, acc_S, tOrP, acc_O)
        await parts.epilogue(wg, p, parts.staging(p, t, me), tile, me, acc_O, rows)
        t.q_empty.arrive(parts.WARPS)
        count += len(p.blocks(tile[0]))


def build(sm: SM, p: parts.Problem, *work: tuple[int, int, int]) -> None:
    """One persistent CTA with its share of the query tiles."""
    names = parts.consumer_names(p.config)
    q_empty = sm.mbarrier("Q empty", p.config.empty_arrivals, by=names)
    t = replace(parts.make_tiles(sm, p), turns=parts.make_turns(sm, p.config), q_empty=q_empty)
    sm.role("producer", producer, p, t, list(work), threads=parts.WARP)
    for me, name in enumerate(names):
        sm.role(name, consumer, me, p, t, list(work))
