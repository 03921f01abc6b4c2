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
# # Chapter 2, sitting b: producers and consumers
#
# *60 to 90 minutes. Runs on any laptop; a Hopper is used if there is one.*
#
# Three kernels, each one idea from the next:
#
# | rung | file | idea |
# |---|---|---|
# | 3 | [`steps/rung03_tma_wgmma.py`](steps/rung03_tma_wgmma.py) | attention from TMA and WGMMA; one warpgroup, everything waits |
# | 4 | [`steps/rung04_ring.py`](steps/rung04_ring.py) | a producer warp and a ring of stages |
# | 5 | [`steps/rung05_warp_specialised.py`](steps/rung05_warp_specialised.py) | two consumer warpgroups, and registers where the work is |
#
# Each is a file that runs by itself. The online softmax on a fragment (`device_softmax.py`) and the host side (`rung_host.py`) are shared and never
# change; what differs between two rungs is the idea. Before each kernel we run its **protocol** on the simulated SM,
# with real numbers, built from the same `ForwardConfig`: stages, bytes and arrival counts exist once.
#
# The question to ask of every picture: *who waits for whom, and on what?*

# %%
import importlib.util
import inspect
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import display

from fa3_course import layouts, lesson_views, plots, results, rungs, simulated, timeline
from fa3_course.simulated import parts, rung04
from fa3_lib import reference
from fa3_lib.config import SMEM_LIMIT, ForwardConfig
from hopper_sim import HOPPER, Fault, patched

plots.use_style()
HAS_CUTE = importlib.util.find_spec("cutlass") is not None
SEED = np.random.SeedSequence().entropy % 2**32
rng = np.random.default_rng(SEED)  # fresh inputs in every run; to repeat one, write its seed here
EXPERIMENTS = results.experiments("02")  # one stored run of all variants below
RUN = results.latest(kernel="fa2")  # one stored run of the ladder, with FA2 and head dim 64
print(f"seed {SEED}; CuTe DSL {'is here' if HAS_CUTE else 'has no wheels for this system: its cells say so and go on'}")


def reveal(what, guess, value, unit=""):
    """Shows a value beside the reader's guess."""
    told = "no guess yet" if guess is None else f"you said {guess:g}"
    print(f"{what}: {value:,.4g} {unit} ({told})")


# the rungs' tiles at head dim 128, without a mask; rung files need CuTe, so the numbers stand here, too, and are compared
CONFIGS = {
    "3": ForwardConfig(128, 128, tile_m=64, tile_n=128, stages=1),
    "4": ForwardConfig(128, 128, tile_m=64, tile_n=128, stages=2),
    "5": ForwardConfig(128, 128, tile_m=128, tile_n=128, stages=2),
}
if HAS_CUTE:
    assert all(rungs.find(n).module().make_config(128, False) == config for n, config in CONFIGS.items())


def simulate(number, blocks=16, config=None, **options):
    """One CTA of a rung against `blocks` key blocks on the simulated SM; its result is compared with fp64."""
    config = config or CONFIGS[number]
    d = config.head_dim
    q = rng.standard_normal((1, config.tile_m, 1, d))
    k, v = (rng.standard_normal((1, blocks * config.tile_n, 1, d)) for _ in range(2))
    run = simulated.simulate(number, q, k, v, config=config, **options)
    given = [torch.from_numpy(x).bfloat16().double() for x in (q, k, v)]
    want, want_lse = reference.attention(*given)
    assert np.abs(run.out - want.numpy()).max() < 1e-2 and np.abs(run.lse - want_lse.numpy()).max() < 1e-3
    return run.report


def predicted(number, config=None):
    """TFLOP/s of a whole card whose SMs all work like the simulated one, start and end of a CTA left out."""
    short, long = (simulate(number, blocks, config) for blocks in (6, 22))
    return HOPPER.tflops(long.flops - short.flops, long.cycles - short.cycles)


def show(number, report):
    """The timeline of a rung, and what its roles wait on."""
    lines = timeline.from_dict(report.timeline.as_dict())
    timeline.draw(lines, f"Rung {number}: one CTA, {simulated.rung(number).title}")
    plt.show()
    roles = [lane for lane in lines.lanes if lane.startswith(("producer", "consumer"))]
    _, (ax,) = plots.figure(height=1.5 + 0.4 * len(roles))
    layouts.draw_waits(ax, layouts.waits(lines, roles))
    plt.show()


# %% [markdown]
# ## 1. One number that hurts
#
# Take chapter 1's loop, replace its copies by TMA and its products by WGMMA, and wait for each of them: rung 3. One warpgroup owns 64
# query rows. For each key block it copies K, waits, multiplies, waits, does softmax, copies V, waits, multiplies, waits. Alone on
# an SM, which share of their peak do the tensor cores reach?

# %%
guess = None  # percent

# %%
report = simulate("3")
reveal("rung 3, tensor cores, share of their peak", guess, 100 * report.share("tensor core"), "%")
show("3", report)

# %% [markdown]
# Read the frame from left to right: TMA brings K, the tensor cores do QK, the warpgroup its softmax, TMA brings V, PV. At any time one unit
# works and the others stand still. The bar below says the same as an account of the warpgroup's time: it waits on "K full" and
# "V full", that is on memory, and on its own products. Latencies of the simulated SM are estimates (`hopper_sim/machine.py` names each
# one's source), so take the shape for true, and the percentages as about right.
#
# ## 2. Rung 3, the kernel
#
# Here are its copy and its two products. Everything is visible: the elected thread, the bytes, the phase, fence, commit, wait.

# %%
if HAS_CUTE:
    rung3 = rungs.find("3").module()
    for method in (rung3.Attention.load, rung3.Attention.qk, rung3.Attention.pv):
        display(lesson_views.source(method))
else:
    print("CuTe DSL has no wheels for this system: read the files in steps/ beside this page")

# %% [markdown]
# Three details that are easy to pass over.
#
# * **No "empty" barrier.** A slot may be overwritten when every warp has read it. Here one `sync_threads()` at the end of `pv` says so for K and V
#   together, because the same threads copy and multiply. It is the last time that this is so simple.
# * **Two tiled MMAs** (`mmas_qk`): the first k-step of S overwrites the accumulator, the others add. Zeroing S by instructions would cost 64 of them per block.
# * **P in place.** `tOrP[i] = acc_S[i].to(...)`: element i of one fragment is element i of the other (sitting a, section 5).
#
# Is it right? On a card we check against fp64; on a laptop the simulated run above was checked.


# %%
def check_on_card(number):
    """Shapes around the tiles, GQA, both masks, both dtypes; error within twice that of PyTorch in the same precision."""
    attention = rungs.find(number).module().attention
    for b, sq, sk, h, hk, d in ((1, 1, 1, 1, 1, 64), (2, 239, 600, 4, 2, 128), (1, 700, 129, 2, 1, 256)):
        for dtype in (torch.float16, torch.bfloat16):
            for causal in (False, True):
                shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, d))
                q, k, v = (torch.randn(s, dtype=dtype, device="cuda") for s in shapes)
                (out, lse), (want, want_lse) = (
                    attention(q, k, v, causal=causal),
                    reference.attention(q, k, v, causal=causal),
                )
                eager = rungs.find("0").load()(q, k, v, causal=causal)[0]
                allowed = 2 * (eager.double() - want).abs().max() + 4 * torch.finfo(dtype).eps * want.abs().max()
                assert (out.double() - want).abs().max() <= allowed
                assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    return "right on every shape"


def your_card(number, seqlen=8192, d=128):
    """TFLOP/s on this machine's card: 16k tokens, hidden size 2048, full."""
    import triton

    shape = (16_384 // seqlen, seqlen, 2048 // d, d)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    attention = rungs.find(number).module().attention
    ms = triton.testing.do_bench(lambda: attention(q, k, v), return_mode="median")
    return 4 * seqlen * 16_384 * 2048 / ms / 1e9


def check_and_measure(number):
    if HAS_CUTE and rungs.has_hopper():
        print(f"rung {number}: {check_on_card(number)}; your card: {your_card(number):.0f} TFLOP/s (d 128, 8k, full)")
    else:
        print(f"rung {number} needs a Hopper to run; its protocol ran on the simulated SM, its machine code is below")
    row = lesson_views.speeds(RUN, [number], head_dim=128, causal=False, seqlen=8192).get(number)
    print(f"stored: {row.tflops:.0f} TFLOP/s on {RUN.gpu} ({row.shape})" if row else "no stored row yet of this rung")


check_and_measure("3")
FOUND = lesson_views.reports(["3"]) if HAS_CUTE else {}
if FOUND:
    display(lesson_views.sass_table(FOUND))

# %% [markdown]
# The proof in the machine code: TMA loads, WGMMA, mbarriers, no `LDGSTS`, no `HMMA`, nothing spilled. (The loop stands twice in the code: blocks that
# need a mask, then blocks that need none.)
#
# One thing that the simulated CTA does not show: rung 3 needs so little of an SM that more than one CTA fits, and CTAs
# hide each other's waits. That is occupancy again (sitting a, section 7). Predict: how much does the second CTA bring?

# %%
guess = None  # speed of rung 3 over its speed with one CTA per SM

# %%
if FOUND:
    smem = FOUND["rung 3"].smem
    registers = -(-FOUND["rung 3"].registers // 8) * 8
    print(
        f"CTAs of rung 3 per SM: memory allows {233_472 // (smem + 1024)}, registers {HOPPER.registers // (128 * registers)}"
    )
rows = lesson_views.experiment_rows(EXPERIMENTS, "occupancy", causal=False)
fig, (ax,) = plots.figure(height=1.9)
lesson_views.draw_experiment(ax, rows, "Rung 3, d 128, full, 8k")
plt.show()
if len(rows) == 2:
    reveal("two CTAs over one", guess, rows[0].tflops / rows[1].tflops, "times")
print(f"simulated, one CTA per SM: {predicted('3'):.0f} TFLOP/s on a whole card")

# %% [markdown]
# So why not stop here, with small tiles and many CTAs? Count the bytes. Every CTA reads all keys and values of its head, for 64 query
# rows. The rate at which K and V must come from L2 falls with the rows that share them:

# %%
fig, (ax,) = plots.figure(height=2.6)
tile_rows = np.array([64, 128, 192])
clocks_per_block = 4 * tile_rows * 128 * 128 / HOPPER.tensor_flops_16bit  # tensor cores at full rate
ax.bar([str(m) for m in tile_rows], 2 * 128 * 128 * 2 / clocks_per_block, color=plots.BLUE, width=0.5)
ax.axhline(HOPPER.tma_bandwidth, color=plots.RED, label="simulated SM: what L2 delivers to one SM (an estimate)")
ax.set(
    xlabel="query rows that use a K and V tile (tile_m)",
    ylabel="bytes per clock",
    title="What full speed asks of L2, per SM, d 128",
)
ax.grid(axis="x", visible=False)
ax.legend()
plt.show()

# %% [markdown]
# At 64 rows, full speed would need all that L2 gives. Two CTAs do not share their tiles. Two *warpgroups of one CTA* do. That is where
# rung 5 goes; but first, copies must stop being anybody's waiting.
#
# ## 3. Two slots are not enough: the first race
#
# The obvious plan: one warp only copies, always one tile ahead, into the slot that is not in use. A "full" barrier per slot tells the
# consumer when to read. Popular write-ups stop here: "double buffering". Let us run exactly this on the simulated SM, two slots and
# "full" barriers, and a producer that never asks whether a slot is free.

# %%
print(inspect.getsource(rung04.producer))

# %%
guess = None  # what will the verdict be about?


# %%
def with_roles(producer=rung04.producer, consumer=rung04.consumer):
    """Builds rung 4's CTA from other roles."""

    def build(sm, p, tile):
        t = parts.make_tiles(sm, p)
        sm.role("producer", producer, p, t, tile, threads=parts.WARP)
        for me, name in enumerate(parts.consumer_names(p.config)):
            sm.role(name, consumer, me, p, t, tile)

    return build


def verdict(**roles):
    """What the simulated SM says about rung 4 with these roles."""
    try:
        return f"clean, {simulate('4', 6, build=with_roles(**roles)).cycles:,.0f} cycles"
    except Fault as fault:
        return str(fault)


print("as it stands:", verdict(), "\n")
never_asks = patched(rung04.producer, "await t.k_empty[slot].wait(phase ^ 1)", "pass")
print("double buffer without an 'empty' barrier:\n" + verdict(producer=never_asks))

# %% [markdown]
# > **You may read:** *the producer loads the next tile into the other buffer while the consumer works; no further synchronisation is needed.*
# > **What is so:** nothing keeps a producer one tile ahead. TMA is fast and softmax is slow: the third tile lands on the first while it is
# > still being read. Each slot needs a second barrier in the other direction, "empty".
#
# The simulator finds the race although this run's *timing* may have been lucky: it looks for an order between two accesses of the same bytes,
# not for a wrong number.
#
# ## 4. The ring
#
# So there are two mbarriers per slot, and two parties. Who completes what, and who waits on it:

# %%
edges = [
    ("producer + TMA's bytes", "K full, V full", "consumer"),
    ("consumer: 4 warps, one arrival each", "K empty, V empty", "producer"),
    ("producer + TMA's bytes", "Q full", "consumer"),
    ("tensor cores", "wait_group", "consumer"),
]
fig, (ax,) = plots.figure(height=3.4)
layouts.draw_protocol(ax, edges)
ax.set_title("Rung 4: every wait")
plt.show()

# %% [markdown]
# In CuTe DSL the pair of barriers is one object, a *pipeline*, with four verbs:
#
# | verb | who | does | on the simulated SM |
# |---|---|---|---|
# | `producer_acquire(state)` | producer | wait on "empty", then arrive on "full" and announce the bytes | `await empty[slot].wait(phase ^ 1)`, `full[slot].arrive_expect_tx(n)` |
# | `producer_commit(state)` | producer | nothing for TMA: the bytes complete the phase | |
# | `consumer_wait(state)` | consumer | wait on "full" | `await full[slot].wait(phase)` |
# | `consumer_release(state)` | consumer | arrive on "empty", once per warp | `empty[slot].arrive(4)` |
#
# The *state* is a slot and a phase bit. `advance()` goes to the next slot and flips the bit when it wraps around. In numbers, for tile
# `i` of a ring with `stages` slots:

# %%
stages = 2
print("tile   slot   consumer waits full with bit   producer waits empty with bit")
for i in range(7):
    slot, phase = i % stages, i // stages % 2
    print(f"{i:4}{slot:7}{phase:22}{phase ^ 1:30}")

# %% [markdown]
# The producer's bit is the other one: on a fresh barrier `wait(1)` passes at once (sitting a, section 4), so the ring begins empty. Below is a
# producer for you to change. It gets the warp, the problem, the tiles and the barriers (`t.k_empty`, `t.k_full`, ...); `parts.load_q`,
# `parts.load_k` and `parts.load_v` announce their bytes themselves. The list under it breaks one line at a time: predict
# each verdict, then add changes of your own.


# %%
async def my_producer(warp, p, t, tile):
    stages = p.config.stages
    parts.load_q(warp, p, t, tile)
    for i, n in enumerate(p.blocks(tile[0])):
        slot, phase = i % stages, i // stages % 2
        await t.k_empty[slot].wait(phase ^ 1)
        parts.load_k(warp, p, t, tile, n, slot)
        await t.v_empty[slot].wait(phase ^ 1)
        parts.load_v(warp, p, t, tile, n, slot)


WRONG = {
    "producer waits with the consumer's bit": ("k_empty[slot].wait(phase ^ 1)", "k_empty[slot].wait(phase)"),
    "the phase never flips": ("i // stages % 2", "0"),
    "one tile too few": ("enumerate(p.blocks(tile[0]))", "enumerate(p.blocks(tile[0])[:-1])"),
    "V always goes into slot 0": ("parts.load_v(warp, p, t, tile, n, slot)", "parts.load_v(warp, p, t, tile, n, 0)"),
}
print("my_producer:", verdict(producer=my_producer))
for what, change in WRONG.items():
    print(f"\n{what}:\n" + "\n".join(verdict(producer=patched(my_producer, *change)).splitlines()[:5]))

# %% [markdown]
# The deadlock's verdict is the sentence to remember: *X waits for Y's barrier, which has so many of so many arrivals, while Y
# waits for ...*. On a card, all you see is a kernel that does not come back.
#
# Now the right one. What will the tensor cores' share be, with two stages?

# %%
guess = None  # percent

# %%
report = simulate("4")
reveal("rung 4, tensor cores, share of their peak", guess, 100 * report.share("tensor core"), "%")
show("4", report)

# %% [markdown]
# TMA now works under the products and the softmax. The consumer hardly waits on "K full" and "V full" any more; what is left is its own GEMMs. The producer waits nearly
# all of its time, on "empty": that is what a producer should do. (It is one warp, and it costs no issue slots while it
# waits.) But QK, softmax and PV still follow one another: the tensor cores rest while the only consumer does its softmax.
#
# ## 5. Rung 4, the kernel

# %%
if HAS_CUTE:
    display(lesson_views.rung_diff("3", "4"))

# %% [markdown]
# Read the diff for who does what: `load` has become a role with a loop of its own; `qk` and `pv` have lost their copies, and gained a wait before and a release after.
# `make_ring` holds the counts. `sync_threads()` is gone from the loop: no barrier stops all warps any more.
#
# **The tail.** Pipelines know a fifth verb, `producer_tail`: the producer waits until all its stages are released before it
# exits. It is needed when releases come from *another* CTA of a cluster (multicast), which must not arrive in the shared memory of a CTA that is gone. Within
# one CTA the memory lives as long as any of its threads, so our rungs have no tail. What must not happen is the
# opposite: a consumer that returns while its TMA store still reads shared memory. That is what `cp_async_bulk_wait_group` at the end of the epilogue is for.

# %%
check_and_measure("4")
if HAS_CUTE:
    FOUND |= lesson_views.reports(["4"])
    display(lesson_views.sass_table(FOUND))

# %% [markdown]
# `UTMALDG` fell: the copies stand once, in the producer's loop, and no longer in both loops of the consumer. `SYNCS`, the mbarrier
# instruction, rose; `BAR` fell.
#
# ### How many stages?
#
# A stage costs 64 KiB at head dim 128 and 128 keys. Predict the shape of the curve: what do stages 1, 2, 3, 4 give with half as many keys per tile?
# The left plot simulates one CTA of rung 4 and of rung 5 (two consumers, section 6); the right one is the card, where as many CTAs share an SM as fit.

# %%
guess = None  # speed of rung 5 with 4 stages over its speed with 2
card_guess = None  # rung 4 on the card: which number of stages is fastest?

# %%
narrow = {n: replace(CONFIGS[n], tile_n=64) for n in ("4", "5")}
counts = (1, 2, 4)
curves = {n: [predicted(n, replace(narrow[n], stages=s)) for s in counts] for n in narrow}
fig, (left, right) = plots.figure(2, height=4.2, widths=(1, 1.2))
for (number, values), colour in zip(curves.items(), (plots.ORANGE, plots.BLUE), strict=True):
    left.plot(counts, values, marker="o", color=colour, label=f"rung {number}")
left.set(xlabel="stages", ylabel="TFLOP/s", ylim=(0, None), title="Simulated, d 128, tile_n 64")
left.set_xticks(counts)
left.legend()
rows = lesson_views.experiment_rows(EXPERIMENTS, "stages", causal=False)
lesson_views.draw_experiment(right, rows, "Stored: d 128, full, 8k")
plt.show()
reveal("rung 5, simulated: 4 stages over 2", guess, curves["5"][2] / curves["5"][1], "times")
ring = [row for row in rows if "rung 4" in row.kernel]
if ring:
    fastest = max(ring, key=lambda row: row.tflops)
    reveal("rung 4, stored: stages of the fastest", card_guess, int(fastest.kernel.split()[-1]))
for s in (1, 2, 3, 4):
    smem = replace(narrow["4"], stages=s).smem_bytes
    print(
        f"rung 4, tile_n 64, stages {s}: {smem / 1024:.0f} KiB, shared memory for {233_472 // (smem + 1024)} CTAs per SM"
    )

# %% [markdown]
# In the simulation a second stage brings rung 5 a little, a third and a fourth nothing: once the copy of the next tile is hidden, hiding the one after it brings nothing but
# protection against slow arrivals. (With one stage, K and V still have a ring each, so K(n+1) can come under PV(n).) The stored rows of rung 5 are as flat.
#
# **Rung 4 on the card is another story, and the better lesson.** With 64 keys it is small: its registers allow two CTAs per SM, its shared memory two or more up to
# three stages. Then two CTAs, each with one consumer, do what rung 5 does with two consumers, and about as fast; one hides the other's waits, so the
# length of the ring hardly matters, and one stage is best. The fourth stage leaves room for one CTA only, and the speed collapses. *A resource that you spend on depth is
# missing elsewhere.* (Why three stages are slower than one while two CTAs fit, these rows do not say.)
#
# What two CTAs do not have is a common K and V tile: they ask L2 for twice the bytes. And they cannot take turns, since no barrier reaches from one
# to the other; that is chapter 3. Shared memory is better spent on wider tiles. FA3 uses two stages everywhere.
#
# ## 6. Rung 5: a second consumer
#
# If the tensor cores rest during one warpgroup's softmax, give them another warpgroup's products. Rung 5's CTA has 128 query rows: consumer 0 owns the
# first 64, consumer 1 the rest. They share each K and V tile (so "empty" now takes 8 arrivals), and otherwise know nothing of each other.

# %%
guess = None  # percent of the tensor cores' peak

# %%
report = simulate("5")
reveal("rung 5, tensor cores, share of their peak", guess, 100 * report.share("tensor core"), "%")
show("5", report)
edges = [
    ("producer + TMA's bytes", "K full, V full", "consumer 0"),
    ("producer + TMA's bytes", "K full, V full", "consumer 1"),
    ("consumer 0: 4 warps", "K empty, V empty", "producer"),
    ("consumer 1: 4 warps", "K empty, V empty", "producer"),
]
fig, (ax,) = plots.figure(height=3.2)
layouts.draw_protocol(ax, edges)
ax.set_title("Rung 5: a slot is free when the slower consumer is done")
plt.show()

# %% [markdown]
# Better, and by accident. Look at the frame: where the two happen to be out of step, one's softmax lies under the other's products. Where they are in
# step, both ask for the tensor cores at once, and then both leave them alone. *Nothing in the protocol arranges it.* Chapter 3
# does (ping-pong).
#
# ### Registers where the work is
#
# An SM has 65,536 registers. With 384 threads, an equal share is 168 each. A consumer thread needs S and P and O:

# %%
print(CONFIGS["5"].budget())
print()
wide = replace(CONFIGS["5"], tile_n=176)
print("tile_n 176:", wide.budget())

# %% [markdown]
# `setmaxnreg` moves registers between warpgroups while the kernel runs: the producer's 128 threads (of which only one warp does anything) go down to 24, and
# the consumers' go up to 240. 128 · (24 + 2 · 240) = 64,512 fits. The instruction works per warpgroup, which is why the
# producer *is* a warpgroup although one warp would do.
#
# Is it needed? Take both lines out and compile: once with 128 keys per tile, once with 176. What do you expect ptxas to report?

# %%
guess = None  # bytes spilled without setmaxnreg, tile_n 176

# %%
if HAS_CUTE:
    from fa3_course import rung_host, sass
    from fa3_course.paths import checkout

    rung5 = rungs.find("5").module()
    equal_shares = rung_host.edited(
        checkout() / rungs.find("5").file,
        ("            cute.arch.setmaxregister_decrease(cfg.producer_registers)\n", ""),
        ("            cute.arch.setmaxregister_increase(cfg.consumer_registers)\n", ""),
    )
    builds = {}
    for name, module in (("with setmaxnreg", rung5), ("equal shares", equal_shares)):
        for tile_n in (128, 176):
            (builds[f"{name}, tile_n {tile_n}"],) = sass.compile_report(
                lambda options, m=module, n=tile_n: m.compile_rung(
                    replace(CONFIGS["5"], tile_n=n), torch.bfloat16, options
                )
            )
    reveal(
        "spilled without setmaxnreg, tile_n 176",
        guess,
        builds["equal shares, tile_n 176"].spill_store,
        "bytes per thread",
    )
    display(lesson_views.sass_table(builds, ("HGMMA", "USETMAXREG", "STL", "LDL")))

# %% [markdown]
# An honest result: **at 128 keys, rung 5 would fit without setmaxnreg.** P takes S's place, element by element, and S + O are 128
# registers. It becomes necessary with wider tiles, and in chapter 3, where a second S is alive during the first one's softmax.
#
# ## 7. Rung 5, the kernel

# %%
if HAS_CUTE:
    display(lesson_views.rung_diff("4", "5"))

# %%
check_and_measure("5")
if HAS_CUTE:
    FOUND |= lesson_views.reports(["5"])
    display(lesson_views.sass_table(FOUND))

# %% [markdown]
# The whole rung is "which consumer am I", used four times, and two lines of setmaxnreg. `HGMMA` and `MUFU.EX2` did not change: both consumers run the same code.
# `UTMALDG` rose by Q's second tile.
#
# ### One arrival per warp, and why
#
# A slot is free when every *reader* is done. WGMMA reads on behalf of a warpgroup, and `wait_group` tells each warp that its part is over. So each warp must speak, or
# somebody for it:
#
# * every thread arrives: 256 arrivals per slot and tile, one instruction per thread, all on the same 8 bytes of shared memory;
# * one thread per warp (FA4, NVIDIA's pipelines in CuTe DSL, our rungs): 8;
# * one thread per warpgroup (FA3's C++ kernel): 2. It trusts the warpgroup to be in step when the product is over.
#
# FA3's source notes that a CUTLASS release which changed to arrivals by all threads made the kernel slower, and carries its own pipeline
# class since. Predict, then look at the stored rows. They hold rung 5 itself several times, once in each experiment: what these differ by is noise.

# %%
guess = None  # percent that all-thread arrivals cost
noise_guess = None  # percent between the fastest and the slowest row of the very same kernel

# %%
fig, (left, right) = plots.figure(2, height=2.6)
arrivals = lesson_views.experiment_rows(EXPERIMENTS, "arrivals", causal=False)
lesson_views.draw_experiment(left, arrivals, "Arrivals on 'empty'")
registers = lesson_views.experiment_rows(EXPERIMENTS, "registers", causal=False)
lesson_views.draw_experiment(right, registers, "Registers")
plt.show()
if len(arrivals) == 3:
    reveal("all threads cost, against one per warp", guess, 100 * (1 - arrivals[0].tflops / arrivals[1].tflops), "%")
RUNG5_ITSELF = (
    "stages: rung 5, tile_n 128, stages 2",
    "tile_n: tile_n 128",
    "registers: 24/240",
    "arrivals: one per warp",
    "Q: read from shared memory",
    "epilogue: stmatrix and TMA store",
)
same = [row.tflops for row in (EXPERIMENTS.rows if EXPERIMENTS else ()) if row.kernel in RUNG5_ITSELF and row.measured]
if same:
    reveal(f"{len(same)} rows of the same kernel differ by", noise_guess, 100 * (max(same) / min(same) - 1), "%")

# %% [markdown]
# On this card and at this shape the three ways of arriving, 24/240, 40/232 and even no setmaxnreg are **the same speed**: they differ by less than one kernel differs from itself. Rung
# 5's consumers wait for each other so much that some instructions more or less vanish in it; FA3's remark is about a kernel that has no such slack. One bar
# is no noise: 176 keys without setmaxnreg, the build that spills.
#
# The count must match. Tell the barrier 8 and let each consumer arrive once, and it never completes; the simulator's words:

# %%
one_arrival = patched(rung04.consumer, "t.k_empty[slot].arrive(parts.WARPS)", "t.k_empty[slot].arrive(1)")
print("\n".join(verdict(consumer=one_arrival).splitlines()[:6]))

# %% [markdown]
# Why 40/232 at all? A producer that computes addresses itself (cp.async, paged keys) needs the 40. For TMA, 24 are
# enough, and the consumers can have the rest.
#
# ### How wide a tile? Where does Q come from? How does O get out?
#
# Three more choices, each one edit of rung 5 (`bench/experiments_02.py`). Before you look:
#
# * `tile_n`: more keys per block mean fewer barriers and row statistics per key, until registers or shared memory end. Which is best?
# * Q: WGMMA reads Q's tile from shared memory again for every key block. In registers it would cost 32 of them, and save that traffic.
# * O: through shared memory and TMA (stmatrix, proxy fence, one store), or straight from the registers, 4 bytes per thread at a time.

# %%
best_guess = None  # the best tile_n at d 128
q_guess = None  # percent that Q in registers brings

# %%
widths = [n for n in range(32, 177, 16) if replace(CONFIGS["5"], tile_n=n).smem_bytes <= SMEM_LIMIT]
curve = [predicted("5", replace(CONFIGS["5"], tile_n=n)) for n in widths]
fig, (left, right) = plots.figure(2, height=4, widths=(1, 1.2))
left.plot(widths, curve, marker="o", color=plots.BLUE)
left.set(xlabel="tile_n", ylabel="TFLOP/s", ylim=(0, None), title="Simulated rung 5, d 128")
tiles = lesson_views.experiment_rows(EXPERIMENTS, "tile_n", causal=False)
lesson_views.draw_experiment(right, tiles, "Stored: rung 5, d 128, full, 8k")
plt.show()
reveal("best simulated tile_n", best_guess, widths[int(np.argmax(curve))])
fig, (left, right) = plots.figure(2, height=2.2)
q_rows = lesson_views.experiment_rows(EXPERIMENTS, "Q", causal=False)
lesson_views.draw_experiment(left, q_rows, "Q for the first product")
lesson_views.draw_experiment(
    right, lesson_views.experiment_rows(EXPERIMENTS, "epilogue", causal=False), "O to global memory"
)
plt.show()
if tiles:
    reveal("best stored tile_n", best_guess, int(max(tiles, key=lambda row: row.tflops).kernel.split()[-1]))
if len(q_rows) == 2:
    reveal("Q in registers", q_guess, 100 * (q_rows[1].tflops / q_rows[0].tflops - 1), "%")

# %% [markdown]
# `tile_n`: very narrow tiles cost a lot, as predicted. From 80 keys on the card's bars are level but for a few percent, and **the simulation is wrong** about the widest
# tiles: there its two consumers happen to fall out of step and stay so (the accident of section 6). The card shows no such luck. A simulated SM knows the
# protocol; whether two loops drift apart depends on latencies that it only estimates.
#
# The epilogue makes no difference here, since it comes once per query tile, after 64 key blocks. It is worth its lines where sequences are short, and
# because TMA clips and needs no address registers.
#
# Q: no difference either, and the budget explains why Q may stay where it is. One QK step of a warpgroup reads 64 rows of Q and 128 of K from shared memory; bytes over 128 per clock, beside the clocks of
# the product:

# %%
product = 2 * 64 * 128 * 128 / HOPPER.tensor_flops_16bit
for where, rows_read in (("shared memory", 64 + 128), ("registers", 128)):
    print(
        f"Q from {where}: shared memory busy {rows_read * 128 * 2 / HOPPER.smem_bandwidth:.0f} of {product:.0f} clocks"
    )

# %% [markdown]
# Shared memory is not the busiest unit either way, so the registers have better uses.
#
# ### The epilogue
#
# O is in registers, in the accumulator's layout: 4 bytes here, 4 bytes there. The rungs convert it to 16 bit, put it into shared memory with
# `stmatrix` (the inverse of ldmatrix, four 8 x 8 blocks at a time, swizzled), and let TMA write whole rows. The memory is **Q's own**, of the same
# warpgroup: it has read its last Q. Two barriers of 128 threads frame it, the second after the proxy fence. TMA clips the box at the last row, so no thread
# checks bounds. LSE is written by one thread of each four.

# %%
if HAS_CUTE:
    display(lesson_views.source(rung5.Attention.epilogue))

# %% [markdown]
# ## 8. The ladder so far

# %%
numbers = ["3", "4", "5"]
simulated_speed = {n: predicted(n) for n in numbers}
stored = lesson_views.speeds(RUN, ["2", *numbers], head_dim=128, causal=False, seqlen=8192)
shown = [n for n in ("2", *numbers) if n in stored or n in simulated_speed]
PAPER = 570  # TFLOP/s, H100, fp16, d 128, 8k: FA3 paper, section 3.1, before ping-pong
fig, (ax,) = plots.figure(height=3.2)
series = [("simulated: one CTA per SM, 1.83 GHz", [simulated_speed.get(n, np.nan) for n in shown], plots.LIGHT)]
if stored:
    measured = [stored[n].tflops if n in stored else np.nan for n in shown]
    series.append((f"stored: {RUN.gpu}, {RUN.date[:10]}", measured, plots.BLUE))
plots.grouped_bars(ax, [f"rung {n}: {rungs.find(n).name}" for n in shown], series)
ax.axvline(PAPER, color=plots.RED, linewidth=1.5, label="paper: before ping-pong")
ax.get_legend().remove()
fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
ax.set(xlabel="TFLOP/s, d 128, full, 8k")
plt.show()
for n in numbers:
    if n in stored:
        clock = stored[n].sm_mhz / 1e3 if stored[n].sm_mhz else HOPPER.clock_ghz
        at_clock = simulated_speed[n] * clock / HOPPER.clock_ghz
        print(
            f"rung {n}: measured {stored[n].tflops / at_clock:.2f} of the simulation at the measured clock, {clock:.2f} GHz"
        )
if not stored:
    print("no stored rows of these rungs yet: `fa3 bench` on a Hopper stores some")

# %%
if RUN:
    fig, axes = plots.figure(3, height=3.8)
    names = [rungs.find(n).file.rpartition("/")[2].removesuffix(".py") for n in ("2", *numbers)]
    for ax, (d, causal) in zip(axes, ((128, False), (128, True), (64, False)), strict=True):
        shape, title = dict(head_dim=d, causal=causal, dtype="bf16"), f"d {d}, {'causal' if causal else 'full'}"
        plots.throughput(ax, RUN, [*names, "fa2", "fa3"], **shape)
        ax.set_title(title)
        ax.tick_params(axis="x", labelsize=9)  # three axes beside each other
        at_8k = lesson_views.speeds(RUN, ["2", *numbers], seqlen=8192, **shape)
        print(f"{title}, 8k, bf16, TFLOP/s: " + ", ".join(f"rung {n} {row.tflops:.0f}" for n, row in at_8k.items()))
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    plt.show()
else:
    print("no stored row yet: `fa3 bench` on a Hopper stores some")

# %% [markdown]
# The paper's figure for this state, warp specialisation without ping-pong and without overlap inside a warpgroup, is 570 TFLOP/s (FA3 paper, section 3.1, fp16,
# d 128, 8k, H100). Cards and clocks differ, so compare ratios within one run, and do not read much into a difference of a few percent.
#
# The simulated bars are bounds of a kind: they know the waits of the protocol, and one CTA per SM. They know nothing of power (a card that works lowers its clock),
# of L2 shared by all SMs, or of the instructions around softmax. Rung 3 on the card is far
# *above* its bar: two of its CTAs share an SM. But "one CTA per SM" of section 2 is above it too, and so is rung 4: where a lone consumer waits for everything, the simulation's latencies
# are too long. Rung 5, which hides them, is close at the measured clock.
#
# Two surprises of the stored rows are worth a thought. **Without a mask, rung 3 gains nothing on rung 2 at head dim 128** (with one, a little): Triton's
# compiler emits WGMMA too (chapter 1 showed it) and fetches the next tile while it computes; rung 3 has the new instructions, and waits for each. Instructions alone are not the idea; rungs 4 and 5 are. **At head dim 64
# rungs 3 and 4 are faster than rung 5:** there softmax costs as much time as the products, several small CTAs per SM hide each other's waits, and rung 5's one CTA with two
# consumers has nobody else to hand the tensor cores to. Three consumers and turns mend that in chapter 3.
#
# What is missing to the tensor cores' peak is in the picture of section 6: the consumers meet. Chapter 3 makes them take turns.
#
# > **You may read:** *FA3 uses one or two consumer warpgroups.*
# > **What is so:** one to three. Three of them (192 query rows, 160 registers each) where S, P and O of a row are narrow enough: head dim 64.
#
# ## 9. Three questions
#
# <details><summary><b>1.</b> In rung 5, consumer 0 is much faster than consumer 1. How far can it run ahead?</summary>
#
# By the ring. A slot is refilled when *both* have released it, so consumer 0 can be at most `stages` tiles ahead, and then waits on
# "full" of a slot that consumer 1 still holds.
# </details>
#
# <details><summary><b>2.</b> Why do K and V have a ring each, and not one ring whose stages hold both?</summary>
#
# K of a block is free after QK, V only after softmax and PV. With one barrier for both, K's slot would wait for PV. Two rings let K(n+2) come as soon as QK(n) is over.
# </details>
#
# <details><summary><b>3.</b> Producer and consumers must agree on the number of key blocks. Where is that ensured?</summary>
#
# `n_blocks` is computed once, before the roles part, by `ForwardConfig.key_blocks`; both get the same value. If they computed it separately and disagreed by one, one of them
# would wait forever, or a tile would never be read: the simulator calls it "roles disagree on the number of tiles".
# </details>
#
# ## Where to go
#
# * The lab of this chapter: write these roles and kernels yourself, and find the bugs.
# * `fa3 sass 5 --d 256`, `fa3 sim 5`: other head dims without a GPU.
# * Chapter 3: ping-pong, and softmax under the products of the same warpgroup.
#
# **Sources.** Shah et al. 2024 (FlashAttention-3, arXiv:2407.08608) and its C++ source; the FlashAttention-4 source (CuTe DSL); NVIDIA,
# PTX ISA and the CUTLASS documentation (pipelines).
