"""# 03.B4 A free number

*Difficulty 1 of 3, 10 minutes, needs a laptop*

Ping-pong takes one named barrier per consumer. This kernel has one more: all consumers stage their rows of the output in shared memory,
and consumer 0 stores them together, when everybody is done. It works with two consumers. Then somebody tries
three at head dim 64.

1. **Predict** the verdict with three consumers and write it into `verdict`. Candidates: "deadlock", "unbalanced named barrier",
   "two meanings of one barrier id", "missing proxy fence", "race", "too many arrivals".
2. **Check**, and read the verdict on your function.
3. **Mend** it: for any number of consumers.
"""

from dataclasses import replace

import numpy as np

from fa3_course.simulated import parts, rung07
from hopper_sim import SM, Role


def verdict() -> str:
    """The verdict of the simulated SM on the CTA below, as it was handed out."""
    # region learner: return "?"
    # Read the functions and predict, before you check. The task has candidates.
    return "?"
    # endregion


async def consumer(wg: Role, me: int, p: parts.Problem, t: parts.Tiles, staged, tile: tuple[int, int, int]) -> None:
    """64 rows; `staged` is the barrier at which everybody's rows are in shared memory. It is right."""
    c, (m, head, batch) = p.config, tile
    await wg.setmaxnreg(c.consumer_registers)
    acc_S, acc_O = wg.registers("S", (64, c.tile_n)), wg.registers("O", (64, c.head_dim_v))
    tOrP = wg.registers("P", (64, c.tile_n), p.q.dtype)
    acc_O.write(0.0)
    if me == 0:
        t.turns[0].arrive()  # opens the first turn
    await t.q_full[0].wait(0)
    rows = await rung07.attend(wg, me, p, t, m, 0, acc_S, tOrP, acc_O)

    inverse, lse = rows.finish()
    await wg.store_global(p.lse, (batch, head, m * c.tile_m + 64 * me), lse[None, None])
    await wg.store_shared(t.o[me], acc_O.read() * inverse.astype(np.float32))
    wg.fence_async_proxy()
    if me > 0:
        staged.arrive()
        return
    await staged.sync()
    wg.tma_store(t.o, p.out, (batch, m * c.tile_m, head, 0), (1, c.tile_m, 1, c.head_dim_v))
    wg.commit_store()
    await wg.wait_store(0)


def build(sm: SM, p: parts.Problem, tile: tuple[int, int, int]) -> None:
    """One CTA."""
    c, names = p.config, parts.consumer_names(p.config)
    t = parts.make_tiles(sm, p)
    o = sm.shared("O", (len(names), 64, c.head_dim_v), p.out.dtype)
    # region learner
    # Barrier 1 + i is consumer i's turn: its owner and the consumer before it, 256 threads. Then
    # the barrier of the staged output: the threads of all consumers.
    turns = []
    for i, name in enumerate(names):
        left_over = 128 if i == 0 else 0  # consumer 0 opened its first turn itself
        turns.append(sm.named_barrier(1 + i, 256, f"TURN_WG{i}", by=(names[i - 1], name), left_over=left_over))
    staged = sm.named_barrier(3, 128 * len(names), "STAGED", by=names)
    # endregion
    t = replace(t, turns=turns, o=o)
    sm.role("producer", rung07.producer, p, t, tile, threads=parts.WARP)
    for me, name in enumerate(names):
        sm.role(name, consumer, me, p, t, staged, tile)
