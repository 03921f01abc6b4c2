"""Rung 8 on the simulated SM, the protocol of `fa3_lib`'s forward kernel: a CTA stays and walks over query tiles.

Adds to rung 7      rings and turns go on across tiles; a second warp loads each consumer's query rows as soon as the
                    consumer has read the last ones, or, where the output takes their place, as soon as it has left
Look at             K and V of the next tile, and with memory for the output its Q, are on their way while a consumer
                    still stores
"""

from dataclasses import replace

from fa3_course.simulated import parts, rung07
from fa3_lib.config import WGMMA_M
from hopper_sim import SM, Role

Work = list[tuple[int, int, int]]


async def load_kv(warp: Role, p: parts.Problem, t: parts.Tiles, work: Work) -> None:
    """K(n), then V(n): one warp for both."""
    stages = p.config.stages
    await warp.setmaxnreg(p.config.producer_registers)
    loaded = 0  # blocks put through the rings so far
    for tile in work:
        for n in p.blocks(tile[0]):
            slot, phase = loaded % stages, loaded // stages % 2
            await t.k_empty[slot].wait(phase ^ 1)
            parts.load_k(warp, p, t, tile, n, slot)
            await t.v_empty[slot].wait(phase ^ 1)
            parts.load_v(warp, p, t, tile, n, slot)
            loaded += 1


async def load_q(warp: Role, p: parts.Problem, t: parts.Tiles, work: Work) -> None:
    c = p.config
    await warp.setmaxnreg(c.producer_registers)
    for number, (m, head, batch) in enumerate(work):
        for i in range(c.consumer_warpgroups):
            await t.q_empty[i].wait(number % 2 ^ 1)
            t.q_full[i].arrive_expect_tx(c.q_bytes // c.consumer_warpgroups)
            at, box = (batch, m * c.tile_m + i * WGMMA_M, head, 0), (1, WGMMA_M, 1, c.head_dim)
            warp.tma_load(t.q[i], p.q, at, box, t.q_full[i])


async def consumer(wg: Role, me: int, p: parts.Problem, t: parts.Tiles, work: Work) -> None:
    c = p.config
    await wg.setmaxnreg(c.consumer_registers)
    acc_S = wg.registers("S", (WGMMA_M, c.tile_n))
    tOrP = wg.registers("P", (WGMMA_M, c.tile_n), p.q.dtype)
    acc_O = wg.registers("O", (WGMMA_M, c.head_dim_v))

    def release_q() -> None:
        if c.own_output:
            t.q_empty[me].arrive(parts.WARPS)

    if t.turns and me == 0:
        t.turns[0].arrive()  # opens the first turn
    done = 0
    for number, tile in enumerate(work):
        acc_O.write(0.0)
        await t.q_full[me].wait(number % 2)
        rows = await rung07.attend(wg, me, p, t, tile[0], done, acc_S, tOrP, acc_O, release_q)
        await parts.epilogue(wg, p, parts.staging(p, t, me), tile, me, acc_O, rows, wait=not c.own_output)
        if not c.own_output:
            t.q_empty[me].arrive()  # one warp, after the store has read the memory
        done += len(p.blocks(tile[0]))
    await wg.wait_store(0)  # shared memory must outlive the last store


def build(sm: SM, p: parts.Problem, *work: tuple[int, int, int]) -> None:
    """One persistent CTA with its share of the query tiles."""
    c, names = p.config, parts.consumer_names(p.config)
    t = replace(
        parts.make_tiles(sm, p, loader="load_kv", q_loader="load_q"),
        turns=parts.make_turns(sm, c),
        q_empty=[sm.mbarrier(f"Q empty[{i}]", c.q_empty_arrivals, by=(name,)) for i, name in enumerate(names)],
        o=sm.shared("O", (c.consumer_warpgroups, WGMMA_M, c.head_dim_v), p.out.dtype) if c.own_output else None,
    )
    for name, body in (("load_kv", load_kv), ("load_q", load_q)):
        sm.role(name, body, p, t, list(work), threads=parts.WARP, warpgroup="producer")
    for me, name in enumerate(names):
        sm.role(name, consumer, me, p, t, list(work))
