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
# # Chapter 4, sitting a: the numerics of FP8
#
# *60 to 90 minutes. Runs on any laptop, in NumPy; no GPU is used. The kernel is sitting b's, [`lesson_b.ipynb`](lesson_b.ipynb).*
#
# A Hopper multiplies 8-bit floats twice as fast as 16-bit ones. FlashAttention-3 uses this, and its paper promises an error that
# is small as well. In this sitting you find out, bit by bit, what an FP8 kernel computes: where each rounding happens, which
# of them hurts, and what can be done about it. Everything is emulated by one file,
# [`steps/fp8_numerics.py`](steps/fp8_numerics.py), and compared with what a card answered.
#
# You need chapter 1's loop (`row_max`, `row_sum`, `acc_O`). Where a cell says `guess = None`, write a number first.

# %%
import json
import math
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Markdown, display
from matplotlib.patches import Rectangle

from fa3_course import lesson_views, paths, plots, rungs
from fa3_lib import reference

fp8 = rungs._module("chapters/04_fp8/steps/fp8_numerics.py")
E4M3, E5M2, Recipe = fp8.E4M3, fp8.E5M2, fp8.Recipe

plots.use_style()
SEED = np.random.SeedSequence().entropy % 2**32
rng = np.random.default_rng(SEED)  # fresh inputs in every run; to repeat one, write its seed here
CARD = json.loads((paths.checkout() / "chapters/04_fp8/measured_fa3_fp8.json").read_text(encoding="utf-8"))
print(f"seed {SEED}")


def reveal(what, guess, value, unit=""):
    """Shows a value beside the reader's guess."""
    told = "no guess yet" if guess is None else f"you said {guess:g}"
    print(f"{what}: {value:.4g} {unit} ({told})")


def truth(q, k, v):
    """The output in fp64."""
    return reference.attention(*(torch.from_numpy(np.asarray(x, np.float64)) for x in (q, k, v)))[0].numpy()


def rms(x):
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def table(head, rows):
    """Rows of text as a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    display(Markdown("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)))


# %% [markdown]
# ## 1. One number that hurts
#
# Let every value of V be 1. Attention is a weighted mean of V's rows, so the answer is 1, whatever the queries and the keys
# are. We asked FA3's FP8 kernel on an H200, with random queries and keys and 16,384 keys. How far from 1 was it?

# %%
guess = None  # FA3's FP8 answer, where 1 is right

# %%
KEYS = CARD["keys"]
spread = CARD["fp8"][1]
reveal(f"{spread['name']}, 16k keys: FA3's FP8 answers", guess, spread["output"][KEYS.index(16384)])

COLOURS = (plots.RED, plots.BLUE, plots.GREEN)
fig, (ax,) = plots.figure(height=3.3)
ax.plot(KEYS, CARD["bf16"]["output"], "s-", color=plots.GREY, label=CARD["bf16"]["name"])
for row, colour in zip(CARD["fp8"], COLOURS, strict=True):
    ax.plot(KEYS, row["output"], "o-", color=colour, label=row["name"])
plots.powers_of_two(ax, KEYS)
ax.set(xlabel="keys", ylabel="output", ylim=(0, 1.08), title=f"V = 1 everywhere, {CARD['gpu']}: the right answer is 1")
ax.legend()
plt.show()
print(f"{CARD['kernel']}; torch {CARD['torch']}, driver {CARD['driver']}, {CARD['date']}; {CARD['how']}")

# %% [markdown]
# That is not a rounding error. At 128k keys most of the answer is missing. Neither 8-bit inputs nor 8-bit
# probabilities explain it: 1 is exact in every format, and errors of single probabilities average out over many keys.
#
# Look at the red line. With all logits equal every probability is the same, FA3 stores it as $P = 2^8$ (section 7 says why), and the sum
# over the keys is exact up to 16k keys. Then the answer halves whenever the number of keys doubles: **the sum has stopped growing.** Where exactly,
# and what does that say about the adder?

# %%
guess = None  # how many bits after the leading one does the tensor core's sum keep?

# %%
equal = CARD["fp8"][0]
stop = round(equal["output"][KEYS.index(32768)] * 32768)  # answer = (sum when it stopped) / (P times all keys)
print(
    f"half of 32,768 keys were counted: the sum of P = 2^8 stops at {stop:,} keys, that is at 2^{math.log2(stop * 256):.0f}"
)
print(
    "a sum of 2^22 no longer feels a term of 2^8; below 2^22 it felt every one: its last bit is worth 2^8 there, 2^9 above"
)
reveal("bits after the leading one", guess, math.log2(stop * 256) - 9, "bits")

BITS = (12, 13, 14)
fig, (left, right) = plots.figure(2, height=3.7, widths=(1, 1.35))
seen = np.arange(1, 33) * 1024
for bits, colour in zip(BITS, COLOURS, strict=True):
    acc, sums = np.zeros((1, 1), np.float32), []
    for _ in seen:
        acc = fp8.tensor_core(np.full((1, 1024), 256.0), np.ones((1024, 1)), acc, bits)
        sums.append(float(acc[0, 0]) / 256)
    left.plot(seen / 1024, np.array(sums) / 1024, color=colour, label=f"{bits} bits")
left.set(
    xlabel="thousands of keys added", ylabel="thousands of keys in the sum", title="Equal terms: where a sum stops"
)
left.legend()

# a term of P = 176 beside running sums of growing size
term = 176
for y, exponent in enumerate(range(15, 23)):
    last = exponent - 13
    for x, weight in enumerate(range(22, -1, -1)):
        bit = term >> weight & 1
        inside = last <= weight <= exponent
        colour = plots.SKY if inside else "white"
        colour = plots.BLUE if bit and inside else plots.RED if bit else colour
        right.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=plots.LIGHT))
right.set(xlim=(0, 23), ylim=(8, 0), xlabel="bit worth 2^…", ylabel="running sum of size 2^…")
right.set_xticks(np.arange(0, 23, 2) + 0.5, range(22, -1, -2))
right.set_yticks(np.arange(8) + 0.5, range(15, 23))
right.grid(False)
right.set_title("Adding 176: bits kept (dark blue), cut (red)")
plt.show()

# %% [markdown]
# The right picture is the whole trouble. Light blue is the window of 14 bits, the leading one and 13 more, that the adder has for
# a running sum of that size. The bits of the next term must fall into it. The larger the sum, the fewer bits of a term survive, and
# nothing is rounded up: what falls out is lost, always in the same direction. To a sum of $2^{20}$ the term 176 counts as
# 128, and from $2^{21}$ on it counts as nothing.
#
# ## 2. A tensor core in ten lines
#
# NVIDIA does not document this adder. Public measurements (DeepSeek-V3's report; bit-exact models such as MMA-Sim, arXiv:2511.10909) and the table above
# agree on this rule for one step of 32 products: *align the 32 products and the running sum to the largest of them, cut each below the 13th bit, add, cut again.*

# %%
display(lesson_views.source(fp8.tensor_core))

# %% [markdown]
# The equal logits gave us the 13. Now the test of the model: the other two curves, with *no* constant left to choose. The emulation walks
# the key tiles of FA3 at head dim 128 (224 keys, last tile first), with online softmax and P rounded to e4m3. V has one column instead of
# 128, because all columns are equal.


# %%
def answer_to_ones(std, keys, mean_only=True, **options):
    """The card's experiment, emulated; scores are added exactly (their sums are 4 steps long: nothing grows large)."""
    q, k = (std * rng.standard_normal((1, n, 1, 128)) for n in (64, keys))
    options = {"scales": "none", "qk_bits": None, "tile_n": 224, **options}
    out, _ = fp8.attention(q, k, np.ones((1, keys, 1, 1)), recipe=Recipe(**options))
    return float(out.mean()) if mean_only else out


LENGTHS = [keys for keys in KEYS if keys <= 65536]  # longer ones take half a minute more
emulated = {row["name"]: [answer_to_ones(row["q_k_std"], n) for n in LENGTHS] for row in CARD["fp8"]}
others = {bits: [answer_to_ones(spread["q_k_std"], n, pv_bits=bits) for n in LENGTHS[:-1]] for bits in (12, 14)}

fig, (left, right) = plots.figure(2, height=3.6)
for row, colour in zip(CARD["fp8"], COLOURS, strict=True):
    left.plot(LENGTHS, emulated[row["name"]], "-", color=colour, label=row["name"])
    left.plot(KEYS[: len(LENGTHS)], row["output"][: len(LENGTHS)], "o", color=colour)
left.set(xlabel="keys", ylabel="output", ylim=(0, 1.08), title="Lines: 13 bits, emulated. Dots: card")
left.legend()
for bits, style in ((12, ":"), (14, "--")):
    right.plot(LENGTHS[:-1], others[bits], style, color=plots.GREY, label=f"{bits} bits")
right.plot(LENGTHS, emulated[spread["name"]], color=plots.BLUE, label="13 bits")
right.plot(LENGTHS, spread["output"][: len(LENGTHS)], "o", color=plots.BLUE, label="card")
right.set(xlabel="keys", ylim=(0, 1.08), title=f"{spread['name']}: one bit more or less")
right.legend()
for ax in (left, right):
    plots.powers_of_two(ax, LENGTHS)
plt.show()
gap = max(abs(np.subtract(emulated[row["name"]], row["output"][: len(LENGTHS)])).max() for row in CARD["fp8"])
print(
    f"largest distance between emulation and card, all three curves: {gap:.3f} (the logits are drawn anew in each run)"
)

# %% [markdown]
# One rule and one constant explain all of the card's answers. We do not claim the last bit: for that, the order of the cuts inside a step
# would have to be known. The rule is enough to *design* with.
#
# **The mend.** A sum goes wrong when it is much larger than its terms. So never let it grow: multiply each key tile's P and V into
# a *fresh* accumulator, and add that to `acc_O` with ordinary fp32 instructions. `acc_O` is rescaled once per tile anyway
# (`acc_O * rescale`); the multiplication becomes a multiply-add, `acc_O * rescale + T`. It costs no instruction, it costs the
# registers of `T`. How well does it work at 64k keys?

# %%
guess = None  # percent of the answer missing at 64k keys, two-level accumulation, tiles of 224 keys

# %%
two_level = {row["name"]: [answer_to_ones(row["q_k_std"], n, two_level=True) for n in LENGTHS] for row in CARD["fp8"]}
reveal(f"missing at 64k, {spread['name']}", guess, 100 * (1 - two_level[spread["name"]][-1]), "%")

tiles = [32, 64, 128, 224, 512, 1024, 2048, 4096]
missing = [
    100 * abs(1 - answer_to_ones(spread["q_k_std"], 16384, two_level=True, tile_n=n, mean_only=False)).max()
    for n in tiles
]
fig, (left, right) = plots.figure(2, height=3.5)
for row, colour in zip(CARD["fp8"], COLOURS, strict=True):
    left.plot(LENGTHS, two_level[row["name"]], "-", color=colour, label=row["name"])
    left.plot(LENGTHS, emulated[row["name"]], ":", color=colour)
left.set(xlabel="keys", ylabel="output", ylim=(0, 1.08), title="Two levels (solid), one level (dotted)")
plots.powers_of_two(left, LENGTHS)
left.legend()
right.loglog(tiles, missing, "o-", color=plots.BLUE)
right.axhline(0.5, color=plots.RED, linewidth=1)
right.text(tiles[0], 0.53, "0.5 %", color=plots.RED, fontsize=9)
plots.powers_of_two(right, tiles)
right.set_yscale("log")
right.yaxis.set_major_formatter("{x:g}")
right.set(xlabel="keys per fresh accumulator", ylabel="% off, worst row", title="16k keys: how often to start afresh")
plt.show()

# %% [markdown]
# A tile of any size that fits into shared memory is small enough. The length of the context no longer matters.
#
# ## 3. Why nobody saw it
#
# The usual test draws V from N(0, 1). Positive and negative terms cancel, the sum never grows, and little is cut. Below, the error of
# one-level and two-level accumulation at 16k keys while the mean of V moves away from 0; and where the columns of V of a real model lie: the
# sentence encoder of chapter 1, counted over the channels of all its heads.

# %%
means = [0, 0.03, 0.1, 0.3, 1, 3]
errors = {False: [], True: []}
q, k = (0.5 * rng.standard_normal((1, n, 1, 128)) for n in (64, 16384))
noise = rng.standard_normal((1, 16384, 1, 4))
for mean in means:
    want = truth(q, k, noise + mean)
    for two, found in errors.items():
        out, _ = fp8.attention(q, k, noise + mean, recipe=Recipe(qk_bits=None, two_level=two))
        found.append(100 * rms(out - want) / rms(want))

text = np.load(paths.data("minilm_qkv.npz"))
# (layers, tokens, heads, head_dim); the layers stand where a batch would
MINILM = [np.moveaxis(text[name], 1, 2).astype(np.float32) for name in "qkv"]
off_centre = abs(MINILM[2].mean(axis=1) / MINILM[2].std(axis=1)).ravel()

fig, (left, right) = plots.figure(2, height=3.4)
for two, label, colour in ((False, "one level", plots.RED), (True, "two levels", plots.BLUE)):
    left.plot(means, errors[two], "o-", color=colour, label=label)
left.set_xscale("symlog", linthresh=0.03)
left.set_xticks(means, [f"{m:g}" for m in means])
left.minorticks_off()
left.set(xlabel="mean of V (standard deviation 1)", ylabel="% of the output", title="Error at 16k keys")
left.legend()
right.hist(off_centre, bins=50, color=plots.BLUE)
right.set(xlabel="|mean| / standard deviation over tokens", ylabel="channels", title="V of a real model")
plt.show()
print(
    f"{(off_centre > 0.1).mean():.0%} of the channels have a mean above 0.1 standard deviations, the largest {off_centre.max():.1f}"
)

# %% [markdown]
# With mean 0 both lines show the same error, a few percent *of an output that itself is almost 0*. From a mean of a tenth of a standard
# deviation on, the one-level error is all that one sees. Real channels are there. A test that can find a fault needs inputs on
# which the fault shows: V = 1 is the simplest.
#
# The *place* of a key matters as well. One key in 16,384 shall weigh as much as all others together, as when a model has found what it looks for. V is 1 everywhere. FA3
# walks from the last key to the first. Is it better for the needle to stand at the end of the context, where it is added first, or at the beginning?

# %%
guess = None  # the answer when the needle is the very last key, so that it is added first

# %%
places = np.linspace(0, 16383, 9).astype(int)
needle = {False: [], True: []}
for place in places:
    logits = 0.25 * rng.standard_normal(16384)
    logits[place] = math.log(np.exp(np.delete(logits, place)).sum())
    q, k = np.ones((1, 1, 1, 1)), logits.reshape(1, -1, 1, 1)
    for two, found in needle.items():
        recipe = Recipe(q=None, k=None, qk_bits=None, two_level=two, tile_n=224)
        out, _ = fp8.attention(q, k, np.ones((1, 16384, 1, 1)), softmax_scale=1, recipe=recipe)
        found.append(float(out[0, 0, 0, 0]))
reveal("needle at the end, one level", guess, needle[False][-1])

fig, (ax,) = plots.figure(height=3)
for two, label, colour in ((False, "one level", plots.RED), (True, "two levels", plots.BLUE)):
    ax.plot(places, needle[two], "o-", color=colour, label=label)
ax.set(xlabel="key that holds the needle (the last is read first)", ylabel="output", ylim=(0, 1.08), title="1 is right")
ax.legend(loc="lower left")
plt.show()

# %% [markdown]
# A needle at the end makes the running sum large at once, and most keys after it are too small to be felt: nearly half of the answer is gone. At the beginning the others have been
# added among themselves before the needle comes, and lose what they lose without a needle.
#
# ## 4. Two formats, bit by bit
#
# **e4m3**: a sign, 4 exponent bits (bias 7), 3 mantissa bits. **e5m2**: a sign, 5 exponent bits (bias 15), 2 mantissa bits. A code with exponent field 0 is
# *subnormal*: no hidden one in front. e5m2 keeps IEEE's infinities and NaNs at the top exponent; e4m3 spends only its last code on NaN and uses
# the rest for numbers, which buys the range from 240 to 448.

# %%
FIELDS = {E4M3: (1, 4, 3), E5M2: (1, 5, 2)}


def draw_codes(ax, fmt, named):
    """One row of eight bit cells per code: sign grey, exponent blue, mantissa orange; what it means on the right."""
    owners = np.repeat([plots.LIGHT, "#A9D3EE", "#F5C266"], FIELDS[fmt])
    for y, (code, name) in enumerate(named):
        for x in range(8):
            ax.add_patch(Rectangle((x, y), 1, 1, facecolor=owners[x], edgecolor="white"))
            ax.text(x + 0.5, y + 0.5, code >> (7 - x) & 1, ha="center", va="center", fontsize=10)
        value = float(fp8.decode(np.uint8(code), fmt))
        ax.text(8.3, y + 0.5, f"{value:.6g}  {name}", va="center", fontsize=10)
    ax.set(xlim=(0, 17), ylim=(len(named), 0), title=fmt.name)
    ax.set_axis_off()


fig, axes = plots.figure(2, height=3.4)
for ax, fmt in zip(axes, FIELDS, strict=True):
    one = int(fp8.encode(1.0, fmt))
    codes = [(0, "zero"), (1, "smallest"), (2**fmt.mantissa_bits, "smallest normal"), (one, "one"), (one + 1, "next")]
    codes += [(fmt.largest_code, "largest"), (fmt.largest_code + 1, "")]
    draw_codes(ax, fmt, codes + ([(0x7F, "")] if fmt.ieee else [(0xFF, "")]))
plt.show()

# %% [markdown]
# Both have 256 codes. What differs is how they are spread: e4m3 has steps of an eighth between powers of two, over 15 octaves of normal numbers;
# e5m2 has steps of a quarter, over 30. What is the worst relative error of rounding a normal number to e4m3?

# %%
guess = None  # percent

# %%
x = np.geomspace(2.0**-18, 2.0**17, 6000)
reveal("worst relative error, normal e4m3", guess, 100 / (2 * 2**E4M3.mantissa_bits + 1), "% (half a step at 1 + 1/16)")
fig, (ax,) = plots.figure(height=3.3)
for fmt, colour in ((E5M2, plots.ORANGE), (E4M3, plots.BLUE)):
    ax.plot(x, 100 * abs(fp8.to_grid(x, fmt) - x) / x, color=colour, linewidth=0.8, label=fmt.name)
    for edge in (fmt.smallest_normal, fmt.largest):
        ax.axvline(edge, color=colour, linewidth=1, linestyle=":")
ax.set_xscale("log", base=2)
ax.set(
    ylim=(0, 40), xlabel="value", ylabel="% relative error", title="Rounding error (dotted: smallest normal, largest)"
)
ax.legend(loc="upper center", ncols=2)
plt.show()

# %% [markdown]
# Between its dotted lines, a float's relative error does not depend on the size of the number. This flat valley decides most of this chapter: keep it in mind when
# we come to scales.
#
# The rounding of the card, `cvt.rn.satfinite`, goes to the nearest value, ties to the even code, and **saturates**: too large becomes the
# largest, not infinity. Whoever divides by a scale first should know what happens at the edges. The same inputs with
# saturation and without:

# %%
odd_inputs = [1.0625, 1.1875, 448, 464, 480, 1e6, np.inf, np.nan, 2.0**-10, 1.01 * 2.0**-10, -1e-9]
rows = []
for x in odd_inputs:
    cells = [
        f"{float(fp8.decode(fp8.encode(x, fmt, saturate), fmt)):.6g}" for fmt in FIELDS for saturate in (True, False)
    ]
    rows.append([f"{x:.6g}", *cells])
table(["input", "e4m3", "e4m3, not saturating", "e5m2", "e5m2, not saturating"], rows)

# %% [markdown]
# 1.0625 and 1.1875 are ties of e4m3: the first goes down, the second up, so that ties do not push a mean in one direction. 464 is a tie as well,
# between 448 and what would be 480; the even code is 448.
#
# Our encoder does it in a few lines, because the codes of a float *count*: the next larger number has the next code, across exponents. Rounding in units of
# the last bit and adding is all; a carry out of the mantissa arrives in the exponent by itself.

# %%
display(lesson_views.source(fp8.encode))

# %% [markdown]
# ## 5. Scales
#
# Before a tensor is rounded it is divided by a factor that puts its largest magnitude at 448; the kernel multiplies by the factor (**descale**)
# later. One factor per tensor, per (batch, KV head) as FA3's kernel takes them, or per block of rows as its paper describes. Smaller groups
# fit more closely. This is how much the largest magnitudes of a real K differ:

# %%
layer, block = 0, 32
loudness = abs(MINILM[1][layer]).max(axis=2)  # (tokens, heads)
blocks = loudness.reshape(-1, block, loudness.shape[1]).max(axis=1)
fig, (ax,) = plots.figure(height=3.2)
ax.axhline(loudness.max(), color=plots.GREY, label="tensor")
heads = np.arange(loudness.shape[1])
ax.hlines(loudness.max(axis=0), heads - 0.4, heads + 0.4, color=plots.RED, label="head")
for n, values in enumerate(blocks):
    ax.plot(
        heads - 0.3 + 0.6 * n / (len(blocks) - 1),
        values,
        ".",
        color=plots.BLUE,
        label=None if n else f"block of {block} tokens",
    )
ax.set(
    xlabel="head",
    ylabel="largest |K|",
    ylim=(0, None),
    title=f"MiniLM, layer {json.loads(paths.data('minilm_qkv.json').read_text())['layers'][layer]}: what a scale must cover",
)
ax.set_xticks(heads)
ax.legend(ncols=3)
plt.show()

# %% [markdown]
# Now the surprise. Take a matrix in which one row is louder than the others by some factor, and give it one scale for all. How loud may
# the loud row be before the *quiet* rows get a worse relative error than they would have with a scale of their own?

# %%
guess = None  # loudness factor from which e4m3 suffers

# %%
loud = 2.0 ** np.arange(0, 21)
quiet_error = {"int8": [], "e5m2": [], "e4m3": []}
quiet = rng.standard_normal((64, 128))
for factor in loud:
    largest = factor * abs(quiet).max()
    for fmt in (E4M3, E5M2):
        back = fp8.to_grid(quiet / largest * fmt.largest, fmt) * (largest / fmt.largest)
        quiet_error[fmt.name].append(100 * rms(back - quiet) / rms(quiet))
    back = np.rint(quiet / largest * 127) * (largest / 127)
    quiet_error["int8"].append(100 * rms(back - quiet) / rms(quiet))
worse = np.array(quiet_error["e4m3"]) > 1.25 * quiet_error["e4m3"][0]
reveal("e4m3 suffers (by a quarter) from a factor of", guess, loud[worse.argmax()])

fig, (ax,) = plots.figure(height=3.3)
for (name, values), colour in zip(quiet_error.items(), (plots.GREY, plots.ORANGE, plots.BLUE), strict=True):
    ax.plot(loud, np.minimum(values, 100), color=colour, label=name)
ax.set_xscale("log", base=2)
ax.set(
    yscale="log",
    xlabel="how much louder one row is",
    ylabel="% error of the quiet rows",
    title="One scale for all rows",
)
ax.yaxis.set_major_formatter("{x:g}")
ax.legend(loc="lower right")
plt.show()

# %% [markdown]
# int8 suffers at once: its steps are equally wide everywhere. A float has the flat valley, and quiet rows stay in it until they fall below the smallest normal
# number. So the advice "use smaller blocks" comes from integers. For e4m3, per-block scales help only if loudness differs by a factor of thousands
# inside one head; otherwise they change *which* errors are made, not how large they are. Section 9 shows this in the paper's own table.
#
# Powers of two are the kindest factors: applying and undoing them rounds nothing. `descales(..., power_of_two=True)` rounds up to
# one, which costs at most one octave of the valley.
#
# > **You may read:** *FA3 keeps a scale per tile, and TMA multiplies by it on the way into shared memory.*
# > **What is so:** TMA copies bytes and cannot multiply. The released kernel takes `q_descale`, `k_descale` and `v_descale` of shape (batch, KV heads), also
# > for Q. Block scales are in the paper, not in the released kernel.
#
# Where do the factors go? Q's and K's meet softmax's constant: one number per row and key tile, multiplied before the exponential. V's is common
# to a head and is multiplied once, into `1 / row_sum`. With block scales V's factor differs from tile to tile: it must reach a tile's *own* product,
# which two-level accumulation has, and one-level does not. Our emulation refuses the pair by name:

# %%
try:
    Recipe(scales="block").validate()
except ValueError as refusal:
    print("refused:", refusal)
display(lesson_views.source(fp8._one_head))

# %% [markdown]
# ## 6. Outliers, and what a rotation does
#
# Some channels of Q and K in large models are far larger than the rest. The paper models this as N(0, 1) plus, in one of a thousand places, N(0, 100).
# Its remedy is **incoherent processing**: multiply Q and K by the same orthogonal matrix $M$. Scores stay, $(QM)(KM)^\top = QK^\top$, but every
# new channel is a mixture of all old ones. Random signs followed by a Hadamard matrix do it with additions only, $d \log_2 d$ of them per row.


# %%
def with_outliers(*shape):
    """N(0, 1) + N(0, 100) · Bernoulli(0.001), as in the paper."""
    return rng.standard_normal(shape) + 10 * rng.standard_normal(shape) * (rng.random(shape) < 1e-3)


K_before = with_outliers(4096, 64)
K_after = fp8.rotate(K_before, SEED)
row = abs(K_before).max(axis=1).argmax()
fig, axes = plots.figure(3, height=3.3, widths=(1, 1, 1.1))
for ax, x, title in ((axes[0], K_before, "48 keys"), (axes[1], K_after, "rotated")):
    picture = ax.imshow(x[max(row - 24, 0) :][:48], cmap="RdBu", vmin=-12, vmax=12, aspect="auto")
    ax.grid(False)
    ax.set(xlabel="channel", title=title)
axes[0].set(ylabel="key")
fig.colorbar(picture, ax=axes[1], shrink=0.8)
bins = np.linspace(0, 45, 46)
axes[2].hist(abs(K_before).ravel(), bins, log=True, color=plots.RED, histtype="step", label="before", linewidth=2)
axes[2].hist(abs(K_after).ravel(), bins, log=True, color=plots.BLUE, histtype="step", label="rotated", linewidth=2)
axes[2].set(xlabel="|value|", title="All values")
axes[2].legend()
plt.show()
display(lesson_views.source(fp8.hadamard))

# %% [markdown]
# The loud spot (one dark cell in the left picture) becomes a row that is a little louder everywhere. On the real model, whose outliers are mild, the same rotation finds
# little to spread. "Peak" is the largest magnitude of a head divided by its root mean square; "change" says that scores are the same up to fp64's rounding.

# %%
rows = []
for name, (q, k) in {
    "N(0,1) + outliers": [with_outliers(1, 2048, 1, 64) for _ in "qk"],
    "MiniLM, worst head": MINILM[:2],
}.items():
    cells = [name]
    for x in (q, k):
        for y in (np.float64(x), fp8.rotate(np.float64(x), SEED)):
            cells.append(f"{(abs(y).max(axis=(1, 3)) / np.sqrt((y**2).mean(axis=(1, 3)))).max():.1f}")
    turned = [fp8.rotate(np.float64(x), SEED) for x in (q, k)]
    S, S_turned = (np.einsum("bqhd,bkhd->bhqk", *pair, dtype=np.float64) for pair in ((q, k), turned))
    rows.append([*cells, f"{abs(S - S_turned).max() / abs(S).max():.0e}"])
table(["", "peak of Q", "rotated", "peak of K", "rotated", "change of the scores"], rows)

# %% [markdown]
# But wait. Section 5 said that a float does not mind loud neighbours. Then why should it mind outliers? Predict: by what factor does the rotation lower the
# root mean square error of the *scores*, with Q and K in e4m3?

# %%
guess = None  # error of the scores before / after the rotation

# %%
Q_before = with_outliers(4096, 64)
pairs = {"as they are": (Q_before, K_before), "rotated": (fp8.rotate(Q_before, SEED), K_after)}
scores = Q_before @ K_before.T / 8
score_errors = {
    name: fp8.to_grid(q, E4M3).astype(np.float64) @ fp8.to_grid(k, E4M3).T / 8 - scores
    for name, (q, k) in pairs.items()
}
reveal("error before / after", guess, rms(score_errors["as they are"]) / rms(score_errors["rotated"]))

edges = np.array([0, 0.5, 1, 2, 3, 4.5, 6, 9, 13, 20, 40])
which = np.digitize(abs(scores), edges)
fig, (left, right) = plots.figure(2, height=3.5)
for (name, error), colour in zip(score_errors.items(), (plots.RED, plots.BLUE), strict=True):
    groups = [
        (edges[i - 1 : i + 1].mean(), rms(error[which == i])) for i in range(1, len(edges)) if (which == i).sum() > 9
    ]
    left.plot(*zip(*groups, strict=True), "o-", color=colour, label=name)
    ordered = np.sort(abs(error).ravel())[::-1]
    at = np.unique(np.geomspace(1, ordered.size / 100, 200).astype(int))
    right.semilogx(at / ordered.size, ordered[at - 1], color=colour, label=name)
left.set(xlabel="|score|", ylabel="root mean square error", title="Error of scores of a given size")
right.set(xlabel="share of all scores", ylabel="error at least", ylim=(0, None), title="The worst hundredth")
left.legend()
plt.show()
print({name: f"rms {rms(error):.4f}, worst {abs(error).max():.2f}" for name, error in score_errors.items()})

# %% [markdown]
# **The average error does not move at all.** Rounding errors are relative, a rotation preserves lengths, so it preserves the error's length too. What changes is
# who gets it. A score of 20 without rotation is mostly *one* product of two outliers, and it is off by the error of that one product, a few percent of 20.
# After the rotation, 64 products of similar size share the score, and their errors average out. And the large scores are the ones that softmax
# listens to: an error of 1 there makes a weight wrong by a factor $e$, an error in the small ones hardly matters.
#
# That is what *incoherent* means, and why it helps a float.
#
# > **You may read:** *the Hadamard transform happens inside FA3's kernel.*
# > **What is so:** the released kernel knows nothing of it. Whoever calls it rotates Q and K before quantising, for instance in the kernel that applies rotary embeddings.
#
# ## 7. P: offset 8, and the row sum
#
# P is made inside the kernel, so no caller can scale it. Softmax gives numbers in (0, 1], and e4m3's valley goes from $2^{-6}$ to 448. The upper part would be
# empty. FA3 multiplies P by $2^8$: `exp2(scores - row_max + 8)`, where the 8 is folded into the number that is subtracted anyway. The factor is in
# `acc_O` and in `row_sum` and cancels in the division; only LSE must subtract `8 ln 2`.
#
# With 16k keys and scores of standard deviation 3, what share of a row's probability falls below the smallest e4m3 number *without* the offset?

# %%
guess = None  # percent of the row sum that is rounded to zero

# %%
offsets = np.arange(-4, 13)
lost = {}
for deviation in (1, 2, 3, 4):
    exponents = deviation * rng.standard_normal((16, 16384)) * math.log2(math.e)
    exponents -= exponents.max(axis=1, keepdims=True)
    lost[deviation] = []
    for offset in offsets:
        P = np.exp2(exponents + offset)
        lost[deviation].append(100 * P[fp8.to_grid(P, E4M3) == 0].sum() / P.sum())
reveal("lost without the offset", guess, lost[3][list(offsets).index(0)], "%")

V1 = {
    offset: fp8.to_grid(np.exp2(exponents + offset), E4M3).sum(1) / np.exp2(exponents + offset).sum(1)
    for offset in offsets
}
fig, (left, right) = plots.figure(2, height=3.5)
for (deviation, values), colour in zip(lost.items(), (plots.GREY, *COLOURS), strict=True):
    left.plot(offsets, values, "o-", color=colour, markersize=3, label=f"scores with deviation {deviation}")
left.axvline(8, color=plots.GREY, linestyle=":")
left.set(xlabel="offset", ylabel="% of the row sum", title="Probability rounded to zero, 16k keys")
left.legend(fontsize=9, frameon=True, framealpha=1, edgecolor="none")
right.plot(offsets, [V1[o].mean() for o in offsets], "o-", color=plots.BLUE)
right.axvline(math.log2(E4M3.largest), color=plots.RED, linestyle=":")
right.text(math.log2(E4M3.largest) - 0.2, 0.5, "log2(448)", color=plots.RED, ha="right", fontsize=9)
right.set(
    xlabel="offset", ylabel="output for V = 1", ylim=(0, 1.08), title=f"Deviation {deviation}: too low, and too high"
)
plt.show()

# %% [markdown]
# Too low, and small probabilities vanish; many small ones together weigh a lot. Too high, and P saturates at 448 while `row_sum`, which adds P *before* it is rounded, counts it in full:
# the output shrinks. 8 is the largest whole number with $2^x \le 448$. It also says how far a *lazy rescale* may go in FP8: if `row_max` may lag
# behind by a threshold $t$, then offset + $t$ must stay below 8.8.
#
# Why add the unrounded P? Rounding errors of single P then appear in the numerator only, as independent errors that average out. LSE gets no error at all from P's
# rounding. In numbers, for scores of standard deviation 3, with only P rounded:

# %%
q, k, v = (rng.standard_normal((1, n, 1, 64)) for n in (64, 4096, 4096))
q, v = 3 * q, v + 1
want, want_lse = (x.numpy() for x in reference.attention(*map(torch.from_numpy, (q, k, v))))
for offset in (0.0, 8.0):
    out, lse = fp8.attention(q, k, v, recipe=replace(fp8.EXACT, p=E4M3, offset=offset))
    print(
        f"offset {offset:.0f}: output off by {rms(out - want) / rms(want):.1%} of its size, LSE by {abs(lse - want_lse).max():.0e}"
    )

# %% [markdown]
# ## 8. The budget: which rounding costs what
#
# Five things are rounded or cut: Q, K, P, V, and sums. The emulation can switch each on alone. Four inputs: the textbook's N(0, 1), the same with a mean of
# 1 in V, the paper's outliers, and the real model. Which bar will be the tallest for N(0, 1)? For V with a mean?

# %%
guess = None  # "Q", "K", "P", "V" or "sums", for V with a mean and 4k keys

# %%
normal = [rng.standard_normal((1, n, 1, 64)) for n in (128, 4096, 4096)]
inputs = {
    "N(0, 1), 4k keys": normal,
    "V with mean 1, 4k keys": [normal[0], normal[1], normal[2] + 1],
    "outliers, 2k keys": [with_outliers(1, n, 1, 64) for n in (256, 2048, 2048)],
    "MiniLM, 288 keys": MINILM,
}
SUMS = {"qk_bits": fp8.FRACTION_BITS, "pv_bits": fp8.FRACTION_BITS}
parts = {
    "Q": replace(fp8.EXACT, q=E4M3),
    "K": replace(fp8.EXACT, k=E4M3),
    "P": replace(fp8.EXACT, p=E4M3),
    "V": replace(fp8.EXACT, v=E4M3),
    "sums": replace(fp8.EXACT, **SUMS),
    "sums, two levels": replace(fp8.EXACT, two_level=True, **SUMS),
    "everything": Recipe(),
    "everything, two levels": Recipe(two_level=True),
    "… and rotated": Recipe(two_level=True, rotation=SEED),
}
budget = {}
for name, tensors in inputs.items():
    want = truth(*tensors)
    budget[name] = {part: rms(fp8.attention(*tensors, recipe=r)[0] - want) for part, r in parts.items()}
singles = ("Q", "K", "P", "V", "sums")
tallest = max(singles, key=budget["V with mean 1, 4k keys"].get)
print(f"tallest with a mean in V: {tallest} ({'no guess yet' if guess is None else f'you said {guess}'})")

fig, axes = plt.subplots(2, 2, figsize=(plots.WIDTH, 6), sharey=True)
shades = [plots.SKY] * 4 + [plots.ORANGE] * 2 + [plots.BLUE] * 3
for ax, (name, values) in zip(axes.flat, budget.items(), strict=True):
    ax.barh(list(values), list(values.values()), color=shades)
    ax.set(title=name, xscale="log", xlim=(1e-5, 2e-1))
    ax.grid(axis="y", visible=False)
axes[0, 0].invert_yaxis()
for ax in axes[1]:
    ax.set_xlabel("root mean square error")
plt.show()

# %% [markdown]
# * **N(0, 1):** Q, K, P and V share the error about equally. No single one is worth 16 bits. Errors add as squares: everything together costs about twice one part.
# * **V with a mean:** the sums overshadow all the rest, already at 4k keys. Two levels bring them down to the size of the others.
# * **Outliers:** Q and K rule, through the large scores of section 6. V's outliers stay: nobody rotates V.
# * **MiniLM:** K, then Q and V. The rotation changes little, as its peaks were mild; 288 keys are too few for the sums to grow.
#
# Mind the axis: it is logarithmic.
#
# ### e4m3 or e5m2?
#
# A WGMMA takes either format on either side, and mixes. e5m2 has half the precision and twice the octaves. Which of the four operands would you give the range?

# %%
combinations = {
    "all e4m3": {},
    "Q, K e5m2": {"q": E5M2, "k": E5M2},
    "P e5m2": {"p": E5M2},
    "V e5m2": {"v": E5M2},
    "all e5m2": dict.fromkeys("qkpv", E5M2),
}
names = ("N(0, 1), 4k keys", "outliers, 2k keys", "MiniLM, 288 keys")
found = {label: [] for label in combinations}
for name in names:
    want = truth(*inputs[name])
    for label, formats in combinations.items():
        out, _ = fp8.attention(*inputs[name], recipe=Recipe(two_level=True, **formats))
        found[label].append(rms(out - want) / rms(want))
fig, (ax,) = plots.figure(height=4)
colours = (plots.BLUE, plots.RED, plots.GREEN, plots.PURPLE, plots.ORANGE)
plots.grouped_bars(
    ax, names, [(label, 100 * np.array(e), c) for (label, e), c in zip(found.items(), colours, strict=True)]
)
ax.set(xlabel="error, % of the output's size", title="e5m2 pays with precision")
plt.show()

# %% [markdown]
# With a scale, e4m3's range is enough, and the third mantissa bit halves the error. e5m2 is for numbers that cannot be scaled because nobody knows their range
# in advance (gradients), or for caches written without a scale.
#
# ## 9. The paper's Table 3, on a laptop
#
# Table 3 of the paper compares FP8 attention with one scale per tensor to block scales and incoherent processing, on outliers as above. It does not state the lengths and the head dim;
# ours stand in the legend. We add a variant of our own, scales rounded up to powers of two. Which of the two ideas does the work?

# %%
guess = None  # error per tensor / error with both

# %%
# FA3 paper (arXiv:2407.08608), table 3 and its ablations, H100: root mean square errors
PAPER = {"one scale per tensor": 2.4e-2, "block scales": 2.4e-2, "rotation": 9.3e-3, "both": 9.1e-3}
plain = Recipe(scales="tensor", two_level=True)
recipes = {
    "one scale per tensor": plain,
    "block scales": replace(plain, scales="block"),
    "rotation": replace(plain, rotation=SEED),
    "both": replace(plain, scales="block", rotation=SEED),
    "one scale, a power of two": replace(plain, power_of_two=True),
    "block scales, powers of two": replace(plain, scales="block", power_of_two=True),
}
SIZES = [(1024, 64, 12), (2048, 128, 5)]  # keys, head dim, draws; 256 queries
draws = {size: {name: [] for name in recipes} for size in SIZES}
for keys, d, repeats in SIZES:
    for _ in range(repeats):
        q, k, v = (with_outliers(1, n, 1, d) for n in (256, keys, keys))
        want = truth(q, k, v)
        for name, recipe in recipes.items():
            draws[keys, d, repeats][name].append(rms(fp8.attention(q, k, v, recipe=recipe)[0] - want))
pooled = {size: {name: rms(e) for name, e in found.items()} for size, found in draws.items()}
reveal(
    "per tensor / both, ours, first size", guess, pooled[SIZES[0]]["one scale per tensor"] / pooled[SIZES[0]]["both"]
)
print(f"per tensor / both, the paper's: {PAPER['one scale per tensor'] / PAPER['both']:.2f}")

fig, (ax,) = plots.figure(height=4.2)
for i, (size, colour) in enumerate(zip(SIZES, (plots.BLUE, plots.GREEN), strict=True)):
    y = np.arange(len(recipes)) + 0.18 * (2 * i - 1)
    ax.barh(
        y, list(pooled[size].values()), 0.32, color=colour, label=f"ours: {size[0]} keys, d {size[1]}, {size[2]} draws"
    )
    for at, values in zip(y, draws[size].values(), strict=True):
        ax.plot(values, [at] * len(values), "|", color="black", markersize=8)
ax.plot(list(PAPER.values()), range(len(PAPER)), "D", color=plots.RED, label="the paper's (sizes not stated)")
ax.set_yticks(range(len(recipes)), list(recipes))
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.set(xlabel="root mean square error", xlim=(0, None), title="Table 3 (black strokes: single draws)")
fig.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=9)
plt.show()
rows = [
    [name, f"{PAPER[name]:.1e}" if name in PAPER else "", *(f"{pooled[size][name]:.1e}" for size in SIZES)]
    for name in recipes
]
table(["", "paper", *(f"ours: {n} keys, d {d}" for n, d, _ in SIZES)], rows)

# %% [markdown]
# The order of magnitude is the paper's, and so is the verdict: the rotation does most of it, block scales little, as section 5 foretold for a float.
# The factor between the first and the fourth row is smaller in our stored run than in the paper. Look at the strokes: a few rows in which two outliers meet decide an average like this
# one, so it moves a lot with sizes and draws. A table without sizes can be confirmed in kind, not in digits.
#
# The last two rows explain the little that block scales do. With powers of two, one scale and many scales give the *same* error: within the valley, such a
# factor changes nothing at all. What an ordinary scale does is to place the largest value of its group exactly on 448, where it has no rounding error. One exact
# value per block is all the gain that we find, and it is one because the largest values matter most here.
#
# ## 10. V stands the wrong way round
#
# Now the part of FP8 that has nothing to do with rounding. A WGMMA with 16-bit operands reads B from shared memory in either order. With 8-bit operands it reads only
# **K-major**: along the dimension that is summed, the bytes must be contiguous. For $QK^\top$ the sum runs over head dim, and head dim is contiguous in Q and K: fine. For $PV$ it runs
# over *keys*, and V has head dim contiguous.

# %%
fig, axes = plots.figure(3, height=3.2)
for ax, name, shape, run_over in (
    (axes[0], "K, as stored\nsum over head dim: fits", ("key", "head dim"), 1),
    (axes[1], "V, as stored\nsum over keys: does not fit", ("key", "head dim"), 0),
    (axes[2], "V, transposed\nsum over keys: fits", ("head dim", "key"), 1),
):
    order = np.arange(64).reshape(8, 8)
    ax.imshow(order, cmap="Blues", vmin=-20, vmax=110)
    for y, x in np.ndindex(8, 8):
        ax.text(x, y, order[y, x], ha="center", va="center", fontsize=7)
    fits = run_over == 1
    start, end = ((-0.3, 3.5), (7.4, 3.5)) if fits else ((3.5, -0.3), (3.5, 7.4))
    arrow = {"arrowstyle": "->", "color": plots.GREEN if fits else plots.RED, "linewidth": 2.5}
    ax.annotate("", xy=end, xytext=start, arrowprops=arrow)
    ax.set(xlabel=shape[1], ylabel=shape[0])
    ax.set_title(name, fontsize=10)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.grid(False)
fig.suptitle("Numbers: address of the byte. Arrow: what one sum runs over", fontsize=10)
plt.show()

# %% [markdown]
# So somebody must transpose V. FA3 does it in the kernel, in the producer warpgroup: TMA brings a tile of V as it is; `ldmatrix` with transposition moves **16-bit pairs**, so two
# neighbouring head dims of one key always travel together; a byte permute (`prmt`) takes the pairs apart; `stmatrix` writes the tile back. In one lane, with bytes named by key
# and head dim:


# %%
def prmt(low, high, selector):
    """PTX's byte permute: hex digit i of the selector, from the right, picks byte i of the result out of low + high."""
    source = low + high
    return [source[selector >> (4 * i) & 0xF] for i in range(4)]


registers = [[f"k{key} d{dim}" for key in keys for dim in (0, 1)] for keys in ((0, 1), (2, 3))]
table(
    ["", "byte 0", "byte 1", "byte 2", "byte 3"],
    [
        ["register 0 after ldmatrix.trans", *registers[0]],
        ["register 1 after ldmatrix.trans", *registers[1]],
        ["prmt 0x6420: head dim 0, four keys", *prmt(*registers, 0x6420)],
        ["prmt 0x7531: head dim 1, four keys", *prmt(*registers, 0x7531)],
    ],
)

# %% [markdown]
# The price: every query tile transposes the same V again, all of it passing through shared memory twice more. For long queries it is cheaper to transpose V *once*, in a small kernel before. Sitting b weighs both.
#
# ### And P lies in the wrong lanes
#
# P comes out of the first product as an accumulator and goes into the second as an A operand, both in registers. For 16 bits the two layouts agree: chapter 2 used that. For 8 bits they do not. Of the
# 32 columns that one step needs, four lanes hold 8 each, as the upper strip shows; the operand wants them as in the middle strip.

# %%
LANES = ("#56B4E9", "#F5C266", "#66C9A9", "#E3B5CE")
columns, positions = ([fn(lane) for lane in range(4)] for fn in (fp8.accumulator_columns, fp8.operand_positions))
order = fp8.key_order()


def owner(lists, i):
    return next(lane for lane in range(4) if i in lists[lane])


fig, (ax,) = plots.figure(height=3.1)
strips = [
    ("S: column (= key)\nheld by lane", range(32), [owner(columns, c) for c in range(32)]),
    ("operand: position\nwanted by lane", range(32), [owner(positions, p) for p in range(32)]),
    ("key that V keeps\nat this position", order, [owner(columns, c) for c in order]),
]
for y, (label, numbers, owners) in enumerate(strips):
    for x, (number, lane) in enumerate(zip(numbers, owners, strict=True)):
        ax.add_patch(Rectangle((x, 1.6 * y), 1, 1, facecolor=LANES[lane], edgecolor="white"))
        ax.text(x + 0.5, 1.6 * y + 0.5, number, ha="center", va="center", fontsize=8.5)
    ax.text(-0.4, 1.6 * y + 0.5, label, ha="right", va="center", fontsize=9)
for lane in range(4):
    ax.add_patch(Rectangle((18 + 3.6 * lane, -1.2), 0.8, 0.8, facecolor=LANES[lane]))
    ax.text(19 + 3.6 * lane, -0.8, f"lane {lane}", va="center", fontsize=8.5)
ax.set(xlim=(-6.5, 32), ylim=(4.4, -1.4))
ax.set_axis_off()
plt.show()
stay = sum(owner(columns, i) == owner(positions, i) for i in range(32))
print(f"in natural order {stay} of 32 values are already in the right lane")

# %% [markdown]
# Moving the others costs shuffles and byte permutes between lanes, for every tile. But a sum does not care about the order of its terms. Let each lane put its own eight values
# into its own eight positions, in any order, and let **V keep its keys in the same order**: the third strip, where position and lane agree with the second. The renaming of registers costs nothing (it happens while compiling),
# and whoever transposes V can store it in that order for free. With `c = 8 j + 2 lane + e`, key `c` stands at position `16 (j // 2) + 4 lane + 2 (j % 2) + e`.

# %%
P, V = rng.standard_normal((16, 32)), rng.standard_normal((32, 8))
operand = np.empty_like(P)
for lane in range(4):  # no lane reads another lane's columns
    operand[:, fp8.operand_positions(lane)] = P[:, fp8.accumulator_columns(lane)]
print(f"PV with renamed registers and reordered keys: off by {abs(operand @ V[order] - P @ V).max():.0e}")
print(f"PV with renamed registers, keys in natural order: off by {abs(operand @ V - P @ V).max():.1f}")

# %% [markdown]
# ## 11. Three questions
#
# Try to answer before you open them.
#
# <details><summary><b>1.</b> Rotating Q and K costs nothing in the kernel. Why not rotate V, too?</summary>
#
# One can: if V is multiplied by an orthogonal matrix, so is the output, and the caller (or the next weight matrix) must undo it. But V has no softmax behind it that listens to a few
# large values. Its rounding error is relative, and a rotation keeps its length: it would be spread over the channels, not lowered. The budget's V bar would stay.
# </details>
#
# <details><summary><b>2.</b> The sums of QKᵀ are cut to 13 bits as well. Why does nobody mend that?</summary>
#
# They are short: head dim 128 is 4 steps of 32 products. Each of the terms loses less than one unit of the last place, so the error is some $2^{-13}$ of the largest partial sum, far below
# the rounding of Q and K (section 8). And nothing accumulates from tile to tile: each tile's scores start afresh. QKᵀ has always been "two-level".
# </details>
#
# <details><summary><b>3.</b> Would an offset of 8 also repair a 13-bit sum, if P were made smaller?</summary>
#
# No. The adder's window moves with the sum; only the *ratio* of a term to the sum counts. Smaller P makes a smaller sum. The number of terms is what hurts.
# </details>
#
# ## Where to go
#
# * Change a recipe and run section 8 again: `Recipe(scales="block", two_level=True, power_of_two=True, rotation=1)`.
# * Chapter 3, for the overlap that an FP8 kernel needs even more than a 16-bit one: its products take half the time, its exponentials do not.
# * [`lesson_b.ipynb`](lesson_b.ipynb): the kernel.
#
# **Sources.** Shah et al. 2024 (FlashAttention-3, arXiv:2407.08608: section 3.3, table 3); DeepSeek-V3 report (arXiv:2412.19437: accumulation of FP8 on Hopper); Xie et al. 2025 (MMA-Sim, arXiv:2511.10909);
# Micikevicius et al. 2022 (FP8 formats, arXiv:2209.05433); NVIDIA, PTX ISA (`wgmma`, `cvt`, `prmt`, `ldmatrix`). The card's answers: `measured_fa3_fp8.json` beside this page.
