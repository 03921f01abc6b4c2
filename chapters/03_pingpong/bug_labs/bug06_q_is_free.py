"""# 03.B6 Q is free, is it?

*Difficulty 2 of 3, 12 minutes, needs a laptop*

A persistent CTA again. The next tile's Q could be loaded as soon as the last QK of this tile is done, and so this consumer frees Q there:
`rung07.attend` calls its last argument when Q has been read for the last time. At head dim 256 there is no memory left for the
output, which is staged in Q's place.

1. **Predict** the verdict and write it into `verdict`. Candidates: "race", "overwrite before free", "operand touched in flight",
   "missing proxy fence", "read before full", "wrong phase".
2. **Check**, and read the verdict on your role: who writes where, and what is still on its way?
3. **Mend** it: here, and where the output has memory of its own (`c.own_output`), where the early release is right and worth
   keeping. The barrier counts `c.q_empty_arrivals` arrivals: 4, one per warp, for the early release; 1 otherwise.
"""

from fa3_course.simulated import parts, rung07
from hopper_sim import Role


def verdict() -> str:
    """The verdict of the simulated SM on the roles below, as they were handed out."""
    # region learner: return "?"
    # Read the roles and predict, before you check. The task has candidates.
    return "?"
    # endregion


async def consumer(wg: Role, me: int, p: parts.Problem, t: parts.Tiles, work: list[tuple[int, int, int]]) -> None:
    """Consumer `me` of a persistent CTA: 64 rows of every query tile in `work`."""
    c = p.config
    await wg.setmaxnreg(c.consumer_registers)
    acc_S, acc_O = wg.registers("S", (64, c.tile_n)), wg.registers("O", (64, c.head_dim_v))
    tOrP = wg.registers("P", (64, c.tile_n), p.q.dtype)
    done = 0
    for number, tile in enumerate(work):
        acc_O.write(0.0)
        await t.q_full[me].wait(number % 2)

        # region learner
        # release_q is called when Q has been read for the last time. The epilogue returns when the
        # output has left shared memory.
        def release_q() -> None:
            t.q_empty[me].arrive(c.q_empty_arrivals)

        rows = await rung07.attend(wg, me, p, t, tile[0], done, acc_S, tOrP, acc_O, release_q)
        await parts.epilogue(wg, p, parts.staging(p, t, me), tile, me, acc_O, rows)
        # endregion
        done += len(p.blocks(tile[0]))
