# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Chapter 2, sitting a: TMA, mbarriers, WGMMA
#
# *60 to 90 minutes. Runs on any laptop (kernels are compiled and looked into where CuTe DSL has wheels: Linux); a Hopper is used if there is one.*
#
# Chapter 1 ended at a bound: a kernel that waits for each of its steps cannot pass a certain share of the tensor cores' peak.
# Hopper has hardware for not waiting. Copies are made by a unit of their own (TMA), products by another (the tensor cores,
# through WGMMA), and both work while the threads that started them do something else. The price is that *you* must now say when
# something is finished. This sitting is about those parts, one by one: where bytes lie, who copies them, how
# one knows that they have arrived, who multiplies them. At the end stands a small matrix product that uses them all.
# Sitting b ([`lesson_b.ipynb`](lesson_b.ipynb)) builds attention from them.
#
# Two ways to try things, here as in the rest of the course:
#
# * **the simulated SM** (`hopper_sim`): roles are `async` Python functions, tiles are NumPy arrays, time is counted in cycles, and a
#   mistake gets a verdict in words;
# * **the kernel**: CuTe DSL, NVIDIA's Python for exactly this hardware. It compiles on a laptop, too, and we read the machine code.

# %%
import importlib.util
import os
import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import display

from fa3_course import layouts, lesson_views, plots, results, rungs, sass, timeline
from hopper_sim import HOPPER, SM, Fault, GlobalTensor, launch, patched

plots.use_style()
HAS_CUTE = importlib.util.find_spec("cutlass") is not None
SEED = np.random.SeedSequence().entropy % 2**32
rng = np.random.default_rng(SEED)  # fresh inputs in every run; to repeat one, write its seed here
print(f"seed {SEED}; CuTe DSL {'is here' if HAS_CUTE else 'has no wheels for this system: its cells say so and go on'}")


def reveal(what, guess, value, unit=""):
    """Shows a value beside the reader's guess."""
    told = "no guess yet" if guess is None else f"you said {guess:g}"
    print(f"{what}: {value:,.4g} {unit} ({told})")


# %% [markdown]
# ## 1. One number that hurts
#
# Here is the work of one step of attention's loop at head dim 128: 128 query rows against 128 keys, that is two products of 128 x 128 x
# 128, and two tiles of 32 KiB (K and V) that have to come from memory. Rung 2, our Triton kernel, can be compiled for an
# Ampere card, whose way was: every thread copies 16 bytes per instruction (`cp.async`), a warp collects fragments in its registers
# (`ldmatrix`), a warp multiplies 16 x 8 x 16 (`mma.sync`). How many instructions does each of its warps spend on copying,
# collecting and multiplying, for one such step?

# %%
guess = None  # instructions per warp for one 128 x 128 step

# %%
TARGET = """
import sys
import triton.backends.compiler as backends
target = backends.GPUTarget
backends.GPUTarget = lambda *_: target("cuda", int(sys.argv[1]), 32)  # the same kernel for another card
from fa3_course.commands.sass import triton_cubin
sys.stdout.buffer.write(triton_cubin("2", 128, False, "bf16"))
"""


def rung2_for(arch):
    """Machine code of rung 2 for a card, compiled in a process of its own: here Triton may be an interpreter already."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", TARGET, str(arch)], capture_output=True, env=environment)
    done.check_returncode()
    return sass.cubin_report(done.stdout)[0]


NAMES = ("LDGSTS", "LDSM", "HMMA", "HGMMA", "UTMALDG")
kernels = {}
if importlib.util.find_spec("triton"):
    kernels |= {"rung 2 for Ampere": rung2_for(80), "rung 2 for Hopper": rung2_for(90)}
if HAS_CUTE:
    kernels |= lesson_views.reports(["5"])
if "rung 2 for Ampere" in kernels:
    old = kernels["rung 2 for Ampere"]
    # the loop stands twice in the code, without and with masks
    reveal("per warp and step", guess, sum(old.count(n) for n in ("LDGSTS", "LDSM", "HMMA")) / 2, "instructions")
if kernels:
    display(lesson_views.sass_table(kernels, NAMES))

# %% [markdown]
# (Counts in the table are those of the whole program, in which the loop stands twice.) The right-hand column is where this chapter ends:
# rung 5 does the same step with a few WGMMAs per warp, each 64 rows high, and copies started by **one thread** for
# everybody. Two costs of the old way in numbers, clocks and instructions:


# %%
def old_and_new(tile_m=128, tile_n=128, d=128, warps=8):
    """What S = Q K^T of one tile costs one SM, the old way and Hopper's."""
    product_clocks = 2 * tile_m * tile_n * d / HOPPER.tensor_flops_16bit
    k_bytes, q_bytes = 2 * tile_n * d, 2 * tile_m * d
    # old: each warp owns tile_m / warps rows and reads all of K into its registers; its rows of Q stay there
    old_bytes = warps * k_bytes
    # new: one instruction serves a warpgroup's 64 rows; it reads K once for them, and their rows of Q
    new_bytes = tile_m // 64 * k_bytes + q_bytes
    return {
        "tensor cores busy": (product_clocks / 0.63, product_clocks),
        "shared memory busy": (old_bytes / HOPPER.smem_bandwidth, new_bytes / HOPPER.smem_bandwidth),
    }


clocks = old_and_new()
fig, (left, right) = plots.figure(2, height=3.4)
ways = ("cp.async, mma.sync", "TMA, WGMMA")
series = zip(ways, zip(*clocks.values(), strict=True), (plots.GREY, plots.BLUE), strict=True)
plots.grouped_bars(left, list(clocks), series)
left.set(xlabel="clocks", title="S of 128 x 128 scores, d 128")
left.get_legend().remove()
fig.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=2)
groups = {"copy": ("LDGSTS", "UTMALDG"), "collect": ("LDSM",), "multiply": ("HMMA", "HGMMA")}
drawn = zip(kernels.items(), (plots.GREY, plots.GREEN, plots.BLUE), strict=False)
series = [
    (name, [sum(report.count(n) for n in names) / 2 for names in groups.values()], colour)
    for (name, report), colour in drawn
]
if series:
    plots.grouped_bars(right, list(groups), series)
    right.legend(loc="upper right")
right.set(xlabel="instructions of a warp in one step", title="From the machine code above")
plt.show()

# %% [markdown]
# The old way's `mma.sync` runs at 63 % of the rate on Hopper (measured by Luo et al. 2024, arXiv:2402.13499). Look at the left plot: eight warps that each collect
# all of K for themselves ask shared memory for more time than the product takes, even at full rate. And what they collect lives in
# registers: this kernel is at the limit of 255 per thread, and for Ampere it spills. WGMMA reads operands
# from shared memory itself, once for 64 rows. That is why everything in this chapter happens *in shared memory*, and why
# we begin with how bytes lie there.
#
# ## 2. Shared memory has 32 banks
#
# Shared memory serves 128 bytes per clock: 32 banks of 4 bytes. Two accesses to the same bank, at different addresses, take turns.
# A tile of 64 16-bit columns has rows of exactly 128 bytes, so a 16-byte piece of row 0 and the piece below it, in row 1, lie in the
# same four banks. The tensor cores want 8 x 8 blocks of numbers, which is eight rows of one 16-byte column.

# %%
guess = None  # turns to read one 16-byte column of 8 rows

# %%
fig, axes = plots.figure(2, height=4.6)
for ax, swizzled in zip(axes, (False, True), strict=True):
    turns = layouts.draw_banks(ax, swizzled)
    ax.set_title(f"{'128-byte swizzle' if swizzled else 'Plain rows'}: {turns} turn{'s' * (turns > 1)}")
    if not swizzled:
        reveal("plain rows", guess, turns, "turns")
plt.show()

# %% [markdown]
# A colour is a group of four banks; the number in a cell is the 16-byte chunk of the tile that lies there; framed is chunk 0 of
# each row. On the left all chunks 0 share the blue banks. On the right each row is permuted by its own number: chunk `c` of
# row `r` lies at place `c ^ (r % 8)`. Now every column *and* every row touches all banks once. Nobody has to compute this: TMA writes so,
# WGMMA reads so, if both are told "128-byte swizzle". In addresses it is one line, `b ^ ((b >> 3) & 0x70)`.
#
# CuTe writes the same as a **layout**: a function from coordinates to offsets, given by a shape and a stride per mode
# (`shape:stride`), with a swizzle in front. Here are the layouts that our kernels use for K and for V, printed by CuTe itself
# while it traces a host function.

# %%
if HAS_CUTE:
    import cutlass.cute as cute
    import cutlass.utils.hopper_helpers as hopper
    from cutlass import BFloat16, Float32
    from cutlass.cute.nvgpu import OperandMajorMode
    from cutlass.cute.runtime import make_fake_stream
    from cutlass.tensor_utils import LayoutEnum

    seen = {}

    @cute.jit
    def look(stream):
        tile = (64, 128, 128)  # of the product: rows, keys, head dim
        for name, major in (("K", LayoutEnum.ROW_MAJOR), ("V", LayoutEnum.COL_MAJOR)):
            layout = hopper.make_smem_layout_b(major, tile, BFloat16, 2)
            print(f"{name}, two stages: {layout}")
        k = OperandMajorMode.K
        mma = hopper.make_trivial_tiled_mma(BFloat16, BFloat16, k, k, Float32, (1, 1, 1), (64, 32))
        layout = mma.tv_layout_C_tiled
        print(f"accumulator 64 x 32, (thread, register) -> element: {layout}")
        seen.update({(t, r): cute.crd2idx((t, r), layout) for t in range(128) for r in range(16)})

    cute.compile(look, make_fake_stream(), options="--gpu-arch sm_90a")

# %% [markdown]
# Read the first one: `S<3,4,3>` is the swizzle (3 bits, from bit 4 up, taken from 3 bits higher). The shape `((8,16),(64,2),(1,2))` says:
# keys in 16 groups of 8, columns in 2 slabs of 64, 2 stages. The strides say where the next one lies: the next column 1
# element on, the next row 64 (= 128 bytes, one swizzled row), the second slab of columns 8192 elements on. So a 128-column tile is
# **two slabs**, because a swizzled row is 128 bytes and no longer. You will meet this again as "two TMA boxes per tile".
#
# ## 3. TMA: one thread copies a tile
#
# A TMA copy is described once, on the host, by a **descriptor** (128 bytes): base address, extent and stride of up to five
# dimensions, the extent of the box, element type, swizzle. In the kernel, one thread says "box at these coordinates, to this
# address, tell that barrier". No thread computes an address per element; no byte passes through a register. Our descriptor for K has four dimensions: key, column,
# head, batch. So one kernel serves any strides, and a tile at the end of a sequence cannot read into the next one:


# %%
def tma_load(tensor, at, box):
    """What lands in shared memory: the box at these coordinates, with zeros where the tensor does not exist."""
    tile = np.zeros(box, tensor.dtype)
    source = tuple(slice(max(a, 0), max(min(a + b, n), 0)) for a, b, n in zip(at, box, tensor.shape, strict=True))
    target = tuple(slice(s.start - a, max(s.stop - a, s.start - a)) for a, s in zip(at, source, strict=True))
    tile[target] = tensor[source]
    return tile


keys = rng.standard_normal((200, 104)).astype(np.float16)
tile = tma_load(keys, (128, 64), (128, 64))
assert np.array_equal(tile[:72, :40], keys[128:, 64:]) and not tile[72:].any() and not tile[:, 40:].any()

# %% [markdown]
# K has 200 keys and 104 columns, the box is 128 keys by 64 columns (16 bits each). The last box hangs over two edges. How many KiB must the
# barrier expect from it?

# %%
guess = None  # KiB

# %%
fig, axes = plots.figure(2, height=3.6)
for ax, at in zip(axes, ((0, 0), (128, 64)), strict=True):
    copied, filled = layouts.draw_box(ax, (200, 104), at, (128, 64))
    ax.set_title(f"box at {at}: {copied:,} copied, {filled:,} zeros")
fig.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
plt.show()
reveal("the barrier counts the whole box", guess, (copied + filled) * 2 / 1024, "KiB")

# %% [markdown]
# The whole box, zeros included. This is convenient: the number of bytes is a compile-time constant, whatever the lengths are. It is also what makes head dims like
# 104 work (their missing columns are zeros, which change no product), and keys past the end (zeros; softmax masks their scores,
# and 0 weight times a 0 of V is 0, where garbage might be NaN).
#
# TMA has limits, and they are where first programs fail. The simulated SM enforces them:


# %%
async def copy_box(warp, tile, tensor, full, at, box):
    full.arrive_expect_tx(tile.nbytes)
    warp.tma_load(tile, tensor, at, box, full)
    await full.wait(0)


def try_box(columns, box_columns):
    """One copy of 64 rows; the verdict where it fails."""
    tensor = GlobalTensor.input("K", rng.standard_normal((128, columns)), "bf16")

    def build(sm):
        tile, full = sm.shared("tile", (64, box_columns), "bf16"), sm.mbarrier("full", arrivals=1)
        sm.role("producer", copy_box, tile, tensor, full, (0, 0), (64, box_columns), threads=32)

    try:
        return f"{launch(build, [()]).cycles:.0f} cycles"
    except Fault as fault:
        return str(fault).splitlines()[0]


for columns, box_columns in ((128, 64), (104, 64), (128, 12), (100, 64)):
    print(f"{columns} columns, box of {box_columns}: {try_box(columns, box_columns)}")

# %% [markdown]
# In words: base addresses and all strides but the innermost are multiples of 16 bytes, the innermost stride is 1, a box's row is a multiple of 16
# bytes and with a swizzle at most as long as it (128 bytes), no box side exceeds 256 elements. `rung_host.run` of our
# rungs checks the strides, and copies a tensor that TMA cannot read.
#
# > **You may read:** *TMA applies a power-of-two scale while it copies*, or *TMA converts to FP8 on the way.*
# > **What is so:** TMA moves bytes. It computes addresses, fills with zeros, swizzles, multicasts, and its *stores* can add into memory; it does not
# > scale or convert a load. FA3's FP8 scales are applied by threads, in chapter 4.
#
# > **You may read:** *TMA frees registers, so tiles can grow.*
# > **What is so:** the size of tiles is bounded by shared memory (227 KB for Q, K and V of all stages) and by the accumulators (S and O in
# > fp32, P in 16 bit, all in registers). Sitting b prints both sums. TMA saves the threads that would have copied.
#
# ## 4. mbarriers: how one knows that bytes have arrived
#
# The thread that starts a copy goes on at once. An **mbarrier**, 8 bytes in shared memory, knows when it is done. It counts two things: *arrivals*
# (how many are still missing) and *bytes* (announced, not yet landed). When both are zero the **phase** is complete, and the next begins
# with the arrival count restored. Small enough to write down:


# %%
class Barrier:
    """An mbarrier by hand. `wait(bit)` passes when the phase with that bit (0 or 1) is complete."""

    def __init__(self, arrivals):
        self.arrivals, self.phase = arrivals, 0
        self.missing, self.nbytes, self.history = arrivals, 0, []
        self._note("init")

    def arrive(self, expect=0):
        self.nbytes += expect
        self.missing -= 1
        self._note(f"arrive, expect {expect // 1024} KiB" if expect else "arrive")

    def land(self, nbytes):
        self.nbytes -= nbytes
        self._note(f"{nbytes // 1024} KiB land")

    def passes(self, bit):
        return self.phase % 2 != bit % 2

    def _note(self, what):
        if self.missing == 0 and self.nbytes == 0:
            self.phase, self.missing = self.phase + 1, self.arrivals
        self.history.append((what, self.phase, self.missing, self.nbytes))


full = Barrier(arrivals=1)
for _ in range(2):
    full.arrive(expect=32 * 1024)
    full.land(16 * 1024)
    full.land(16 * 1024)
full.arrive(expect=32 * 1024)
fig, axes = plt.subplots(2, 1, figsize=(plots.WIDTH, 3.8), height_ratios=(1, 1.4))
layouts.draw_phases(axes, full.history)
axes[0].set_title("A 'full' barrier: one thread arrives and announces 32 KiB, two boxes bring them")
plt.show()

# %% [markdown]
# The producer *announces before it starts* the copies: with its arrival still missing, bytes that land early cannot complete the
# phase. A waiter names the phase by its last bit only. Now predict, for a **fresh** barrier: which of `wait(0)` and
# `wait(1)` passes at once?

# %%
guess = None  # 0 or 1

# %%
fresh = Barrier(arrivals=1)
reveal("passes on a fresh barrier: wait", guess, next(bit for bit in (0, 1) if fresh.passes(bit)))

# %% [markdown]
# `wait(1)` passes: the phase "before the first" counts as complete. It looks like a quirk, and it is the trick that starts every ring: the barrier that
# means "this slot is empty" is waited on with bit 1 first, so that a ring is born empty without anyone saying so.
#
# On the real SM, two mistakes with bytes are the usual ones. Announce too few and the phase completes while the last box
# is still flying: sometimes wrong numbers. Announce too many and it never completes: a hang. The simulator says both in words. Change
# `copy_twice` yourself and see.


# %%
async def copy_twice(warp, tiles, tensor, full):
    for i in range(2):
        full.arrive_expect_tx(tiles[0].nbytes + tiles[1].nbytes)
        for j in range(2):
            warp.tma_load(tiles[j], tensor, (64 * j, 0), (64, 64), full)
        await full.wait(i % 2)


def run_copies(role):
    tensor = GlobalTensor.input("K", rng.standard_normal((128, 64)), "bf16")

    def build(sm):
        tiles = [sm.shared(f"K{j}", (64, 64), "bf16") for j in range(2)]
        sm.role("producer", role, tiles, tensor, sm.mbarrier("full", arrivals=1), threads=32)

    try:
        return f"clean, {launch(build, [()]).cycles:.0f} cycles"
    except Fault as fault:
        return str(fault)


announced = "tiles[0].nbytes + tiles[1].nbytes"
print("as it stands: ", run_copies(copy_twice))
print("\nhalf announced: ", run_copies(patched(copy_twice, announced, "tiles[0].nbytes")))
print("\ntwice announced: ", run_copies(patched(copy_twice, announced, f"2 * ({announced})")))
print("\nalways bit 0: ", run_copies(patched(copy_twice, "full.wait(i % 2)", "full.wait(0)")))

# %% [markdown]
# ## 5. WGMMA: four warps, 64 rows, asynchronous
#
# `wgmma` multiplies a 64 x 16 tile by a 16 x N tile (N a multiple of 8, up to 256) and adds the product to a 64 x N
# accumulator in the registers of 128 threads, a **warpgroup**. Its right operand always comes from shared memory. Its left one comes from shared memory
# (SS), or from the warpgroup's registers (RS). A step over head dim 128 is eight of these instructions. Who holds what afterwards?

# %%
fig, (left, right) = plots.figure(2, height=4.8, widths=(1, 1.35))
layouts.draw_accumulator(left, thread=5)
left.set_title("Black: thread 5's elements")
layouts.draw_quad(right)
right.set_title("Thread and register of each element")
plt.show()
if HAS_CUTE:
    # CuTe's own layout, printed above, says the same about all 64 x 32 elements
    for (thread, register), element in seen.items():
        assert layouts.accumulator_owner(element % 64, element // 64) == (thread, register)
    print(f"the drawing agrees with CuTe's layout on all {len(seen)} elements")

# %% [markdown]
# (Each cell of the left picture is one element; columns go on to the right in the same pattern, 4 registers per 8 columns.) A row of scores is spread over **four neighbouring threads**. So a row maximum is
# a maximum over a thread's own registers, then two shuffles (`shuffle_sync_bfly` by 2 and by 1): you will find them in
# `device_softmax.step`. Forgetting the shuffles is a classic: every thread then has a maximum of its own, and the result is wrong by a little.
#
# Second fact: **the left operand's layout in registers is the accumulator's.** A thread that holds S of 16 keys holds exactly the
# elements of P that the next product's k-step wants from it. Softmax happens in place, P goes to 16 bit in place, and no
# element changes its thread (with 16-bit elements; FP8 breaks this, chapter 4). Below, for 16 keys: the eight registers of the accumulator
# beside the eight elements of the operand, as the PTX manual numbers them.

# %%
row, column = np.mgrid[0:16, 0:16]
thread, register = layouts.accumulator_owner(row, column)
# PTX, operand A of m64k16: element i of a lane has row lane // 4 (+ 8 for i in 2, 3, 6, 7), column 2 (lane % 4) + i % 2 (+ 8 for i >= 4)
lane, i = np.mgrid[0:32, 0:8]
a_row = lane // 4 + 8 * (i % 4 // 2)
a_column = 2 * (lane % 4) + i % 2 + 8 * (i // 4)
assert np.array_equal(thread[a_row, a_column], lane) and np.array_equal(register[a_row, a_column], i)
print("thread and register of every element of P agree with operand A's: nothing has to move")

# %% [markdown]
# **K-major, MN-major.** "K-major" means that the dimension summed over is contiguous in memory. For S = Q Kᵀ that is the head dim,
# contiguous in both tensors as they come. For O = P V it is the *key* dimension, but V has its head dim contiguous: V is MN-major. For 16-bit types
# WGMMA reads either, from the same TMA-written tile, so V needs no transpose (for FP8 only K-major exists: chapter 4). It is one bit of the
# instruction. Where the tile lies is in a 64-bit shared-memory descriptor: start address, two strides, swizzle mode.
#
# **Asynchronous** means four obligations, in this order:
#
# | in CuTe DSL | on the simulated SM | says |
# |---|---|---|
# | `warpgroup.fence()` | `wg.wgmma_fence()` | what threads wrote to these registers comes before the product |
# | `cute.gemm(...)` | `wg.wgmma(...)` | start; nothing may touch accumulator or operands now |
# | `warpgroup.commit_group()` | `wg.commit()` | what was started so far is one group |
# | `warpgroup.wait_group(n)` | `await wg.wait_group(n)` | all groups but the latest n are complete |
#
# Let us write a whole product as roles: one warpgroup, one slot, everything waits.

# %%
TILE_M, TILE_N, TILE_K = 64, 128, 64


async def waiting_gemm(wg, a, b, c, tile_a, tile_b, staged, full):
    acc = wg.registers("acc", (TILE_M, TILE_N))
    acc.write(0.0)
    for step in range(a.shape[1] // TILE_K):
        full.arrive_expect_tx(tile_a.nbytes + tile_b.nbytes)
        wg.tma_load(tile_a, a, (0, step * TILE_K), (TILE_M, TILE_K), full)
        wg.tma_load(tile_b, b, (0, step * TILE_K), (TILE_N, TILE_K), full)
        await full.wait(step % 2)
        wg.wgmma_fence()
        wg.wgmma(acc, tile_a, tile_b.T, label="product")
        wg.commit()
        await wg.wait_group(0)
    await wg.store_shared(staged, acc.read())
    wg.fence_async_proxy()
    wg.tma_store(staged, c, (0, 0), (TILE_M, TILE_N))
    wg.commit_store()
    await wg.wait_store(0)


def run_gemm(role, k=1024, seed=0):
    """Runs the roles and returns (report, error against fp64), or raises the verdict."""
    a, b = (GlobalTensor.input(name, rng.standard_normal((n, k)), "bf16") for name, n in (("A", TILE_M), ("B", TILE_N)))
    c = GlobalTensor.output("C", (TILE_M, TILE_N), "bf16")

    def build(sm: SM):
        tile_a, tile_b = sm.shared("A", (TILE_M, TILE_K), "bf16"), sm.shared("B", (TILE_N, TILE_K), "bf16")
        staged = sm.shared("C", (TILE_M, TILE_N), "bf16")
        sm.role("consumer0", role, a, b, c, tile_a, tile_b, staged, sm.mbarrier("A and B full", arrivals=1))

    report = launch(build, [()], outputs=(c,), seed=seed)
    want = a.numpy().astype(np.float64) @ b.numpy().astype(np.float64).T
    return report, np.abs(c.numpy() - want).max() / np.abs(want).max()


report, error = run_gemm(waiting_gemm)
print(f"clean: relative error {error:.1e} (bf16 rounds at {2**-9:.1e}), {report.cycles:,.0f} cycles")

# %% [markdown]
# Before you look at its timeline: which share of their peak do the tensor cores reach?

# %%
guess = None  # percent

# %%
reveal("tensor cores, share of their peak", guess, 100 * report.share("tensor core"), "%")
lines = timeline.from_dict(report.timeline.as_dict())
fig, (ax,) = plots.figure(height=2.6)
timeline.gantt(lines.cut(0, 8000), ax, ["TMA", "consumer0", "tensor core"])
ax.set_title("The first 8,000 cycles: one copies, then one multiplies, never both")
ax.set_xlabel("cycles of the SM clock")
plt.show()
fig, (ax,) = plots.figure(height=1.9)
layouts.draw_waits(ax, layouts.waits(lines, ["consumer0"]))
plt.show()

# %% [markdown]
# Nobody is slow here. The product takes 256 cycles per step, the copy some hundred cycles of latency plus its bytes, and
# they follow each other. That is the whole case for sitting b.
#
# And now the obligations, one broken at a time. Predict each verdict before you run the cell.

# %%
BROKEN = {
    "no fence before the product": ("        wg.wgmma_fence()\n", ""),
    "no commit": ("        wg.commit()\n", ""),
    "no wait for the product": ("        await wg.wait_group(0)\n", ""),
    "no wait for the bytes": ("        await full.wait(step % 2)\n", ""),
    "threads store, TMA reads, no proxy fence": ("    wg.fence_async_proxy()\n", ""),
}
for what, (old_line, new_line) in BROKEN.items():
    try:
        run_gemm(patched(waiting_gemm, old_line, new_line))
        print(f"{what}: got away")
    except Fault as fault:
        print(f"{what}\n    {str(fault).splitlines()[0]}\n")

# %% [markdown]
# The last one is new: **proxies**. TMA and WGMMA reach shared memory by another path (the *asynchronous proxy*) than ordinary loads
# and stores (the *generic* one). Ordinary stores must be followed by `fence.proxy.async`, then by a barrier, before TMA
# may read them. For the tiles of Q, K and V nobody needs it: TMA writes, WGMMA reads, and the mbarrier orders the two.
#
# On a card none of these five gives a message at run time. Some give wrong numbers on some days. (ptxas sees some of them in the code, inserts waits, and says so in
# an advisory, C75xx: our tests refuse kernels that have one.)
#
# ## 6. The kernel
#
# The same product in CuTe DSL: [`steps/gemm_tile.py`](steps/gemm_tile.py), one warpgroup, a 128 x 128 tile of C, 64 columns of k per
# step. Compare its loop with the role above, line by line.

# %%
GEMM_FILE = "chapters/02_tma_wgmma/steps/gemm_tile.py"
if HAS_CUTE:
    gemm = rungs._module(GEMM_FILE)
    display(lesson_views.source(gemm.GemmTile.kernel))
else:
    print("CuTe DSL has no wheels for this system: read steps/gemm_tile.py beside this page")

# %% [markdown]
# What differs: `if warp == 0` picks the warp that copies, `elect_one` the thread that announces the bytes (TMA copies elect their thread by
# themselves). `partition_A`, `make_fragment_B` cut a tile into what one instruction takes; for operands in shared memory a
# "fragment" is a descriptor, not data. And there are 128 real threads, so all warps meet at `sync_threads()` before the slot is overwritten: the simulated
# warpgroup is one coroutine and needs no such line.
#
# The machine code proves the claims. Which counts do you expect for `HGMMA` (tile 128 x 128 x 64), `UTMALDG`, `LDSM` and `HMMA`?

# %%
guess = None  # HGMMA instructions in the loop body

# %%
if HAS_CUTE:
    forms = {}
    for b_major, a_source in (("K", "shared"), ("MN", "shared"), ("K", "registers")):
        (forms[f"B {b_major}-major, A from {a_source}"],) = sass.compile_report(
            lambda options, b=b_major, a=a_source: gemm.compile_gemm(torch.bfloat16, b, a, options)
        )
    reveal("HGMMA in the loop body", guess, forms["B K-major, A from shared"].count("HGMMA"))
    display(lesson_views.sass_table(forms, ("HGMMA", "UTMALDG", "LDSM", "SYNCS", "WARPGROUP", "HMMA", "LDGSTS", "STL")))

# %% [markdown]
# Two 64-row halves times four 16-column steps: 8. An MN-major B tile is 128 contiguous columns, that is two 128-byte slabs and
# one more box. A from registers costs `LDSM` (ldmatrix) and registers, and saves WGMMA's own reading. `WARPGROUP` is fence
# and wait. There is no `HMMA` and no `LDGSTS` left.
#
# ## 7. Check it, measure it

# %%
if HAS_CUTE and rungs.has_hopper():
    for m, n, k in ((1, 8, 8), (129, 136, 72), (1000, 520, 2048)):
        for dtype in (torch.float16, torch.bfloat16):
            for a_source in ("shared", "registers"):
                a, b = (torch.randn(x, k, dtype=dtype, device="cuda") for x in (m, n))
                for operand in (b, b.T.contiguous().T):  # K-major, then MN-major
                    got, want = gemm.matmul(a, operand, a_source), a.double() @ b.double().T
                    assert (got.double() - want).abs().max() <= torch.finfo(dtype).eps * want.abs().max() + 1e-4
    import triton

    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for name, call in (("this kernel", lambda: gemm.matmul(a, b)), ("cuBLAS", lambda: a @ b.T)):
        ms = triton.testing.do_bench(call, return_mode="median")
        print(
            f"your card, {torch.cuda.get_device_name()}: {name}, {n} cubed: {gemm.flops(n, n, n) / ms / 1e9:.0f} TFLOP/s"
        )
else:
    print(
        "no Hopper here: the simulated product above was checked against fp64, and the kernel's machine code was read"
    )

RUN = results.experiments("02")
stored = [row for row in (RUN.rows if RUN else ()) if row.measured and row.direction == "gemm"]
if stored:
    print(f"stored, {RUN.gpu}, {RUN.date[:10]}, 8192 cubed, bf16:")
    for row in stored:
        print(f"    {row.kernel:<28} {row.tflops:.0f} TFLOP/s")
else:
    print("no stored row yet: `python -m bench.experiments_02` on a Hopper stores some")

# %% [markdown]
# If you measured it: the kernel is faster than the simulated loop suggests. The simulation above shows *one* CTA. A real SM holds several
# CTAs of this small kernel, and while one waits another multiplies. How many fit?

# %%
guess = None  # CTAs of this kernel on one SM

# %%
if HAS_CUTE:
    for source in ("shared", "registers"):
        form = forms[f"B K-major, A from {source}"]
        by_memory = 233_472 // (form.smem + 1024)  # an SM has 228 KB, of which each CTA costs 1 KB more
        by_registers = HOPPER.registers // (128 * (-(-form.registers // 8) * 8))
        if source == "shared":
            reveal("CTAs per SM", guess, min(by_memory, by_registers))
        print(f"A from {source}: shared memory allows {by_memory}, registers allow {by_registers}")

# %% [markdown]
# With A from registers one CTA less fits, and its stored row is the slower one. (The ldmatrix before each product is one more thing to wait for, too.) Where an operand
# *is* in registers already, as P will be, there is nothing to load and the form is free.
#
# This is **occupancy**, the way in which GPUs have always hidden waiting: more CTAs. It has a limit that attention meets at once. Large
# tiles need few bytes per operation but most of the shared memory and most of the registers, and then one CTA is all
# that fits. From there on, overlap must come from *inside* the CTA: a warp that only copies, and warpgroups that only compute. That is sitting b.
#
# ## 8. Three questions
#
# <details><summary><b>1.</b> A TMA load of a box that lies completely outside the tensor: what does the barrier see?</summary>
#
# All the bytes of the box, as always; shared memory gets zeros. A producer therefore needs no special case at the end of a sequence.
# </details>
#
# <details><summary><b>2.</b> Why does the thread that starts the copies announce the bytes, and not each copy by itself?</summary>
#
# The phase completes when arrivals and bytes are both at zero. If copies announced themselves, the count of bytes could
# touch zero between two copies. One arrival that announces the sum, before the first copy, rules this out.
# </details>
#
# <details><summary><b>3.</b> Your kernel is right for head dim 64 and wrong for 128. You changed the layout of K to one box of 128 columns. Why?</summary>
#
# A box of 128 16-bit columns has rows of 256 bytes, and the 128-byte swizzle allows 128. CuTe cuts tiles into slabs of 64 columns and
# issues one box each; a hand-written descriptor must do the same, and the WGMMA descriptors must step from slab to slab.
# </details>
#
# ## Where to go
#
# * [`lesson_b.ipynb`](lesson_b.ipynb): attention from these parts, rungs 3, 4 and 5.
# * `fa3 sass 3`, `fa3 sim 3`: machine code and simulated timeline of the first rung.
#
# **Sources.** NVIDIA, PTX ISA (mbarrier, cp.async.bulk.tensor, wgmma) and CUDA C++ programming guide; Luo et al. 2024 (rates of `mma.sync`
# on Hopper); Shah et al. 2024 (FlashAttention-3).
