"""Rung 9 on the simulated SM, the protocol of `fa3_lib`'s forward kernel: dynamic tiles, and key blocks without a maximum.

Adds to rung 8      a block that needs no mask keeps the maximum of the blocks before it, and a vote of the warpgroup's
                    threads finds the weights that have grown too large: S is then computed once more, from a K whose slot
                    is still held; with `dynamic`, a scheduler warp takes the next tile from a counter that all CTAs share
                    and posts it in a mailbox of one slot, which every other warp reads: not before the last block of the
                    current tile is loaded, since a tile that waits for its CTA could have been another CTA's
Look at             no row maximum and no rescaling under the products; K is freed behind the vote
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import numpy as np

from fa3_course.simulated import parts
from fa3_lib.config import WARPGROUP, WGMMA_M, ForwardConfig
from hopper_sim import SM, GlobalTensor, RegisterTile, Role, SharedTile
from hopper_sim.barriers import Mbarrier, NamedBarrier

# of one thread's weights of a row in one block: far from the end of P's format, far above what most rows ever reach
LARGEST_SUM = {"f16": 2.0**14, "bf16": 2.0**40}
VOTE, TURN = 1, 4  # named barriers, + consumer

Tile = tuple[int, int, int]  # m, head, batch


@dataclass(frozen=True)
class Problem9(parts.Problem):
    """As `Problem`.

    Args:
        section: heads that are taken together, since their K and V fit in L2; 0 for all of them.
        counter: (2,) i32, of the dynamic walk, 0 before the launch and after it: tiles handed out beyond each CTA's first,
            CTAs that are done.
    """

    section: int = 0
    counter: GlobalTensor = field(default_factory=lambda: GlobalTensor.input("counter", np.zeros(2), "i32"))

    @property
    def end(self) -> int:
        """The number of tiles."""
        return self.m_blocks * self.q.shape[2] * self.q.shape[0]

    def tile(self, index: int) -> Tile:
        """The place `index` of the dynamic walk: within a section the last rows of every head first, since they read most keys."""
        heads, sequences = self.q.shape[2], self.q.shape[2] * self.q.shape[0]
        number, rest = divmod(index, (self.section or sequences) * self.m_blocks)
        first = number * self.section
        together = min(self.section or sequences, sequences - first)
        sequence = first + rest % together
        return self.m_blocks - 1 - rest // together, sequence % heads, sequence // heads


# --- the walk ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mailbox:
    """One number in shared memory: the scheduler posts the next place of the walk, when load_kv asks for it; every other warp reads
    it."""

    slot: SharedTile
    full: Mbarrier
    empty: Mbarrier
    wanted: Mbarrier

    async def read(self, role: Role, taken: int) -> int:
        """The place behind the tile before which `taken` others were taken."""
        await self.full.wait(taken % 2)
        index = int((await role.load_shared(self.slot))[0])
        self.empty.arrive(role.threads // parts.WARP)
        return index


@dataclass(frozen=True)
class Walk:
    """The tiles of one of `ctas` CTAs. mail: None where they are taken by plan."""

    p: Problem9
    cta: int
    ctas: int
    mail: Mailbox | None

    async def tiles(self, role: Role) -> AsyncIterator[tuple[int, Tile]]:
        """(tiles taken before, tile), the same ones for every role."""
        if self.mail is None:
            for taken, tile in enumerate(self.p.walk(self.cta, self.ctas)):
                yield taken, tile
            return
        taken, index = 0, self.cta
        while index < self.p.end:
            yield taken, self.p.tile(index)
            index = await self.mail.read(role, taken)
            taken += 1

    def ask(self) -> None:
        """load_kv, once in each tile: the next one is wanted."""
        if self.mail:
            self.mail.wanted.arrive()


async def scheduler(warp: Role, p: Problem9, walk: Walk) -> None:
    """Posts places until one is past the end; the last CTA to finish resets the counter."""
    await warp.setmaxnreg(p.config.producer_registers)
    mail, index, posted = walk.mail, walk.cta, 0
    while index < p.end:
        await mail.wanted.wait(posted % 2)
        await mail.empty.wait(posted % 2 ^ 1)
        index = walk.ctas + await warp.atomic_add(p.counter, (0,), 1)
        await warp.store_shared(mail.slot, np.array([index]))
        mail.full.arrive()
        posted += 1
    if await warp.atomic_add(p.counter, (1,), 1) == walk.ctas - 1:
        await warp.store_global(p.counter, (0,), np.zeros(2))


# --- loads -------------------------------------------------------------------------------------------------------------


async def load_kv(warp: Role, p: Problem9, t: parts.Tiles, walk: Walk) -> None:
    stages = p.config.stages
    await warp.setmaxnreg(p.config.producer_registers)
    loaded = 0
    async for _, tile in walk.tiles(warp):
        blocks = p.blocks(tile[0])
        if not blocks:
            walk.ask()
        for n in blocks:
            if n == blocks[-1]:
                walk.ask()
            slot, phase = loaded % stages, loaded // stages % 2
            await t.k_empty[slot].wait(phase ^ 1)
            parts.load_k(warp, p, t, tile, n, slot)
            await t.v_empty[slot].wait(phase ^ 1)
            parts.load_v(warp, p, t, tile, n, slot)
            loaded += 1


async def load_q(warp: Role, p: Problem9, t: parts.Tiles, walk: Walk) -> None:
    c = p.config
    await warp.setmaxnreg(c.producer_registers)
    async for taken, (m, head, batch) in walk.tiles(warp):
        for i in range(c.consumer_warpgroups):
            await t.q_empty[i].wait(taken % 2 ^ 1)
            t.q_full[i].arrive_expect_tx(c.q_bytes // c.consumer_warpgroups)
            at, box = (batch, m * c.tile_m + i * WGMMA_M, head, 0), (1, WGMMA_M, 1, c.head_dim)
            warp.tma_load(t.q[i], p.q, at, box, t.q_full[i])


# --- softmax without a maximum -------------------------------------------------------------------------------------------


class KeptMaximum(parts.OnlineSoftmax):
    """The online softmax, which may also leave the maximum as it is.

    Any number near the maximum serves as well: it cancels, and weights above 1 are as exact as those below.
    """

    async def weights(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """P (64, tile_n) with the maximum of earlier blocks, and what each thread adds of it, (row, thread of four)."""
        with np.errstate(over="ignore", invalid="ignore"):
            weights = np.exp2(scores * self.scale_log2 - self.max * self.scale_log2)
            sums = weights.reshape(WGMMA_M, -1, 4, 2).sum(axis=(1, 3), dtype=np.float32)
        await self.wg.spend("softmax", fma=2 * scores.size, mufu=scores.size, alu=scores.size / 2)
        return weights, sums

    def too_large(self, sums: np.ndarray) -> np.ndarray:
        """(row, thread of four): NaN is too large."""
        return ~(sums < LARGEST_SUM[self.p.q.dtype])

    async def raise_max(self, scores: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """Rows of which a thread's sum was too large get their maximum, others keep theirs: a row's bits depend on it alone.

        Returns the factor (64, 1) by which earlier outputs shrink, and shrinks the row sums.
        """
        old, concerned = self.max, self.too_large(sums).any(axis=1, keepdims=True)
        self.max = np.where(concerned, np.fmax(old, scores.max(axis=1, keepdims=True)), old)
        with np.errstate(invalid="ignore"):
            shrink = np.exp2(old * self.scale_log2 - self.max * self.scale_log2)
        self.sum = self.sum * shrink
        await self.wg.spend("softmax", alu=scores.size)
        return shrink

    def add(self, sums: np.ndarray) -> None:
        self.sum = self.sum + sums.sum(axis=1, keepdims=True, dtype=np.float32)


def by_thread(flags: np.ndarray) -> np.ndarray:
    """(row, thread of four) -> the 128 threads of the warpgroup: a thread has rows r and r + 8 of its warp's 16."""
    return flags.reshape(parts.WARPS, 2, 8, 4).any(axis=1).reshape(-1)


async def without_maximum(
    wg: Role,
    t: parts.Tiles,
    rows: KeptMaximum,
    vote: NamedBarrier,
    me: int,
    slot: int,
    last_slot: int,
    acc_S: RegisterTile,
    acc_O: RegisterTile,
) -> np.ndarray:
    """The softmax of a block that every row sees, under the P V of the block before; returns P.

    slot: of this block in the K ring. last_slot: of the block before in the V ring.
    """
    weights, sums = await rows.weights(acc_S.read())
    again = await vote.vote(by_thread(rows.too_large(sums)))
    await wg.wait_group(0)
    t.v_empty[last_slot].arrive(parts.WARPS)
    if again:
        wg.wgmma_fence()
        wg.wgmma(acc_S, t.q[me], t.k[slot].T, accumulate=False, label="QK again")
        wg.commit()
        await wg.wait_group(0)
        shrink = await rows.raise_max(acc_S.read(), sums)
        await parts.rescale(wg, acc_O, shrink)
        weights, sums = await rows.weights(acc_S.read())
    t.k_empty[slot].arrive(parts.WARPS)
    rows.add(sums)
    return weights


# --- consumer ------------------------------------------------------------------------------------------------------------


async def attend(
    wg: Role,
    me: int,
    p: Problem9,
    t: parts.Tiles,
    vote: NamedBarrier,
    m: int,
    first: int,
    acc_S: RegisterTile,
    tOrP: RegisterTile,
    acc_O: RegisterTile,
) -> KeptMaximum:
    """The main loop of one query tile, as rung 7's. first: blocks that earlier tiles have put through the rings."""
    c = p.config
    rows = KeptMaximum(wg, p, m, me, p.scale_log2)
    blocks = p.blocks(m)
    end_unmasked = c.unmasked_key_blocks(m, *p.seqlens, consumer=me)

    for i in range(len(blocks) + 1):  # QK of block i, PV of block i - 1
        slot, phase = (first + i) % c.stages, (first + i) // c.stages % 2
        last_slot, last_phase = (first + i - 1) % c.stages, (first + i - 1) // c.stages % 2
        pair = 0 < i < len(blocks)  # two GEMMs: a turn
        if pair and t.turns:
            await t.turns[me].sync()
        if i < len(blocks):
            await t.k_full[slot].wait(phase)
            wg.wgmma_fence()
            wg.wgmma(acc_S, t.q[me], t.k[slot].T, accumulate=False, label="QK")
            wg.commit()
        else:
            t.q_empty[me].arrive(parts.WARPS)
        if i > 0:
            await t.v_full[last_slot].wait(last_phase)
            wg.wgmma_fence()
            wg.wgmma(acc_O, tOrP, t.v[last_slot], label="PV")
            wg.commit()
        if pair and t.turns:
            t.turns[(me + 1) % len(t.turns)].arrive()

        if pair and blocks[i] < end_unmasked:
            await wg.wait_group(1)
            tOrP.write(await without_maximum(wg, t, rows, vote, me, slot, last_slot, acc_S, acc_O))
            continue
        if i < len(blocks):
            await wg.wait_group(1 if i > 0 else 0)
            t.k_empty[slot].arrive(parts.WARPS)
            weights, shrink = await rows.step(acc_S.read(), blocks[i])
        if i > 0:
            await wg.wait_group(0)
            t.v_empty[last_slot].arrive(parts.WARPS)
        if i < len(blocks):
            tOrP.write(weights)
            await parts.rescale(wg, acc_O, shrink)
    return rows


async def consumer(wg: Role, me: int, p: Problem9, t: parts.Tiles, vote: NamedBarrier, walk: Walk) -> None:
    c = p.config
    await wg.setmaxnreg(c.consumer_registers)
    acc_S = wg.registers("S", (WGMMA_M, c.tile_n))
    tOrP = wg.registers("P", (WGMMA_M, c.tile_n), p.q.dtype)
    acc_O = wg.registers("O", (WGMMA_M, c.head_dim_v))

    if t.turns and me == 0:
        t.turns[0].arrive()  # opens the first turn
    done = 0
    async for taken, tile in walk.tiles(wg):
        acc_O.write(0.0)
        await t.q_full[me].wait(taken % 2)
        rows = await attend(wg, me, p, t, vote, tile[0], done, acc_S, tOrP, acc_O)
        await parts.epilogue(wg, p, t.o[me] if c.own_output else None, tile, me, acc_O, rows, wait=False)
        done += len(p.blocks(tile[0]))
    await wg.wait_store(0)  # shared memory must outlive the last store


def build(sm: SM, p: Problem9, cta: int, ctas: int) -> None:
    """One of `ctas` persistent CTAs."""
    c, names = p.config, parts.consumer_names(p.config)
    t = replace(
        parts.make_tiles(sm, p, loader="load_kv", q_loader="load_q"),
        turns=parts.make_turns(sm, c, TURN),
        q_empty=[sm.mbarrier(f"Q empty[{i}]", c.q_empty_arrivals, by=(name,)) for i, name in enumerate(names)],
        o=sm.shared("O", (c.consumer_warpgroups, WGMMA_M, c.head_dim_v), p.out.dtype) if c.own_output else None,
    )
    walk = Walk(p, cta, ctas, make_mailbox(sm, c) if c.dynamic else None)
    for name, body in (("load_kv", load_kv), ("load_q", load_q)):
        sm.role(name, body, p, t, walk, threads=parts.WARP, warpgroup="producer")
    if c.dynamic:
        sm.role("scheduler", scheduler, p, walk, threads=parts.WARP, warpgroup="producer")
    for me, name in enumerate(names):
        vote = sm.named_barrier(VOTE + me, threads=WARPGROUP, name=f"VOTE_WG{me}", by=(name,))
        sm.role(name, consumer, me, p, t, vote, walk)


def make_mailbox(sm: SM, config: ForwardConfig) -> Mailbox:
    """Free when each warp of the other roles has read it, wanted when load_kv says so."""
    readers = ("load_kv", "load_q", *parts.consumer_names(config))
    return Mailbox(
        sm.shared("mail", (1,), "i32"),
        sm.mbarrier("mail full", 1, by=("scheduler",)),
        sm.mbarrier("mail empty", 2 + parts.WARPS * config.consumer_warpgroups, by=readers),
        sm.mbarrier("mail wanted", 1, by=("load_kv",)),
    )
