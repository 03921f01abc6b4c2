"""Which tile comes next: the walk of a persistent CTA over (m_block, head, batch). All its roles take the same steps.

Three walks, by `ForwardConfig`:

    plain       tiles of one head are neighbours, so that they share K and V in L2; CTA i takes i, i + ctas, ...
    pairs       (causal) tiles differ in length: a CTA takes a long one and its short mirror image (the last rows and the
                first, and so on) one after the other; every pair is equally long.
    dynamic     (causal) a warp of each CTA takes the number of the next tile from a counter in global memory. The long ones
                come first, within sections of heads (`ForwardConfig.heads_of_section`).

A place in the walk is an Int32, `index`: `first()`, then `next(index)` while `index < end`; `tile(index)` says what it is.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fa3_lib.config import ForwardConfig, ceil_div


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
    def ask(self):
        """The warp that loads K and V, once in each tile: the next one is wanted."""
        if const_expr(self.config.dynamic):
            self.mailbox.ask()

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

    The warp that loads K and V asks for it when it comes to the last block of its tile. That is early enough to hide the counter's
    latency. Earlier would be too early: a tile that is taken while its CTA is still busy with a long one waits, although other CTAs
    could have had it (in a model, 6 to 8 % of a causal run at head dim 256).

    Args:
        slot: (1,) Int32.
        full: 1 arrival, the scheduler's.
        empty: one arrival per reading warp.
        wanted: 1 arrival, of the warp that asks.
    """

    def __init__(self, slot: cute.Tensor, full, empty, wanted):
        self.slot, self.full, self.empty, self.wanted = slot, full, empty, wanted

    @cute.jit
    def ask(self):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.wanted)

    @cute.jit
    def read(self, taken: Int32) -> Int32:
        cute.arch.mbarrier_wait(self.full, taken & 1)
        index = cute.arch.make_warp_uniform(self.slot[0])
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty)
        return index

    @cute.jit
    def until_wanted(self, posted: Int32):
        """The scheduler: until the next index is wanted, and `posted` others have been read."""
        cute.arch.mbarrier_wait(self.wanted, posted & 1)
        cute.arch.mbarrier_wait(self.empty, (posted & 1) ^ 1)

    @cute.jit
    def post(self, counter: cute.Tensor) -> Int32:
        """One thread of the scheduler: takes the next index and posts it.

        counter: two Int32 in global memory, 0 before the launch and again after it: tiles handed out, CTAs that are done.
        """
        slot = self.slot
        index = cute.arch.grid_dim()[0] + cute.arch.atomic_add(counter.iterator, Int32(1))
        slot[0] = index
        cute.arch.mbarrier_arrive(self.full)
        return index

    @cute.jit
    def close(self, counter: cute.Tensor):
        """The same thread after an index past the end: the last CTA to finish resets the counter."""
        others = cute.arch.grid_dim()[0] - 1
        if cute.arch.atomic_add(counter.iterator + 1, Int32(1), sem="acq_rel", scope="gpu") == others:
            counter[0] = 0
            counter[1] = 0

    @cute.jit
    def serve(self, counter: cute.Tensor, end: Int32):
        """The scheduler warp: posts indices until one is past the end."""
        if cute.arch.lane_idx() == 0:
            posted, index = Int32(0), Int32(0)
            while index < end:
                self.until_wanted(posted)
                index = self.post(counter)
                posted += 1
            self.close(counter)
