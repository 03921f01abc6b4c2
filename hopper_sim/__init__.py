"""A Hopper SM to watch on a CPU: mbarriers, named barriers, TMA, WGMMA and budgets, with verdicts in words.

A kernel is a handful of roles, each an `async def`. See README.md.
"""

from hopper_sim.faults import Fault, Kind
from hopper_sim.inject import patched
from hopper_sim.machine import HOPPER, Machine
from hopper_sim.memory import GlobalTensor, RegisterTile, SharedTile
from hopper_sim.role import Role
from hopper_sim.sm import SM, Report, launch

__all__ = [
    "HOPPER",
    "SM",
    "Fault",
    "GlobalTensor",
    "Kind",
    "Machine",
    "RegisterTile",
    "Report",
    "Role",
    "SharedTile",
    "launch",
    "patched",
]
