"""Which tile comes next: the walk of a persistent CTA over (m_block, head, batch). All its roles take the same steps.

Three walks, by `ForwardConfig`:

    plain       tiles of one head are neighbours, so that they share K and V in L2; CTA i takes i, i + ctas, ...
    pairs       (causal) tiles differ in length: a CTA takes a long one and its short mirror image (the last rows and the
                first, and so on) one after the other; every pair is equally long.
    dynamic     (causal) a warp of each CTA takes the number of the next tile from a counter in global memory. The long ones
                come first, within sections of heads (`heads_of_section`).

A place in the walk is an Int32, `index`: `first()`, then `next(index)` while `index < end`; `tile(index)` says what it is.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fa3_lib.config import ForwardConfig, ceil_div

L2_BYTES = 32 * 2**20  # what the K and V of a section may fill of the 50 MB: Q, O and the next section want some, too
# Wider than this, from so many keys on, all heads are one section (H200, d256: 2 to 5 % faster at 4k to 16k, 2 to 20 % slower below)
WIDE, LONG_WIDE = 128, 4096


@cute.jit
def heads_of_section(config: ForwardConfig, seqlen_k, m_blocks, heads, kv_heads, batch, ctas):
    """Query heads that the dynamic walk keeps together, long tiles first: as many as have their K and V in L2 at once, but a
    tile for each CTA. All arguments but the first are Int32; heads are those of one batch entry."""
    per_head = Int64(seqlen_k) * (config.head_dim + config.head_dim_v) * config.element_bytes
    fitting = cutlass.min(Int32(Int64(L2_BYTES) // per_head), kv_heads * batch)
    section = cutlass.max(fitting * (heads // kv_heads), ceil_div(ctas, m_blocks))
    if const_expr(max(config.head_dim, config.head_dim_v) > WIDE):
        section = heads * batch if seqlen_k >= LONG_WIDE else section
    return section


class Walk:
    """The walk of one kernel. `rows` is queries times pack_gqa, `heads` the query heads divided by pack_gqa."""

    def __init__(self, config: ForwardConfig, rows: Int32, heads: Int32, batch: Int32, section: Int32, mailbox=None):
        self.config = config
        self.m_blocks, self.heads, self.sequences = ceil_div(rows, config.tile_m), heads, heads * batch
        self.section = section  # heads that the dynamic walk keeps together
        self.mailbox = mailbox  # of the dynamic walk
        pairs = config.causal and not config.dynamic
        self.units_per_head = ceil_div(self.m_blocks, 2) if pairs else self.m_blocks
        units = self.units_per_head * self.sequences
        self.end = 2 * units if pairs else units

    @cute.jit
    def first(self) -> Int32:
        cta = cute.arch.block_idx()[0]
        return 2 * cta if const_expr(self.config.causal and not self.config.dynamic) else cta

    @cute.jit
    def next(self, index: Int32, taken: Int32) -> Int32:
        """The place after `index`, before which this warp took `taken` others (the dynamic walk counts phases by it)."""
        ctas = cute.arch.grid_dim()[0]
        following = index
        if const_expr(self.config.dynamic):
            following = self.mailbox.read(taken)
        elif const_expr(self.config.causal):
            # the middle tile of an odd number has no partner
            partner = (index & 1) == 0 and 2 * (index // 2 % self.units_per_head) + 1 < self.m_blocks
            following = index + 1 if partner else (index // 2 + ctas) * 2
        else:
            following = index + ctas
        return following

    @cute.jit
    def tile(self, index: Int32):
        """(m_block, head, batch)."""
        if const_expr(self.config.dynamic):
            section = index // (self.section * self.m_blocks)
            rest = index % (self.section * self.m_blocks)
            heads = cutlass.min(self.section, self.sequences - section * self.section)
            m_block = self.m_blocks - 1 - rest // heads
            sequence = section * self.section + rest % heads
        elif const_expr(self.config.causal):
            unit = index >> 1
            short, sequence = unit % self.units_per_head, unit // self.units_per_head
            m_block = short + (1 - (index & 1)) * (self.m_blocks - 1 - 2 * short)  # even: the long tile of a pair
        else:
            m_block, sequence = index % self.units_per_head, index // self.units_per_head
        return m_block, sequence % self.heads, sequence // self.heads


class Mailbox:
    """One Int32 in shared memory: the scheduler warp posts the next index, every other working warp reads it.

    A single slot: the next tile is taken when the slowest warp begins with the current one, early enough to hide the
    counter's latency, late enough to keep the end of the run balanced.
    """

    def __init__(self, slot: cute.Tensor, full, empty):
        self.slot, self.full, self.empty = slot, full, empty

    @cute.jit
    def read(self, taken: Int32) -> Int32:
        cute.arch.mbarrier_wait(self.full, taken & 1)
        index = cute.arch.make_warp_uniform(self.slot[0])
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty)
        return index

    @cute.jit
    def serve(self, counter: cute.Tensor, end: Int32):
        """The scheduler warp: posts indices until one is past the end; the last CTA to finish resets the counter.

        counter: two Int32 in global memory, 0 before the launch and again after it: tiles handed out, CTAs that are done.
        """
        ctas, slot = cute.arch.grid_dim()[0], self.slot
        if cute.arch.lane_idx() == 0:
            posted, index = Int32(0), Int32(0)
            while index < end:
                cute.arch.mbarrier_wait(self.empty, (posted & 1) ^ 1)
                index = ctas + cute.arch.atomic_add(counter.iterator, Int32(1))
                slot[0] = index
                cute.arch.mbarrier_arrive(self.full)
                posted += 1
            if cute.arch.atomic_add(counter.iterator + 1, Int32(1), sem="acq_rel", scope="gpu") == ctas - 1:
                counter[0] = 0
                counter[1] = 0
