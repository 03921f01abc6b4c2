"""# 02.2 Who holds which element of an accumulator

*Difficulty 2 of 3, 12 minutes, needs a laptop*

The fp32 accumulator of a WGMMA has 64 rows and N columns, and no thread holds a row of it. It is spread over the 128
threads of the warpgroup:

* warp `w` has rows `16 w` to `16 w + 15`;
* in a warp, the four threads of a *quad* share a row: threads `4 g` to `4 g + 3` have rows `g` and `g + 8`;
* of every 8 columns, each thread of the quad has two neighbours: thread 0 has columns 0 and 1, thread 3 has 6 and 7;
* a thread's registers run over these two columns first, then over its two rows, then over the groups of 8 columns.

Write the map in both directions, and then the consequence for softmax: who must exchange values to find a row's maximum.
"""


def owner(row: int, column: int) -> tuple[int, int]:
    """Thread (0..127) and register (0..N/2 - 1) that hold an element."""
    # region learner
    # thread: warp, quad of the row, pair of the column. register: column group, upper or lower row,
    # which of the pair.
    raise NotImplementedError("02.2 is yours to write")
    # endregion


def element(thread: int, register: int) -> tuple[int, int]:
    """Row and column of what a thread holds in a register: the inverse of `owner`."""
    # region learner
    # Take thread and register apart again, digit by digit.
    raise NotImplementedError("02.2 is yours to write")
    # endregion


def partners(thread: int) -> set[int]:
    """The other threads with elements of this thread's rows: it exchanges maxima with them."""
    # region learner
    # The rest of the quad.
    raise NotImplementedError("02.2 is yours to write")
    # endregion
