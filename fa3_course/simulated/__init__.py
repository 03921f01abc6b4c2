"""The attention kernels of the ladder as roles on `hopper_sim`.

`simulate("6", q, k, v, causal=True)` runs a rung and returns its numbers, its LSE and the report of the simulated SM.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from fa3_course.simulated import parts
from fa3_lib.config import HEAD_DIMS, ForwardConfig, forward_config
from hopper_sim import HOPPER, GlobalTensor, Machine, Report, launch

E4M3_MAX = 448.0


@dataclass(frozen=True)
class SimulatedRung:
    """How a rung is set up: its module (with `build`), its title, and what is fixed in its configuration.

    Attributes:
        registers: per thread at launch, by compiled head dim (from the DSL rung's machine code: the larger one of full and
            causal), where they leave room for more than one CTA per SM. threads: of a CTA, if not the configuration's.
    """

    module: str
    title: str
    changes: dict
    persistent: bool = False
    fp8: bool = False
    registers: dict[int, int] = field(default_factory=dict)
    threads: int | None = None

    def resident_ctas(self, config: ForwardConfig, machine: Machine = HOPPER) -> int:
        """How many CTAs share an SM: one, unless registers, shared memory and threads leave room for more."""
        if config.head_dim not in self.registers:
            return 1
        threads = self.threads or config.threads
        return machine.resident_ctas(threads, self.registers[config.head_dim], config.smem_bytes)

    @property
    def build(self) -> Callable:
        return importlib.import_module(f"fa3_course.simulated.{self.module}").build


# keys of a block by compiled head dim, in the rungs before the library's own kernel: as chapters/02 and 03 have them
TILE_N = {64: 128, 128: 128, 192: 96, 256: 80}
TILE_N_8BIT = 128  # for every head dim
PERSISTENT_TILES = {64: (192, 128), 128: (128, 128), 192: (128, 112), 256: (128, 80)}  # rung 8's (tile_m, tile_n)

RUNGS = {
    "3": SimulatedRung(
        "rung03",
        "TMA + WGMMA, everything waits",
        {"tile_m": 64, "stages": 1},
        registers={64: 128, 128: 168, 192: 208, 256: 240},
        threads=128,
    ),
    "4": SimulatedRung(
        "rung04", "producer warp and ring", {"tile_m": 64}, registers={64: 128, 128: 168, 192: 176, 256: 200}
    ),
    "5": SimulatedRung("rung05", "two consumers, setmaxnreg", {"tile_m": 128}),
    "6": SimulatedRung("rung06", "ping-pong", {"tile_m": 128, "ping_pong": True}),
    "7": SimulatedRung("rung07", "softmax under PV", {"tile_m": 128, "ping_pong": True}),
    "7b": SimulatedRung("rung07b", "overlap without warp specialisation", {"tile_m": 128}),
    "8": SimulatedRung("rung08", "persistent", {}, persistent=True),
    "9": SimulatedRung("rung09", "dynamic tiles, blocks without a maximum: the library's kernel", {}, persistent=True),
    "10": SimulatedRung("rung10", "FP8", {"tile_m": 128, "ping_pong": True, "element_bytes": 1}, fp8=True),
    "11": SimulatedRung("rung10", "FP8, two-level", {"tile_m": 128, "ping_pong": True, "element_bytes": 1}, fp8=True),
}


@dataclass(frozen=True)
class Result:
    """out (b, sq, h, dv) and lse (b, h, sq) as float32, the SM's report, and the problem that ran."""

    out: np.ndarray
    lse: np.ndarray
    report: Report
    problem: parts.Problem


def rung(number: str) -> SimulatedRung:
    """The rung of this number. Raises ValueError that lists the ones that exist."""
    if str(number) not in RUNGS:
        raise ValueError(f"rung {number} has no simulated kernel; there are {', '.join(RUNGS)}")
    return RUNGS[str(number)]


def configuration(
    number: str, head_dim: int, causal: bool, seqlen_q: int | None = None, **changes: int
) -> ForwardConfig:
    """The configuration of a rung for head dims up to 256; `changes` (stages, tile_n, ...) replace its values.

    `seqlen_q` matters to the library's kernel, which has smaller tiles for short causal sequences; without it, for long ones.
    """
    if not 1 <= head_dim <= max(HEAD_DIMS) or head_dim % 8:
        raise ValueError(f"head_dim = {head_dim} must be a multiple of 8 up to {max(HEAD_DIMS)}")
    if number == "11" and head_dim > 128:
        text = f"rung 11 keeps a second accumulator as wide as O: for head_dim {head_dim} both need more registers than a thread has"
        raise ValueError(f"{text}; take head_dim up to 128, or rung 10")
    r = rung(number)
    if number == "9":
        config = forward_config(head_dim, head_dim, causal, seqlen_q)
    elif number == "8":
        tile_d = next(d for d in PERSISTENT_TILES if d >= head_dim)
        config = ForwardConfig(tile_d, tile_d, *PERSISTENT_TILES[tile_d], causal=causal, ping_pong=True).with_room()
    else:
        tile_d = next(d for d in TILE_N if d >= head_dim)
        tile_n = TILE_N_8BIT if r.fp8 else TILE_N[tile_d]
        config = ForwardConfig(tile_d, tile_d, tile_n=tile_n, causal=causal, **r.changes)
    config = replace(config, **changes)
    if r.fp8 and config.tile_n % 32:
        raise ValueError(f"tile_n = {config.tile_n}: 8-bit products take keys in steps of 32")
    return config.validate()


def make_problem(
    number: str,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    causal: bool = False,
    softmax_scale: float | None = None,
    config: ForwardConfig | None = None,
    dtype: str = "bf16",
) -> parts.Problem:
    """Puts the inputs into global memory: rounded to `dtype`, or for FP8 scaled to e4m3 per (batch, KV head).

    Args:
        q: (b, sq, h, d). k: (b, sk, hk, d). v: (b, sk, hk, d); h a multiple of hk.
    """
    if q.ndim != 4 or k.shape != v.shape or q.shape[::3] != k.shape[::3] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape}: want (b, sq, h, d) and twice (b, sk, hk, d), h a multiple of hk"
        )
    if min(q.shape[1], k.shape[1]) < 1:
        raise ValueError("the simulated kernels need at least one query and one key")
    b, sq, h, d = q.shape
    config = config or configuration(number, d, causal)
    if config.causal != causal:
        raise ValueError(f"the configuration has causal={config.causal}, the call causal={causal}")
    scale = (d**-0.5 if softmax_scale is None else softmax_scale) * parts.LOG2E
    lse = GlobalTensor.output("LSE", (b, h, sq), "f32")
    if not rung(number).fp8:
        inputs = (GlobalTensor.input(name, x, dtype) for name, x in (("Q", q), ("K", k), ("V", v)))
        out = GlobalTensor.output("O", q.shape, dtype)
        if number == "9":
            from fa3_course.simulated import rung09

            return rung09.Problem9(config, *inputs, out, lse, scale)
        return parts.Problem(config, *inputs, out, lse, scale)

    from fa3_course.simulated import rung10

    if d % 16:
        raise ValueError(f"head_dim = {d}: 8-bit rows are copied by TMA in multiples of 16 bytes")
    hk = k.shape[2]
    grouped = q.reshape(b, sq, hk, h // hk, d)
    q_descale, k_descale, v_descale = (
        _descale(x, axes) for x, axes in ((grouped, (1, 3, 4)), (k, (1, 3)), (v, (1, 3)))
    )
    q8 = (grouped / q_descale[:, None, :, None, None]).reshape(q.shape)
    k8, v8 = k / k_descale[:, None, :, None], v / v_descale[:, None, :, None]
    return rung10.Problem8(
        config,
        GlobalTensor.input("Q", q8, "e4m3"),
        GlobalTensor.input("K", k8, "e4m3"),
        GlobalTensor.input("Vt", rung10.transposed_v(v8), "e4m3"),
        GlobalTensor.output("O", q.shape, "bf16"),
        lse,
        scale,
        q_descale,
        k_descale,
        v_descale,
        two_level=number == "11",
    )


def _descale(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """(b, hk): the largest magnitude over e4m3's largest number."""
    largest = np.abs(x).max(axis=axes)
    return np.where(largest > 0, largest / E4M3_MAX, 1.0).astype(np.float32)


def run(
    number: str,
    problem: parts.Problem,
    machine: Machine = HOPPER,
    seed: int = 0,
    build: Callable | None = None,
    ctas_per_sm: int = 1,
) -> Result:
    """Runs a rung on a problem, all query tiles on one SM, `ctas_per_sm` CTAs at a time.

    Raises `hopper_sim.Fault` with the verdict when the kernel is broken (`build` may be a broken one).
    """
    r = rung(number)
    if number == "9":
        grid = [(problem, 0, 1)]
    elif r.persistent:
        grid = [(problem, *problem.walk(cta=0, ctas=1))]
    else:
        grid = [(problem, tile) for tile in problem.tiles()]
    outputs = (problem.out, problem.lse)
    report = launch(build or r.build, grid, outputs, machine, seed, ctas_per_sm)
    return Result(problem.out.numpy(), problem.lse.numpy(), report, problem)


def simulate(number: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False, **options) -> Result:
    """`make_problem` and `run` in one; machine=, seed=, build= and ctas_per_sm= go to `run`, the rest to `make_problem`."""
    to_run = {name: options.pop(name) for name in ("machine", "seed", "build", "ctas_per_sm") if name in options}
    return run(number, make_problem(number, q, k, v, causal, **options), **to_run)
