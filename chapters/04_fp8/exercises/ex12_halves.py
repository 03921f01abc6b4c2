"""# 04.12 Room for T

*Difficulty 2 of 3, 12 minutes, needs a laptop*

Two-level accumulation costs no instruction, but registers: while `T = P V` is in flight, S of the next block, P, O *and* T are
alive. A thread of one, two or three consumers has 256, 240 or 160 registers, and 24 must stay free for the rest. A warpgroup of
128 threads shares 64 rows; S, O and T are fp32, P has 8 bits.

Where T does not fit beside O, P V is computed in **parts**: `columns` of O at a time, each part added to O before the next one
starts in the same registers. P lies in registers, so a second pass over it costs no shared memory. But a WGMMA narrower than 64
columns does not run at full rate: `columns` is 64, 128, 192 or 256, and divides the head dim.
"""


def registers(head_dim: int, tile_n: int, columns: int) -> int:
    """32-bit registers of a consumer thread for S, P, O and T.

    Args:
        columns: of O, that T holds; 0 for one level, without T.
    """
    # region learner
    # Elements of 64 rows over 128 threads; a register holds 4 bytes.
    raise NotImplementedError("04.12 is yours to write")
    # endregion


def widest_part(head_dim: int, consumers: int, tile_n: int) -> int:
    """The most columns that T may have, 0 when not even 64 fit: the fewer parts, the fewer waits.

    Args:
        head_dim: 64, 128, 192 or 256.
    """
    # region learner
    # Largest first; a part divides the head dim.
    raise NotImplementedError("04.12 is yours to write")
    # endregion


def widest_tile(head_dim: int, consumers: int, columns: int, stages: int) -> int:
    """The most keys per block, a multiple of 32 up to 256; 0 when none fits.

    Shared memory is a limit as well: 232,448 bytes for Q, K and V (1 byte per element; K and V in `stages` slots), the output
    (64 rows per consumer, 2 bytes, memory of its own), and 1,024 bytes for barriers and alignment.

    Args:
        columns: of T; 0 for one level.
    """
    # region learner
    # Both limits must hold. Q and O have 3 bytes per element together.
    raise NotImplementedError("04.12 is yours to write")
    # endregion
