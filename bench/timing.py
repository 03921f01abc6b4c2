"""Timers: how one call becomes samples of milliseconds.

Each timer is bound to one call and its input sets, and gives samples in bursts, so that the caller can interleave
kernels: a slow drift of the clock then hits all of them alike.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

GRAPH_MS = (
    3.0  # one graph replay lasts at least this long, so that the gap before its first kernel (~5 us) is lost in it
)
MAX_GRAPH_CALLS = 128
MAX_SETS = 32

Call = Callable[..., object]


def input_sets(set_bytes: int, l2_bytes: int) -> int:
    """How many input sets to rotate so that a call never finds its own data in L2: three times the cache in all.

    At least two, since a single set would be the same addresses every time.
    """
    return min(MAX_SETS, max(2, math.ceil(3 * l2_bytes / set_bytes)))


def graph_calls(call_ms: float, sets: int) -> int:
    """Calls in one graph: long enough to be timed, and every set used equally often."""
    wanted = min(MAX_GRAPH_CALLS, math.ceil(GRAPH_MS / max(call_ms, 1e-4)))
    return max(1, math.ceil(wanted / sets)) * sets


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """(25 %, median, 75 %), linear between neighbours; one sample is all three."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    low, mid, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, mid, high


def rotated(items: Sequence, turn: int) -> list:
    """The items in order, beginning with another one each turn: nobody is always the first, or the last. Every second turn runs
    backwards: nobody always follows the same one, whose heat decides what the power limit leaves to the next."""
    start = turn % len(items) if items else 0
    order = [*items[start:], *items[:start]]
    return [*order[:1], *order[:0:-1]] if turn % 2 else order


def _repeats(budget_ms: float, one_ms: float, at_most: int = 50) -> int:
    return max(1, min(at_most, round(budget_ms / max(one_ms, 1e-3))))


class WallTimer:
    """Wall-clock time of calls on the CPU."""

    name = "cpu"

    def __init__(self, call: Call, sets: Sequence[tuple]):
        self.call, self.sets, self.turn = call, sets, 0
        self.call_ms = self._once()  # the first call may compile
        self.call_ms = self._once()

    def _once(self) -> float:
        inputs = self.sets[self.turn % len(self.sets)]
        self.turn += 1
        start = time.perf_counter()
        self.call(*inputs)
        return (time.perf_counter() - start) * 1e3

    def burst(self, budget_ms: float) -> list[float]:
        """Milliseconds per call, about `budget_ms` of them, at least one."""
        return [self._once() for _ in range(_repeats(budget_ms, self.call_ms))]


class EventTimer:
    """CUDA events around eager calls: for kernels far longer than the host's work, or that no graph can hold."""

    name = "events"

    def __init__(self, call: Call, sets: Sequence[tuple]):
        self.call, self.sets, self.turn = call, sets, 0
        self._run(1)  # compiles, loads modules, fills the allocator
        self.call_ms = min(self._run(2))

    def _run(self, calls: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self.call(*self.sets[self.turn % len(self.sets)])
            self.turn += 1
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]

    def burst(self, budget_ms: float) -> list[float]:
        return self._run(_repeats(budget_ms, self.call_ms))


class GraphTimer:
    """Kernel time: many calls over rotating inputs in one CUDA graph, replayed; no host work between the kernels.

    The timer keeps the sets and the call, with all that it owns, alive: the graph holds their addresses. Outputs are
    allocated inside the capture and belong to the graph's own pool.
    """

    name = "graph"

    def __init__(self, call: Call, sets: Sequence[tuple]):
        self.call_ms = EventTimer(call, sets).call_ms  # also compiles and builds plans before any capture
        self.sets, self.call = sets, call  # the graph reads what they own: once freed, another capture may unmap it
        self.calls = graph_calls(self.call_ms, len(sets))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # workspaces belong to a stream: make them on the one that captures
            for inputs in sets[:2]:
                call(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that samples clocks may go on during the capture
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(self.calls):
                call(*sets[i % len(sets)])
        self.call_ms = min(self._replay(2)[1:])

    def _replay(self, times: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self.graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / self.calls for a, b in itertools.pairwise(marks)]

    def burst(self, budget_ms: float) -> list[float]:
        """Milliseconds per call of each replay. One replay more runs first, unread: it takes over the clock and the
        caches that the kernel before has left."""
        return self._replay(1 + _repeats(budget_ms, self.call_ms * self.calls))[1:]


TIMERS = {timer.name: timer for timer in (WallTimer, EventTimer, GraphTimer)}


def host_us(call: Call, inputs: tuple, calls: int = 50, batches: int = 15) -> float:
    """Host time of one eager call in microseconds: what the caller's thread spends until the kernel is enqueued.

    Median over batches of `calls` calls in a row, the device idle at the start of each; take a shape whose kernel is
    shorter than its call, or the launch queue fills and the device's time is measured.
    """
    for _ in range(10):
        call(*inputs)
    times = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call(*inputs)
        times.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)
