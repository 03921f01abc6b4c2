"""What `fa3 demo` shows: the table, the look inside the compiled kernel, the plot."""

import os
import sys
from pathlib import Path

import torch
from rich.console import Console, Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from fa3_course import plots, rungs, sass

WORDS_SHOWN = 48  # of the text, in the attention map: what fits at a readable size

# --- terminal --------------------------------------------------------------------------------------------------------


def report(
    console: Console,
    data,
    outcomes,
    yardstick_error: float,
    kernel: sass.KernelReport | None,
    no_kernel: str,
    plot: Path,
) -> None:
    """Prints everything that the demo found, and the next thing to do."""
    layers, tokens, heads, head_dim = data.q.shape
    table = Table(box=None, pad_edge=False, title="Attention on a real text", title_justify="left", title_style="bold")
    table.add_column("rung", no_wrap=True)
    table.add_column("what it adds")
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("speed", justify="right", no_wrap=True)
    table.add_column("where it ran")
    for o in (o for o in outcomes if o.error is not None):
        colour = "green" if o.allowed else "red"
        speed = f"{o.tflops:.0f} TFLOP/s" if o.tflops else _time(o.ms)
        table.add_row(_name(o), o.idea, f"[{colour}]{o.error:.1e}[/]", speed, escape(o.where))
    console.print(table)
    reasons: dict[str, list[str]] = {}
    for o in (o for o in outcomes if o.error is None):
        reasons.setdefault(o.where, []).append(_name(o))
    for reason, names in reasons.items():
        console.print(f"[yellow]Not here[/]: {', '.join(names)}: {escape(reason)}")
    console.print(
        f"[dim]Input: {data.source}; {layers} layers x {heads} heads x {tokens} tokens of {head_dim}, fp16. Error: relative, "
        f"against fp64; PyTorch step by step in fp16 has {yardstick_error:.1e}.[/]"
    )
    if any(o.tflops for o in outcomes):
        from fa3_course.commands.demo import GPU_SHAPE

        console.print(
            f"[dim]TFLOP/s: fp16, (batch, seqlen, heads, head_dim) = {GPU_SHAPE}, no mask; `fa3 bench` measures with care.[/]"
        )
    wrong = [o for o in outcomes if o.allowed is False]
    for o in wrong:
        console.print(f"[red]rung {o.number} is wrong: its largest error is more than twice PyTorch's[/]")
    console.print()
    if kernel is None:
        console.print(f"[yellow]The CuTe kernel was not compiled: {escape(no_kernel)}[/]")
    else:
        console.print("[bold]fa3_lib's kernel, compiled here for Hopper (sm_90a)[/]: head_dim 128, fp16, no mask")
        console.print(Padding(kernel_table(kernel), (0, 0, 0, 2)))
    console.print(f"\nPlot: {_short(plot)}", soft_wrap=True)
    console.print("\n[bold]Next[/]")
    for command, what in next_steps():
        console.print(f"  [cyan]{command}[/]\n    {what}")


def kernel_table(kernel: sass.KernelReport) -> Group | Table:
    """Registers, spills, shared memory and the landmarks that occur, one line each."""
    rows = Table(box=None, pad_edge=False, show_header=False)
    rows.add_column(justify="right", style="bold")
    rows.add_column()
    rows.add_row(
        str(kernel.registers),
        "registers per thread at launch" + (", then moved between warpgroups" if kernel.count("USETMAXREG") else ""),
    )
    if kernel.spill_store is not None:
        rows.add_row(str(kernel.spill_store + kernel.spill_load), "bytes spilled to local memory")
    if kernel.smem is not None:
        rows.add_row(f"{kernel.smem:,}", "bytes of shared memory, of 232,448")
    for name, meaning in sass.LANDMARKS.items():
        if n := kernel.count(name):
            rows.add_row(str(n), f"{name:<10} {meaning}")
    rows.add_row(f"{kernel.instructions:,}", "instructions in all (a loop body counts once)")
    problems = kernel.problems()
    if not problems:
        return rows
    return Group(rows, *(f"[red]{escape(p)}[/]" for p in problems))


def next_steps() -> list[tuple[str, str]]:
    """(command, what it does), the first thing first."""
    jupyter = Path(sys.executable).with_name("jupyter")
    jupyter = _short(jupyter) if jupyter.exists() else "jupyter"
    fa3 = _short(Path(sys.executable)) + " -m fa3_course"
    steps = [
        (f"{jupyter} lab chapters/01_online_softmax/lesson.ipynb", "read chapter 1"),
        (f"{fa3} check 01.1", "check your first exercise"),
    ]
    if rungs.has_hopper():
        steps.append((f"{fa3} bench --quick", "measure the ladder on this card"))
    else:
        steps.append((f"{fa3} sim 5", "run a warp-specialised kernel on the simulated Hopper"))
    return steps


def _short(path: Path) -> str:
    """The path as one would type it here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _name(outcome) -> str:
    return outcome.name if outcome.number == "lib" else f"{outcome.number}  {outcome.name}"


def _time(ms: float) -> str:
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms" if ms >= 1 else f"{ms * 1e3:.0f} us"


# --- plot ------------------------------------------------------------------------------------------------------------


def draw(data, lse: torch.Tensor, outcomes, yardstick_error: float, path: Path) -> None:
    """One PNG: what a head of the real model looks at, each rung's error, and on a GPU each rung's speed."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    speed = [o for o in outcomes if o.tflops]
    with rc_context():
        plots.use_style()
        figure = Figure(figsize=(13, 7.4))
        left, right = figure.subfigures(1, 2, width_ratios=(1.45, 1))
        _draw_map(left.subplots(), data, lse)
        axes = right.subplots(2 if speed else 1, 1, squeeze=False)[:, 0]
        _draw_errors(axes[0], [o for o in outcomes if o.error is not None], yardstick_error)
        if speed:
            bars = axes[1].barh([_name(o) for o in speed], [o.tflops for o in speed], color=plots.BLUE, height=0.55)
            axes[1].bar_label(bars, fmt="%.0f", padding=4)
            _bare(axes[1], f"Speed on {torch.cuda.get_device_name()}, TFLOP/s")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def strongest_echo(data) -> tuple[int, int, int]:
    """(layer, head, first token): the head and the stretch of text with most attention on the same word elsewhere in it."""
    words = [t if t.removeprefix("##").isalnum() else None for t in data.tokens]
    same = torch.tensor([[a is not None and a == b for b in words] for a in words]).fill_diagonal_(False)
    echo = _weights(data) * same  # (layers, heads, tokens, tokens)
    starts = range(len(words) - WORDS_SHOWN + 1)
    windows = [echo[:, :, i : i + WORDS_SHOWN, i : i + WORDS_SHOWN].sum((-1, -2)) for i in starts]
    best = int(torch.stack(windows, dim=-1).argmax())
    layer_head, start = divmod(best, len(starts))
    return *divmod(layer_head, echo.shape[1]), start


def _weights(data) -> torch.Tensor:
    q, k = (x.float().transpose(1, 2) for x in (data.q, data.k))  # (layers, heads, tokens, head_dim)
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1)


def _draw_map(ax, data, lse: torch.Tensor) -> None:
    layer, head, first = strongest_echo(data)
    shown = slice(first, first + WORDS_SHOWN)
    q, k = data.q[layer, shown, head].double(), data.k[layer, shown, head].double()
    # any block of the weights comes from its own scores and the rows' LSE, as in the backward pass
    weights = torch.exp(q @ k.T * q.shape[-1] ** -0.5 - lse[layer, head, shown, None])
    # the few large weights would hide the others
    ax.imshow(weights.numpy(), cmap="Blues", vmin=0, vmax=float(weights.quantile(0.995)), aspect="equal")
    words = [t.removeprefix("##") for t in data.tokens[shown]]
    ax.set_xticks(range(len(words)), words, rotation=90, fontsize=8)
    ax.set_yticks(range(len(words)), words, fontsize=8)
    ax.set(xlabel="key", ylabel="query")
    ax.set_title("What one head of a real transformer looks at: the same words again")
    ax.tick_params(length=0)
    ax.grid(False)


def _draw_errors(ax, outcomes, yardstick_error: float) -> None:
    names = [_name(o) for o in outcomes]
    bars = ax.barh(
        names,
        [o.error for o in outcomes],
        color=[plots.GREEN if o.allowed else plots.RED for o in outcomes],
        height=0.55,
    )
    ax.bar_label(bars, [f"{o.error:.1e}" for o in outcomes], padding=4)
    ax.axvline(yardstick_error, color="#666666", linewidth=1.5)
    ax.annotate(
        "PyTorch, step by step in fp16", (yardstick_error, 1.0), xycoords=("data", "axes fraction"), xytext=(-4, 4),
        textcoords="offset points", ha="right", fontsize=9, color="#666666",
    )  # fmt: skip
    ax.set_xlim(0, 1.2 * max([yardstick_error, *(o.error for o in outcomes)]))
    _bare(ax, "Relative error against fp64, on that text\n")


def _bare(ax, title: str) -> None:
    ax.invert_yaxis()
    ax.set_title(title)
    ax.tick_params(axis="y", length=0)
    ax.grid(False)
    ax.set_xticks([])  # every bar carries its number
    for side in ("top", "right", "bottom", "left"):
        ax.spines[side].set_visible(False)
