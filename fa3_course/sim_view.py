"""Turn the knobs of a simulated kernel in a notebook and watch the timeline; a still picture where widgets do not run."""

import functools
import io

import numpy as np

from fa3_course import simulated, timeline
from hopper_sim import HOPPER, Fault

BLOCKS = 8  # key blocks of the query tile that is shown
STAGES, TILE_N = (1, 2, 4), (64, 80, 96, 112, 128, 144, 160, 176)
LATENCIES = (100, 400, 700, 1000, 1500, 2000, 3000)
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
        the picture as PNG bytes and a line of text: cycles per key block and tensor-core share. When the kernel cannot
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
    words = f"rung {number}, {title}: {report.cycles / BLOCKS:.0f} cycles per key block, tensor core busy {share:.0%}"
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
    """What a cell shows: widgets where a kernel and a front end run them, else the picture of the start values."""

    def __init__(self, **start):
        self.start = start
        self.image, self.words = picture(**start)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        """Front ends take the richest form that they know: the widget, or the picture that is stored beside it."""
        import base64

        bundle = {"image/png": base64.b64encode(self.image).decode(), "text/plain": self.words}
        widget = self.widget()
        if widget is not None:
            bundle |= {key: value for key, value in widget._repr_mimebundle_().items() if "widget-view" in key}
        return bundle

    def widget(self):
        """The ipywidgets box, or None when ipywidgets is not installed."""
        try:
            import ipywidgets as widgets
        except ImportError:
            return None
        chosen = {
            "head_dim": 128,
            "tile_n": 128,
            "stages": 2,
            "latency": 700,
            "ping_pong": True,
            "overlap": False,
        } | self.start
        style = {"style": {"description_width": "9em"}, "layout": widgets.Layout(width="24em")}
        knobs = {
            "head_dim": widgets.SelectionSlider(
                options=(64, 128, 256), description="head dim", value=chosen["head_dim"], **style
            ),
            "tile_n": widgets.SelectionSlider(
                options=TILE_N, description="keys per block", value=chosen["tile_n"], **style
            ),
            "stages": widgets.SelectionSlider(options=STAGES, description="stages", value=chosen["stages"], **style),
            "latency": widgets.SelectionSlider(
                options=LATENCIES, description="TMA latency", value=int(chosen["latency"]), **style
            ),
            "ping_pong": widgets.Checkbox(description="ping-pong", value=chosen["ping_pong"], **style),
            "overlap": widgets.Checkbox(description="softmax under PV", value=chosen["overlap"], **style),
        }
        for knob in knobs.values():
            if hasattr(knob, "continuous_update"):
                knob.continuous_update = False
        image, words = widgets.Image(value=self.image, format="png"), widgets.Label(self.words)

        def redraw(_change) -> None:
            image.value, words.value = picture(**{name: knob.value for name, knob in knobs.items()})

        for knob in knobs.values():
            knob.observe(redraw, names="value")
        left, right = list(knobs.values())[:3], list(knobs.values())[3:]
        return widgets.VBox([widgets.HBox([widgets.VBox(left), widgets.VBox(right)]), words, image])


def explore(**start) -> Explorer:
    """The view, as the last expression of a cell; `start` sets the first values (head_dim, tile_n, stages, ...).

    Raises TypeError on a name that `picture` does not take.
    """
    return Explorer(**start)
