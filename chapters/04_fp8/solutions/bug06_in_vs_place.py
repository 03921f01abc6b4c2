"""# 04.B6 Where V was

*Difficulty 2 of 3, 12 minutes, needs a laptop*

The output has 16 bits and is twice as large as Q: in Q's place it would cover somebody else's. So this kernel stages it where V was, as
FA3 does: with 128 keys per block, each consumer's 64 rows of O fit into one slot of the ring. A consumer that gets there has seen its last PV end.
`everybody` is a named barrier of all consumers, not used yet.

1. **Predict** the verdict on two consumers and two key blocks, and write it into `verdict`. Candidates: "race", "overwrite before free", "operand touched in flight",
   "missing proxy fence", "read before full", "element written twice".
2. **Check**, and read the verdict on your role: who still reads what?
3. **Mend** it: in V's place.
"""

from fa3_course.simulated import parts, rung10
from hopper_sim import Role


def verdict() -> str:
    """The verdict of the simulated SM on the roles below, as they were handed out."""
    # region learner: return "?"
    # Read the roles and predict, before you check. The task has candidates.
    return "overwrite before free"
    # endregion


async def finish(
    wg: Role, me: int, p: rung10.Problem8, t: parts.Tiles, everybody, tile: tuple[int, int, int], acc_O, rows
) -> None:
    """Consumer `me` after its last PV: O to global memory, through the memory of V's slot `me`."""
    kv = (tile[2], p.kv_head(tile[1]))
    # region learner
    # Slot `me` of V's ring has room for the 64 rows. Who may still be busy with it?
    staged = t.v[me].reuse(f"O[{me}]", (64, p.config.head_dim_v), p.out.dtype)
    await everybody.sync()
    await parts.epilogue(wg, p, staged, tile, me, acc_O, rows, p.v_descale[kv])
    # endregion
