"""What the CTAs of an SM share, its clock and its units, and the report of a run."""

from dataclasses import dataclass, field

from hopper_sim.clock import Clock, Unit
from hopper_sim.faults import misuse
from hopper_sim.machine import Machine
from hopper_sim.timeline import Timeline

UNITS = ("tensor core", "mufu", "fma", "alu", "issue", "shared memory", "TMA")


@dataclass
class Report:
    """What a clean run tells.

    Attributes:
        cycles: from the start of the first CTA to the end of the last, launch latency included.
        busy: work per unit, in cycles at its full rate; it takes busy / efficiency. flops: of all WGMMAs.
        cta_ends: when each CTA ended.
        timeline: events per role and per unit, in cycles.
    """

    cycles: float = 0.0
    flops: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    efficiency: dict[str, float] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    cta_ends: list[float] = field(default_factory=list)

    def share(self, unit: str) -> float:
        """The fraction of its full rate that a unit has delivered (the tensor core: of its peak)."""
        if unit not in self.busy:
            raise misuse(f"unknown unit {unit!r}: use one of {', '.join(UNITS)}")
        return self.busy[unit] / self.cycles if self.cycles else 0.0

    @property
    def bound(self) -> str:
        """The unit whose work takes longest: with perfect overlap, the run could not be shorter."""
        return max(self.busy, key=lambda unit: self.busy[unit] / self.efficiency[unit])


class Hardware:
    """What the CTAs of an SM share: its time and its units."""

    def __init__(self, machine: Machine, seed: int):
        self.machine = machine.validate()
        self.clock = Clock(seed, machine.jitter)
        self.timeline = Timeline()
        self.lanes: dict[str, None] = {}  # of roles, in the order of their declaration
        self.flops = 0.0  # of all WGMMAs
        self.units = {
            unit: Unit(
                self.clock,
                unit,
                None if unit == "tensor core" else machine.quantum,
                self.timeline.add,
                machine.efficiency(unit),
            )
            for unit in UNITS
        }

    def report(self, ends: list[float]) -> Report:
        """What a clean run of CTAs that ended at these times tells."""
        self.timeline.lanes = [*self.lanes, *UNITS, "TMA in flight"]
        busy = {name: unit.busy for name, unit in self.units.items()}
        efficiency = {name: unit.efficiency for name, unit in self.units.items()}
        return Report(self.clock.now, self.flops, busy, efficiency, self.timeline, ends)
