"""A CTA on an SM: declare tiles, barriers and roles, then run; and the launch of a grid, one or more CTAs at a time."""

import inspect
from collections import deque
from collections.abc import Callable

import numpy as np

from hopper_sim import diagnosis, formats
from hopper_sim.barriers import Mbarrier, NamedBarrier
from hopper_sim.faults import Fault, Kind, Suspended, here, misuse
from hopper_sim.hardware import Hardware, Report
from hopper_sim.machine import HOPPER, Machine
from hopper_sim.memory import Access, GlobalTensor, SharedMemory, SharedTile
from hopper_sim.role import Role
from hopper_sim.waiting import Waiting

WARPGROUP = 128
MAX_CYCLES = 1e9  # of a launch: a kernel that still runs is taken for one that never ends


class RegisterPool:
    """The registers of the CTA: what the warpgroups hold, and who waits for more.

    `size` is what the launch allotted, the share of each thread times the threads: up to 7 registers a thread fewer than the
    file has, since a share is a multiple of 8, and nobody gets those. Roles of one warp may share a warpgroup; it gives registers back when all of them have asked for fewer.
    """

    def __init__(self, sm: "SM"):
        self.sm, self.size = sm, sm.machine.registers
        self.waiters: list[tuple[Role, int, Waiting]] = []

    def words(self) -> str:
        """The sum in words."""
        terms = [f"{group} {threads} x {registers}" for group, threads, registers in self._groups({})]
        return f"{' + '.join(terms)} = {self.used()} of {self.size}"

    def threads(self) -> int:
        """Threads of the CTA in whole warpgroups."""
        return sum(threads for _, threads, _ in self._groups({}))

    def used(self, wanted: dict[str, int] | None = None) -> int:
        """Registers in use if the roles in `wanted` had that many per thread."""
        return sum(threads * registers for _, threads, registers in self._groups(wanted or {}))

    def _groups(self, wanted: dict[str, int]) -> list[tuple[str, int, int]]:
        """(warpgroup, threads, registers per thread) of all warpgroups."""
        groups: dict[str, list[Role]] = {}
        for role in self.sm.roles:
            groups.setdefault(role.warpgroup, []).append(role)
        return [
            (
                name,
                -(-sum(role.threads for role in roles) // WARPGROUP) * WARPGROUP,
                max(wanted.get(role.name, role.registers_per_thread) for role in roles),
            )
            for name, roles in groups.items()
        ]

    def request(self, role: Role, count: int, waiting: Waiting) -> None:
        """Gives registers back at once, or takes them when they are there."""
        self.waiters.append((role, count, waiting))
        served = True
        while served:
            served = False
            for entry in list(self.waiters):
                role, count, waiting = entry
                if self.used({role.name: count}) <= self.size:
                    role.registers_per_thread = count
                    self.waiters.remove(entry)
                    waiting.finish(self.sm.machine.setmaxnreg_latency)
                    served = True


class SM:
    """One CTA on an SM.

    Args:
        machine: rates, latencies and budgets.
        seed: draws latencies and breaks ties. A correct kernel gives the same result under every seed.
        name: of the CTA, for messages.
        hardware: the SM's, when CTAs share it (it has its own machine and seed). slot: this CTA's place among them.
    """

    def __init__(
        self,
        machine: Machine = HOPPER,
        seed: int = 0,
        name: str = "CTA",
        hardware: Hardware | None = None,
        slot: int = 0,
    ):
        self.hardware = hardware or Hardware(machine, seed)
        self.name, self.slot = name, slot
        self.machine, self.clock = self.hardware.machine, self.hardware.clock
        self.timeline, self.units = self.hardware.timeline, self.hardware.units
        self.memory = SharedMemory(self.machine.smem_bytes)
        self.memory.explain = diagnosis.explain_conflict(self)
        self.roles: list[Role] = []
        self.mbarrier_list: list[Mbarrier] = []
        self.named: dict[int, NamedBarrier] = {}
        self.register_pool = RegisterPool(self)
        self.loads: list[Access] = []  # every TMA load
        self.suspended: list[Fault] = []  # roles that read poison, by their verdict if nothing arrives
        self.current: Role | None = None
        self._bodies: list[tuple[Role, Callable, tuple]] = []

    # --- declarations --------------------------------------------------------------------------------------------------

    def shared(self, name: str, shape: tuple[int, ...], dtype: str) -> SharedTile:
        """A poisoned tile in shared memory, aligned to 128 bytes. Raises `Fault` when the CTA's budget is exceeded."""
        if any(extent < 1 for extent in shape):
            raise misuse(f"shared {name}: every extent of {tuple(shape)} must be at least 1")
        size = int(np.prod(shape)) * formats.element_bytes(dtype)
        return SharedTile(self.memory, name, self.memory.reserve(name, size, 128), tuple(shape), dtype)

    def mbarrier(self, name: str, arrivals: int, by: tuple[str, ...] = ()) -> Mbarrier:
        """An mbarrier (8 bytes of shared memory). `by` names the roles that may arrive, which makes verdicts clearer."""
        self.memory.reserve(name, 8, 8)
        bar = Mbarrier(self, name, arrivals, tuple(by))
        if any(other.name == name for other in self.mbarrier_list):
            raise misuse(f"two mbarriers are called {name}")
        self.mbarrier_list.append(bar)
        return bar

    def mbarriers(self, name: str, count: int, arrivals: int, by: tuple[str, ...] = ()) -> list[Mbarrier]:
        """A ring of mbarriers name[0], name[1], ..."""
        return [self.mbarrier(f"{name}[{i}]", arrivals, by) for i in range(count)]

    def named_barrier(
        self, number: int, threads: int, name: str = "", by: tuple[str, ...] = (), left_over: int = 0
    ) -> NamedBarrier:
        """Named barrier `number` (1..15) for `threads` threads. Raises `Fault` when the id already has a meaning.

        Args:
            by: the roles that may come. left_over: threads that are in the barrier when all roles have returned.
        """
        if number in self.named:
            other = self.named[number]
            text = f"named barrier {number} is already {other.name} ({other.threads} threads): two meanings of one id; take a free one"
            raise Fault(Kind.BARRIER_ID, text, here())
        self.named[number] = NamedBarrier(self, number, threads, name, tuple(by), left_over)
        return self.named[number]

    def role(self, name: str, body: Callable, *args: object, threads: int = WARPGROUP, warpgroup: str = "") -> Role:
        """Adds a role: `body(role, *args)` is an `async def`; `threads` is 32 for a warp, 128 for a warpgroup.

        A warp lies in a warpgroup of its own, or shares the one that is called `warpgroup` with other warps.
        """
        if not inspect.iscoroutinefunction(body):
            raise misuse(f"role {name}: {getattr(body, '__name__', body)} must be an `async def`")
        if threads % 32 or threads < 32:
            raise misuse(f"role {name}: {threads} threads; a role is made of whole warps of 32")
        if any(role.name == name for role in self.roles):
            raise misuse(f"two roles are called {name}")
        role = Role(self, name, threads, 0, warpgroup or name)
        self.roles.append(role)
        self.hardware.lanes[role.lane] = None
        self._bodies.append((role, body, args))
        return role

    # --- running -------------------------------------------------------------------------------------------------------

    def run(self, max_cycles: float = MAX_CYCLES) -> Report:
        """Runs every role to its end and returns the report, or raises `Fault` with the verdict."""
        try:
            self.start(lambda: None)
            self.clock.run(max_cycles)
            diagnosis.check_end(self)
        finally:
            self.close()
        return self.hardware.report([self.clock.now])

    def start(self, when_over: Callable[[], None]) -> None:
        """Launches the CTA; the clock runs it. Calls `when_over` when all roles have returned and left nothing over."""
        self._when_over = when_over
        if not self.roles:
            raise misuse(f"{self.name} has no roles: declare them with sm.role(name, body)")
        self._allot_registers()
        names = {role.name for role in self.roles}
        for bar in (*self.mbarrier_list, *self.named.values()):
            for name in set(bar.by) - names:
                raise misuse(f"{bar.name} is made for role {name!r}, and there is no such role")
        for role, body, args in self._bodies:
            role.coroutine = body(role, *args)
            self.clock.after(self.clock.latency(self.machine.launch_latency), lambda role=role: self.step(role))

    def close(self) -> None:
        """Ends the coroutines of the roles."""
        for role in self.roles:
            if role.coroutine is not None:
                role.coroutine.close()

    def _end(self) -> None:
        diagnosis.check_end(self)
        self._when_over()

    def _allot_registers(self) -> None:
        """Registers per thread at launch: an equal share of the file, a multiple of 8, at most 256."""
        threads = self.register_pool.threads()
        share = min(256, self.machine.registers // threads // 8 * 8)
        if share < 24:
            raise Fault(
                Kind.REGISTER_BUDGET,
                f"{threads} threads leave {share} registers each of {self.machine.registers}; at least 24",
            )
        self.register_pool.size = threads * share
        for role in self.roles:
            role.registers_per_thread = share

    def step(self, role: Role) -> None:
        """Runs `role` to its next await."""
        self.current = role
        try:
            waiting = role.coroutine.send(None)
            if not isinstance(waiting, Waiting) or waiting.role is not role:
                raise misuse(f"{role.name} awaits something that is not one of its own operations")
        except StopIteration:
            waiting = None
        except Suspended as stop:
            self.suspended.append(stop.fault)
            role.unawaited = None
            return
        except Fault:
            raise
        except Exception as error:
            error.add_note(f"raised inside role {role.name} of {self.name}")
            raise
        finally:
            self.current = None
        self._complain(role)
        if waiting is not None:
            waiting.begin()
        else:
            role.returned = True
            diagnosis.check_return(role)
            if all(other.returned for other in self.roles):
                # an arrival on a named barrier follows the WGMMAs before it, and may outlive its role by their issue
                issued = max(other.issued_until for other in self.roles)
                self.clock.after(max(issued - self.clock.now, 0.0), self._end, last=True)

    def enter(self, owner: Role | None = None) -> Role:
        """The role that is running; every instruction passes here. Raises `Fault` outside a role or after a forgotten await."""
        role = self.current
        if role is None:
            raise misuse("barriers and tiles are used inside a role, while sm.run() runs")
        if owner is not None and owner is not role:
            raise misuse(
                f"{role.name} issues an instruction of {owner.name}: a role uses its own first argument, its own registers"
            )
        self._complain(role)
        role.ops += 1
        return role

    def _complain(self, role: Role) -> None:
        """Raises what the role's last instruction left open."""
        if role.deferred is not None:
            raise role.deferred
        if role.unawaited is not None:
            raise Fault(
                Kind.BAD_USE,
                f"{role.name} made `{role.unawaited.name}` and did not await it: write `await` before it",
                role.unawaited.site,
            )


def launch(
    build: Callable[..., None],
    grid: list[tuple],
    outputs: tuple[GlobalTensor, ...] = (),
    machine: Machine = HOPPER,
    seed: int = 0,
    ctas_per_sm: int = 1,
) -> Report:
    """Runs a kernel on one SM: `build(sm, *index)` declares one CTA, for each index of the grid.

    Args:
        grid: the CTA indices. outputs: tensors that the kernel must write completely, each element once.
        ctas_per_sm: how many CTAs share the SM's units; the next one starts when one ends. Each one's budgets are checked
            as if it were alone: `Machine.resident_ctas` says how many there is room for.
    """
    if ctas_per_sm < 1:
        raise misuse(f"ctas_per_sm = {ctas_per_sm} must be at least 1")
    hardware, waiting = Hardware(machine, seed), deque(enumerate(grid))
    running: list[SM] = []
    ends: list[float] = []

    def start(slot: int) -> None:
        if not waiting:
            return
        number, index = waiting.popleft()
        cta = SM(name=f"CTA {number}", hardware=hardware, slot=slot)
        running.append(cta)
        build(cta, *index)
        cta.start(lambda: over(cta))

    def over(cta: SM) -> None:
        ends.append(hardware.clock.now)
        running.remove(cta)
        start(cta.slot)

    try:
        for slot in range(ctas_per_sm):
            start(slot)
        hardware.clock.run(MAX_CYCLES)
        for cta in running:  # nothing happens any more, and these are not over
            diagnosis.check_end(cta)
    finally:
        for cta in running:
            cta.close()
    for tensor in outputs:
        tensor.check_complete()
    return hardware.report(ends)
