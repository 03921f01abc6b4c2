"""# 02.B5 Released too early

*Difficulty 3 of 3, 15 minutes, needs a laptop*

The product again, and an idea that is good: keep one WGMMA group in flight, so that the tensor cores always have the
next one. `wait_group(1)` leaves the latest group running. On a card, such a kernel can be right in test after test.

1. **Predict** the verdict and write it into `verdict`. Candidates: "read before full", "overwrite before free",
   "operand touched in flight", "accumulator touched in flight", "wgmma never committed", "deadlock".
2. **Check**, and read the verdict on your roles.
3. **Mend** the consumer *and keep the idea*: one group stays in flight. Which slot may be freed after `wait_group(1)`?
   And what is left after the loop?
"""

from fa3_course.checker.protocol import Product, Ring, load_step, store_tile
from hopper_sim import Role


def verdict() -> str:
    """The verdict of the simulated SM on the roles below, as they were handed out."""
    # region learner: return "?"
    # Read the roles and predict, before you check. The task has candidates.
    return "overwrite before free"
    # endregion


async def load(warp: Role, p: Product, ring: Ring) -> None:
    """The producer: one warp. It is right."""
    for i in range(p.steps):
        slot, phase = i % p.stages, i // p.stages % 2
        await ring.empty[slot].wait(phase ^ 1)
        ring.full[slot].arrive_expect_tx(ring.slot_bytes)
        load_step(warp, p, ring, step=i, slot=slot)


async def multiply(wg: Role, p: Product, ring: Ring) -> None:
    """The consumer: one warpgroup."""
    acc = wg.registers("acc", (64, 64))
    acc.write(0.0)
    # region learner
    # One group stays in flight while the next step is waited for. Rings have at least two slots.
    for i in range(p.steps):
        slot, phase = i % p.stages, i // p.stages % 2
        await ring.full[slot].wait(phase)
        wg.wgmma_fence()
        wg.wgmma(acc, ring.a[slot], ring.b[slot].T)
        wg.commit()
        await wg.wait_group(1)
        if i > 0:
            ring.empty[(i - 1) % p.stages].arrive(4)
    await wg.wait_group(0)
    ring.empty[(p.steps - 1) % p.stages].arrive(4)
    # endregion
    await store_tile(wg, p, ring, acc)
