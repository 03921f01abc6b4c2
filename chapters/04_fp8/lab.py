# %% [markdown]
# # Lab 4: FP8, numbers and kernel
#
# You write an FP8 attention's arithmetic, piece by piece: the formats, the rounding, where scales go, what keeps P inside
# the format, sums that do not stop, a rotation (04.1 to 04.8, after the first sitting). Then what its kernel needs: V's bytes and their
# order, the role that turns V, room for a second level (04.9 to 04.12, after the second). In between are six **bug labs**: a piece of a
# kernel with one realistic fault, to be predicted, seen and mended. Everything runs on a laptop, in NumPy and on the simulated SM.
#
# * **Write** between the markers `# region learner` and `# endregion`; replace the `raise`. Run the cell.
# * **Check** with the cell below it. A check draws fresh inputs, tests named properties, and shows the values of
#   those that do not hold. For roles it shows the simulated SM's verdict, with the line.
# * **Bug labs** ask for a prediction first, in `verdict`: what the simulated SM will say; or, where only numbers are wrong and the simulated SM says
#   nothing, which of some tests will see it. Then mend what was handed out.
# * **Stuck?** `check("04.1", decode, hint=1)` shows the first of three hints. The whole answer is in `solutions/`.
# * **Rather in an editor?** The same stubs are files in `exercises/` and `bug_labs/`. `check("04.1")`, or `fa3 check 04.1` in a
#   terminal, checks the file; `fa3 check 04.B1` a bug lab.
# * **Late, or again?** `fa3 catchup 04.4` puts the solutions of 04.1 to 04.3 into the files, `fa3 reset 04.4` puts a
#   stub back; both keep what you wrote. A check in this notebook takes the file when its cell is still the untouched
#   stub.
#
# The stored outputs show a lab that nobody has solved yet.
# %%
import json
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np

from fa3_course import paths, plots, rungs, simulated, timeline
from fa3_course.checker import answer, check, progress
from fa3_course.checker.truth import attention as true_attention
from fa3_lib.config import SMEM_LIMIT, ForwardConfig

plots.use_style()
fp8 = rungs._module("chapters/04_fp8/steps/fp8_numerics.py")  # the lesson's emulation: its tensor core is used below
transposer = rungs._module("chapters/04_fp8/steps/transposer.py")  # rung 10's CTA with V turned inside
CARD = json.loads((paths.checkout() / "chapters/04_fp8/measured_fa3_fp8.json").read_text(encoding="utf-8"))
rng = np.random.default_rng()
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

# %% exercise="04.B5"

# %% [markdown]
# > **On the card** such a kernel is right for every model in which heads are not grouped, and for grouped ones as long as the test gives all heads one
# > factor. Give all factors different values, always.

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
    ax.set_xticks(offsets[::2])
    ax.set(xlabel="offset (dotted: 8)", ylabel="% off 1", title="V = 1: how far the answer is from 1")
    ax.legend()
    plt.show()
else:
    print("Solve 04.2 and 04.4 first.")

# %% exercise="04.5"

# %% [markdown]
# ### Try it: the moment when the sum stops
#
# With 04.5 solved, this cell adds P = 2^8 again and again, V = 1, as FA3 does when all logits are equal, with your `kept` and three
# widths. The dots are what FA3's FP8 kernel answered on a card. Predict: where would the answer begin to fall if P were 1
# instead of 2^8? And where, if the card kept 23 bits, as fp32 does?
# %%
adder = answer("04.5")
if adder:
    kept, _ = adder
    lengths = [n for n in CARD["keys"] if n <= 32768]
    fig, (ax,) = plots.figure()
    for bits, colour in ((12, plots.GREY), (13, plots.BLUE), (14, plots.GREEN)):
        total, answers, term = np.zeros(1), {}, np.array([256.0])
        for n in range(1, lengths[-1] + 1):
            total = total + kept(term, total, bits)
            if n % 1024 == 0:
                answers[n] = total[0] / (256 * n)
        ax.plot(answers.keys(), answers.values(), "-", color=colour, label=f"your adder, {bits} bits")
    equal = CARD["fp8"][0]
    ax.plot(lengths, equal["output"][: len(lengths)], "o", color=plots.RED, label=f"card, {equal['name']}")
    plots.powers_of_two(ax, lengths)
    ax.set(xlabel="keys", ylabel="output", ylim=(0, 1.08), title="V = 1: the right answer is 1")
    ax.legend(loc="lower left")
    plt.show()
else:
    print("Solve 04.5 first.")

# %% exercise="04.6"

# %% [markdown]
# ### Try it: your two levels at long contexts
#
# With 04.6 solved, this cell runs online softmax over random logits, key tile by key tile, and gives P and the rescales to your two
# functions; V is 1. The tensor core is the lesson's emulation with 13 bits, the dots are the card's. Predict: how does the
# answer of two levels change from 1k to 32k keys?
# %%
levels = answer("04.6")
if levels:
    one_level, two_level = levels
    spread, rows, tile_n = CARD["fp8"][1], 16, 224  # FA3's key tile at head dim 128
    lengths = [n for n in CARD["keys"] if n <= 32768]
    found = {"one level": [], "two levels": []}
    for n in lengths:
        logits = spread["q_k_std"] ** 2 * rng.standard_normal(
            (rows, n)
        )  # of q . k / sqrt(d), with this deviation in q and k
        row_max, row_sum, p_tiles, rescales = np.full(rows, -np.inf), np.zeros(rows), [], []
        for start in range(0, n, tile_n):
            scores = logits[:, start : start + tile_n]
            new_max = np.maximum(row_max, scores.max(axis=1))
            p = 256 * np.exp(scores - new_max[:, None])
            rescales.append(np.exp(row_max - new_max))
            row_sum, row_max = row_sum * rescales[-1] + p.sum(axis=1), new_max
            p_tiles.append(fp8.to_grid(p, fp8.E4M3))
        ones = [np.ones((p.shape[1], 1)) for p in p_tiles]
        outs = (
            one_level(p_tiles, ones, rescales, 1.0, fp8.tensor_core),
            two_level(p_tiles, ones, rescales, [1.0] * len(ones), fp8.tensor_core),
        )
        for answers, out in zip(found.values(), outs, strict=True):
            answers.append((out[:, 0] / row_sum).mean())
    fig, (ax,) = plots.figure()
    for (name, answers), colour in zip(found.items(), (plots.RED, plots.BLUE), strict=True):
        ax.plot(lengths, answers, "-", color=colour, label=f"your {name}")
    ax.plot(lengths, spread["output"][: len(lengths)], "o", color=plots.RED, label=f"card, {spread['name']}")
    plots.powers_of_two(ax, lengths)
    ax.set(xlabel="keys", ylabel="output", ylim=(0, 1.08), title="V = 1: the right answer is 1")
    ax.legend(loc="lower left")
    plt.show()
else:
    print("Solve 04.6 first.")

# %% exercise="04.7"

# %% [markdown]
# ### Try it: which heads need it?
#
# With 04.2 and 04.7 solved, this cell rounds Q and K of a real layer to e4m3, as they are and rotated, and draws the worst error of a
# scaled score in each head. An error of 1 makes a weight of the softmax wrong by a factor e. Predict: do all heads gain?
# %%
to_grid, turns = answer("04.2"), answer("04.7")
if to_grid and turns:
    _, rotate = turns
    signs, scale = rng.choice([-1.0, 1.0], Q.shape[2]), Q.shape[2] ** -0.5
    exact = Q @ np.swapaxes(K, 1, 2)
    worst = {}
    for name, pair in (("as they are", (Q, K)), ("rotated", (rotate(Q, signs), rotate(K, signs)))):
        q8, k8 = (to_grid(x, *E4M3) for x in pair)  # no factors: these values lie well inside the format
        worst[name] = scale * abs(q8 @ np.swapaxes(k8, 1, 2) - exact).max(axis=(1, 2))
    fig, (ax,) = plots.figure()
    heads = np.arange(len(Q))
    for (name, errors), colour, shift in zip(worst.items(), (plots.RED, plots.BLUE), (-0.2, 0.2), strict=True):
        ax.bar(heads + shift, errors, 0.4, color=colour, label=name)
    ax.set_xticks(heads)
    ax.grid(axis="x", visible=False)
    ax.set(xlabel="head", ylabel="worst error of a score", title="MiniLM, Q and K in e4m3")
    ax.legend()
    plt.show()
else:
    print("Solve 04.2 and 04.7 first.")

# %% exercise="04.8"

# %% [markdown]
# ### Try it: for whom small blocks pay
#
# Your `quantise` takes any grid. With 04.2 and 04.8 solved, this cell gives it a real K, in e4m3 and in int8 (whole numbers up to
# 127), with blocks from one row to all rows. Predict the two curves; then say why one of them is flat.
# %%
to_grid, blocks = answer("04.2"), answer("04.8")
if to_grid and blocks:
    quantise, _ = blocks
    tokens = K.shape[1]
    sizes = [1, 4, 16, 64, tokens]
    grids = {"int8": (np.rint, 127.0, plots.RED), "e4m3": (lambda x: to_grid(x, *E4M3), 448.0, plots.BLUE)}
    fig, (ax,) = plots.figure()
    for name, (grid, largest, colour) in grids.items():
        for power_of_two, style in ((False, "o-"), (True, "s:")):
            errors = []
            for block in sizes:
                back = []
                for x in K:
                    values, factors = quantise(x, block, grid, largest, power_of_two)
                    back.append(values * np.repeat(factors, block)[:tokens, None])
                errors.append(percent(np.array(back), K))
            ax.plot(sizes, errors, style, color=colour, label=name + (", powers of two" if power_of_two else ""))
    ax.set_xscale("log", base=2)
    ax.set(
        xlabel="rows of a block (the last: all)",
        ylabel="% error",
        ylim=(0, None),
        title="A real K, one factor per block",
    )
    ax.legend(ncols=2)
    plt.show()
else:
    print("Solve 04.2 and 04.8 first.")

# %% [markdown]
# # The kernel

# %% exercise="04.9"

# %% [markdown]
# > **On the card** your `rename` is no instruction at all: the kernel's author gives the registers their new names while the kernel is
# > compiled. The order of V's keys costs nothing either, because V has to be transposed anyway and can be stored in any order.

# %% exercise="04.10"

# %% exercise="04.B1"

# %% [markdown]
# > **On the card** nothing hangs and nothing warns; the output has the right size and looks like attention. `V = 1`, the test that finds the
# > short accumulator, is blind to it. Each fault needs its own test.

# %% exercise="04.11"

# %% [markdown]
# ### Try it: what turning costs
#
# With 04.11 solved: 128 queries and 2,048 keys of head dim 128; once V comes turned from a pre-pass, once your role turns it. 3,000 cycles from the
# middle of each run. Predict: how many cycles does turning cost, when it can hide under everything else? And which line of the picture gets
# fuller?
# %%
turner = answer("04.11")
if turner:
    q, *kv = (rng.standard_normal((1, n, 1, 128)) for n in (128, 2048, 2048))
    turned = simulated.make_problem("11", q, *kv)
    fresh = {name: type(x).output(x.name, x.shape, x.dtype) for name, x in (("out", turned.out), ("lse", turned.lse))}
    raw = replace(transposer.untransposed(turned), **fresh)
    reports = {
        "V turned before": simulated.run("11", turned).report,
        "V turned by your role": simulated.run("11", raw, build=transposer.builder(turner)).report,
    }
    assert np.array_equal(turned.out.numpy(), raw.out.numpy()), "the two differ"
    fig, axes = plt.subplots(2, 1, figsize=(9, 6.4), layout="constrained")
    for ax, (name, report) in zip(axes, reports.items(), strict=True):
        first = report.cycles / 2 - 1500
        lines = timeline.from_dict(report.timeline.as_dict()).cut(first, first + 3000)
        lanes = ["turner"] if "role" in name else []
        timeline.gantt(lines, ax, [*lanes, "consumer0", "consumer1", "tensor core", "shared memory"])
        busy = f"shared memory busy for {report.share('shared memory'):.0%} of the time"
        ax.set(xlabel="cycles", title=f"{name}: {report.cycles:,.0f} cycles in all, {busy}")
    plt.show()
else:
    print("Solve 04.11 first.")

# %% exercise="04.B4"

# %% [markdown]
# > **On the card** the three warps usually are in step, and such a kernel is right in test after test. FA3's source has a barrier at this place
# > for this reason.

# %% exercise="04.12"

# %% [markdown]
# ### Try it: what a second level takes away
#
# With 04.12 solved: the widest key block of one level, and of two with T whole and with T in parts of 64 columns. Predict: how many keys does the second level
# cost at each head dim, and where are parts the only way?
# %%
room = answer("04.12")
if room:
    registers, widest_part, widest_tile = room
    dims, consumers = (64, 128, 192, 256), (3, 2, 2, 2)
    fig, (ax,) = plots.figure(height=3.4)
    kinds = {"one level": lambda d: 0, "two levels, T whole": lambda d: d, "two levels, parts of 64": lambda d: 64}
    colours = (plots.GREY, plots.ORANGE, plots.BLUE)
    series = [
        (name, [widest_tile(d, c, columns(d), 2) for d, c in zip(dims, consumers, strict=True)], colour)
        for (name, columns), colour in zip(kinds.items(), colours, strict=True)
    ]
    plots.grouped_bars(ax, [f"d {d}, {c} consumers" for d, c in zip(dims, consumers, strict=True)], series)
    ax.set(xlabel="widest key block, 2 stages (0: nothing fits)", title="Room for T")
    plt.show()
    for (d, c), n in zip(zip(dims, consumers, strict=True), series[0][1], strict=True):
        size = ForwardConfig(d, d, 64 * c, n, own_output=True, element_bytes=1).smem_bytes
        print(f"d {d}: one level, {n} keys: {registers(d, n, 0)} registers, {size:,} of {SMEM_LIMIT:,} bytes")
else:
    print("Solve 04.12 first.")

# %% exercise="04.B2"

# %% exercise="04.B3"

# %% [markdown]
# > **On the card** this shows as a small error that depends on where the large scores stand. It disappears when the first block visited happens to
# > have the row's maximum, as in many causal tests with few keys.

# %% exercise="04.B6"

# %% [markdown]
# > **On the card** consumer 0's first rows of O appear in consumer 1's last products. With longer contexts the consumers drift apart, and the order of the two
# > faults changes: O may even be written before the last V is *asked for*.

# %% [markdown]
# # All together

# %% [markdown]
# ### The chapter, assembled
#
# An FP8 attention in tiles, made of your own functions: Q and K rotated (04.7), factors per head (04.3), tensors rounded to e4m3
# (04.2), P with the offset (04.4), two-level sums (04.6) on the emulated tensor core. Compared with the fp64 truth, on the
# real text, as a kernel does it today and with what you have added.
# %%
needed = {number: answer(number) for number in ("04.2", "04.3", "04.4", "04.6", "04.7")}
if all(needed.values()):
    to_grid, (descale, fold), (tile, epilogue), (one_level, two_level), (_, rotate) = needed.values()
    heads, tokens, d = Q.shape
    signs, tile_n = rng.choice([-1.0, 1.0], d), 64

    def my_attention(q, k, v, two_levels):
        """All heads `(heads, tokens, d)` -> out like q, lse `(heads, tokens)`."""
        factors = [descale(np.moveaxis(x, 0, 1)[None], heads, E4M3[2]) for x in (q, k, v)]
        q8, k8, v8 = (to_grid(x / f[0, :, None, None], *E4M3) for x, f in zip((q, k, v), factors, strict=True))
        scale_log2, out_scale = fold(d**-0.5, *factors, heads)
        outs, lses = [], []
        for head in range(heads):
            scale = scale_log2[0, head] / np.log2(np.e)
            row_max, row_sum = np.full(tokens, -np.inf), np.zeros(tokens)
            p_tiles, v_tiles, rescales = [], [], []
            for start in range(0, tokens, tile_n):
                scores = fp8.tensor_core(q8[head], k8[head, start : start + tile_n].T).astype(np.float64)
                new_max = np.maximum(row_max, scores.max(axis=1))
                p, tile_sum = tile(scores, new_max, scale, 8.0, lambda x: to_grid(x, *E4M3))
                rescales.append(np.exp(scale * (row_max - new_max)))
                row_max, row_sum = new_max, row_sum * rescales[-1] + tile_sum
                p_tiles.append(p)
                v_tiles.append(v8[head, start : start + tile_n])
            if two_levels:
                acc_O = two_level(p_tiles, v_tiles, rescales, [1.0] * len(p_tiles), fp8.tensor_core)
            else:
                acc_O = one_level(p_tiles, v_tiles, rescales, 1.0, fp8.tensor_core)
            out, lse = epilogue(acc_O, row_max, row_sum, scale, 8.0)
            outs.append(out * out_scale[0, head])
            lses.append(lse)
        return np.array(outs), np.array(lses)

    want, want_lse = map(np.array, zip(*(true_attention(*x, d**-0.5) for x in zip(Q, K, V, strict=True)), strict=True))
    for name, turned, two_levels in (
        ("one level", False, False),
        ("two levels", False, True),
        ("rotated, two levels", True, True),
    ):
        q, k = (rotate(x, signs) if turned else x for x in (Q, K))
        out, lse = my_attention(q, k, V, two_levels)
        print(
            f"{name:20} out off by {percent(out, want):.1f} % of its size, LSE by {abs(lse - want_lse).max():.2f} at most "
            f"(it reaches {want_lse.max():.0f})"
        )
    print(f"The text has {tokens} tokens: too few for one level to go wrong.")
else:
    print("Still to solve:", ", ".join(number for number, functions in needed.items() if not functions))

# %% [markdown]
# ### Where you stand
#
# %%
board = progress("04")
