"""# 02.9 Arrivals and registers of rung 5

*Difficulty 2 of 3, 12 minutes, needs a laptop*

Before a kernel with several warpgroups is written, its sums are. Three of them:

* **Arrivals.** An `empty` barrier completes when everybody who reads the slot has arrived. That can be every thread, or one
  thread per warp (after a `__syncwarp`), or one per warpgroup (after a barrier of the warpgroup).
* **The register file.** An SM has 65,536 registers; `setmaxnreg` moves them between warpgroups of 128 threads, in steps of 8,
  from 24 to 256 per thread (a thread can address 255). The producer warpgroup keeps a few, the consumers share the rest.
* **Accumulators.** A consumer thread holds its share of S (64 x tile_n, fp32), of P (64 x tile_n, in the input's
  precision) and of O (64 x d, fp32), and wants at least 24 more registers for everything else.
"""


def empty_arrivals(consumers: int, who: str) -> int:
    """The arrival count of an empty barrier.

    Args:
        consumers: consumer warpgroups that read the slot.
        who: "thread", "warp" or "warpgroup": what arrives once.

    Raises:
        ValueError: another `who`.
    """
    # region learner
    # A warpgroup is 4 warps of 32 threads.
    each = {"thread": 128, "warp": 4, "warpgroup": 1}
    if who not in each:
        raise ValueError(f"who must be thread, warp or warpgroup, got {who!r}")
    return consumers * each[who]
    # endregion


def consumer_registers(consumers: int, producer_registers: int) -> int:
    """The largest count that setmaxnreg can give to the threads of each consumer warpgroup.

    Args:
        consumers: consumer warpgroups, beside one producer warpgroup.
        producer_registers: what each thread of the producer warpgroup keeps.
    """
    # region learner
    # 128 x (producer + consumers x count) <= 65536; a multiple of 8; never more than 256.
    left = 65_536 // 128 - producer_registers
    return min(left // consumers // 8 * 8, 256)
    # endregion


def accumulators(tile_n: int, head_dim: int, element_bytes: int) -> int:
    """32-bit registers that S, P and O need in each of the 128 threads of a consumer."""
    # region learner
    # 64 x columns elements over 128 threads; a register holds 4 bytes.
    score, weight, out = tile_n / 2, tile_n / 2 * element_bytes / 4, head_dim / 2
    return int(score + weight + out)
    # endregion


def widest_tile(consumers: int, producer_registers: int, head_dim: int, element_bytes: int) -> int:
    """The largest tile_n, a multiple of 16 up to 256, that leaves 24 registers; 0 when none does."""
    # region learner
    # Put the functions above together.
    limit = consumer_registers(consumers, producer_registers) - 24
    fitting = [n for n in range(16, 257, 16) if accumulators(n, head_dim, element_bytes) <= limit]
    return max(fitting, default=0)
    # endregion
