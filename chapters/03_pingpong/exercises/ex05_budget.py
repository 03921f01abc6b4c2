"""# 03.5 What fits

*Difficulty 2 of 3, 12 minutes, needs a laptop*

A wider key block means fewer rounds, and it costs room twice.

* **Shared memory.** A CTA may use 232,448 bytes: Q and the output (64 rows per consumer), the rings of K and V, and 1,024 bytes for
  barriers and alignment. Elements have 2 bytes. The output takes Q's place, or has memory of its own.
* **Registers.** A thread of one, two or three consumers has 256, 240 or 160. It holds its share of S and O (fp32), and with overlap P of
  the block before (16 bits) beside them; without overlap P takes the place of S. 24 registers must stay free.

The key and value head dims are equal here.
"""


def shared_bytes(head_dim: int, consumers: int, tile_n: int, stages: int, own_output: bool) -> int:
    """Bytes of shared memory of a CTA."""
    # region learner
    # Q, O if it has its own memory, stages of K and V, and 1,024.
    raise NotImplementedError("03.5 is yours to write")
    # endregion


def registers(head_dim: int, tile_n: int, overlap: bool) -> int:
    """32-bit registers of a consumer thread for S, P and O."""
    # region learner
    # A warpgroup of 128 threads shares 64 rows; a register holds 4 bytes.
    raise NotImplementedError("03.5 is yours to write")
    # endregion


def widest(head_dim: int, consumers: int, stages: int, own_output: bool, overlap: bool) -> int:
    """The largest tile_n, a multiple of 16 up to 256, that fits; 0 when none does."""
    # region learner
    # Both limits must hold.
    raise NotImplementedError("03.5 is yours to write")
    # endregion
