# %% [markdown]
# # Lab 4: the numerics of FP8
#
# You write an FP8 attention's arithmetic, piece by piece: the formats, the rounding, where scales go, what keeps P inside
# the format. Everything runs on a laptop, in NumPy.
#
# * **Write** between the markers `# region learner` and `# endregion`; replace the `raise`. Run the cell.
# * **Check** with the cell below it. A check draws fresh inputs, tests named properties, and shows the values of
#   those that do not hold.
# * **Stuck?** `check("04.1", decode, hint=1)` shows the first of three hints. The whole answer is in `solutions/`.
# * **Rather in an editor?** The same stubs are files in `exercises/`. `check("04.1")`, or `fa3 check 04.1` in a
#   terminal, checks the file.
# * **Late, or again?** `fa3 catchup 04.4` puts the solutions of 04.1 to 04.3 into the files, `fa3 reset 04.4` puts a
#   stub back; both keep what you wrote. A check in this notebook takes the file when its cell is still the untouched
#   stub.
#
# The stored outputs show a lab that nobody has solved yet.
# %%
import matplotlib.pyplot as plt
import numpy as np

from fa3_course import paths, plots
from fa3_course.checker import answer, check, progress
from fa3_course.checker.truth import attention as true_attention

plots.use_style()
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)  # what 04.2 asks of a format
activations = np.load(paths.data("minilm_qkv.npz"))  # a small sentence encoder's, on a real text
Q, K, V = (activations[name][0].astype(np.float64) for name in "qkv")  # layer 0: (heads, tokens, head_dim)


def percent(got, want):
    """Root mean square error in percent of the size of `want`."""
    return 100 * np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))


# %% exercise="04.1"

# %% exercise="04.2"

# %% exercise="04.3"

# %% [markdown]
# ### Try it: how quiet may a tensor be?
#
# With 04.2 and 04.3 solved, this cell rounds a real K, made quieter and quieter, with your factor per head and without a
# factor. Predict before you run it: how much quieter may K be before the error without a factor grows? And does your
# factor help at all, as long as K is not quiet?
# %%
to_grid, factors = answer("04.2"), answer("04.3")
if to_grid and factors:
    descale, _ = factors
    quieter = 2.0 ** np.arange(0, 15)
    lines = {"e4m3": (E4M3, False), "e5m2": (E5M2, False), "e4m3 with a factor": (E4M3, True)}
    fig, (ax,) = plots.figure()
    for (name, (fmt, scaled)), colour in zip(lines.items(), (plots.RED, plots.ORANGE, plots.BLUE), strict=True):
        errors = []
        for factor in quieter:
            x = np.moveaxis(K, 0, 1)[None] / factor  # (1, tokens, heads, head_dim)
            d = descale(x, x.shape[2], fmt[2])[:, None, :, None] if scaled else 1.0
            errors.append(percent(to_grid(x / d, *fmt) * d, x))
        ax.plot(quieter, errors, "o-", color=colour, label=name)
    ax.set_xscale("log", base=2)
    ax.set(xlabel="how much quieter K is", ylabel="% error", ylim=(0, 40), title="Rounding a real K")
    ax.legend()
    plt.show()
else:
    print("Solve 04.2 and 04.3 first.")

# %% exercise="04.4"

# %% [markdown]
# ### Try it: what the offset saves
#
# With 04.2 and 04.4 solved, this cell runs your `tile` and `epilogue` on the rows of a real attention, with V = 1: what is
# missing from 1 was rounded to zero, or saturated. The scores are sharpened by a factor, as longer training does. Predict:
# at which offset does it get worse again, and why exactly there?
# %%
to_grid, parts = answer("04.2"), answer("04.4")
if to_grid and parts:
    tile, epilogue = parts
    offsets = np.arange(-6, 13)
    fig, (ax,) = plots.figure()
    for sharper, colour in ((1, plots.BLUE), (2, plots.GREEN), (4, plots.ORANGE)):
        scores, scale = np.concatenate(Q @ np.swapaxes(K, 1, 2)), sharper * Q.shape[2] ** -0.5
        row_max, sums = scores.max(axis=1), []
        for offset in offsets:
            p, row_sum = tile(scores, row_max, scale, offset, lambda x: to_grid(x, *E4M3))
            out, _ = epilogue(p.sum(axis=1, keepdims=True), row_max, row_sum, scale, offset)
            sums.append(100 * abs(out.mean() - 1))
        ax.plot(offsets, sums, "o-", color=colour, label=f"scores times {sharper}")
    ax.axvline(8, color=plots.GREY, linestyle=":")
    ax.set(xlabel="offset (dotted: 8)", ylabel="% missing", title="V = 1: how much of the answer is missing")
    ax.legend()
    plt.show()
else:
    print("Solve 04.2 and 04.4 first.")

# %% [markdown]
# ### The chapter, assembled
#
# An FP8 attention made of your own functions: factors per head, tensors rounded to e4m3, P with the offset, on the real text.
# Compared with the fp64 truth, for both formats.
# %%
needed = {number: answer(number) for number in ("04.2", "04.3", "04.4")}
if all(needed.values()):
    to_grid, (descale, fold), (tile, epilogue) = needed.values()
    heads, tokens, d = Q.shape
    for name, fmt in (("e4m3", E4M3), ("e5m2", E5M2)):
        factors = [descale(np.moveaxis(x, 0, 1)[None], heads, fmt[2]) for x in (Q, K, V)]
        q8, k8, v8 = (to_grid(x / factor[0, :, None, None], *fmt) for x, factor in zip((Q, K, V), factors, strict=True))
        scale_log2, out_scale = fold(d**-0.5, *factors, heads)
        outs, lses, wants, want_lses = [], [], [], []
        for head in range(heads):
            scores = q8[head] @ k8[head].T
            scale = scale_log2[0, head] / np.log2(np.e)
            row_max = scores.max(axis=1)
            p, row_sum = tile(scores, row_max, scale, 8.0, lambda x, fmt=fmt: to_grid(x, *fmt))
            out, lse = epilogue(p @ v8[head], row_max, row_sum, scale, 8.0)
            want, want_lse = true_attention(Q[head], K[head], V[head], d**-0.5)
            outs.append(out * out_scale[0, head])
            lses.append(lse)
            wants.append(want)
            want_lses.append(want_lse)
        print(
            f"{name}: out off by {percent(np.array(outs), np.array(wants)):.1f} % of its size, "
            f"LSE by at most {abs(np.array(lses) - np.array(want_lses)).max():.2f} (it reaches {np.max(want_lses):.0f})"
        )
else:
    print("Still to solve:", ", ".join(number for number, functions in needed.items() if not functions))

# %% [markdown]
# ### Where you stand
#
# %%
board = progress("04")
