"""House style of the course's plots: colour-blind safe, readable at the width of a GitHub page.

One kernel has one colour and one marker in every chapter (`KERNELS`). Functions draw on axes that the caller owns and
return nothing, so that a lesson composes its figures itself; `figure` makes them at the right size.
"""

import io
from collections.abc import Iterable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fa3_course import results
from fa3_course.sass import program

# Okabe and Ito's palette: apart for every common kind of colour blindness, and in grey by lightness
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY, LIGHT = "#CC79A7", "#56B4E9", "#666666", "#D9D9D9"
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY)

# kernel of a stored row (or kernel/dtype, where 8 bits look other than 16) -> (label, colour, marker)
KERNELS: dict[str, tuple[str, str, str]] = {
    "cublas": ("cuBLAS", GREY, "_"),
    "cudnn": ("cuDNN", ORANGE, "s"),
    "fa2": ("FA2", PURPLE, "v"),
    "fa3": ("FA3 C++", RED, "D"),
    "fa4": ("FA4", SKY, "^"),
    "fa3_lib": ("fa3_lib", BLUE, "o"),
    "rung00_eager": ("rung 0: eager", GREY, "x"),
    "rung02_triton_fa2": ("rung 2: Triton", GREEN, "P"),
    "rung03_tma_wgmma": ("rung 3: TMA + WGMMA", "#7A7A00", "1"),
    "rung04_ring": ("rung 4: ring", "#9C755F", "2"),
    "rung05_warp_specialised": ("rung 5: warp-specialised", "#1B4F72", "*"),
    "rung06_pingpong": ("rung 6: ping-pong", "#332288", "<"),
    "rung07_overlap": ("rung 7: overlap", "#117733", ">"),
    "rung07b_overlap_no_warp_specialisation": ("rung 7b: no warp specialisation", "#661100", "h"),
    "rung08_persistent": ("rung 8: persistent", "#44AA99", "p"),
    "rung10_fp8": ("rung 10: fp8", "#882255", "X"),
    "fa3/fp8": ("FA3 C++, fp8", "#E89A6B", "D"),
    "fa3_lib/fp8": ("fa3_lib, fp8", "#6BAED6", "o"),
}
COLOURS = 32  # of a plot in a notebook
WIDTH = 8.6  # inches; 946 pixels at the dpi below, a little more than GitHub shows


def use_style() -> None:
    """Sets matplotlib's defaults for this process: fonts, grid, no frame at the top and right, the palette."""
    plt.rcParams.update(
        {
            "figure.dpi": 110,
            "savefig.dpi": 110,
            "savefig.bbox": "tight",
            "figure.constrained_layout.use": True,
            "font.size": 11,
            "axes.titlesize": 11.5,
            "axes.titlelocation": "left",
            "axes.titleweight": "bold",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#E6E6E6",
            "axes.prop_cycle": plt.cycler(color=PALETTE),
            "lines.linewidth": 2,
            "lines.markersize": 6,
            "legend.frameon": False,
            "legend.fontsize": 10,
            # the white page stays white in a dark notebook theme, so that black text stays readable
            "figure.facecolor": "white",
        }
    )


def figure(columns: int = 1, height: float = 3.4, widths: Sequence[float] | None = None) -> tuple[Figure, list[Axes]]:
    """A figure of the house width with one row of axes.

    Args:
        columns: number of axes.
        height: inches.
        widths: relative widths of the axes; equal when None.

    Returns:
        the figure and the list of its axes, also when there is one.
    """
    fig, axes = plt.subplots(1, columns, figsize=(WIDTH, height), squeeze=False, width_ratios=widths)
    return fig, list(axes[0])


def with_palette(png: bytes, colours: int = COLOURS) -> bytes:
    """A plot as a PNG with a palette of its own: a third of the bytes, and no difference that a reader sees.

    A picture that has at most `colours` in a palette is returned as it is; what was written into the file as text stays.
    """
    with Image.open(io.BytesIO(png)) as picture:
        if picture.mode == "P" and len(picture.getcolors(256)) <= colours:
            return png
        text = PngInfo()
        for key, value in picture.text.items():
            text.add_text(key, value)
        white = Image.new("RGBA", picture.size, "white")
        flat = Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")
    small = io.BytesIO()
    # of Pillow's methods the one that keeps the colours of thin lines
    palette = flat.quantize(colours, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    palette.save(small, "PNG", optimize=True, pnginfo=text)
    return small.getvalue()


def name_lines(ax: Axes, **kwargs) -> None:
    """Writes each labelled line's name at its right end, in its colour, instead of a legend; names are moved apart."""
    lines = [line for line in ax.get_lines() if not line.get_label().startswith("_")]
    lines = [line for line in lines if np.isfinite(np.asarray(line.get_ydata(), float)).any()]
    ax.figure.canvas.draw()  # fixes the limits, which the pixel positions need
    ends = []
    for line in lines:
        x, y = (np.asarray(data, float) for data in line.get_data())
        last = np.flatnonzero(np.isfinite(y))[-1]
        ends.append((ax.transData.transform((x[last], y[last]))[1], x[last], y[last], line))
    gap = 1.25 * ax.figure.dpi / 72 * kwargs.get("fontsize", 10)
    floor = -np.inf
    for pixel, x, y, line in sorted(ends, key=lambda end: end[0]):
        at = max(pixel, floor)
        floor = at + gap
        offset = (7, (at - pixel) * 72 / ax.figure.dpi)
        text = ax.annotate(
            line.get_label(),
            (x, y),
            offset,
            textcoords="offset points",
            color=line.get_color(),
            va="center",
            annotation_clip=False,
            **{"fontsize": 10, **kwargs},
        )
        text.set_in_layout(True)


def powers_of_two(ax: Axes, values: Iterable[int], axis: str = "x") -> None:
    """A base-2 logarithmic axis whose ticks read 512, 1k, 2k, ..."""
    values = list(values)
    which = ax.xaxis if axis == "x" else ax.yaxis
    (ax.set_xscale if axis == "x" else ax.set_yscale)("log", base=2)
    which.set_ticks(values, [f"{v // 1024}k" if v >= 1024 else str(v) for v in values])
    which.set_minor_locator(plt.NullLocator())


def nothing_stored(ax: Axes, what: str) -> None:
    """Says inside empty axes that no measurement of `what` is stored, and which command would store one."""
    ax.set_axis_off()
    text = f"no stored row yet of\n{what}\n`fa3 bench` on a Hopper stores one"
    ax.text(0.5, 0.5, text, ha="center", va="center", color=GREY, transform=ax.transAxes)


def throughput(ax: Axes, run: results.Run | None, kernels: Sequence[str], **shape: object) -> bool:
    """TFLOP/s against sequence length from the stored rows of one run; the quartiles are a band.

    Args:
        run: the run, or None.
        kernels: names of kernels as in the rows, with "/dtype" for another dtype than the shape's; those without rows are left out.
        shape: what the rows must match, e.g. `head_dim=128, causal=False, dtype="bf16"`.

    Returns:
        whether anything was drawn; if not, the axes say so.
    """
    drawn: set[int] = set()
    for kernel in kernels:
        name, _, dtype = kernel.partition("/")
        wanted = {**shape, "kernel": name, "direction": "fwd", **({"dtype": dtype} if dtype else {})}
        rows = sorted(run.select(**wanted), key=lambda r: r.seqlen) if run else []
        if not rows:
            continue
        label, colour, marker = KERNELS.get(kernel, (kernel, GREY, "."))
        x, y = [r.seqlen for r in rows], [r.tflops for r in rows]
        ax.plot(x, y, color=colour, marker=marker, label=label)
        if all(r.ms_p25 and r.ms_p75 for r in rows):
            low, high = ([r.tflops * r.ms / getattr(r, q) for r in rows] for q in ("ms_p75", "ms_p25"))
            ax.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        drawn.update(x)
    if not drawn:
        nothing_stored(ax, "\n".join(KERNELS.get(k, (k,))[0] for k in kernels))
        return False
    powers_of_two(ax, sorted(drawn))
    ax.set(xlabel="sequence length", ylabel="TFLOP/s", ylim=(0, None))
    return True


def roofline(ax: Axes, machines: Mapping[str, tuple[float, float]], reach: tuple[float, float] = (8, 2**14)) -> None:
    """Attainable TFLOP/s against FLOP per byte.

    Args:
        machines: name -> (peak TFLOP/s, memory bandwidth in TB/s).
        reach: range of FLOP per byte.
    """
    intensity = np.geomspace(*reach, 200)
    for (name, (peak, bandwidth)), colour in zip(machines.items(), (GREY, BLUE, GREEN), strict=False):
        ax.plot(intensity, np.minimum(peak, intensity * bandwidth), color=colour, label=f"{name}: {bandwidth} TB/s")
        ax.plot(peak / bandwidth, peak, marker="o", color=colour)
    ax.set(xscale="log", yscale="log", xlabel="FLOP per byte of memory traffic", ylabel="attainable TFLOP/s")


def grouped_bars(ax: Axes, names: Sequence[str], series: Iterable[tuple[str, Sequence[float], str]]) -> None:
    """Horizontal bars, one group per name from the top down, one bar per series (label, values, colour)."""
    series = list(series)
    height = 0.78 / len(series)
    for i, (label, values, colour) in enumerate(series):
        y = np.arange(len(names)) + (i - (len(series) - 1) / 2) * height
        ax.barh(y, values, height=0.92 * height, color=colour, label=label)
    ax.set_yticks(range(len(names)), names)
    ax.grid(axis="y", visible=False)
    ax.invert_yaxis()
    ax.legend()


def levels(
    ax: Axes,
    names: Sequence[str],
    bounds: Mapping[str, tuple[Sequence[float], str]],
    points: Mapping[str, tuple[Sequence[float | None], str, str]],
) -> None:
    """Bounds as horizontal strokes and measurements as points, one column per name.

    Args:
        bounds: label -> (one value per name, colour).
        points: label -> (one value per name, None where there is none; colour; marker).
    """
    x = np.arange(len(names))
    for label, (values, colour) in bounds.items():
        ax.hlines(values, x - 0.4, x + 0.4, colors=colour, label=label)
    shown = {label: point for label, point in points.items() if any(v is not None for v in point[0])}
    for i, (label, (values, colour, marker)) in enumerate(shown.items()):
        # side by side, so that equal values stay apart
        at = x + 0.16 * (i - (len(shown) - 1) / 2)
        ax.plot(at, [np.nan if v is None else v for v in values], marker, color=colour, label=label)
    ax.set_xticks(x, names)
    ax.set_xlim(-0.5, len(names) - 0.5)
    ax.grid(axis="x", visible=False)
    ax.legend(fontsize=8.5, ncols=2, loc="upper left", columnspacing=0.8, handletextpad=0.5)


def tile_map(ax: Axes, allowed: np.ndarray, tile_m: int, tile_n: int) -> tuple[int, int, int]:
    """A mask cut into tiles: skipped tiles are white, masked ones light, whole ones dark; forbidden scores are dotted.

    Args:
        allowed: bool `(seqlen_q, seqlen_k)`, True where the query sees the key.
        tile_m, tile_n: size of a tile.

    Returns:
        numbers of skipped, masked and whole tiles. A tile that reaches past the last key counts as masked.
    """
    rows, columns = (-(-n // t) for n, t in zip(allowed.shape, (tile_m, tile_n), strict=True))
    padded = np.zeros((rows * tile_m, columns * tile_n), bool)
    padded[: allowed.shape[0], : allowed.shape[1]] = allowed
    exists = np.zeros_like(padded)
    exists[: allowed.shape[0]] = True  # rows past the last query are never written: they ask for no mask
    tiles = padded.reshape(rows, tile_m, columns, tile_n)
    wanted = exists.reshape(rows, tile_m, columns, tile_n)
    kind = np.where(~tiles.any((1, 3)), 0, np.where((tiles | ~wanted).all((1, 3)), 2, 1))

    shade = np.kron(kind, np.ones((tile_m, tile_n), int))
    ax.imshow(
        shade, cmap=ListedColormap(["white", "#F5C266", SKY]), vmin=0, vmax=2, aspect="equal", interpolation="none"
    )
    y, x = np.nonzero(~padded & (shade == 1))
    ax.scatter(x, y, s=3, color="#7A5200", linewidths=0)
    ax.set_xticks(np.arange(0, columns * tile_n + 1, tile_n) - 0.5, labels=[])
    ax.set_yticks(np.arange(0, rows * tile_m + 1, tile_m) - 0.5, labels=[])
    ax.grid(True, color=GREY, linewidth=0.8)
    ax.tick_params(length=0)
    ax.set(xlabel="keys", ylabel="queries")
    ax.spines[:].set_visible(True)
    skipped, masked, whole = (int((kind == n).sum()) for n in range(3))
    return skipped, masked, whole


def instruction_strip(ax: Axes, sass: str, groups: Mapping[str, tuple[str, ...]]) -> None:
    """Where in a kernel's machine code the instructions of each group stand, one row of ticks per group.

    Args:
        sass: text of one kernel, as nvdisasm prints it.
        groups: name of a row -> prefixes of opcodes ("HGMMA", "MUFU.EX2").
    """
    opcodes = program(sass)
    rows = [[i for i, name in enumerate(opcodes) if name.startswith(prefixes)] for prefixes in groups.values()]
    ax.eventplot(rows, colors=list(PALETTE[: len(rows)]), linelengths=0.75, linewidths=0.9)
    ax.set_yticks(range(len(rows)), list(groups))
    ax.invert_yaxis()
    ax.grid(False)
    ax.tick_params(axis="y", length=0)
    ax.set(xlabel="instruction of the program, first to last", xlim=(0, len(opcodes)))


def attention_map(ax: Axes, weights: np.ndarray, tokens: Sequence[str]) -> None:
    """Softmax weights of one head as a picture, darker is more; rows are queries.

    Args:
        weights: `(n, n)` in 0..1.
        tokens: n words for both axes.
    """
    ax.imshow(np.sqrt(weights), cmap="Blues", vmin=0, aspect="equal")  # the root shows small weights too
    ticks = np.arange(len(tokens))
    ax.set_xticks(ticks, tokens, rotation=90, fontsize=8)
    ax.set_yticks(ticks, tokens, fontsize=8)
    ax.grid(False)
    ax.tick_params(length=0)
    ax.set(xlabel="key", ylabel="query")
