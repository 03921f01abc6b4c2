"""What a role may do: the instructions of one warp or warpgroup. `await` is the only way to block."""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import numpy as np

from hopper_sim import formats, tma, wgmma
from hopper_sim.barriers import Mbarrier, PassedWait
from hopper_sim.clock import when_all
from hopper_sim.faults import Fault, Kind, Site, here, misuse
from hopper_sim.memory import GlobalTensor, RegisterTile, SharedTile, VectorClock
from hopper_sim.waiting import Groups, Waiting

if TYPE_CHECKING:
    from hopper_sim.sm import SM

OTHER_REGISTERS = 24  # per thread, for addresses, row statistics and counters, beside the declared tiles


class Role:
    """One warp or warpgroup of the CTA; the first argument of a role's `async def`.

    Attributes:
        name, threads: as given to `SM.role`.
        sm: the SM it runs on.
        lane: its name on the timeline; CTAs that share an SM have roles of the same names.
    """

    def __init__(self, sm: "SM", name: str, threads: int, registers: int, warpgroup: str):
        self.sm, self.name, self.threads = sm, name, threads
        self.lane = f"{name} of CTA slot {sm.slot}" if sm.slot else name
        self.registers_per_thread, self.warpgroup = registers, warpgroup
        self.tiles: list[RegisterTile] = []
        self.clock: VectorClock = {("role", name): 1}
        self.mma, self.stores = Groups(), Groups()
        self.coroutine: Coroutine[Any, None, None] | None = None
        self.blocked: Waiting | None = None
        self.unawaited: Waiting | None = None
        self.returned = False
        self.deferred: Fault | None = None  # an arrival too many, until the next instruction says what it was
        self.deferred_on: Mbarrier | None = None
        self.issued_until = 0.0  # the time at which the last WGMMA step has been issued; what follows it comes later
        self.last_site: Site | None = None  # its last await
        self.ops = 0  # instructions so far, to say what came first
        self.seen: dict[str, int] = {}  # phases seen complete, by mbarrier
        self.last_wait: dict[str, PassedWait] = {}
        self.last_arrival: dict[str, int] = {}

    # --- registers -----------------------------------------------------------------------------------------------------

    def setmaxnreg(self, count: int) -> Waiting:
        """Awaitable: this warpgroup's registers per thread become `count` (24..256, a multiple of 8).

        Raising it waits until other warpgroups have given back enough.
        """
        self.sm.enter(self)
        if count % 8 or not 24 <= count <= 256:
            raise misuse(f"setmaxnreg({count}): a multiple of 8 from 24 to 256")
        return self.waiting(
            "setmaxnreg",
            lambda waiting: self.sm.register_pool.request(self, count, waiting),
            detail=f"{count} registers per thread",
        )

    def registers(self, name: str, shape: tuple[int, int], dtype: str = "f32") -> RegisterTile:
        """A register tile of this warpgroup. Raises `Fault` when the tiles leave fewer than 24 registers for the rest."""
        self.sm.enter(self)
        tile = RegisterTile(self, name, shape, dtype)
        if self.threads < 128:
            raise misuse(f"{self.name} has {self.threads} threads: a WGMMA tile needs a whole warpgroup of 128")
        self.tiles.append(tile)
        terms = " + ".join(f"{t.name} {t.registers:g}" for t in self.tiles)
        total = sum(t.registers for t in self.tiles) + OTHER_REGISTERS
        if total > self.registers_per_thread:
            text = f"{self.name}: {terms} + {OTHER_REGISTERS} for the rest = {total:g} registers per thread, of {self.registers_per_thread}: smaller tiles, or setmaxnreg first"
            raise Fault(Kind.REGISTER_BUDGET, text, here())
        return tile

    def spend(
        self,
        name: str,
        *,
        fma: float = 0,
        alu: float = 0,
        mufu: float = 0,
        latency: float | None = None,
        **unknown: float,
    ) -> Waiting:
        """Awaitable: register arithmetic, as counts of lane operations per unit; the units run side by side.

        Args:
            name: shown in the timeline.
            fma: multiplications and additions. alu: comparisons, max, conversions. mufu: exp2, log2, reciprocals.
            latency: cycles on top, the machine's `math_latency` by default.
        """
        self.sm.enter(self)
        if unknown:
            raise misuse(
                f"spend({name!r}): unknown unit {', '.join(unknown)}; register arithmetic runs on fma, alu and mufu"
            )
        counts = {"fma": fma, "alu": alu, "mufu": mufu}
        for unit, count in counts.items():
            if count < 0:
                raise misuse(f"spend({name!r}): {unit} = {count} must not be negative")
        machine = self.sm.machine
        tail = machine.math_latency if latency is None else latency
        if tail < 0:
            raise misuse(f"spend({name!r}): latency = {latency} must not be negative")
        work = {unit: count / getattr(machine, unit) for unit, count in counts.items() if count}
        if work:
            work["issue"] = sum(counts.values()) / machine.issue

        def start(waiting: Waiting) -> None:
            if not work:
                waiting.finish(tail)
                return
            one = when_all(len(work), lambda: waiting.finish(tail))
            for unit, cycles in work.items():
                self.sm.units[unit].submit(self.lane, cycles, name, one)

        return self.waiting(name, start, kind="work")

    # --- tensor core ---------------------------------------------------------------------------------------------------

    def wgmma_fence(self) -> None:
        """Orders ordinary register accesses before the WGMMAs that follow (wgmma.fence)."""
        self.sm.enter(self)
        for tile in self.tiles:
            tile.touched = False

    def wgmma(
        self,
        acc: RegisterTile,
        a: SharedTile | RegisterTile,
        b: SharedTile,
        *,
        accumulate: bool = True,
        label: str = "",
        short_accumulator: bool = False,
    ) -> None:
        """Issues acc (+)= a @ b and goes on. The result belongs to the role after commit() and wait_group().

        Args:
            acc: (64, n) f32.
            a: (64, k), from shared memory or registers.
            b: (k, n) in shared memory: a tile stored (k, n), or the `.T` of a tile stored (n, k). 8-bit formats take only the latter.
            accumulate: False overwrites the accumulator.
            label: shown in the timeline.
            short_accumulator: 8-bit formats only: keep 13 fraction bits, as the hardware does.
        """
        self.sm.enter(self)
        wgmma.issue(self, acc, a, b, accumulate, label, short_accumulator)

    def commit(self) -> None:
        """Closes the group of the WGMMAs issued since the last commit."""
        self.sm.enter(self)
        self.mma.committed += 1

    def wait_group(self, n: int) -> Waiting:
        """Awaitable: all but the latest `n` committed WGMMA groups are complete."""
        self.sm.enter(self)
        if n < 0:
            raise misuse(f"wait_group({n}): n must not be negative")
        return self._wait_groups(self.mma, "wgmma", self.mma.committed - n, "wait WGMMA")

    def _wait_groups(self, groups: Groups, lane: str, upto: int, name: str) -> Waiting:
        upto = max(upto, groups.waited)

        def start(waiting: Waiting) -> None:
            groups.waited = upto
            self.clock[(lane, self.name)] = upto
            groups.wait(upto, waiting)

        return self.waiting(name, start, detail=f"its {name.split()[1]} groups up to {upto}")

    # --- copies --------------------------------------------------------------------------------------------------------

    def tma_load(
        self, tile: SharedTile, tensor: GlobalTensor, at: tuple[int, ...], box: tuple[int, ...], bar: Mbarrier
    ) -> None:
        """Issues a copy of a box into `tile`; its bytes (always the whole box) count on the open phase of `bar`.

        Args:
            at: the box's first element in the tensor, one coordinate per dimension; parts outside the tensor become 0.
            box: its extent, as many elements as the tile has.
        """
        overtook = self.deferred if self.deferred_on is bar else None
        if overtook is not None:
            self.deferred = None
        self.sm.enter(self)
        tma.load(self, tile, tensor, at, box, bar)
        if overtook is not None:
            raise overtook

    def tma_store(self, tile: SharedTile, tensor: GlobalTensor, at: tuple[int, ...], box: tuple[int, ...]) -> None:
        """Issues a copy of `tile` into a box of `tensor` (parts outside are dropped); ends with commit_store, wait_store."""
        self.sm.enter(self)
        tma.store(self, tile, tensor, at, box)

    def commit_store(self) -> None:
        """Closes the group of the stores issued since the last commit_store."""
        self.sm.enter(self)
        self.stores.committed += 1

    def wait_store(self, n: int = 0) -> Waiting:
        """Awaitable: all but the latest `n` committed store groups have left shared memory."""
        self.sm.enter(self)
        if n < 0:
            raise misuse(f"wait_store({n}): n must not be negative")
        return self._wait_groups(self.stores, "store", self.stores.committed - n, "wait store")

    def fence_async_proxy(self) -> None:
        """Makes ordinary shared-memory stores (own, and others' that a barrier has handed over) visible to TMA and WGMMA."""
        self.sm.enter(self)
        for (lane, name), number in list(self.clock.items()):
            if lane == "role":
                self.clock[("proxy", name)] = number
        self.clock[("role", self.name)] += 1  # what this role stores from now on is not covered

    # --- ordinary loads and stores -------------------------------------------------------------------------------------

    def store_shared(self, tile: SharedTile, values: np.ndarray) -> Waiting:
        """Awaitable: ordinary stores of `values` into `tile`, rounded to its format."""
        self._touch(tile, write=True)
        values = np.asarray(values, dtype=np.float32)
        if values.shape != tile.shape:
            raise misuse(f"store_shared: {tile.name} is {tile.shape}, the values are {values.shape}")
        tile.poke(formats.encode(values, tile.dtype))
        return self._shared_time(tile, f"store {tile.name}")

    def load_shared(self, tile: SharedTile) -> Waiting:
        """Awaitable: ordinary loads of `tile`; gives a float32 array."""
        self._touch(tile, write=False)
        waiting = self._shared_time(tile, f"load {tile.name}")
        waiting.value = tile.peek()
        return waiting

    def _touch(self, tile: SharedTile, write: bool) -> None:
        self.sm.enter(self)
        lane = ("role", self.name)
        self.sm.memory.access(tile.access(self, write, "role", lane, self.clock[lane], here()), self.clock)

    def _shared_time(self, tile: SharedTile, name: str) -> Waiting:
        machine = self.sm.machine

        def start(waiting: Waiting) -> None:
            self.sm.units["shared memory"].submit(
                self.lane, tile.nbytes / machine.smem_bandwidth, name, lambda: waiting.finish(machine.math_latency)
            )

        return self.waiting(name, start, kind="work")

    def store_global(self, tensor: GlobalTensor, at: tuple[int, ...], values: np.ndarray) -> Waiting:
        """Awaitable: ordinary stores of a box at `at`; parts outside the tensor are dropped (predicated off)."""
        self.sm.enter(self)
        values = np.asarray(values, dtype=np.float32)
        if values.ndim != len(tensor.shape) or len(at) != values.ndim:
            raise misuse(
                f"store_global: {tensor.name} has {len(tensor.shape)} dimensions, the values {values.ndim}, at= {len(at)}"
            )
        tensor.put(at, values.shape, formats.encode(values, tensor.dtype), here())
        return self.waiting("store global", lambda waiting: waiting.finish(self.sm.machine.math_latency), kind="work")

    def load_global(self, tensor: GlobalTensor, at: tuple[int, ...], box: tuple[int, ...]) -> Waiting:
        """Awaitable: ordinary loads of a box, 0 outside the tensor; gives a float32 array."""
        self.sm.enter(self)
        if not len(at) == len(box) == len(tensor.shape):
            raise misuse(
                f"load_global: {tensor.name} has {len(tensor.shape)} dimensions; at={at} and box={box} must have as many"
            )
        filled = np.zeros(box, dtype=np.float32)
        inside, within = tensor.box(at, box)
        filled[within] = formats.decode(tensor.stored[inside], tensor.dtype)
        waiting = self.waiting(
            "load global", lambda waiting: waiting.finish(self.sm.machine.global_latency), kind="work"
        )
        waiting.value = filled
        return waiting

    def atomic_add(self, tensor: GlobalTensor, at: tuple[int, ...], value: int) -> Waiting:
        """Awaitable: adds to one element of an i32 tensor that CTAs share; gives what it held before."""
        self.sm.enter(self)
        if tensor.dtype != "i32" or len(at) != len(tensor.shape):
            raise misuse(
                f"atomic_add: {tensor.name} is {tensor.dtype} {tensor.shape}; an element of an i32 tensor is added to"
            )

        def start(waiting: Waiting) -> None:
            waiting.value = int(tensor.stored[at])
            tensor.stored[at] += value
            waiting.finish(self.sm.machine.global_latency)

        return self.waiting("atomic", start, kind="work")

    # --- bookkeeping ---------------------------------------------------------------------------------------------------

    def waiting(
        self,
        name: str,
        start: Callable[[Waiting], None],
        kind: str = "wait",
        on: object = None,
        detail: str = "",
        site: Site | None = None,
    ) -> Waiting:
        """An awaitable of this role (used by the barriers)."""
        return Waiting(self, name, start, kind, on, detail or name, site or here())

    def release(self) -> VectorClock:
        """What the role knows now, to be handed on by a barrier; later accesses get a higher number."""
        snapshot = dict(self.clock)
        self.clock[("role", self.name)] += 1
        return snapshot

    def blame_phase(self, bar: Mbarrier) -> tuple[Kind, str] | None:
        """An arrival on `bar` was one too many: was it because a wait passed on a phase that the role had already seen?"""
        since = self.last_arrival.get(bar.name, 0)
        stale = [
            (wait.op, name, wait) for name, wait in self.last_wait.items() if wait.news == "again" and wait.op > since
        ]
        if not stale:
            return None
        _, name, wait = max(stale, key=lambda entry: entry[0])
        return (
            Kind.WRONG_PHASE,
            f". Its {name}.wait({wait.phase}) passed on a phase that it had already seen\n  that wait: {wait.site}",
        )
