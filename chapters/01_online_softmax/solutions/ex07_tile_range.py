"""# 01.7 Which tiles does a causal query tile read?

*Difficulty 2 of 3, 15 minutes, needs a laptop*

Causal attention needs half of the score matrix, and the tiles above the diagonal are not computed at all. Of the
tiles that are, most lie wholly below the diagonal and need no mask; only those that the diagonal cuts, and a last
tile that reaches past the keys, pay for one. A kernel therefore needs two numbers per query tile before its loop
begins.

The mask is aligned bottom-right: the last query sees the last key, so query i sees the keys `j <= i + seqlen_k -
seqlen_q`. With more queries than keys the first queries see nothing.

    seqlen_q = 4, seqlen_k = 6         seqlen_q = 5, seqlen_k = 2
      1 1 1 0 0 0                        0 0
      1 1 1 1 0 0                        0 0
      1 1 1 1 1 0                        0 0
      1 1 1 1 1 1                        1 0
                                         1 1
"""


def key_tiles(m_tile: int, tile_m: int, tile_n: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """How many key tiles a causal query tile reads, and how many of those need no mask.

    Args:
        m_tile: index of the query tile; it holds the queries `m_tile * tile_m <= i < (m_tile + 1) * tile_m` that
            exist (the last tile may reach past seqlen_q).
        tile_m, tile_n: queries of a query tile, keys of a key tile.
        seqlen_q, seqlen_k: number of queries and keys, 1 or more; neither needs to be a multiple of its tile.

    Returns:
        tiles: key tiles 0 .. tiles - 1 hold every key that some query of the tile sees (0 when none sees any).
        unmasked: key tiles 0 .. unmasked - 1 are full of keys, and every query of the tile sees all of them.
    """
    # region learner
    # How many keys does the LAST query of the tile see? And the FIRST? Round the one up to tiles, the other down.
    last = min((m_tile + 1) * tile_m, seqlen_q) - 1
    first = m_tile * tile_m
    seen_by_last = min(max(last + 1 + seqlen_k - seqlen_q, 0), seqlen_k)
    seen_by_first = min(max(first + 1 + seqlen_k - seqlen_q, 0), seqlen_k)
    return -(-seen_by_last // tile_n), seen_by_first // tile_n
    # endregion
