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
# *60 to 90 minutes. Runs on any laptop; a Hopper is used if there is one.*
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
#
# The question to ask of every picture: *who has the tensor cores now, and what do the others do meanwhile?*
#
# Speeds come from stored runs, or from the simulated SM, and each plot says which. The simulated SM knows who waits for whom; of power, L2 and the
# compiler it knows nothing. Where it and a card disagree, the card is right, and the reason is worth finding.

# %%
import importlib.util
import inspect
from dataclasses import replace
from pathlib import Path
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Markdown, display

from fa3_course import budget, layouts, lesson_views, notes, plots, results, rungs, sim_view, simulated, timeline
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
    "4": rungs.find("4").file,
    "5": rungs.find("5").file,
    "6": f"{STEPS}/rung06_pingpong.py",
    "7": f"{STEPS}/rung07_overlap.py",
    "7b": f"{STEPS}/rung07b_overlap_no_warp_specialisation.py",
    "8": f"{STEPS}/rung08_persistent.py",
}
# one stored run: the newest that measured this chapter's rungs, else the newest that measured rung 5
RUN = results.latest(kernel="rung07_overlap") or results.latest(kernel="rung05_warp_specialised")
PEERS = ("cudnn", "fa3", "fa4")
print(f"seed {SEED}; CuTe DSL {'is here' if HAS_CUTE else 'has no wheels for this system: its cells say so and go on'}")
print(f"stored run: {RUN.gpu}, {RUN.date[:10]}" if RUN else "no stored run: `fa3 bench` on a Hopper stores one")


def reveal(what, guess, value, unit=""):
    """Shows a value beside the reader's guess."""
    told = "no guess yet" if guess is None else f"you said {guess:g}"
    print(f"{what}: {value:,.4g} {unit} ({told})")


def stored(number, **shape):
    """The stored row of a rung ("5"), of the library ("fa3_lib") or of a peer ("fa3"); None if there is none."""
    name = Path(FILES[number]).stem if number in FILES else number
    return RUN.one(kernel=name, direction="fwd", dtype="bf16", **shape) if RUN else None


def simulate(number, blocks=16, config=None, heads=1, d=128, **options):
    """Query tiles of a rung (one per head) against `blocks` key blocks on the simulated SM; the result is compared with fp64."""
    config = config or simulated.configuration(number, d, False)
    q = rng.standard_normal((1, config.tile_m, heads, config.head_dim))
    k, v = (rng.standard_normal((1, blocks * config.tile_n, heads, config.head_dim)) for _ in range(2))
    run = simulated.simulate(number, q, k, v, config=config, **options)
    want, want_lse = reference.attention(*(torch.from_numpy(x).bfloat16().double() for x in (q, k, v)))
    assert np.abs(run.out - want.numpy()).max() < 1e-2 and np.abs(run.lse - want_lse.numpy()).max() < 1e-3
    return run.report


def predicted(number, config=None, d=128, **options):
    """TFLOP/s of a whole card whose SMs all work like the simulated one, start and end of a CTA left out."""
    short, long = (simulate(number, blocks, config, d=d, **options) for blocks in (6, 22))
    return HOPPER.tflops(long.flops - short.flops, long.cycles - short.cycles)


def show(number, report, title=""):
    """The timeline of a rung: the whole run, and three rounds of its middle."""
    lines = timeline.from_dict(report.timeline.as_dict())
    timeline.draw(lines, title or f"Rung {number}: one CTA, {simulated.rung(number).title}")
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


dims = [d for d in (64, 128, 256) if stored("5", head_dim=d, **SHAPE)]
if dims:
    rows = [stored("5", head_dim=d, **SHAPE) for d in dims]
    shares = [100 * row.tflops / peak(row) for row in rows]
    fig, (ax,) = plots.figure(height=2.2)
    bars = ax.barh([f"d {d}" for d in dims], shares, color=plots.BLUE, height=0.6)
    ax.bar_label(
        bars, [f"{row.tflops:.0f} of {peak(row):.0f} TFLOP/s" for row in rows], padding=-150, color="white", fontsize=10
    )
    ax.set(xlim=(0, 100), xlabel="percent of the tensor cores' peak at the row's clock", title=f"Rung 5, {RUN.gpu}, full, 16k")  # fmt: skip
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    plt.show()
    if 64 in dims:
        reveal("rung 5 at head dim 64", guess, shares[0], "% of the peak")
else:
    print("no stored row of rung 5 yet: `fa3 bench` on a Hopper stores one")

# %% [markdown]
# The smaller the head dim, the worse. Why the head dim? The products shrink with it and the softmax does not.
#
# ## 2. What a softmax costs
#
# Per score, attention does `4 d` floating-point operations in the two products and **one exponential**. An SM does 4096 of the former per clock, and 16 of the
# latter: exponentials run in the multi-function unit (MUFU), four lanes wide in each quarter of the SM. Before you look: for which
# head dim do exponentials take exactly as long as the products?

# %%
guess = None  # head dim

# %%
even = 4096 / 16 / 4  # 4 d / 4096 = 1 / 16
reveal("products and exponentials take equally long at head dim", guess, even)
tiles = {f"d {d}": forward_config(d, d, False) for d in (64, 128, 192, 256)}
units = ("tensor core", "mufu", "issue", "fma", "alu", "shared memory")
table = {name: budget.cycles(config) for name, config in tiles.items()}
fig, (left, right) = plots.figure(2, height=3.9, widths=(1.5, 1))
series = zip(units, (plots.GREEN, plots.RED, plots.BLUE, plots.SKY, plots.PURPLE, plots.GREY), strict=True)
plots.grouped_bars(left, list(table), [(u, [c[u] / c["tensor core"] for c in table.values()], k) for u, k in series])
left.set(xlabel="time of each unit, products = 1", title="Work per key block, full rates")
left.legend(fontsize=8.5, ncols=2, loc="upper center", bbox_to_anchor=(0.45, -0.16))
caps = [100 * c["tensor core"] / (c["tensor core"] + c["mufu"]) for c in table.values()]
bars = right.bar(list(table), caps, color=plots.ORANGE, width=0.6)
right.bar_label(bars, [f"{cap:.0f} %" for cap in caps])
right.set(ylim=(0, 100), ylabel="percent of peak", title="If nothing overlapped")
right.grid(axis="x", visible=False)
plt.show()

# %% [markdown]
# At head dim 128, exponentials cost half as much as the products; at 64, as much. If they took turns strictly, a kernel could reach the bars on the right and no
# more. And all other units *could* work at the same time: nothing but the schedule stands in the way. At d 64 even a perfect schedule leaves no reserve: two units
# would have to be full at once.
#
# These are rates from the CUDA guide. On a card you measure them: a kernel that does nothing but exponentials, against a
# product of big matrices.

# %%
guess = None  # time of an exponential over time of 4 * 128 floating-point operations


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
    print(f"measured: {exps / 1e12:.2f} T exponentials/s, {flops / 1e12:.0f} TFLOP/s in a product (cuBLAS)")
    return flops / exps / (4 * d)


if rungs.has_hopper():
    reveal("exponential over products at d 128, measured", guess, measured_ratio())
else:
    print("this microbenchmark needs a Hopper; none here")
reveal("exponential over products at d 128, from the rates", guess, even / 128)

# %% [markdown]
# ## 3. Ping-pong
#
# Two consumers; each has products (QK, PV) and softmax between them. Both ask for the tensor cores when it suits them. We want:
#
# * while one has the tensor cores, the other does its softmax;
# * then they change roles, every time.
#
# The hardware has the right tool: **named barriers**. A CTA has 16 of them, each with a number of threads. `bar.sync` arrives and waits, `bar.arrive` arrives and goes
# on; the barrier opens when the number is reached, and is then as new. One barrier per consumer, "it is your turn": its owner waits there with 128 threads, and the consumer
# before it arrives there with its 128. The number is 256.

# %%
edges = [
    ("consumer 1 passes the turn", "TURN_WG0", "consumer 0 issues PV, QK"),
    ("consumer 0 passes the turn", "TURN_WG1", "consumer 1 issues PV, QK"),
]
fig, (ax,) = plots.figure(height=2.1)
layouts.draw_protocol(ax, edges, width=0.29)
ax.set_title("Rung 6: two named barriers")
plt.show()
print(inspect.getsource(rung06.consumer))

# %% [markdown]
# A turn is PV of one block and QK of the next, issued in one go, so that a whole softmax lies between two turns. How busy will the tensor
# cores be? (In rung 5, simulated, see below.)

# %%
guess = None  # percent of the time that the tensor cores work in rung 6

# %%
reports = {n: simulate(n, 24) for n in ("5", "6")}
print(f"rung 5: tensor cores work {reports['5'].share('tensor core'):.0%} of the time")
reveal("rung 6", guess, 100 * reports["6"].share("tensor core"), "%")
show("6", reports["6"])

# %% [markdown]
# There it is. Point at a softmax of the blue consumer: above or below it, in the row of the tensor cores, lie the orange one's products; and the other way round in the next turn.
#
# ### Write the turns yourself
#
# Below is the protocol in your hands. `verdict` runs rung 6 with a changed consumer. Three questions decide whether it works: who starts, who passes to
# whom, and how often. Write down which of these changes hang, and which are only slower; then add your own.

# %%
guess = None  # how many of the six changes below still give a clean run?


# %%
def verdict(number="6", blocks=6, **options):
    """What the simulated SM says: cycles of a clean run, or the fault."""
    try:
        return f"clean, {simulate(number, blocks, **options).cycles:,.0f} cycles"
    except Fault as fault:
        return str(fault)


def with_consumer(consumer):
    """Builds rung 6's CTA with another consumer."""

    def build(sm, p, tile):
        t = replace(parts.make_tiles(sm, p), turns=parts.make_turns(sm, p.config))
        sm.role("producer", rung05.producer, p, t, tile, threads=parts.WARP)
        for me, name in enumerate(parts.consumer_names(p.config)):
            sm.role(name, consumer, me, p, t, tile)

    return build


CHANGES = {
    "nobody opens the first turn": ("mine.arrive()  # opens the first turn", "pass"),
    "everybody opens a turn": ("if me == 0:", "if True:"),
    "I pass the turn to myself": ("next_one.arrive()", "mine.arrive()"),
    "nobody waits for a turn": ("await mine.sync()", "pass"),
    "the last turn is not passed on": ("        next_one.arrive()\n", "        if i < len(blocks):\n            next_one.arrive()\n"),
    "the turn is held until the products are done": ("        next_one.arrive()\n        await wg.wait_group(0)", "        await wg.wait_group(0)\n        next_one.arrive()"),
}  # fmt: skip
verdicts = {what: verdict(build=with_consumer(patched(rung06.consumer, *change))) for what, change in CHANGES.items()}
print("as it stands:", verdict())
for what, text in verdicts.items():
    print(f"\n{what}:\n" + "\n".join(line[:170] for line in text.splitlines()[:4]))
print()
reveal("clean", guess, sum(text.startswith("clean") for text in verdicts.values()), f"of {len(verdicts)}")

# %% [markdown]
# * **Who starts.** Consumer 0 arrives once on its own barrier, before the loop. If nobody does, both wait for ever; if both do, both run at once.
# * **Arrivals and waits pair up.** Every turn is one wait and one arrival. At the end, one arrival is left over, at consumer 0: that is the state in which a next tile
#   finds the barriers (section 6).
# * **The turn is for issuing.** Tensor cores work in the order of issue, so the turn may be passed on while the products still run: the next consumer's products queue up behind
#   them, and no gap appears. The last line above shows what holding on costs, or whether it costs anything, in the simulator.
#
# ## 4. The kernel, rung 6
#
# Two methods, their calls, and where PV waits. Everything else is rung 5.

# %%
if HAS_CUTE:
    display(lesson_views.rung_diff(FILES["5"], FILES["6"]))


# %%
def module(number):
    """A rung's file as a module, whether it is in the ladder's registry already or not."""
    from fa3_course import rung_host

    return rung_host.edited(checkout() / FILES[number])


def machine_code(number, d=128):
    """A rung compiled for sm_90a, here and now; no GPU is needed."""
    from fa3_course import sass

    rung = module(number)
    config = rung.make_config(d, False)
    return sass.compile_report(lambda options: rung.compile_rung(config, torch.bfloat16, options))[0]


def check_and_measure(number):
    """On a Hopper: a few shapes against fp64, then TFLOP/s at d 128, 8k. Elsewhere the stored row alone."""
    if HAS_CUTE and rungs.has_hopper():
        import triton

        attention = module(number).attention
        for b, sq, sk, h, hk, d in ((1, 1, 1, 1, 1, 64), (2, 239, 600, 4, 2, 128), (1, 700, 129, 2, 1, 256)):
            for causal in (False, True):
                shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, d))
                q, k, v = (torch.randn(s, dtype=torch.bfloat16, device="cuda") for s in shapes)
                out, lse = attention(q, k, v, causal=causal)
                want, want_lse = reference.attention(q, k, v, causal=causal)
                eager = rungs.find("0").load()(q, k, v, causal=causal)[0]
                allowed = 2 * (eager.double() - want).abs().max() + 4 * torch.finfo(q.dtype).eps * want.abs().max()
                assert (out.double() - want).abs().max() <= allowed
                assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
        q, k, v = (torch.randn((2, 8192, 16, 128), dtype=torch.bfloat16, device="cuda") for _ in range(3))
        ms = triton.testing.do_bench(lambda: attention(q, k, v), return_mode="median")
        print(f"rung {number}: right on every shape; your card: {4 * 8192 * 16_384 * 2048 / ms / 1e9:.0f} TFLOP/s")
    else:
        print(f"rung {number} needs a Hopper to run; its protocol ran on the simulated SM, its machine code is below")
    row = stored(number, head_dim=128, causal=False, seqlen=8192)
    print(f"stored: {row.tflops:.0f} TFLOP/s on {RUN.gpu} ({row.shape})" if row else "no stored row yet of this rung")


check_and_measure("6")
FOUND = {f"rung {n}": machine_code(n) for n in ("5", "6")} if HAS_CUTE else {}
if FOUND:
    display(lesson_views.sass_table(FOUND, ("HGMMA", "MUFU.EX2", "SYNCS", "BAR", "USETMAXREG")))

# %% [markdown]
# `BAR` rose; `HGMMA` and `MUFU.EX2` did not move: the same work, in another order.
#
# ## 5. Two or three?
#
# Three consumers have 192 query rows, 160 registers per thread, and two softmaxes under each turn. Where would that help? Think of section 2: at head dim 64 softmax takes as long as the
# products. If a warpgroup needs more time for its softmax than one other needs for its products, two do not fill the tensor cores.

# %%
guess = None  # simulated speed with three consumers over two, head dim 64

# %%
sizes = {f"{m // 64} consumers": replace(simulated.configuration("6", 64, False), tile_m=m) for m in (128, 192)}
speed = {f"rung {n}": [predicted(n, config) for config in sizes.values()] for n in ("6", "7")}
fig, (left, right) = plots.figure(2, height=3.4, widths=(1, 1.3))
for (name, values), colour in zip(speed.items(), (plots.ORANGE, plots.BLUE), strict=True):
    left.plot(list(sizes), values, marker="o", color=colour, label=name)
left.set(ylabel="TFLOP/s", ylim=(0, None), xlim=(-0.3, 1.3), title="Simulated, d 64, tile_n 128")
left.legend()
timeline.gantt(timeline.from_dict(simulate("6", 8, sizes["3 consumers"]).timeline.as_dict()).cut(8000, 15_000), right)
right.set_title("Rung 6 with three consumers, a part")
plt.show()
reveal("three over two in rung 6, d 64", guess, speed["rung 6"][1] / speed["rung 6"][0], "times")

# %% [markdown]
# The turns go round: 0, 1, 2, 0. Each barrier still counts 256 threads, its owner and the one before. What decides between two and three is the
# register file: a row of O costs `d / 2` registers per thread, and 160 are all there is for three. Try it in the calculator of section 10: with three consumers and head dim
# 128 nothing useful fits.
#
# Three have a second advantage: 192 rows share each K and V tile, so less must come from L2.
#
# ## 6. Overlap inside a warpgroup
#
# Ping-pong hides one warpgroup's softmax under *another's* products. But within a warpgroup QK, softmax, PV still follow one another, and each handover (the wait for a product, the maximum,
# the conversion of P) is time in which the tensor cores depend on the other one alone. The second idea of FA3: **issue QK of the next block before PV of this one, and start the softmax of the next block when QK is done
# and PV still runs.** A loop in three parts:
#
# | part | issued | waits for | then |
# |---|---|---|---|
# | first block | QK(0) | QK(0): `wait_group(0)` | softmax(0), P(0) kept in registers |
# | pair, for every further block j | QK(j), PV(j - 1) | QK(j): `wait_group(1)` | softmax(j) while PV(j - 1) runs; `wait_group(0)`; P(j) in P's registers; O rescaled |
# | last block | PV(last) | PV: `wait_group(0)` | epilogue |
#
# `wait_group(1)` means "at most one group may still be in flight". Groups end in the order of their commits, so QK is done and PV, the younger, goes on.

# %%
print(inspect.getsource(rung07.attend).split('"""', 2)[2].split("rows = parts")[1])

# %% [markdown]
# Four changes of that loop. Which of them give a wrong result, and which are only slower?

# %%
guess = None  # how many of the four are clean?

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
    print(f"\n{what}:\n" + "\n".join(line[:170] for line in text.splitlines()[:2]))
print()
reveal("clean", guess, clean, f"of {len(CHANGES)}")

# %%
guess = None  # percent of the time that the tensor cores work in rung 7

# %%
report = simulate("7", 24)
reveal("tensor cores busy in rung 7", guess, 100 * report.share("tensor core"), "%")
show("7", report)

# %% [markdown]
# > **You may read:** *FA3 overlaps softmax and matrix products completely: 100 % overlap.*
# > **What is so:** it is a figure to measure, and it means nothing until you say of what. Below are three shares of the same simulated runs: of the time in which
# > exponentials are computed, how much lies under a product; of the time of the products, how much has an exponential beside it; and how busy the tensor cores are,
# > which is the one that counts.


# %%
def covered(report):
    """(exponentials under products, products beside exponentials, tensor cores busy), in percent."""
    lines = timeline.from_dict(report.timeline.as_dict())
    edges = np.unique([t for e in lines.events if e.lane in ("tensor core", "mufu") for t in (e.start, e.end)])
    length, middle = np.diff(edges), (edges[1:] + edges[:-1]) / 2
    at_work = {}
    for lane in ("tensor core", "mufu"):
        spans = np.array(sorted((e.start, e.end) for e in lines.events if e.lane == lane))
        last = np.searchsorted(spans[:, 0], middle) - 1
        at_work[lane] = (last >= 0) & (middle < np.maximum.accumulate(spans[:, 1])[last])
    product, exp = at_work["tensor core"], at_work["mufu"]
    both = length[product & exp].sum()
    return (
        100 * both / length[exp].sum(),
        100 * both / length[product].sum(),
        100 * length[product].sum() / report.cycles,
    )


measured = {(n, d): covered(simulate(n, 24, d=d)) for d in (64, 128) for n in ("5", "6", "7")}
fig, axes = plots.figure(2, height=3)
for ax, d in zip(axes, (64, 128), strict=True):
    names = ("exponentials under products", "products beside exponentials", "tensor cores at work")
    series = [
        (name, [measured[n, d][i] for n in ("5", "6", "7")], c)
        for i, (name, c) in enumerate(zip(names, (plots.RED, plots.ORANGE, plots.GREEN), strict=True))
    ]
    plots.grouped_bars(ax, ["rung 5", "rung 6", "rung 7"], series)
    ax.set(xlim=(0, 100), xlabel="percent", title=f"Simulated, d {d}")
    ax.get_legend().remove()
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
plt.show()

# %% [markdown]
# ### The kernel, rung 7

# %%
if HAS_CUTE:
    display(lesson_views.rung_diff(FILES["6"], FILES["7"]))

# %%
check_and_measure("7")
if HAS_CUTE:
    FOUND |= {f"rung {n}": machine_code(n) for n in ("7", "7b")}
    display(lesson_views.sass_table(FOUND, ("HGMMA", "MUFU.EX2", "BAR", "USETMAXREG", "UTMALDG", "STL", "LDL")))

# %% [markdown]
# The price is registers. P of one block now lives beside S of the next, and that is why FA3 needs `setmaxnreg` (chapter 2, section 6). The compiler is a part of the story, too. From our notes:

# %%
overlap_note = notes.find("overlap and ping-pong")
display(Markdown(overlap_note.quote("Prediction", "Outcome", "Trap")))
display(Markdown(notes.find("wait_group(0)").quote()))
fig, (ax,) = plots.figure(height=2.4)
pairs = {
    "rung 5, S + P + O in sequence": budget.budget(ForwardConfig(128, 128, 128, 128), overlap=False),
    "rung 7, 128 keys": budget.budget(ForwardConfig(128, 128, 128, 128)),
    "rung 7, 176 keys": budget.budget(ForwardConfig(128, 128, 128, 176)),
}
left = np.zeros(len(pairs))
for name, colour in zip(("S", "P", "O", "others, at least"), (plots.BLUE, plots.ORANGE, plots.GREEN, plots.LIGHT), strict=True):  # fmt: skip
    part = np.array([b.registers[name] for b in pairs.values()])
    ax.barh(list(pairs), part, left=left, color=colour, label=name, height=0.6)
    left += part
ax.axvline(240, color=plots.RED, label="a consumer's registers")
ax.set(xlabel="registers per thread", title="d 128, two consumers")
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=5)
plt.show()

# %% [markdown]
# The second note is a prediction of ours that failed. The pictures above say that softmax should start before PV is over and that the wait for PV comes after it. ptxas moved that
# wait up; we forced it down, into the place where the picture has it, and the kernel became slower. The picture has units and waits; the compiler also
# mixes instructions of two kinds, and that was worth more.
#
# Turn the knobs (on a live notebook): with ping-pong, without, with overlap, without.

# %%
sim_view.explore(ping_pong=True, overlap=True)

# %% [markdown]
# ## 7. The paper's ablation, and rung 7b
#
# FA3's paper reports three numbers (section 4, fp16, head dim 128, 16k, full, H100): everything on, without overlap inside a warpgroup, and without warp specialisation. The last one is our rung 7b:
# no producer, no turns; each warpgroup starts copies between its own products.

# %%
guess = None  # rung 7b over rung 7 on the simulated SM

# %%
PAPER = {"7": 661, "6": 582, "7b": 570}  # TFLOP/s, FA3 paper (arXiv:2407.08608), table of the ablation
LABELS = {
    "7": "rung 7: all of it",
    "6": "rung 6: no overlap inside\na warpgroup",
    "7b": "rung 7b: no warp\nspecialisation",
    "5": "rung 5: no overlap,\nno turns",
}
simulated_speed = {n: predicted(n) for n in LABELS}
shape = {"head_dim": 128, "causal": False, "seqlen": 16_384}
stored_speed = {n: row.tflops for n in LABELS if (row := stored(n, **shape))}
top = stored_speed.get("7") or (row.tflops if (row := stored("fa3_lib", **shape)) else None)
ratios = [
    ("paper, over its full kernel", [PAPER.get(n, np.nan) / PAPER["7"] for n in LABELS], plots.GREY),
    ("simulated, over rung 7", [simulated_speed[n] / simulated_speed["7"] for n in LABELS], plots.LIGHT),
]
if top:
    over = "rung 7" if "7" in stored_speed else "fa3_lib"
    ratios.append((f"stored, over {over}", [stored_speed.get(n, np.nan) / top for n in LABELS], plots.BLUE))
fig, (ax,) = plots.figure(height=3.6)
plots.grouped_bars(ax, list(LABELS.values()), ratios)
ax.set(xlabel="speed as a ratio within one run", title="The ablation: d 128, full, 16k")
ax.get_legend().remove()
fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
plt.show()
reveal("rung 7b over rung 7, simulated", guess, simulated_speed["7b"] / simulated_speed["7"])
for n in LABELS:
    if n not in stored_speed:
        print(f"rung {n}: no stored row yet")

# %% [markdown]
# Read the ratios, not the bars' lengths across colours: other cards, other clocks, other dtypes. Two remarks.
#
# * The paper's "without" kernels were not tuned for being without. So are ours not; an ablation always says "what happens if I remove this and change nothing else".
# * If the simulator likes 7b more than the paper does, look at what it leaves out: a warpgroup that also loads needs registers for it, waits for the other before it may
#   refill a slot, and cannot hand registers over. In machine code: no `USETMAXREG` in the table above, and more registers at launch.
#
# ## 8. Three questions that readers of FA3 keep asking
#
# **Where is the ping-pong?** Not in a function of that name. It is two calls around the issue of products, a sync on my barrier and an arrival on the next one's, and one arrival before the loop. In our files:

# %%
source = (checkout() / FILES["7"]).read_text(encoding="utf-8").splitlines()
for number, line in enumerate(source, 1):
    if "_turn(" in line or "TURN" in line:
        print(f"{Path(FILES['7']).name}:{number}: {line.strip()[:120]}")

# %% [markdown]
# **What do the two warpgroups compute?** The same thing for different query rows. Consumer 0 owns rows 0 to 63 of the tile, consumer 1 rows 64 to 127; each computes S, softmax, P and O of its rows, against *all* keys. Nobody does "the
# softmax" and nobody "the products". They share K and V in shared memory, and never a number of S, P or O. Proof: what each of them writes in a simulated run.

# %%
lines = timeline.from_dict(simulate("7", 4).timeline.as_dict())
for role in ("consumer0", "consumer1"):
    names = {(e.lane, e.name) for e in lines.events if e.role == role or e.lane == role if e.kind == "work"}
    kinds = sorted({name for lane, name in names if lane in (role, "tensor core")})
    print(f"{role}: {', '.join(kinds)}")

# %% [markdown]
# **Why two or three?** One leaves the tensor cores alone during its softmax (chapter 2). Two fill them if a softmax is shorter than the other's products. Three help where it is not, head dim 64, and where O is
# narrow enough for 160 registers. Four do not fit: at 64 rows each they would have 128 registers per thread minus the producer's, and S alone takes 64.

# %%
for d in (64, 128, 256):
    widths = {m // 64: budget.widest(d, m) for m in budget.TILE_M}
    print(
        f"d {d}: the widest key block for 1, 2, 3 consumers: {', '.join(str(w or 'none fits') for w in widths.values())}"
    )

# %% [markdown]
# ## 9. Persistent: from tile to tile
#
# A CTA starts, sets up barriers, loads its first tiles, works, normalises, stores, ends; the next one starts. At 16k keys nobody notices. Predict: at 1k keys and head dim 128, which share of the time of a
# query tile is start and end, in rung 7?

# %%
guess = None  # percent

# %%
costs = {n: predict.cost(n, 128, False) for n in ("7", "8")}
lengths = [2**i for i in range(9, 15)]
fig, (left, right) = plots.figure(2, height=3, widths=(1, 1.5))
for (n, c), colour in zip(costs.items(), (plots.ORANGE, plots.BLUE), strict=True):
    share = [100 * c.tile / (c.tile + c.block * s / c.config.tile_n) for s in lengths]
    left.plot(lengths, share, marker="o", color=colour, label=f"rung {n}")
    if n == "7":
        at_1k = share[1]
plots.powers_of_two(left, lengths)
left.set(xlabel="keys", ylabel="percent of a tile's time", ylim=(0, None), title="Start and end, simulated")
left.legend()
timeline.gantt(timeline.from_dict(simulate("8", 4, heads=2).timeline.as_dict()), right)
right.set_title("Rung 8: two tiles of four key blocks each")
right.set_xlabel("cycles")
plt.show()
reveal("start and end of a tile at 1k keys, rung 7", guess, at_1k, "% of its time")
for title in ("persistent ctas", "output memory of its own"):
    display(Markdown(notes.find(title).quote("Prediction", "Outcome")))

# %% [markdown]
# In the picture on the right, K and V of the second tile are on their way while the first tile's output leaves. What continues across tiles must be a counter and not a variable of the loop: the
# rings' slots and phases, and the turns (one arrival left over, always). A warp of its own loads Q, since Q waits for something else: the moment at which its memory is free.
#
# ### Waves
#
# A card has 132 SMs (this many is in the stored run, too). 133 equal tiles take as long as 264: the last *wave* is nearly empty. Efficiency is work over rounds.

# %%
sms = RUN.sms if RUN and RUN.sms else HOPPER.sms
counts = np.arange(1, 8 * sms)
fig, (ax,) = plots.figure(height=2.5)
ax.plot(counts / sms, 100 * counts / sms / np.ceil(counts / sms), color=plots.BLUE, linewidth=1.2)
for seqlen, colour in ((1024, plots.RED), (16_384, plots.GREEN)):
    tiles_full = seqlen // 128 * 16_384 // seqlen * 16
    units = seqlen // 128 // 2 * 16_384 // seqlen * 16
    ax.axvline(units / sms, color=colour, linestyle="--" if seqlen > 1024 else ":", label=f"causal pairs at {seqlen} tokens: {units / sms:.2f} rounds")  # fmt: skip
ax.set(xlabel="tiles per SM", ylabel="percent of SMs at work", ylim=(40, 101), title="Wave quantisation: equal tiles")
ax.legend(fontsize=9)
plt.show()
print(f"full, d 128, 16k tokens in all: {tiles_full} tiles of 128 rows, {tiles_full / sms:.2f} rounds")

# %% [markdown]
# ### Causal: tiles of different length
#
# Under a causal mask the last query tile has as many key blocks as there are, the first one has one. A persistent kernel needs a **plan**: which CTA takes which tile in which round. A good
# plan gives every SM the same number of key blocks, *and* lets CTAs that run at the same time share heads, so that K and V stay in L2. Five plans, each in one or two lines:

# %%
CAUSAL = forward_config(128, 128, True)


def heads_and_lengths(seqlen):
    """Heads times batch of the paper's benchmark at d 128, and key blocks by query tile."""
    m_blocks = -(-seqlen // CAUSAL.tile_m)
    return 16_384 // seqlen * 16, [CAUSAL.key_blocks(m, seqlen, seqlen) for m in range(m_blocks)]


def snake(tiles):
    """Tiles to CTAs round by round, every other round backwards: lists of (head, key blocks)."""
    rounds = [tiles[i : i + sms] for i in range(0, len(tiles), sms)]
    order = [[*r, *[None] * (sms - len(r))][:: 1 if i % 2 == 0 else -1] for i, r in enumerate(rounds)]
    return [[tile for tile in cta if tile] for cta in zip(*order, strict=True)]


def as_they_come(seqlen):
    heads, lengths = heads_and_lengths(seqlen)
    tiles = [(h, n) for h in range(heads) for n in lengths]
    return [tiles[i::sms] for i in range(sms)]


def sections(seqlen, size=4):
    heads, lengths = heads_and_lengths(seqlen)
    parts_of = [range(i, min(i + size, heads)) for i in range(0, heads, size)]
    return snake([t for part in parts_of for t in sorted(((h, n) for h in part for n in lengths), key=lambda t: -t[1])])


def all_heads(seqlen):
    return sections(seqlen, heads_and_lengths(seqlen)[0])


def mirror_pairs(seqlen):
    heads, lengths = heads_and_lengths(seqlen)
    half = range(-(-len(lengths) // 2))
    pairs = [[(h, lengths[-1 - i]), *([(h, lengths[i])] if i < len(lengths) - 1 - i else [])] for h in range(heads) for i in half]  # fmt: skip
    return [[tile for pair in pairs[i::sms] for tile in pair] for i in range(sms)]


def whoever_is_free(seqlen):
    """FA3's: a counter in memory hands the next tile, longest first in each head, to the CTA that asks first."""
    heads, lengths = heads_and_lengths(seqlen)
    ctas, until = [[] for _ in range(sms)], np.zeros(sms)
    for tile in ((h, n) for h in range(heads) for n in reversed(lengths)):
        free = int(until.argmin())
        ctas[free].append(tile)
        until[free] += tile[1]
    return ctas


def judge(plan, seqlen):
    """Percent of the SMs' time that is work, and megabytes of K and V that the tiles of one round ask for."""
    ctas = plan(seqlen)
    loads = [sum(n for _, n in cta) for cta in ctas]
    rounds = range(max(map(len, ctas)))
    heads = np.mean([len({cta[r][0] for cta in ctas if r < len(cta)}) for r in rounds])
    return 100 * np.mean(loads) / max(loads), heads * 2 * seqlen * 128 * 2 / 1e6


# %%
guess = None  # which plan did we keep? its place in the list, 1 to 5

# %%
PLANS = {
    "as they come": as_they_come,
    "sorted in sections of 4 heads": sections,
    "all heads sorted": all_heads,
    "a long tile and its mirror image": mirror_pairs,
    "whoever is free (counter)": whoever_is_free,
}
seqlens = (1024, 4096, 16_384)
judged = {name: [judge(plan, s) for s in seqlens] for name, plan in PLANS.items()}
fig, axes = plots.figure(2, height=3.7)
for i, (ax, title) in enumerate(
    zip(axes, ("Balance: percent of time at work", "K and V of one round, MB"), strict=True)
):
    series = [(f"{s // 1024}k", [judged[name][j][i] for name in PLANS], c) for j, (s, c) in enumerate(zip(seqlens, (plots.SKY, plots.BLUE, "#1B4F72"), strict=True))]  # fmt: skip
    plots.grouped_bars(ax, list(PLANS) if i == 0 else [""] * len(PLANS), series)
    ax.set_title(title)
    ax.get_legend().remove()
axes[1].axvline((RUN.l2_bytes if RUN and RUN.l2_bytes else 50e6) / 1e6, color=plots.RED, label="L2")
fig.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
plt.show()
reveal("kept: plan", guess, 1 + list(PLANS).index("a long tile and its mirror image"))
display(Markdown(notes.find("tiles in pairs").quote()))

# %% [markdown]
# A ten-line model would have saved us a measurement: sections look reasonable until you see where sections and rounds end. It also shows why *all heads sorted*, perfect in balance, falls apart at 1k:
# the tiles that run together belong to as many heads as there are SMs, and every K and V is fetched again in every round. Pairs lose a little balance, in the last round, and have
# neighbours that share a head.
#
# The plan in the kernel, and the order of heads in it:

# %%
if HAS_CUTE:
    display(lesson_views.source(module("8").Attention.tile_of_round))
check_and_measure("8")

# %% [markdown]
# ## 10. Budgets: a calculator
#
# What fits decides more than what would be fast. Turn the knobs: head dim, rows, keys per block, stages, and whether the output has memory of its own.

# %%
budget.explore(head_dim=128, tile_m=128, tile_n=128, stages=2, own_output=True)
choices = {f"d {d}: {c.tile_m} x {c.tile_n}": budget.budget(c) for d, c in tiles.items()}
choices["d 128: 128 x 176 (FA3)"] = budget.budget(ForwardConfig(128, 128, 128, 176))
choices["d 128: 192 x 128"] = budget.budget(ForwardConfig(128, 128, 192, 128))
fig, axes = plots.figure(2, height=3.8)
budget.draw(axes, choices)
plt.show()
for name, found in choices.items():
    if found.refusal:
        print(f"{name}: {found.words}")

# %% [markdown]
# The red line is the limit. At head dim 256 shared memory is full with 80 keys per block, and the output has to take Q's place. At head dim 64 the registers of three consumers are full while most of the shared memory is
# empty: it buys nothing, for a third stage hides nothing more.
#
# ## 11. Reading a profile
#
# NVIDIA's profiler (ncu) counts how often each unit worked. Our notes hold one profile of the library's kernel, from before it was persistent:

# %%
profile = notes.find("profile")
display(Markdown(profile.quote()))
ncu = notes.profiles(profile)
UNITS = {"tensor": "tensor core", "XU": "mufu", "ALU": "alu", "FMA": "fma", "issue": "issue"}
configs = {"d64 192x128": ForwardConfig(64, 64, 192, 128, ping_pong=True), "d128 128x128": ForwardConfig(128, 128, 128, 128, ping_pong=True)}  # fmt: skip
fig, axes = plots.figure(2, height=3.2)
for ax, (name, config) in zip(axes, configs.items(), strict=True):
    report = simulate("7", 32, config)
    names = [n for n in UNITS if n in ncu[name]]
    plots.grouped_bars(
        ax,
        names,
        [
            ("ncu, H200", [100 * ncu[name][n] for n in names], plots.BLUE),
            ("simulated rung 7", [100 * report.share(UNITS[n]) for n in names], plots.LIGHT),
        ],
    )
    ax.set(xlim=(0, 100), xlabel="percent of cycles at work", title=name)
    ax.get_legend().remove()
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
plt.show()

# %% [markdown]
# How to read it (XU is the MUFU; a profiler counts a unit as active in a slightly wider sense than "FLOP over peak", so the tensor line is a little higher than the share of the peak).
#
# * **No unit is full.** At head dim 64 the tensor cores and the MUFU both work a bit more than half of the time. If one stood near 100 %, we would know what to spare. Here the warps *queue for both*: first all want the one, then all the other.
# * **Issue slots.** More than half are in use at d 64. Whoever proposes more instructions (a polynomial instead of the MUFU, a vote to save a multiplication) has to
#   pay in a coin that is already half spent.
# * **Eligible warps.** About one warp of those on a scheduler can issue at a time. That hides little latency: any chain of dependent instructions shows.
# * **Clock.** At d 128 the tensor cores are busier and the clock is lower. Power is the next limit there: a faster schedule makes the card run slower.
#
# ## 12. What FA3 left on the table, and what we tried
#
# The best of this chapter is a list of predictions, written down before each measurement (`bench/NOTES.md`). Read them, and decide for each whether you would have tried it.

# %%
tried = [entry for entry in notes.read() if entry.changes]
display(Markdown("| | idea | prediction |\n|---|---|---|\n" + "\n".join(f"| {i} | {e.title} | {e.fields.get('Prediction', '')} |" for i, e in enumerate(tried, 1))))  # fmt: skip

# %%
guess = []  # the numbers of the ideas that made the kernel slower, so that we took them back

# %%
lost = [i for i, entry in enumerate(tried, 1) if entry.lost]
print(f"taken back: {lost}; you said {guess or 'nothing yet'}")
fig, (ax,) = plots.figure(height=0.9 + 0.55 * len(tried))
MARKERS = {"d64": ("o", plots.ORANGE), "d128": ("s", plots.BLUE), "d256": ("D", plots.GREEN)}
for row, entry in enumerate(tried):
    for change in entry.changes:
        marker, colour = MARKERS[change.shape.split()[0]]
        filled = colour if "causal" not in change.shape else "white"
        ax.plot(100 * (change.ratio - 1), row, marker, color=colour, markerfacecolor=filled, markersize=7)
labels = [f"{i} {e.title[:44]}{'…' if len(e.title) > 44 else ''}" for i, e in enumerate(tried, 1)]
ax.set_yticks(range(len(tried)), labels, fontsize=9.5)
for tick, entry in zip(ax.get_yticklabels(), tried, strict=True):
    tick.set_color(plots.RED if entry.lost else "black")
for d, (marker, colour) in MARKERS.items():
    ax.plot([], [], marker, color=colour, label=d)
ax.plot([], [], "o", color=plots.GREY, markerfacecolor="white", label="hollow: causal")
ax.axvline(0, color="black", linewidth=1)
ax.invert_yaxis()
ax.set(xlabel="percent faster, after against before, of one run (every pair in the notes; red: taken back)")
fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4)
plt.show()

# %% [markdown]
# A dot is one shape; a kept idea may have a lost dot, where a first version of it failed (pairs of causal tiles: the dot on the left are the sections of section 9). Four of them deserve a closer look.
#
# ### Lazy rescale: the work that is not there
#
# `O *= shrink` is needed when the row maximum grew. With a threshold one can keep the old maximum as long as the new one is not much larger: P becomes larger than 1, at most 2^8, and nothing is lost (FA4
# does so on Blackwell). How often is the rescale needed at all?

# %%
guess = None  # percent of (row, block) pairs in which the maximum grows, 64 blocks of 128 keys, random data

# %%
scores = rng.standard_normal((512, 64, 128)) * np.log2(np.e)  # rows, blocks, keys; in the exponent's unit
block_max = scores.max(2)
before = np.maximum.accumulate(block_max, 1)[:, :-1]
grows = block_max[:, 1:] > before
reveal("the maximum grows in", guess, 100 * grows.mean(), "% of the blocks")
kept, rescaled = block_max[:, 0].copy(), np.zeros(grows.shape, bool)
for j in range(1, 64):
    rescaled[:, j - 1] = block_max[:, j] > kept + 8
    kept = np.where(rescaled[:, j - 1], block_max[:, j], kept)
print(f"by more than 8 over the maximum in use: {100 * rescaled.mean():.3g} %")
saved = forward_config(64, 64, False)
print(
    f"multiplications saved: {saved.head_dim_v / 2:.0f} per thread and block, beside {saved.tile_n / 2:.0f} exponentials"
)
display(Markdown(notes.find("lazy rescale").quote()))

# %% [markdown]
# Nearly every rescale can go, and the kernel became *slower*. The multiplications were not what it waited for; the vote and the branch cut a long stretch of code into
# pieces, and ptxas mixes instructions only within a piece. **Work saved is not time saved, unless it was the work that somebody waited for.**
#
# ### Software exp2: a model of throughputs
#
# If the MUFU is the bottleneck at head dim 64, compute every n-th exponential with a polynomial on the FMA units: about 8 instructions (FA4 does it on Blackwell). Here is the model that said "do it":

# %%
INSTRUCTIONS = 8  # per exponential: clamp, range split, polynomial of degree 3, exponent put back
fractions = np.linspace(0, 0.5, 51)
work = budget.cycles(forward_config(64, 64, False))
mufu = work["mufu"] * (1 - fractions)
issue = work["issue"] + fractions * work["mufu"] * (HOPPER.mufu / HOPPER.issue) * (INSTRUCTIONS - 1)
fig, (ax,) = plots.figure(height=2.8)
for name, values, colour in (("MUFU", mufu, plots.RED), ("issue slots", issue, plots.BLUE)):
    ax.plot(100 * fractions, values, color=colour, label=name)
ax.axhline(work["tensor core"], color=plots.GREEN, label="tensor cores")
ax.set(xlabel="percent of exponentials by polynomial", ylabel="cycles per key block", ylim=(0, None), title="d 64, full rates")  # fmt: skip
plots.name_lines(ax)
plt.show()
x = rng.uniform(0, 1, 100_000)
coefficients = np.polyfit(x, np.exp2(x), 3, w=1 / np.exp2(x))
print(
    f"a cubic on [0, 1): relative error {np.abs(np.polyval(coefficients, x) / np.exp2(x) - 1).max():.1e}; bf16 rounds to {2**-9:.1e}"
)

# %% [markdown]
# Accuracy is no obstacle, and the model has room: the blue line starts well below the red one. It measured a loss. Go back to the profile: issue slots were more than half in use *over all cycles*,
# and a consumer's exponentials come in one burst, in which issue is what it shares with two others. A model of averages does not see bursts.
#
# ### Two warps for K and V: a prediction of the simulator that failed

# %%
display(Markdown(notes.find("two warps").quote()))

# %% [markdown]
# We have not found out why. That is an honest state of a note, and an invitation.
#
# ### The maximum of the second row: one that held
#
# Each thread has two rows. If the maxima of both are taken first and then the exponentials of both, the MUFU idles during the maxima. Interleave them:

# %%
display(Markdown(notes.find("maximum of row 2").quote()))

# %% [markdown]
# It held at d 128 and 256, by about what was predicted, and not at d 64, where three consumers are there to fill such gaps. Look at the last paragraph: a trick that ties two rows together has a price in a
# corner case, and the note says which.
#
# ## 13. Where we stand
#
# > **You may read:** *FlashAttention-3 reaches up to 740 TFLOP/s.*
# > **What is so:** that is the headline of the paper (fp16). The best bar in the paper's own figures is 756: head dim 256, 16k, full (read from the chart). And a number without its card, clock, head dim and mask
# > says little: today's FA3, on the card of our stored run, has others.

# %%
HEADLINE, BEST_BAR = 740, 756  # TFLOP/s, FA3 paper, fp16: abstract; forward, head dim 256, 16k, without mask
if RUN:
    best = max((row for row in RUN.select(kernel="fa3", direction="fwd", dtype="bf16")), key=lambda row: row.tflops, default=None)  # fmt: skip
    print(f"paper: headline {HEADLINE}, best bar {BEST_BAR} TFLOP/s (H100, fp16)")
    if best:
        print(f"FA3 {RUN.peers.get('fa3', '')} on {RUN.gpu}, bf16: best {best.tflops:.0f} TFLOP/s ({best.shape}, {best.sm_mhz:.0f} MHz)")  # fmt: skip
    fig, axes = plt.subplots(3, 2, figsize=(plots.WIDTH, 8.6), sharex=True)
    names = ["rung05_warp_specialised", *(Path(FILES[n]).stem for n in ("6", "7", "8")), "fa3_lib", "fa3", "fa4", "cudnn"]  # fmt: skip
    for line, d in zip(axes, (64, 128, 256), strict=True):
        for ax, causal in zip(line, (False, True), strict=True):
            plots.throughput(ax, RUN, names, head_dim=d, causal=causal, dtype="bf16")
            ax.set_title(f"d {d}, {'causal' if causal else 'full'}", fontsize=10.5)
            ax.set_xlabel("sequence length" if d == 256 else "")
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    plt.show()
else:
    print("no stored row yet: `fa3 bench` on a Hopper stores some")

# %%
guess = None  # fa3_lib over the best peer of each shape, geometric mean, 1k to 32k

# %%
ratios = {}
for row in RUN.select(kernel="fa3_lib", direction="fwd", dtype="bf16") if RUN else []:
    same = {"head_dim": row.head_dim, "causal": row.causal, "seqlen": row.seqlen}
    peers = {p: found.tflops for p in PEERS if (found := stored(p, **same))}
    if peers and row.seqlen >= 1024:
        ratios[row.head_dim, row.causal, row.seqlen] = row.tflops / max(peers.values())
if ratios:
    reveal("fa3_lib over the best peer", guess, float(np.exp(np.mean(np.log(list(ratios.values()))))))
    lengths = sorted({s for _, _, s in ratios})
    masks = sorted({(d, c) for d, c, _ in ratios})
    grid = np.array([[ratios.get((d, c, s), np.nan) for s in lengths] for d, c in masks])
    fig, (ax,) = plots.figure(height=2.7)
    ax.imshow(grid, cmap="RdBu", vmin=0.8, vmax=1.2, aspect="auto")
    for (i, j), value in np.ndenumerate(grid):
        ax.text(j, i, f"{value:.2f}" if np.isfinite(value) else "", ha="center", va="center", fontsize=9.5)
    ax.set_xticks(range(len(lengths)), [f"{s // 1024}k" for s in lengths])
    ax.set_yticks(range(len(masks)), [f"d {d} {'causal' if c else 'full'}" for d, c in masks])
    ax.grid(False)
    ax.set_title("fa3_lib over the best peer of the same run (blue: faster)")
    plt.show()
display(Markdown(notes.find("whole grid").quote("Why", "Next")))

# %% [markdown]
# ### The measured timeline
#
# Everything above with boxes on a time axis was simulated. A kernel can stamp the clock at the same points, on the card, and the same reader draws it (`fa3_course/timeline.py`). Where stamps of a card are stored, they stand here,
# above the simulator's picture of the same tile:

# %%
stamped = sorted((checkout() / "bench" / "timelines").glob("*.json"))
for path in stamped:
    timeline.draw(timeline.read(path), f"Measured: {path.stem}")
    plt.show()
if not stamped:
    print("no stamped timeline of a card is stored yet; simulated:")
show("7", simulate("7", 8, configs["d64 192x128"]), "Simulated: rung 7, head dim 64, three consumers")

# %% [markdown]
# ## 14. Three questions
#
# <details><summary><b>1.</b> Why is a turn "PV, then QK" in rung 6, and "QK, then PV" in rung 7?</summary>
#
# In rung 6 softmax(j) stands between QK(j) and PV(j), so the two products that can be issued together are PV(j - 1) and QK(j), and softmax needs both to be over. In rung 7 softmax(j) shall start as soon as possible, so QK(j) goes first, and
# PV(j - 1) runs while softmax works: the group that is waited for must be the older one.
# </details>
#
# <details><summary><b>2.</b> You remove the turns from rung 7. Is the result wrong?</summary>
#
# No. Turns order the *issue*; all that is needed for correct numbers are the mbarriers of the rings and wait_group. FA3 itself has no turns at head dim 256, where softmax is short against the products.
# </details>
#
# <details><summary><b>3.</b> A colleague halves the number of rescales and asks why nothing gets faster. What do you look at first?</summary>
#
# Whether anybody waited for them: the timeline (which wait ends with the rescale?), then the profile (is FMA or issue near full?), then the machine code (did a branch cut the schedule in two?).
# </details>
#
# ## Where to go
#
# * The lab of this chapter: turns, overlap and plans of your own, and the bugs that go with them.
# * `fa3 sim 7 --d 64`, `fa3 sim 8`: other shapes without a GPU; `bench/NOTES.md`: the next prediction is yours.
# * Chapter 4: 8-bit products take half the time, and exponentials do not. Everything of this chapter becomes tighter.
#
# **Sources.** Shah et al. 2024 (FlashAttention-3, arXiv:2407.08608) and its C++ source; the FlashAttention-4 source (CuTe DSL); NVIDIA, CUDA C++ programming guide (throughput of instructions) and PTX ISA
# (named barriers, wgmma.wait_group).
