"""Shared memory that remembers who touched it, register tiles, and tensors in global memory.

Races are found by order, not by luck: every access is stamped with a lane (a role, a role's WGMMA groups, its bulk-store
groups, or the phases of an mbarrier) and a number on that lane. Each role carries a vector clock: the highest number it
knows of per lane. Barriers hand this knowledge on. Two accesses of the same bytes, one of them a write, must be ordered:
the later one's clock must know the earlier one's stamp. So a missing wait is found under any timing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hopper_sim import formats
from hopper_sim.faults import Fault, Kind, Site, Suspended, here, misuse

if TYPE_CHECKING:
    from hopper_sim.role import Role

Lane = tuple[str, str]  # ("role" | "proxy" | "wgmma" | "store" | "phase", name)
VectorClock = dict[Lane, int]


def join(into: VectorClock, other: VectorClock) -> None:
    """`into` learns everything that `other` knows."""
    for lane, number in other.items():
        if into.get(lane, 0) < number:
            into[lane] = number


@dataclass(frozen=True)
class Access:
    """One access of shared memory: bytes [low, high), and how others learn that it is over."""

    low: int
    high: int
    write: bool
    by: str  # "role" (ordinary loads and stores), "TMA load", "TMA store" or "WGMMA"
    role: "Role"
    lane: Lane
    number: int
    tile: str
    site: Site
    op: int = 0  # the role's instruction count
    poison: int = 0  # bytes of a read that nothing had written

    def overlaps(self, other: "Access") -> bool:
        return self.low < other.high and other.low < self.high

    def covers(self, other: "Access") -> bool:
        return self.low <= other.low and other.high <= self.high

    def __str__(self) -> str:
        who = self.role.name if self.by == "role" else f"a {self.by} of {self.role.name}"
        return f"{who} {'writes' if self.write else 'reads'} {self.tile}"


class SharedMemory:
    """The bytes of one CTA's shared memory, its budget, and the accesses that still matter."""

    def __init__(self, limit: int):
        self.limit = limit
        self.bytes = np.full(limit, formats.POISON, dtype=np.uint8)
        self.written = np.zeros(limit, dtype=bool)
        self.used = 0
        self.plan: list[tuple[str, int]] = []
        self.accesses: list[Access] = []
        # set by the SM: explains a conflict with the state of the barrier that guards the tile
        self.explain: Callable[[Access, Access], tuple[Kind, str] | None] = lambda earlier, now: None

    def reserve(self, name: str, size: int, align: int) -> int:
        """The offset of `size` new bytes. Raises `Fault` with the sum when they do not fit."""
        start = -(-self.used // align) * align
        self.plan.append((name, size))
        if start + size > self.limit:
            terms = " + ".join(f"{name} {size}" for name, size in self.plan)
            total = sum(size for _, size in self.plan)
            raise Fault(
                Kind.SMEM_BUDGET,
                f"{terms} = {total} bytes, of {self.limit} that a CTA may use: fewer stages or smaller tiles",
                here(),
            )
        self.used = start + size
        return start

    def access(self, now: Access, known: VectorClock) -> None:
        """Records an access, or raises `Fault` when it is not ordered after the others. `known` is the actor's clock."""
        kept = []
        for earlier in self.accesses:
            if earlier.overlaps(now) and (earlier.write or now.write):
                self._check(earlier, now, known)
            superseded = now.covers(earlier) and (now.write or (not earlier.write and earlier.lane == now.lane))
            if not superseded:
                kept.append(earlier)
        if not now.write and not self.written[now.low : now.high].all():
            missing = int((~self.written[now.low : now.high]).sum())
            self.accesses = [*kept, replace(now, poison=missing)]
            text = f"{now}, but {missing} of its {now.high - now.low} bytes were never written"
            raise Suspended(Fault(Kind.NEVER_WRITTEN, text, now.site))
        if now.write:
            self.written[now.low : now.high] = True
        kept.append(now)
        self.accesses = kept

    def _check(self, earlier: Access, now: Access, known: VectorClock) -> None:
        if earlier.poison:
            kind, hint = self.explain(earlier, now) or (Kind.RACE if now.by == "role" else Kind.READ_BEFORE_FULL, "")
            raise Fault(kind, f"{earlier}, and only later {now}{hint}", earlier.site)
        if known.get(earlier.lane, 0) >= earlier.number:
            crosses_proxy = earlier.write and earlier.by == "role" and now.by != "role"
            if crosses_proxy and known.get(("proxy", earlier.role.name), 0) < earlier.number:
                text = f"{now}, which {earlier.role.name} wrote with ordinary stores and no fence_async_proxy() since: the asynchronous unit may see old bytes"
                raise Fault(Kind.MISSING_PROXY_FENCE, f"{text}\n  written: {earlier.site}", now.site)
            return
        kind, hint = self.explain(earlier, now) or (_conflict(earlier, now), "")
        what = "may still be under way" if earlier.by != "role" else "is not ordered before it by any barrier"
        raise Fault(
            kind,
            f"{now}, while the {'write' if earlier.write else 'read'} of {earlier.tile} by {_actor(earlier)} {what}{hint}\n  the earlier one: {earlier.site}",
            now.site,
        )


def _actor(access: Access) -> str:
    return access.role.name if access.by == "role" else f"a {access.by} of {access.role.name}"


def _conflict(earlier: Access, now: Access) -> Kind:
    """The name of two unordered accesses."""
    if earlier.by == "TMA load":
        return Kind.OVERWRITE_BEFORE_FREE if now.write else Kind.READ_BEFORE_FULL
    if not earlier.write:
        same_role = earlier.role is now.role and now.by == "role"
        return Kind.OPERAND_IN_FLIGHT if same_role and earlier.by == "WGMMA" else Kind.OVERWRITE_BEFORE_FREE
    return Kind.RACE


@dataclass(frozen=True)
class SharedTile:
    """A contiguous piece of shared memory with a shape. Index or slice the first dimension to get a smaller piece.

    Args:
        shape: elements per dimension, row-major.
        dtype: a key of `formats.STORAGE`.
        transposed: `.T` was taken: a WGMMA reads it as (columns, rows).
    """

    memory: SharedMemory
    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    transposed: bool = False

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.size * formats.element_bytes(self.dtype)

    @property
    def T(self) -> "SharedTile":
        """The same bytes, read transposed by a WGMMA (the descriptor's major-ness). No data moves."""
        if len(self.shape) != 2:
            raise misuse(f"{self.name}.T needs two dimensions, the shape is {self.shape}")
        return replace(self, transposed=not self.transposed)

    def __getitem__(self, index: int | slice) -> "SharedTile":
        if isinstance(index, int | np.integer):
            start, stop, shape, text = int(index), int(index) + 1, self.shape[1:], f"{index}"
        elif isinstance(index, slice) and index.step in (None, 1):
            start, stop = index.start or 0, self.shape[0] if index.stop is None else index.stop
            shape, text = (stop - start, *self.shape[1:]), f"{start}:{stop}"
        else:
            raise misuse(
                f"{self.name}[{index}]: a piece of shared memory is contiguous: index or slice the first dimension"
            )
        if not 0 <= start < stop <= self.shape[0]:
            raise misuse(f"{self.name}[{text}] lies outside 0:{self.shape[0]}")
        row = self.nbytes // self.shape[0]
        return replace(self, name=f"{self.name}[{text}]", offset=self.offset + start * row, shape=shape or (1,))

    def reuse(self, name: str, shape: tuple[int, ...], dtype: str) -> "SharedTile":
        """Another tile in the same memory (an output staged where an input has been). It may not be larger."""
        other = SharedTile(self.memory, name, self.offset, tuple(shape), dtype)
        if other.nbytes > self.nbytes:
            raise misuse(f"{name} needs {other.nbytes} bytes, {self.name} has {self.nbytes}")
        return other

    def access(self, role: "Role", write: bool, by: str, lane: Lane, number: int, site: Site) -> Access:
        """An access of all of this tile, to be given to `SharedMemory.access`."""
        return Access(self.offset, self.offset + self.nbytes, write, by, role, lane, number, self.name, site, role.ops)

    def peek(self) -> np.ndarray:
        """The numbers as float32 without any check: for the units of the simulator, never for a role."""
        raw = self.memory.bytes[self.offset : self.offset + self.nbytes]
        return formats.decode(raw.view(formats.STORAGE[self.dtype]).reshape(self.shape), self.dtype)

    def poke(self, stored: np.ndarray) -> None:
        """Puts stored elements in place without any check: for the units of the simulator."""
        self.memory.bytes[self.offset : self.offset + self.nbytes] = (
            np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
        )


class RegisterTile:
    """A tile spread over the registers of one warpgroup: an accumulator (f32) or a WGMMA operand (f16, bf16, e4m3, e5m2)."""

    def __init__(self, role: "Role", name: str, shape: tuple[int, int], dtype: str):
        self.role, self.name, self.shape, self.dtype = role, name, tuple(shape), dtype
        self._values = np.full(self.shape, np.nan, dtype=np.float32)
        self.written = False
        self.touched = False  # read or written by ordinary instructions since the last wgmma_fence()
        self.writer_group = 0  # the role's WGMMA group that writes this tile; 0 = none
        self.reader_group = 0  # the last WGMMA group that reads it as an operand
        self.last_wgmma: Site | None = None

    @property
    def registers(self) -> float:
        """32-bit registers per thread of a warpgroup."""
        return int(np.prod(self.shape)) * formats.element_bytes(self.dtype) / 4 / 128

    def read(self) -> np.ndarray:
        """A float32 copy. Raises `Fault` while a WGMMA that writes the tile has not been waited for."""
        self._check("reads")
        return self._values.copy()

    def write(self, values: np.ndarray | float) -> None:
        """Rounds `values` into the tile. Raises `Fault` while a WGMMA still writes or reads it."""
        self._check("writes")
        values = np.broadcast_to(np.asarray(values, dtype=np.float32), self.shape)
        self._values = formats.rounded(values, self.dtype)
        self.written = True

    def _check(self, verb: str) -> None:
        role = self.role
        role.sm.enter(owner=role)
        if role.mma.waited < self.writer_group:
            kind, what = Kind.ACCUMULATOR_IN_FLIGHT, "writes"
        elif verb == "writes" and role.mma.waited < self.reader_group:
            kind, what = Kind.OPERAND_IN_FLIGHT, "reads"
        else:
            if verb == "reads" and not self.written:
                raise Fault(Kind.NEVER_WRITTEN, f"{role.name} reads {self.name}, which nothing has written", here())
            self.touched = True
            return
        group = self.writer_group if what == "writes" else self.reader_group
        why = "no wait_group covers it yet"
        if group > role.mma.committed:
            kind, why = Kind.MISSING_COMMIT, "it was never committed, so no wait_group covers it"
        raise Fault(
            kind,
            f"{role.name} {verb} {self.name} while a WGMMA that {what} it is in flight ({why})\n  issued: {self.last_wgmma}",
            here(),
        )

    def peek(self) -> np.ndarray:
        """The values without any check: for the tensor core."""
        return self._values

    def poke(self, values: np.ndarray) -> None:
        """Replaces the values without any check: for the tensor core."""
        self._values = values


class GlobalTensor:
    """A row-major tensor in global memory. Inputs come from an array; outputs start as poison and count their writes.

    Raises `Fault` for more than five dimensions (TMA's limit) or an unknown format.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str, values: np.ndarray | None = None):
        if not 1 <= len(shape) <= 5:
            raise misuse(f"{name}: TMA takes 1 to 5 dimensions, the shape {tuple(shape)} has {len(shape)}")
        self.name, self.shape, self.dtype = name, tuple(shape), dtype
        self.element_bytes = formats.element_bytes(dtype)
        if values is None:
            self.stored = (
                np.full(int(np.prod(shape)) * self.element_bytes, formats.POISON, np.uint8)
                .view(formats.STORAGE[dtype])
                .reshape(shape)
            )
        else:
            self.stored = formats.encode(values, dtype)
        self.writes = np.zeros(self.shape, dtype=np.uint8)

    @classmethod
    def input(cls, name: str, values: np.ndarray, dtype: str) -> "GlobalTensor":
        """`values` rounded to `dtype`."""
        return cls(name, np.shape(values), dtype, np.asarray(values))

    @classmethod
    def output(cls, name: str, shape: tuple[int, ...], dtype: str) -> "GlobalTensor":
        """Poison, to be written by the kernel."""
        return cls(name, shape, dtype)

    def numpy(self) -> np.ndarray:
        """The numbers as float32."""
        return formats.decode(self.stored, self.dtype)

    def box(self, at: tuple[int, ...], box: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of a box that lies inside the tensor: slices of the tensor, and of the box."""
        inside, within = [], []
        for start, length, extent in zip(at, box, self.shape, strict=True):
            low, high = min(max(start, 0), extent), min(max(start + length, 0), extent)
            inside.append(slice(low, max(low, high)))
            within.append(slice(low - start, max(low, high) - start))
        return tuple(inside), tuple(within)

    def put(self, at: tuple[int, ...], box: tuple[int, ...], stored: np.ndarray, site: Site) -> None:
        """Writes a box (clipped to the tensor). Raises `Fault` when an element has been written before."""
        inside, within = self.box(at, box)
        if (self.writes[inside] > 0).any():
            first = tuple(int(i) for i in np.argwhere(self.writes[inside] > 0)[0] + [s.start for s in inside])
            raise Fault(
                Kind.WRITTEN_TWICE, f"{self.name}{list(first)} is written a second time: two tiles claim it", site
            )
        self.writes[inside] += 1
        self.stored[inside] = stored.reshape(box)[within]

    def check_complete(self) -> None:
        """Raises `Fault` when a kernel left elements of this output unwritten."""
        if (self.writes == 0).any():
            missing = np.argwhere(self.writes == 0)
            first = [int(i) for i in missing[0]]
            raise Fault(
                Kind.NEVER_WRITTEN,
                f"{len(missing)} of {self.writes.size} elements of {self.name} were never written, first {self.name}{first}",
            )
