"""What a tile configuration costs: shared memory, registers, and cycles of every unit. A calculator over `ForwardConfig`.

The sums are `fa3_lib.config`'s, taken apart for display; nothing here decides whether a configuration is allowed.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fa3_lib.config import SMEM_LIMIT, WGMMA_M, ForwardConfig
from hopper_sim import HOPPER, Machine

OTHER_REGISTERS = 24  # what `ForwardConfig.validate` keeps free: row statistics, addresses, loop counters
TILE_M, STAGES, HEAD_DIMS = (64, 128, 192), (1, 2, 4), (64, 128, 192, 256)
TILE_N = tuple(range(16, 257, 16))


@dataclass(frozen=True)
class Budget:
    """A configuration's parts.

    Attributes:
        smem: bytes of the CTA's shared memory by what they hold; the sum is `config.smem_bytes`.
        registers: 32-bit registers of a consumer thread by what they hold, all alive at once.
        refusal: why `ForwardConfig.validate` refuses the configuration, "" when it does not.
    """

    config: ForwardConfig
    smem: Mapping[str, int]
    registers: Mapping[str, int]
    refusal: str

    @property
    def words(self) -> str:
        """The verdict in one line."""
        c = self.config
        return (
            f"{self.refusal or 'fits'}. Shared memory {sum(self.smem.values()):,} of {SMEM_LIMIT:,} bytes; "
            f"{sum(self.registers.values())} of {c.consumer_registers} registers per consumer thread"
        )


def budget(config: ForwardConfig, overlap: bool = True) -> Budget:
    """Takes a configuration apart.

    Args:
        config: may be one that does not fit; tile_m of 64, 128 or 192.
        overlap: whether P of one key block is alive beside S of the next (rung 7); otherwise P takes S's place.

    Raises:
        ValueError: tile_m is none of 64, 128, 192: there is no register split for it.
    """
    if config.tile_m not in TILE_M:
        raise ValueError(f"tile_m = {config.tile_m}: one, two or three consumers of {WGMMA_M} rows, so one of {TILE_M}")
    smem = {
        "Q": config.q_bytes,
        "K": config.stages * config.k_bytes,
        "V": config.stages * config.v_bytes,
        "O": config.q_and_o_bytes - config.q_bytes,
    }
    smem["barriers, alignment"] = config.smem_bytes - sum(smem.values())
    s, o = config.tile_n // 2, config.head_dim_v // 2
    p = config.accumulator_registers - s - o
    registers = {"S": s, "P": p if overlap else 0, "O": o, "others, at least": OTHER_REGISTERS}
    try:
        config.validate()
        refusal = ""
    except ValueError as error:
        refusal = str(error).split("): ", 1)[-1].split(". ", 1)[0]
    return Budget(config, smem, registers, refusal)


def widest(head_dim: int, tile_m: int, stages: int = 2, own_output: bool = False) -> int:
    """The most keys per block that `ForwardConfig.validate` allows, 0 when not even 16 fit."""
    configs = [ForwardConfig(head_dim, head_dim, tile_m, n, stages, own_output=own_output) for n in TILE_N]
    return max((c.tile_n for c in configs if not budget(c).refusal), default=0)


def cycles(config: ForwardConfig, machine: Machine = HOPPER) -> dict[str, float]:
    """Cycles that each unit of an SM works per key block of a CTA at its full rate, where no mask is needed.

    Counted per score: a multiply-add and an addition (fma), a maximum and half a conversion (alu), one exponential (mufu);
    per element of O the rescale (fma). Shared memory: Q and K, then V, read by each consumer, and K and V filled by TMA.
    """
    c, consumers = config, config.consumer_warpgroups
    scores, outputs = c.tile_m * c.tile_n, c.tile_m * c.head_dim_v
    flops = 2 * scores * (c.head_dim + c.head_dim_v)
    rate = machine.tensor_flops_16bit if c.element_bytes == 2 else machine.tensor_flops_8bit
    lanes = {"mufu": scores, "fma": 2 * scores + outputs, "alu": 1.5 * scores}
    read = c.q_bytes + consumers * (c.k_bytes + c.v_bytes)
    return {
        "tensor core": flops / rate,
        **{unit: count / getattr(machine, unit) for unit, count in lanes.items()},
        "issue": sum(lanes.values()) / machine.issue,
        "shared memory": (read + c.k_bytes + c.v_bytes) / machine.smem_bandwidth,
    }


# --- pictures --------------------------------------------------------------------------------------------------------


def draw(axes: Sequence, budgets: Mapping[str, Budget]) -> None:
    """Two axes: shared memory in KB and registers per consumer thread as stacked bars, limits in red."""
    from fa3_course import plots

    colours = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE, plots.LIGHT)
    facts = (
        ("shared memory, KB", 1024, [b.smem for b in budgets.values()], [SMEM_LIMIT] * len(budgets)),
        ("registers of a consumer thread", 1, *_registers(budgets)),
    )
    for ax, (title, unit, parts, limits) in zip(axes, facts, strict=True):
        for colour, name in zip(colours, parts[0], strict=False):
            left = [sum(list(p.values())[: list(p).index(name)]) / unit for p in parts]
            ax.barh(range(len(parts)), [p[name] / unit for p in parts], left=left, color=colour, label=name, height=0.6)
        for row, limit in enumerate(limits):
            ax.plot([limit / unit] * 2, [row - 0.4, row + 0.4], color=plots.RED, linewidth=2.5)
        ax.set_yticks(range(len(parts)), list(budgets) if ax is axes[0] else [])
        ax.set_ylim(len(parts) - 0.4, -0.6)
        ax.set_title(title, fontsize=10.5)
        ax.grid(axis="y", visible=False)
        side = "left" if ax is axes[0] else "right"
        ax.figure.legend(*ax.get_legend_handles_labels(), fontsize=9, ncols=3, loc=f"outside lower {side}")


def _registers(budgets: Mapping[str, Budget]) -> tuple[list[Mapping[str, int]], list[int]]:
    return [b.registers for b in budgets.values()], [b.config.consumer_registers for b in budgets.values()]


def picture(head_dim: int, tile_m: int, tile_n: int, stages: int, own_output: bool) -> tuple[bytes, str]:
    """One configuration drawn, as PNG bytes, and its verdict."""
    import matplotlib.pyplot as plt

    from fa3_course import plots

    found = budget(ForwardConfig(head_dim, head_dim, tile_m, tile_n, stages, own_output=own_output))
    figure, axes = plots.figure(2, height=1.9)
    draw(axes, {f"d{head_dim}, {tile_m} x {tile_n}": found})
    figure.suptitle(found.words, x=0.01, ha="left", fontsize=9.5, color=plots.RED if found.refusal else "black")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    return buffer.getvalue(), found.words


def explore(
    head_dim: int = 128, tile_m: int = 128, tile_n: int = 128, stages: int = 2, own_output: bool = True
) -> None:
    """The calculator in a notebook: five knobs and a picture; a still picture of these values where widgets do not run."""
    from IPython.display import Image, display

    chosen = {"head_dim": head_dim, "tile_m": tile_m, "tile_n": tile_n, "stages": stages, "own_output": own_output}
    image = Image(picture(**chosen)[0], format="png")
    try:
        import ipywidgets as widgets
    except ImportError:
        display(image)
        return

    def knob(name: str, options: Sequence):
        box = widgets.SelectionSlider(
            options=options, value=chosen[name], description=name, continuous_update=False, style={"description_width": "7em"}
        )  # fmt: skip

        def changed(change) -> None:
            chosen[name] = change["new"]
            shown.update(Image(picture(**chosen)[0], format="png"))

        box.observe(changed, names="value")
        return box

    options = {"head_dim": HEAD_DIMS, "tile_m": TILE_M, "tile_n": TILE_N, "stages": STAGES, "own_output": (False, True)}
    knobs = widgets.HBox([widgets.VBox([knob(n, options[n]) for n in part]) for part in (("head_dim", "tile_m", "tile_n"), ("stages", "own_output"))])  # fmt: skip
    bundle = {kind: value for kind, value in knobs._repr_mimebundle_().items() if "widget-view" in kind}
    note = {"text/plain": "Run this notebook to turn the knobs; the picture shows their first values."}
    display(bundle | note, raw=True)
    shown = display(image, display_id=True)
