"""# 02.10 Rung 5: two consumers and setmaxnreg

*Difficulty 3 of 3, 15 minutes, needs a laptop*

Two consumer warpgroups with 64 query rows each share every K and V tile: twice the work per copied byte. What changes against
02.8 is who counts. Declare the barriers of the CTA, and let each role ask for the registers that it needs before it uses
them: with three warpgroups a thread starts with 168, too few for the tiles of head dim 128.

The roles' loops are given (`rung04.producer`, `rung04.consumer`), and arrive once per warp. `c` is the configuration:
`c.consumer_warpgroups`, `c.stages`, `c.producer_registers`, `c.consumer_registers`.
"""

from fa3_course.simulated import parts, rung04
from hopper_sim import SM, Role


async def producer(warp: Role, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    """Gives registers back, then loads."""
    # region learner
    # `await warp.setmaxnreg(...)`, then `await rung04.producer(warp, p, t, tile)`.
    raise NotImplementedError("02.10 is yours to write")
    # endregion


async def consumer(wg: Role, me: int, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    """Takes registers, then computes 64 rows."""
    # region learner
    # `await wg.setmaxnreg(...)`, then `await rung04.consumer(wg, me, p, t, tile)`.
    raise NotImplementedError("02.10 is yours to write")
    # endregion


def build(sm: SM, p: parts.Problem, tile: tuple[int, int, int]) -> None:
    """Declares one CTA.

    Args:
        sm: `sm.mbarriers(name, count, arrivals)` makes a ring of barriers, `sm.role(name, body,
            *args, threads=)` a role.
        p: tensors and configuration. tile: (m, head, batch) of the query tile.
    """
    c = p.config
    shared = {
        "q": sm.shared("Q", (c.consumer_warpgroups, 64, c.head_dim), p.q.dtype),
        "k": sm.shared("K", (c.stages, c.tile_n, c.head_dim), p.k.dtype),
        "v": sm.shared("V", (c.stages, c.tile_n, c.head_dim_v), p.v.dtype),
    }
    # region learner
    # t = parts.Tiles(**shared, q_full=..., k_full=..., k_empty=..., v_full=..., v_empty=...), each
    # a ring of barriers (q_full has one). Who arrives on each, how often? Then the roles: a
    # producer of one warp (threads=32), and the consumers, which are told which one they are (me =
    # 0, 1).
    raise NotImplementedError("02.10 is yours to write")
    # endregion
