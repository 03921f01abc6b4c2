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
# # Chapter 3: ping-pong and overlap
#
# *90 minutes, and 30 more for section 13. Runs on any laptop; a Hopper is used if there is one.*
#
# Chapter 2 ended with a kernel whose two consumer warpgroups meet at the tensor cores by accident. This chapter arranges who works
# when, which is what FlashAttention-3 is known for, and then looks for what is left:
#
# | rung | file | idea |
# |---|---|---|
# | 6 | [`steps/rung06_pingpong.py`](steps/rung06_pingpong.py) | the warpgroups take turns on the tensor cores |
# | 7 | [`steps/rung07_overlap.py`](steps/rung07_overlap.py) | inside a warpgroup, softmax runs under the product before it |
# | 7b | [`steps/rung07b_overlap_no_warp_specialisation.py`](steps/rung07b_overlap_no_warp_specialisation.py) | the same overlap without a producer: an ablation |
# | 8 | [`steps/rung08_persistent.py`](steps/rung08_persistent.py) | one CTA per SM walks over tiles; causal tiles in pairs |
# | 9 | [`fa3_lib`](../../fa3_lib/consumer.py) | the library: no maximum on the way, tiles from a counter |
#
# The question to ask of every picture: *who has the tensor cores now, and what do the others do meanwhile?*
#
# Speeds come from stored runs, or from the simulated SM, and each plot says which. The simulated SM knows who waits for whom; of power, L2 and the
# compiler it knows nothing. Where it and a card disagree, the card is right, and the reason is worth finding.

# %%
import importlib.util
from dataclasses import replace
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Markdown, display

from fa3_course import (
    budget,
    comparison,
    layouts,
    lesson_rungs,
    lesson_views,
    notes,
    plans,
    plots,
    results,
    rungs,
    sass,
    sim_view,
    simulated,
    timeline,
)
from fa3_course.paths import checkout
from fa3_course.simulated import parts, predict, rung05, rung06, rung07
from fa3_lib import reference
from fa3_lib.config import ForwardConfig, forward_config
from hopper_sim import HOPPER, Fault, patched

plots.use_style()
HAS_CUTE = importlib.util.find_spec("cutlass") is not None
SEED = np.random.SeedSequence().entropy % 2**32
rng = np.random.default_rng(SEED)  # fresh inputs in every run; to repeat one, write its seed here
STEPS = "chapters/03_pingpong/steps"
FILES = {
    "5": rungs.find("5").file,
    "6": f"{STEPS}/rung06_pingpong.py",
    "7": f"{STEPS}/rung07_overlap.py",
    "7b": f"{STEPS}/rung07b_overlap_no_warp_specialisation.py",
    "8": f"{STEPS}/rung08_persistent.py",
}
# one stored run: the newest that measured this chapter's rungs, else the newest that measured rung 5
RUN = results.latest(kernel="rung07_overlap") or results.latest(kernel="rung05_warp_specialised")
print(f"seed {SEED}; CuTe DSL {'is here' if HAS_CUTE else 'has no wheels for this system: its cells say so and go on'}")
print(f"stored run: {RUN.gpu}, {RUN.date[:10]}" if RUN else "no stored run: `fa3 bench` on a Hopper stores one")
EXPERIMENTS = results.experiments("03")  # this chapter's variants, all of one run; another run than the one above
STORES_THEM = "`python -m bench.experiments_03` on a Hopper stores some"
print(
    f"stored experiments: {EXPERIMENTS.gpu}, {EXPERIMENTS.date[:10]}"
    if EXPERIMENTS
    else f"no stored experiments: {STORES_THEM}"
)


def reveal(what, guess, value, unit=""):
    """Shows a value beside the reader's guess."""
    told = "no guess yet" if guess is None else f"you said {guess:g}"
    print(f"{what}: {value:,.4g} {unit} ({told})")


def stored(kernel, **shape):
    """The stored row of a rung ("5"), of the library ("fa3_lib") or of a peer ("fa3"); None if there is none."""
    return lesson_rungs.stored(RUN, FILES.get(kernel, kernel), **shape)


def experiment(name, **shape):
    """Stored rows of one of the chapter's experiments by variant, in the order of the run; {} if there are none."""
    rows = EXPERIMENTS.select(**shape) if EXPERIMENTS else []
    return {row.kernel.removeprefix(f"{name}: "): row for row in rows if row.kernel.startswith(f"{name}: ")}


def notes_about(*words):
    """Notes whose title holds one of the words, the newest first, each with its title; a line that says so where there is none."""
    found = [e for e in notes.read() if any(word in e.title.lower() for word in words)]
    texts = [f"**{e.title}{', taken back' if e.lost else ''}** ({e.date})\n>\n{e.quote()}" for e in found]
    return [Markdown(f"> {text}") for text in texts] or [Markdown(f"*no note about {' or '.join(words)} yet*")]


def simulate(number, blocks=16, config=None, heads=1, d=128, **options):
    """Query tiles of a rung, one per head, against `blocks` key blocks on the simulated SM; compared with fp64."""
    config = config or simulated.configuration(number, d, False)
    q = rng.standard_normal((1, config.tile_m, heads, config.head_dim))
    k, v = (rng.standard_normal((1, blocks * config.tile_n, heads, config.head_dim)) for _ in range(2))
    run = simulated.simulate(number, q, k, v, config=config, **options)
    want, want_lse = reference.attention(*(torch.from_numpy(x).bfloat16().double() for x in (q, k, v)))
    assert np.abs(run.out - want.numpy()).max() < 1e-2 and np.abs(run.lse - want_lse.numpy()).max() < 1e-3
    return run.report


def predicted(number, config=None, d=128):
    """TFLOP/s of a whole card whose SMs all work like the simulated one, start and end of a CTA left out."""
    short, long = (simulate(number, blocks, config, d=d) for blocks in (6, 22))
    return HOPPER.tflops(long.flops - short.flops, long.cycles - short.cycles)


def lines_of(report):
    return timeline.from_dict(report.timeline.as_dict())


def show(number, report, title=""):
    """The timeline of a rung: the whole run, and three rounds of its middle."""
    timeline.draw(lines_of(report), title or f"Rung {number}: one CTA, {simulated.rung(number).title}")
    plt.show()


# %% [markdown]
# ## 1. One number that hurts
#
# Rung 5 has everything that chapter 2 taught: TMA, a ring, a producer warp, two consumers. Which share of the tensor cores' peak does it reach on a
# card, per head dim, at 16k tokens? The peak is 4096 FLOP per clock and SM, times the SMs, times the clock that was measured during that row.

# %%
guess = None  # percent of the peak, head dim 64

# %%
SHAPE = {"causal": False, "seqlen": 16_384}


def peak(row):
    """TFLOP/s of the tensor cores at the clock of a row."""
    clock = row.sm_mhz / 1e3 if row.sm_mhz else HOPPER.clock_ghz
    return HOPPER.tensor_flops_16bit * (RUN.sms or HOPPER.sms) * clock / 1e3


rows = {d: row for d in (64, 128, 256) if (row := stored("5", head_dim=d, **SHAPE))}
if rows:
    shares = [100 * row.tflops / peak(row) for row in rows.values()]
    fig, (ax,) = plots.figure(height=2.2)
    bars = ax.barh([f"d {d}" for d in rows], shares, color=plots.BLUE, height=0.6)
    ax.bar_label(bars, [f"{r.tflops:.0f} of {peak(r):.0f} TFLOP/s" for r in rows.values()], padding=6, fontsize=10)
    ax.set(xlim=(0, 100), xlabel="percent of the tensor cores' peak at the row's clock")
    ax.set_title(f"Rung 5, {RUN.gpu}, full, 16k")
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    plt.show()
    reveal(f"rung 5 at head dim {min(rows)}", guess, shares[0], "% of the peak")
else:
    print("no stored row of rung 5 yet: `fa3 bench` on a Hopper stores one")

# %% [markdown]
# Head dim 64 is far behind. The products shrink with the head dim. The softmax does not.
#
# ## 2. What a softmax costs
#
# Per score, attention does `4 d` floating-point operations in its two products, and **one exponential**. Per clock, an SM does 4096 of the former, and 16 of the
# latter: exponentials run in the multi-function unit (MUFU), four lanes wide in each quarter of the SM. For which
# head dim do exponentials take exactly as long as the products? And which share of the peak could a kernel reach at that head dim if the two never overlapped?

# %%
guess = None  # head dim

# %%
even = HOPPER.tensor_flops_16bit / HOPPER.mufu / 4  # 4 d / 4096 = 1 / 16
reveal("exponentials and products take equally long at head dim", guess, even)
TILES = {f"d {d}": forward_config(d, d, False) for d in (64, 128, 192, 256)}
UNITS = {
    "tensor core": plots.GREEN,
    "mufu": plots.RED,
    "issue": plots.BLUE,
    "fma": plots.SKY,
    "alu": plots.PURPLE,
    "shared memory": plots.GREY,
}
table = [budget.cycles(config) for config in TILES.values()]
fig, (left, right) = plots.figure(2, height=3.9, widths=(1.5, 1))
series = [(unit, [c[unit] / c["tensor core"] for c in table], colour) for unit, colour in UNITS.items()]
plots.grouped_bars(left, list(TILES), series)
left.set(xlabel="time of each unit, products = 1", title="Work per key block, full rates")
left.get_legend().remove()
caps = [100 * c["tensor core"] / (c["tensor core"] + c["mufu"]) for c in table]
bars = right.bar(list(TILES), caps, color=plots.ORANGE, width=0.6)
right.bar_label(bars, [f"{cap:.0f} %" for cap in caps])
right.set(ylim=(0, 100), ylabel="percent of the peak", title="If nothing overlapped")
right.grid(axis="x", visible=False)
fig.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=6, fontsize=9)
plt.show()

# %% [markdown]
# At head dim 128, exponentials cost half as much as the products; at 64, as much. If the two took turns strictly, the bars on the right would be the limit.
# But they are different units, and *can* work at the same time: nothing stands in the way but the schedule. At d 64 even a perfect schedule has no reserve,
# since two units
# would have to be full at once.
#
# These are rates from the CUDA guide. On a card you can measure them: a kernel that does nothing but exponentials, against a product of big matrices.


# %%
def measured_ratio(d=128):
    """Time per exponential over time per 4 d FLOP of a matrix product, on this machine's card."""
    import triton
    import triton.language as tl

    @triton.jit
    def exponentials(out, rounds, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = (at % 1024).to(tl.float32) / 1024
        for _ in range(rounds):
            x = tl.exp2(-x)  # stays between 0 and 1
        tl.store(out + at, x)

    ctas, block, rounds, n = 8 * torch.cuda.get_device_properties(0).multi_processor_count, 2048, 4096, 8192
    out = torch.empty(ctas * block, device="cuda")
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    exp_ms = triton.testing.do_bench(lambda: exponentials[(ctas,)](out, rounds, block, num_warps=8))
    gemm_ms = triton.testing.do_bench(lambda: a @ b)
    exps, flops = ctas * block * rounds / exp_ms * 1e3, 2 * n**3 / gemm_ms * 1e3
    print(f"your card: {exps / 1e12:.2f} T exponentials/s, {flops / 1e12:.0f} TFLOP/s in a product (cuBLAS)")
    return flops / exps / (4 * d)


if rungs.has_hopper():
    print(f"time of an exponential over that of its products, d 128, measured: {measured_ratio():.2f}")
else:
    print("the microbenchmark needs a Hopper; there is none here")
print(f"from the rates: {even / 128:.2f}")

# %% [markdown]
# The stored run has both, in seconds. Exponentials reach the guide's rate. A product of big matrices does not: power limits it (the clock falls; how far, a burst is too short to
# tell), and so do its own start and end. In seconds exponentials are therefore cheaper, beside products, than in cycles.

# %%
exp, product = (experiment("exp against matmul").get("exponentials"), EXPERIMENTS and EXPERIMENTS.one(kernel="cublas"))
if exp and product and exp.sm_mhz and EXPERIMENTS.sms:
    clocks = exp.sm_mhz * EXPERIMENTS.sms / 1e6  # 1e12 per second, of all SMs, at the clock of the exponentials
    print(f"{exp.tflops:.2f} T exponentials per second: {exp.tflops / clocks:.4g} of {HOPPER.mufu:g} per clock and SM")
    share = product.tflops / clocks / HOPPER.tensor_flops_16bit
    print(f"{product.tflops:.0f} TFLOP/s in a product (cuBLAS): {share:.0%} of the full rate at that clock")
    heads = (64, 128, 192, 256)
    fig, (ax,) = plots.figure(height=2.6)
    bars = [
        ("from the rates", [even / d for d in heads], plots.LIGHT),
        (f"measured, {EXPERIMENTS.gpu}", [product.tflops / exp.tflops / (4 * d) for d in heads], plots.RED),
    ]
    plots.grouped_bars(ax, [f"d {d}" for d in heads], bars)
    ax.axvline(1, color="black", linewidth=1)
    ax.set(xlabel="time of the exponentials over that of the products", title="Exponentials against products")
    plt.show()
else:
    print(f"no stored row of exponentials against products yet: {STORES_THEM}")

# %% [markdown]
# ## 3. Ping-pong
#
# Two consumers; each has products (QK, PV), and softmax between them. Both ask for the tensor cores when it suits them. We want:
#
# * while one has the tensor cores, the other does its softmax;
# * then they change roles, every time.
#
# The hardware has the tool: **named barriers**. A CTA has 16, each with a number of threads. `bar.sync` arrives and waits, `bar.arrive` arrives and goes
# on; when the number is reached the barrier opens, and is then as new. We take one per consumer, "it is your turn": its owner waits there with 128 threads, and
# the consumer
# before it arrives there with its 128, so the number is 256.

# %%
edges = [
    ("consumer 1 passes the turn", "TURN_WG0", "consumer 0 issues PV, QK"),
    ("consumer 0 passes the turn", "TURN_WG1", "consumer 1 issues PV, QK"),
]
fig, (ax,) = plots.figure(height=2.1)
layouts.draw_protocol(ax, edges, width=0.29)
ax.set_title("Rung 6: two named barriers")
plt.show()

# %% [markdown]
# ### Write the turns yourself
#
# Below is a consumer whose products are already in the right order: PV of one block and QK of the next are issued in one go, so that a whole softmax lies between two
# issues. What is missing are the turns, three places A, B, C. You have `t.turns[i]`, the barrier of consumer i, with `await t.turns[i].sync()` to wait for
# a turn and `t.turns[i].arrive()` to hand one over. Who starts? Who passes to whom? How often? The answer is in the cell after.


# %%
async def my_consumer(wg, me, p, t, tile):
    c, blocks = p.config, p.blocks(tile[0])
    await wg.setmaxnreg(c.consumer_registers)
    acc_S, acc_O = wg.registers("S", (64, c.tile_n)), wg.registers("O", (64, c.head_dim_v))
    tOrP = wg.registers("P", (64, c.tile_n), p.q.dtype)
    acc_O.write(0.0)
    rows = parts.OnlineSoftmax(wg, p, tile[0], me, p.scale_log2)
    # A: before the first turn
    await t.q_full[0].wait(0)
    for i in range(len(blocks) + 1):
        slot, phase = i % c.stages, i // c.stages % 2
        last_slot, last_phase = (i - 1) % c.stages, (i - 1) // c.stages % 2
        # B: before the issue
        if i > 0:
            await t.v_full[last_slot].wait(last_phase)
            wg.wgmma_fence()
            wg.wgmma(acc_O, tOrP, t.v[last_slot], label="PV")
            wg.commit()
        if i < len(blocks):
            await t.k_full[slot].wait(phase)
            wg.wgmma_fence()
            wg.wgmma(acc_S, t.q[me], t.k[slot].T, accumulate=False, label="QK")
            wg.commit()
        # C: after the issue
        await wg.wait_group(0)
        if i > 0:
            t.v_empty[last_slot].arrive(parts.WARPS)
        if i < len(blocks):
            t.k_empty[slot].arrive(parts.WARPS)
            weights, shrink = await rows.step(acc_S.read(), blocks[i])
            tOrP.write(weights)
            await parts.rescale(wg, acc_O, shrink)
    await parts.epilogue(wg, p, parts.staging(p, t, me), tile, me, acc_O, rows)


def with_consumer(consumer):
    """Builds rung 6's CTA with another consumer."""

    def build(sm, p, tile):
        t = replace(parts.make_tiles(sm, p), turns=parts.make_turns(sm, p.config))
        sm.role("producer", rung05.producer, p, t, tile, threads=parts.WARP)
        for me, name in enumerate(parts.consumer_names(p.config)):
            sm.role(name, consumer, me, p, t, tile)

    return build


def verdict(number="6", blocks=6, **options):
    """What the simulated SM says: cycles of a clean run, or the fault."""
    try:
        return f"clean, {simulate(number, blocks, **options).cycles:,.0f} cycles"
    except Fault as fault:
        return str(fault)


print("my_consumer:", verdict(build=with_consumer(my_consumer)))

# %% [markdown]
# That verdict is about turns that nobody takes. Here is rung 6's consumer, `mine` and `next_one` are the two barriers:

# %%
display(lesson_views.source(rung06.consumer))

# %% [markdown]
# Which share of their peak will the tensor cores reach, start and end of the tile included?

# %%
guess = None  # percent of the tensor cores' peak in rung 6

# %%
reports = {n: simulate(n, 24) for n in ("5", "6")}
reveal("rung 5, simulated", None, 100 * reports["5"].share("tensor core"), "% of the peak")
reveal("rung 6, simulated", guess, 100 * reports["6"].share("tensor core"), "% of the peak")
show("6", reports["6"])

# %% [markdown]
# There it is. Point at a softmax of the blue warpgroup: next to it, in the row of the tensor cores, lie the orange one's products; and the other way round in the
# next turn. Now break it. Which of these changes hang, and which only change the speed?

# %%
guess = None  # how many of the six changes below still give a clean run?

# %%
PASS = "        next_one.arrive()\n"
WAIT = "        await wg.wait_group(0)\n"
CHANGES = {
    "nobody opens the first turn": ("mine.arrive()  # opens the first turn", "pass"),
    "everybody opens a turn": ("if me == 0:", "if True:"),
    "I pass the turn to myself": ("next_one.arrive()", "mine.arrive()"),
    "nobody waits for a turn": ("await mine.sync()", "pass"),
    "the last turn is not passed on": (PASS, f"        if i < len(blocks):\n    {PASS}"),
    "the turn is held until the products are done": (PASS + WAIT, WAIT + PASS),
}
print("as it stands:", verdict())
clean = 0
for what, change in CHANGES.items():
    text = verdict(build=with_consumer(patched(rung06.consumer, *change)))
    clean += text.startswith("clean")
    print(f"\n{what}:\n" + "\n".join(line[:110] for line in text.splitlines()[:4]))
print()
reveal("clean", guess, clean, f"of {len(CHANGES)}")

# %% [markdown]
# * **Who starts.** Consumer 0 arrives once on its own barrier, before the loop. If nobody does, both wait for ever; if both do, the count of arrivals is wrong
#   from then on.
# * **Arrivals and waits pair up.** Every turn is one wait and one arrival. At the end one arrival is left over, at consumer 0: the state in which the next tile
#   finds the barriers (section 9).
# * **The turn is for issuing.** Tensor cores work in the order of issue, so the turn may be passed on while the products still run: the next consumer's
#   products queue up behind
#   them, and no gap appears between the two. The last line shows what holding on costs in the simulator, if anything.
#
# ## 4. The kernel, rung 6
#
# Two methods, their calls, and where PV waits. Everything else is rung 5.

# %%
print(lesson_rungs.check_and_measure(FILES["6"], RUN))
FOUND = {}
if HAS_CUTE:
    FOUND = {f"rung {n}": lesson_rungs.machine_code(FILES[n]) for n in ("5", "6")}
    display(lesson_views.sass_table(FOUND, ("HGMMA", "MUFU.EX2", "SYNCS", "BAR", "USETMAXREG")))
    display(lesson_views.rung_diff(FILES["5"], FILES["6"]))

# %% [markdown]
# `BAR` rose; `HGMMA` and `MUFU.EX2` did not move: the same work, in another order.
#
# ## 5. Two or three?
#
# Three consumers have 192 query rows, 160 registers per thread, and two softmaxes under each turn. Where would that help? At head dim 64 softmax takes as long as the
# products (section 2), and longer, once you count the maximum and the conversions. Then one other consumer's products are too short to cover it.

# %%
guess = None  # simulated speed with three consumers over two, rung 6, head dim 64

# %%
sizes = {m // 64: replace(simulated.configuration("6", 64, False), tile_m=m) for m in (128, 192)}
speed = {n: [predicted(n, config) for config in sizes.values()] for n in ("6", "7")}
lines = lines_of(simulate("6", 12, sizes[3]))
fig, (left, right) = plots.figure(2, height=3.4, widths=(1, 1.5))
series = [(f"rung {n}", values, c) for (n, values), c in zip(speed.items(), (plots.ORANGE, plots.BLUE), strict=True)]
plots.grouped_bars(left, [f"{n} consumers" for n in sizes], series)
left.set(xlabel="TFLOP/s", title="Simulated, d 64")
left.get_legend().remove()
fig.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=2)
timeline.gantt(lines.cut(*(lines.span[1] * part for part in (0.45, 0.7))), right)
right.set_title("Rung 6, three consumers, a part")
plt.show()
reveal("three over two in rung 6, d 64", guess, speed["6"][1] / speed["6"][0], "times")
for causal in (False, True):
    found = experiment("consumers", head_dim=64, causal=causal)
    for n in (n for n in ("6", "7") if f"rung {n}, 3" in found):
        ratio = found[f"rung {n}, 3"].tflops / found[f"rung {n}, 2"].tflops
        print(f"measured, {found[f'rung {n}, 3'].shape}: three over two in rung {n}: {ratio:.2f} times")
if not experiment("consumers"):
    print(f"no stored row of two and three consumers yet: {STORES_THEM}")

# %% [markdown]
# Three are faster on the card, too, by less than the simulator promises. The turns go round: 0, 1, 2, 0. Each barrier still counts 256 threads, its owner's and those of the one before. What decides between two and three is the
# register file (section 10): three have 160 registers per thread, and O alone takes half the head dim of them.
#
# Three have a second advantage: 192 rows share each K and V tile, so less must come from L2.
#
# > **You may read:** *FA3 uses ping-pong between two warpgroups, or else overlap inside one.*
# >
# > **What is so:** its 16-bit kernels take turns with two warpgroups and with three, up to head dim 128, and do both at once. At head dim 256 they take no turns.
#
# ## 6. Overlap inside a warpgroup
#
# Ping-pong hides one warpgroup's softmax under *another's* products. Within a warpgroup QK, softmax, PV still follow one another, and every handover (the wait
# for a product, the maximum,
# the conversion of P) is time in which the tensor cores depend on the other one alone. FA3's second idea: **issue QK of the next block before PV of this one,
# and start the next block's softmax when its QK is done
# and PV still runs.** The loop gets three parts:
#
# | part | issued | waits for | then |
# |---|---|---|---|
# | first block | QK(0) | QK(0): `wait_group(0)` | softmax(0); P(0) stays in registers |
# | pair, for every further block j | QK(j), PV(j - 1) | QK(j): `wait_group(1)` | softmax(j) while PV(j - 1) runs; `wait_group(0)`; P(j) replaces P(j - 1); O rescaled |
# | last block | PV(last) | PV: `wait_group(0)` | epilogue |
#
# `wait_group(1)` means "at most one group may still be in flight". Groups end in the order of their commits, so QK is done, and PV, the younger, goes on.

# %%
display(lesson_views.source(rung07.attend))

# %% [markdown]
# Two predictions: which share of their peak do the tensor cores reach now; and of the four changes in the cell after, which are wrong, and which only slower?

# %%
guess = None  # percent of the tensor cores' peak in rung 7
guess_clean = None  # how many of the four changes are clean

# %%
report = simulate("7", 24)
reveal("rung 7, simulated", guess, 100 * report.share("tensor core"), "% of the peak")
show("7", report)
print(
    f"(The simulated tensor cores work at {HOPPER.tensor_efficiency:.0%} of their full rate, as ncu counts it on a card.)"
)

# %%
STEP = "weights, shrink = await rows.step(acc_S.read(), blocks[i])"
ISSUE_PV = 'wg.wgmma(acc_O, tOrP, t.v[last_slot], label="PV")\n            wg.commit()'
CHANGES = {
    "wait for both products": ("wait_group(1 if i > 0 else 0)", "wait_group(0)"),
    "wait for neither": ("wait_group(1 if i > 0 else 0)", "wait_group(2)"),
    "P is written right after softmax": (STEP, f"{STEP}\n            tOrP.write(weights)"),
    "V's slot is freed when PV is issued": (
        ISSUE_PV,
        f"{ISSUE_PV}\n            t.v_empty[last_slot].arrive(parts.WARPS)",
    ),
}
print("as it stands:", verdict("7"))
clean = 0
for what, change in CHANGES.items():
    with mock.patch.object(rung07, "attend", patched(rung07.attend, *change)):
        text = verdict("7")
    clean += text.startswith("clean")
    print(f"\n{what}:\n" + "\n".join(line[:150] for line in text.splitlines()[:2]))
print()
reveal("clean", guess_clean, clean, f"of {len(CHANGES)}")

# %% [markdown]
# > **You may read:** *FA3 overlaps softmax and matrix products completely: 100 % overlap.*
# >
# > **What is so:** it is a figure to measure, and it means nothing until you say of what. Below are three shares of the same simulated runs: of the time in which
# > exponentials are computed, how much lies under a product; of the time of the products, how much has an exponential beside it; and how long the tensor cores work,
# > which is the one that counts.


# %%
def covered(report):
    """(exponentials under products, products beside exponentials, tensor cores at work), in percent of their times."""
    lines = lines_of(report)
    times = np.unique([t for e in lines.events if e.lane in ("tensor core", "mufu") for t in (e.start, e.end)])
    length, middle = np.diff(times), (times[1:] + times[:-1]) / 2
    at_work = {}
    for lane in ("tensor core", "mufu"):
        spans = np.array(sorted((e.start, e.end) for e in lines.events if e.lane == lane))
        last = np.searchsorted(spans[:, 0], middle) - 1
        at_work[lane] = (last >= 0) & (middle < np.maximum.accumulate(spans[:, 1])[last])
    product, exp = (length[mask].sum() for mask in at_work.values())
    both = length[at_work["tensor core"] & at_work["mufu"]].sum()
    return 100 * both / exp, 100 * both / product, 100 * product / report.cycles


fig, axes = plots.figure(2, height=3)
for ax, d in zip(axes, (64, 128), strict=True):
    shares = np.array([covered(simulate(n, 24, d=d)) for n in ("5", "6", "7")]).T
    names = ("exponentials under products", "products beside exponentials", "tensor cores at work")
    plots.grouped_bars(
        ax,
        ["rung 5", "rung 6", "rung 7"],
        zip(names, shares, (plots.RED, plots.ORANGE, plots.GREEN), strict=True),
    )
    ax.set(xlim=(0, 100), xlabel="percent", title=f"Simulated, d {d}, two consumers")
    ax.get_legend().remove()
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
plt.show()

# %% [markdown]
# ### The kernel, rung 7

# %%
print(lesson_rungs.check_and_measure(FILES["7"], RUN))
if HAS_CUTE:
    FOUND |= {f"rung {n}": lesson_rungs.machine_code(FILES[n]) for n in ("7", "7b")}
    display(lesson_views.sass_table(FOUND, ("HGMMA", "MUFU.EX2", "BAR", "USETMAXREG", "UTMALDG", "STL", "LDL")))
    display(lesson_views.rung_diff(FILES["6"], FILES["7"]))

# %% [markdown]
# `HGMMA` and `MUFU.EX2` rose by half, because the loop's body stands three times in the code (first block, masked, unmasked) and no longer twice. The price is
# registers: P of one block lives beside S of the
# next, and that is why FA3 needs `setmaxnreg` (chapter 2, sitting b). And the compiler has a say. Two entries of our notes (`bench/NOTES.md`), word for word:

# %%
display(Markdown(notes.find("overlap and ping-pong").quote("Prediction", "Outcome", "Trap")))
display(Markdown(notes.find("wait_group(0)").quote()))

# %% [markdown]
# The second note is a prediction of ours that failed. The picture says: softmax starts before PV is over, and the wait for PV comes after it. ptxas had moved that
# wait up; we forced it down, to where the picture has it, and the kernel became slower. The picture has units and waits. The compiler also
# mixes instructions of different kinds, and that was worth more.
#
# ## 7. The paper's ablation, and rung 7b
#
# FA3's paper measures its own two ideas by taking them out (fp16, head dim 128, 16k, full, H100): everything on; no overlap inside a warpgroup; no warp
# specialisation. The last one is our rung 7b:
# no producer and no turns; each warpgroup starts copies between its own products.

# %%
guess = None  # rung 7b over rung 7 on the simulated SM

# %%
PAPER = {"7": 661, "6": 582, "7b": 570}  # TFLOP/s, FA3 paper (arXiv:2407.08608), table of the ablation
NO_TURNS = replace(simulated.configuration("7", 128, False), ping_pong=False)
# label: (name of the variant in the stored experiment, rung, its configuration where it is not the rung's own)
ABLATION = {
    "rung 7: all of it": ("all of it", "7", None),
    "rung 7 without turns": ("no turns", "7", NO_TURNS),
    "rung 6: no overlap inside\na warpgroup": ("no overlap inside a warpgroup", "6", None),
    "rung 5: neither": ("neither", "5", None),
    "rung 7b: no warp\nspecialisation": ("no warp specialisation", "7b", None),
}
paper = [np.nan if config else PAPER.get(n, np.nan) / PAPER["7"] for _, n, config in ABLATION.values()]
simulated_speed = np.array([predicted(n, config) for _, n, config in ABLATION.values()])
bars = [
    ("paper (H100, fp16)", paper, plots.GREY),
    ("simulated", simulated_speed / simulated_speed[0], plots.LIGHT),
]


def over_all(head_dim, causal):
    """Measured speeds of the ablation's variants over "all of it", NaN where there is no row."""
    found = experiment("ablation", head_dim=head_dim, causal=causal)
    whole = found["all of it"].tflops if "all of it" in found else np.nan
    return [found[name].tflops / whole if name in found else np.nan for name, _, _ in ABLATION.values()]


CASES = {(d, causal): over_all(d, causal) for d in (128, 64) for causal in (False, True)}
if np.isfinite(CASES[128, False]).any():
    bars.append((f"measured ({EXPERIMENTS.gpu}, bf16)", CASES[128, False], plots.BLUE))
fig, (ax,) = plots.figure(height=3.9)
plots.grouped_bars(ax, list(ABLATION), bars)
ax.set(xlabel="speed over that of rung 7, within one run", title="The ablation: d 128, full, 4 x 16k tokens")
ax.get_legend().remove()
fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
plt.show()
reveal("rung 7b over rung 7, simulated", guess, simulated_speed[-1] / simulated_speed[0])
if EXPERIMENTS and np.isfinite([*CASES.values()]).any():
    head = ["measured, over all of it", *(f"d {d} {'causal' if causal else 'full'}" for d, causal in CASES)]
    lines = [
        [label.replace("\n", " "), *(f"{x:.2f}" for x in x)]
        for label, *x in zip(ABLATION, *CASES.values(), strict=True)
    ]
    display(Markdown("\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))))
    for (d, causal), (both, overlap, turns, neither, alone) in CASES.items():
        gains = {
            "both ideas": both,
            "overlap alone": overlap,
            "turns alone": turns,
            "overlap without a producer": alone,
        }
        text = ", ".join(f"{what} {100 * (speed / neither - 1):+.0f} %" for what, speed in gains.items())
        rows = experiment("ablation", head_dim=d, causal=causal).values()
        mhz = sorted(row.sm_mhz for row in rows if row.sm_mhz) or [np.nan]
        print(f"d {d} {'causal' if causal else 'full'}, over neither: {text}; clock {mhz[0]:.0f} to {mhz[-1]:.0f} MHz")
    paper = f"{PAPER['6'] / PAPER['7']:.2f} without overlap inside a warpgroup, {PAPER['7b'] / PAPER['7']:.2f} without warp specialisation"
    print(f"the paper's kernel, over all of it: {paper}")
    twice = []  # two experiments hold the same kernel: what a few percent are worth
    for causal in (False, True):
        one, other = (experiment(name, head_dim=64, causal=causal) for name in ("ablation", "consumers"))
        for a, b in (("all of it", "rung 7, 2"), ("no overlap inside a warpgroup", "rung 6, 2")):
            if a in one and b in other:
                twice.append(abs(np.log(one[a].tflops / other[b].tflops)))
    if twice:
        print(f"one kernel, measured twice in this run: up to {100 * max(twice):.1f} % apart")
    for causal in (False, True):
        both = [[stored(n, head_dim=128, causal=causal, seqlen=2**i) for n in ("6", "7")] for i in range(9, 16)]
        if ratios := [new.tflops / old.tflops for old, new in both if old and new]:
            mask = "causal" if causal else "full"
            print(
                f"rung 7 over rung 6 in the run of whole kernels, d 128 {mask}: {min(ratios):.2f} to {max(ratios):.2f}"
            )
else:
    print(f"no stored row of our own kernels' ablation yet: {STORES_THEM}")
sim_view.explore(ping_pong=False, overlap=True)

# %% [markdown]
# **Our own kernels do not repeat the paper's ablation, and that is worth a minute.** At d 128 either idea *alone* brings nearly all of what both bring together; without turns, and even without
# a producer, the kernel is about level. In the run of whole kernels rung 7 is a little behind rung 6. At d 64, with two consumers, turns even cost something beside overlap.
#
# The two ideas are two ways to one end: something for the tensor cores to do during a softmax. When one of them has filled the gap, the other finds little left to fill. What both leave is
# the same: at d 128 a card at its limit of power (compare the clocks of d 128 and d 64), at d 64 the MUFU, for which both consumers queue, with turns or without. And
# rung 5, "neither", is better on the card than in the simulator, whose two consumers meet at their softmax more often than the card's do. The
# paper's kernel lost far more without either; its card, dtype, compiler, tiles and the rest of its loop are others, and which of these it is, our rows cannot say. Whoever
# needs to know measures on *their* kernel, as the library did: its table of tiles takes turns at d 64 and d 256, and none at d 128 (section 13).
#
# Rung 5 and rung 7 without turns are no rows of the paper's. (On a live notebook, turn the knobs: overlap
# without ping-pong is rung 7b, ping-pong without overlap rung 6; try a slower memory.) Two remarks.
#
# * An ablation says what happens if you remove one thing *and change nothing else*. A kernel that was tuned for being without would lose less.
# * The simulator does not know what 7b pays for besides waiting: registers that cannot be handed over (no `USETMAXREG` in the table above, more registers at
#   launch) and the instructions of the
#   copies in the middle of the schedule.
#
# ## 8. Three questions that readers of FA3 keep asking
#
# **Where is the ping-pong?** Not in a function of that name. It is a sync on my barrier before the issue of products, an arrival on the next one's barrier
# after it, and one arrival before the loop. The cell below
# lists the lines.
#
# **What do the two warpgroups compute?** The same thing for different query rows. Consumer 0 owns rows 0 to 63 of the tile, consumer 1 rows 64 to 127; each
# computes S, softmax, P and O of its rows against *all* keys. Nobody does "the
# softmax" and nobody "the products". They share K and V in shared memory, and not one number of S, P or O. The cell lists what each one did in a simulated run.
#
# **Why two or three?** One leaves the tensor cores alone during its softmax (chapter 2). Two fill them if a softmax is shorter than the other's products. Three
# help where it is longer (head dim 64), as long as O is
# narrow enough for 160 registers. Four would have about 120 each, and S of 128 keys takes 64 of those, its P 32. The cell prints the widest key block for each.

# %%
for number, line in enumerate((checkout() / FILES["7"]).read_text(encoding="utf-8").splitlines(), 1):
    if "_turn(" in line or "TURN" in line:
        print(f"rung 7, line {number}: {line.strip()[:100]}")
lines = lines_of(simulate("7", 4))
for role in ("consumer0", "consumer1"):
    on_tensor_cores = {e.name for e in lines.events if e.lane == "tensor core" and e.role == role}
    by_itself = {e.name for e in lines.events if e.lane == role and e.kind == "work"}
    print(f"{role}: {', '.join(sorted(on_tensor_cores | by_itself))}")
for d in (64, 128, 256):
    widths = [f"{budget.widest(d, m) or 'nothing fits'}" for m in budget.TILE_M]
    print(f"d {d}: widest key block of 1, 2, 3 consumers: {', '.join(widths)}")

# %% [markdown]
# ## 9. Persistent: from tile to tile
#
# A CTA starts, sets up barriers, loads its first tiles, works, normalises, stores, ends; the next one starts. At 16k keys nobody notices. Predict: at 1k keys
# and head dim 128, which share of the time of a
# query tile is start and end, in rung 7?

# %%
guess = None  # percent

# %%
costs = {n: predict.cost(n, 128, False) for n in ("7", "8")}
lengths = [2**i for i in range(9, 15)]
fig, (left, right) = plots.figure(2, height=3, widths=(1, 1.5))
share = {}
for n, c in costs.items():
    share[n] = [100 * c.tile / (c.tile + c.block * s / c.config.tile_n) for s in lengths]
for (n, values), colour in zip(share.items(), (plots.ORANGE, plots.BLUE), strict=True):
    left.plot(lengths, values, marker="o", color=colour, label=f"rung {n}")
plots.powers_of_two(left, lengths)
left.set(xlabel="keys", ylabel="percent of a tile's time", ylim=(0, None), title="Start and end, simulated")
left.legend()
timeline.gantt(lines_of(simulate("8", 4, heads=2)), right)
right.set_title("Rung 8: two tiles of four key blocks")
right.set_xlabel("cycles")
plt.show()
reveal("start and end of a tile at 1k keys, rung 7", guess, share["7"][lengths.index(1024)], "% of its time")
for title in ("persistent ctas", "output memory of its own"):
    display(Markdown(notes.find(title).quote("Prediction", "Outcome")))

# %% [markdown]
# In the picture, K and V of the second tile are on their way while the first tile's output leaves. What goes on across tiles is a count, and nothing may start anew: the
# rings' slots and phases, and the turns (one arrival left over, always). A warp of its own loads Q, since Q waits for something else than K and V: for the
# moment at which its memory is free.
# The notes are about several shapes of the library's kernel; at d 128 and 1k they add up to less than the curve on the left promises. What the simulator takes
# for the start of a CTA is an assumption.
#
# ### Waves, and causal tiles of different length
#
# With 132 SMs, 133 equal tiles take as long as 264: the last *wave* is nearly empty. Under a causal mask tiles are not even equal: the last one of a head has
# all key blocks, the first has one. A persistent kernel needs a **plan**: which
# CTA takes which tile in which round. A good plan gives every SM the same number of key blocks *and* lets CTAs that run at the same time share heads, so that K
# and V stay in L2. Five plans (`fa3_course/plans.py`, each a few lines):
#
# 1. as they come: tile i to CTA i mod 132;
# 2. sorted by length within sections of 4 heads, dealt in rounds, every other round backwards;
# 3. the same with all heads in one section;
# 4. a long tile, then its short mirror image: last and first, last but one and second, ...;
# 5. no plan: a counter in memory hands the next tile, longest first, to whoever is free (FA3).

# %%
guess = None  # which plan does rung 8 follow? its number

# %%
sms = RUN.sms if RUN and RUN.sms else HOPPER.sms
fig, (first, left, right) = plots.figure(3, height=3.7, widths=(1, 0.9, 0.9))
tiles_per_sm = np.arange(1, 8 * sms) / sms
first.plot(tiles_per_sm, 100 * tiles_per_sm / np.ceil(tiles_per_sm), color=plots.BLUE, linewidth=1.2)
first.set(xlabel="equal tiles per SM", ylabel="percent", ylim=(40, 101), title="SMs at work: waves")
seqlens = {1024: plots.SKY, 4096: plots.BLUE, 16_384: "#1B4F72"}
balance, in_flight = [], []
for seqlen, colour in seqlens.items():
    work = plans.causal_work(forward_config(128, 128, True), seqlen)
    judged = [plan(work, sms) for plan in plans.PLANS.values()]
    balance.append((f"{seqlen // 1024}k", [100 * plans.balance(plan) for plan in judged], colour))
    in_flight.append((f"{seqlen // 1024}k", [plans.bytes_in_flight(plan, work) / 1e6 for plan in judged], colour))
for ax, series, title in ((left, balance, "SMs at work: plans, %"), (right, in_flight, "K, V of a round, MB")):
    plots.grouped_bars(ax, [f"plan {i}" for i in range(1, 6)] if ax is left else [""] * 5, series)
    ax.set_title(title)
    ax.get_legend().remove()
right.axvline((RUN.l2_bytes if RUN and RUN.l2_bytes else 50e6) / 1e6, color=plots.RED, label="L2 of the card")
fig.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=4)
plt.show()
reveal("rung 8 follows plan", guess, 1 + list(plans.PLANS.values()).index(plans.mirror_pairs))
display(Markdown(notes.find("tiles in pairs").quote()))

# %% [markdown]
# A model of ten lines would have saved us a measurement: sections look reasonable until you see where sections and rounds end. It also shows why *all heads
# sorted*, perfect in balance, fell apart at 1k:
# the tiles that run together belong to as many heads as there are SMs, so every K and V is fetched again in every round. Pairs lose a little balance, in the
# last round, and have
# neighbours that share a head. And the card? Rung 7 starts a CTA per tile, rung 8 walks over pairs; beside it stand the same kernel with tiles as they come (plan
# 1), and with the longest tiles of all heads first, so that neighbours never share a head. Then the waves: one head of 2k rows has 16 tiles.

# %%
shapes = [(causal, seqlen) for causal in (False, True) for seqlen in (4096, 16_384)]
measured = {shape: experiment("schedule", causal=shape[0], seqlen=shape[1]) for shape in shapes}
if any(len(found) > 1 for found in measured.values()):
    names = [f"{'causal' if causal else 'full'}, {seqlen // 1024}k" for causal, seqlen in shapes]
    base = [found["a CTA per tile"].tflops if "a CTA per tile" in found else np.nan for found in measured.values()]
    kinds = {
        "persistent": plots.BLUE,
        "persistent, as they come": plots.GREEN,
        "persistent, heads interleaved": plots.ORANGE,
    }
    bars = [
        (
            kind,
            [
                found[kind].tflops / b if kind in found else np.nan
                for found, b in zip(measured.values(), base, strict=True)
            ],
            colour,
        )
        for kind, colour in kinds.items()
    ]
    fig, (ax,) = plots.figure(height=3.2)
    plots.grouped_bars(ax, names, bars)
    ax.axvline(1, color="black", linewidth=1)
    ax.set(xlabel="speed over that of a CTA per tile (rung 7)", title=f"Schedules, d 128, {EXPERIMENTS.gpu}")
    ax.get_legend().remove()
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    plt.show()
else:
    print(f"no stored row of the persistent schedules yet: {STORES_THEM}")
for heads in sorted({row.heads for row in EXPERIMENTS.select(seqlen=2048, causal=False)}) if EXPERIMENTS else []:
    found = experiment("waves", heads=heads, seqlen=2048)
    us = ", ".join(f"{kind} {1e3 * row.ms:.0f} us" for kind, row in found.items())
    print(f"{16 * heads} tiles, {16 * heads / sms:.2f} per SM: {us}")
for causal in (False, True):
    both = {2**i: [stored(n, head_dim=128, causal=causal, seqlen=2**i) for n in ("7", "8")] for i in range(9, 16)}
    text = [f"{s / 1024:g}k {new.tflops / old.tflops:.2f}" for s, (old, new) in both.items() if old and new]
    if text:
        print(
            f"rung 8 over rung 7, d 128 {'causal' if causal else 'full'}, in the run of whole kernels: {', '.join(text)}"
        )

# %% [markdown]
# How to read such a comparison, before you believe it:
#
# * *A grid is no naive schedule.* The hardware gives the next CTA to whichever SM is free, and rung 7 lists the longest tiles first: that is plan 5, for nothing. Pairs are a plan made in advance, and
#   where SMs do not run at one speed, or the last round is short, a plan loses. At 16k a tile lasts so long that its start and end, which persistence hides, weigh little.
# * *One change at a time.* Our first measurement of rung 8 was none: it took its tiles from the library, which had been given more keys and no turns at d 128 since. What that
#   run said of persistence it said of three changes at once, and nobody can tell them apart. The rows were taken out; `bench/NOTES.md` says so.
# * *A few percent of one run are no law.* Section 7 has one kernel twice in one run.
#
# The plan in the kernel:

# %%
print(lesson_rungs.check_and_measure(FILES["8"], RUN))
if HAS_CUTE:
    display(lesson_views.source(lesson_rungs.module(FILES["8"]).Attention.tile_of_round))

# %% [markdown]
# ## 10. Budgets: a calculator
#
# What fits decides more than what would be fast. Turn the knobs: head dim, rows, keys per block, stages, and whether the output has memory of its own.

# %%
budget.explore(head_dim=128, tile_m=128, tile_n=128, stages=2, own_output=True)
choices = {f"{name}: {c.tile_m} x {c.tile_n}": budget.budget(c) for name, c in TILES.items()}
choices["d 128: 128 x 176 (FA3)"] = budget.budget(ForwardConfig(128, 128, 128, 176))
choices["d 128: 192 x 128"] = budget.budget(ForwardConfig(128, 128, 192, 128))
fig, axes = plots.figure(2, height=3.8)
budget.draw(axes, choices)
plt.show()
for name, found in choices.items():
    if found.refusal:
        print(f"{name}: {found.words}")
by_stages = [predicted("7", replace(TILES["d 64"], own_output=False, stages=s)) for s in (2, 4)]
print(f"d 64, rung 7, simulated: four stages over two: {by_stages[1] / by_stages[0]:.2f} times")

# %% [markdown]
# The red line is the limit. At head dim 256 shared memory is full with 80 keys per block, and the output has no place of its own: it takes Q's (rung 8), or goes from registers to global memory (the library). At head dim 64 three consumers'
# registers are full while half of the shared memory is
# empty; four stages would fit, and the last line says what they bring. And 192 rows at head dim 128, which FA3's authors call a close second, need P in shared
# memory instead of registers.
#
# > **You may read:** *TMA frees registers, and that is why tiles could grow.*
# >
# > **What is so:** TMA frees the few registers that held addresses and data on their way. What limits a tile are the accumulators, S and O, and shared memory: the
# > two bars above.
#
# ## 11. Reading a profile
#
# NVIDIA's profiler (ncu) counts how often each unit worked. Our notes hold a profile of the library's kernel, from before it was persistent:

# %%
profile = notes.find("profile")
display(Markdown(profile.quote()))
NCU = {"tensor": "tensor core", "XU": "mufu", "ALU": "alu", "FMA": "fma", "issue": "issue"}  # name in ncu: ours
CONFIGS = {
    "d64 192x128": ForwardConfig(64, 64, 192, 128, ping_pong=True),
    "d128 128x128": ForwardConfig(128, 128, 128, 128, ping_pong=True),
}
fig, axes = plots.figure(2, height=3.2)
for ax, (name, config) in zip(axes, CONFIGS.items(), strict=True):
    report, counted = simulate("7", 32, config), notes.profiles(profile)[name]
    units = [unit for unit in NCU if unit in counted]
    # a share counts work at the full rate; ncu's tensor pipe is active for longer than that
    active = {unit: report.share(NCU[unit]) / (HOPPER.tensor_efficiency if unit == "tensor" else 1) for unit in units}
    series = [
        ("ncu, H200", [100 * counted[unit] for unit in units], plots.BLUE),
        ("simulated rung 7", [100 * share for share in active.values()], plots.LIGHT),
    ]
    plots.grouped_bars(ax, units, series)
    ax.set(xlim=(0, 100), xlabel="percent of the cycles", title=name)
    ax.get_legend().remove()
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
plt.show()

# %% [markdown]
# How to read it (XU is the MUFU; ncu counts the tensor pipe as active a little longer than its FLOP at full rate take):
#
# * **No unit is full.** At head dim 64 the tensor cores and the MUFU both work a bit more than half of the time. Near 100 % of one, we would know what to
#   spare. Here the warps *queue for both*: first many want the one, then many the other.
# * **Issue slots.** More than half are taken at d 64. Whoever proposes more instructions (a polynomial instead of the MUFU, a vote that saves a multiplication)
#   pays in a coin that is half spent.
# * **Eligible warps.** On average one warp per scheduler could issue in a cycle. That hides little latency: a chain of dependent instructions shows.
# * **Clock.** At d 128 the tensor cores are busier and the clock is lower. Power is the next limit there.
# * **Grey against blue.** The simulator counts only the arithmetic of softmax. Addresses, moves and predicates take issue slots, too, and on the card they make every
#   gap between two products a little longer.
#
# ## 12. What FA3 left on the table, and what we tried
#
# FA3's released kernel leaves work on the table that later kernels, or arithmetic, point at: it multiplies O by its factor after every block, whether the maximum grew
# or not; it takes every exponential from the MUFU, also where the MUFU is the longest queue; both maxima of a thread come before all of its exponentials; one warp loads Q, K
# and V in turn. Each of these invites a trick, and each trick a prediction.
#
# The best of this chapter is that list of predictions, written before each measurement. Read them, and decide for each whether you would have tried it. (Entries
# come from `bench/NOTES.md`; a gain is a ratio within one run.)

# %%
tried = [entry for entry in notes.read() if entry.changes]
rows = [f"| {i} | {entry.title} | {entry.fields.get('Prediction', '')} |" for i, entry in enumerate(tried, 1)]
display(Markdown("\n".join(["| | idea | prediction |", "|---|---|---|", *rows])))

# %%
guess = []  # the numbers of the ideas that made the kernel slower, so that we took them back

# %%
print(f"taken back: {[i for i, entry in enumerate(tried, 1) if entry.lost]}; you said {guess or 'nothing yet'}")


def gain(entry):
    """The measured changes of an entry in percent, from the worst shape to the best."""
    percent = sorted(round(100 * (change.ratio - 1)) for change in entry.changes)
    words = " to ".join(f"{x:+d} %" for x in dict.fromkeys((percent[0], percent[-1])))
    return words if entry.lost or percent[-1] > 0 else f"{words} (a first version; see its note)"


rows = [f"| {i} | {e.title} | {gain(e)} | {'taken back' if e.lost else 'kept'} |" for i, e in enumerate(tried, 1)]
display(Markdown("\n".join(["| | idea | measured | |", "|---|---|---|---|", *rows])))
fig, (ax,) = plots.figure(height=0.9 + 0.5 * len(tried))
MARKERS = {"d64": ("o", plots.ORANGE), "d128": ("s", plots.BLUE), "d256": ("D", plots.GREEN)}
for row, entry in enumerate(tried):
    for change in entry.changes:
        marker, colour = MARKERS.get(change.shape.partition(" ")[0], ("x", plots.GREY))
        face = "white" if "causal" in change.shape else colour
        ax.plot(100 * (change.ratio - 1), row, marker, color=colour, markerfacecolor=face, markersize=7)
    label = f"{row + 1}  {entry.title[:30]}{'…' if len(entry.title) > 30 else ''}"
    ax.text(-0.01, row, label, transform=ax.get_yaxis_transform(), ha="right", va="center", fontsize=9.5,
            color=plots.RED if entry.lost else "black")  # fmt: skip
for d, (marker, colour) in MARKERS.items():
    ax.plot([], [], marker, color=colour, label=d)
ax.plot([], [], "o", color=plots.GREY, markerfacecolor="white", label="hollow: causal")
ax.axvline(0, color="black", linewidth=1)
ax.set_yticks(range(len(tried)), [""] * len(tried))
ax.invert_yaxis()
ax.set(xlabel='percent faster: every pair "a -> b" of the notes, each of one run (red: taken back)')
fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4)
plt.show()

# %% [markdown]
# A dot is one shape. (Some of these ideas belong to the finished kernel: section 13.) An idea that was kept may have a lost dot, where a first version of it failed (causal tiles in pairs: the dot far on the left are the
# sections of section 9). Three ideas deserve a closer look.
#
# ### Lazy rescale: work that is not there
#
# `O *= shrink` is needed when the row maximum grew. With a threshold one can keep the old maximum as long as the new one is not much larger: P may then be
# larger than 1, up to 2^8, and nothing is lost (FA4
# does so on Blackwell). How often does the maximum grow at all?

# %%
guess = None  # percent of (row, block) pairs in which the maximum grows: 64 blocks of 128 keys, random data

# %%
scores = rng.standard_normal((512, 64, 128)) * np.log2(np.e)  # rows, blocks, keys; in the exponent's unit
block_max = scores.max(2)
grows = block_max[:, 1:] > np.maximum.accumulate(block_max, 1)[:, :-1]
reveal("the maximum grows in", guess, 100 * grows.mean(), "% of the blocks")
in_use, rescales = block_max[:, 0].copy(), 0
for new in block_max.T[1:]:
    far = new > in_use + 8
    rescales += far.sum()
    in_use[far] = new[far]
print(f"by more than 8 over the maximum in use: {100 * rescales / grows.size:.3g} %")
c = forward_config(64, 64, False)
print(
    f"to be saved at d 64: {c.head_dim_v // 2} multiplications per thread and block, beside {c.tile_n // 2} exponentials"
)
display(Markdown(notes.find("lazy rescale").quote()))

# %% [markdown]
# Nearly every rescale multiplies by 1, even without a threshold. All of them can go, and the kernel became *slower*. Nobody had waited for the multiplications;
# the vote and the branch cut a long stretch of code into
# pieces, and ptxas mixes instructions only within a piece. **Work saved is not time saved, unless somebody waited for that work.**
#
# ### Software exp2: a model of averages
#
# If the MUFU is the bottleneck at head dim 64, compute every n-th exponential with a polynomial on the FMA units, about 8 instructions each (FA4 does so on
# Blackwell). Below is the model that said "do it".
# The note above has what was measured.

# %%
INSTRUCTIONS = 8  # per exponential: clamp, range split, cubic, exponent put back
fractions = np.linspace(0, 0.5, 51)
work = budget.cycles(c)
exponentials = work["mufu"] * HOPPER.mufu
fig, (ax,) = plots.figure(height=2.8)
curves = {
    "MUFU": (work["mufu"] * (1 - fractions), plots.RED),
    "issue slots": (work["issue"] + fractions * exponentials * (INSTRUCTIONS - 1) / HOPPER.issue, plots.BLUE),
    "tensor cores": (np.full_like(fractions, work["tensor core"]), plots.GREEN),
}
for name, (values, colour) in curves.items():
    ax.plot(100 * fractions, values, color=colour, label=name)
ax.set(xlabel="percent of the exponentials by polynomial", ylabel="cycles per key block", ylim=(0, None))
ax.set_title("d 64, every unit at its full rate")
plots.name_lines(ax)
plt.show()
x = np.linspace(0, 1, 10_001)
cubic = np.polyfit(x, np.exp2(x), 3, w=np.exp2(-x))
error = np.abs(np.polyval(cubic, x) / np.exp2(x) - 1).max()
print(f"a cubic on [0, 1): relative error {error:.1e}; rounding to bf16 costs up to {2**-9:.1e} anyway")
for title in ("two warps", "maximum of row 2"):
    display(Markdown(notes.find(title).quote()))

# %% [markdown]
# Accuracy is no obstacle, and the model has room: the blue line starts well below the red one. It measured a loss. Go back to the profile: issue slots are half
# spent *on average over all cycles*, and a consumer's
# exponentials come in a burst. A model of averages does not see bursts.
#
# ### Two more predictions
#
# The last two notes above are a pair. **Two warps for K and V** was predicted by the simulator and lost everywhere; we have not found out why. That is an
# honest state of a note, and an invitation. **The maximum of
# row 2** held: each thread has two rows, and if both maxima come first and all exponentials after, the MUFU idles meanwhile; so mix them. With two consumers (d
# 128, 256) it brought more than half of what was predicted, and nothing where a third one fills
# such gaps (d 64). Read its last line, too: a trick that ties two rows together has a corner case, and the note names it.

# %% [markdown]
# ## 13. Rung 9: what the library adds
#
# Rung 9 is [`fa3_lib`](../../fa3_lib) itself: rung 8's roles, with two ideas more and one table of tiles per head dim. Each idea answers something above.
#
# ### No maximum on the way
#
# Look at a block that needs no mask, under PV of the block before. Its softmax first takes the maximum: of 128 keys a thread has 32 scores in each of two rows and compares them all, then asks three
# neighbours for theirs, and only then may the row's first exponential start. What is the maximum for? Softmax divides by the sum of the same weights:
#
# $$\text{out} = \frac{\sum_j 2^{s_j - m}\, v_j}{\sum_j 2^{s_j - m}}$$
#
# *Any* m cancels. The maximum is only the m for which no weight can overflow. And bf16 has fp32's eight bits of exponent: a weight of 2^30 is as exact as one of
# 2^-3. So the library keeps the maximum of the blocks *before*: it takes one for the first block of a tile and for masked ones, and none on the way.
#
# That goes well as long as later scores do not rise far above those before. How often do they? The cell below does what the kernel does, one head at a time, for random
# numbers and for the activations of a small language model (the demo's: MiniLM, two layers of twelve heads). Its text has 288 tokens, so blocks have 32 keys here; the library's have four times as many, and a
# maximum of more keys is a better one. How many of 100 (row, block) pairs find a larger
# maximum? And of how many must the maximum be raised, since a thread's weights sum to 2^40 or more?

# %%
guess_larger = None  # percent of (row, block) pairs, MiniLM: some score is above the maximum so far
guess_raised = None  # percent of them that must be raised


# %%
def one_pass(scores, values, block, limit):
    """Key blocks from the last one down, as the library takes them; scores (rows, keys) with scale and log2(e) included.

    Returns out (rows, dv), per later block and row whether its maximum was raised, and log2 of the largest sum of a thread.
    `limit=0` raises always: the online softmax of the rungs before.
    """
    last, *others = range(0, scores.shape[1], block)[::-1]
    top = scores[:, last:].max(1, keepdims=True)
    total, out, raised, sums = 0, 0, [], []
    for start in (last, *others):
        s = scores[:, start : start + block]
        with np.errstate(over="ignore"):
            p = np.exp2(s - top)
            of_threads = p.reshape(len(p), -1, 4, 2).sum((1, 3))  # four threads share a row, two columns of eight each
        too_large = ~(of_threads < limit).all(1, keepdims=True)  # so that NaN counts
        if start != last and too_large.any():  # the vote
            old, top = top, np.where(too_large, np.maximum(top, s.max(1, keepdims=True)), top)
            total, out = total * np.exp2(old - top), out * np.exp2(old - top)
            p = np.exp2(s - top)  # of S, computed once more
        if start != last:
            raised.append(too_large[:, 0])
            sums.append(np.log2(of_threads.max(1)))
        total = total + p.sum(1, keepdims=True)
        out = out + torch.from_numpy(p).bfloat16().float().numpy() @ values[start : start + block]
    return out / total, np.array(raised), np.array(sums)


def growth(scores, block):
    """Share of (row, later block) pairs with a score above all before."""
    tops = scores.reshape(len(scores), -1, block).max(2)[:, ::-1]
    return (tops[:, 1:] > np.maximum.accumulate(tops, 1)[:, :-1]).mean()


with np.load(checkout() / "fa3_course" / "data" / "minilm_qkv.npz") as arrays:
    q, k, v = (arrays[name].astype(np.float32).reshape(24, 288, 32) for name in "qkv")
HEADS = {"random": [rng.standard_normal((12, 256, n), np.float32) for n in (32, 32, 32)]}
HEADS |= {"MiniLM, layer 0": [x[:12] for x in (q, k, v)], "MiniLM, layer 5": [x[12:] for x in (q, k, v)]}
found = {}
for name, heads in HEADS.items():
    for q1, k1, v1 in zip(*heads, strict=True):
        scores = (q1 @ k1.T) * np.float32(32**-0.5 * np.log2(np.e))
        weights = np.exp2(scores.astype(float) - scores.max(1, keepdims=True))
        truth = weights @ v1 / weights.sum(1, keepdims=True)
        runs = {limit: one_pass(scores, v1, 32, limit) for limit in (0.0, 2.0**14, 2.0**40)}
        errors = {limit: np.abs(out - truth).max() for limit, (out, _, _) in runs.items()}
        found.setdefault(name, []).append((growth(scores, 32), runs, errors))
print("percent of (row, block) pairs, blocks of 32 keys:      larger    raised at 2^40 (bf16)   at 2^14 (fp16)")
share = {}
for name, heads in found.items():
    share[name] = [100 * np.mean([g for g, _, _ in heads])]
    share[name] += [100 * np.mean([runs[limit][1] for _, runs, _ in heads]) for limit in (2.0**40, 2.0**14)]
    print("{:<52} {:8.2f} {:16.3f} {:18.3f}".format(name, *share[name]))
minilm = np.mean([share[name] for name in share if "MiniLM" in name], 0)
reveal("a larger maximum, MiniLM", guess_larger, minilm[0], "%")
reveal("raised, MiniLM in bf16", guess_raised, minilm[1], "%")
fig, (left, right) = plots.figure(2, height=3, widths=(1.6, 1))
for (name, heads), colour in zip(found.items(), (plots.GREY, plots.RED, plots.BLUE), strict=True):
    sums = np.sort(np.concatenate([runs[2.0**40][2].ravel() for _, runs, _ in heads]))
    left.plot(sums, 100 * (1 - np.arange(len(sums)) / len(sums)), color=colour, label=name)
for limit, word in ((14, "fp16"), (40, "bf16")):
    left.axvline(limit, color="black", linewidth=1, linestyle="--")
    left.text(limit, 130, word, ha="center", fontsize=9)
left.set(
    yscale="log",
    ylim=(1e-3, 100),
    xlim=(-20, 60),
    xlabel="log2 of a thread's largest sum",
    ylabel="percent of pairs above",
)
left.legend(fontsize=9, loc="upper right")
series = [
    (word, [max(errors[limit] for *_, errors in heads) for heads in found.values()], colour)
    for limit, word, colour in ((0.0, "maximum taken", plots.LIGHT), (2.0**40, "maximum kept", plots.BLUE))
]
plots.grouped_bars(right, [name.replace(", ", "\n") for name in found], series)
right.set(xlabel="largest error against fp64")
plt.show()

# %% [markdown]
# Many pairs have a larger maximum; next to none has one that matters. (In layer 0 some heads have scores that reach far: there the guard has work, in fp16 more than in bf16.) The price of keeping the maximum is small and worth knowing: with the true maximum the largest weight is 1, which bf16 holds
# exactly; with another m every weight is rounded, the largest one too. Where one key takes nearly the whole row, that is the error that you see on the right. It is one
# rounding to bf16, which PyTorch's softmax in bf16 has as well, since it rounds the weights after their division.
#
# **What guards it.** Three things, each for a reason:
#
# * *A vote.* The sums of the weights are needed anyway. One comparison of a thread's two sums with 2^40 (fp16: 2^14, since its largest number is 65504), then a vote of the
#   consumer's 128 threads (`barrier.red.or`): computing S once more is the whole warpgroup's work, and all must agree to do it.
# * *S once more.* Its registers hold P by now. So K's slot in the ring is kept until after the vote, and the product is repeated; such a block costs nearly twice, which is
#   of no account where it is rare.
# * *A decision per row.* Only rows that grew too large get their new maximum. The others would be right with either, but their bits would then depend on who shares the tile.
#   As it is, a row's output depends on that row alone.

# %%
if HAS_CUTE:
    from fa3_lib.consumer import Consumer

    display(lesson_views.source(Consumer.finish_unmasked))

# %% [markdown]
# Does the compiler keep the promise? Below is the whole program, an instruction a tick. Comparisons of scores are `FMNMX`, the vote is `BAR.RED`. Find the vote, go back to the
# products before it, and look at what lies between.

# %%
if HAS_CUTE:
    from fa3_lib import forward_sm90

    def listing_of(config):
        """The machine code of the library's kernel."""
        (report,) = sass.compile_report(lambda o: forward_sm90.compile_forward(config, torch.bfloat16, o))
        return report.listing

    text = listing_of(forward_config(128, 128, False))
    opcodes = sass.program(text)
    GROUPS = {name: (name,) for name in ("HGMMA", "FMNMX", "MUFU.EX2", "BAR.RED")}
    fig, (ax,) = plots.figure(height=1.9)
    plots.instruction_strip(ax, text, GROUPS)
    ax.set_title("fa3_lib, d 128, full: the program")
    plt.show()
    (vote,) = [i for i, name in enumerate(opcodes) if name.startswith("BAR.RED")]
    products = max(i for i in range(vote) if opcodes[i].startswith("HGMMA"))
    for place, part in (("from the products to the vote", opcodes[products:vote]), ("in the whole program", opcodes)):
        counts = [f"{sum(o.startswith(name) for o in part)} {name}" for name in ("MUFU.EX2", "FMNMX", "SHFL")]
        print(f"{place}: {', '.join(counts)}")

# %% [markdown]
# The other comparisons belong to the first block, to masked ones, and to the repair. What the simulated SM says of the idea (its rung 9 against its rung 8, the same tiles), and what
# the card said. Where the simulator promises less, mind what it does not know: to it a maximum is so many comparisons on a unit that is never full; on the card they were a chain
# of dependent instructions in front of every exponential, and what they pushed back stood behind a wait:

# %%
for d in (64, 128):
    config = simulated.configuration("8", d, False)
    old, new = (predicted(n, config, d) for n in ("8", "9"))
    print(f"simulated, d {d}, full: {new / old:.2f} times rung 8")
display(*notes_about("maximum in unmasked"))

# %% [markdown]
# ### Tiles from a counter
#
# Section 9 ended with pairs, a plan made in advance. A grid of one CTA per tile has something that they lack: the hardware hands tiles to whoever is free. A persistent kernel can have that, too: a warp of each CTA adds 1 to a **counter** in global memory and posts the number in
# a mailbox in shared memory, for which every other warp waits. The long tiles come first; heads whose K and V fit in L2 together form a section.

# %%
if HAS_CUTE:
    from fa3_lib import walk

    display(lesson_views.source(walk.Mailbox.post))

for seqlen in (1024, 4096, 16_384):
    config = forward_config(128, 128, True, seqlen)
    work = plans.causal_work(config, seqlen)
    section = config.heads_of_section(seqlen, work.heads, work.heads, 1)
    judged = {
        "pairs": plans.mirror_pairs(work, sms),
        "a counter, head by head": plans.whoever_is_free(work, sms),
        f"a counter, in sections of {section}": plans.by_counter(work, sms, section),
    }
    shares = ", ".join(f"{name} {100 * plans.balance(plan):.1f} %" for name, plan in judged.items())
    print(f"SMs at work (model), causal, d 128, {seqlen // 1024}k: {shares}")
for d in (64, 128, 256):
    lengths = [2**i for i in range(7, 16) if forward_config(d, d, True, 2**i).dynamic]
    print(f"the library, d {d}, causal: {f'a counter from {min(lengths)} queries on' if lengths else 'pairs'}")
display(*notes_about("dynamic tiles", "sections of heads"))

# %% [markdown]
# The model counts key blocks and nothing else; the notes have what the card said. At head dim 256 the two disagreed: to the model, a section that fits in L2 is as good as all heads together, and the
# card lost by it. One of them knew something that the other did not.
#
# ### Taken too early
#
# When does a CTA take its next tile? The number must be there when the tile before ends, and a trip to the counter takes a microsecond. The kernel of those notes took it as soon as the mailbox was free:
# when the tile before *began*. So every CTA held one tile in waiting, for as long as its current one took, while others ran out of work. Add that one fact to the model. Predict: how much of the
# time of a causal run at 16k and head dim 256 does it cost, with sections of two heads?

# %%
guess = None  # percent

# %%
for seqlen in (4096, 8192, 16_384):
    config = forward_config(256, 256, True, seqlen)
    work = plans.causal_work(config, seqlen)
    section = config.heads_of_section(seqlen, work.heads, work.heads, 1)
    at_work = {
        (size, ahead): plans.balance(plans.by_counter(work, sms, size, ahead))
        for size in (section, work.heads)
        for ahead in (True, False)
    }
    for ahead, words in ((True, "when the one before begins"), (False, "when it ends           ")):
        few, all_heads = at_work[section, ahead], at_work[work.heads, ahead]
        print(
            f"d 256, {seqlen // 1024:2}k, taken {words}: SMs at work {100 * few:.1f} % in sections of {section}, "
            f"{100 * all_heads:.1f} % with all heads in one: {all_heads / few:.2f} times"
        )
loss = 100 * (1 - at_work[section, True] / at_work[section, False])
reveal("lost at 16k by a tile in waiting", guess, loss, "% of the time")
display(*notes_about("tiles are taken late"))

# %% [markdown]
# Compare the last number of each first line with the note on sections (all heads in one over the counter's first row): the model now says what the card had said. A model that disagrees with a measurement is
# worth more than one that agrees, as long as you go and ask what it does not know.
#
# So the library's warp that loads K and V *asks* for the next tile when it comes to its last block. The consumers are then two blocks behind it, long enough for the counter's answer. In the simulator's
# rung 9 a tile that nobody asks for is a deadlock, and one that every block asks for is an arrival too many.
#
# ### What a division costs
#
# WGMMA finds its operands through descriptors, which must lie in **uniform registers**: one value for the whole warp. A ring's stage *is* the same for the whole warp, and where ptxas can see that, it computes descriptors with uniform
# instructions. It sees it of block indices and of their sums. It does not see it of a quotient, since there is no uniform division; and behind a causal tile's number stands one (which row of which head?). From the number of key blocks of that tile
# it spreads to all stages that follow. Then every thread computes every descriptor, and `R2UR` moves it over.
#
# The remedy is one instruction a tile: `REDUX`, a reduction over the warp, whose result is in a uniform register by construction. Predict: of the instructions from the first product of a block to its vote, at head dim 256
# with a causal mask, how many are such moves without it?

# %%
guess = None  # percent

# %%
if HAS_CUTE:
    from fa3_lib import consumer

    display(lesson_views.source(consumer.uniform))

    def moved(config):
        """(R2UR, all instructions) of the block without a maximum, from its first product to its vote."""
        opcodes = sass.program(listing_of(config))
        (vote,) = [i for i, name in enumerate(opcodes) if name.startswith("BAR.RED")]
        products = [i for i in range(vote) if opcodes[i].startswith("HGMMA")]
        block = opcodes[products[-(config.head_dim + config.tile_n) // 16] : vote]
        return sum(name.startswith("R2UR") for name in block), len(block)

    told, uniform = {}, consumer.uniform
    for causal in (False, True):
        config = forward_config(256, 256, causal)
        told[causal] = moved(config)
        try:
            consumer.uniform = lambda x: x
            moves, block = moved(config)
        finally:
            consumer.uniform = uniform
        words = "{} moves in {} instructions".format
        print(f"d 256, {'causal' if causal else 'full'}: {words(*told[causal])}; without REDUX {words(moves, block)}")
    reveal("moves without REDUX, d 256, causal", guess, 100 * moves / block, "% of the instructions")
    display(*notes_about("uniform registers"))

# %% [markdown]
# A compiler does not say which values it knows to be uniform. Count `R2UR` in a main loop, and ask why when there are many. How much of the time those moves cost is a question for the card: issue slots that
# wait for nothing else are free.
#
# ### Tried, and lost
#
# Lazy rescale (section 12) lost, and keeping the maximum won, although both have a vote and a branch. The one saved multiplications that nobody waited for, and its branch cut the code where ptxas
# wanted to mix. The other saves what stands *between* a product and its exponentials; its vote needs all weights, so nothing has to be mixed across it. More ideas that looked
# as good on paper, with what came of them:

# %%
display(*notes_about("clusters", "two p fragments", "rescaling o"))

# %% [markdown]
# ### Against the peers, shape by shape
#
# Every shape of the stored run: the library's speed over that of each peer (thin lines), and over the fastest peer of that shape (thick). Above 1 the library is faster.

# %%
guess = None  # fa3_lib over the best peer of each shape, geometric mean, 1k to 32k

# %%
table = comparison.shapes(RUN) if RUN else []
if table:
    dims = sorted({shape.head_dim for shape in table})
    fig, axes = plt.subplots(2, len(dims), figsize=(plots.WIDTH, 4.4), sharex=True, sharey=True, squeeze=False)
    for causal, line in zip((False, True), axes, strict=True):
        for d, ax in zip(dims, line, strict=True):
            here = [shape for shape in table if (shape.head_dim, shape.causal) == (d, causal)]
            for peer in comparison.PEERS:
                label, colour, marker = plots.KERNELS[peer]
                points = [(shape.seqlen, shape.ratio(peer)) for shape in here if peer in shape.tflops]
                if points:
                    ax.plot(
                        *zip(*points, strict=True),
                        color=colour,
                        marker=marker,
                        markersize=4,
                        linewidth=1.5,
                        label=label,
                    )
            ax.plot(
                [s.seqlen for s in here], [s.ratio() for s in here], color="black", linewidth=2.5, label="fastest peer"
            )
            ax.axhline(1, color="black", linewidth=0.8)
            plots.powers_of_two(ax, sorted({s.seqlen for s in table}))
            ax.tick_params(axis="x", labelrotation=60)
            ax.set_title(f"d {d}, {'causal' if causal else 'full'}", fontsize=10.5)
    axes[0][0].set_ylabel("fa3_lib over the peer")
    axes[1][0].set_ylabel("fa3_lib over the peer")
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=9.5)
    plt.show()
    long = [shape for shape in table if shape.seqlen >= comparison.LONG]
    overall = comparison.geometric_mean(shape.ratio() for shape in long)
    reveal("fa3_lib over the fastest peer of each shape, 1k to 32k", guess, overall, "times")
    for d in dims:
        for causal in (False, True):
            if chosen := [s.ratio() for s in long if (s.head_dim, s.causal) == (d, causal)]:
                ahead = f"ahead on {sum(x > 1 for x in chosen)} of {len(chosen)} shapes"
                mask = "causal" if causal else "full"
                print(f"d {d} {mask}: {comparison.geometric_mean(chosen):.2f} of the fastest peer, {ahead}")
    print(comparison.summary(RUN))
else:
    print("no stored row of fa3_lib and a peer yet: `fa3 bench` on a Hopper stores some")

# %% [markdown]
# The lines under the picture say where work is left: take the head dim and mask with the smallest number, and ask this chapter's first question there. At d 256 shared memory holds 80 keys per
# block and no output of its own.
#
# ## 14. Where we stand
#
# > **You may read:** *FlashAttention-3 reaches up to 740 TFLOP/s.*
# >
# > **What is so:** that is the paper's headline (fp16). The best bar in the paper's own figures is 756: head dim 256, 16k, full (read from the chart). And a
# > number without its card, clock, head dim and mask
# > says little: today's FA3, on the card of our stored run, has another.

# %%
if RUN:
    if best := max(RUN.select(kernel="fa3", direction="fwd", dtype="bf16"), key=lambda r: r.tflops, default=None):
        print(f"FA3 {RUN.peers.get('fa3', '')} on {RUN.gpu}, bf16, its best: {best.tflops:.0f} TFLOP/s ({best.shape})")
    fig, (ax,) = plots.figure(height=3.8)
    names = [FILES[n].rpartition("/")[2].removesuffix(".py") for n in ("5", "6", "7", "8")]
    plots.throughput(ax, RUN, [*names, "fa3_lib", "fa3", "fa4", "cudnn"], head_dim=128, causal=False, dtype="bf16")
    ax.set_title("d 128, full")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside right center")
    plt.show()

# %% [markdown]
# ### The measured timeline
#
# Every picture with a time axis so far was simulated. The same can be seen on the card: `python -m bench.timelines` puts stamps between the lines of a rung (one
# thread per warpgroup stores the SM's clock: `K there`, `QK issued`, `S there`, `softmax done`, `turn`, ...), and compiles that text apart, so that the rung itself is
# not touched. What you see is one CTA of a full card. How to read it:
#
# * A coloured bar in the row of a warpgroup is its softmax (a sliver: issuing a product). A thin grey line is waiting: for its turn, for its product, for K or V.
# * The tensor cores' row is put together from the warpgroups' stamps: a product begins when it is issued and the one before is done, and ends when its owner sees it
#   done.
# * **Look for the turns in rung 6**: beside a blue softmax two orange products (PV, QK) lie in the row of the tensor cores, beside an orange softmax two blue ones, again and
#   again. In rung 5, on the same scale of time, nobody arranges that, and the same number of blocks takes longer.
# * In rungs 7 and 8 QK comes first, and a softmax has products of *both* colours beside it, the other's and its own PV. (Where a picture has the change from one tile to the next: a tile's
#   first softmax has no stamp of its own, it lies in the long "waits for K" after the first QK.)
#
# Read the shares as upper bounds: a product that is over counts as running until its owner looks. And a stamp costs a few instructions, and the compiler moves nothing past it. Where all stamps
# together cost more than 10 %, what one would see is a distorted kernel: rung 7 has its softmax and its products so close together that stamps between them tear them apart. Then
# only the numbers are printed below, no picture.

# %%
STAMPED = {path.stem: timeline.read(path) for path in sorted((checkout() / "bench" / "timelines").glob("*.json"))}
WITHOUT = {"rung06_pingpong_d128": "rung05_warp_specialised_d128"}  # shown above it: the same kernel without turns


def lane_words(t, number):
    """What the picture says, in numbers."""
    low, high = t.span
    mine, all_of_it = (100 * t.under("consumer0", "softmax", others) for others in (True, False))
    return (
        f"rung {number}: tensor cores at work {100 * t.busy('tensor core') / (high - low):.0f} % of the time; of warpgroup 0's softmax "
        f"{mine:.0f} % lies under the others' products, {all_of_it:.0f} % under anybody's"
    )


DISTORTED = 0.1  # of the time without stamps


def cost(t):
    """What the stamps cost, relative to the time without them."""
    return t.meta["ms_stamped"] / t.meta["ms_plain"] - 1


for name in ("rung06_pingpong_d128", "rung08_persistent_d128", "rung07_overlap_d128", "rung07_overlap_d64"):
    if name not in STAMPED:
        continue
    meta = STAMPED[name].meta
    now = simulated.configuration(meta["rung"], meta["head_dim"], False)
    if (meta["tile_m"], meta["tile_n"]) != (now.tile_m, now.tile_n):
        taken = f"{meta['tile_m']} x {meta['tile_n']}"
        print(
            f"rung {meta['rung']}, d {meta['head_dim']}: stamped with tiles of {taken}, which are no longer its own, no picture"
        )
        continue
    if cost(STAMPED[name]) > DISTORTED:
        print(f"rung {meta['rung']}, d {meta['head_dim']}: stamps cost {cost(STAMPED[name]):.1%}, no picture")
        continue
    chosen = {key: STAMPED[key] for key in (WITHOUT.get(name), name) if key in STAMPED}
    pictures = {f"Measured: rung {t.meta['rung']}, d {t.meta['head_dim']}, {t.meta['gpu']}": t for t in chosen.values()}
    if name in WITHOUT:
        pictures[f"Simulated: rung {meta['rung']}"] = lines_of(simulate(meta["rung"], 12, now))
    timeline.beside(pictures)
    plt.show()
    for t in chosen.values():
        clock = f" at {t.meta['sm_mhz']:.0f} MHz" if t.meta.get("sm_mhz") else ""
        print(f"{lane_words(t, t.meta['rung'])}; stamps cost {cost(t):.1%}{clock}")
if not STAMPED:
    print(
        "no stamped timeline of a card is stored yet (`python -m bench.timelines` on a Hopper stores some); simulated ones:"
    )
    reports = {n: lines_of(simulate(n, 12)) for n in ("5", "6", "7")}
    timeline.beside({f"Simulated: rung {n}, d 128": t for n, t in reports.items()})
    plt.show()
    print("\n".join(lane_words(t, n) for n, t in reports.items()))

# %% [markdown]
# > **NVIDIA's own tool.** CuTe DSL comes with *iket*, which does the same with a viewer: write `iket.range_push("softmax")` ... `iket.range_pop()` into a kernel
# > (`from cutlass.cute.experimental import iket`), compile it with `options="iket"`, and run it as
# >
# > `run-iket --clobber -o out profile --postprocess all -- python my_program.py`
# >
# > It writes a file for [ui.perfetto.dev](https://ui.perfetto.dev) and a page that shows it. Without the option the calls leave no instruction behind. It reads
# > `globaltimer`, a clock in nanoseconds that is the same on all SMs but advances in steps of about 32 ns, some 55 cycles; our stamps read the SM's own cycle counter, which
# > is exact but comparable within one SM only. Trace one launch: a loop of launches fills hundreds of megabytes.

# %% [markdown]
# ## 15. Three questions for you
#
# <details><summary><b>1.</b> Why is a turn "PV, then QK" in rung 6, and "QK, then PV" in rung 7?</summary>
#
# In rung 6 softmax(j) stands between QK(j) and PV(j), so the products that can be issued together are PV(j - 1) and QK(j), and both must be over before the
# turn's owner goes on. In rung 7 softmax(j) shall start as soon as possible: QK(j) goes first, and
# PV(j - 1) runs while softmax works. The group that is waited for must be the older one.
# </details>
#
# <details><summary><b>2.</b> You remove the turns from rung 7. Is the result wrong?</summary>
#
# No. Turns order the *issue*; correct numbers need only the rings' mbarriers and wait_group. FA3 itself takes no turns at head dim 256, where softmax is short
# against the products.
# </details>
#
# <details><summary><b>3.</b> A colleague halves the number of rescales and asks why nothing gets faster. What do you look at first?</summary>
#
# Whether anybody waited for them: the timeline (which wait ends with the rescale?), then the profile (is FMA or issue near full?), then the machine code (did a
# branch cut the schedule in two?).
# </details>
#
# ## Where to go
#
# * The lab of this chapter: turns, overlap and plans of your own, and the bugs that go with them.
# * `fa3 sim 7 --d 64`, `fa3 sim 8`, `fa3 sim 9`: other shapes and the library's kernel without a GPU. `bench/NOTES.md`: the next prediction is yours.
# * Chapter 4: 8-bit products take half the time, and exponentials do not. Everything in this chapter gets tighter.
#
# **Sources.** Shah et al. 2024 (FlashAttention-3, arXiv:2407.08608) and its C++ source; the FlashAttention-4 source (CuTe DSL); NVIDIA, CUDA C++ programming
# guide (throughput of instructions) and PTX ISA
# (named barriers, wgmma.wait_group).
