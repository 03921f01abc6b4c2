"""The two kinds of barriers of a CTA: mbarriers in shared memory, and the sixteen named hardware barriers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hopper_sim.faults import Fault, Kind, Site, here, misuse
from hopper_sim.memory import VectorClock, join

if TYPE_CHECKING:
    from hopper_sim.role import Role
    from hopper_sim.sm import SM
    from hopper_sim.waiting import Waiting


@dataclass(frozen=True)
class PassedWait:
    """A wait of a role that has passed: with which bit, what it learned ("new", "again", "fresh"), where and when, and
    who completed the phase (role -> its instruction count at its last arrival)."""

    phase: int
    news: str
    site: Site
    op: int
    arrivals: dict[str, int]


class Mbarrier:
    """An arrival counter with phases, as PTX defines it.

    A phase is complete when `arrivals` arrivals and all expected bytes are in; then the next phase begins. `wait(phase)`
    takes the *bit* of a phase: it passes when the phase with that bit is complete, that is, while the open phase has the
    other bit. On a fresh barrier `wait(1)` passes at once (the phase "before the first"), `wait(0)` blocks.
    """

    def __init__(self, sm: "SM", name: str, arrivals: int, by: tuple[str, ...]):
        if not isinstance(arrivals, int) or not 1 <= arrivals < 2**20:
            raise misuse(f"{name}: arrivals = {arrivals} must be an integer from 1 to 2**20 - 1")
        self.sm, self.name, self.arrivals, self.by = sm, name, arrivals, by
        self.completed = 0  # phases
        self.arrived: dict[str, int] = {}  # arrivals of the open phase by role
        self.last_arrived: dict[str, int] = {}  # and of the phase before
        self.arrival_ops: dict[str, int] = {}  # instruction counts of the roles at their last arrivals, open phase
        self.last_arrival_ops: dict[str, int] = {}  # and of the phase before
        self.expected = 0  # bytes
        self.delivered = 0
        self.loads_in_flight = 0
        self.observed = 0  # the highest phase count that any waiter has seen complete
        self.loaded_phases = 0  # phases that carried bytes
        self.waiters: list[tuple[Waiting, int]] = []
        self.arrivers: set[str] = set(by)  # who is known to arrive here
        self._incoming: VectorClock = {}
        self._released: VectorClock = {}

    # --- what a role may do ------------------------------------------------------------------------------------------

    def expect_tx(self, nbytes: int) -> None:
        """The open phase also waits for `nbytes` bytes of asynchronous copies."""
        self.sm.enter()
        if nbytes < 0:
            raise misuse(f"{self.name}.expect_tx({nbytes}): bytes must not be negative")
        self.expected += int(nbytes)

    def arrive(self, count: int = 1) -> None:
        """`count` arrivals (a warpgroup that arrives once per warp: 4). Releases everything the role did before.

        `Fault` when the phase does not wait for that many, or when the last phase has not been seen by anyone. It is raised
        with the role's next instruction: a load on this barrier may first show that the role overtook its readers.
        """
        role = self.sm.enter()
        if count < 1:
            raise misuse(f"{self.name}.arrive({count}): count must be at least 1")
        if self.by and role.name not in self.by:
            raise misuse(f"{role.name} arrives on {self.name}, which was made for {', '.join(self.by)} only (by=)")
        pending = self.arrivals - sum(self.arrived.values())
        unseen = self.completed > self.observed
        if count > pending or unseen:
            kind, hint = role.blame_phase(self) or (Kind.TOO_MANY_ARRIVALS, "")
            if unseen:
                why = f"phase {self.completed - 1} is complete ({_counts(self.last_arrived)} of {self.arrivals} arrivals) and nobody has waited for it yet"
            else:
                why = f"the open phase takes {self.arrivals} and has {_counts(self.arrived)}"
            role.deferred = Fault(kind, f"{role.name} arrives {count} time(s) on {self.name}, but {why}{hint}", here())
            role.deferred_on = self
            return
        self.arrived[role.name] = self.arrived.get(role.name, 0) + count
        self.arrivers.add(role.name)
        role.last_arrival[self.name] = self.arrival_ops[role.name] = role.ops
        join(self._incoming, role.release())
        self._maybe_complete(here())

    def arrive_expect_tx(self, nbytes: int) -> None:
        """`expect_tx` and one arrival: what the producer does before it issues its copies."""
        self.expect_tx(nbytes)
        self.arrive()

    def wait(self, phase: int) -> "Waiting":
        """Awaitable: passes when the phase with this bit (0 or 1) is complete, and takes over what its arrivers released."""
        role = self.sm.enter()
        if phase not in (0, 1):
            raise misuse(f"{self.name}.wait({phase}): the phase is a bit, 0 or 1 (for a counter, use counter % 2)")
        site = here()

        def start(waiting: "Waiting") -> None:
            if self.completed % 2 != phase:
                self._pass(waiting, phase, site)
            else:
                self.waiters.append((waiting, phase))

        return role.waiting(f"wait {self.name}", start, on=self, detail=f"{self.name}.wait({phase})", site=site)

    # --- what the copy engine does ------------------------------------------------------------------------------------

    def load_issued(self) -> int:
        """A copy that completes here was issued; returns the phase it belongs to."""
        self.loads_in_flight += 1
        return self.completed

    def load_done(self, nbytes: int, phase: int, site: Site) -> None:
        """`nbytes` have arrived."""
        self.loads_in_flight -= 1
        if phase != self.completed:
            text = f"{self.name} completed phase {phase} before all its copies were in: expect_tx announced fewer bytes than the loads of the phase bring"
            raise Fault(Kind.WRONG_BYTES, text, site)
        self.delivered += nbytes
        self._maybe_complete(site)

    def _maybe_complete(self, site: Site) -> None:
        if sum(self.arrived.values()) < self.arrivals:
            return
        if self.delivered > self.expected:
            text = f"{self.name} phase {self.completed}: {self.delivered} bytes came in, expect_tx announced {self.expected}"
            raise Fault(Kind.WRONG_BYTES, text, site)
        if self.delivered < self.expected:
            return
        join(self._released, self._incoming)
        self.completed += 1
        if self.delivered:
            self.loaded_phases = self.completed
        self.last_arrived, self.arrived, self.expected, self.delivered, self._incoming = self.arrived, {}, 0, 0, {}
        self.last_arrival_ops, self.arrival_ops = self.arrival_ops, {}
        ready, self.waiters = self.waiters, [(w, p) for w, p in self.waiters if self.completed % 2 == p]
        for waiting, phase in ready:
            if self.completed % 2 != phase:
                self._pass(waiting, phase, waiting.site)

    def _pass(self, waiting: "Waiting", phase: int, site: Site) -> None:
        role = waiting.role
        role.last_wait[self.name] = PassedWait(phase, self._news(role), site, role.ops, self.last_arrival_ops)
        role.seen[self.name] = self.completed
        self.observed = max(self.observed, self.completed)
        join(role.clock, self._released)
        role.clock[("phase", self.name)] = self.completed
        waiting.finish(self.sm.machine.barrier_latency)

    def _news(self, role: "Role") -> str:
        """What a wait that passes now tells `role`: a "new" phase, the same one "again", or, on a "fresh" barrier, nothing."""
        if self.completed > role.seen.get(self.name, 0):
            return "new"
        return "again" if self.completed or self.name in role.last_wait else "fresh"

    # --- words ---------------------------------------------------------------------------------------------------------

    def state(self) -> str:
        """The open phase in words."""
        text = f"its phase {self.completed} has {sum(self.arrived.values())} of {self.arrivals} arrivals"
        if self.arrived:
            text += f" ({_counts(self.arrived)})"
        if self.expected or self.delivered:
            text += f", {self.delivered} of {self.expected} bytes"
        if self.loads_in_flight:
            text += f", {self.loads_in_flight} copies in flight"
        return text

    def missing(self) -> set[str]:
        """Roles that are known to arrive here and have not in the open phase."""
        if sum(self.arrived.values()) == self.arrivals:
            return set()
        return self.arrivers - set(self.arrived) or set(self.arrivers)


class NamedBarrier:
    """One of the hardware barriers 1..15 (bar.sync / bar.arrive / bar.red): it completes when `threads` threads have come.

    `sync` comes and waits, `vote` also learns what the others say, `arrive` comes and goes on; the hardware counts threads and does not ask whose they are. At the end `left_over` threads must be left in it: 0, except where a
    turn is handed over once more than it is taken. Raises `Fault` for an id outside 1..15 or a bad thread count.
    """

    def __init__(self, sm: "SM", number: int, threads: int, name: str, by: tuple[str, ...], left_over: int):
        if not 1 <= number < sm.machine.named_barriers:
            raise misuse(
                f"named barrier {number}: ids run from 1 to {sm.machine.named_barriers - 1} (0 belongs to sync_threads)"
            )
        if threads % 32 or not 32 <= threads <= 1024:
            raise misuse(
                f"named barrier {number}: {threads} threads; the count is a multiple of 32 up to 1024 (whole warps)"
            )
        self.sm, self.number, self.threads, self.by = sm, int(number), threads, by
        self.name = name or f"barrier {int(number)}"
        self.left_over = left_over
        self.come: dict[str, int] = {}
        self.waiters: list[Waiting] = []
        self.arrivers: set[str] = set(by)
        self.generation = 0
        self.found = False  # whether a condition of a vote holds in some thread that has come
        self._incoming: VectorClock = {}

    def arrive(self) -> None:
        """All threads of the role arrive and go on, once the WGMMAs before it are issued. Releases what the role did before."""
        role, site = self._enter("arrives"), here()
        known = role.release()

        def arrived() -> None:
            self._come(role, role.threads, "arrives", known, site)
            self._maybe_complete()

        backlog = role.issued_until - self.sm.clock.now
        if backlog > 0:
            self.sm.clock.after(backlog, arrived)
        else:
            arrived()

    def sync(self) -> "Waiting":
        """Awaitable: all threads of the role arrive and wait for the others."""
        role = self._enter("syncs")
        return self._wait(role, role.threads, "syncs")

    def vote(self, conditions: np.ndarray) -> "Waiting":
        """Awaitable: as `sync`, and gives whether one of the conditions holds, of all threads that come (bar.red.or).

        Args:
            conditions: bool, one for each thread of the role: or fewer, where some of its warps stay away.
        """
        role = self._enter("votes")
        conditions = np.asarray(conditions, dtype=bool).reshape(-1)
        if not len(conditions) or len(conditions) % 32 or len(conditions) > role.threads:
            raise misuse(
                f"{self.name}.vote: {len(conditions)} conditions; one per thread of whole warps, up to {role.threads}"
            )
        self.found |= bool(conditions.any())
        return self._wait(role, len(conditions), "votes")

    def _wait(self, role: "Role", threads: int, verb: str) -> "Waiting":
        self._come(role, threads, verb, role.release(), here())

        def start(waiting: "Waiting") -> None:
            self.waiters.append(waiting)
            self._maybe_complete()

        return role.waiting(
            f"turn {self.name}", start, on=self, detail=f"named barrier {self.number} ({self.name})", site=here()
        )

    def _enter(self, verb: str) -> "Role":
        role = self.sm.enter()
        if self.by and role.name not in self.by:
            raise misuse(f"{role.name} {verb} on {self.name}, which was made for {', '.join(self.by)} only (by=)")
        return role

    def _come(self, role: "Role", threads: int, verb: str, known: VectorClock, site: Site) -> None:
        total = sum(self.come.values()) + threads
        if total > self.threads:
            text = f"{role.name} {verb} on {self.name}, which takes {self.threads} threads and has {self.state()}: one arrive too many, or a sync is missing"
            raise Fault(Kind.UNBALANCED_BARRIER, text, site)
        self.come[role.name] = self.come.get(role.name, 0) + threads
        self.arrivers.add(role.name)
        join(self._incoming, known)

    def _maybe_complete(self) -> None:
        if sum(self.come.values()) < self.threads:
            return
        self.generation += 1
        waiters, self.waiters, self.come = self.waiters, [], {}
        found, self.found = self.found, False
        for waiting in waiters:
            waiting.value = found
            join(waiting.role.clock, self._incoming)
            waiting.finish(self.sm.machine.barrier_latency)
        self._incoming = {}

    def state(self) -> str:
        """Who has come, in words."""
        return f"{sum(self.come.values())} of {self.threads} threads ({_counts(self.come) or 'nobody'})"

    def missing(self) -> set[str]:
        """Roles that are known to come here and have not."""
        return self.arrivers - set(self.come)


def _counts(arrived: dict[str, int]) -> str:
    return ", ".join(f"{role} {count}" for role, count in arrived.items())
