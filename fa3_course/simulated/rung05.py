"""Rung 5 on the simulated SM: two consumer warpgroups, and registers where the work is.

Adds to rung 4      a second consumer with its own 64 rows; setmaxnreg moves registers from producer to consumers
Look at             both consumers ask for the tensor cores at the same time, and do their softmax at the same time
"""

from fa3_course.simulated import parts, rung04
from hopper_sim import SM, Role


async def producer(warp: Role, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    await warp.setmaxnreg(p.config.producer_registers)
    await rung04.producer(warp, p, t, tile)


async def consumer(wg: Role, me: int, p: parts.Problem, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    await wg.setmaxnreg(p.config.consumer_registers)
    await rung04.consumer(wg, me, p, t, tile)


def build(sm: SM, p: parts.Problem, tile: tuple[int, int, int]) -> None:
    """One CTA: tile_m query rows."""
    t = parts.make_tiles(sm, p)
    sm.role("producer", producer, p, t, tile, threads=parts.WARP)
    for me, name in enumerate(parts.consumer_names(p.config)):
        sm.role(name, consumer, me, p, t, tile)
