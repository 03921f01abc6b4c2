"""Timelines: read, drawn as a Gantt chart, exported for Perfetto. Simulated and measured ones have the same form.

The JSON form, `fa3-timeline/1`:

    {"schema": "fa3-timeline/1",
     "unit": "cycles" or "ns",
     "lanes": ["consumer0", ..., "tensor core", ...],        display order, optional
     "events": [{"lane": "tensor core", "name": "QK", "start": 10.0, "end": 522.0,
                 "role": "consumer0",                          who caused it, optional
                 "kind": "work" or "wait"}],                   optional, "work"
     "meta": {...}}                                            anything: GPU, kernel, shape, seed
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

SCHEMA = "fa3-timeline/1"
UNITS = ("cycles", "ns")
KINDS = ("work", "wait")
DEFAULTS = (("role", ""), ("kind", "work"))  # not written: the reader puts them in


@dataclass(frozen=True)
class Event:
    """A stretch of work or waiting on one lane; start and end in the timeline's unit."""

    lane: str
    name: str
    start: float
    end: float
    role: str = ""
    kind: str = "work"


@dataclass(frozen=True)
class Timeline:
    """Events of one CTA (or of several that follow each other on one SM), with lanes in display order."""

    unit: str
    lanes: tuple[str, ...]
    events: tuple[Event, ...]
    meta: dict = field(default_factory=dict)

    @property
    def span(self) -> tuple[float, float]:
        """The first start and the last end."""
        return min(e.start for e in self.events), max(e.end for e in self.events)

    def busy(self, lane: str) -> float:
        """Time of work on a lane."""
        return sum(e.end - e.start for e in self.events if e.lane == lane and e.kind == "work")

    def cut(self, start: float, end: float) -> "Timeline":
        """The part between two times; events that reach across are shortened."""
        inside = [
            Event(e.lane, e.name, max(e.start, start), min(e.end, end), e.role, e.kind)
            for e in self.events
            if e.start < end and e.end > start
        ]
        if not inside:
            raise ValueError(f"nothing happens between {start} and {end} {self.unit}; the timeline spans {self.span}")
        return Timeline(self.unit, self.lanes, tuple(inside), self.meta)

    def moved(self, by: float) -> "Timeline":
        """The same, `by` later."""
        return replace(self, events=tuple(replace(e, start=e.start + by, end=e.end + by) for e in self.events))

    def under(self, lane: str, name: str, others: bool = True) -> float:
        """Of the time of a lane's events with this name, the share in which the tensor core works (for others only, or for all)."""
        mine = [e for e in self.events if e.lane == lane and e.name == name]
        gemms = [e for e in self.events if e.lane == "tensor core" and not (others and e.role == lane)]
        shared = sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in mine for b in gemms)
        total = sum(e.end - e.start for e in mine)
        return shared / total if total else 0.0

    def as_dict(self) -> dict:
        """The JSON form."""
        events = [
            {name: value for name, value in vars(e).items() if (name, value) not in DEFAULTS} for e in self.events
        ]
        return {"schema": SCHEMA, "unit": self.unit, "lanes": list(self.lanes), "events": events, "meta": self.meta}


def from_dict(data: dict) -> Timeline:
    """Reads the JSON form. Raises ValueError that names what is missing or wrong."""
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema is {data.get('schema')!r}, this reader knows {SCHEMA!r}")
    if data.get("unit") not in UNITS:
        raise ValueError(f"unit is {data.get('unit')!r}, not one of {UNITS}")
    events = []
    for number, raw in enumerate(data.get("events", [])):
        try:
            event = Event(str(raw["lane"]), str(raw["name"]), float(raw["start"]), float(raw["end"]), raw.get("role", ""), raw.get("kind", "work"))  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"event {number} ({raw}) lacks or spoils {error}") from error
        if event.end < event.start or event.kind not in KINDS:
            raise ValueError(f"event {number} ({raw}): end before start, or a kind that is not one of {KINDS}")
        events.append(event)
    if not events:
        raise ValueError("the timeline has no events")
    named = list(data.get("lanes", []))
    lanes = named + [lane for lane in dict.fromkeys(e.lane for e in events) if lane not in named]
    return Timeline(data["unit"], tuple(lanes), tuple(events), dict(data.get("meta", {})))


def read(path: str | Path) -> Timeline:
    """The timeline in a JSON file."""
    try:
        return from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write(timeline: Timeline, path: str | Path) -> None:
    """Stores a timeline as JSON, one event a line."""
    data = timeline.as_dict()
    events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in data.pop("events"))
    Path(path).write_text(f'{json.dumps(data)[:-1]}, "events": [\n{events}\n]}}\n', encoding="utf-8")


def write_perfetto(timeline: Timeline, path: str | Path) -> None:
    """Stores a timeline in the trace-event form that https://ui.perfetto.dev opens: one thread per lane.

    The form knows microseconds only: 1 cycle is shown as 1 us, 1 ns as 0.001 us.
    """
    scale = 1.0 if timeline.unit == "cycles" else 1e-3
    number = {lane: i for i, lane in enumerate(timeline.lanes)}
    trace = []
    for lane, tid in number.items():
        trace.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": lane}})
        trace.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    for e in timeline.events:
        row = {"ph": "X", "pid": 0, "tid": number[e.lane], "name": e.name, "cat": e.kind, "ts": e.start * scale}
        trace.append({**row, "dur": (e.end - e.start) * scale, "args": {"role": e.role}})
    other = {str(k): str(v) for k, v in timeline.meta.items()}
    Path(path).write_text(
        json.dumps({"traceEvents": trace, "otherData": {**other, "unit": timeline.unit}}), encoding="utf-8"
    )


# --- the Gantt chart ---------------------------------------------------------------------------------------------------

WAIT_COLOUR, OTHER_COLOUR = "#DDDDDD", "#AAAAAA"
# consumers in the order of their numbers: (QK, PV, softmax and the rest)
CONSUMER_COLOURS = (
    ("#9FD3F2", "#56B4E9", "#0072B2"),
    ("#FBE0A6", "#F5C266", "#D98200"),
    ("#B5E3D2", "#66C9A9", "#00795A"),
)
LOAD_COLOURS = {"Q": "#E3B5CE", "K": "#C9C9C9", "V": "#A5A5A5", "O": "#E3B5CE"}
CHARACTER = 0.0085  # width of a label's character as a fraction of the axes, at the house width


def gantt(timeline: Timeline, ax, lanes: Iterable[str] | None = None, width: float | None = None) -> None:
    """Draws lanes as rows of bars on matplotlib axes: one colour per consumer, waiting as a thin grey line.

    Args:
        lanes: which, top to bottom; by default the copies, the consumers, and the tensor core between them.
        width: the time that the axes show from the timeline's start on; all of it by default.
    """
    roles = _consumers(timeline)
    wanted = list(lanes) if lanes is not None else default_lanes(timeline)
    known = {e.lane for e in timeline.events} | set(timeline.lanes)
    if unknown := [lane for lane in wanted if lane not in known]:
        raise ValueError(f"no lane is called {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    start, end = timeline.span
    width = width or end - start
    for row, lane in enumerate(wanted):
        for e in _merged([e for e in timeline.events if e.lane == lane]):
            length, text = e.end - e.start, _words(e)
            height, colour = (0.16, WAIT_COLOUR) if e.kind == "wait" else (0.78, _colour(e, roles))
            ax.barh(row, length, left=e.start, height=height, color=colour, edgecolor="white", linewidth=0.5)
            if length > width * CHARACTER * (len(text) + 1):
                ink = "#666666" if e.kind == "wait" else "white" if _luminance(colour) < 0.5 else "black"
                at = row - 0.24 if e.kind == "wait" else row
                ax.text(e.start + length / 2, at, text, ha="center", va="center", fontsize=8.5, color=ink)
    ax.set_yticks(range(len(wanted)), [_lane_name(lane) for lane in wanted])
    for tick, lane in zip(ax.get_yticklabels(), wanted, strict=True):
        if lane in roles:
            tick.set_color(CONSUMER_COLOURS[roles.index(lane) % len(CONSUMER_COLOURS)][2])
            tick.set_fontweight("bold")
    ax.set_ylim(len(wanted) - 0.45, -0.55)
    ax.set_xlim(start, start + width)
    ax.grid(axis="y", visible=False)


def draw(timeline: Timeline, title: str = ""):
    """A figure for one timeline: the whole run above, three rounds of its middle below (if it has five). Returns it."""
    from fa3_course import plots

    plots.use_style()
    import matplotlib.pyplot as plt

    rows, (low, high) = len(default_lanes(timeline)), _middle(timeline)
    time = f"time in {'cycles of the SM clock' if timeline.unit == 'cycles' else 'nanoseconds'}"
    if (low, high) == timeline.span:
        fig, ax = plt.subplots(figsize=(plots.WIDTH, 0.9 + 0.5 * rows))
        gantt(timeline, ax)
        ax.set(title=title or "one CTA on one SM", xlabel=time)
        return fig
    fig, (above, below) = plt.subplots(2, 1, figsize=(plots.WIDTH, 1.5 + 0.85 * rows), height_ratios=(0.8, 1.2))
    gantt(timeline, above)
    above.axvspan(low, high, facecolor="none", edgecolor="black", linewidth=1, zorder=5)
    above.set_title(title or "one CTA on one SM")
    gantt(timeline.cut(low, high), below)
    below.set_title("inside the frame", fontweight="normal")
    below.set_xlabel(time)
    return fig


def beside(timelines: Mapping[str, Timeline]):
    """A figure that compares timelines by title: three rounds of each one's middle, on one scale that starts at 0. Returns it."""
    from fa3_course import plots

    plots.use_style()
    import matplotlib.pyplot as plt

    parts = {}
    for title, timeline in timelines.items():
        low, high = _middle(timeline)
        parts[title] = timeline.cut(low, high).moved(-low)
    rows = [len(default_lanes(part)) for part in parts.values()]
    fig, axes = plt.subplots(
        len(parts), 1, figsize=(plots.WIDTH, 0.7 * len(parts) + 0.4 * sum(rows)), height_ratios=rows, squeeze=False
    )
    longest = max(part.span[1] for part in parts.values())
    for ax, (title, part) in zip(axes[:, 0], parts.items(), strict=True):
        gantt(part, ax, width=longest)
        ax.set_xlim(0, longest)
        ax.set_title(title)
    units = {part.unit for part in parts.values()}
    ax.set_xlabel(f"time in {' or '.join('cycles of the SM clock' if u == 'cycles' else 'nanoseconds' for u in units)}")
    return fig


def default_lanes(timeline: Timeline) -> list[str]:
    """The copies (or the warp that starts them), then the consumers with the tensor core in their middle; only lanes on which
    something happens."""
    consumers = _consumers(timeline)
    happens = {e.lane for e in timeline.events}
    lanes = ["TMA" if "TMA" in happens else "producer", *consumers[:1], "tensor core", *consumers[1:]]
    return [lane for lane in lanes if lane in happens] or list(timeline.lanes)


def _consumers(timeline: Timeline) -> list[str]:
    names = {e.lane for e in timeline.events} | {e.role for e in timeline.events}
    return sorted(name for name in names if name.startswith("consumer"))


def _middle(timeline: Timeline) -> tuple[float, float]:
    """A window of three rounds of the first consumer's main loop, in the middle of the run; all of it when it is short."""
    start, end = timeline.span
    first = _consumers(timeline)[:1]
    gemms = sorted((e for e in timeline.events if e.lane == "tensor core" and e.role in first), key=lambda e: e.start)
    before = ["", *(e.name for e in gemms)]
    rounds = [e.start for e, last in zip(gemms, before, strict=False) if e.name == "QK" and last != "QK"]
    if len(rounds) < 5:
        return start, end
    i = (len(rounds) - 3) // 2
    return rounds[i], rounds[i + 3]


def _merged(events: list[Event]) -> list[Event]:
    """Neighbours with one name, role and kind as one bar."""
    out: list[Event] = []
    for e in sorted(events, key=lambda e: e.start):
        same = out and (_words(out[-1]), out[-1].role, out[-1].kind) == (_words(e), e.role, e.kind)
        if same and e.start - out[-1].end < 40:  # latencies of register instructions are no gaps to look at
            out[-1] = replace(out[-1], end=max(out[-1].end, e.end))
        else:
            out.append(e)
    return out


def _words(event: Event) -> str:
    """A name as a reader wants it: "K" for a copy into K[1], "waits for its turn" for a named barrier."""
    what = event.name.split("[")[0]
    if event.kind == "wait":
        if event.name.startswith("turn"):
            return "waits for its turn"
        return {"wait WGMMA": "waits for its GEMM"}.get(
            event.name, what.replace("wait", "waits for").removesuffix(" full")
        )
    return what.removeprefix("load ").removeprefix("store ")


def _colour(event: Event, roles: list[str]) -> str:
    if event.lane == "TMA" or event.name.startswith("load "):
        return LOAD_COLOURS.get(_words(event)[:1], OTHER_COLOUR)
    if event.role not in roles:
        return OTHER_COLOUR
    qk, pv, other = CONSUMER_COLOURS[roles.index(event.role) % len(CONSUMER_COLOURS)]
    return {"QK": qk, "PV": pv}.get(event.name, other)


def _lane_name(lane: str) -> str:
    names = {"TMA": "TMA loads", "producer": "load warp"}
    return lane.replace("consumer", "warpgroup ") if lane.startswith("consumer") else names.get(lane, lane)


def _luminance(colour: str) -> float:
    r, g, b = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.299 * r + 0.587 * g + 0.114 * b
