"""V turned inside the FP8 kernel: from (keys, columns), as it lies in memory, to the contiguous keys that WGMMA takes of 8 bits.

TMA brings V as it lies into a ring of its own. Two warps of the producer's warpgroup move it into the ring that the consumers
read, in the order of `quantize.transpose_v`, 32 keys x 16 columns at a time:

    ldmatrix.trans   of pairs of bytes, two columns of one key; the four 8 x 8 matrices are keys 0.., 8.., 16.., 24... Lane
                     4 c + quad gets columns 2 c and 2 c + 1 of keys 8 m + 2 quad + e in register m
    prmt             takes apart the columns of registers 0 and 1 (half 0), and of 2 and 3: the four bytes of a column are keys
                     16 half + 8 j + 2 quad + e at position 4 quad + 2 j + e of the half, P's order
    stmatrix         of rows of 16 bytes: one column, one half

Neither has a bank conflict. A matrix of ldmatrix is 8 neighbouring rows of a swizzled tile. One of stmatrix would be every
second row, whose swizzles repeat after 4: so lanes with c >= 4 put their odd column where the others put their even one, and
its rows are 0, 2, 4, 6, 9, 11, 13, 15, with 8 different swizzles.

The scheduler of a dynamic walk, whose warp turns V here, is the warp that loads Q.
"""

import cutlass
import cutlass.cute as cute
import cutlass.cute.nvgpu as nvgpu
from cutlass import BFloat16, Int32

from fa3_lib.fp8_config import KEY_GROUP, TURNING_WARPS, Fp8Config
from fa3_lib.loads import Ring
from fa3_lib.walk import Mailbox, Walk

COLUMNS = 16  # of one move
BATCH, WIDE_BATCH = 4, 3  # moves of a warp whose loads are in flight together, 4 registers each; with V wider than 128
EVEN_BYTES, ODD_BYTES = 0x6420, 0x7531  # prmt's selectors
WRITTEN = ((0, 0), (0, 1), (1, 0), (1, 1))  # (which of a lane's two selectors, half) of each register of stmatrix


class Turner:
    """One of the warps that turn V, `warp` 0 or 1: it moves every second 16 columns.

    `raw`, the ring that TMA fills, has its bytes at `source` in `raw_layout`, `(dv, tile_n, stage)` with contiguous columns; V has
    them at `target` in `layout`, the same with contiguous keys and perhaps more rows.
    """

    def __init__(
        self, config: Fp8Config, walk: Walk, scores, raw: Ring, V: Ring, source, raw_layout, target, layout, warp
    ):
        self.config, self.walk, self.scores, self.raw, self.V = config, walk, scores, raw, V
        self.source, self.target, self.layouts = source, target, (raw_layout, layout)
        self.batch = KEY_GROUP * (WIDE_BATCH if config.head_dim_v > 128 else BATCH)
        self.raw_bytes, self.v_bytes = cute.cosize(raw_layout) // raw.stages, cute.cosize(layout) // V.stages
        lane = cute.arch.lane_idx()
        self.lane_source = Int32(place(raw_layout, *read_by(lane, warp)))
        self.lane_target = Int32(place(layout, *written_by(lane, warp)))
        selector = EVEN_BYTES + (ODD_BYTES - EVEN_BYTES) * (lane // 16)
        self.selectors = selector, selector ^ (EVEN_BYTES ^ ODD_BYTES)

    @cute.jit
    def run(self):
        """All tiles of the walk, block by block as they are loaded."""
        turned, taken, index = Int32(0), Int32(0), self.walk.first()
        while index < self.walk.end:
            m_block, _, _ = self.walk.tile(index)
            first, end = self.scores.key_range(m_block)
            for j in cutlass.range(end - first, unroll=1):
                self.turn(turned + j)
            turned += cutlass.max(end - first, 0)
            index = self.walk.next(index, taken)
            taken += 1

    @cute.jit
    def turn(self, block: Int32):
        self.raw.wait(block)
        self.V.acquire(block)
        source = self.raw.stage(block) * self.raw_bytes + self.lane_source
        target = self.V.stage(block) * self.v_bytes + self.lane_target
        # unrolled, it would have more addresses alive than there are registers
        for column in cutlass.range(0, self.config.head_dim_v, COLUMNS * TURNING_WARPS, unroll=1):
            self.turn_columns(source, target, column)
        # what these threads wrote, WGMMA will read; what they read has come, since they wrote it
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.V.fill(block)
        self.raw.release(block)

    @cute.jit
    def turn_columns(self, source: Int32, target: Int32, column: Int32):
        """All keys of 16 columns."""
        raw_layout, layout = self.layouts
        source, target = moved(source, place(raw_layout, column, 0)), moved(target, place(layout, column, 0))
        for start in cutlass.range_constexpr(0, self.config.tile_n, self.batch):
            groups = range(start, min(start + self.batch, self.config.tile_n), KEY_GROUP)
            words = [self.read(moved(source, place(raw_layout, 0, key))) for key in groups]
            for i in cutlass.range_constexpr(len(words)):
                self.write(words[i], moved(target, place(layout, 0, groups[i])))

    def read(self, source: Int32) -> cute.Tensor:
        """A lane's four registers."""
        load = cute.make_copy_atom(nvgpu.warp.LdMatrix8x8x16bOp(True, 4), BFloat16)
        pairs = cute.make_rmem_tensor(((8,), 1), BFloat16)
        cute.copy(load, matrix_row(self.source, source), pairs)
        return cute.recast_tensor(pairs, Int32)

    def write(self, words: cute.Tensor, target: Int32):
        store = cute.make_copy_atom(nvgpu.warp.StMatrix8x8x16bOp(False, 4), BFloat16)
        pairs = cute.make_rmem_tensor(((8,), 1), BFloat16)
        turned = cute.recast_tensor(pairs, Int32)
        for i, (selector, half) in enumerate(WRITTEN):
            turned[i] = Int32(cute.arch.prmt(words[2 * half], words[2 * half + 1], self.selectors[selector]))
        cute.copy(store, pairs, matrix_row(self.target, target))


def read_by(lane, warp):
    """(column, key) of the 16 bytes that `lane` names to ldmatrix, in its warp's first move."""
    return COLUMNS * warp, lane


def written_by(lane, warp):
    """(column, position of the key) of the 16 bytes that `lane` names to stmatrix, in its warp's first move."""
    odd, half = ((lane >> 2) ^ (lane >> 4)) & 1, (lane >> 3) & 1
    return COLUMNS * warp + 2 * (lane % 8) + odd, KEY_GROUP // 2 * half


def place(layout: cute.ComposedLayout, column, key):
    """The byte of a column and key in the layout's first stage. Its swizzle changes address bits 4.. by bits 7.., which are the
    same in all stages."""
    swizzle = layout.inner
    if (swizzle.num_base, swizzle.num_shift) != (4, 3):
        raise ValueError(f"{layout}: a swizzle of 16-byte pieces in rows of 128 bytes is expected")
    byte = cute.crd2idx((column, key, 0), layout.outer)
    byte = byte if isinstance(byte, int) else Int32(byte)
    return byte ^ ((byte >> 3) & (((1 << swizzle.num_bits) - 1) << 4))


def moved(byte, by):
    """The place of a sum of columns and keys, of which no two have a bit of the unswizzled place in common. What the swizzle makes
    of them meets in bits 4 to 6 alone: the rest can be an immediate of the instruction."""
    return (byte ^ (by & 0x70)) + (by & ~0x70)


def matrix_row(memory: cute.Pointer, byte: Int32) -> cute.Tensor:
    """16 bytes as ldmatrix and stmatrix take them."""
    pointer = cute.recast_ptr(memory + cute.assume(byte, divby=16), dtype=BFloat16)
    return cute.make_tensor(pointer, cute.make_layout(((8,), 1)))


class Scheduler(Mailbox):
    """The writer's side of the mailbox, for a warp that walks as well: to read the next index is to post it."""

    def __init__(self, slot: cute.Tensor, full, empty, wanted, counter: cute.Tensor):
        super().__init__(slot, full, empty, wanted)
        self.counter = counter

    @cute.jit
    def read(self, taken: Int32) -> Int32:
        index = Int32(0)
        self.until_wanted(taken)
        if cute.arch.lane_idx() == 0:
            index = self.post(self.counter)
        return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(index, 0))

    @cute.jit
    def finish(self):
        """After the walk."""
        if cute.arch.lane_idx() == 0:
            self.close(self.counter)
