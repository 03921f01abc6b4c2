"""# 01.10 Bytes moved, and the roof they put on a GPU

*Difficulty 2 of 3, 15 minutes, needs a laptop*

A kernel that needs F floating-point operations and moves B bytes to and from memory takes at least as long as the
slower of the two. F / B is its arithmetic intensity; the roofline is the speed that it allows.

Count the forward pass, without a mask. Per query head there are two products of sq x sk x d (a multiply and an add
count as two operations; the exponentials are not counted, as everywhere in the literature). Both ways of doing it
read Q, K, V once and write O once. Apart from that:

* eager: writes the scores S (sq x sk per query head), reads them for the softmax, writes the probabilities P, reads
  them for P V, all in the input's precision;
* fused: writes the LSE, 4 bytes per query and query head.
"""


def forward_cost(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    element_bytes: int,
    fused: bool,
) -> tuple[int, int]:
    """Floating-point operations and bytes of one attention forward pass.

    Args:
        batch, seqlen_q, seqlen_k, head_dim: sizes.
        heads, kv_heads: Q and O have `heads` heads, K and V have `kv_heads`.
        element_bytes: of Q, K, V, O, S and P.
        fused: whether S and P stay on the chip.

    Returns:
        operations and bytes.
    """
    # region learner
    # operations; bytes of Q and O, of K and V; then S and P (each written once, read once) or the LSE.
    operations = 2 * 2 * batch * heads * seqlen_q * seqlen_k * head_dim
    queries = batch * seqlen_q * heads
    keys = batch * seqlen_k * kv_heads
    moved = element_bytes * head_dim * (2 * queries + 2 * keys)
    moved += 4 * queries if fused else 4 * element_bytes * queries * seqlen_k
    return operations, moved
    # endregion


def attainable(operations: float, moved: float, peak: float, bandwidth: float) -> float:
    """The roofline: the highest speed that a GPU allows for this amount of work and traffic.

    Args:
        operations, moved: floating-point operations and bytes of the kernel.
        peak: operations per second of the GPU's arithmetic units.
        bandwidth: bytes per second of its memory.

    Returns:
        operations per second.
    """
    # region learner
    # Two ceilings: the arithmetic units, and what the memory can feed.
    return min(peak, operations / moved * bandwidth)
    # endregion
