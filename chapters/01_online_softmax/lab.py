# %% [markdown]
# # Lab 1: online softmax, by hand
#
# Small functions, from a softmax that does not overflow to the inner loop of a GPU kernel. Each exercise is three
# cells: the task, a cell to write in, and its check. Everything runs on a laptop.
#
# * **Write** between the markers `# region learner` and `# endregion`; replace the `raise`. Run the cell.
# * **Check** with the cell below it. A check draws fresh inputs, tests named properties, and shows the values of
#   those that do not hold.
# * **Stuck?** `check("01.1", softmax, hint=1)` shows the first of three hints. The whole answer is in `solutions/`.
# * **Rather in an editor?** The same stubs are files in `exercises/`. `check("01.1")`, or `fa3 check 01.1` in a
#   terminal, checks the file.
# * **Late, or again?** `fa3 catchup 01.4` puts the solutions of 01.1 to 01.3 into the files, `fa3 reset 01.4` puts a
#   stub back; both keep what you wrote. A check in this notebook takes the file when its cell is still the untouched
#   stub.
#
# The stored outputs show a lab that nobody has solved yet.
# %%
import matplotlib.pyplot as plt
import numpy as np

from fa3_course import paths, plots
from fa3_course.checker import answer, check, progress
from fa3_course.checker.truth import allowed
from fa3_course.checker.truth import attention as true_attention

plots.use_style()

# %% exercise="01.1"

# %% exercise="01.2"

# %% exercise="01.3"

# %% exercise="01.4"

# %% exercise="01.5"

# %% exercise="01.6"

# %% [markdown]
# ### Try it: your attention, on many workers
#
# With 01.4 and 01.6 solved, this cell deals the keys of a real text (activations of a small sentence encoder) out to
# workers, runs your attention on each, and merges their results in a random order. Predict before you run it: does the
# error grow with the number of merges?

# %%
activations = np.load(paths.data("minilm_qkv.npz"))
q, k, v = (activations[name][0, 0].astype(np.float64) for name in "qkv")  # layer 0, head 0: (tokens, 32)
scale = q.shape[1] ** -0.5

attention, merge = answer("01.4"), answer("01.6")
if attention and merge:
    true_out, true_lse = true_attention(q, k, v, scale)
    for workers in (1, 4, 16, 64, 256):
        shares = np.array_split(np.random.default_rng().permutation(len(k)), workers)
        out, lse = attention(q, k[shares[0]], v[shares[0]], scale, 64)
        for keys in shares[1:]:
            out, lse = merge(out, lse, *attention(q, k[keys], v[keys], scale, 64))
        print(
            f"{workers:3} workers: error of out {abs(out - true_out).max():.1e}, of lse {abs(lse - true_lse).max():.1e}"
        )
else:
    print("Solve 01.4 and 01.6 first.")

# %% exercise="01.7"

# %% [markdown]
# ### Try it: what skipping tiles saves
#
# Half of a causal score matrix is masked, but whole tiles can only be skipped, not halves of them. With 01.7 solved,
# this cell draws which part of the tiles your answer computes, and which part of those needs a mask, for tiles of 128
# x 128.
# %%
key_tiles = answer("01.7")
if key_tiles:
    lengths = 2 ** np.arange(7, 15)
    computed, masked = [], []
    for length in map(int, lengths):
        tiles = np.array([key_tiles(m, 128, 128, length, length) for m in range(-(-length // 128))])
        computed.append(tiles[:, 0].sum() / len(tiles) ** 2)
        masked.append(1 - tiles[:, 1].sum() / tiles[:, 0].sum())
    fig, (ax,) = plots.figure()
    ax.plot(lengths, computed, color=plots.BLUE, marker="o", label="tiles computed, of all")
    ax.plot(lengths, masked, color=plots.ORANGE, marker="s", label="tiles with a mask, of those")
    plots.powers_of_two(ax, lengths)
    ax.set(xlabel="sequence length", ylabel="share", ylim=(0, 1.05), title="Causal: tiles computed and masked")
    ax.legend()
    plt.show()
else:
    print("Solve 01.7 first.")

# %% exercise="01.8"

# %% exercise="01.9"

# %% exercise="01.10"

# %% [markdown]
# ### Try it: both forms under the roof
#
# With 01.10 solved, this cell draws the roof of two GPUs (NVIDIA's data sheets: dense bf16 rate and memory bandwidth
# of the SXM cards) and puts both forms of attention under it, at 512 to 16384 tokens, with 16 heads of 128. Which of
# the two does a faster memory help?
# %%
CARDS = {"H100 SXM": (989.0, 3.35), "H200": (989.0, 4.8)}  # TFLOP/s and TB/s, data sheets
costs = answer("01.10")
if costs:
    forward_cost, attainable = costs
    fig, (ax,) = plots.figure(height=4)
    plots.roofline(ax, CARDS)
    peak, bandwidth = CARDS["H200"]
    for fused, name, colour, marker in ((False, "eager", plots.RED, "s"), (True, "fused", plots.ORANGE, "D")):
        points = []
        for length in (512, 2048, 8192, 16384):
            operations, moved = forward_cost(1, length, length, 16, 16, 128, 2, fused)
            points.append((operations / moved, attainable(operations, moved, peak * 1e12, bandwidth * 1e12) / 1e12))
        ax.plot(*np.transpose(points), color=colour, marker=marker, linestyle=":", label=f"{name}, on an H200")
    ax.legend()
    plt.show()
else:
    print("Solve 01.10 first.")

# %% exercise="01.11"

# %% [markdown]
# ### The chapter, assembled
#
# A tiled causal attention in a dozen lines, made of your own functions: the tile range says which tiles to read and
# which of them need a mask (01.7), each score costs one exponential (01.5), and the merge puts the tiles together
# (01.6). Compared with the fp64 truth, on the real text.
# %%
needed = {number: answer(number) for number in ("01.5", "01.6", "01.7")}
if all(needed.values()):
    (probabilities, natural_lse), merge, key_tiles = needed.values()
    tile_m, tile_n, tokens = 64, 32, len(q)
    out, lse = np.zeros(v.shape), np.full(tokens, -np.inf)
    for m in range(-(-tokens // tile_m)):
        rows = np.arange(m * tile_m, min((m + 1) * tile_m, tokens))
        tiles, unmasked = key_tiles(m, tile_m, tile_n, tokens, tokens)
        for n in range(tiles):
            keys = np.arange(n * tile_n, min((n + 1) * tile_n, tokens))
            scores = q[rows] @ k[keys].T
            if n >= unmasked:
                scores = np.where(keys[None, :] <= rows[:, None], scores, -np.inf)
            row_max = scores.max(axis=1)
            p = probabilities(scores, row_max, scale)
            row_sum = p.sum(axis=1)
            part = (p @ v[keys]) / np.where(row_sum > 0, row_sum, 1)[:, None], natural_lse(row_max, row_sum, scale)
            out[rows], lse[rows] = merge(out[rows], lse[rows], *part)
    true_out, true_lse = true_attention(q, k, v, scale, allowed(tokens, tokens, causal=True))
    print(f"largest error of out {abs(out - true_out).max():.1e}, of lse {abs(lse - true_lse).max():.1e}")
else:
    print("Still to solve:", ", ".join(number for number, function in needed.items() if not function))

# %% [markdown]
# ### Where you stand
#
# %%
board = progress("01")
