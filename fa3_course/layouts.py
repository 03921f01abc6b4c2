"""Drawings of chapter 2: swizzled shared memory and its banks, accumulator fragments, TMA boxes, barriers, who waits on what.

The formulas here are the ones that the pictures need; tests compare them with the layouts that CuTe computes.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from fa3_course import plots
from fa3_course.timeline import Timeline

CHUNK = 16  # bytes that move together: the grain of TMA's swizzle, of ldmatrix and of WGMMA
BANKS, BANK_BYTES = 32, 4  # of shared memory
# one colour per group of four banks (16 bytes)
GROUP_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#B5E3D2", "#E69F00", "#FBE0A6", "#D55E00", "#CC79A7")
WARP_COLOURS = ("#56B4E9", "#F5C266", "#66C9A9", "#E3B5CE")


# --- swizzle and banks -------------------------------------------------------------------------------------------------


def swizzle128(address: np.ndarray | int) -> np.ndarray | int:
    """Where TMA's 128-byte swizzle puts the byte of a tile with rows of 128 bytes.

    The 16-byte chunk (bits 4..6) is exclusive-ored with the row modulo 8 (bits 7..9): `b ^ ((b >> 3) & 0x70)`.
    """
    return address ^ ((address >> 3) & 0x70)


def bank(address: np.ndarray | int) -> np.ndarray | int:
    """The bank, 0..31, that holds the byte at this address of shared memory."""
    return address // BANK_BYTES % BANKS


def transactions(addresses: Iterable[int], nbytes: int = CHUNK) -> int:
    """Turns that shared memory needs to serve accesses of `nbytes` at these addresses: the fullest bank decides.

    Accesses to the same 4 bytes are served together.
    """
    words = {a // BANK_BYTES + i for a in addresses for i in range(nbytes // BANK_BYTES)}
    counts = np.bincount([w % BANKS for w in words], minlength=BANKS)
    return int(counts.max())


def draw_banks(ax: Axes, swizzled: bool, column: int = 0, rows: int = 16) -> int:
    """A tile with rows of 128 bytes as it lies in shared memory: one cell per 16 bytes, coloured by its four banks.

    Cells carry the number of the chunk that the *tile* has there; chunk `column` of every row, which is what reading down a
    column touches, is framed.

    Returns:
        turns that reading this column of the first 8 rows takes.
    """
    logical = np.arange(rows)[:, None] * 128 + np.arange(8)[None, :] * CHUNK
    physical = swizzle128(logical) if swizzled else logical
    for row in range(rows):
        for chunk in range(8):
            x = int(physical[row, chunk]) % 128 // CHUNK
            colour = GROUP_COLOURS[x]  # the place decides which banks, whatever lies there
            ax.add_patch(Rectangle((x, row), 1, 1, facecolor=colour, edgecolor="white", linewidth=0.8))
            ink = "white" if 0.3 * to_rgb(colour)[0] + 0.6 * to_rgb(colour)[1] < 0.45 else "black"
            ax.text(x + 0.5, row + 0.5, str(chunk), ha="center", va="center", fontsize=8, color=ink)
            if chunk == column:
                frame = Rectangle(
                    (x + 0.06, row + 0.06), 0.88, 0.88, fill=False, edgecolor="black", linewidth=2, zorder=3
                )
                ax.add_patch(frame)
    ax.set(xlim=(0, 8), ylim=(rows, 0), xlabel="banks", ylabel="row of the tile")
    ax.set_xticks(np.arange(8) + 0.5, [f"{4 * i}-{4 * i + 3}" for i in range(8)], fontsize=8)
    ax.set_yticks(np.arange(0, rows, 4) + 0.5, range(0, rows, 4))
    ax.tick_params(length=0)
    ax.grid(False)
    return transactions(physical[:8, column].tolist())


# --- accumulator fragments ---------------------------------------------------------------------------------------------


def accumulator_owner(row: np.ndarray | int, column: np.ndarray | int) -> tuple:
    """(thread, register) that holds an element of a 64 x N fp32 accumulator of WGMMA.

    Warp w has rows 16 w .. 16 w + 15. In it, thread t has rows t // 4 and t // 4 + 8, and in each of them two neighbouring
    columns out of every 8.
    """
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    register = column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    return thread, register


def draw_accumulator(ax: Axes, columns: int = 16, thread: int = 5) -> None:
    """The first columns of a 64-row accumulator, one cell per element, coloured by warp; one thread's elements are filled."""
    rows = 64
    row, column = np.mgrid[0:rows, 0:columns]
    owner, _ = accumulator_owner(row, column)
    ax.imshow(owner // 32, cmap=ListedColormap(WARP_COLOURS), aspect="auto", extent=(0, columns, rows, 0), alpha=0.45)
    for r, c in zip(*np.nonzero(owner == thread), strict=True):
        ax.add_patch(Rectangle((c, r), 1, 1, facecolor="#333333"))
    for w in range(4):
        ax.text(columns + 0.3, 16 * w + 8, f"warp {w}", va="center", fontsize=9)
    ax.set_xticks(range(0, columns + 1, 8))
    ax.set_yticks(range(0, rows + 1, 8))
    ax.grid(True, color="white", linewidth=1)
    ax.set(xlabel="column (key or head dim)", ylabel="row (query)")


def draw_quad(ax: Axes, columns: int = 16) -> None:
    """Rows 0 and 8 of an accumulator: which of the four threads of a row holds which columns."""
    for y, row in enumerate((0, 8)):
        owner, register = accumulator_owner(row, np.arange(columns))
        for c in range(columns):
            colour = plots.PALETTE[owner[c] % 4]
            ax.add_patch(Rectangle((c, y), 1, 0.8, facecolor=colour, edgecolor="white", alpha=0.75))
            ax.text(c + 0.5, y + 0.4, f"t{owner[c]}\nr{register[c]}", ha="center", va="center", fontsize=7.5)
    ax.set(xlim=(0, columns), ylim=(1.9, -0.1), xlabel="column")
    ax.set_yticks([0.4, 1.4], ["row 0", "row 8"])
    ax.set_xticks(np.arange(0, columns, 2) + 0.5, range(0, columns, 2))
    ax.tick_params(length=0)
    ax.grid(False)


# --- TMA ---------------------------------------------------------------------------------------------------------------


def draw_box(ax: Axes, tensor: tuple[int, int], at: tuple[int, int], box: tuple[int, int]) -> tuple[int, int]:
    """A box of a 2-D tensor as TMA copies it: what exists is copied, what does not is filled with zeros.

    Args:
        tensor, at, box: (rows, columns); the box may begin or end outside.

    Returns:
        (elements copied, elements filled with 0). The bytes that the barrier counts are those of both.
    """
    rows, columns = np.mgrid[at[0] : at[0] + box[0], at[1] : at[1] + box[1]]
    inside = (rows >= 0) & (rows < tensor[0]) & (columns >= 0) & (columns < tensor[1])
    ax.add_patch(Rectangle((0, 0), tensor[1], tensor[0], facecolor="#E6F2FA", edgecolor=plots.BLUE, label="the tensor"))
    zero = {"facecolor": "#F9E0D0", "edgecolor": plots.RED, "hatch": "..", "linewidth": 0}
    ax.add_patch(Rectangle(at[::-1], box[1], box[0], label="box: filled with 0", **zero))
    if inside.any():
        low = (max(at[0], 0), max(at[1], 0))
        high = (min(at[0] + box[0], tensor[0]), min(at[1] + box[1], tensor[1]))
        size = (high[1] - low[1], high[0] - low[0])
        ax.add_patch(Rectangle(low[::-1], *size, facecolor=plots.SKY, label="box: copied"))
    ax.add_patch(Rectangle(at[::-1], box[1], box[0], fill=False, edgecolor="black", linewidth=2))
    ax.set_xlim(min(0, at[1]) - 8, max(tensor[1], at[1] + box[1]) + 8)
    ax.set_ylim(max(tensor[0], at[0] + box[0]) + 8, min(0, at[0]) - 8)
    ax.set(xlabel="column", ylabel="row")
    ax.grid(False)
    return int(inside.sum()), int((~inside).sum())


# --- barriers and waits ------------------------------------------------------------------------------------------------


def draw_phases(axes: Sequence[Axes], history: Sequence[tuple[str, int, int, int]]) -> None:
    """An mbarrier over time: arrivals that its open phase still misses above, bytes below; phases shaded in turn.

    Args:
        axes: two, with a common x axis.
        history: after each event: (what happened, phase that is open, arrivals still missing, bytes still missing).
    """
    x = np.arange(len(history) + 1)
    phases = [h[1] for h in history]
    starts = [i for i, p in enumerate(phases) if i == 0 or p != phases[i - 1]]
    for ax, column, scale, label in ((axes[0], 2, 1, "arrivals"), (axes[1], 3, 1024, "KiB")):
        missing = np.array([h[column] for h in history], float) / scale
        top = 1.5 * max(missing.max(), 1)
        ax.step(x, [*missing, missing[-1]], where="post", color=plots.RED if column == 2 else plots.BLUE)
        for start, end in zip(starts, [*starts[1:], len(history)], strict=True):
            ax.axvspan(start, end, facecolor="#EEEEEE" if phases[start] % 2 else "#FFFFFF", zorder=0)
            if column == 2:
                ax.text((start + end) / 2, 0.96 * top, f"phase {phases[start]}", ha="center", va="top", fontsize=9)
        ax.set(ylim=(0, top), xlim=(0, len(history)), ylabel=f"{label} missing")
        ax.grid(axis="x", visible=False)
    axes[0].set_xticks([])
    axes[1].set_xticks(x[:-1], [h[0] for h in history], rotation=28, ha="right", fontsize=8.5)


def draw_protocol(ax: Axes, edges: Sequence[tuple[str, str, str]], width: float = 0.26) -> None:
    """Who waits for whom, and on what: sources on the left, barriers in the middle, those who wait on the right.

    Args:
        edges: (who completes it, barrier, who waits on it), a line each; names repeat.
    """
    columns = [list(dict.fromkeys(edge[i] for edge in edges)) for i in range(3)]
    depth = max(len(names) for names in columns)
    at: list[dict[str, float]] = []
    for i, names in enumerate(columns):
        step = depth / len(names)
        at.append({name: (k + 0.5) * step for k, name in enumerate(names)})
        for name, y in at[i].items():
            face = "#FFF3DC" if i == 1 else "#E6F2FA"
            style = "round,pad=0.02" if i == 1 else "square,pad=0.02"
            x = i * 0.37
            ax.add_patch(FancyBboxPatch((x, y - 0.3), width, 0.6, boxstyle=style, facecolor=face, edgecolor="#555555"))
            ax.text(x + width / 2, y, name, ha="center", va="center", fontsize=9)
    for source, barrier, waiter in edges:
        for i, (a, b) in enumerate(((source, barrier), (barrier, waiter))):
            colour = plots.GREY if i == 0 else plots.RED
            start, end = (i * 0.37 + width + 0.02, at[i][a]), ((i + 1) * 0.37 - 0.02, at[i + 1][b])
            ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=colour, linewidth=1.3))
    for i, title in enumerate(("completes it", "barrier", "waits on it")):
        ax.text(i * 0.37 + width / 2, -0.15, title, ha="center", fontsize=9.5, fontweight="bold")
    ax.set(xlim=(-0.03, 2 * 0.37 + width + 0.03), ylim=(depth + 0.1, -0.4))
    ax.set_axis_off()


def waits(timeline: Timeline, roles: Sequence[str]) -> dict[str, dict[str, float]]:
    """Share of each role's time: at work, and waiting, by what it waits on ("K full", "K empty", "its GEMM", ...)."""
    found: dict[str, dict[str, float]] = {}
    for role in roles:
        events = [e for e in timeline.events if e.lane == role]
        if not events:
            raise ValueError(f"nothing happens on the lane {role!r}; lanes are {', '.join(timeline.lanes)}")
        whole = max(e.end for e in events) - min(e.start for e in events)
        shares: dict[str, float] = {}
        for e in events:
            what = "at work" if e.kind == "work" else _waits_on(e.name)
            shares[what] = shares.get(what, 0.0) + (e.end - e.start) / whole
        found[role] = shares
    return found


def _waits_on(name: str) -> str:
    what = name.removeprefix("wait").strip().split("[")[0].strip()
    return {"WGMMA": "its GEMM", "store": "its store", "setmaxnreg": "registers"}.get(what, what)


# what a role waits on -> colour; the same in every picture
WAIT_COLOURS = {
    "at work": plots.BLUE, "Q full": "#8C6D1F", "K full": plots.ORANGE, "V full": "#F5C266", "its GEMM": plots.RED,
    "K empty": plots.GREY, "V empty": "#AAAAAA", "its store": plots.PURPLE, "registers": plots.GREEN,
}  # fmt: skip


def draw_waits(ax: Axes, shares: Mapping[str, Mapping[str, float]]) -> None:
    """Horizontal bars of 100 % per role: at work, and what it waits on; below one percent nothing is named."""
    others = {kind for role in shares.values() for kind in role} - set(WAIT_COLOURS)
    colours = WAIT_COLOURS | dict.fromkeys(sorted(others), plots.SKY)
    for y, role in enumerate(shares.values()):
        left = 0.0
        for kind, colour in colours.items():
            share = 100 * role.get(kind, 0.0)
            ax.barh(y, share, left=left, height=0.62, color=colour)
            if share > 5:
                ax.text(left + share / 2, y, f"{share:.0f}", ha="center", va="center", fontsize=9, color="white")
            left += share
    seen = [kind for kind in colours if any(role.get(kind, 0.0) > 0.01 for role in shares.values())]
    handles = [Rectangle((0, 0), 1, 1, color=colours[kind]) for kind in seen]
    labels = [kind if kind == "at work" else f"waits: {kind}" for kind in seen]
    ax.figure.legend(handles, labels, loc="outside lower center", ncols=4)
    ax.set_yticks(range(len(shares)), [role.replace("consumer", "warpgroup ") for role in shares])
    ax.invert_yaxis()
    ax.set(xlim=(0, 100), xlabel="% of the role's time")
    ax.grid(axis="y", visible=False)
