"""# 02.B2 The ring wraps around

*Difficulty 1 of 3, 10 minutes, needs a laptop*

The same product as in 02.B1, with both barriers. Here each role keeps its own state, a slot and a phase bit, and advances it
at the end of a step. For as many k-steps as there are slots everything is right.

1. **Predict** the verdict and write it into `verdict`. Candidates: "read before full", "overwrite before free", "deadlock",
   "wrong phase", "wrong transaction bytes", "roles disagree on the number of tiles".
2. **Check**, and read the verdict: it names the wait that passed, and why that meant nothing.
3. **Mend** the roles.
"""

from fa3_course.checker.protocol import Product, Ring, load_step, store_tile
from hopper_sim import Role


def verdict() -> str:
    """The verdict of the simulated SM on the roles below, as they were handed out."""
    # region learner: return "?"
    # Read the roles and predict, before you check. The task has candidates.
    return "wrong phase"
    # endregion


async def load(warp: Role, p: Product, ring: Ring) -> None:
    """The producer: one warp."""
    # region learner
    # Its bit is the one of the phase before: of a fresh barrier, phase 1 counts as complete.
    slot, phase = 0, 1
    for i in range(p.steps):
        await ring.empty[slot].wait(phase)
        ring.full[slot].arrive_expect_tx(ring.slot_bytes)
        load_step(warp, p, ring, step=i, slot=slot)
        slot += 1
        if slot == p.stages:
            slot, phase = 0, phase ^ 1
    # endregion


async def multiply(wg: Role, p: Product, ring: Ring) -> None:
    """The consumer: one warpgroup."""
    acc = wg.registers("acc", (64, 64))
    acc.write(0.0)
    # region learner
    # Its bit begins at 0: the first phase.
    slot, phase = 0, 0
    for _ in range(p.steps):
        await ring.full[slot].wait(phase)
        wg.wgmma_fence()
        wg.wgmma(acc, ring.a[slot], ring.b[slot].T)
        wg.commit()
        await wg.wait_group(0)
        ring.empty[slot].arrive(4)
        slot = (slot + 1) % p.stages
        phase ^= slot == 0
    # endregion
    await store_tile(wg, p, ring, acc)
