"""Rung 10's CTA with V turned inside the kernel, as FlashAttention-3 does it, on the simulated SM.

    role        threads             does
    producer    a warp              starts the TMA copies of Q, then of K(n) and of V(n) as it lies in memory
    turner      three warps         read V(n), write it back transposed, its keys in the order of P's registers
    consumer c  a warpgroup each    rung 10's, unchanged

    barrier          full when                        empty when
    raw V ring       1 arrival + v_bytes, per stage   1 arrival of the turner
    V ring           1 arrival of the turner          one arrival per consumer warp

The turned V is written by ordinary stores and read by WGMMA, so a proxy fence stands between the two.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fa3_course.simulated import parts, rung07, rung10
from fa3_lib.config import WGMMA_M
from hopper_sim import SM, GlobalTensor, Role, SharedTile
from hopper_sim.barriers import Mbarrier


@dataclass(frozen=True)
class RawV:
    """The ring into which TMA brings V with head dim contiguous."""

    tiles: SharedTile  # (stage, tile_n, dv)
    full: list[Mbarrier]
    empty: list[Mbarrier]


def untransposed(p: rung10.Problem8) -> rung10.Problem8:
    """The same problem, with V `(b, sk, hk, dv)` as the caller of attention has it."""
    order = rung10.register_order(p.v.shape[3])
    v = p.v.numpy()[:, :, :, order][:, :, :, : p.k.shape[1]]  # position of each key -> key, without the padding
    return replace(p, v=GlobalTensor.input("V", v.transpose(0, 3, 1, 2), p.v.dtype))


async def producer(warp: Role, p: rung10.Problem8, t: parts.Tiles, raw: RawV, tile: tuple[int, int, int]) -> None:
    async def query() -> None:
        parts.load_q(warp, p, t, tile)

    # the V that this role loads, and waits for, is the raw one
    mine = replace(t, v=raw.tiles, v_full=raw.full, v_empty=raw.empty)
    await warp.setmaxnreg(p.config.producer_registers)
    await rung07.load_blocks(warp, p, mine, tile, 0, query)


async def turner(wg: Role, p: rung10.Problem8, t: parts.Tiles, raw: RawV, tile: tuple[int, int, int]) -> None:
    """Turns one block after the other, through its registers."""
    c = p.config
    await wg.setmaxnreg(c.producer_registers)
    order = np.argsort(rung10.register_order(c.tile_n))  # position -> key
    for i in range(len(p.blocks(tile[0]))):
        slot, phase = i % c.stages, i // c.stages % 2
        await raw.full[slot].wait(phase)
        v = await wg.load_shared(raw.tiles[slot])
        raw.empty[slot].arrive()
        await wg.spend("byte permutes", alu=v.size / 4)  # four bytes to an instruction
        await t.v_empty[slot].wait(phase ^ 1)
        await wg.store_shared(t.v[slot], v[order].T)
        wg.fence_async_proxy()
        t.v_full[slot].arrive()


def tiles(sm: SM, p: rung10.Problem8, turners: tuple[str, ...] = ("turner",)) -> tuple[parts.Tiles, RawV]:
    """Shared memory and barriers; `turners` are the roles that turn V, each of which arrives once on a full V stage.

    The first of them says when a raw stage is free, for all.
    """
    c, names = p.config, parts.consumer_names(p.config)
    raw = RawV(
        sm.shared("raw V", (c.stages, c.tile_n, c.head_dim_v), p.v.dtype),
        sm.mbarriers("raw V full", c.stages, c.full_arrivals, by=("producer",)),
        sm.mbarriers("raw V empty", c.stages, 1, by=turners[:1]),
    )
    t = parts.Tiles(
        q=sm.shared("Q", (len(names), WGMMA_M, c.head_dim), p.q.dtype),
        k=sm.shared("K", (c.stages, c.tile_n, c.head_dim), p.k.dtype),
        v=sm.shared("V turned", (c.stages, c.head_dim_v, c.tile_n), p.v.dtype),
        q_full=sm.mbarriers("Q full", 1, c.full_arrivals, by=("producer",)),
        k_full=sm.mbarriers("K full", c.stages, c.full_arrivals, by=("producer",)),
        k_empty=sm.mbarriers("K empty", c.stages, c.empty_arrivals, by=names),
        v_full=sm.mbarriers("V full", c.stages, len(turners), by=turners),
        v_empty=sm.mbarriers("V empty", c.stages, c.empty_arrivals, by=names),
        turns=parts.make_turns(sm, c),
    )
    return t, raw


def consumers(sm: SM, p: rung10.Problem8, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    """Rung 10's consumers."""
    c = p.config
    staged = sm.shared("O", (c.consumer_warpgroups, WGMMA_M, c.head_dim_v), p.out.dtype)
    for me, name in enumerate(parts.consumer_names(c)):
        sm.role(name, rung10.consumer, me, p, t, tile, staged)


def builder(turner: Callable = turner) -> Callable:
    """Builds the CTA with any turner."""

    def build(sm: SM, p: rung10.Problem8, tile: tuple[int, int, int]) -> None:
        t, raw = tiles(sm, p)
        sm.role("producer", producer, p, t, raw, tile, threads=parts.WARP, warpgroup="producer")
        sm.role("turner", turner, p, t, raw, tile, threads=3 * parts.WARP, warpgroup="producer")
        consumers(sm, p, t, tile)

    return build
