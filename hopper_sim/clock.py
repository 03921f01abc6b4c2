"""Time: an event queue, and units that warpgroups share. Nothing here knows what the units compute."""

import heapq
import random
from collections import deque
from collections.abc import Callable

from hopper_sim.faults import Fault, Kind


class Clock:
    """Events in order of time; ties are broken by the seed, so that no kernel may lean on an accidental order."""

    def __init__(self, seed: int, jitter: float):
        self.now = 0.0
        self.jitter = jitter
        self._random = random.Random(seed)
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, cycles: float, call: Callable[[], None], last: bool = False) -> None:
        """Runs `call` when `cycles` have passed; `last`: behind everything else that happens at that time."""
        self._count += 1
        order = 1.0 if last else self._random.random()  # random() stays below 1
        heapq.heappush(self._events, (self.now + cycles, order, self._count, call))

    def latency(self, cycles: float) -> float:
        """A latency drawn around `cycles`."""
        return cycles * (1 + self.jitter * self._random.uniform(-1, 1))

    def run(self, max_cycles: float) -> None:
        """Runs until nothing is left to happen."""
        while self._events:
            self.now, _, _, call = heapq.heappop(self._events)
            if self.now > max_cycles:
                raise Fault(Kind.RUNAWAY, f"the kernel still runs after {max_cycles:.0f} cycles (max_cycles)")
            call()


class Unit:
    """A unit of the SM that serves the jobs of one owner in order.

    With a quantum (MUFU, FMA, shared memory, ...) it takes the owners in turn, `quantum` cycles each: two warpgroups that
    ask at the same time share the unit, and both finish late. Without (tensor core) it is a plain queue: the steps are
    served in the order of their issue, whoever issued them.

    `cycles` of work take cycles / efficiency of time; `busy` counts the work.
    """

    def __init__(
        self, clock: Clock, name: str, quantum: float | None, record: Callable[..., None], efficiency: float = 1.0
    ):
        self.clock, self.name, self.quantum, self._record = clock, name, quantum, record
        self.efficiency = efficiency
        self.busy = 0.0  # cycles of work served so far
        self._queues: dict[str, deque[list]] = {}
        self._running = False

    def submit(self, owner: str, cycles: float, label: str, done: Callable[[], None]) -> None:
        """Queues `cycles` of work for `owner`; calls `done` when it has been served."""
        queue = owner if self.quantum is not None else ""
        self._queues.setdefault(queue, deque()).append([cycles, label, done, owner])
        if not self._running:
            self._serve()

    def _serve(self) -> None:
        queue = next((name for name, jobs in self._queues.items() if jobs), None)
        self._running = queue is not None
        if queue is None:
            return
        jobs = self._queues[queue]
        job = jobs[0]
        slice_ = job[0] if self.quantum is None else min(self.quantum, job[0])
        start = self.clock.now

        def served() -> None:
            self.busy += slice_
            self._record(self.name, job[1], start, self.clock.now, job[3])
            job[0] -= slice_
            if job[0] <= 1e-9:
                jobs.popleft()
                job[2]()
            self._queues[queue] = self._queues.pop(queue)  # to the end of the line
            self._serve()

        self.clock.after(slice_ / self.efficiency, served)


def when_all(count: int, done: Callable[[], None]) -> Callable[[], None]:
    """A callback that runs `done` on its `count`-th call."""
    left = count

    def one() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            done()

    return one
