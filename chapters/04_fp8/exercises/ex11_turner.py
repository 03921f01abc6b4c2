"""# 04.11 Who turns V

*Difficulty 3 of 3, 18 minutes, needs a laptop*

TMA brings V as it lies in memory, head dim contiguous; an 8-bit WGMMA wants keys contiguous. FlashAttention-3 lets the idle
threads of the producer's warpgroup turn each block, from one ring of shared memory into another. You write that role: a
**consumer** of the raw ring and a **producer** of V's ring, whose readers are rung 10's consumers.

    ring       full when                         empty when
    raw        TMA's bytes have arrived          you say so: one arrival on raw.empty[slot]
    V          you say so: t.v_full[slot]        one arrival per consumer warp, on t.v_empty[slot]

* `v = await wg.load_shared(raw.tiles[slot])` gives `(tile_n, dv)`, `await wg.store_shared(t.v[slot], x)` takes `(dv, tile_n)`.
* `order` (position -> key) is where P's registers want the keys: 04.9.
* WGMMA reads through another proxy than ordinary stores write: `wg.fence_async_proxy()`.
* A raw slot is free as soon as it has been read; the next copy may begin while you wait for room in V's ring.
"""

import numpy as np

from fa3_course.simulated import parts, rung10
from hopper_sim import Role


async def turner(wg: Role, p: rung10.Problem8, t: parts.Tiles, raw, tile: tuple[int, int, int]) -> None:
    """Turns the key blocks of one query tile, from the first that is visited to the last."""
    c = p.config
    await wg.setmaxnreg(c.producer_registers)
    order = np.argsort(rung10.register_order(c.tile_n))
    for i in range(len(p.blocks(tile[0]))):
        # region learner
        # Slot and phase; then wait, load, release, wait, store, fence, announce. A slot of V's ring
        # starts out empty: which phase bit passes on a fresh barrier?
        raise NotImplementedError("04.11 is yours to write")
        # endregion
