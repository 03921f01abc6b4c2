"""# 02.8 Rung 4: a producer, a ring, and who frees a slot

*Difficulty 3 of 3, 20 minutes, needs a laptop*

Two roles now. The **producer**, one warp, keeps a ring of `c.stages` slots full; the **consumer** reads a slot and gives it
back. Each slot of K has two barriers, and each slot of V two of its own:

| barrier | completes a phase when | who waits |
|---|---|---|
| `t.k_full[slot]` | the producer has announced the bytes, and they are in | consumer |
| `t.k_empty[slot]` | the consumer's 4 warps have arrived: `t.k_empty[slot].arrive(parts.WARPS)` | producer |

Write both loops; 02.5 has the phase bits. Free a slot as soon as nobody reads it any more, and not earlier. What does
the consumer need of the tail, when there are more slots than key blocks, or when the last round is not full?
"""

from fa3_course.simulated import parts
from fa3_lib.config import WGMMA_M
from hopper_sim import Role


async def producer(warp: Role, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    """One warp: starts the copies of Q, then of all K and V blocks."""
    parts.load_q(warp, p, t, tile)
    for i, n in enumerate(p.blocks(tile[0])):
        # region learner
        # Slot and phase; wait until the K slot is empty, parts.load_k(warp, p, t, tile, n, slot);
        # the same for V.
        raise NotImplementedError("02.8 is yours to write")
        # endregion


async def consumer(wg: Role, me: int, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    """One warpgroup: 64 query rows, in `t.q[me]`."""
    c, m = p.config, tile[0]
    acc_S = wg.registers("S", (WGMMA_M, c.tile_n))
    tOrP = wg.registers("P", (WGMMA_M, c.tile_n), p.q.dtype)
    acc_O = wg.registers("O", (WGMMA_M, c.head_dim_v))
    acc_O.write(0.0)
    rows = parts.OnlineSoftmax(wg, p, m, me, p.scale_log2)

    await t.q_full[0].wait(0)
    for i, n in enumerate(p.blocks(m)):
        # region learner
        # As in 02.7, but the copies are the producer's: wait for a slot, multiply from it, free it.
        # Q lies in t.q[me].
        raise NotImplementedError("02.8 is yours to write")
        # endregion
    await parts.epilogue(wg, p, parts.staging(p, t, me), tile, me, acc_O, rows)
