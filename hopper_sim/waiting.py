"""What a role waits for: a blocked instruction, and groups of asynchronous operations."""

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from hopper_sim.faults import Site

if TYPE_CHECKING:
    from hopper_sim.role import Role


class Waiting:
    """Something to `await`. It must be awaited at once: the next instruction of the role complains otherwise."""

    def __init__(
        self,
        role: "Role",
        name: str,
        start: Callable[["Waiting"], None],
        kind: str,
        on: object,
        detail: str,
        site: Site,
    ):
        self.role, self.name, self.kind, self.on, self.detail, self.site = role, name, kind, on, detail, site
        self._start = start
        self.began = 0.0
        self.value: Any = None
        role.unawaited, role.last_site = self, site

    def __await__(self) -> Generator["Waiting", None, Any]:
        self.role.unawaited = None
        yield self
        return self.value

    def begin(self) -> None:
        """Called by the SM when the role blocks here."""
        self.began = self.role.sm.clock.now
        self.role.blocked = self
        self._start(self)

    def finish(self, latency: float = 0.0) -> None:
        """Lets the role go on after `latency` cycles."""
        clock = self.role.sm.clock
        clock.after(clock.latency(latency), self._resume)

    def _resume(self) -> None:
        sm = self.role.sm
        lane = self.role.lane
        sm.timeline.add(lane, self.name, self.began, sm.clock.now, lane, self.kind)
        self.role.blocked = None
        sm.step(self.role)


class Groups:
    """Asynchronous operations of a role in commit groups: WGMMAs, or bulk stores."""

    def __init__(self) -> None:
        self.committed = 0
        self.waited = 0  # groups known to be complete, because the role waited
        self.last_finish = 0.0
        self._pending: dict[int, int] = {}
        self._issued: list[tuple[int, str, Site]] = []
        self._waiter: tuple[int, Waiting] | None = None

    def add(self, name: str, site: Site) -> int:
        """A new operation in the open group; returns the group's number."""
        group = self.committed + 1
        self._pending[group] = self._pending.get(group, 0) + 1
        self._issued = [entry for entry in self._issued if entry[0] > self.waited]
        self._issued.append((group, name, site))
        return group

    def done(self, group: int) -> None:
        """One operation of `group` has finished."""
        self._pending[group] -= 1
        if not self._pending[group]:
            del self._pending[group]
        if self._waiter is not None and self._complete(self._waiter[0]):
            waiter, self._waiter = self._waiter[1], None
            waiter.finish()

    def wait(self, upto: int, waiting: Waiting) -> None:
        """Finishes `waiting` when groups 1..upto are complete."""
        if self._complete(upto):
            waiting.finish()
        else:
            self._waiter = (upto, waiting)

    def _complete(self, upto: int) -> bool:
        return all(group > upto for group in self._pending)

    def unwaited(self) -> tuple[int, str, Site] | None:
        """The first operation that no wait has covered."""
        return next((entry for entry in self._issued if entry[0] > self.waited), None)
