"""The measured ladder: one table and one plot from the stored rows of one run, for the terminal and for the README."""

import io
import re
from dataclasses import dataclass
from pathlib import Path

from fa3_course import comparison, fp8_tables, paths, results, rungs
from fa3_course.results import Row, Run

PEERS = ("fa2", "cudnn", "fa3", "fa4")  # they stand after the course's own kernels
YARDSTICK = "cublas"
README_BLOCK = re.compile(r"<!-- ladder:begin[^>]*-->\n.*?<!-- ladder:end -->", re.DOTALL)
PLOT = "bench/ladder.png"  # relative to the root, shown in the README


@dataclass(frozen=True)
class Column:
    """One shape of the table: head dim and mask at the table's sequence length."""

    head_dim: int
    causal: bool

    def __str__(self) -> str:
        return f"d{self.head_dim} {'causal' if self.causal else 'full'}"


@dataclass(frozen=True)
class Line:
    """One kernel in one dtype.

    Args:
        label: as people read it. kernel, dtype: as in the rows. ours: a rung or the library.
        cells: the row of each column that was measured.
        rows: every measured row of this kernel and dtype, whatever the shape.
    """

    label: str
    kernel: str
    dtype: str
    ours: bool
    cells: dict[Column, Row]
    rows: tuple[Row, ...]

    @property
    def host_us(self) -> float | None:
        """Host time of an eager call in microseconds: the least over the shapes."""
        return min((r.host_us for r in self.rows if r.host_us is not None), default=None)

    @property
    def error(self) -> float | None:
        """The largest relative error that was seen before timing."""
        return max((r.error for r in self.rows if r.error is not None), default=None)

    @property
    def stale(self) -> bool:
        """True if the kernel's source is no longer the one that was measured."""
        return any(r.is_stale(paths.checkout()) for r in self.rows)


@dataclass(frozen=True)
class Ladder:
    """The table of one run: lines in the course's order, columns by head dim and mask, at one sequence length."""

    run: Run
    seqlen: int
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]

    @property
    def cublas(self) -> dict[str, float]:
        """TFLOP/s of the same run's cuBLAS by dtype: what "percent" refers to."""
        return {r.dtype: r.tflops for r in self.run.select(kernel=YARDSTICK)}

    def share(self, row: Row) -> float | None:
        """Speed as a fraction of the same run's cuBLAS in the same precision, None without such a row."""
        top = self.cublas.get(row.dtype)
        return row.tflops / top if top else None

    @property
    def stale(self) -> list[Line]:
        return [line for line in self.lines if line.stale]


def chosen_run(name: str | None = None) -> Run | None:
    """The stored run with this file name (with or without .json), or the newest one on a GPU; None when there is none.

    Raises:
        FileNotFoundError: when `name` is given and is not stored.
    """
    if name is None:
        return results.latest(results.load(paths.results()))
    path = paths.results() / f"{name.removesuffix('.json')}.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in paths.results().glob("*.json"))) or "none"
        raise FileNotFoundError(f"no stored run {name!r}; there are: {known}")
    return results.read(path)


def ladder(run: Run, seqlen: int | None = None) -> Ladder:
    """The ladder of a run.

    Args:
        run: a stored run.
        seqlen: sequence length of the table; by default 16k, or the longest that was measured.

    Raises:
        ValueError: when nothing was measured at `seqlen`.
    """
    forward = run.select(direction="fwd")
    lengths = sorted({r.seqlen for r in forward})
    if seqlen is None:
        seqlen = 16_384 if 16_384 in lengths else max(lengths, default=0)
    shown = [r for r in forward if r.seqlen == seqlen]
    if not shown:
        raise ValueError(f"no rows at seqlen {seqlen}; there are: {', '.join(map(str, lengths)) or 'none'}")
    columns = tuple(sorted({Column(r.head_dim, r.causal) for r in shown}, key=lambda c: (c.head_dim, c.causal)))
    lines = []
    for kernel, dtype in dict.fromkeys((r.kernel, r.dtype) for r in forward):
        rows = tuple(r for r in forward if (r.kernel, r.dtype) == (kernel, dtype))
        cells = {Column(r.head_dim, r.causal): r for r in rows if r.seqlen == seqlen}
        lines.append(Line(_label(rows[0]), kernel, dtype, kernel not in PEERS, cells, rows))
    return Ladder(run, seqlen, columns, tuple(sorted(lines, key=_order)))


def _label(row: Row) -> str:
    if row.rung is not None:
        names = {rung.number: rung.name for rung in (*rungs.RUNGS, rungs.RUNG10)}
        return f"rung {row.rung}: {names.get(row.rung, row.kernel)}"
    label = {
        "fa3_lib": "fa3_lib",
        "fa2": "FA2 (PyTorch)",
        "cudnn": "cuDNN",
        "fa3": "FA3 (C++)",
        "fa4": "FA4 (CuTe DSL)",
    }.get(row.kernel, row.kernel)
    return f"{label}, fp8" if row.dtype == "fp8" else label


def _order(line: Line) -> tuple:
    """Rungs by number, the library, peers; fp8 after 16 bit."""
    fp8 = line.dtype == "fp8"
    if line.kernel in PEERS:
        return (2, fp8, PEERS.index(line.kernel))
    rung = line.rows[0].rung
    if rung is None:
        return (1, fp8, 0)
    digits = re.match(r"\d+", rung)
    return (0, fp8, int(digits[0]) if digits else 0, rung)


# --- README ----------------------------------------------------------------------------------------------------------


def markdown(table: Ladder) -> str:
    """The table in Markdown: TFLOP/s and, in brackets, the share of the same run's cuBLAS."""
    run = table.run
    head = ["", *map(str, table.columns), "host per call", "error"]
    lines = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for line in table.lines:
        cells = [_cell(table, line.cells.get(column)) for column in table.columns]
        host = f"{line.host_us:.0f} us" if line.host_us is not None else ""
        error = f"{line.error:.0e}" if line.error is not None else ""
        name = f"**{line.label}**" if line.kernel == "fa3_lib" else line.label
        lines.append(f"| {' | '.join([name, *cells, host, error])} |")
    yardstick = ", ".join(f"{dtype} {tflops:.0f}" for dtype, tflops in sorted(table.cublas.items()))
    dirty = ", with changes" if run.dirty else ""
    commit = f", commit {run.commit[:10]}{dirty}" if run.commit else ""
    lines.append("")
    lines.append(
        f"TFLOP/s (share of the same run's cuBLAS: {yardstick or 'not measured'}) at sequence length {table.seqlen}; forward, "
        f"kernel time. {run.gpu}, driver {run.driver}, CUDA {run.cuda}, PyTorch {run.torch}, {run.date[:10]}{commit}. "
        "Error: relative, against fp64. Host: one eager call on a tiny shape. A dash: not measured in this run."
    )
    if table.stale:
        changed = ", ".join(line.label for line in table.stale)
        lines[-1] += f" The source of {changed} has changed since, and these rows are the old version's."
    return "\n".join(lines)


def _cell(table: Ladder, row: Row | None) -> str:
    if row is None:
        return "-"
    share = table.share(row)
    return f"{row.tflops:.0f}" + (f" ({share:.0%})" if share is not None else "")


def readme_block(run: Run | None) -> str:
    """What stands between the README's ladder marks, marks included."""
    if run is None:
        body = "No run is stored yet: `fa3 bench` on a Hopper writes one, then `fa3 ladder --readme` fills this place."
    else:
        body = f"![The measured ladder]({PLOT})\n\n{markdown(ladder(run))}"
        if every_shape := comparison.markdown(run):
            body += (
                f"\n\n{comparison.summary(run)}\n\n<details><summary>Every shape, every peer (TFLOP/s)</summary>\n\n"
            )
            body += f"{every_shape}\n\n</details>"
    fp8_runs = (results.experiments(name, paths.results()) for name in ("fp8", "fp8error"))
    if in_fp8 := fp8_tables.markdown(*fp8_runs):
        body += f"\n\n{in_fp8}"
    return f"<!-- ladder:begin, written by `fa3 ladder --readme` -->\n{body}\n<!-- ladder:end -->"


def update_readme(run: Run | None) -> bool:
    """Rewrites the README's block and the plot that it shows; True when the text changed."""
    readme = paths.checkout() / "README.md"
    old = readme.read_text(encoding="utf-8")
    if len(README_BLOCK.findall(old)) != 1:
        raise ValueError("README.md must hold one block between <!-- ladder:begin ... --> and <!-- ladder:end -->")
    new = README_BLOCK.sub(lambda _: readme_block(run), old)
    readme.write_text(new, encoding="utf-8")
    if run is not None:
        draw(ladder(run), paths.checkout() / PLOT)
    return new != old


# --- plot ------------------------------------------------------------------------------------------------------------


def draw(table: Ladder, path: Path) -> None:
    """Bars of the ladder at head dim 128 (or the first), and speed against sequence length where there are lengths."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from fa3_course import plots

    main = next((c for c in table.columns if c.head_dim == 128 and not c.causal), table.columns[0])
    bars = [line for line in table.lines if main in line.cells]
    curves = [line for line in table.lines if len(_by_length(line, main)) > 2 and line.dtype != "fp8"]
    heights = [0.6 + 0.36 * max(len(bars), 3), 3.8][: 2 if curves else 1]
    with rc_context():
        plots.use_style()
        figure = Figure(figsize=(plots.WIDTH, sum(heights) + 0.5))
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        _draw_bars(axes[0], table, bars, main)
        if curves:
            _draw_curves(axes[1], curves, main)
        png = io.BytesIO()
        # which run it shows, for the test that compares README and rows
        figure.savefig(png, metadata={"Source": table.run.path.name if table.run.path else ""})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(plots.with_palette(png.getvalue(), colours=96))


def _colour(line: Line) -> str:
    from fa3_course import plots

    known = plots.KERNELS.get(f"{line.kernel}/{line.dtype}") or plots.KERNELS.get(line.kernel, ("", plots.GREY, ""))
    return known[1]


def _draw_bars(ax, table: Ladder, lines: list[Line], column: Column) -> None:
    rows = [line.cells[column] for line in lines]
    work = [r.tflops * r.ms for r in rows]  # 1e9 operations: the quartiles of time become those of speed
    low = [max(r.tflops - w / (r.ms_p75 or r.ms), 0) for r, w in zip(rows, work, strict=True)]
    high = [max(w / (r.ms_p25 or r.ms) - r.tflops, 0) for r, w in zip(rows, work, strict=True)]
    speeds = [r.tflops for r in rows]
    drawn = ax.barh(
        range(len(lines)),
        speeds,
        xerr=[low, high],
        color=[_colour(line) for line in lines],
        height=0.62,
        error_kw={"elinewidth": 1, "ecolor": "#333333"},
    )
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    ax.bar_label(drawn, [f"{speed:.0f}" for speed in speeds], padding=5, fontsize=10, bbox=box)
    ax.set_yticks(range(len(lines)), [line.label for line in lines])
    ax.invert_yaxis()
    yardsticks = {dtype: top for dtype, top in table.cublas.items() if any(x.dtype == dtype and x.ours for x in lines)}
    for dtype, top in yardsticks.items():
        ax.axvline(top, color="#333333", linestyle="--", linewidth=1)
        ax.annotate(
            f"cuBLAS {dtype}",
            (top, 0),
            xycoords=("data", "axes fraction"),
            xytext=(4, 6),
            textcoords="offset points",
            fontsize=9,
        )
    ax.set_xlim(0, 1.15 * max([*speeds, *yardsticks.values()]))
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_title(f"{table.run.gpu}: forward, {column}, {table.seqlen} tokens, TFLOP/s (median, quartiles)")


def _by_length(line: Line, column: Column) -> list[Row]:
    rows = [r for r in line.rows if (r.head_dim, r.causal) == (column.head_dim, column.causal)]
    return sorted(rows, key=lambda r: r.seqlen)


def _draw_curves(ax, lines: list[Line], column: Column) -> None:
    from fa3_course import plots

    for line in lines:
        rows = _by_length(line, column)
        marker = plots.KERNELS.get(line.kernel, ("", "", "."))[2]
        x, y = [r.seqlen for r in rows], [r.tflops for r in rows]
        ax.plot(
            x, y, color=_colour(line), marker=marker, label=line.label, linewidth=3 if line.kernel == "fa3_lib" else 1.5
        )
    plots.powers_of_two(ax, sorted({r.seqlen for line in lines for r in _by_length(line, column)}))
    ax.set_ylim(0)
    ax.set(
        xlabel="sequence length (16k tokens in all)",
        ylabel="TFLOP/s",
        title=f"The same against sequence length, {column}",
    )
    plots.name_lines(ax, fontsize=9)
