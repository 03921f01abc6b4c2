# %% [markdown]
# # Lab 3: turns, overlap, plans
#
# You give two consumers turns, let a softmax run under a product, and compute what fits. The order is the lesson's. In between are six **bug
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

from fa3_course import plots, simulated, timeline
from fa3_course.checker import answer, check, progress
from fa3_course.simulated import parts, rung05, rung07

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
# > **On the card** nobody checks ids. The hardware adds up the threads of both barriers, one opens too early, and the other one never does;
# > with other counts neither hangs, and an output is stored before it is complete. Kernels of this course list their barriers in one enum.

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
        "03.3, softmax under PV, no turns": run_consumer(overlap, rung07.producer, False),
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
# # Persistent

# %% exercise="03.B5"

# %% [markdown]
# > **On the card** this hangs, or multiplies what another round has left in the slot, depending on the lengths. Tests with one tile per
# > CTA, or with lengths that fill whole rounds of the rings, find nothing.

# %% exercise="03.B6"

# %% [markdown]
# > **On the card** the next Q arrives in the middle of the output: some rows of O are queries. Which ones changes from run to run.

# %% [markdown]
# ### What you have solved

# %%
board = progress("03")
