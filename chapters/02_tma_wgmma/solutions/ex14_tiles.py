"""# 02.14 Choose stages and tiles, on the card

*Difficulty 2 of 3, 15 minutes, needs a Hopper GPU*

Rung 5 has two knobs that are free: how many keys a step takes (`tile_n`) and how many slots the rings have (`stages`: 1, 2,
4 or 8). Wider tiles mean fewer steps and fewer waits, more registers, and more shared memory per slot. Both budgets of 02.9
and of `ForwardConfig.budget()` must hold. Write down what you expect to be fastest at head dims 64, 128 and 256, then
change your mind with the measurements of the "Try it" cell below.

The check compiles your choice, compares its numbers with the fp64 truth, and measures it beside the rung's own choice in
one run: it may be 10 % slower, not more.
"""


def choose(head_dim: int) -> tuple[int, int]:
    """Stages and tile_n for rung 5, 16-bit, no mask.

    Args:
        head_dim: 64, 128 or 256.
    """
    # region learner
    # Two stages let a copy run under the work on the other slot. tile_n: as wide as registers and
    # shared memory allow.
    return 2, {64: 128, 128: 128, 256: 80}[head_dim]
    # endregion
