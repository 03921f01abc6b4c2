"""# 02.B2 The first tile is right

*Difficulty 2 of 3, 12 minutes, needs a laptop*

A CTA that stays for several output tiles (they share A; each has its own 64 rows of B). The ring goes on from tile to tile.
The first tile is always right. The second is right for some k and wrong for others.

1. **Predict** the verdict and write it into `verdict`. Candidates: "read before full", "overwrite before free", "deadlock",
   "wrong phase", "wrong transaction bytes", "roles disagree on the number of tiles".
2. **Check**, and read the verdict on your roles: it names the wait.
3. **Mend** it.
"""

from fa3_course.checker.protocol import Product, Ring, load_step, store_tile
from hopper_sim import Role


def verdict() -> str:
    """What the simulated SM says about the roles below, as they were handed out: the name of a verdict."""
    # region learner: return "?"
    # Read the roles and predict, before you check. The names are in the task, or: [str(kind) for kind in hopper_sim.Kind].
    return "wrong phase"
    # endregion


async def load(warp: Role, p: Product, ring: Ring) -> None:
    """The producer: one warp."""
    # region learner
    # Counts its loads over all tiles.
    count = 0
    for tile in range(p.tiles):
        for step in range(p.steps):
            slot, phase = count % p.stages, count // p.stages % 2
            await ring.empty[slot].wait(phase ^ 1)
            ring.full[slot].arrive_expect_tx(ring.slot_bytes)
            load_step(warp, p, ring, tile, step, slot)
            count += 1
    # endregion


async def multiply(wg: Role, p: Product, ring: Ring) -> None:
    """The consumer: one warpgroup."""
    acc = wg.registers("acc", (64, 64))
    # region learner
    # The same ring, the same order.
    count = 0
    for tile in range(p.tiles):
        acc.write(0.0)
        for _step in range(p.steps):
            slot, phase = count % p.stages, count // p.stages % 2
            await ring.full[slot].wait(phase)
            wg.wgmma_fence()
            wg.wgmma(acc, ring.a[slot], ring.b[slot].T)
            wg.commit()
            await wg.wait_group(0)
            ring.empty[slot].arrive(4)
            count += 1
        await store_tile(wg, p, ring, tile, acc)
    # endregion
