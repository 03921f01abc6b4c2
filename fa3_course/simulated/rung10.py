"""Rung 10 on the simulated SM: FP8 (e4m3), with V transposed beforehand.

Adds to rung 7      V arrives key-contiguous, since the tensor core reads 8-bit operands only K-major; P goes from
                    accumulator to operand without shuffles because V's keys were stored in P's register order; exponents
                    get an offset of 8, so that P fills e4m3's range; one descale per (batch, KV head)
Option              two_level: PV of a block goes into a fresh accumulator and is added to O in full fp32 (rung 11)
"""

from dataclasses import dataclass, replace

import numpy as np

from fa3_course.simulated import parts, rung07
from fa3_lib.config import WGMMA_M
from hopper_sim import SM, RegisterTile, Role

MAX_OFFSET = 8.0  # P lies in (0, 256]; e4m3 ends at 448
KEY_GROUP = 32  # keys of one 8-bit k-step


@dataclass(frozen=True)
class Problem8(parts.Problem):
    """As `Problem`; q and k e4m3, v e4m3 of shape (b, hk, dv, sk padded) with keys in the order of `register_order`.

    Args:
        q_descale, k_descale, v_descale: (b, hk); the true value is the stored one times the descale.
        two_level, short_accumulator: how PV is accumulated, and whether the model keeps 13 fraction bits only.
    """

    q_descale: np.ndarray = None
    k_descale: np.ndarray = None
    v_descale: np.ndarray = None
    two_level: bool = False
    short_accumulator: bool = True


def register_order(keys: int) -> np.ndarray:
    """position[c]: where key c of an accumulator row lies among the k-positions of the 8-bit A operand of the same threads.

    Within 32 keys, c = 8 j + 2 q + e (thread q of four, element e, n8-group j) goes to 16 (j // 2) + 4 q + 2 (j % 2) + e.
    """
    c = np.arange(keys)
    group, j, q, e = c // KEY_GROUP, c % KEY_GROUP // 8, c % 8 // 2, c % 2
    return KEY_GROUP * group + 16 * (j // 2) + 4 * q + 2 * (j % 2) + e


def transposed_v(v: np.ndarray) -> np.ndarray:
    """(b, sk, hk, dv) -> (b, hk, dv, sk padded to whole groups), keys in register order: what a pre-pass writes."""
    b, sk, hk, dv = v.shape
    padded = np.zeros((b, -(-sk // KEY_GROUP) * KEY_GROUP, hk, dv), dtype=v.dtype)
    padded[:, :sk] = v
    out = np.empty_like(padded)
    out[:, register_order(padded.shape[1])] = padded
    return np.ascontiguousarray(out.transpose(0, 2, 3, 1))


def load_vt(warp: Role, p: Problem8, t: parts.Tiles, tile: tuple[int, int, int], n: int, slot: int) -> None:
    """Starts the copy of a (dv, tile_n) block of the transposed V."""
    _, head, batch = tile
    t.v_full[slot].arrive_expect_tx(p.config.v_bytes)
    at, box = (batch, p.kv_head(head), 0, n * p.config.tile_n), (1, 1, p.config.head_dim_v, p.config.tile_n)
    warp.tma_load(t.v[slot], p.v, at, box, t.v_full[slot])


async def producer(warp: Role, p: Problem8, t: parts.Tiles, tile: tuple[int, int, int]) -> None:
    async def query() -> None:
        parts.load_q(warp, p, t, tile)

    await warp.setmaxnreg(p.config.producer_registers)
    await rung07.load_blocks(warp, p, t, tile, 0, query, load_vt)


async def fold(wg: Role, acc_O: RegisterTile, acc_T: RegisterTile, shrink: np.ndarray) -> None:
    """O = O * shrink + T: one fused multiply-add per element, where rung 7 has one multiplication."""
    acc_O.write(acc_O.read() * shrink + acc_T.read())
    await wg.spend("fold", fma=acc_O.shape[0] * acc_O.shape[1])


async def consumer(wg: Role, me: int, p: Problem8, t: parts.Tiles, tile: tuple[int, int, int], staged) -> None:
    c, (m, head, batch) = p.config, tile
    kv = (batch, p.kv_head(head))
    await wg.setmaxnreg(c.consumer_registers)
    acc_S = wg.registers("S", (WGMMA_M, c.tile_n))
    tOrP = wg.registers("P", (WGMMA_M, c.tile_n), p.q.dtype)
    acc_O = wg.registers("O", (WGMMA_M, c.head_dim_v))
    acc_T = wg.registers("T", (WGMMA_M, c.head_dim_v)) if p.two_level else acc_O
    acc_O.write(0.0)
    rows = parts.OnlineSoftmax(wg, p, m, me, p.scale_log2 * p.q_descale[kv] * p.k_descale[kv], MAX_OFFSET)
    order = np.argsort(register_order(c.tile_n))
    if t.turns:
        mine, next_one = t.turns[me], t.turns[(me + 1) % len(t.turns)]
        if me == 0:
            mine.arrive()

    await t.q_full[0].wait(0)
    blocks = p.blocks(m)
    shrink = np.ones((WGMMA_M, 1), dtype=np.float32)
    for i in range(len(blocks) + 1):  # QK of block i, PV of block i - 1
        slot, phase = i % c.stages, i // c.stages % 2
        last_slot, last_phase = (i - 1) % c.stages, (i - 1) // c.stages % 2
        pair = 0 < i < len(blocks)
        if pair and t.turns:
            await mine.sync()
        if i < len(blocks):
            await t.k_full[slot].wait(phase)
            wg.wgmma_fence()
            wg.wgmma(acc_S, t.q[me], t.k[slot].T, accumulate=False, label="QK", short_accumulator=p.short_accumulator)
            wg.commit()
        if i > 0:
            await t.v_full[last_slot].wait(last_phase)
            wg.wgmma_fence()
            wg.wgmma(
                acc_T,
                tOrP,
                t.v[last_slot].T,
                accumulate=not p.two_level,
                label="PV",
                short_accumulator=p.short_accumulator,
            )
            wg.commit()
        if pair and t.turns:
            next_one.arrive()
        if i < len(blocks):
            await wg.wait_group(1 if i > 0 else 0)
            t.k_empty[slot].arrive(parts.WARPS)
            weights, next_shrink = await rows.step(acc_S.read(), blocks[i])
        if i > 0:
            await wg.wait_group(0)
            t.v_empty[last_slot].arrive(parts.WARPS)
            if p.two_level:
                await fold(wg, acc_O, acc_T, shrink)
        if i < len(blocks):
            tOrP.write(weights[:, order])  # a renaming of registers: no data moves
            shrink = next_shrink
            if not p.two_level:
                await parts.rescale(wg, acc_O, shrink)
    await parts.epilogue(wg, p, staged[me], tile, me, acc_O, rows, p.v_descale[kv])


def build(sm: SM, p: Problem8, tile: tuple[int, int, int]) -> None:
    """One CTA: tile_m query rows. The 16-bit output is twice as wide as Q and has memory of its own."""
    c = p.config
    t = replace(parts.make_tiles(sm, p), turns=parts.make_turns(sm, c))
    v = t.v.reuse("Vt", (c.stages, c.head_dim_v, c.tile_n), p.v.dtype)
    t = replace(t, v=v)
    staged = sm.shared("O", (c.consumer_warpgroups, WGMMA_M, c.head_dim_v), p.out.dtype)
    sm.role("producer", producer, p, t, tile, threads=parts.WARP)
    for me, name in enumerate(parts.consumer_names(c)):
        sm.role(name, consumer, me, p, t, tile, staged)
