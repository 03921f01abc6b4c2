"""The asynchronous copy engine: boxes of up to five dimensions between global and shared memory."""

from typing import TYPE_CHECKING

import numpy as np

from hopper_sim import formats
from hopper_sim.faults import Fault, Kind, Site, here, misuse
from hopper_sim.memory import GlobalTensor, SharedTile

if TYPE_CHECKING:
    from hopper_sim.barriers import Mbarrier
    from hopper_sim.role import Role

ALIGN_GLOBAL = 16  # bytes: strides of the tensor and width of the box
ALIGN_SHARED = 128  # bytes: address of the tile
MAX_BOX = 256  # elements per dimension


def check_box(tile: SharedTile, tensor: GlobalTensor, at: tuple[int, ...], box: tuple[int, ...]) -> None:
    """The rules of a tensor map. Raises `Fault` with the rule that is broken."""
    if not len(at) == len(box) == len(tensor.shape):
        raise misuse(f"{tensor.name} has {len(tensor.shape)} dimensions; at={at} and box={box} must have as many")
    if tile.dtype != tensor.dtype:
        raise misuse(
            f"TMA copies bytes and converts nothing: {tile.name} is {tile.dtype}, {tensor.name} is {tensor.dtype}"
        )
    if tile.transposed:
        raise misuse(f"{tile.name}: TMA writes rows as they are; give the tile itself, not its .T")
    if int(np.prod(box)) != tile.size:
        raise misuse(f"the box {box} has {int(np.prod(box))} elements, {tile.name} has {tile.size}")
    eb = tensor.element_bytes
    rules = (
        (all(1 <= b <= MAX_BOX for b in box), f"a box dimension lies in 1..{MAX_BOX}, the box is {box}"),
        (
            box[-1] * eb % ALIGN_GLOBAL == 0,
            f"the innermost box dimension is {box[-1] * eb} bytes, not a multiple of {ALIGN_GLOBAL}",
        ),
        (
            len(tensor.shape) == 1 or tensor.shape[-1] * eb % ALIGN_GLOBAL == 0,
            f"rows of {tensor.name} are {tensor.shape[-1] * eb} bytes apart, not a multiple of {ALIGN_GLOBAL}",
        ),
        (
            tile.offset % ALIGN_SHARED == 0,
            f"{tile.name} lies at byte {tile.offset} of shared memory, not a multiple of {ALIGN_SHARED}",
        ),
    )
    for ok, rule in rules:
        if not ok:
            raise Fault(Kind.MISALIGNED_BOX, rule, here())


def load(
    role: "Role", tile: SharedTile, tensor: GlobalTensor, at: tuple[int, ...], box: tuple[int, ...], bar: "Mbarrier"
) -> None:
    """See `Role.tma_load`."""
    site = here()
    check_box(tile, tensor, at, box)
    phase = bar.load_issued()
    access = tile.access(role, True, "TMA load", ("phase", bar.name), phase + 1, site)
    role.sm.memory.access(access, role.clock)
    role.sm.loads.append(access)

    filled = np.zeros(box, dtype=tensor.stored.dtype)  # outside the tensor: zeros
    inside, within = tensor.box(at, box)
    filled[within] = tensor.stored[inside]

    sm, machine = role.sm, role.sm.machine
    start = sm.clock.now

    def transferred() -> None:
        sm.clock.after(sm.clock.latency(machine.tma_latency), arrived)

    def arrived() -> None:
        sm.units["shared memory"].submit("TMA", tile.nbytes / machine.smem_bandwidth, f"fill {tile.name}", done)

    def done() -> None:
        tile.poke(filled)
        sm.timeline.add("TMA in flight", f"load {tile.name}", start, sm.clock.now, role.lane)
        bar.load_done(tile.nbytes, phase, site)

    sm.units["TMA"].submit(role.lane, tile.nbytes / machine.tma_bandwidth, f"load {tile.name}", transferred)


def store(role: "Role", tile: SharedTile, tensor: GlobalTensor, at: tuple[int, ...], box: tuple[int, ...]) -> None:
    """See `Role.tma_store`."""
    site: Site = here()
    check_box(tile, tensor, at, box)
    group = role.stores.add(tile.name, site)
    role.sm.memory.access(tile.access(role, False, "TMA store", ("store", role.name), group, site), role.clock)

    sm, machine = role.sm, role.sm.machine
    start = sm.clock.now
    dtype = formats.STORAGE[tile.dtype]

    def transferred() -> None:
        sm.clock.after(sm.clock.latency(machine.store_latency), done)

    def done() -> None:
        stored = sm.memory.bytes[tile.offset : tile.offset + tile.nbytes].view(dtype)
        tensor.put(at, box, stored, site)
        sm.timeline.add("TMA in flight", f"store {tile.name}", start, sm.clock.now, role.lane)
        role.stores.done(group)

    sm.units["TMA"].submit(role.lane, tile.nbytes / machine.tma_bandwidth, f"store {tile.name}", transferred)
