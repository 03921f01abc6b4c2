"""# 02.B1 Two buffers and no way to say "free"

*Difficulty 2 of 3, 12 minutes, needs a laptop*

The double buffer of many articles: two slots in turn, "while we multiply from one, TMA fills the other". C = A B^T in
k-steps of 64; the producer announces the bytes, the consumer waits for them. With at most two k-steps it is right, and
with more it looks right as long as nobody is late.

1. **Predict** the verdict of the simulated SM and write it into `verdict`. Candidates: "read before full", "overwrite
   before free", "deadlock", "wrong phase", "too many arrivals", "race".
2. **Check**: you see whether you were right, and what it says about your roles, with the line.
3. **Mend** the roles. `ring.empty[slot]` is there, takes one arrival per warp of the consumer (4), and nobody uses it yet.
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
    """The producer: one warp."""
    # region learner
    # Slots in turn; announce the bytes of A and B, start both copies.
    for i in range(p.steps):
        slot, phase = i % p.stages, i // p.stages % 2
        await ring.empty[slot].wait(phase ^ 1)
        ring.full[slot].arrive_expect_tx(ring.slot_bytes)
        load_step(warp, p, ring, step=i, slot=slot)
    # endregion


async def multiply(wg: Role, p: Product, ring: Ring) -> None:
    """The consumer: one warpgroup."""
    acc = wg.registers("acc", (64, 64))
    acc.write(0.0)
    # region learner
    # Wait for the bytes, multiply.
    for i in range(p.steps):
        slot, phase = i % p.stages, i // p.stages % 2
        await ring.full[slot].wait(phase)
        wg.wgmma_fence()
        wg.wgmma(acc, ring.a[slot], ring.b[slot].T)
        wg.commit()
        await wg.wait_group(0)
        ring.empty[slot].arrive(4)
    # endregion
    await store_tile(wg, p, ring, acc)
