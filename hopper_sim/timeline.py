"""What happened when: one event per stretch of work or waiting, on one lane per role and per unit."""

from dataclasses import dataclass, field


@dataclass
class Timeline:
    """Events in cycles. `as_dict()` is the JSON form that timelines stamped on a card use too (unit "ns" there)."""

    events: list[dict] = field(default_factory=list)
    lanes: list[str] = field(default_factory=list)

    def add(self, lane: str, name: str, start: float, end: float, role: str = "", kind: str = "work") -> None:
        """Adds a stretch; a stretch that continues the lane's last one is joined to it."""
        if end <= start:
            return
        last = self._last.get(lane)
        if (
            last is not None
            and last["end"] == start
            and (last["name"], last["role"], last["kind"]) == (name, role, kind)
        ):
            last["end"] = end
            return
        event = {"lane": lane, "name": name, "start": start, "end": end, "role": role, "kind": kind}
        self._last[lane] = event
        self.events.append(event)

    def __post_init__(self) -> None:
        self._last: dict[str, dict] = {}

    def as_dict(self, **meta: object) -> dict:
        """The timeline as plain data: schema, unit, lanes in display order, events, meta."""
        return {"schema": "fa3-timeline/1", "unit": "cycles", "lanes": self.lanes, "events": self.events, "meta": meta}
