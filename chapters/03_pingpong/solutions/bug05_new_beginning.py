"""# 03.B5 Every tile is a new beginning

*Difficulty 2 of 3, 12 minutes, needs a laptop*

A persistent CTA walks over query tiles. Its producer counts key blocks without an end, its consumers begin each tile with block 0, as the
kernel did when a CTA had one tile. In the loop, `rung07.attend(..., first, ...)` takes the number of blocks that have gone through the
rings before this tile: it decides slots and phases.

1. **Predict** the verdict for two slots and three tiles of two blocks, and write it into `verdict`. Candidates: "deadlock", "wrong phase",
   "overwrite before free", "read before full", "roles disagree on the number of tiles", "too many arrivals".
2. **Check**, and read the verdict on your role. Why does nothing happen when a tile has four blocks?
3. **Mend** it: for tiles of any length.
"""

from fa3_course.simulated import parts, rung07
from hopper_sim import Role


def verdict() -> str:
    """The verdict of the simulated SM on the roles below, as they were handed out."""
    # region learner: return "?"
    # Read the roles and predict, before you check. The task has candidates.
    return "deadlock"
    # endregion


async def consumer(wg: Role, me: int, p: parts.Problem, t: parts.Tiles, work: list[tuple[int, int, int]]) -> None:
    """Consumer `me` of a persistent CTA: 64 rows of every query tile in `work`."""
    c = p.config
    await wg.setmaxnreg(c.consumer_registers)
    acc_S, acc_O = wg.registers("S", (64, c.tile_n)), wg.registers("O", (64, c.head_dim_v))
    tOrP = wg.registers("P", (64, c.tile_n), p.q.dtype)
    # region learner
    # Each consumer has one slot for Q, whose phase is the number of the tile. What do the rings of K
    # and V go by?
    done = 0
    for number, tile in enumerate(work):
        acc_O.write(0.0)
        await t.q_full[me].wait(number % 2)
        rows = await rung07.attend(wg, me, p, t, tile[0], done, acc_S, tOrP, acc_O)
        await parts.epilogue(wg, p, parts.staging(p, t, me), tile, me, acc_O, rows)
        t.q_empty[me].arrive()
        done += len(p.blocks(tile[0]))
    # endregion
