"""# 03.8 A long tile and its mirror image

*Difficulty 2 of 3, 12 minutes, needs a laptop*

Under a causal mask query tile m of `m_blocks` sees about m + 1 units of keys: the last tile works longest. Persistent CTAs take *pairs*: the
last tile of a sequence and its first, the last but one and the second, and so on. All pairs are equally long. If `m_blocks` is odd, the tile in
the middle is a pair by itself.

Pairs are numbered sequence by sequence, the outermost pair (with the longest tile) first: unit u belongs to sequence u // pairs. CTA c of `ctas` takes units c, c + ctas,
c + 2 ctas, ...; and of each pair the long tile first.
"""

Tile = tuple[int, int]  # m, sequence


def pair(unit: int, m_blocks: int) -> list[Tile]:
    """The one or two tiles of a unit, the long one first."""
    # region learner
    # Which short tile, of which sequence? The long one is its mirror image.
    short, sequence = unit % ((m_blocks + 1) // 2), unit // ((m_blocks + 1) // 2)
    long = m_blocks - 1 - short
    return [(m, sequence) for m in dict.fromkeys((long, short))]
    # endregion


def walk(m_blocks: int, sequences: int, cta: int, ctas: int) -> list[Tile]:
    """The tiles of one CTA, in its order."""
    # region learner
    # All its units, one after the other.
    units = sequences * ((m_blocks + 1) // 2)
    return [tile for unit in range(cta, units, ctas) for tile in pair(unit, m_blocks)]
    # endregion
