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
# # Chapter 1: Online softmax
#
# *60 to 90 minutes. Runs on any laptop; a GPU is used if there is one.*
#
# Attention is `softmax(scale · Q Kᵀ) V`. Written like this it is three lines, and it fills a GPU's memory long before it
# fills its arithmetic units. At the end of this chapter you will have the loop at the heart of every FlashAttention kernel:
# written by hand in NumPy, checked against fp64, extended by masks and by a backward pass, and compiled for a GPU by Triton.
# You will also know, from a budget in clock cycles, why that kernel cannot pass a certain share of a Hopper's peak, which
# is where chapter 2 begins.
#
# The paper and the code name the same five things differently. We write the code's names:
#
# | in code | in the paper | what it is |
# |---|---|---|
# | `row_max` | $m$ | the largest score of a query row so far |
# | `row_sum` | $\ell$ | the sum of exponentials so far, relative to `row_max` |
# | `acc_O` | $O$ (not yet divided) | the weighted sum of value rows so far |
# | `tile_m` | $B_r$ | query rows of one tile |
# | `tile_n` | $B_c$ | keys of one tile |
#
# Sometimes a cell asks you to **predict** a number first. Write your guess in place of `None`, then run the next cell.

# %%
import inspect
import json
import math
import tempfile
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Markdown, display

from fa3_course import plots, results, rungs
from fa3_lib import reference

plots.use_style()
SEED = np.random.SeedSequence().entropy % 2**32
rng = np.random.default_rng(SEED)  # fresh inputs in every run; to repeat one, write its seed here
print(f"seed {SEED}")


def reveal(what, guess, value, unit=""):
    """Shows a value beside the reader's guess."""
    told = "no guess yet" if guess is None else f"you said {guess:g}"
    print(f"{what}: {value:.4g} {unit} ({told})")


def max_error(got, want):
    return np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64)).max()


# %% [markdown]
# ## 1. One number that hurts
#
# Take one attention layer of a model of width 2048: 16 heads of 128, a text of 16,384 tokens, 16-bit numbers. How large is
# the score matrix `Q Kᵀ` of that one layer, compared with its inputs and its output together?

# %%
guess = None  # how many times larger than Q, K, V and O together?

# %%
HEADS, HEAD_DIM, TOKENS, BYTES = 16, 128, 16_384, 2


def tensor_bytes(seqlen):
    """Q, K, V and O."""
    return 4 * seqlen * HEADS * HEAD_DIM * BYTES


def score_bytes(seqlen):
    return seqlen**2 * HEADS * BYTES


reveal("scores / (Q, K, V, O)", guess, score_bytes(TOKENS) / tensor_bytes(TOKENS), "times")
print(f"scores {score_bytes(TOKENS) / 1e9:.1f} GB, Q + K + V + O {tensor_bytes(TOKENS) / 1e9:.2f} GB")

lengths = 2 ** np.arange(9, 19)
fig, (ax,) = plots.figure(height=3.3)
ax.plot(lengths, score_bytes(lengths) / 1e9, color=plots.RED, label="score matrix")
ax.plot(lengths, tensor_bytes(lengths) / 1e9, color=plots.BLUE, label="Q, K, V and O")
for name, gigabytes, side in (("H100", 80, "top"), ("H200", 141, "bottom")):
    ax.axhline(gigabytes, color=plots.GREY, linewidth=1)
    text = f"{name}: {gigabytes} GB (datasheet)"
    ax.text(lengths[0], gigabytes, text, color=plots.GREY, va=side, fontsize=9)
ax.set(
    yscale="log",
    xlabel="sequence length",
    ylabel="GB",
    title="One layer, batch 1: the score matrix grows with the square",
)
ax.yaxis.set_major_formatter("{x:g}")
plots.powers_of_two(ax, lengths)
plots.name_lines(ax)
plt.show()

# one run for all comparisons of this chapter, since clocks differ between runs: the newest that holds eager attention
RUN = results.latest(kernel="rung00_eager")


def stored(kernel, **shape):
    """The rows of one kernel in that run, short sequences first; an empty list where none is stored."""
    return sorted(RUN.select(kernel=kernel, **shape) if RUN else [], key=lambda row: row.seqlen)


eager = stored("rung00_eager", head_dim=128, causal=False)
cublas = stored("cublas", direction="gemm", dtype="bf16")
if eager and cublas:
    row, share = eager[-1], eager[-1].tflops / cublas[-1].tflops
    print(f"{RUN.gpu}: eager attention ({row.shape}) {row.ms:.1f} ms = {row.tflops:.0f} TFLOP/s;")
    print(f"a matrix product (cuBLAS) in the same run: {cublas[-1].tflops:.0f}. Eager reaches {share:.0%} of it")
else:
    print("eager attention on a card: no stored row yet (`fa3 bench` on a Hopper stores one)")

# %% [markdown]
# And the score matrix is not touched just once. Rung 0 of our ladder, [`steps/rung00_eager.py`](steps/rung00_eager.py), is
# attention as a few PyTorch calls: it writes the scores, reads them for the sum, reads them for the exponential, writes the
# weights, reads the weights. The last line above is what that costs on a card. (Every measured number of this course
# comes from the stored rows in `bench/results/`; where none is stored yet, the cell says so.)
#
# **The plan.** Never store the score matrix. Compute it in tiles, use each tile at once, forget it. Two things stand in the
# way. The softmax of a row needs the whole row: its maximum and its sum. And the backward pass wants the weights again.
# Online softmax removes the first obstacle, recomputation the second.
#
# ## 2. Softmax: naive, then safe
#
# The definition divides exponentials by their sum. In fp16, the largest finite number is 65,504.

# %%
guess = None  # from which score on does exp(score) overflow in fp16?

# %%
reveal("exp overflows fp16 above", guess, math.log(np.finfo(np.float16).max))


def naive_softmax(scores):
    weights = np.exp(scores)
    return weights / weights.sum(axis=-1, keepdims=True)


def safe_softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


with np.errstate(over="ignore", invalid="ignore"):  # the overflow is what we want to see
    for row in ([1, 2, 3], [9, 10, 11], [10, 11, 12]):
        scores = np.array(row, np.float16)
        print(f"scores {row}: naive {naive_softmax(scores)}, safe {safe_softmax(scores)}")

# %% [markdown]
# The last two rows show the two ways to fail: a sum that overflows makes every weight silently 0, an exponential that
# overflows makes it NaN. Yet all three rows have the same softmax: adding a constant to every score multiplies numerator and denominator by the same
# factor. **Safe softmax** uses this freedom. It subtracts the row's maximum, so that the largest exponential is exactly 1 and
# the sum lies between 1 and the row's length. Nothing can overflow, whatever the scores are.
#
# Is 11 a large score? Below, the share of rows that the naive form destroys as scores grow, and beside it the scores of a
# real transformer: queries and keys of a small sentence encoder that reads this repository's own text (see
# `fa3_course/data/minilm_qkv.json` for where they come from).

# %%
DATA = results.ROOT / "fa3_course" / "data"
text = np.load(DATA / "minilm_qkv.npz")
# (layers, tokens, heads, head_dim), fp16; the layers stand where a batch would
q_text, k_text, v_text = (np.moveaxis(text[name], 1, 2) for name in "qkv")
text_scores = np.einsum("lqhd,lkhd->lhqk", q_text, k_text, dtype=np.float32) * q_text.shape[-1] ** -0.5

deviations = np.linspace(0.5, 8, 24)
destroyed = {"naive": [], "safe": []}
for deviation in deviations:
    scores = (deviation * rng.standard_normal((400, 512))).astype(np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        for name, softmax in (("naive", naive_softmax), ("safe", safe_softmax)):
            # a row is destroyed when its weights no longer sum to 1
            sums = softmax(scores).sum(axis=-1, dtype=np.float32)
            destroyed[name].append(1 - np.isclose(sums, 1, atol=0.02).mean())

fig, (left, right) = plots.figure(2)
for (name, share), colour in zip(destroyed.items(), (plots.RED, plots.BLUE), strict=True):
    left.plot(deviations, 100 * np.array(share), color=colour, label=name)
left.set(xlabel="standard deviation of the scores", ylabel="% of rows", title="fp16 rows with wrong weights")
left.legend()
right.hist(text_scores.max(axis=-1).ravel(), bins=60, color=plots.BLUE, log=True)
right.axvline(math.log(65504), color=plots.RED, label="exp overflows fp16")
right.set(xlabel="largest score of a row", ylabel="rows", title="Scores of a real text")
right.legend()
plt.show()
overflows = (text_scores.max(axis=-1) > math.log(65504)).any(axis=-1)  # (layers, heads)
print(
    f"{overflows.sum()} of {overflows.size} heads hold rows whose exponentials overflow; largest score {text_scores.max():.0f}"
)

# %% [markdown]
# Most heads of this small model stay below, a few do not. One is enough to turn all following layers into NaN.
#
# Safe softmax reads each row three times: for the maximum, for the sum, for the division. A GPU would write the scores to
# memory in between. The next idea merges the first two readings, and then the third.
#
# ## 3. Online: maximum and sum in one pass
#
# Walk along the row. Keep the largest score so far, `row_max`, and the sum of `exp(score - row_max)` so far. When a larger
# score arrives, the old sum was computed relative to the wrong maximum. It need not be computed again; every term is off by
# the same factor, so multiply:
#
# $$
# m' = \max(m, x), \qquad \ell' = \ell \cdot e^{\,m - m'} + e^{\,x - m'}
# $$
#
# The first factor is 1 as long as the maximum stays, and below 1 when it grows. It never overflows.


# %%
def online_max_and_sum(scores):
    """Walks along one row. Returns (row_max, row_sum) after every score."""
    row_max, row_sum, history = -np.inf, 0.0, []
    for score in scores:
        new_max = max(row_max, score)
        rescale = math.exp(row_max - new_max)  # at the first score exp(-inf) = 0
        row_sum = row_sum * rescale + math.exp(score - new_max)
        row_max = new_max
        history.append((row_max, row_sum))
    return np.array(history)


scores = 3 * rng.standard_normal(60)
history = online_max_and_sum(scores)
assert np.isclose(history[-1, 1], np.exp(scores - scores.max()).sum(), rtol=1e-13)

fig, (top, bottom) = plt.subplots(2, 1, figsize=(plots.WIDTH, 4.2), sharex=True)
step = np.arange(len(scores))
records = np.flatnonzero(np.diff(history[:, 0], prepend=-np.inf) > 0)
top.plot(step, scores, ".", color=plots.GREY, label="scores")
top.step(step, history[:, 0], where="post", color=plots.RED, label="row_max")
top.set(ylabel="score", title="A new maximum (dotted lines) shrinks everything that was summed before")
top.legend(ncols=2, loc="lower right")
bottom.step(step, history[:, 1], where="post", color=plots.BLUE)
bottom.set(xlabel="key", ylabel="row_sum")
for ax in (top, bottom):
    for x in records:
        ax.axvline(x, color=plots.RED, linewidth=1, linestyle=":")
plt.show()

# %% [markdown]
# A correction is needed only when the maximum changes. In a row of 1024 random scores, how often is that?

# %%
guess = None  # how many of 1024 random scores are larger than all scores before them?

# %%
rows = rng.standard_normal((4000, 1024))
records = 1 + (np.diff(np.maximum.accumulate(rows, axis=1), axis=1) > 0).sum(axis=1)
reveal("new maxima in a row of 1024", guess, records.mean())
print(f"score i is the largest so far with probability 1/i: 1 + 1/2 + ... = {(1 / np.arange(1, 1025)).sum():.2f}")

# %% [markdown]
# So few. A kernel corrects once per *tile* of keys whether the maximum changed or not, because a branch per row would cost
# more than the multiplication. Keep this number in mind: chapter 3 comes back to it ("lazy rescale").
#
# ## 4. Tiles, and the value rows too
#
# What we want is not the weights but the weighted sum of value rows, $\sum_j w_j v_j$. It obeys the same rule: it is a sum of
# terms that are all relative to the maximum so far. Carry it along as `acc_O`, correct it by the same factor, and no weight
# is ever needed again. And instead of one score at a time, take `tile_n` keys at a time and `tile_m` query rows at a time:
# two small matrix products per tile, which is what tensor cores do.
#
# The first FlashAttention kept `acc_O` *normalised*: after every tile it was the right answer for the keys seen so far.
# FlashAttention-2 **delays the normalisation**: it divides by `row_sum` once, at the very end. Both are below.


# %%
def tiled_attention(q, k, v, scale, tile_n, delayed):
    """One head, no mask. q (sq, d), k (sk, d), v (sk, dv) -> out (sq, dv), and the number of multiplications and
    divisions of acc_O outside the two matrix products."""
    row_max = np.full(len(q), -np.inf)
    row_sum = np.zeros(len(q))
    acc_O = np.zeros((len(q), v.shape[1]))
    extra = 0
    for n in range(0, len(k), tile_n):
        scores = scale * (q @ k[n : n + tile_n].T)
        new_max = np.maximum(row_max, scores.max(axis=1))
        weights = np.exp(scores - new_max[:, None])
        rescale = np.exp(row_max - new_max)
        new_sum = row_sum * rescale + weights.sum(axis=1)
        if delayed:
            acc_O = acc_O * rescale[:, None] + weights @ v[n : n + tile_n]
            extra += acc_O.size
        else:
            acc_O = acc_O * (row_sum * rescale)[:, None] + weights @ v[n : n + tile_n]
            acc_O = acc_O / new_sum[:, None]
            extra += 2 * acc_O.size
        row_max, row_sum = new_max, new_sum
    if delayed:
        acc_O = acc_O / row_sum[:, None]
        extra += acc_O.size
    return acc_O, extra


q, k, v = (rng.standard_normal((n, 64)) for n in (128, 1024, 1024))
want = safe_softmax(q @ k.T / 8) @ v
for delayed in (False, True):
    out, extra = tiled_attention(q, k, v, 1 / 8, 64, delayed)
    order = "divides at the end   " if delayed else "divides in every tile"
    print(f"FlashAttention-{1 + delayed}, {order}: error {max_error(out, want):.1e}, {extra:,} extra operations")

# %% [markdown]
# The same numbers, and about half of the extra work. It matters because the work outside the matrix products runs on units
# that are far slower than the tensor cores.
#
# FlashAttention-2 also fixed the **order of the loops**: query tiles outside, key tiles inside. A query tile's `row_max`,
# `row_sum` and `acc_O` then stay in one place (a GPU's registers) from the first key to the last, and query tiles need nothing
# from each other, so each can go to another processor.
#
# ## 5. exp2 with the scale folded in
#
# A GPU has no `exp` instruction. It has `2^x`, in a special-function unit (MUFU), and $e^x = 2^{x \log_2 e}$. The scale has to
# be multiplied in as well. All factors fit into one constant:
#
# $$
# e^{\,\text{scale}\,(s - m)} = 2^{\,s\,c - m\,c}, \qquad c = \text{scale} \cdot \log_2 e
# $$
#
# With $m\,c$ computed once per row, each score costs **one fused multiply-add and one MUFU**. `row_max` stays in units of raw
# scores. The log-sum-exp that we return is a *natural* logarithm, $\text{LSE} = \text{scale} \cdot m + \ln \ell$; a common slip is to
# return it in base 2.

# %%
scale = 64**-0.5
LOG2_E = math.log2(math.e)
s = (8 * rng.standard_normal((256, 1024))).astype(np.float32)  # raw scores, not scaled yet
m = s.max(axis=1, keepdims=True)
exact = np.exp(scale * (s.astype(np.float64) - m))

c = np.float32(scale * LOG2_E)
plain = np.exp(np.float32(scale) * s - np.float32(scale) * m)
folded = np.exp2(s * c - m * c)  # NumPy rounds s * c first; a GPU's fused multiply-add rounds only once
print(f"error against fp64: exp {max_error(plain, exact):.1e}, exp2 folded {max_error(folded, exact):.1e}")

row_sum = exact.sum(axis=1)
true_lse = np.log(np.exp(scale * s.astype(np.float64)).sum(axis=1))
natural = scale * m[:, 0] + np.log(row_sum)
base_2 = m[:, 0] * c + np.log2(row_sum)
print(
    f"LSE: natural is off by {max_error(natural, true_lse):.1e}, base 2 by a factor of {np.mean(base_2 / true_lse):.4f}"
)

# %% [markdown]
# One condition hides in this line. `m` is the largest *raw* score, which protects from overflow only if `c` is positive. With a
# negative scale the largest raw score becomes the smallest scaled one. Our rungs move the sign into Q first.
#
# ## 6. Rung 1: the loop that every later rung keeps
#
# [`steps/rung01_online_softmax.py`](steps/rung01_online_softmax.py) puts all of this together, for batches and heads, with
# grouped KV heads and the causal mask. This is its inner function, read from the file:

# %%
rung1 = rungs.find("1").module()
Markdown(f"```python\n{inspect.getsource(rung1.query_tile)}```")

# %% [markdown]
# Two lines deserve a second look.
#
# * `shift`: a row whose keys are all masked so far has `row_max = -inf`, and `-inf - (-inf)` is NaN. The code subtracts 0
#   instead, and only inside the subtraction. `row_max` itself stays `-inf`; a stand-in like -50,000 would one day be larger
#   than a real score.
# * `acc_O / divisor`: the only division. A row that saw no key gets 0, and LSE `-inf`, which is exactly what an empty sum is.
#
# Now the real text: every head of every stored layer, against fp64, at different tile sizes. Does the tile size change
# the answer?

# %%
inputs = [x.astype(np.float32) for x in (q_text, k_text, v_text)]
truth, true_lse = reference.attention(*(torch.from_numpy(x) for x in inputs))
tile_sizes, errors = 2 ** np.arange(9), []
for tile_n in tile_sizes:
    out, lse = rung1.attention(*inputs, tile_n=int(tile_n))
    errors.append((max_error(out, truth), max_error(lse, true_lse)))

# of the first layer, the head that looks most at the word before
weights = safe_softmax(text_scores[0])
before = np.diagonal(weights, offset=-1, axis1=1, axis2=2).mean(axis=1)
head, words = before.argmax(), 20
tokens = json.loads((DATA / "minilm_qkv.json").read_text(encoding="utf-8"))["tokens"]
fig, (left, right) = plots.figure(2, height=4.3, widths=(1, 1.15))
left.semilogy(tile_sizes, errors, marker="o", label=["out", "LSE"])
plots.powers_of_two(left, tile_sizes)
left.axhline(np.finfo(np.float32).eps, color=plots.GREY, linewidth=1)
left.text(1, np.finfo(np.float32).eps, "fp32 epsilon", color=plots.GREY, va="bottom", fontsize=9)
left.set(xlabel="tile_n", ylabel="largest error against fp64", title="Tile size: rounding only", ylim=(1e-8, 1e-3))
left.legend()
plots.attention_map(right, weights[head, :words, :words], tokens[:words])
right.set_title(f"Head {head}: {before[head]:.0%} on the word before")
plt.show()

# %% [markdown]
# ## 7. LSE, and merging partial results
#
# `out` and `lse` of a row are all that anyone needs to know about the keys that were read. Two kernels can read two halves of
# the keys, on two processors or two machines, and their results merge:
#
# $$
# \text{lse} = \ln\left(e^{\text{lse}_a} + e^{\text{lse}_b}\right), \qquad
# \text{out} = e^{\text{lse}_a - \text{lse}}\,\text{out}_a + e^{\text{lse}_b - \text{lse}}\,\text{out}_b
# $$
#
# This operation is associative and commutative, up to rounding. Its neutral element is the empty row: out 0, lse `-inf`.
# Long-context decoding (split-KV), ring attention over many GPUs and shared prefixes (cascade attention) all rest on it. Let us try to break it:
# cut 512 keys at random places (empty pieces included), shuffle the pieces, merge them in a random tree.


# %%
def merge(a, b):
    """Merges two partial results (out (rows, dv), lse (rows,)) over disjoint sets of keys."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = np.logaddexp(lse_a, lse_b)
    base = np.where(np.isneginf(lse), 0, lse)  # both empty: exp(-inf - 0) = 0 and no NaN
    return np.exp(lse_a - base)[:, None] * out_a + np.exp(lse_b - base)[:, None] * out_b, lse


def partial(q, k, v):
    """Attention over some of the keys, through rung 1."""
    out, lse = rung1.attention(*(x[None, :, None] for x in (q, k, v)))
    return out[0, :, 0], lse[0, 0].astype(q.dtype)


def merge_at_random(q, k, v):
    cuts = np.sort(rng.integers(0, len(k) + 1, rng.integers(1, 12)))
    pieces = [partial(q, kk, vv) for kk, vv in zip(np.split(k, cuts), np.split(v, cuts), strict=True)]
    while len(pieces) > 1:
        a, b = (pieces.pop(rng.integers(len(pieces))) for _ in range(2))
        pieces.append(merge(a, b))
    return pieces[0]


q, k, v = (rng.standard_normal((n, 32)).astype(np.float32) for n in (16, 512, 512))
want = safe_softmax((q.astype(np.float64) @ k.T) * 32**-0.5) @ v
split_errors = [max_error(merge_at_random(q, k, v)[0], want) for _ in range(300)]
assert max(split_errors) < 1e-5

fig, (ax,) = plots.figure(height=2.6)
ax.hist(split_errors, bins=40, color=plots.BLUE, label="random splits, merged in random order")
ax.axvline(max_error(partial(q, k, v)[0], want), color=plots.RED, label="all keys in one go")
ax.set(
    xlabel="largest error against fp64 (fp32 arithmetic)",
    ylabel="of 300 splits",
    title="Any split, any order: the same result",
)
ax.legend()
plt.show()

# %% [markdown]
# ## 8. Masks: causal, window, softcap
#
# A causal model may not look ahead. With more keys than queries (a cached prefix) the *last* query is aligned with the
# *last* key: query `i` stands at position `p = i + seqlen_k - seqlen_q` and sees the keys `j <= p`. A sliding window also
# forgets: `p - left <= j <= p + right`, both ends included, -1 for no limit. With more queries than keys, the first causal
# rows see nothing at all.
#
# Either way, what a row sees is an interval, `low <= j < high`. **Two numbers per row are the whole mask**, and both grow from
# row to row. So a tile of queries knows from its first and last row alone which key tiles to skip, which to mask element by
# element, and which need no mask:


# %%
def bounds(rows, seqlen_q, seqlen_k, causal=False, window=(-1, -1)):
    """Which keys the rows see: (low, high), both int (len(rows),); row r sees low[r] <= j < high[r]."""
    left, right = window
    if causal:
        right = 0
    position = rows + seqlen_k - seqlen_q
    low = np.clip(position - left, 0, seqlen_k) if left >= 0 else np.zeros_like(rows)
    high = np.clip(position + right + 1, 0, seqlen_k) if right >= 0 else np.full_like(rows, seqlen_k)
    return low, high


def mask_of(seqlen_q, seqlen_k, **mask):
    low, high = bounds(np.arange(seqlen_q), seqlen_q, seqlen_k, **mask)
    keys = np.arange(seqlen_k)
    return (keys >= low[:, None]) & (keys < high[:, None])


cases = (
    ("causal", 48, 48, dict(causal=True)),
    ("more keys", 24, 48, dict(causal=True)),
    ("more queries", 48, 24, dict(causal=True)),
    ("window (12, 0)", 48, 48, dict(window=(12, 0))),
)
fig, axes = plots.figure(len(cases), height=2.9)
for ax, (title, sq, sk, mask) in zip(axes, cases, strict=True):
    allowed = mask_of(sq, sk, **mask)
    want = reference.attention_mask(sq, sk, mask.get("causal", False), mask.get("window", (-1, -1)))
    assert np.array_equal(allowed, want.numpy())
    skipped, masked, whole = plots.tile_map(ax, allowed, 8, 8)
    counts = f"{skipped} skipped, {masked} masked,\n{whole} whole"
    ax.set_title(f"{title}\n{counts}", fontsize=10, fontweight="normal")
plt.show()

tiles = TOKENS // 128
computed = tiles * (tiles + 1) // 2
print(f"causal, 16k tokens, tiles of 128 x 128: {1 - computed / tiles**2:.1%} of all tiles are skipped,")
print(f"{tiles / computed:.1%} of the computed ones need the mask")

# %% [markdown]
# White tiles are never computed. Orange tiles pay one compare and select per score; blue tiles pay nothing. Kernels
# therefore contain the loop twice: once with the mask compiled in, once without.
#
# **Softcap** keeps scores within ±cap: `cap · tanh(score / cap)`. Two constants fold away again. Raw scores are multiplied by
# `scale / cap` on the way into `tanh`; what comes out needs the factor `cap`, and since the next step multiplies by
# $\log_2 e$ anyway, `cap · log2(e)` simply becomes the new constant `c`. (`tanh` is a MUFU instruction like `2^x`: the special
# units now do two operations per score.)
#
# The order matters: **cap first, mask second.** The other way round, `tanh(-inf) = -1` turns a forbidden score into `-cap`,
# which is a perfectly ordinary score. Here is the whole forward pass of one head, with everything in it:


# %%
def flash_forward(q, k, v, scale, causal=False, window=(-1, -1), softcap=0.0, tile_m=64, tile_n=64):
    """One head. q (sq, d), k (sk, d), v (sk, dv), scale > 0 -> out (sq, dv), lse (sq,)."""
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}: put the sign into q")
    if softcap > 0:
        into_tanh, c = scale / softcap, softcap * LOG2_E
    else:
        into_tanh, c = None, scale * LOG2_E
    seqlen_q, seqlen_k = len(q), len(k)
    out, lse = np.zeros((seqlen_q, v.shape[1]), q.dtype), np.full(seqlen_q, -np.inf, q.dtype)
    for m in range(0, seqlen_q, tile_m):
        rows = np.arange(m, min(m + tile_m, seqlen_q))
        low, high = bounds(rows, seqlen_q, seqlen_k, causal, window)
        row_max, row_sum = np.full(len(rows), -np.inf, q.dtype), np.zeros(len(rows), q.dtype)
        acc_O = np.zeros((len(rows), v.shape[1]), q.dtype)
        # tiles outside [low[0], high[-1]) are skipped
        for n in range(low[0] // tile_n * tile_n, high[-1], tile_n):
            keys = np.arange(n, min(n + tile_n, seqlen_k))
            scores = q[rows] @ k[keys].T
            if into_tanh is not None:
                scores = np.tanh(scores * into_tanh)
            if keys[0] < low[-1] or keys[-1] >= high[0]:  # some row does not see all of this tile
                scores = np.where((keys >= low[:, None]) & (keys < high[:, None]), scores, -np.inf)
            new_max = np.maximum(row_max, scores.max(axis=1))
            shift = np.where(np.isneginf(new_max), 0, new_max) * c
            weights = np.exp2(scores * c - shift[:, None])
            rescale = np.exp2(row_max * c - shift)
            row_sum = row_sum * rescale + weights.sum(axis=1)
            acc_O = acc_O * rescale[:, None] + weights @ v[keys]
            row_max = new_max
        seen = ~np.isneginf(row_max)
        out[rows[seen]] = acc_O[seen] / row_sum[seen, None]
        lse[rows[seen]] = row_max[seen] * c / LOG2_E + np.log(row_sum[seen])
    return out, lse


def random_mask(seqlen_k):
    """Causal or not, any window (-1 is unlimited), capped or not."""
    left, right = rng.integers(-1, seqlen_k + 1, 2).tolist()
    softcap = float(rng.choice([0.0, 2.0, 15.0]))
    return dict(causal=bool(rng.integers(2)), window=(left, right), softcap=softcap)


def truth_of(q, k, v, scale, causal, window, softcap):
    q, k, v = (torch.as_tensor(x)[None, :, None] for x in (q, k, v))
    out, lse = reference.attention(q, k, v, scale, causal, window, softcap)
    return out[0, :, 0], lse[0, 0]


worst = 0.0
for _ in range(60):
    sq, sk = rng.integers(1, 200, 2)
    q, k, v = (2 * rng.standard_normal((n, 16)) for n in (sq, sk, sk))
    mask = random_mask(sk)
    tile_m, tile_n = rng.integers(1, 80, 2)
    out, lse = flash_forward(q, k, v, 0.25, **mask, tile_m=tile_m, tile_n=tile_n)
    want, want_lse = truth_of(q, k, v, 0.25, **mask)
    assert np.array_equal(np.isneginf(lse), np.isneginf(want_lse.numpy())), mask
    worst = max(worst, max_error(out, want))
assert worst < 1e-11
print(f"60 random masks, lengths and tile sizes: largest error {worst:.1e}")

# %%
cap, future_weight = 5.0, []
fig, (left, right) = plots.figure(2, height=3.2)
x = np.linspace(-25, 25, 200)
left.plot(x, x, color=plots.LIGHT, label="no cap")
left.plot(x, cap * np.tanh(x / cap), color=plots.BLUE, label=f"cap {cap:g}")
left.set(xlabel="scaled score", ylabel="capped score", ylim=(-12, 12), title="Softcap")
left.legend(loc="upper left")

caps = np.array([2, 5, 10, 15, 30, 50])
scores = 2 * rng.standard_normal((200, 200))
forbidden = ~mask_of(200, 200, causal=True)
for cap in caps:
    masked_first = cap * np.tanh(np.where(forbidden, -np.inf, scores) / cap)
    future_weight.append((safe_softmax(masked_first) * forbidden).sum(axis=1).mean())
right.bar(np.arange(len(caps)), 100 * np.array(future_weight), color=plots.RED)
right.set_xticks(np.arange(len(caps)), caps)
right.grid(axis="x", visible=False)
right.set(xlabel="cap", ylabel="% of a row's weight", title="Mask first, cap second: the future leaks")
plt.show()

# %% [markdown]
# With a small cap the mistake is plain. With a cap of 50 it is invisible in a test, and still wrong.
#
# ## 9. The backward pass: compute it again
#
# Training needs dQ, dK and dV. The textbook formulas use the weights $P$, the very matrix that we refused to store. But
# $P = e^{S - \text{LSE}}$: from Q, K and one number per row, any tile of $P$ can be made again with one matrix product and one
# exponential, already normalised. With $\Delta_i = \sum_c dO_{ic}\,O_{ic}$ (again one number per row):
#
# $$
# dV = P^\top dO, \quad dP = dO\,V^\top, \quad dS = P \circ (dP - \Delta), \quad
# dQ = \text{scale}\; dS\,K, \quad dK = \text{scale}\; dS^\top Q
# $$
#
# Five matrix products per tile instead of two, so the backward pass counts 2.5 times the operations of the forward pass.
# Softcap adds one factor, the derivative of tanh: $1 - \tanh^2$.


# %%
def flash_backward(q, k, v, out, lse, dout, scale, causal=False, window=(-1, -1), softcap=0.0, tile_m=64, tile_n=64):
    """One head: dq, dk, dv from what the forward pass left, out (sq, dv) and lse (sq,), and dout (sq, dv)."""
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    delta = (dout * out).sum(axis=1)
    for n in range(0, len(k), tile_n):  # key tiles outside: dK and dV of a tile stay in one place
        keys = np.arange(n, min(n + tile_n, len(k)))
        for m in range(0, len(q), tile_m):
            rows = np.arange(m, min(m + tile_m, len(q)))
            low, high = bounds(rows, len(q), len(k), causal, window)
            if keys[0] >= high[-1] or keys[-1] < low[0]:
                continue  # no row of this tile sees any of these keys
            scores, slope = scale * (q[rows] @ k[keys].T), 1.0
            if softcap > 0:
                tanh = np.tanh(scores / softcap)
                scores, slope = softcap * tanh, 1 - tanh**2
            seen = (keys >= low[:, None]) & (keys < high[:, None])
            # a row without keys has lse = -inf: again 0 stands in, and exp(-inf - 0) = 0
            lse_tile = np.where(np.isneginf(lse[rows]), 0, lse[rows])
            weights = np.exp(np.where(seen, scores, -np.inf) - lse_tile[:, None])
            dv[keys] += weights.T @ dout[rows]
            dweights = dout[rows] @ v[keys].T
            dscores = scale * slope * weights * (dweights - delta[rows, None])
            dq[rows] += dscores @ k[keys]
            dk[keys] += dscores.T @ q[rows]
    return dq, dk, dv


worst = 0.0
for _ in range(30):
    sq, sk = rng.integers(1, 150, 2)
    q, k, v, dout = (rng.standard_normal((n, d)) for n, d in ((sq, 16), (sk, 16), (sk, 24), (sq, 24)))
    mask = random_mask(sk)
    out, lse = flash_forward(q, k, v, 0.25, **mask)
    tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    want = torch.autograd.grad(truth_of(*tensors, 0.25, **mask)[0], tensors, torch.tensor(dout))
    for got, grad in zip(flash_backward(q, k, v, out, lse, dout, 0.25, **mask), want, strict=True):
        worst = max(worst, max_error(got, grad))
assert worst < 1e-10
print(f"dQ, dK, dV against autograd, 30 random masks: largest difference {worst:.1e}")

# %% [markdown]
# ## 10. Bytes and the roofline
#
# > **You may read:** *FlashAttention is faster because it computes less*, or *it is an approximation*.
# > **What is so:** it is exact, and it computes slightly *more* (corrections of `acc_O`; in the backward pass the scores once
# > again). What it saves is traffic.
#
# Let us count bytes. Unfused attention at its best writes scores and weights once and reads each once, all in 16 bits: 8 bytes
# per score. (Rung 0 moves about seven times as much: PyTorch runs each of its steps as a kernel of its own, most of them over fp32
# copies of the scores. This is why its row in section 1 lies so far below the bound that the next cell prints.) The fused loop reads Q, K and V and writes O. But each *query tile* reads all
# keys and values again:
#
# > **You may read:** *FlashAttention's memory traffic is linear in the sequence length.*
# > **What is so:** its *footprint* is linear. Its traffic is quadratic too, divided by `tile_m`; most of it is served by the L2
# > cache, so that the card's memory sees little more than each tensor once. The plot shows both.


# %%
def unfused_bytes(seqlen):
    return tensor_bytes(seqlen) + 4 * score_bytes(seqlen)


def fused_l2_bytes(seqlen, tile_m=128):
    """What the SMs ask of the L2 cache: Q and O once, K and V once per query tile."""
    once = seqlen * HEADS * HEAD_DIM * BYTES
    return 2 * once + 2 * once * -(-seqlen // tile_m)


def attention_flops(seqlen):
    return 4 * seqlen**2 * HEADS * HEAD_DIM


# peak dense bf16 TFLOP/s and memory bandwidth in TB/s, from NVIDIA's datasheets of the SXM boards
MACHINES = {"H100": (989.4, 3.35), "H200": (989.4, 4.8)}

fig, (left, right) = plots.figure(2, height=3.9)
for name, count, colour in (
    ("unfused", unfused_bytes, plots.RED),
    ("fused, from L2", fused_l2_bytes, plots.GREEN),
    ("fused, each once", tensor_bytes, plots.BLUE),
):
    left.plot(lengths, [count(int(n)) / 1e9 for n in lengths], color=colour, label=name)
left.set(yscale="log", xlabel="sequence length", ylabel="GB", title="Bytes moved, forward, 16 heads of 128")
plots.powers_of_two(left, lengths[::2])
left.legend()

plots.roofline(right, MACHINES)
for name, count, colour in (("unfused", unfused_bytes, plots.RED), ("fused", tensor_bytes, plots.GREEN)):
    x = [attention_flops(n) / count(n) for n in (1024, 4096, 16384)]
    y = [min(MACHINES["H200"][0], f * MACHINES["H200"][1]) for f in x]
    right.plot(x, y, marker="s", color=colour, label=f"{name} at 1k, 4k, 16k")
right.set(title="Roofline (datasheet figures)", ylim=(30, 2000))
right.legend(loc="lower right")
plt.show()

for name, (peak, bandwidth) in MACHINES.items():
    bound = attention_flops(TOKENS) / unfused_bytes(TOKENS) * bandwidth
    # fused attention does seqlen / 2 operations per byte: the corner of the roof is peak / bandwidth
    flat = 2 * peak / bandwidth
    print(f"{name}: unfused at most {bound:.0f} TFLOP/s at 16k, {bound / peak:.0%} of the peak;", end=" ")
    print(f"fused no longer limited by memory from {flat:.0f} tokens on")

# %% [markdown]
# Unfused attention sits on the slope: it does `head_dim / 2` operations per byte however long the text is, and only more memory
# bandwidth would help (H200 over H100). Fused attention leaves the slope after a few hundred tokens. From then on memory is not
# the limit, and everything in chapters 2 to 4 is about keeping the arithmetic units busy.
#
# ## 11. Rung 2: the loop as a GPU kernel
#
# [`steps/rung02_triton_fa2.py`](steps/rung02_triton_fa2.py) is rung 1 in Triton, in the way of FlashAttention-2. The grid holds one
# program per query tile and head; inside it the same steps as in rung 1:

# %%
try:
    rung2 = rungs.find("2").module()
    body = inspect.getsource(getattr(rung2.attend, "fn", rung2.attend))
    start, stop = body.index("        scores = tl.dot"), body.index("        K += ")
    shown = Markdown(f"```python\n{textwrap.dedent(body[start:stop])}```")
except ImportError as reason:  # Triton has wheels for Linux only
    rung2, shown = None, Markdown(f"*Not on this machine: {reason}*")
display(shown)

# %% [markdown]
# What is new is only *where* things are: `scores`, `p` and `acc_O` in registers, the tiles of K and V in shared memory (copied
# ahead by `cp.async`, a few stages deep), products on the tensor cores. `MASKED` is a compile-time constant, and the kernel calls
# this function twice: first for the tiles without a mask, then for those with one.
#
# Without a GPU the same file runs in Triton's interpreter, which executes the program with NumPy. A trap lies there:
# the interpreter multiplies bf16 operands of `tl.dot` wrongly (it takes their bits for integers; seen in Triton 3.6 to
# 3.9), so the rung widens them to fp32 when it is interpreted. A test in `tests/chapters/` shows the fault.
#
# The next cells check the kernel on this machine; look into its machine code, which Triton compiles for a Hopper without
# needing one (the picture shows both loops, left without masks, right with them); and show its speed where that means something: stored rows from a Hopper, all of one run, and your own card if
# you have one. TFLOP/s count `4 · seqlen² · head_dim` per head, half of it when causal.

# %%
if rung2 is None:
    print("rung 2 needs Triton (Linux); rungs 0 and 1 cover the ideas")
else:
    print(f"rung 2 runs here on: {rungs.find('2').where()}")
    for dtype, (b, sq, sk, h, hk, d) in (
        (torch.float16, (1, 200, 300, 4, 2, 64)),
        (torch.bfloat16, (2, 150, 90, 2, 1, 128)),
    ):
        shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, d))
        q, k, v = (torch.from_numpy(rng.standard_normal(shape)).to(dtype) for shape in shapes)
        want, want_lse = reference.attention(q, k, v, causal=True)
        (out, lse), (eager_out, _) = (rungs.find(n).run(q, k, v, causal=True) for n in ("2", "0"))
        error, eager_error = (max_error(x.double(), want) for x in (out, eager_out))
        assert error <= 2 * eager_error + 1e-3
        assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))
        print(f"{dtype}, {sq} queries, {sk} keys, head dim {d}, causal: error {error:.1e}", end=" ")
        print(f"(PyTorch, unfused, same precision: {eager_error:.1e})")

# %%
if rung2 is not None:
    from fa3_course.commands.sass import report_rung

    with tempfile.TemporaryDirectory() as folder:
        sass = Path(folder) / "rung02.sass"
        (report,) = report_rung("2", head_dim=128, causal=False, dtype="bf16", dump=sass)
        fig, (ax,) = plots.figure(height=2.5)
        groups = {
            "tensor cores (HGMMA)": ("HGMMA",),
            "wait for them": ("WARPGROUP.DEPBAR",),
            "exponentials (MUFU.EX2)": ("MUFU.EX2",),
            "copies ahead (LDGSTS)": ("LDGSTS",),
        }
        plots.instruction_strip(ax, sass.read_text(), groups)
        ax.set_title("Rung 2: product, wait, exponentials, product, wait, in both loops")
        plt.show()
    print(f"{report.registers} registers per thread, {report.stack} bytes spilled, {report.instructions} instructions")

# %%
if RUN:
    print(f"stored: {RUN.gpu}, torch {RUN.torch}, triton {RUN.triton}, {RUN.date[:10]}")
    fig, axes = plots.figure(2, height=3.6)
    for ax, causal in zip(axes, (False, True), strict=True):
        kernels = ["rung00_eager", "rung02_triton_fa2", "fa2", "fa3"]
        plots.throughput(ax, RUN, kernels, head_dim=128, causal=causal, dtype="bf16")
        ax.set_title(f"head dim 128, {'causal' if causal else 'full'}, bf16")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    plt.show()
else:
    print("no stored row yet: `fa3 bench` on a Hopper stores some")

if rung2 is not None and torch.cuda.is_available():
    import triton

    q, k, v = (torch.randn(4, 4096, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ms = triton.testing.do_bench(lambda: rung2.attention(q, k, v), return_mode="median")
    tflops = 4 * attention_flops(4096) / ms / 1e9
    print(f"your card, {torch.cuda.get_device_name()}: rung 2 at head dim 128, 4k: {tflops:.0f} TFLOP/s")

# %% [markdown]
# ## 12. Why a kernel that waits stops there
#
# FlashAttention-2 reaches about 35 % of an H100's peak (paper, section 1). It is not memory, as the roofline said. Rung 2 does the
# same steps in the same order, and the plot above shows it well ahead of FA2, yet far from FA3. Two causes are at work, and they
# can be told apart.
#
# **The instruction.** FA2 was written for Ampere. Its products are `mma.sync` instructions: one warp multiplies 16 x 16 by 16 x 8
# values, all in its registers. Hopper still runs them, at about 63 % of its tensor cores' rate (Luo et al. 2024). The full rate
# needs Hopper's own instruction, WGMMA: four warps together multiply 64 x 16 by 16 x N values and read them straight from shared
# memory. Nobody wrote WGMMA into rung 2. Triton's compiler chooses the instruction for `tl.dot`, by the card that it compiles for.
# Here is the same source, compiled for both (in machine code `mma.sync` is called `HMMA`, WGMMA is called `HGMMA`):

# %%
if rung2 is not None:
    for card, capability in (("A100", 80), ("H100", 90)):
        (report,) = report_rung("2", head_dim=128, causal=False, dtype="bf16", capability=capability)
        products = {name: count for name, count in report.opcodes.items() if "MMA" in name}
        print(f"for an {card} (sm_{capability}): " + ", ".join(f"{n} x {name}" for name, n in products.items()))

# %% [markdown]
# **The waiting.** WGMMA is asynchronous: it returns at once, and the warps could work on a softmax while the tensor cores
# multiply. Rung 2 does not use this. In the picture of its machine code a wait stands behind each group of products, so
# products and softmax of a warp still take turns, as in FA2. That is what we call a synchronous kernel, whatever its
# instructions are.
#
# A budget shows what either cause may cost. For one tile of 128 x 128 scores, one SM needs
#
# * **tensor cores**, 4096 bf16 operations per clock: `4 · 128 · 128 · head_dim / 4096` clocks for the two products by WGMMA;
# * **MUFU**, 16 per clock: `128 · 128 / 16 = 1024` clocks for the exponentials, whatever the head dim;
# * **issue slots**, 128 lanes per clock, for everything in fp32: the multiply-add, maximum, sum, conversion to bf16 and the
#   MUFU instruction itself, 4.5 lanes per score, and the correction of `acc_O`.
#
# A kernel that waits for each step adds these times up: the tensor cores stand still during softmax. Before you look: at head
# dim 128, what share of the tensor cores' peak can a kernel with WGMMA reach at most if products and softmax never overlap?

# %%
guess = None  # percent of the peak

# %%
M = N = 128


def clocks(head_dim):
    """Clocks of one SM for a 128 x 128 tile of scores: tensor cores, MUFU, issue slots."""
    return 4 * M * N * head_dim / 4096, M * N / 16, M * N * (4.5 + head_dim / N) / 128


def no_overlap(head_dim, tensor_rate=1.0):
    """Share of the peak when products and softmax (at the pace of its slower unit) wait for each other."""
    tensor, mufu, issue = clocks(head_dim)
    return tensor / (tensor / tensor_rate + max(mufu, issue))


reveal("no overlap, WGMMA, head dim 128", guess, 100 * no_overlap(128), "% of the peak")

MMA_SYNC = 0.63  # share of Hopper's tensor-core rate that mma.sync reaches: Luo et al. 2024, arXiv:2402.13499
# TFLOP/s, fp16 forward, full, 16k tokens, H100 SXM: read from the charts of the FA3 paper (arXiv:2407.08608)
PAPER = {"FA2": {64: 324, 128: 370, 256: 326}, "FA3": {64: 497, 128: 648, 256: 756}}
PEAK = MACHINES["H100"][0]  # that of an H200 is the same
dims = (64, 128, 256)
measured = {
    kernel: [stored(kernel, head_dim=d, causal=False, seqlen=TOKENS, dtype="bf16") for d in dims]
    for kernel in ("fa2", "rung02_triton_fa2", "fa3")
}

fig, (left, right) = plots.figure(2, height=4, widths=(1, 1.25))
names = [f"d {d}" for d in dims]
units = zip(*(clocks(d) for d in dims), strict=True)
colours = (plots.BLUE, plots.RED, plots.GREEN)
plots.grouped_bars(left, names, zip(("tensor cores", "MUFU", "issue slots"), units, colours, strict=True))
left.set(xlabel="clocks per 128 x 128 tile", title="Busy time of each unit")

bounds_drawn = {
    "bound: WGMMA, no overlap": ([100 * no_overlap(d) for d in dims], plots.BLUE),
    "bound: mma.sync, no overlap": ([100 * no_overlap(d, MMA_SYNC) for d in dims], plots.PURPLE),
}
points = {
    f"paper, H100: {name}": ([100 * PAPER[name][d] / PEAK for d in dims], plots.GREY, marker)
    for name, marker in (("FA2", "v"), ("FA3", "D"))
}
for kernel, rows in measured.items():
    label, colour, marker = plots.KERNELS[kernel]
    points[f"stored: {label}"] = ([100 * r[0].tflops / PEAK if r else None for r in rows], colour, marker)
plots.levels(right, names, bounds_drawn, points)
right.set(ylabel="% of the tensor cores' peak", ylim=(0, 139), title="Bounds and measurements")
right.set_yticks(range(0, 101, 20))
plt.show()

table = [
    "| head dim | paper: FA2 | paper: FA3 | stored: FA2 | stored: rung 2 | stored: FA3 |",
    "|---|---|---|---|---|---|",
]
for i, d in enumerate(dims):
    cells = [f"{rows[i][0].tflops:.0f}" if rows[i] else "no row yet" for rows in measured.values()]
    table.append(f"| {d} | {PAPER['FA2'][d]} | {PAPER['FA3'][d]} | {' | '.join(cells)} |")
title = "TFLOP/s, forward, full, 16k tokens (paper: H100, fp16; stored: bf16):"
display(Markdown(f"{title}\n\n" + "\n".join(table)))

# %% [markdown]
# Does the budget explain both FA2 and rung 2? If the instruction is what tells them apart, rung 2 is faster by the
# ratio of the two bounds, and both reach a similar part of their own bound.

# %%
if all(row for rows in measured.values() for row in rows):
    table = [
        "| head dim | FA2, of the mma.sync bound | rung 2, of the WGMMA bound | rung 2 / FA2, measured | ratio of the bounds | FA3, of the WGMMA bound |",
        "|---|---|---|---|---|---|",
    ]
    for i, d in enumerate(dims):
        fa2, triton_fa2, fa3 = (rows[i][0].tflops / PEAK for rows in measured.values())
        old, new = no_overlap(d, MMA_SYNC), no_overlap(d)
        table.append(
            f"| {d} | {fa2 / old:.0%} | {triton_fa2 / new:.0%} | {triton_fa2 / fa2:.2f} | {new / old:.2f} | {fa3 / new:.0%} |"
        )
    display(Markdown("\n".join(table)))
    nominal = PEAK * 1e12 / (RUN.sms * 4096) / 1e9
    clock = [row.sm_mhz / 1e3 for row in RUN.select(direction="fwd", seqlen=TOKENS) if row.sm_mhz]
    print(
        f"The peak of {PEAK:.0f} TFLOP/s belongs to a clock of {nominal:.2f} GHz; the card chose {min(clock):.2f} to",
        end=" ",
    )
    print(f"{max(clock):.2f} GHz in these rows, so take shares of the peak as good to a tenth.")
else:
    print("no stored row yet: `fa3 bench` on a Hopper stores some")

# %% [markdown]
# In the stored run it does, at head dims 64 and 128: the two ratios differ by no more than that tenth. FA2 and rung 2 lose a
# similar part of their bounds to what the budget leaves out, the waits for copies, barriers and the latency of each step. At
# head dim 256 rung 2 gains more than the instruction explains, and both are far below; there the budget is not the whole
# story.
#
# So the better instruction alone lifts a kernel that waits, but not over the blue line. To pass it, softmax of one tile must run
# while the tensor cores work on another. At d 64 both are busy for equally long, so half of the peak is lost without
# overlap. The paper's FA3 comes close to the blue line: its overlap pays for the waits, and no more. The FA3 of the stored
# run is a later version, and the last column of the table shows how far it gets past the line. There is still room: full overlap
# would put every point at 100 %.
#
# (The bounds are for strict turns. Warps are not in lockstep: while one waits for its product, another may be in its softmax, so
# a little overlap happens by chance, also in FA2 and rung 2. Chapter 3 makes it happen on purpose.)
#
# That is the program of the next chapters: feed WGMMA by TMA (chapter 2), then overlap (chapter 3).
#
# > **You may read:** *FA3 reaches 740 TFLOP/s* and *softmax is 100 % hidden behind the products*.
# > **What is so:** 740 is the rounded headline in the abstract of the paper's first version. The tallest bar of that paper is the 756
# > at head dim 256 above, and at head dim 128 its chart ends at 648; the released code has become faster since. How much is
# > hidden is a number to measure, kernel by kernel.

# %% [markdown]
# ## 13. Three questions
#
# Try to answer before you open them.
#
# <details><summary><b>1.</b> A kernel processes the key tiles from the last to the first. Does the result change?</summary>
#
# By rounding only. The pair (`row_max`, `row_sum`) and `acc_O` merge associatively and commutatively (section 7), so any order of the
# tiles is right. FA3 does walk from the last tile to the first: the tiles that need a mask then come first, and the loop after them
# is free of masks.
# </details>
#
# <details><summary><b>2.</b> Why may the unmasked loop drop the test for <code>row_max = -inf</code>?</summary>
#
# In an unmasked tile every row sees every key, and a finite score makes the maximum finite. `row_max` may still be `-inf`
# from *before*, but then `exp2(-inf - finite)` is 0, which is right. Only `-inf - (-inf)` is a problem, and that needs a row without any key.
# </details>
#
# <details><summary><b>3.</b> Doubling <code>tile_m</code> halves the L2 traffic. Why not use 512 rows?</summary>
#
# `acc_O`, the scores and the weights of a tile live in registers: for 512 x 128 the fp32 `acc_O` alone takes 256 KB, the whole
# register file of an SM. Chapter 2 makes this budget exact, and it is what sets the tile sizes of FA3.
# </details>
#
# ## Where to go
#
# * Do it yourself: [`lab.ipynb`](lab.ipynb), a series of exercises along this road, with a checker.
# * Look at rung 2's machine code without a GPU: `fa3 sass 2`.
# * Chapter 2: the same loop on Hopper's own units, TMA and WGMMA.
#
# **Sources.** Milakov and Gimelshein 2018 (online softmax); Dao et al. 2022, Dao 2023 (FlashAttention, -2); Shah et al. 2024
# (FlashAttention-3); Luo et al. 2024 (the rate of `mma.sync` on Hopper); PyTorch's `flash_attn/kernel_traits.h` (the instruction
# of its FA2); NVIDIA's datasheets of H100 and H200.
