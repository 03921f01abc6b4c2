"""# 03.7 Waves

*Difficulty 1 of 3, 10 minutes, needs a laptop*

Equal query tiles are dealt to the SMs in rounds, one CTA per SM. The last round takes as long as any other, however few tiles it has: that
is *wave quantisation*. Taller tiles are fewer tiles; shorter ones fill the last round better, but each tile has a start and an end
that cost time, too.
"""


def rounds(tiles: int, sms: int) -> int:
    """Rounds until all tiles are done."""
    # region learner
    # The last round may be nearly empty.
    return -(-tiles // sms)
    # endregion


def at_work(tiles: int, sms: int) -> float:
    """Share of the SMs' time that is work, of all rounds together; 1 when there are no tiles."""
    # region learner
    # Tiles over the room for tiles.
    return tiles / (rounds(tiles, sms) * sms) if tiles else 1.0
    # endregion


def tile_rows(queries: int, sequences: int, sms: int, overhead: float) -> int:
    """The tile height, 64, 128 or 192 rows, that is done first; of equally good ones the tallest.

    Args:
        queries: rows of each sequence; a tile never holds rows of two. sequences: heads times batch.
        overhead: a tile of r rows takes r + overhead units of time, also where some of its rows do not exist.
    """

    # region learner
    # Time of each height: rounds times the time of a tile.
    def time(rows: int) -> float:
        return rounds(sequences * -(-queries // rows), sms) * (rows + overhead)

    return min((192, 128, 64), key=time)
    # endregion
