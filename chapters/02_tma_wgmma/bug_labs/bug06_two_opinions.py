"""# 02.B6 Two roles, two opinions

*Difficulty 2 of 3, 12 minutes, needs a laptop*

Causal attention. The producer loads only the key blocks that the mask lets through, as it should; whoever wrote it counted
them in the producer itself. Tests with as many queries as keys pass. Then somebody generates text with a cache: 64
queries, 160 keys.

1. **Predict** the verdict for that case and write it into `verdict`. Candidates: "deadlock", "read before full",
   "roles disagree on the number of tiles", "too many arrivals", "element never written", "unbalanced named barrier".
2. **Check**, and read the verdict on your role: who has returned, who still waits, for what?
3. **Mend** it. The mask is aligned bottom-right: query `row` sees keys up to `row + seqlen_k - seqlen_q`.
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
    """One warp: starts the copies of Q, then of the key blocks that the tile's rows see."""
    c, m = p.config, tile[0]
    parts.load_q(warp, p, t, tile)
    # region learner
    # How many key blocks does query tile m read? All of them without a mask. With it, row (m + 1) *
    # tile_m - 1 sees most.
    blocks = -(-p.seqlens[1] // c.tile_n)
    if c.causal:
        blocks = min(blocks, -(-(m + 1) * c.tile_m // c.tile_n))
    for i in range(blocks):
        n = blocks - 1 - i
        slot, phase = i % c.stages, i // c.stages % 2
        await t.k_empty[slot].wait(phase ^ 1)
        parts.load_k(warp, p, t, tile, n, slot)
        await t.v_empty[slot].wait(phase ^ 1)
        parts.load_v(warp, p, t, tile, n, slot)
    # endregion
