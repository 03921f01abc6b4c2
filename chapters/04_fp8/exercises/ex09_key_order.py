"""# 04.9 The order of V's keys

*Difficulty 3 of 3, 15 minutes, needs a laptop*

P leaves the first product as an accumulator and enters the second as an 8-bit A operand. Both lie in registers of the same
four lanes, but not in the same ones. Of 32 keys, lane `q` (0 to 3) holds for its two rows, `r` = 0 and 1:

* **has**: keys `8 j + 2 q + e` for j = 0..3 and e = 0, 1; register `4 j + 2 r + e`;
* **must hold**: positions `16 h + 4 q + b` for h = 0, 1 and b = 0..3, as byte `4 (2 h + r) + b`. A position is a place in
  the sum over keys.

In natural order (key = position) lanes would have to exchange values, for every tile. But a sum does not mind the order of
its terms: let each lane put its own eight keys into its own eight positions, and let V keep its keys in the same order.
Inside a lane, moving a value is a renaming of registers and costs nothing.

Any pair of order and renaming that fit together will do.
"""

import numpy as np


def key_order(keys: int) -> np.ndarray:
    """In which order V's keys must lie.

    Args:
        keys: a multiple of 32; each group of 32 is ordered by itself.

    Returns:
        `(keys,)` whole numbers: element `position` is the key that V keeps there.
    """
    # region learner
    # Take each key apart into group, j, q and e. Which position of lane q does it get?
    raise NotImplementedError("04.9 is yours to write")
    # endregion


def rename(registers: np.ndarray) -> np.ndarray:
    """A lane's accumulator registers in the order of its operand bytes.

    Args:
        registers: `(..., 16)`, what lanes hold of 32 keys and two rows.

    Returns:
        `(..., 16)`: the same values, as each lane's operand wants them.
    """
    # region learner
    # Write a register's number and its byte's number in binary digits. Which of them change places?
    raise NotImplementedError("04.9 is yours to write")
    # endregion
