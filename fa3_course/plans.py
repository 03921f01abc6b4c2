"""Plans of a persistent kernel: which CTA takes which query tile, judged by balance and by what L2 has to hold.

A plan is a function of the work and the number of CTAs; it returns each CTA's tiles in order. The model knows that a tile takes
as long as it has key blocks, and nothing else.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from fa3_lib.config import ForwardConfig

Tile = tuple[int, int]  # head (counted over the batch), key blocks


@dataclass(frozen=True)
class Work:
    """Query tiles of one call: `lengths[m]` key blocks for tile m of every head, and the bytes of one head's K and V."""

    heads: int
    lengths: tuple[int, ...]
    kv_bytes: int


def causal_work(config: ForwardConfig, seqlen: int, tokens: int = 16_384, hidden: int = 2048) -> Work:
    """Self-attention of the paper's benchmark: `tokens` in all, heads x head_dim = `hidden`; masked as `config` says."""
    heads = max(tokens // seqlen, 1) * (hidden // config.head_dim)
    m_blocks = -(-seqlen // config.tile_m)
    lengths = tuple(config.key_blocks(m, seqlen, seqlen) for m in range(m_blocks))
    return Work(heads, lengths, seqlen * (config.head_dim + config.head_dim_v) * config.element_bytes)


def as_they_come(work: Work, ctas: int) -> list[list[Tile]]:
    """Tile i goes to CTA i modulo their number."""
    tiles = [(head, n) for head in range(work.heads) for n in work.lengths]
    return [tiles[cta::ctas] for cta in range(ctas)]


def sections(work: Work, ctas: int, size: int = 4) -> list[list[Tile]]:
    """Sorted by length within sections of `size` heads; dealt in rounds, every other round backwards."""
    tiles: list[Tile] = []
    for first in range(0, work.heads, size):
        section = [(head, n) for head in range(first, min(first + size, work.heads)) for n in work.lengths]
        tiles += sorted(section, key=lambda tile: -tile[1])
    plan: list[list[Tile]] = [[] for _ in range(ctas)]
    for i, tile in enumerate(tiles):
        turn, cta = divmod(i, ctas)
        plan[cta if turn % 2 == 0 else ctas - 1 - cta].append(tile)
    return plan


def all_heads(work: Work, ctas: int) -> list[list[Tile]]:
    """The same with one section: all tiles sorted by length."""
    return sections(work, ctas, work.heads)


def mirror_pairs(work: Work, ctas: int) -> list[list[Tile]]:
    """A long tile, then its short mirror image: the last and the first of a head, the last but one and the second, ..."""
    count = len(work.lengths)
    pairs = []
    for head in range(work.heads):
        for short in range((count + 1) // 2):
            both = dict.fromkeys((count - 1 - short, short))  # the middle tile of an odd number has no partner
            pairs.append([(head, work.lengths[m]) for m in both])
    return [[tile for pair in pairs[cta::ctas] for tile in pair] for cta in range(ctas)]


def by_counter(work: Work, ctas: int, section: int, ahead: bool = False) -> list[list[Tile]]:
    """A counter in memory hands the next tile to the CTA that asks first; longest first within sections of heads.

    A CTA asks when it is free or, with `ahead`, already when it begins the tile before, and then keeps the next one waiting.
    """
    plan: list[list[Tile]] = [[] for _ in range(ctas)]
    until, asks = [0] * ctas, [(0, cta) for cta in range(ctas)]
    for first in range(0, work.heads, section):
        heads = range(first, min(first + section, work.heads))
        for head, n in ((head, n) for n in sorted(work.lengths, reverse=True) for head in heads):
            cta = asks[0][1]
            plan[cta].append((head, n))
            begin = until[cta]
            until[cta] = begin + n
            heapq.heapreplace(asks, (begin if ahead else until[cta], cta))
    return plan


def whoever_is_free(work: Work, ctas: int) -> list[list[Tile]]:
    """Tiles from a counter, head by head."""
    return by_counter(work, ctas, section=1)


PLANS: dict[str, Callable[[Work, int], list[list[Tile]]]] = {
    "as they come": as_they_come,
    "sorted in sections of 4 heads": sections,
    "all heads sorted": all_heads,
    "a long tile and its mirror image": mirror_pairs,
    "whoever is free (counter)": whoever_is_free,
}


def balance(plan: list[list[Tile]]) -> float:
    """Share of the CTAs' time that is work, until the last one ends."""
    loads = [sum(n for _, n in tiles) for tiles in plan]
    return sum(loads) / len(loads) / max(loads)


def bytes_in_flight(plan: list[list[Tile]], work: Work) -> float:
    """Bytes of K and V that the tiles of one round ask for, as a mean over the rounds."""
    rounds = max(map(len, plan))
    heads = [len({tiles[r][0] for tiles in plan if r < len(tiles)}) for r in range(rounds)]
    return sum(heads) / rounds * work.kv_bytes
