"""What the lessons on CuTe rungs show again and again: sources, diffs, machine code side by side, experiments."""

import difflib
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence

from IPython.display import Markdown
from matplotlib.axes import Axes

from fa3_course import paths, plots, rungs, sass
from fa3_course.results import Row, Run
from fa3_course.rungs import Rung

ROWS_OF_SASS = ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS", "BAR", "USETMAXREG", "MUFU.EX2", "LDGSTS", "HMMA")


def source(function: object) -> Markdown:
    """The source of a function, a method or a class, as it stands in its file."""
    return Markdown(f"```python\n{textwrap.dedent(inspect.getsource(function)).rstrip()}\n```")


def rung_diff(before: str, after: str, context: int = 1) -> Markdown:
    """What rung `after` changes in rung `before`, without their head docstrings; and how many lines that are.

    A rung is given by its number, or by its file relative to the repository's root.
    """
    files = [name if name.endswith(".py") else rungs.find(name).file for name in (before, after)]
    texts = [(paths.checkout() / file).read_text(encoding="utf-8") for file in files]
    bodies = [text.split('"""', 2)[2].splitlines() for text in texts]
    before, after = (re.match(r'"""Rung (\w+):', text)[1] for text in texts)
    lines = list(difflib.unified_diff(*bodies, lineterm="", n=context))[2:]
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    shown = "\n".join("@@" if line.startswith("@@") else line for line in lines)
    return Markdown(f"Rung {before} → rung {after}: {added} lines added, {removed} removed\n\n```diff\n{shown}\n```")


def reports(numbers: Sequence[str], head_dim: int = 128, causal: bool = False) -> dict[str, sass.KernelReport]:
    """The machine code of some CuTe rungs, compiled now; no GPU is needed."""
    from fa3_course.commands.sass import report_rung

    return {f"rung {n}": report_rung(n, head_dim, causal, "bf16")[0] for n in numbers}


def sass_table(found: Mapping[str, sass.KernelReport], rows: Sequence[str] = ROWS_OF_SASS) -> Markdown:
    """Kernels side by side: registers, spills, shared memory, and how often some instructions stand in the code."""
    head = [f"| | {' | '.join(found)} |", "|---|" + "---:|" * len(found)]
    facts = {
        "registers per thread at launch": [str(r.registers) for r in found.values()],
        "bytes spilled": [str(r.spill_store if r.spill_store is not None else r.stack) for r in found.values()],
        "shared memory, bytes": ["" if r.smem is None else f"{r.smem:,}" for r in found.values()],
        "instructions": [f"{r.instructions:,}" for r in found.values()],
    }
    for name in rows:
        label = f"`{name}`: {sass.LANDMARKS[name]}" if name in sass.LANDMARKS else f"`{name}`"
        facts[label] = [str(r.count(name)) for r in found.values()]
    return Markdown("\n".join(head + [f"| {name} | {' | '.join(cells)} |" for name, cells in facts.items()]))


def experiment_rows(run: Run | None, experiment: str, **shape: object) -> list[Row]:
    """The measured rows of one experiment ("stages", "tile_n", ...), in the order in which they were measured."""
    rows = run.select(**shape) if run else []
    return [row for row in rows if row.kernel.partition(": ")[0] == experiment]


def draw_experiment(ax: Axes, rows: Sequence[Row], title: str) -> None:
    """Stored TFLOP/s of an experiment's variants as bars with quartiles; axes that say so where nothing is stored."""
    ax.set_title(title)
    if not rows:
        ax.set_axis_off()
        text = "no stored row yet\n`python -m bench.experiments_02`\non a Hopper stores some"
        ax.text(0.5, 0.5, text, ha="center", va="center", color=plots.GREY, transform=ax.transAxes)
        return
    speeds = [row.tflops for row in rows]
    low = [max(r.tflops - r.tflops * r.ms / (r.ms_p75 or r.ms), 0) for r in rows]
    high = [max(r.tflops * r.ms / (r.ms_p25 or r.ms) - r.tflops, 0) for r in rows]
    bars = ax.barh(
        range(len(rows)), speeds, xerr=[low, high], color=plots.BLUE, height=0.62, error_kw={"elinewidth": 1}
    )
    ax.bar_label(bars, [f"{speed:.0f}" for speed in speeds], padding=4, fontsize=9)
    ax.set_yticks(range(len(rows)), [row.kernel.partition(": ")[2] for row in rows], fontsize=9)
    ax.invert_yaxis()
    ax.set(xlim=(0, 1.15 * max(speeds)), xlabel="TFLOP/s")
    ax.grid(axis="y", visible=False)


def speeds(run: Run | None, numbers: Sequence[str], **shape: object) -> dict[str, Row]:
    """The stored row of each rung on one shape, those that there are."""
    found = {}
    for number in numbers:
        rung: Rung = rungs.find(number)
        name = rung.file.rpartition("/")[2].removesuffix(".py")
        row = run.one(kernel=name, direction="fwd", **shape) if run else None
        if row is not None:
            found[number] = row
    return found
