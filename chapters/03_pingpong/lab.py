# %% [markdown]
# # Lab 3: turns, overlap, plans
#
# You give consumers turns, let a softmax run under a product, compute what fits, and plan who does which tile. The order is the lesson's. In between are six **bug
# labs**: a kernel with one realistic fault, to be predicted, seen and mended.
#
# * **Write** between the markers `# region learner` and `# endregion`; replace the `raise`. Run the cell.
# * **Check** with the cell below it. A check draws fresh inputs, tests named properties, and shows the values of
#   those that do not hold. For roles it shows the simulated SM's verdict, with the line.
# * **Bug labs** hand out whole roles with a fault in them. Write your prediction into `verdict` first: the check compares it with
#   what the simulated SM says. Then mend the roles.
# * **Stuck?** `check("03.1", book, calls, hint=1)` shows the first of three hints. The whole answer is in `solutions/`.
# * **Rather in an editor?** The same stubs are files in `exercises/` and `bug_labs/`. `check("03.1")`, or `fa3 check 03.1` in
#   a terminal, checks the file; `fa3 check 03.B1` a bug lab.
# * **Late, or again?** `fa3 catchup 03.4` puts the solutions of 03.1 to 03.3 into the files, `fa3 catchup 03` all of them,
#   `fa3 reset 03.4` puts a stub back; all keep what you wrote. A check in this notebook takes the file when its cell is still
#   the untouched stub.
#
# Everything runs on a laptop. The stored outputs show a lab that nobody has solved yet.
# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display

from fa3_course import notes, plots, simulated, timeline
from fa3_course.checker import answer, check, progress
from fa3_course.simulated import parts, rung05, rung07
from fa3_lib.config import forward_config
from hopper_sim import HOPPER

plots.use_style()

# %% [markdown]
# # Turns

# %% exercise="03.1"

# %% exercise="03.2"

# %% exercise="03.B1"

# %% [markdown]
# > **On the card** the last consumer waits for ever, and the kernel hangs at its very end. In a persistent kernel it hangs at the end of the
# > first tile. The arrival that is left over is not a blemish: it is the state in which the next tile finds the barriers.

# %% exercise="03.B4"

# %% [markdown]
# > **On the card** nobody checks ids. The hardware adds up the threads of both meanings: somebody goes on too early, somebody else waits for
# > ever. Kernels of this course list their barriers in one enum.

# %% [markdown]
# # Overlap inside a warpgroup

# %% exercise="03.3"

# %% exercise="03.B2"

# %% [markdown]
# > **On the card** compilers see a part of this: ptxas notices when registers of a product in flight are touched, and may put every
# > product behind a wait of its own, with a warning about serialised WGMMAs. Then the numbers are right, and the overlap is gone.

# %% exercise="03.B3"

# %% [markdown]
# > **On the card** TMA needs some hundred cycles to bring the next V, and the product that still reads the slot is usually over by then.

# %% [markdown]
# ### Try it: your consumers on a time line
#
# With 03.2 and 03.3 solved: both on 128 queries and 2,048 keys of head dim 128, the same 6,000 cycles from the middle of each run. Predict: who
# has the tensor cores while consumer 0 does its softmax, in the first picture and in the second? And what would both ideas
# together bring?

# %%
turns, overlap = answer("03.2"), answer("03.3")


def run_consumer(consumer, producer, ping_pong):
    """128 queries, 2,048 keys of head dim 128, two consumers of this kind: the report."""
    config = simulated.configuration("6", 128, False)
    rng = np.random.default_rng()
    q, *kv = (rng.standard_normal((1, n, 1, 128)) for n in (128, 2048, 2048))

    def build(sm, p, tile):
        t = parts.make_tiles(sm, p)
        t = replace(t, turns=parts.make_turns(sm, p.config)) if ping_pong else t
        sm.role("producer", producer, p, t, tile, threads=parts.WARP)
        for me, name in enumerate(parts.consumer_names(p.config)):
            sm.role(name, consumer, me, p, t, tile)

    return simulated.simulate("6", q, *kv, config=config, build=build).report


if turns and overlap:
    reports = {
        "03.2, turns": run_consumer(turns, rung05.producer, True),
        "03.3, softmax under PV": run_consumer(overlap, rung07.producer, False),
    }
    fig, axes = plt.subplots(2, 1, figsize=(9, 6), layout="constrained")
    for ax, (name, report) in zip(axes, reports.items(), strict=True):
        first = report.cycles / 2 - 3000
        lines = timeline.from_dict(report.timeline.as_dict()).cut(first, first + 6000)
        timeline.gantt(lines, ax, ["consumer0", "consumer1", "tensor core", "mufu"])
        busy = f"tensor cores at {report.share('tensor core'):.0%} of their peak"
        ax.set(xlabel="cycles", title=f"{name}: {busy}, {report.cycles:,.0f} cycles in all")
    plt.show()
else:
    print("Solve 03.2 and 03.3 first.")

# %% [markdown]
# # Sums

# %% exercise="03.4"

# %% exercise="03.5"

# %% [markdown]
# ### Try it: which tile, how many consumers?
#
# With 03.4 and 03.5 solved: for each head dim and 1, 2 and 3 consumers, the widest key block that fits, and the share of the tensor cores' peak that your model
# leaves with it. The softmax of a block takes its exponentials' time, and half as long again for everything else (an assumption; change it).
# Which row would you build? The library's choice stands beside it.

# %%
model, room = answer("03.4"), answer("03.5")
BESIDES = 0.5  # of the exponentials' time: maximum, sum, conversion

if model and room:
    (work, period, enough), (_, _, widest) = model, room
    for d in (64, 128, 192, 256):
        for consumers in (1, 2, 3):
            tile_n = widest(d, consumers, 2, False, True)
            if not tile_n:
                print(f"d {d:3}, {consumers} consumers: nothing fits")
                continue
            product, mufu = work(d, tile_n)
            softmax = (1 + BESIDES) * mufu
            share = consumers * product / period(consumers, product, softmax, mufu)
            chosen = forward_config(d, d, False)
            mark = "  <- the library's number of consumers" if chosen.consumer_warpgroups == consumers else ""
            print(
                f"d {d:3}, {consumers} consumers x {tile_n:3} keys: {share:4.0%} of the peak, "
                f"{enough(product, softmax, mufu)} are enough{mark}"
            )
else:
    print("Solve 03.4 and 03.5 first.")

# %% [markdown]
# # Persistent: from tile to tile

# %% exercise="03.6"

# %% exercise="03.B5"

# %% [markdown]
# > **On the card** this hangs, or multiplies what another round has left in the slot, depending on the lengths. Tests with one tile per
# > CTA, or with lengths that fill whole rounds of the rings, find nothing.

# %% exercise="03.B6"

# %% [markdown]
# > **On the card** the next Q arrives while the output is staged or leaves: rows of O that are queries, or queries that are rows of O,
# > not the same ones in every run.

# %% [markdown]
# # Plans

# %% exercise="03.7"

# %% exercise="03.8"

# %% [markdown]
# ### Try it: three plans for a causal head
#
# With 03.7 and 03.8 solved: the share of the SMs' time that is work, on a Hopper, for causal self-attention with 128-row tiles. Predict: at which
# numbers of sequences does each line fall?

# %%
waves, pairs = answer("03.7"), answer("03.8")
if waves and pairs:
    (rounds, at_work, _), (_, walk) = waves, pairs
    sms, m_blocks = HOPPER.sms, 32  # 4,096 queries
    sequences = np.arange(1, 65)

    def balance(loads):
        return 100 * np.mean(loads) / np.max(loads)

    def dealt(n):
        tiles = [m + 1 for _ in range(n) for m in range(m_blocks)]
        return balance([sum(tiles[cta::sms]) for cta in range(sms)])

    def paired(n):
        return balance([sum(m + 1 for m, _ in walk(m_blocks, n, cta, sms)) for cta in range(sms)])

    fig, (ax,) = plots.figure(height=3)
    lines = {
        "equal tiles (no mask)": ([100 * at_work(int(n) * m_blocks, sms) for n in sequences], plots.GREY),
        "causal, as they come": ([dealt(n) for n in sequences], plots.ORANGE),
        "causal, your pairs": ([paired(n) for n in sequences], plots.BLUE),
    }
    for name, (values, colour) in lines.items():
        ax.plot(sequences, values, color=colour, label=name)
    ax.set(xlabel="sequences (heads x batch)", ylabel="percent", ylim=(0, 101), title=f"{sms} SMs at work")
    ax.legend()
    plt.show()
else:
    print("Solve 03.7 and 03.8 first.")

# %% [markdown]
# # Beyond FA3
#
# Two ideas that are right, and lost on Hopper; and the sum that would have warned of one of them.

# %% exercise="03.9"

# %% exercise="03.10"

# %% exercise="03.11"

# %% [markdown]
# ### Try it: what your estimate says about the idea
#
# With 03.11 solved: the profile of our notes at head dim 64. A quarter of the exponentials by polynomial takes a quarter from XU (the MUFU),
# and adds issue slots, at about seven more instructions for each exponential moved. Predict the gain. What was measured stands below it: decide how
# much of it the estimate saw coming.

# %%
profile = answer("03.11")
if profile:
    binding, ceiling, gain = profile
    shares = notes.profiles(notes.find("profile"))["d64 192x128"]
    print(f"shares: {shares}; binds: {binding(shares)}; without any waiting {ceiling(shares):.2f} times as fast")
    # XU's share is that of its own rate; an instruction elsewhere takes issue slots at the issue rate
    per_exponential = 7 * HOPPER.mufu / HOPPER.issue * shares["XU"] / shares["issue"]
    for part in (1 / 8, 1 / 4, 1 / 2):
        factors = {"XU": 1 - part, "issue": 1 + part * per_exponential}
        print(f"{part:.1%} by polynomial: {gain(shares, factors):.3f} times as fast")
    display(Markdown(notes.find("software exp2").quote()))
else:
    print("Solve 03.11 first.")

# %% [markdown]
# ### What you have solved

# %%
board = progress("03")
