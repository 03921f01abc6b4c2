"""# 02.B3 The last tile is shorter

*Difficulty 2 of 3, 10 minutes, needs a laptop*

The attention of 02.8. Somebody has thought about sequences that are no multiple of `tile_n`: the last block has fewer keys, so
the barrier is told fewer bytes. All lengths of the test were powers of two.

1. **Predict** the verdict for 75 keys in blocks of 32 and write it into `verdict`. Candidates: "read before full",
   "wrong transaction bytes", "misaligned box", "deadlock", "element never written", "roles disagree on the number of tiles".
2. **Check**, and read the verdict on your role.
3. **Mend** it. The consumer is right, and is rung 4's own.
"""

from fa3_course.simulated import parts
from hopper_sim import Role


def verdict() -> str:
    """The verdict of the simulated SM on the roles below, as they were handed out."""
    # region learner: return "?"
    # Read the roles and predict, before you check. The task has candidates.
    return "?"
    # endregion


async def producer(warp: Role, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    """One warp: starts the copies of Q, then of all K and V blocks, the last block first."""
    c, (m, head, batch) = p.config, tile
    parts.load_q(warp, p, t, tile)
    # region learner
    # Per block: wait for the slot, announce the bytes, start the copy; K, then V.
    for i, n in enumerate(p.blocks(m)):
        slot, phase = i % c.stages, i // c.stages % 2
        keys = min(c.tile_n, p.seqlens[1] - n * c.tile_n)
        at, box = (batch, n * c.tile_n, p.kv_head(head), 0), (1, c.tile_n, 1, c.head_dim)
        await t.k_empty[slot].wait(phase ^ 1)
        t.k_full[slot].arrive_expect_tx(keys * c.head_dim * c.element_bytes)
        warp.tma_load(t.k[slot], p.k, at, box, t.k_full[slot])
        await t.v_empty[slot].wait(phase ^ 1)
        t.v_full[slot].arrive_expect_tx(keys * c.head_dim_v * c.element_bytes)
        warp.tma_load(t.v[slot], p.v, at, box, t.v_full[slot])
    # endregion
