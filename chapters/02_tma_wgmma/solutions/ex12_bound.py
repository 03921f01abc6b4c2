"""# 02.12 Predict the bound

*Difficulty 2 of 3, 15 minutes, needs a laptop*

Which unit of the SM is the busiest, if everything overlaps perfectly? Count one step of the main loop: `consumers`
warpgroups with 64 query rows each meet one block of `tile_n` keys, head dim d, 16-bit inputs, P in registers. Per cycle
(`hopper_sim/machine.py` has the sources):

* the tensor cores do 4096 floating-point operations;
* MUFU computes 16 exponentials;
* shared memory moves 128 bytes. It is read by every WGMMA (both operands, unless one is in registers; each warpgroup reads
  for itself), and written by TMA.

Then the ceiling: the fraction of the tensor cores' peak that this leaves. Check your prediction with the simulator below.
"""


def block_cycles(consumers: int, tile_n: int, head_dim: int) -> tuple[float, float, float]:
    """Cycles that the tensor cores, MUFU and shared memory work for one key block."""
    # region learner
    # tensor cores: two products of rows x tile_n x d. MUFU: one exponential per score. Shared
    # memory: S = Q K^T reads Q and K, O += P V reads V, per warpgroup; TMA writes K and V, once.
    rows = 64 * consumers
    tensor = 2 * 2 * rows * tile_n * head_dim / 4096
    mufu = rows * tile_n / 16
    q, k, v = 64 * head_dim * 2, tile_n * head_dim * 2, tile_n * head_dim * 2
    shared = (consumers * (q + k + v) + k + v) / 128
    return tensor, mufu, shared
    # endregion


def ceiling(consumers: int, tile_n: int, head_dim: int, overlap: bool) -> float:
    """The largest fraction of the tensor cores' peak.

    Args:
        overlap: whether products and exponentials run at the same time; if not, they take turns.
            Shared memory always works beside them.
    """
    # region learner
    # The tensor cores' time over the time of a step.
    tensor, mufu, shared = block_cycles(consumers, tile_n, head_dim)
    step = max(tensor, mufu, shared) if overlap else max(tensor + mufu, shared)
    return tensor / step
    # endregion
