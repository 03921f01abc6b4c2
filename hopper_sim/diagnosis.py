"""From a state that is wrong to a verdict in words: conflicts, deadlocks, and what is left at the end."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from hopper_sim.barriers import Mbarrier, NamedBarrier, PassedWait
from hopper_sim.faults import Fault, Kind
from hopper_sim.memory import Access

if TYPE_CHECKING:
    from hopper_sim.role import Role
    from hopper_sim.sm import SM


def explain_conflict(sm: "SM") -> Callable[[Access, Access], tuple[Kind, str] | None]:
    """A function that looks at the barriers behind two unordered accesses and may give them a better name."""

    def fill_barrier(access: Access) -> str | None:
        """The mbarrier of the last TMA load into these bytes."""
        return next((load.lane[1] for load in reversed(sm.loads) if load.overlaps(access)), None)

    def explain(earlier: Access, now: Access) -> tuple[Kind, str] | None:
        if earlier.poison and now.by == "TMA load":
            name = now.lane[1]
            wait = earlier.role.last_wait.get(name)
            if wait is None:
                return Kind.READ_BEFORE_FULL, f": {earlier.role.name} has never waited for {name}"
            return (
                Kind.WRONG_PHASE,
                f". {earlier.role.name}'s {name}.wait({wait.phase}) passed at once, before any load\n  that wait: {wait.site}",
            )
        if earlier.by == "WGMMA" and earlier.number > earlier.role.mma.committed:
            return Kind.MISSING_COMMIT, ": that WGMMA was never committed, so no wait_group covers it"
        if earlier.by == "TMA load" and not now.write:
            name = earlier.lane[1]
            wait = now.role.last_wait.get(name)
            if wait is not None and wait.news != "new":
                return (
                    Kind.WRONG_PHASE,
                    f". {now.role.name}'s {name}.wait({wait.phase}) passed at once, for a phase before the load's\n  that wait: {wait.site}",
                )
            if wait is not None and now.role.seen[name] == earlier.number - 1:
                overtaken = _explain_overtaking(earlier, now, wait.op)
                if overtaken is not None:
                    return overtaken
            how = "never waited for it" if wait is None else "has waited for earlier phases only"
            return (
                Kind.READ_BEFORE_FULL,
                f": it completes phase {earlier.number - 1} of {name}, and {now.role.name} {how}",
            )
        if now.by == "TMA load" and not earlier.write and earlier.role is not now.role:
            return _explain_overwrite(earlier, now)
        return None

    def _explain_overtaking(load: Access, read: Access, since: int) -> tuple[Kind, str] | None:
        """The reader has waited for the tile and not yet freed it: was the loader let in too early?"""
        bar, wait = _guard(load)
        if bar is None or read.role.name not in bar.arrivers:
            return None
        if read.role.last_arrival.get(bar.name, 0) > since:
            return None
        return Kind.TOO_MANY_ARRIVALS, f". {_without(bar, wait, read.role)}"

    def _explain_overwrite(earlier: Access, now: Access) -> tuple[Kind, str] | None:
        writer, reader = now.role, earlier.role
        fill = fill_barrier(earlier)
        seen = reader.last_wait.get(fill)
        if seen is not None and seen.news != "new":
            text = f". {reader.name}'s {fill}.wait({seen.phase}) passed on a phase that it had already seen"
            return Kind.WRONG_PHASE, f"{text}\n  that wait: {seen.site}"
        bar, wait = _guard(now)
        if bar is None:
            return Kind.OVERWRITE_BEFORE_FREE, f": {writer.name} has waited for no barrier that says the tile is free"
        if wait.news == "again":
            text = f". {writer.name}'s {bar.name}.wait({wait.phase}) passed on a phase that it had already seen"
            return Kind.WRONG_PHASE, f"{text}\n  that wait: {wait.site}"
        if wait.news == "fresh":
            return None
        # did the reader arrive for this use of the tile in the phase that the writer saw complete?
        arrival = wait.arrivals.get(reader.name, 0)
        if seen is not None and seen.op < arrival < earlier.op:
            text = f": {reader.name} had arrived on {bar.name}, and read the tile once more"
            return Kind.OVERWRITE_BEFORE_FREE, text
        if arrival > earlier.op:
            return Kind.OVERWRITE_BEFORE_FREE, f": {reader.name} arrived on {bar.name} before its read was over"
        if reader.name in bar.arrivers:
            return Kind.TOO_MANY_ARRIVALS, f". {_without(bar, wait, reader)}"
        return None

    def _guard(load: Access) -> tuple[Mbarrier | None, PassedWait | None]:
        """The barrier that the loading role waited for last before the load."""
        waits = [(wait.op, name) for name, wait in load.role.last_wait.items() if wait.op < load.op]
        if not waits:
            return None, None
        name = max(waits)[1]
        return next(bar for bar in sm.mbarrier_list if bar.name == name), load.role.last_wait[name]

    def _without(bar: Mbarrier, wait: PassedWait, reader: "Role") -> str:
        who = ", ".join(wait.arrivals)
        text = f"{bar.name} takes {bar.arrivals} arrivals; they came from {who}, without one of {reader.name} after this use of the tile"
        return f"{text}: someone arrives too often, or the count is too small"

    return explain


def check_return(role: "Role") -> None:
    """Raises `Fault` when a role returns with work in flight."""
    for groups, what, wait in (
        (role.mma, "WGMMA into", "wait_group(0)"),
        (role.stores, "TMA store of", "wait_store(0)"),
    ):
        left = groups.unwaited()
        if left is not None:
            group, name, site = left
            if groups is role.mma and group > groups.committed:
                raise Fault(
                    Kind.MISSING_COMMIT, f"{role.name} returned with a {what} {name} that was never committed", site
                )
            why = "commit it and" if group > groups.committed else "add"
            raise Fault(
                Kind.RETURNED_EARLY, f"{role.name} returned with a {what} {name} in flight: {why} `await {wait}`", site
            )


def check_end(sm: "SM") -> None:
    """Called when nothing happens any more: raises `Fault` for a deadlock or for something left over."""
    if sm.suspended:
        raise sm.suspended[0]
    stuck = [role for role in sm.roles if not role.returned]
    if stuck:
        raise _deadlock(sm, stuck)
    bars = {bar.name: bar for bar in sm.mbarrier_list}
    for load in sm.loads:
        bar = bars[load.lane[1]]
        if bar.observed < load.number:
            text = f"the load of {load.tile} (phase {load.number - 1} of {bar.name}) was never waited for: the loading role does one tile more than its readers"
            raise Fault(Kind.ROLES_DISAGREE, text, load.site)
    for bar in sm.mbarrier_list:
        if bar.arrived:
            behind = [role for role in sm.roles if role.name in bar.missing()]
            names = ", ".join(role.name for role in behind) or "others"
            text = f"all roles have returned, and {bar.name} is left in the middle of a phase ({bar.state()}): {names} did fewer tiles"
            raise Fault(Kind.ROLES_DISAGREE, text, behind[0].last_site if behind else None)
    for barrier in sm.named.values():
        left = sum(barrier.come.values())
        if left != barrier.left_over:
            text = f"all roles have returned, and {left} threads are left in {barrier.name} ({barrier.state()}), not {barrier.left_over}: arrives and syncs do not pair up"
            raise Fault(Kind.UNBALANCED_BARRIER, text)


def _deadlock(sm: "SM", stuck: list["Role"]) -> Fault:
    """Names a deadlock by its root: budget, bytes, a partner that has returned, a named barrier, or a plain cycle."""
    lines, edges = [], {}
    for role in stuck:
        on = role.blocked.on
        if isinstance(on, Mbarrier | NamedBarrier):
            edges[role.name] = (
                sorted(on.missing() - {role.name}) if isinstance(on, NamedBarrier) else sorted(on.missing())
            )
            lines.append(f"  {role.name} waits for {role.blocked.detail}: {on.state()}. At {role.blocked.site}")
        else:
            lines.append(f"  {role.name} waits for {role.blocked.detail}. At {role.blocked.site}")
    returned = [role.name for role in sm.roles if role.returned]
    lines += [f"  {role.name} has returned, after {role.last_site}" for role in sm.roles if role.returned]
    site = stuck[0].blocked.site

    if sm.register_pool.waiters:
        role, count, waiting = sm.register_pool.waiters[0]
        return Fault(
            Kind.REGISTER_BUDGET,
            f"{role.name} asks for {count} registers per thread and nobody gives any back: {sm.register_pool.words()}",
            waiting.site,
        )

    bars = [role.blocked.on for role in stuck if isinstance(role.blocked.on, Mbarrier)]
    for bar in bars:
        if sum(bar.arrived.values()) == bar.arrivals and bar.delivered != bar.expected:
            text = f"{bar.name} phase {bar.completed} expects {bar.expected} bytes, its loads brought {bar.delivered}, and no copy is in flight"
            return Fault(Kind.WRONG_BYTES, "\n".join([text, *lines]), site)

    cycle = _cycle(edges)
    path = " -> ".join(cycle)
    on_cycle = [role.blocked.on for role in stuck if role.name in cycle]
    if cycle and all(isinstance(on, NamedBarrier) for on in on_cycle):
        return Fault(
            Kind.UNBALANCED_BARRIER,
            "\n".join(["each side waits for a turn that the other never hands over", *lines, f"  cycle: {path}"]),
            site,
        )
    if not cycle:
        for role in stuck:
            complete = isinstance(role.blocked.on, Mbarrier) and role.blocked.on.arrivers <= set(
                role.blocked.on.arrived
            )
            gone = [name for name in edges.get(role.name, []) if name in returned and not complete]
            if gone:
                named = isinstance(role.blocked.on, NamedBarrier)
                kind = Kind.UNBALANCED_BARRIER if named else Kind.ROLES_DISAGREE
                text = f"{role.name} waits for {role.blocked.detail}, and {', '.join(gone)}, which should come, has returned"
                return Fault(kind, "\n".join([text, *lines]), role.blocked.site)
    for role in stuck:
        bar = role.blocked.on
        if isinstance(bar, Mbarrier) and bar.completed >= role.seen.get(bar.name, 0) + 2:
            text = (
                f"{role.name} waits for {role.blocked.detail}, and {bar.name} has completed {bar.completed} phases, of which "
                f"it has seen {role.seen.get(bar.name, 0)}: it was overtaken. The barrier behind which they follow each other "
                "does not wait for it: someone arrives there too often, or the count is too small"
            )
            return Fault(Kind.TOO_MANY_ARRIVALS, "\n".join([text, *lines]), role.blocked.site)
    text = ["nobody can go on", *lines]
    if cycle:
        text.append(f"  cycle: {path}")
    text += _hints(stuck)
    return Fault(Kind.DEADLOCK, "\n".join(text), site)


def _hints(stuck: list["Role"]) -> list[str]:
    """What usually lies behind such waits."""
    bars = list(dict.fromkeys(role.blocked.on for role in stuck if isinstance(role.blocked.on, Mbarrier)))
    if len(bars) > 1 and all(bar.completed == 0 and not bar.arrived for bar in bars):
        names = ", ".join(bar.name for bar in bars)
        return [
            f"  hint: none of {names} has ever completed a phase. The one that says that a slot is free takes wait(1) first: it passes at once"
        ]
    hints = []
    for bar in bars:
        if bar.arrived and not bar.arrivers - set(bar.arrived):
            hints.append(
                f"  hint: everyone who arrives on {bar.name} has done so; arrivals={bar.arrivals} or the count in arrive() is wrong"
            )
        elif bar.arrived:
            hints.append(f"  hint: {bar.name} lacks the arrivals of {', '.join(sorted(bar.missing()))}")
    return hints


def _cycle(edges: dict[str, list[str]]) -> list[str]:
    """A cycle of the wait-for graph, first name repeated at the end; empty when there is none."""

    def search(path: list[str]) -> list[str]:
        for name in edges.get(path[-1], []):
            if name in path:
                return [*path[path.index(name) :], name]
            found = search([*path, name])
            if found:
                return found
        return []

    return next((found for start in edges if (found := search([start]))), [])
