"""Turn the knobs of a simulated kernel in a notebook and watch the timeline; a still picture where widgets do not run."""

import functools
import io

import numpy as np

from fa3_course import simulated, timeline
from hopper_sim import HOPPER, Fault

BLOCKS = 8  # key blocks of the query tile that is shown
STAGES, TILE_N = (1, 2, 4), (64, 80, 96, 112, 128, 144, 160, 176)
LATENCIES, HEAD_DIMS = (100, 400, 700, 1000, 1500, 2000, 3000), (64, 128, 256)
START = {"head_dim": 128, "tile_n": 128, "stages": 2, "latency": 700, "ping_pong": True, "overlap": False}
KERNELS = {(False, False): "5", (True, False): "6", (True, True): "7", (False, True): "7b"}


@functools.lru_cache(maxsize=64)
def picture(
    head_dim: int = 128,
    tile_n: int = 128,
    stages: int = 2,
    latency: float = 700.0,
    ping_pong: bool = True,
    overlap: bool = False,
) -> tuple[bytes, str]:
    """One query tile of 128 rows against eight key blocks, drawn.

    Args:
        latency: cycles of a TMA load. ping_pong: the consumers take turns. overlap: softmax under PV in each of them;
            without ping_pong that is rung 7b, which has no producer warp either.

    Returns:
        the picture as PNG bytes and a line of text: cycles and the tensor core's share of its peak. When the kernel cannot
        be built, a picture of the refusal.
    """
    number = KERNELS[ping_pong, overlap]
    rng = np.random.default_rng(0)
    shapes = ((1, 128, 1, head_dim), *2 * ((1, BLOCKS * tile_n, 1, head_dim),))
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    try:
        config = simulated.configuration(number, head_dim, False, tile_n=tile_n, stages=stages)
        report = simulated.simulate(number, q, k, v, config=config, machine=HOPPER.with_(tma_latency=latency)).report
    except (ValueError, Fault) as refusal:
        return _refusal(str(refusal)), "refused"
    share, title = report.share("tensor core"), simulated.rung(number).title
    words = f"rung {number}, {title}: {report.cycles:.0f} cycles for {BLOCKS} key blocks, tensor core at {share:.0%} of its peak"
    return _png(timeline.draw(timeline.from_dict(report.timeline.as_dict()), words)), words


def _png(figure) -> bytes:
    import matplotlib.pyplot as plt

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    return buffer.getvalue()


def _refusal(text: str) -> bytes:
    import textwrap

    from fa3_course import plots

    figure, (ax,) = plots.figure(height=2.2)
    ax.set_axis_off()
    ax.text(0, 1, textwrap.fill(text.split("): ", 1)[-1], 100), va="top", color=plots.RED, fontsize=10)
    return _png(figure)


class Explorer:
    """Knobs and a picture. The picture is an output of its own, so that it is seen where widgets do not run."""

    def __init__(self, **start):
        self.chosen = START | start
        self.image, self.words = picture(**self.chosen)
        self._shown = None

    def show(self) -> None:
        """Displays the knobs (where ipywidgets is installed) and the picture below them."""
        from IPython.display import Image, display

        knobs = self.knobs()
        if knobs is not None:
            bundle = {k: v for k, v in knobs._repr_mimebundle_().items() if "widget-view" in k}
            display(
                bundle | {"text/plain": "Run this notebook to turn the knobs; the picture shows their first values."},
                raw=True,
            )
        self._shown = display(Image(self.image, format="png"), display_id=True)

    def change(self, **values) -> None:
        """Sets some knobs and draws again."""
        from IPython.display import Image

        self.chosen |= values
        self.image, self.words = picture(**self.chosen)
        if self._shown is not None:
            self._shown.update(Image(self.image, format="png"))

    def knobs(self):
        """The ipywidgets box, or None when ipywidgets is not installed."""
        try:
            import ipywidgets as widgets
        except ImportError:
            return None
        style = {"style": {"description_width": "9em"}, "layout": widgets.Layout(width="24em")}

        def slider(name: str, description: str, options: tuple):
            knob = widgets.SelectionSlider(
                options=options, description=description, value=self.chosen[name], continuous_update=False, **style
            )
            knob.observe(lambda change: self.change(**{name: change["new"]}), names="value")
            return knob

        def box(name: str, description: str):
            knob = widgets.Checkbox(description=description, value=self.chosen[name], **style)
            knob.observe(lambda change: self.change(**{name: change["new"]}), names="value")
            return knob

        left = [
            slider("head_dim", "head dim", HEAD_DIMS),
            slider("tile_n", "keys per block", TILE_N),
            slider("stages", "stages", STAGES),
        ]
        right = [
            slider("latency", "TMA latency", LATENCIES),
            box("ping_pong", "ping-pong"),
            box("overlap", "softmax under PV"),
        ]
        return widgets.HBox([widgets.VBox(left), widgets.VBox(right)])


def explore(**start) -> None:
    """Shows the view in a notebook; `start` sets the knobs' first values (see `picture`).

    Raises TypeError on a name that `picture` does not take, ValueError on a value that its knob does not have.
    """
    options = {
        "head_dim": HEAD_DIMS,
        "tile_n": TILE_N,
        "stages": STAGES,
        "latency": LATENCIES,
        "ping_pong": (True, False),
        "overlap": (True, False),
    }
    if unknown := sorted(set(start) - set(options)):
        raise TypeError(f"explore has no knob {', '.join(unknown)}; there are {', '.join(options)}")
    for name, value in start.items():
        if value not in options[name]:
            raise ValueError(f"{name} = {value}: the knob has {options[name]}")
    Explorer(**start).show()
