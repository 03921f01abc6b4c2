# %% [markdown]
# # Lab 2: TMA, mbarriers, WGMMA, and roles
#
# Two halves, as the chapter has two sittings. First what every asynchronous kernel is made of: bytes and banks, boxes, phase
# bits, fragments. Then roles: you write rungs 3, 4 and 5 for the simulated SM, predict what bounds them, and
# write one method of the real kernel. Between them are six **bug labs**: a kernel with one realistic fault, to be predicted,
# seen and mended.
#
# * **Write** between the markers `# region learner` and `# endregion`; replace the `raise`. Run the cell.
# * **Check** with the cell below it. A check draws fresh inputs, tests named properties, and shows the values of
#   those that do not hold. For roles it shows the simulated SM's verdict, with the line.
# * **Bug labs** hand out whole roles with a fault in them. Write your prediction into `verdict` first: the check compares it with
#   what the simulated SM says. Then mend the roles.
# * **Stuck?** `check("02.1", address, turns, hint=1)` shows the first of three hints. The whole answer is in `solutions/`.
# * **Rather in an editor?** The same stubs are files in `exercises/` and `bug_labs/`. `check("02.1")`, or `fa3 check 02.1` in
#   a terminal, checks the file; `fa3 check 02.B1` a bug lab.
# * **Late, or again?** `fa3 catchup 02.8` puts the solutions of 02.1 to 02.7 into the files, `fa3 catchup 02` all of them,
#   `fa3 reset 02.8` puts a stub back; all keep what you wrote. A check in this notebook takes the file when its cell is still
#   the untouched stub.
#
# Everything runs on a laptop but 02.14, which needs a Hopper; 02.13 needs Linux. The stored outputs show a lab that nobody
# has solved yet.
# %%
import subprocess
import sys
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np

from fa3_course import plots, results, rungs, simulated, timeline
from fa3_course.checker import answer, check, progress
from fa3_course.simulated import parts

plots.use_style()

# %% [markdown]
# # Sitting a: bytes, boxes, bits, fragments

# %% exercise="02.1"

# %% exercise="02.2"

# %% exercise="02.3"

# %% exercise="02.4"

# %% exercise="02.5"

# %% exercise="02.6"

# %% [markdown]
# # Sitting b: roles
#
# Now write kernels. A role is an `async def`; `await` is the only way to block. If you are not sure what an object can do, ask it:
# `help(hopper_sim.Role)`.
#
# The first bug lab comes before the first ring, since this bug is the one that everybody writes once.

# %% exercise="02.B1"

# %% [markdown]
# > **On the card** this kernel gives no message. It gives right numbers as long as the consumer happens to be faster than the
# > copies, and wrong ones under load. The simulated SM does not wait for the unlucky day: it asks whether anything *orders* the
# > two accesses, and nothing does.

# %% exercise="02.7"

# %% exercise="02.8"

# %% [markdown]
# ### Try it: your roles on a time line
#
# With 02.7 and 02.8 solved, this cell runs both on 128 queries (two query tiles, one after the other) and 1,024 keys of head
# dim 128, and draws the same 10,000 cycles of each. Predict: the tensor cores stand still for K, for V and for the softmax.
# Which of these gaps can a ring close, and which can it not?

# %%
one_role, ring = answer("02.7"), answer("02.8")


def run_roles(number, build, tile_m, stages):
    """A rung with somebody's own roles, on 128 queries and 1,024 keys of head dim 128: its report."""
    rng = np.random.default_rng()
    q, *kv = (rng.standard_normal((1, n, 1, 128)) for n in (128, 1024, 1024))
    config = simulated.configuration(number, 128, False, tile_m=tile_m, stages=stages)
    problem = simulated.make_problem(number, q, *kv, config=config)
    return simulated.run(number, problem, build=build).report


def build_waiting(sm, p, tile):
    sm.role("consumer0", one_role, p, parts.make_tiles(sm, p, loader="consumer0"), tile)


def build_ring(sm, p, tile):
    t = parts.make_tiles(sm, p)
    sm.role("producer", ring[0], p, t, tile, threads=parts.WARP)
    sm.role("consumer0", ring[1], 0, p, t, tile)


if one_role and ring:
    reports = {
        "02.7, everything waits": run_roles("3", build_waiting, 64, 1),
        "02.8, a ring of two slots": run_roles("4", build_ring, 64, 2),
    }
    lanes = ["producer", "consumer0", "TMA", "tensor core", "mufu"]
    fig, axes = plt.subplots(2, 1, figsize=(9, 6), layout="constrained")
    for shown, ax, (name, report) in zip((lanes[1:], lanes), axes, reports.items(), strict=True):
        timeline.gantt(timeline.from_dict(report.timeline.as_dict()).cut(1000, 11000), ax, shown)
        busy = f"tensor cores at {report.share('tensor core'):.0%} of their peak"
        ax.set(xlabel="cycles", title=f"{name}: {busy}, {report.cycles:,.0f} cycles in all")
    plt.show()
else:
    print("Solve 02.7 and 02.8 first.")

# %% exercise="02.B2"

# %% [markdown]
# > **On the card** the consumer multiplies what the slot held one round earlier: right shapes, wrong numbers. If a load happens
# > to land before the stale wait, the same bit is the one that blocks, and the kernel hangs. A test that finds it has more than one
# > round, and a timeout.

# %% exercise="02.B3"

# %% [markdown]
# > **On the card** the count of outstanding bytes decides. Announce too few, and a phase may be complete while bytes are still on
# > their way, or the surplus spoils the count of the next phase; announce too many, and everybody hangs. Kernels of this
# > course compute the bytes in one place, `ForwardConfig.k_bytes`, and both the barrier and the copy use it.

# %% exercise="02.B5"

# %% [markdown]
# > **On the card** TMA needs some hundred cycles to bring the next tile, and the product that still reads the slot is usually
# > over by then. "Usually" is what the verdict is about.

# %% exercise="02.9"

# %% exercise="02.10"

# %% exercise="02.B6"

# %% [markdown]
# > **On the card** this hangs: the consumer waits for a phase that nobody will complete.

# %% exercise="02.11"

# %% exercise="02.B4"

# %% [markdown]
# > **On the card** a missing fence shows nothing, most of the time. It stays a fault: nothing promises that TMA sees what the
# > threads wrote, and the next compiler, clock or card need not be as kind.
#
# ### Try it: the same faults on a Hopper
#
# [`bug_labs/twins.py`](bug_labs/twins.py) has the six faults in CuTe DSL: rung 4's kernel with one line wrong. Some give wrong numbers,
# some hang, some give right numbers today; write down which, before you run one. A hung kernel never gives its process back: so
# each runs in a process of its own, which a watchdog ends.

# %%
TWIN = None  # "B1" to "B6"
if TWIN and rungs.has_hopper():
    done = subprocess.run([sys.executable, "bug_labs/twins.py", TWIN], capture_output=True, text=True)
    print(done.stdout or done.stderr)
else:
    print("Choose a twin, on a machine with a Hopper; in a terminal: python bug_labs/twins.py B1")

# %% exercise="02.12"

# %% [markdown]
# ### Try it: your bound, and what three rungs make of it
#
# With 02.10 and 02.12 solved: the ceilings that you computed for head dims 64, 128 and 256 (two consumers), and beside
# them the share of the tensor cores' peak that rungs 3, 4 and 5 reach on the simulated SM, start and end included.
# Which of the gaps is left for chapter 3?

# %%
bound, build_two = answer("02.12"), answer("02.10")
if bound and build_two:
    _, ceiling = bound
    dims, bars = (64, 128, 256), {"3": [], "4": [], "5": []}
    rng = np.random.default_rng()
    for d in dims:
        q, *kv = (rng.standard_normal((1, n, 1, d)) for n in (128, 1024, 1024))
        for number, shares in bars.items():
            build = build_two if number == "5" else None
            problem = simulated.make_problem(number, q, *kv)
            shares.append(simulated.run(number, problem, build=build).report.share("tensor core"))
    fig, (ax,) = plots.figure(height=3.8)
    ceilings = {
        f"your ceiling {name} overlap": (
            [ceiling(2, simulated.TILE_N[d], d, overlap) for d in dims],
            colour,
        )
        for overlap, name, colour in ((True, "with", plots.RED), (False, "without", plots.ORANGE))
    }
    points = {
        "rung 3": (bars["3"], plots.GREY, "s"),
        "rung 4": (bars["4"], plots.SKY, "D"),
        "rung 5, yours": (bars["5"], plots.BLUE, "o"),
    }
    plots.levels(ax, [f"d {d}" for d in dims], ceilings, points)
    ax.set(ylabel="share of the tensor cores' peak", ylim=(0, 1.4), title="Ceilings, and rungs on the simulated SM")
    plt.show()
else:
    print("Solve 02.10 and 02.12 first.")

# %% [markdown]
# # The card's language

# %% exercise="02.13"

# %% [markdown]
# ### Try it: stages and tiles
#
# What do more slots buy, and wider tiles? Predict first. Without a Hopper this cell asks the simulated SM for rung 5
# at head dim 128; with one, it also measures the kernel (2 batches, 4,096 tokens, 8 heads, fp16). Combinations that do
# not fit say which sum is too large.


# %%
def simulated_cycles(config):
    """Cycles of one query tile per 128 keys, on the simulated SM."""
    cycles = []
    for keys in (512, 1536):
        q, *kv = (np.random.standard_normal((1, n, 1, 128)) for n in (128, keys, keys))
        cycles.append(simulated.simulate("5", q, *kv, config=config).report.cycles)
    return (cycles[1] - cycles[0]) / 8


def card_tflops(stages, tile_n):
    """TFLOP/s of rung 5 on this machine's Hopper."""
    import torch
    import triton

    from fa3_course import rung_host

    rung5 = rungs.find("5").module()
    config = replace(rung5.make_config(128, False), stages=stages, tile_n=tile_n)
    q, k, v = (torch.randn(2, 4096, 8, 128, dtype=torch.float16, device="cuda") for _ in range(3))
    ms = triton.testing.do_bench(lambda: rung_host.run(rung5.Attention, config, q, k, v), return_mode="median")
    return 4 * 2 * 8 * 4096**2 * 128 / ms / 1e9


for stages in (1, 2, 4):
    for tile_n in (32, 64, 128):
        try:
            config = simulated.configuration("5", 128, False, stages=stages, tile_n=tile_n)
        except ValueError as error:
            said = str(error).split(": ", 1)[1].split(". ")[0]
        else:
            said = f"{simulated_cycles(config):,.0f} simulated cycles per 128 keys"
            if rungs.has_hopper():
                said += f", {card_tflops(stages, tile_n):.0f} TFLOP/s on this card"
        print(f"{stages} stages of {tile_n:3} keys: {said}")

run = results.experiments("02")
for row in run.rows if run else ():
    if row.kernel.startswith(("stages", "tile_n")) and row.measured:
        print(f"stored, {run.gpu}, {row.kernel}: {row.tflops:.0f} TFLOP/s")

# %% exercise="02.14"

# %% [markdown]
# ### What you have solved

# %%
board = progress("02")
