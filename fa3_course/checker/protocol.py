"""Checks of roles: runs a learner's `async def`s on the simulated SM and compares the numbers with the fp64 truth.

Two kernels are known: attention, as `fa3_course.simulated` sets it up, and a pipelined product, which the bug labs break.
"""

import inspect
import linecache
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fa3_course import simulated
from fa3_course.checker import truth
from fa3_course.checker.catalogue import load_source
from fa3_course.checker.model import Exercise
from fa3_course.checker.trial import Refused, Trial
from fa3_lib.config import ForwardConfig
from hopper_sim import SM, Fault, GlobalTensor, Kind, Report, Role, SharedTile, launch
from hopper_sim.barriers import Mbarrier

WARPS = 4  # of a warpgroup
WARP = 32  # threads


def role(function: Callable) -> Callable:
    """The learner's own `async def`, without the checker's guard around it: what `SM.role` takes."""
    return inspect.unwrap(function)


def clean(run: Callable[[], Report], what: str) -> Report:
    """The report of a run, or Refused with the simulator's verdict."""
    try:
        return run()
    except Fault as fault:
        raise Refused(f"{what}: {fault}") from None


def verdict(run: Callable[[], Report]) -> Kind | None:
    """The verdict on a kernel, None when it is clean."""
    try:
        run()
    except Fault as fault:
        return fault.kind
    return None


def handed_out(exercise: Exercise) -> list[Callable]:
    """The functions of a bug lab's untouched stub, in the exercise's order; verdicts quote their lines."""
    name = f"{exercise.file} as handed out"
    text = exercise.stub
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = load_source(text, name, f"stub_{exercise.path.stem}")
    return [getattr(module, function) for function in exercise.functions]


def expect_verdict(t: Trial, exercise: Exercise, predicted: Callable, run: Callable[..., Report]) -> None:
    """Compares `predicted()` with the verdict on the roles as handed out.

    Args:
        run: called with a seed and the roles (the exercise's functions but the first, which is `predicted`).
    """
    said = str(predicted())
    known = [str(kind) for kind in Kind]
    t.expect(said in known, f"{said!r} is no verdict; there are: {', '.join(known)}")
    roles = handed_out(exercise)[1:]
    seen = {verdict(lambda seed=seed: run(seed, *roles)) for seed in range(3)}
    t.expect(seen == {Kind(said)}, f"you say {said!r}; the simulated SM says {' or '.join(map(repr, map(str, seen)))}")


# --- attention ---------------------------------------------------------------------------------------------------------


def half_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, softmax_scale: float, mask: np.ndarray | None = None
) -> np.ndarray:
    """What a plain computation gives whose P and result are rounded to fp16; arguments as in `truth.attention`."""
    scores = softmax_scale * (q.astype(np.float32) @ k.astype(np.float32).T)
    scores = scores if mask is None else np.where(mask, scores, -np.inf)
    p = truth.softmax(scores).astype(np.float16).astype(np.float32)
    return (p @ v.astype(np.float32)).astype(np.float16)


def attention(
    t: Trial,
    build: Callable,
    *,
    sq: int = 64,
    sk: int = 96,
    consumers: int = 1,
    tile_n: int = 32,
    stages: int = 2,
    heads: int = 1,
    kv_heads: int = 1,
    batch: int = 1,
    head_dim: int = 64,
    causal: bool = False,
) -> Report:
    """Runs `build(sm, problem, tile)` on fresh fp16 inputs and compares out and LSE with the truth.

    Raises:
        Refused: a verdict, or numbers that are off by more than fp16 allows.
    """
    config = ForwardConfig(head_dim, head_dim, 64 * consumers, tile_n, stages=stages, causal=causal).validate()
    q = t.normal(batch, sq, heads, head_dim)
    k, v = (t.normal(batch, sk, kv_heads, head_dim) for _ in range(2))
    scale = float(t.rng.uniform(0.5, 1.5)) * head_dim**-0.5
    p = simulated.make_problem("5", q, k, v, causal, softmax_scale=scale, config=config, dtype="f16")
    what = f"{sq} queries, {sk} keys, {stages} stages of {tile_n}{', causal' if causal else ''}"
    seed = int(t.rng.integers(10**6))
    report = clean(lambda: simulated.run("5", p, seed=seed, build=build).report, what)
    mask = truth.allowed(sq, sk, causal)
    q, k, v = (tensor.numpy() for tensor in (p.q, p.k, p.v))
    for b in range(batch):
        for h in range(heads):
            one = (q[b, :, h], k[b, :, h // (heads // kv_heads)], v[b, :, h // (heads // kv_heads)])
            out, lse = truth.attention(*one, scale, mask)
            plain = half_attention(*one, scale, mask)
            t.close(p.out.numpy()[b, :, h], out, f"out, {what}", same_precision=plain)
            t.close(p.lse.numpy()[b, h], lse, f"LSE, {what}", tolerance=1e-4)
    return report


# --- a pipelined product -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """C = A B^T, both operands streamed through a ring, k in steps of 64.

    Args:
        a, b: (64, k) fp16. c: (64, 64) fp16.
        stages: slots of the ring.
    """

    a: GlobalTensor
    b: GlobalTensor
    c: GlobalTensor
    stages: int

    @property
    def steps(self) -> int:
        """k-steps."""
        return self.a.shape[1] // 64

    def fresh(self) -> "Product":
        """The same operands, and an output that nobody has written yet."""
        return replace(self, c=GlobalTensor.output("C", self.c.shape, "f16"))


@dataclass(frozen=True)
class Ring:
    """Shared memory and barriers of the product: slot i of `a` and `b` is announced by full[i] and freed by empty[i]."""

    a: SharedTile  # (stage, 64, 64)
    b: SharedTile
    staged: SharedTile  # (64, 64): C on its way out
    full: list[Mbarrier]  # 1 arrival and the bytes of both tiles
    empty: list[Mbarrier]  # one arrival per warp of the multiplying warpgroup

    @property
    def slot_bytes(self) -> int:
        return self.a[0].nbytes + self.b[0].nbytes


def load_step(warp: Role, p: Product, ring: Ring, step: int, slot: int) -> None:
    """Starts both copies of a k-step into a slot. Announces nothing."""
    warp.tma_load(ring.a[slot], p.a, (0, 64 * step), (64, 64), ring.full[slot])
    warp.tma_load(ring.b[slot], p.b, (0, 64 * step), (64, 64), ring.full[slot])


async def store_tile(wg: Role, p: Product, ring: Ring, acc) -> None:
    """Writes C: registers, shared memory, TMA store."""
    await wg.store_shared(ring.staged, acc.read())
    wg.fence_async_proxy()
    wg.tma_store(ring.staged, p.c, (0, 0), (64, 64))
    wg.commit_store()
    await wg.wait_store(0)


def product(p: Product, seed: int, load: Callable, multiply: Callable) -> Report:
    """Runs the two roles. Raises Fault with the verdict."""

    def build(sm: SM) -> None:
        ring = Ring(
            *(sm.shared(name, (p.stages, 64, 64), "f16") for name in "AB"),
            sm.shared("C", (64, 64), "f16"),
            sm.mbarriers("full", p.stages, arrivals=1, by=("load",)),
            sm.mbarriers("empty", p.stages, arrivals=WARPS, by=("multiply",)),
        )
        sm.role("load", role(load), p, ring, threads=WARP)
        sm.role("multiply", role(multiply), p, ring)

    return launch(build, [()], outputs=(p.c,), seed=seed)


def make_product(t: Trial, steps: int = 7, stages: int = 2) -> Product:
    """Fresh operands."""
    a, b = (GlobalTensor.input(name, t.normal(64, 64 * steps), "f16") for name in "AB")
    return Product(a, b, GlobalTensor.output("C", (64, 64), "f16"), stages)


def check_product(t: Trial, load: Callable, multiply: Callable, **sizes: int) -> Report:
    """Runs the roles on fresh operands under a fresh seed; refuses a verdict or wrong numbers."""
    p = make_product(t, **sizes)
    what = f"{p.steps} steps, {p.stages} slots"
    seed = int(t.rng.integers(10**6))
    report = clean(lambda: product(p, seed, load, multiply), what)
    a, b = p.a.numpy(), p.b.numpy()
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    t.close(p.c.numpy(), exact, f"C, {what}", same_precision=(a @ b.T).astype(np.float16))
    return report
