"""# 03.6 The rings go on

*Difficulty 1 of 3, 8 minutes, needs a laptop*

A persistent CTA visits query tiles of different length, and its rings of K and V go on across them: block j of a tile is the
`done + j`-th block that goes through the ring, where `done` counts the blocks of all tiles before it. Slot and phase bit follow.

Say where a block lies. Then say when a kernel that begins every tile at slot 0 and phase 0 would be right all the same: that is how
such a bug survives its tests.
"""

from collections.abc import Sequence


def position(stages: int, lengths: Sequence[int], tile: int, block: int) -> tuple[int, int]:
    """Slot and phase bit (of the full barrier) of block `block` of tile `tile`; `lengths` has the blocks of each tile."""
    # region learner
    # Count what went through the ring before.
    raise NotImplementedError("03.6 is yours to write")
    # endregion


def restart_is_harmless(stages: int, lengths: Sequence[int]) -> bool:
    """Whether every tile that has blocks begins at slot 0 and phase 0 anyway."""
    # region learner
    # Tiles may be empty (length 0). What comes after the last tile does not matter.
    raise NotImplementedError("03.6 is yours to write")
    # endregion
