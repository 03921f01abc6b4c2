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
# # Chapter 4, sitting b: the FP8 kernel
#
# *60 to 90 minutes. Runs on any laptop; a Hopper is used if there is one.*
#
# [Sitting a](lesson_a.ipynb) found out what an 8-bit attention computes. Now it becomes a kernel: rung 10,
# [`steps/rung10_fp8.py`](steps/rung10_fp8.py), grown from chapter 3's rung 7. Its protocol hardly changes. What changes is *where bytes must lie*, where factors
# go, and how sums are kept.
#
# | section | question |
# |---|---|
# | 1, 2 | how much faster is FP8, and what holds it? |
# | 3, 4 | who turns V, and what does it cost? |
# | 5, 6 | how do P, the offset and the descales come for free? |
# | 7, 8 | two levels of accumulation: the registers, the protocol, the faults |
# | 9, 10 | the kernel, its machine code, its rows |
# | 11 | what comes before the kernel: quantisation |
#
# You need chapter 3 (softmax under PV, turns) and sitting a's sections 2, 7 and 10.

# %%
import importlib.util
import inspect
from dataclasses import replace
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Markdown, display
from matplotlib.patches import Rectangle

from fa3_course import (
    budget,
    comparison,
    fp8_tables,
    lesson_rungs,
    lesson_views,
    notes,
    plots,
    results,
    rungs,
    simulated,
    timeline,
)
from fa3_course.simulated import rung10
from fa3_lib import quantize, reference
from fa3_lib.config import ForwardConfig
from fa3_lib.fp8_config import fp8_config
from hopper_sim import HOPPER, Fault, patched

fp8 = rungs._module("chapters/04_fp8/steps/fp8_numerics.py")
transposer = rungs._module("chapters/04_fp8/steps/transposer.py")

plots.use_style()
HAS_CUTE = importlib.util.find_spec("cutlass") is not None
SEED = np.random.SeedSequence().entropy % 2**32
rng = np.random.default_rng(SEED)  # fresh inputs in every run; to repeat one, write its seed here
FILE, RUNG7 = "chapters/04_fp8/steps/rung10_fp8.py", "chapters/03_pingpong/steps/rung07_overlap.py"
# stored runs: of FP8's own measurement, and the newest that measured this rung, and FA3 in bf16
IN_BF16 = [run for run in results.load() if run.select(kernel="fa3", dtype="bf16")]
FOUND = (results.experiments("fp8"), results.latest(kernel="rung10_fp8"), results.latest(IN_BF16))
RUNS = list({run.path: run for run in FOUND if run}.values())
DIMS, LONG = (64, 128, 256), {"causal": False, "seqlen": 16_384}
# rung 10's tiles (its file needs CuTe, so the numbers stand here, too, and are compared)
CONFIGS = {
    d: ForwardConfig(d, d, 128, n, ping_pong=True, own_output=True, element_bytes=1)
    for d, n in ((64, 128), (128, 128), (192, 128), (256, 64))
}
if HAS_CUTE:
    rung = lesson_rungs.module(FILE)
    assert all(rung.make_config(d, False) == config for d, config in CONFIGS.items())
print(f"seed {SEED}; CuTe DSL {'is here' if HAS_CUTE else 'has no wheels for this system: its cells say so and go on'}")
for run in RUNS:
    print(f"stored run: {run.gpu}, {run.date[:10]}, `{' '.join(run.command.split()[:3])}`")
if not RUNS:
    print("no stored run: `python -m bench.fp8` and `fa3 bench` on a Hopper store some")


def reveal(what, guess, value, unit=""):
    """Shows a value beside the reader's guess."""
    told = "no guess yet" if guess is None else f"you said {guess:g}"
    print(f"{what}: {value:,.4g} {unit} ({told})")


def table(head, rows):
    """Rows of text as a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    display(Markdown("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)))


def stored(kernel, dtype, **shape):
    """TFLOP/s of the first stored forward row, None if there is none."""
    found = (run.one(kernel=kernel, direction="fwd", dtype=dtype, **shape) for run in RUNS)
    return next((row.tflops for row in found if row), None)


# %% [markdown]
# ## 1. One number that hurts
#
# The tensor cores multiply 8-bit numbers at twice the rate of 16-bit ones, and K and V have half the bytes. FA3 has both kernels. At 16k keys, how much
# faster is its FP8 than its own bf16?

# %%
guess = None  # times, head dim 128

# %%
speeds = {dtype: [stored("fa3", dtype, head_dim=d, **LONG) for d in DIMS] for dtype in ("bf16", "fp8")}
if all(speeds["bf16"] + speeds["fp8"]):
    gains = np.divide(speeds["fp8"], speeds["bf16"])
    reveal("FA3, FP8 over bf16, d 128", guess, gains[1], "times")
    fig, (left, right) = plots.figure(2, height=2.7)
    names = [f"d {d}" for d in DIMS]
    plots.grouped_bars(left, names, [("bf16", speeds["bf16"], plots.GREY), ("FP8", speeds["fp8"], plots.BLUE)])
    left.set(xlabel="TFLOP/s", title=f"FA3 (C++), 16k, full, {RUNS[0].gpu}")
    bars = right.barh(names, gains, color=plots.BLUE, height=0.55)
    right.bar_label(bars, [f"{gain:.2f}" for gain in gains], padding=4)
    right.axvline(2, color=plots.RED)
    right.invert_yaxis()
    right.grid(axis="y", visible=False)
    right.set(xlim=(0, 2.15), title="times as fast (red: twice)")
    plt.show()
    yardsticks = [run.one(kernel="cublas", direction="gemm", dtype="fp8") for run in RUNS]
    yardsticks = [f"{row.tflops:,.0f}" for row in yardsticks if row]
    if len(yardsticks) > 1:
        print(
            "FP8 and bf16 come from different runs, perhaps on different cards. cuBLAS's FP8 product, which both measured: "
            f"{' and '.join(yardsticks)} TFLOP/s. Read the ratios no finer than that"
        )
else:
    print("no stored rows of FA3 in both formats: `fa3 bench` on a Hopper stores some")

# %% [markdown]
# > **You may read:** *FP8 doubles the speed of attention.*
# > **What is so:** it doubles the rate of its two products. Exponentials, maxima, the conversion of P and the rescale of O stay what they were, and V has to be turned.
#
# ## 2. What holds an FP8 kernel
#
# Chapter 3's account, per key block: the cycles that each unit of an SM works at its full rate, relative to the products. With 8 bits the products take half as long, so the bars of the
# softmax grow to twice their length; shared memory moves half the bytes in half the time. For which head dim do exponentials and products now take equally long?

# %%
guess = None  # head dim at which exponentials take as long as the products

# %%
reveal("equal at head dim", guess, HOPPER.tensor_flops_8bit / HOPPER.mufu / 4)
UNITS = {"mufu": plots.RED, "issue": plots.BLUE, "alu": plots.PURPLE, "shared memory": plots.GREY}
work = {d: budget.cycles(config) for d, config in CONFIGS.items()}
turning = {
    d: 2 * config.v_bytes / HOPPER.smem_bandwidth for d, config in CONFIGS.items()
}  # V read once and written once
series = [(unit, [c[unit] / c["tensor core"] for c in work.values()], colour) for unit, colour in UNITS.items()]
both = [(c["shared memory"] + turning[d]) / c["tensor core"] for d, c in work.items()]
fig, (ax,) = plots.figure(height=3.6)
plots.grouped_bars(
    ax, [f"d {d}" for d in work], [*series, ("shared memory, V turned in the kernel", both, plots.ORANGE)]
)
ax.axvline(1, color=plots.GREEN, linewidth=2)
ax.set(xlabel="time of each unit; 1 (green): the products' time", title="FP8, work per key block, full rates")
plt.show()

# %% [markdown]
# Right of the green line, a unit needs more time than the tensor cores, however well all overlap. At head dim 64 that is the exponentials by a factor of two, and at 128 they are
# just even. **Shared memory** is close to the line everywhere, and turning V inside the kernel pushes it over. (Wider tiles lower the grey bar a little: Q is read once per key block.) So the two questions of
# this sitting: who turns V, and how does everything else cost nothing?
#
# ## 3. Turning V, drawn
#
# Why at all: an 8-bit WGMMA reads B from shared memory only **K-major**, with the bytes of one sum beside each other. PV sums over keys; V has head dim contiguous
# (sitting a, section 10). FA3's idle producer threads turn each block with three instructions, none of which was made for bytes:
#
# * `ldmatrix.trans` reads an 8 x 8 matrix of **16-bit** elements and hands it out transposed: here 8 keys by 8 *pairs* of head dims;
# * `prmt` picks four bytes out of two registers: it takes the pairs apart;
# * `stmatrix` writes an 8 x 8 matrix of 16-bit elements, each row to an address of its own.
#
# Here they are, lane by lane:


# %%
def ldmatrix_trans(tile, key, dim):
    """8 keys by 16 head dims (as 8 pairs) of a tile (keys, dims): four bytes for each of 32 lanes."""
    pairs = tile[key : key + 8, dim : dim + 16].reshape(8, 8, -1)  # (key, pair, byte)
    lane = np.arange(32)
    return np.concatenate([pairs[2 * (lane % 4) + row, lane // 4] for row in (0, 1)], axis=1)


def prmt(low, high, selector):
    """Byte i of the result: hex digit i of the selector, from the right, picks it out of low and high."""
    return np.concatenate([low, high], axis=1)[:, [selector >> 4 * i & 0xF for i in range(4)]]


def stmatrix(turned, dims, position, registers):
    """Row i of 8 x 16 bytes goes to row dims[i], from column `position` on; lane l has four bytes of row l // 4."""
    for lane in range(32):
        first = position + 4 * (lane % 4)
        turned[dims[lane // 4], first : first + 4] = registers[lane]


def turn(tile):
    """32 keys by 16 head dims -> 16 head dims by 32 positions."""
    turned = np.full((16, 32), -1, tile.dtype)
    for half in (0, 16):
        low, high = (ldmatrix_trans(tile, half + key, 0) for key in (0, 8))
        stmatrix(turned, range(0, 16, 2), half, prmt(low, high, 0x6420))  # even head dims
        stmatrix(turned, range(1, 16, 2), half, prmt(low, high, 0x7531))  # odd head dims
    return turned


# %% [markdown]
# Bytes 0 to 15 of a row of the result: do they belong to keys 0 to 15, in this order?

# %%
guess = None  # the key of byte 2 of a turned row

# %%
names = np.arange(32)[:, None] * 100 + np.arange(16)  # key and head dim of each byte
turned = turn(names)
assert (turned % 100 == np.arange(16)[:, None]).all(), "each row is one head dim"
keys = turned[0] // 100
reveal("byte 2 belongs to key", guess, keys[2])
print("order of keys in a turned row:", *keys)
print(
    "the order that P's registers want (sitting a, section 10):",
    "the same" if (keys == fp8.key_order()).all() else "another",
)

QUADS = ("#56B4E9", "#F5C266", "#66C9A9", "#E3B5CE")
LANE = 5
fig, (left, right) = plots.figure(2, height=4.3, widths=(1, 2))
mine = {
    (h + k + 2 * (LANE % 4) + row, 2 * (LANE // 4) + b)
    for h in (0, 16)
    for k in (0, 8)
    for row in (0, 1)
    for b in (0, 1)
}
for ax, grid, title in (
    (left, names, "V as it comes"),
    (right, turned, "V turned"),
):
    for (y, x), name in np.ndenumerate(grid):
        key, dim = divmod(int(name), 100)
        own = (key, dim) in mine
        face = QUADS[key % 8 // 2]
        ax.add_patch(
            Rectangle((x, y), 1, 1, facecolor=face, edgecolor="black" if own else "white", zorder=2 if own else 1)
        )
        if own:
            ax.text(x + 0.5, y + 0.5, key, ha="center", va="center", fontsize=7, zorder=3)
    ax.set(xlim=(0, grid.shape[1]), ylim=(grid.shape[0], 0), title=title)
    ax.grid(False)
    ax.set_aspect("auto")
left.set(xlabel="head dim", ylabel="key")
right.set(xlabel="position", ylabel="head dim")
plt.show()
print(f"colours: which of the four lanes of a quad holds the key. Framed: lane {LANE}'s 16 bytes, with their keys")

# %% [markdown]
# Look at the frame: a lane reads pairs of keys, 8 apart, and writes four bytes side by side. The order of keys that comes out, 0 1 8 9 2 3 10 11 ..., is *exactly* the one in
# which an accumulator's registers lie. Nobody has to permute anything, on either side: the tensor core's own layouts fit, if one lets them.
#
# (FA3 writes four such matrices at a time. So that the banks do not collide it also exchanges some head *dims*, and puts O's columns right again at the end.)
#
# ## 4. Twice: in the kernel, or before it
#
# | | in the kernel (FA3) | before the kernel (ours, for many queries) |
# |---|---|---|
# | who | the producer's warpgroup, while it waits | a small kernel, once per call |
# | how often is V turned | once per query tile (and per query head) | once |
# | costs | shared memory: V read and written once more; a second ring | global memory: V read and written once more |
# | shared memory for the rings | K, V and the raw V | K and V: a wider tile, or a third stage |
# | O's columns | to be put right at the end | as they are |
#
# When is the second cheaper? Let `s` be the query rows that read one V: with 8 query heads on a KV head, 8 times the query length. Pre-turning moves `2 s_k d` bytes once. Turning in the
# kernel takes shared memory away from products in *every* query tile. From how many query rows on does the first cost less than one percent of the time?

# %%
guess = None  # query rows per KV head

# %%
DRAM = 4.8e12  # bytes per second of an H200 (datasheet)
rate = (stored("fa3", "fp8", head_dim=128, **LONG) or 900) * 1e12  # stored row; 900 where there is none
rows_of_q = 2.0 ** np.arange(6, 17)
before = 100 * (2 / DRAM) / (4 * rows_of_q / rate)  # per key and head dim: 2 bytes against 4 FLOP per query row
tile = CONFIGS[128]
busy = work[128]["shared memory"]
inside = 100 * max(busy + turning[128] - work[128]["tensor core"], 0) / work[128]["tensor core"]
reveal("less than 1 % from query rows", guess, 100 * rate / (2 * DRAM))
fig, (ax,) = plots.figure(height=2.9)
ax.loglog(rows_of_q, before, "o-", color=plots.BLUE, label="before the kernel: its traffic in global memory")
ax.axhline(inside, color=plots.ORANGE, label="in the kernel: shared memory beyond the products' time, d 128")
plots.powers_of_two(ax, rows_of_q[::2].astype(int))
ax.set_yscale("log")
ax.yaxis.set_major_formatter("{x:g}")
ax.set(
    xlabel="query rows that read one V", ylabel="% of the attention's time", title="Turning V: what it costs at least"
)
ax.legend()
plt.show()

# %% [markdown]
# The lines cross below a thousand query rows. With one query per sequence (decoding) attention itself only reads K and V once: a pre-pass that reads V, writes it and has it read again would double the traffic. There, turn in the kernel. With a
# thousand query rows or more, turn before. These are bounds from bytes alone; a kernel launch, a few microseconds, comes on top of the pre-pass.
#
# There is a third way: leave V's keys alone and permute the **rows of K** instead. S then comes out with its columns in P's order, and V can be turned in natural order, by whoever
# writes the KV cache. (As a TMA view it splits the key dimension into several: all five dimensions of a descriptor are needed.)
#
# The simulated SM can run both: the same consumers, once with V turned before, once with three warps that turn it.


# %%
def fp8_problem(d=128, keys=2048, number="11", heads=1):
    """Fresh inputs in e4m3 with descales, one query tile per head."""
    q, k, v = (rng.standard_normal((1, n, heads, d)) for n in (128, keys, keys))
    return simulated.make_problem(number, q, k, v, config=None if number == "10" or d <= 128 else CONFIGS[d])


def error_of(p):
    """Largest error of the output against fp64 on the same 8-bit inputs, relative to the output's size."""
    v = (transposer.untransposed(p) if p.v.name == "Vt" else p).v.numpy()
    group = p.q.shape[2] // p.k.shape[2]
    factors = (np.repeat(p.q_descale, group, axis=1), p.k_descale, p.v_descale)
    tensors = (x * f[:, None, :, None] for x, f in zip((p.q.numpy(), p.k.numpy(), v), factors, strict=True))
    want = reference.attention(*(torch.from_numpy(x.astype(np.float64)) for x in tensors))[0].numpy()
    return float(np.linalg.norm(p.out.numpy() - want) / np.linalg.norm(want))


def fresh(p):
    """The same inputs, outputs that nobody has written yet."""
    outputs = {name: type(x).output(x.name, x.shape, x.dtype) for name, x in (("out", p.out), ("lse", p.lse))}
    return replace(p, **outputs)


before = fp8_problem()
inside = transposer.untransposed(fresh(before))
reports = {
    "turned before": simulated.run("11", before).report,
    "turned in the kernel": simulated.run("11", inside, build=transposer.builder()).report,
}
assert np.array_equal(before.out.numpy(), inside.out.numpy()) and error_of(before) < 0.05
for name, report in reports.items():
    print(f"V {name:22} {report.cycles:8,.0f} cycles, shared memory busy {report.share('shared memory'):.0%}")

# %% [markdown]
# Equal bits, and hardly any difference in time: shared memory was not full, since other things hold this kernel (section 8). The turn hides. It becomes visible where the rest is good enough. The lab
# has the turner for you to write (04.11), and a bug that FA3's source warns of (04.B4).
#
# ## 5. P stays in its registers
#
# S comes out as an accumulator; P goes in as an 8-bit A operand. For a lane's two rows and 32 keys, 16 numbers become 16 bytes of the same lane. With V's keys in the right order, the way there is a
# renaming, known when the kernel is compiled. Top: the registers of lane 5, by their number; bottom: the bytes of its operand. How many of the 16 keep their number?

# %%
guess = None  # of 16


# %%
def register_of(byte):
    """The accumulator register that becomes this byte: (half, row, byte in word) -> (j, row, e)."""
    half, row, b = byte // 8, byte // 4 % 2, byte % 4
    return 4 * (2 * half + b // 2) + 2 * row + b % 2


sources = [register_of(byte) for byte in range(16)]
if HAS_CUTE:
    assert sources == [rung.accumulator_index(byte) for byte in range(16)]
reveal("keep their number", guess, sum(byte == source for byte, source in enumerate(sources)), "of 16")
fig, (ax,) = plots.figure(height=2.3)
for i in range(16):
    j, row, e = i // 4, i // 2 % 2, i % 2
    key = 8 * j + 2 * (LANE % 4) + e
    for y, x in ((0, i), (2.2, sources.index(i))):
        ax.add_patch(Rectangle((x, y), 1, 1, facecolor=(plots.SKY, "#F5C266")[row], edgecolor="white"))
        ax.text(x + 0.5, y + 0.5, key, ha="center", va="center", fontsize=9)
    ax.plot([i + 0.5, sources.index(i) + 0.5], [1, 2.2], color=plots.GREY, linewidth=0.8)
for x in range(0, 17, 4):
    ax.plot([x, x], [2.15, 3.25], color="black", linewidth=1)
ax.text(-0.2, 0.5, "S: registers 0 to 15,\nkey in each", ha="right", va="center", fontsize=9)
ax.text(-0.2, 2.7, "P: four registers\nof four bytes", ha="right", va="center", fontsize=9)
ax.text(16.2, 1.6, "blue: row 1\nyellow: row 2", va="center", fontsize=9)
ax.set(xlim=(-4.2, 19.5), ylim=(3.4, -0.2))
ax.set_axis_off()
plt.show()

# %% [markdown]
# The code says the same. Two conversions take four numbers to one register, nothing leaves the thread: no shuffle, no byte permute. Section 9 counts them in the machine code.

# %%
if HAS_CUTE:
    display(lesson_views.source(rung.accumulator_index))
    display(lesson_views.source(rung.to_operand))
else:
    print("CuTe DSL has no wheels for this system: read the file in steps/ beside this page")

# %% [markdown]
# ## 6. Offset 8, and where factors go
#
# P is computed as `exp2((S - row_max) * scale + 8)`, so that it fills (0, 256] (sitting a, section 7). Added to each score, that would be one instruction per score. How many does it cost per *row and block*, if
# done well?

# %%
guess = None  # instructions per row and key block; the answer is in the code below

# %%
if HAS_CUTE:
    display(lesson_views.source(rung.softmax_step))
else:
    print("CuTe DSL has no wheels for this system: read `softmax_step` in the file")

# %% [markdown]
# One: `max_scaled - OFFSET`, from a number that is there anyway. Everything that is constant for a row or a head is folded the same way, outside the loop or once per row:
#
# | factor | folded into | how often |
# |---|---|---|
# | softmax scale, log2(e), Q's and K's descale | `scale_log2`, which multiplies every score in the exponent's multiply-add | once per tile |
# | offset 8 | the scaled row maximum | once per row and block |
# | `2**8` in O and in the row sum | cancels in `O / row_sum` | never |
# | `2**8` in LSE | `- 8 ln 2` | once per row |
# | V's descale | `1 / row_sum` | once per row |
#
# The last but one is easy to forget, and no test of the *output* sees it. LSE is what merges two halves of a context: two FP8 halves, both wrong by 5.5, still merge well; an FP8 half and a bf16 half do not.
#
# > **You may read:** *TMA multiplies by a scale on the way into shared memory.*
# > **What is so:** TMA copies bytes and converts nothing (ask hopper_sim for a copy between two formats, and it says so). Scales are applied where a multiplication is anyway.
#
# > **You may read:** *FA3 quantises per block.*
# > **What is so:** its released kernel takes one descale per (batch, **KV** head), for Q too; there is neither a scale per block nor a rotation in it. Block scales for K would need the row maximum in
# > scaled units, and a factor of the block in `scale_log2`; block scales for V fit into the second level: `O * shrink + v_scale[n] * T`.
#
# ## 7. Two levels: who has room for T?
#
# `T = P V` of one block starts at zero, and O, in fp32, takes it up: `O = O * shrink + T`. One multiply-add where there was a multiplication. So the price is registers: S of the next block, P, O *and*
# T are alive at the same time. For which head dims does T fit, whole, with two consumers of 240 registers?

# %%
guess = None  # the largest head dim with a whole T and 128 keys per block

# %%
CASES = {
    "d 64, 128 keys": (64, 128, 64),
    "d 128, 128 keys": (128, 128, 128),
    "d 128, 160 keys": (128, 160, 128),
    "d 192, 128 keys": (192, 128, 192),
    "d 192, parts of 64": (192, 128, 64),
    "d 256, 64 keys": (256, 64, 256),
    "d 256, 64 keys, parts of 64": (256, 64, 64),
}
parts = {
    name: {"S": n // 2, "P": n // 8, "O": d // 2, "T": columns // 2, "others, at least": budget.OTHER_REGISTERS}
    for name, (d, n, columns) in CASES.items()
}
limit = CONFIGS[128].consumer_registers
fig, (ax,) = plots.figure(height=3.5)
left = np.zeros(len(parts))
for kind, colour in zip(
    next(iter(parts.values())), (plots.BLUE, plots.SKY, plots.GREEN, plots.RED, plots.LIGHT), strict=True
):
    width = np.array([p[kind] for p in parts.values()])
    ax.barh(list(parts), width, left=left, color=colour, label=kind, height=0.62)
    left += width
ax.axvline(limit, color="black", linewidth=2)
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.set(xlabel=f"registers of a consumer thread (black: the {limit} that there are)", title="S + P + O + T")
fig.legend(*ax.get_legend_handles_labels(), loc="outside upper right", ncols=5, fontsize=9)
plt.show()
whole = [
    d
    for d, n, columns in CASES.values()
    if columns == d and n == 128 and d + columns + n + n // 4 <= 2 * (limit - budget.OTHER_REGISTERS)
]
reveal("T whole, 128 keys, up to head dim", guess, max(whole))

# %% [markdown]
# From head dim 192 on T is computed in **parts**: 64 columns of O at a time, each folded into O before the next starts in the same registers. P is in registers, so a second pass over it
# costs no shared memory; B is read column by column anyway. What it does cost: only the first part runs under the softmax. The others are issued and waited for one by one, and if nobody else uses
# the tensor cores meanwhile, they stand still. Narrower than 64 columns, a WGMMA would not even run at full rate.
#
# (One could also fold every second or fourth block only. But T then spans blocks with different row maxima, and must be rescaled itself, or the maximum held back.)

# %%
if HAS_CUTE:
    display(lesson_views.source(rung.Attention.finish_pv))
    display(lesson_views.source(rung.add_part))

# %% [markdown]
# ### Whose shrink?
#
# Softmax under PV has a trap here. When T of block i - 1 is done, softmax has already met block i, and has *its* factor in hand. T belongs to the maximum of block i - 1; O before the add to that of block i - 2. So O shrinks
# by the factor of block i - 1, which must be kept for one round: two registers (`shrink` in `finish_pair`). With the newer factor, which tests would fail? That is bug lab 04.B3.

# %%
if HAS_CUTE:
    display(lesson_views.source(rung.Attention.finish_pair))

# %% [markdown]
# ## 8. The protocol on the simulated SM
#
# Rung 7's protocol: turns, QK of a block and PV of the block before in flight, `wait_group(1)`. Which share of the FP8 peak will the tensor cores reach at head dim 128? (Rung 7 in bf16 stands beside it.)

# %%
guess = None  # percent of the FP8 peak

# %%
report = reports["turned before"]
q, k, v = (rng.standard_normal((1, n, 1, 128)) for n in (128, 2048, 2048))
in_bf16 = simulated.simulate("7", q, k, v).report
reveal("rung 10, two levels, tensor cores", guess, 100 * report.share("tensor core"), "% of the FP8 peak")
print(f"rung 7, bf16, the same sizes: {100 * in_bf16.share('tensor core'):.0f} % of the bf16 peak")
print(f"so FP8 is {in_bf16.cycles / report.cycles:.2f} times as fast, on one SM, start and end of the tile included")
lines = timeline.from_dict(report.timeline.as_dict())
middle = lines.span[1] / 2
fig, (ax,) = plots.figure(height=2.6)
timeline.gantt(lines.cut(middle - 1800, middle + 1800), ax, ["consumer0", "consumer1", "tensor core"])
ax.set(xlabel="cycles of the SM clock", title="Rung 10, two levels, d 128: 3,600 cycles of the middle")
plt.show()

# %% [markdown]
# Softmax has become the long part: the tensor cores wait for it, whatever the order of turns. That is section 2's account, seen. (FA3 gains more on a card, section 1; it is another kernel, with more keys per block and many
# tiles one after another, where this is one.) What would help is less work per exponential, or exponentials elsewhere: chapter 3's
# tricks (part of them by polynomial on the FMA units; skipping the rescale of O), which in bf16 hardly paid, have more to gain here.
#
# ### Break it
#
# Change one line of the simulated rung: the name of what is patched, the old text, the new one. Predict each verdict first. Some faults the simulated SM names. For others it says "clean",
# and only the numbers know.

# %%
BREAKS = {
    "nothing": None,
    "V's bytes counted as 16-bit": (
        "load_vt",
        "arrive_expect_tx(p.config.v_bytes)",
        "arrive_expect_tx(2 * p.config.v_bytes)",
    ),
    "T is read before PV is done": ("consumer", "await wg.wait_group(0)\n", "pass\n"),
    "V not K-major": ("consumer", "t.v[last_slot].T,", "t.v[last_slot],"),
    "P in natural order": ("consumer", "weights[:, order]", "weights"),
    "Q's descale forgotten": ("consumer", "p.scale_log2 * p.q_descale[kv]", "p.scale_log2"),
    "the newer shrink": ("consumer", "acc_O, acc_T, shrink)", "acc_O, acc_T, next_shrink)"),
}
my_change = None  # ("consumer", "old text", "new text")


def verdict(change):
    """What the simulated SM says, and how far the output is off."""
    p = fp8_problem(keys=512)
    try:
        if change is None:
            simulated.run("11", p)
        else:
            name, old, new = change
            with mock.patch.object(rung10, name, patched(getattr(rung10, name), old, new)):
                simulated.run("11", p)
    except Fault as fault:
        return str(fault).splitlines()[0]
    return f"clean; the output is off by {100 * error_of(p):.0f} % of its size"


for what, change in {**BREAKS, "my change": my_change}.items():
    if change or what == "nothing":
        print(f"{what + ':':30} {verdict(change)}")

# %% [markdown]
# A few percent is what 8 bits cost; compare with the first line. The last three are the dangerous ones. Bug labs 04.B1, B3 and B5 are about them: which *test* sees what.
#
# ## 9. The kernel, and the proof in its machine code
#
# What the loop of rung 7 has become (`finish_pair` stands above):


# %%
def method_diff(name):
    """A method of `Attention` in rung 7 and in rung 10."""
    import difflib

    before, after = (
        inspect.getsource(getattr(lesson_rungs.module(file).Attention, name)).splitlines() for file in (RUNG7, FILE)
    )
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    return "\n".join(line for line in lines if not line.startswith("@@"))


if HAS_CUTE:
    shown = "\n".join(method_diff(name) for name in ("attend", "issue_pair", "issue_pv", "epilogue"))
    whole = lesson_views.rung_diff(RUNG7, FILE, context=0).data.splitlines()[0]
    display(
        Markdown(
            f"{whole}, the host's part and the checks of arguments included. In the loop:\n\n```diff\n{shown}\n```"
        )
    )

# %% [markdown]
# The second level replaces `O *= shrink` by `O = O * shrink + T`. In the machine code that is FFMA instead of FMUL. How many instructions more than one level will the whole kernel have, in percent?

# %%
guess = None  # percent

# %%
ROWS = ("QGMMA", "HGMMA", "F2FP.SATFINITE.E4M3", "SHFL", "PRMT", "FFMA", "FMUL", "MUFU.EX2", "UTMALDG", "STL", "LDL")
if HAS_CUTE:
    from fa3_course import sass

    E4M3 = torch.float8_e4m3fn

    def compiled(d, two_level):
        """Machine code of rung 10, compiled here and now; no GPU is needed."""
        config = rung.make_config(d, False)
        return sass.compile_report(lambda options: rung.compile_rung(config, E4M3, options, two_level))[0]

    found = {
        "rung 7, bf16, d 128": lesson_rungs.machine_code(RUNG7),
        "one level, d 128": compiled(128, False),
        "two levels, d 128": compiled(128, True),
        "two levels, d 256": compiled(256, True),
    }
    one, two = found["one level, d 128"].instructions, found["two levels, d 128"].instructions
    reveal("more instructions with two levels", guess, 100 * (two / one - 1), "%")
    display(lesson_views.sass_table(found, ROWS))
    for name in ("FMUL", "FFMA"):
        before, after = (found[f"{levels}, d 128"].count(name) for levels in ("one level", "two levels"))
        print(f"one level to two, {name}: {before} -> {after}")
    problems = [problem for report in found.values() for problem in report.problems()]
    print("spills, advisories:", problems or "none")
else:
    print("CuTe DSL has no wheels for this system; `fa3 sass` on Linux compiles these kernels without a GPU")

# %% [markdown]
# Read it top down:
#
# * **QGMMA** instead of HGMMA, half as many: a k-step has 32 bytes of k in both, which are 32 keys now.
# * **F2FP.SATFINITE.E4M3** packs two values of P; they land in the operand's registers. **SHFL** are those of the row maxima and sums, as in rung 7. **PRMT** 0: P needs none, V was turned before.
# * One level to two: in both loops (masked and unmasked blocks) each FMUL on O became an FFMA. The FFMAs beyond these stand outside the loops, where the last block's T is added. In the loop the arithmetic is free, as
#   promised; registers are not.
# * **STL, LDL** 0: T fits.
#
# ## 10. Is it right, how fast is it?
#
# On a card, rung 10 is checked as FA3 checks its own: at most twice the error of a plain computation that also rounds P to e4m3. On a laptop, the simulated run above was checked.


# %%
def check_on_card():
    """Shapes around the tiles, GQA, both masks, descales all different."""
    for sq, sk, h, hk, d in ((1, 1, 1, 1, 64), (239, 600, 4, 2, 128), (700, 129, 2, 1, 256)):
        for causal in (False, True):
            q, k, v = (torch.randn(2, n, x, d, device="cuda") for n, x in ((sq, h), (sk, hk), (sk, hk)))
            (q, qd), (k, kd), (v, vd) = (quantize.quantize(x, kv_heads=hk) for x in (q, k, v))
            out, _ = rung.attention(q, k, v, None, causal, qd, kd, vd)
            true = [
                x.double() * f[:, None, :, None].repeat_interleave(x.shape[2] // hk, 2)
                for x, f in ((q, qd), (k, kd), (v, vd))
            ]
            want, _ = reference.attention(*true, causal=causal)
            qt, kt, vt = (x.float().transpose(1, 2).repeat_interleave(h // x.shape[2], 1) for x in true)
            seen = reference.attention_mask(sq, sk, causal, device=q.device)
            scores = (qt @ kt.mT * d**-0.5).masked_fill(~seen, -torch.inf)
            p = (scores - scores.amax(-1, keepdim=True)).exp().nan_to_num(0) * 256
            plain = (p.to(E4M3).float() @ vt / p.sum(-1, keepdim=True)).nan_to_num(0).transpose(1, 2).bfloat16()
            noise = 2 * torch.finfo(torch.bfloat16).eps * want.abs().max()
            allowed = 2 * (plain.double() - want).abs().max() + noise
            assert (out.double() - want).abs().max() <= allowed, (sq, sk, h, hk, d, causal)
    ones = torch.ones(1, 65_536, 1, 128, device="cuda").to(E4M3)
    q, k = (torch.randn(1, n, 1, 128, device="cuda").to(E4M3) for n in (64, 65_536))
    answers = [float(rung.attention(q, k, ones, two_level=two)[0].float().mean()) for two in (False, True)]
    return f"right on every shape; V = 1 at 64k keys: one level {answers[0]:.3f}, two levels {answers[1]:.3f}"


def your_card(d=128, seqlen=8192, two_level=True):
    """TFLOP/s on this machine's card: 16k tokens, hidden size 2048, full; V is turned in each call."""
    import triton

    shape = (16_384 // seqlen, seqlen, 2048 // d, d)
    q, k, v = (torch.randn(shape, device="cuda").to(E4M3) for _ in range(3))
    ms = triton.testing.do_bench(lambda: rung.attention(q, k, v, two_level=two_level), return_mode="median")
    return 4 * seqlen * 16_384 * 2048 / ms / 1e9


if not (HAS_CUTE and rungs.has_hopper()):
    print("rung 10 needs a Hopper to run; its protocol ran on the simulated SM, its machine code is above")
else:
    print(check_on_card())
    print(
        f"your card, d 128, 8k, full: two levels {your_card():.0f}, one level {your_card(two_level=False):.0f} TFLOP/s"
    )

# %%
KERNELS = {
    "FA3 (C++), bf16": ("fa3", "bf16", plots.LIGHT),
    "FA3 (C++), FP8, one level": ("fa3", "fp8", plots.GREY),
    "rung 10, two levels": ("rung10_fp8", "fp8", plots.ORANGE),
    "fa3_lib, FP8, two levels": ("fa3_lib", "fp8", plots.BLUE),
}
shapes = {
    f"d {d}, {'causal' if causal else 'full'}": {"head_dim": d, "causal": causal}
    for d in DIMS
    for causal in (False, True)
}
rows = {
    name: [stored(kernel, dtype, seqlen=16_384, **shape) or np.nan for shape in shapes.values()]
    for name, (kernel, dtype, _) in KERNELS.items()
}
kept = {name: values for name, values in rows.items() if not np.isnan(values).all()}
if "rung 10, two levels" in kept:
    fig, (ax,) = plots.figure(height=3.6)
    plots.grouped_bars(ax, list(shapes), [(name, values, KERNELS[name][2]) for name, values in kept.items()])
    ax.set(xlabel="TFLOP/s", title=f"16k, {RUNS[0].gpu}, {RUNS[0].date[:10]}; bf16 from another run than FP8")
    plt.show()
else:
    print("rung 10: no row stored yet, `fa3 bench` on a Hopper stores some. The library's rows stand in section 11")

# %% [markdown]
# ## 11. What comes before the kernel
#
# Somebody must make 8 bits out of 16. `fa3_lib.quantize` does: one factor per tensor, per (batch, KV head), or per block of rows; powers of two if wanted; and the random rotation of sitting a, fused, so that
# Q and K are read no more often for it.

# %%
q, k, v = (torch.randn(1, 512, h, 128) for h in (4, 2, 2))
signs = quantize.rotation_signs(128, seed=SEED % 2**31)
(q8, qd), (k8, kd) = (quantize.quantize(x, kv_heads=2, signs=signs) for x in (q, k))
scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, dim=2))
back = [x.float() * f[:, None, :, None].repeat_interleave(x.shape[2] // 2, dim=2) for x, f in ((q8, qd), (k8, kd))]
found_scores = torch.einsum("bqhd,bkhd->bhqk", back[0], back[1].repeat_interleave(2, dim=2))
off = float((found_scores - scores).norm() / scores.norm())
print(
    f"Q {tuple(q8.shape)} {q8.dtype}, its factors {tuple(qd.shape)}; scores of the rotated, rounded Q and K: off by {100 * off:.1f} %"
)

# %% [markdown]
# How long does that take? It is memory-bound, so count bytes. A factor per head needs the largest value first: two passes over 16 bits, and one byte written. A factor per block of rows is found in one pass, the block stays on the
# SM. Then V is turned: read and written. Relative to attention at 4k tokens without a mask, head dim 128, as many KV heads as query heads:

# %%
guess = None  # percent of the attention's time, factors per head

# %%
BYTES = {"per head": 3 * (2 + 2 + 1) + 2, "per block": 3 * (2 + 1) + 2, "Q, K, V come in FP8: V's turn alone": 2}
tokens = 2.0 ** np.arange(9, 16)
fig, (ax,) = plots.figure(height=2.9)
for (name, count), colour in zip(BYTES.items(), (plots.RED, plots.ORANGE, plots.BLUE), strict=True):
    share = 100 * (count / DRAM) / (4 * tokens / rate)  # per token and head dim
    ax.loglog(tokens, share, "o-", color=colour, label=name)
    if name == "per head":
        reveal(
            "quantising Q, K and V per head, at least",
            guess,
            share[list(tokens).index(4096)],
            "% of the attention's time",
        )
plots.powers_of_two(ax, tokens.astype(int))
ax.set_yscale("log")
ax.yaxis.set_major_formatter("{x:g}")
ax.set(xlabel="tokens", ylabel="% of the attention's time", title="Before the kernel: bytes at full bandwidth")
ax.legend()
plt.show()

# %% [markdown]
# At short lengths, what FP8 saves is spent before the kernel begins. That is why the paper wants it fused into whatever writes Q and K (the rotary embedding), and why V is best turned by whoever writes
# the cache. How close our kernels come to these bounds, `python -m bench.quantize` measures, on 16k tokens of hidden size 2048:


# %%
def show_quantize(run):
    """Microseconds of each operation, by head dim; "copy" is what the card's memory allows for 4 bytes per element."""
    if run is None:
        print("no row stored yet: `python -m bench.quantize` on a Hopper stores some")
        return
    rows = [row for row in run.rows if row.measured]
    dims, names = sorted({row.head_dim for row in rows}), list(dict.fromkeys(row.kernel for row in rows))
    text = {(row.kernel, row.head_dim): f"{1e3 * row.ms:.0f}" for row in rows}
    print(f"microseconds; {run.gpu}, {run.date[:10]}")
    table(["", *(f"d {d}" for d in dims)], [[name, *(text.get((name, d), "") for d in dims)] for name in names])


show_quantize(results.experiments("quantize"))

# %% [markdown]
# ### The two tables of this chapter
#
# `python -m bench.fp8` asks the library's FP8 forward, and FA3's, on one card in one run. First the **errors**, against context length: V = 1 everywhere (sitting a's first number), V with a mean as real models have it, and a needle whose value
# is to be read, bit by bit. Then the paper's table 3, on the card.

# %%
ANSWERS = {
    "fa3": ("FA3 (C++)", plots.RED),
    "fa3_lib one level": ("fa3_lib, one level", plots.ORANGE),
    "fa3_lib": ("fa3_lib", plots.BLUE),
}


def show_errors(run):
    """A figure with one line per answer for each question, and table 3."""
    if run is None:
        print("no row stored yet: `python -m bench.fp8` on a Hopper stores some")
        return
    found = fp8_tables.errors(run)
    third, text = found.pop("table 3", {}), found.pop("MiniLM", {})
    fig, axes = plots.figure(len(found), height=3)
    for ax, (question, answers) in zip(axes, found.items(), strict=True):
        for who, by_keys in answers.items():
            label, colour = ANSWERS.get(who, (who, plots.GREY))
            wide = 3 if who == "fa3_lib one level" else 1  # FA3's line lies on this one
            style = {"color": colour, "label": label, "linewidth": 2 * wide, "markersize": 5 + 2 * wide}
            ax.plot(list(by_keys), [100 * error for error in by_keys.values()], "o-", **style)
        plots.powers_of_two(ax, sorted({keys for by_keys in answers.values() for keys in by_keys})[::2])
        ax.set_yscale("symlog", linthresh=0.1)
        ax.yaxis.set_major_formatter("{x:g}")
        ax.set_ylim(-0.03, 150)
        ax.set(xlabel="keys", title=question)
        ax.title.set_fontsize(10)
    axes[0].set_ylabel("error, %")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    plt.show()
    for question, answers in found.items():
        most = max(max(by_keys) for by_keys in answers.values())
        said = (f"{ANSWERS.get(who, (who,))[0]} {100 * x[most]:.2g} %" for who, x in answers.items() if most in x)
        print(f"{question}, {most:,} keys: {', '.join(said)}")
    print(f"{run.gpu}, {run.date[:10]}, `python -m bench.fp8`; table 3: root mean square errors")
    table(
        ["table 3", "paper", "fa3_lib"],
        [[who, fp8_tables.PAPER.get(who, ""), f"{x:.1e}"] for who, by_keys in third.items() for x in by_keys.values()],
    )
    if text:
        print("MiniLM's activations (chapter 1), relative error of the whole output:")
        table(["", "fa3_lib"], [[who, f"{100 * x:.1f} %"] for who, by_keys in text.items() for x in by_keys.values()])


show_errors(results.experiments("fp8error"))

# %% [markdown]
# * **V = 1**: sitting a's adder, on a card. FA3 and our one level agree: from a few thousand keys on the answer is too small, and at the right end most of it is missing. Two levels stay right to the output's
#   own rounding. With equal scores the sum is exact until it has outgrown the adder, and then stands still.
# * **V has a mean**: the same loss, since the mean is what the sum keeps growing by. Only a V of mean zero hides it.
# * **needle**: one key has about half of all the weight, and its value is read as bits, above the mean or below it. It survives longest; at the right end many bits are read wrong with one level, none with two.
# * **Table 3**: the rotation halves the error, as in the paper. A factor per head or per block of 128 rows instead of one per tensor hardly helps, as in the paper, since all heads were drawn alike and a float is as exact at any scale (sitting a). The sizes
#   differ from the paper's: outliers that rare and that large make each draw a little different.
#
# Then the **speed**: the whole call with V's turn in it, the kernel alone, one level for comparison, and FA3.

# %%
CALLS = {
    "fa3": ("FA3 (C++), one level", plots.GREY),
    "fa3_lib one level": ("fa3_lib, one level", plots.SKY),
    "fa3_lib": ("fa3_lib, two levels, the whole call", plots.BLUE),
    "fa3_lib kernel": ("fa3_lib, two levels, the kernel", plots.GREEN),
}


def show_speeds(run):
    """TFLOP/s at the longest sequences as bars, and the share of the call that turns V, by length."""
    if run is None:
        print("no row stored yet: `python -m bench.fp8` on a Hopper stores some")
        return
    rows = {(row.kernel, row.head_dim, row.causal, row.seqlen): row for row in run.rows if row.measured}
    dims, lengths = ({at[i] for at in rows if at[0] == "fa3_lib"} for i in (1, 3))
    shapes = [(d, causal, max(lengths)) for d in sorted(dims) for causal in (False, True)]
    names = [f"d {d}, {'causal' if causal else 'full'}" for d, causal, _ in shapes]
    speed = {name: [rows[name, *at].tflops if (name, *at) in rows else np.nan for at in shapes] for name in CALLS}
    _, (ax,) = plots.figure(height=4.2)
    plots.grouped_bars(ax, names, [(CALLS[name][0], values, CALLS[name][1]) for name, values in speed.items()])
    ax.set(xlabel="TFLOP/s", title=f"FP8, {max(lengths) // 1024}k, {run.gpu}, {run.date[:10]}")
    plt.show()

    def share(d, n):
        turn, call = (rows.get((name, d, False, n)) for name in ("transpose_v", "fa3_lib"))
        return f"{100 * turn.ms / call.ms:.1f} %" if turn and call else ""

    print("V's turn, share of the whole call, full:")
    table(
        ["tokens", *(f"d {d}" for d in sorted(dims))],
        [[n, *(share(d, n) for d in sorted(dims))] for n in sorted(lengths)],
    )


show_speeds(results.experiments("fp8"))

# %% [markdown]
# V's turn takes about what section 4 counted: next to nothing at long sequences, a visible part of the call at short ones, where FA3 turns V inside its kernel. Up to a few hundred or
# thousand queries the library turns V inside, too (`fp8_config.few_queries`): the share is then what a kernel of its own would have taken. (Where the kernel
# alone looks slower than the whole call you see the measurement's noise, a few percent.)
#
# Two levels give the right sums. What did they cost? Over all lengths from 1k on, full and causal, how fast is `fa3_lib` with two levels, as a multiple of FA3 with one, at head dim 256?

# %%
guess = None  # times FA3's speed

# %%
BOTH = (False, True)
RATIOS = {  # whose speed over whose, with which masks (causal or not)
    "two levels / FA3": ("fa3_lib", "fa3", BOTH),
    "the same, full": ("fa3_lib", "fa3", (False,)),
    "the same, causal": ("fa3_lib", "fa3", (True,)),
    "two levels, the kernel / FA3": ("fa3_lib kernel", "fa3", BOTH),
    "one level / FA3": ("fa3_lib one level", "fa3", BOTH),
    "two levels / one level": ("fa3_lib", "fa3_lib one level", BOTH),
}


def ratios(run):
    """{(name, head dim): geometric mean of the ratio of two speeds} over all masks and lengths from 1k on."""
    dims = sorted({row.head_dim for row in run.select(direction="fwd")})
    found = {
        (name, d): comparison.mean_ratio(run, ours, theirs, d, masks)
        for name, (ours, theirs, masks) in RATIOS.items()
        for d in dims
    }
    return {at: ratio for at, ratio in found.items() if ratio is not None}


def show_ratios(run):
    """The ratios as a table."""
    if run is None:
        print("no row stored yet: `python -m bench.fp8` on a Hopper stores some")
        return
    found = ratios(run)
    dims = sorted({d for _, d in found})
    reveal("two levels over FA3, d 256", guess, found.get(("two levels / FA3", 256), np.nan), "times")
    table(
        ["times as fast", *(f"d {d}" for d in dims)],
        [[name, *(f"{found[name, d]:.2f}" if (name, d) in found else "" for d in dims)] for name in RATIOS],
    )


show_ratios(results.experiments("fp8"))

# %% [markdown]
# With one level `fa3_lib` is where FA3 is at head dims 64 and 128, within a few percent, and a little ahead at 256. With two it is ahead at head dims 64 and 128, with either mask (the right sums for less time), and behind at 256. The last line compares our own
# two. For the reason at 256 see what each configuration keeps in a consumer's registers, and what it would keep if the softmax of a block ran under PV of the block before:


# %%
def register_row(d, two_level):
    """One configuration of `fa3_lib`, its registers for S, P, T and O, and those that overlap takes."""
    config = fp8_config(d, d, False, two_level=two_level)
    side_by_side = d // 2 + config.tile_n // 2 + config.tile_n // 8 + (config.pv_columns // 2 if two_level else 0)
    return [
        f"d {d}, {'two levels' if two_level else 'one level'}",
        f"{config.tile_m} x {config.tile_n}",
        f"{config.parts} of {config.pv_columns} columns" if two_level else "none",
        config.accumulator_registers,
        side_by_side,
        config.consumer_registers - budget.OTHER_REGISTERS,
    ]


table(
    ["", "rows x keys", "T in parts", "registers", "side by side", "there are"],
    [register_row(d, two_level) for two_level in (True, False) for d in DIMS],
)

# %% [markdown]
# With two levels, S, P, T and O fit side by side at none of them. So S, and then P and T, take turns in the same registers, and a consumer's softmax has only the products of the *other* consumers to run
# under: three consumers at 64 and 128, but two at 256, where T's parts are also awaited and added one by one. With one level there is no T, and a consumer overlaps with itself. (The other way was measured: with two levels side by side, 64 and 128 lose,
# and 256 spills; bench/NOTES.md.)
#
# ### What the library does beyond rung 10
#
# A kernel whose products take half the time of bf16's is bound by everything else, and on Hopper that is first of all the number of *instructions* per score. Two of them can go:
#
# * **The addition of P.** V gets eight rows of ones below it in shared memory (they are K-major, so that is 1 KB per stage, written once). P V then has eight columns more, and each of them is the sum of P, for a ninth part of a narrow product. No instruction adds weights any more.
# * **The maximum.** In a block without a mask any number near the row's maximum serves as well. The kernel keeps the one of the blocks before (chapter 3, section 13). In e4m3 there is little room above: with an exponent offset of 4 instead of 8 a weight may become 16 times as large before it reaches 256. Then
#   a bit of the packed bytes says so, all warps of the consumer vote, and the block is done again with a new maximum.
#
# Each alone would be wrong. The largest weight used to be exactly 256, a number that e4m3 has; now it is any number, and is rounded by up to 6 %. For a row that one key dominates that is the whole answer. Guess first: such a row has one weight of 0.9 in all, rounded to e4m3. How wrong is its output, at most, if the sum that it is divided by is
# the exact one? And if it is the sum of the *rounded* weights?

# %%
guess = None  # percent, with the exact sum


# %%
def dominated_rows(offset_of_max, rounded_sum, rows=2000, keys=128):
    """The largest error of rows whose first key has 90 % of the weight: V is 1 there and 0 elsewhere, so the answer is 0.9."""
    weights = rng.random((rows, keys))
    weights[:, 1:] *= 0.1 / weights[:, 1:].sum(1, keepdims=True)
    weights[:, 0] = 0.9
    scaled = weights / weights.max(1, keepdims=True) * 2.0 ** offset_of_max(rows)[:, None]
    rounded = fp8.to_grid(scaled, fp8.E4M3)
    answer = rounded[:, 0] / (rounded if rounded_sum else scaled).sum(1)
    return float(np.abs(answer / 0.9 - 1).max())


own, earlier = (lambda rows: np.full(rows, 8.0)), (lambda rows: rng.uniform(4, 7.9, rows))
found = {
    "own maximum, exact sum": dominated_rows(own, False),
    "own maximum, sum of rounded P": dominated_rows(own, True),
    "an earlier maximum, exact sum": dominated_rows(earlier, False),
    "an earlier maximum, sum of rounded P": dominated_rows(earlier, True),
}
reveal("an earlier maximum, exact sum", guess, 100 * found["an earlier maximum, exact sum"], "%")
table(["", "largest error"], [[name, f"{100 * error:.1f} %"] for name, error in found.items()])

# %% [markdown]
# So the two belong together: the row of ones is what allows an earlier maximum. With one level, where the sum would stay in the tensor core's 13 bits, it cannot be used (a sum of positive numbers is what they cut most), and the library keeps both maximum and additions there. That is one reason why its two levels
# are the faster ones in long sequences at head dims 64 and 128; the other one comes at the end of this section.
#
# ### Where the causal mask costs more than FA3 pays
#
# An earlier maximum must hold. How often does it not? Draw scores from N(0, 1), as the benchmark's inputs give them, and count the blocks that a consumer's 64 rows have to do twice, for a tile in the middle of 16k keys. Without a mask the first block shows each row 128 keys.
# On the diagonal it shows the first row one. Guess the number per tile.

# %%
guess = None  # blocks done twice by a consumer in a causal tile


# %%
def done_twice(keys, causal, own_maxima=0, offset=4):
    """Blocks of 128 keys that 64 rows in the middle of `keys` do twice: some weight is above 2^(8 - offset) times its row's maximum so far."""
    first = keys // 2 + 64 * int(rng.integers(8))
    end = first + 64 if causal else keys
    row_max, twice = np.full(64, -np.inf), 0
    for block in reversed(range(-(-end // 128))):
        scores = rng.standard_normal((64, 128))
        if causal:
            visible = block * 128 + np.arange(128) <= first + np.arange(64)[:, None]
            scores = np.where(visible, scores, -np.inf)
        masked = (causal and (block + 1) * 128 > first + 1) or row_max.max() == -np.inf
        too_large = scores.max(1) > row_max + (7.95 - offset) * np.log(2)
        if masked or own_maxima > 0:
            own_maxima -= not masked
            row_max = np.maximum(row_max, scores.max(1))
        elif too_large.any():
            twice += 1
            row_max = np.where(too_large, scores.max(1), row_max)
    return twice


means = {
    (causal, more): float(np.mean([done_twice(16_384, causal, more) for _ in range(20)]))
    for causal, more in ((False, 0), (True, 0), (True, 1))
}
reveal("blocks done twice, causal", guess, means[True, 0], "blocks")
table(
    ["", "done twice, of 64 to 128 blocks"],
    [
        ["no mask", f"{means[False, 0]:.1f}"],
        ["causal", f"{means[True, 0]:.1f}"],
        ["causal, one block more with a maximum of its own", f"{means[True, 1]:.1f}"],
    ],
)

# %% [markdown]
# A few blocks of 64 would be a few percent. But three consumers take turns, and each of them makes the other two wait when it does a block twice: at head dim 64 causal rows lost a fifth against those without a mask (bench/NOTES.md). The cure is in the table's last line, and in the library
# (`Fp8Consumer.attend`). What is left of the difference, at 16k?

# %%
by_mask = [stored("fa3_lib", "fp8", head_dim=64, causal=causal, seqlen=16_384) for causal in (True, False)]
if all(by_mask):
    print(f"causal over full, d 64, 16k: {by_mask[0] / by_mask[1]:.2f}")

# %% [markdown]
# ### Every third exponential without the MUFU
#
# At head dim 64 the exponentials of a block take twice the time of its FP8 products (section 2): there the MUFU is the longest queue. In bf16 a polynomial lost (chapter 3, section 12), because each weight needed about 8 instructions. How many does a weight need that is
# rounded to 3 bits of mantissa anyway? Look at a float's bits: they are its exponent, and behind it the fraction of its mantissa. Write x + 127 there as a fixed-point number, and you have
# (1 + fraction of x) * 2^(integer part of x), which is nearly 2^x: equal at whole numbers, too large by up to 6 % between them. Two multiply-adds and a shift do it (`softmax.exp2_of`): adding 512 puts the digits of x at the
# end of a mantissa, and the shift moves them to where the exponent is.
#
# P is rounded to e4m3 afterwards. How much larger is the root of its mean squared error, when every third weight is made so, and the constant is chosen for a mean of zero?

# %%
guess = None  # percent more


# %%
fraction = np.linspace(0, 1, 10_001)
EXCESS = np.log2(np.mean((1 + fraction) / 2**fraction))  # on average; the kernel's EXP2_MEAN


def exp2_by_shift(x):
    """(1 + fraction) * 2^floor of x - EXCESS, as the kernel makes it: a fixed-point number, shifted to where a float's exponent is."""
    word = (512 + 127 - EXCESS + x).astype(np.float32).view(np.uint32) << np.uint32(9)
    return word.view(np.float32)


x = rng.uniform(-6, 4, 300_000)
third = np.arange(x.size) % 3 == 2
made = np.where(third, exp2_by_shift(x), np.exp2(x))


def rounding_error(weights):
    """The root of the mean square of P's relative error."""
    return float(np.sqrt(np.mean((fp8.to_grid(weights, fp8.E4M3) / np.exp2(x) - 1) ** 2)))


plain, mixed, shifted = (rounding_error(w) for w in (np.exp2(x), made, exp2_by_shift(x)))
reveal("every third weight without the MUFU", guess, 100 * (mixed / plain - 1), "% more error of P")
fig, (ax,) = plots.figure(height=2.6)
grid = np.linspace(0, 3, 600)
for name, values, colour in (
    ("rounded to e4m3", fp8.to_grid(np.exp2(grid), fp8.E4M3), plots.GREY),
    ("by a shift", exp2_by_shift(grid), plots.BLUE),
):
    ax.plot(grid, 100 * (values / np.exp2(grid) - 1), color=colour, label=name)
ax.set(xlabel="x", ylabel="percent off", title="2^x, by a shift and as e4m3 rounds it")
plots.name_lines(ax)
plt.show()
table(
    ["P", "relative error"],
    [
        ["MUFU", f"{100 * plain:.2f} %"],
        ["every third by a shift", f"{100 * mixed:.2f} %"],
        ["all by a shift", f"{100 * shifted:.2f} %"],
    ],
)
display(Markdown(notes.find("Every third exponential").quote("Prediction", "Outcome", "Why", "Trap")))

# %% [markdown]
# Three details make it safe. The kernel counts x *downwards* from 9, in a number that a multiply-add with `.sat` keeps between 0 and 1 for nothing: what is far below becomes exactly 0, and what is too large, or NaN, becomes 2^9, which the vote above sees. Where a block is done again, a NaN is put back. And a call
# that asks for the LSE gets the MUFU for every weight: a sum of weights forgives an error of 4 % in some, its logarithm in a row that one key dominates does not.
#
# ### What would be next
#
# * **Head dim 256.** O alone takes more than half of the registers. Fewer keys per block make room, and make products short; parts of 64 columns with two in flight spill.
# * **Peaked scores.** Where each block's scores jump by more than 2.8 (in natural units) above all before them, every block is done twice.

# %% [markdown]
# ## 12. Three questions
#
# Try to answer before you open them.
#
# <details><summary><b>1.</b> Why is P the A operand from registers, and not written to shared memory, where its order would not matter?</summary>
#
# It would cost shared memory twice (written once, read by the product), the unit that is nearly full (section 2), and a proxy fence and a barrier in every block. In registers it costs a renaming.
# </details>
#
# <details><summary><b>2.</b> The output tile has memory of its own, unlike rung 7's. Why does it not take Q's place?</summary>
#
# It has 16 bits, Q has 8: a consumer's 64 rows of O would cover the other consumer's Q, which may still be read. FA3 puts it where V was, and lets all consumers meet before (bug lab 04.B6).
# </details>
#
# <details><summary><b>3.</b> Two levels cost no instruction. Why does FA3 not have them?</summary>
#
# They cost registers, and registers are keys per block: FA3 takes 224 at head dim 128, where two levels leave room for 128 (or for 192 with T in parts). It is a choice of speed on tests with V of mean zero, where nobody sees the difference
# (sitting a, section 3).
# </details>
#
# ## Where to go
#
# * The lab: 04.9 to 04.12, and six bug labs.
# * `fa3 sim 10` and `fa3 sim 11` show one level and two on the simulated SM, for other sizes.
# * Change `TILES` in a copy of the rung: does `{128: (128, 160)}` compile? What does the budget say, and what the machine code?
#
# **Sources.** Shah et al. 2024 (FlashAttention-3, arXiv:2407.08608: section 3.3) and its C++ source (the transposition, the order of V's keys, offset 8, descales); NVIDIA, PTX ISA (`wgmma`, `ldmatrix`, `prmt`, `stmatrix`);
# DeepSeek-V3 report (arXiv:2412.19437: a second level of accumulation).
