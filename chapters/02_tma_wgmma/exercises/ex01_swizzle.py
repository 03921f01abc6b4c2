"""# 02.1 Which byte, which bank

*Difficulty 1 of 3, 8 minutes, needs a laptop*

A tile of 16-bit numbers with 64 columns has rows of 128 bytes, which is exactly one turn around the 32 banks of 4 bytes.
So a whole column lies in the same bank. The 128-byte swizzle moves the 16-byte chunks of a row by the row's number:
bits 4 to 6 of the address are exclusive-ored with bits 7 to 9.

Say where an element lies with this swizzle, and how many turns shared memory needs to serve a set of 16-byte accesses.
"""

from collections.abc import Sequence


def address(row: int, column: int, element_bytes: int) -> int:
    """The byte at which an element of a swizzled tile begins.

    Args:
        row, column: of the element; rows are 128 bytes long, and the tile begins at byte 0.
        element_bytes: 1, 2 or 4.
    """
    # region learner
    # First the byte without a swizzle, b; then exchange its chunk: bits 4..6 ^= bits 7..9.
    raise NotImplementedError("02.1 is yours to write")
    # endregion


def turns(addresses: Sequence[int]) -> int:
    """Turns that 16-byte accesses at these addresses need: a bank serves one 4-byte word per turn.

    Args:
        addresses: multiples of 16; accesses to the same word are served together.
    """
    # region learner
    # The words that are touched; how many of them share the fullest bank? Word w lies in bank w %
    # 32.
    raise NotImplementedError("02.1 is yours to write")
    # endregion
