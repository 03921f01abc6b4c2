"""`fa3 demo`: attention on a real text by every rung that this machine can run, each compared with the fp64 truth."""

import json as json_module
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from fa3_course import paths, rungs, sass
from fa3_lib import reference

# The shape of the speed column on a GPU: (batch, seqlen, heads, head_dim), 16k tokens and hidden 2048 as in the paper.
GPU_SHAPE = (4, 4096, 16, 128)


@dataclass(frozen=True)
class Activations:
    """Queries, keys and values that a real transformer computed from a real text.

    Args:
        q, k, v: `(layers, tokens, heads, head_dim)` fp16: the layers stand where the batch stands.
        tokens: the text, word piece by word piece.
        source: where they come from, in one line.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tokens: list[str]
    source: str

    @classmethod
    def load(cls) -> "Activations":
        about = json_module.loads(paths.data("minilm_qkv.json").read_text())
        with np.load(paths.data("minilm_qkv.npz")) as arrays:
            q, k, v = (torch.from_numpy(arrays[name]).transpose(1, 2).contiguous() for name in "qkv")
        layers = ", ".join(map(str, about["layers"]))
        source = (
            f"layers {layers} of {about['package']} {about['version']} reading {about['text']['file']} as it was then"
        )
        return cls(q, k, v, about["tokens"], source)


@dataclass(frozen=True)
class Outcome:
    """What one rung did on this machine.

    Args:
        number, name, idea, where: see `rungs.Rung`; `where` is the reason when it did not run.
        error: relative error of the output against fp64 (Frobenius norm), None when it did not run.
        allowed: whether the largest error is within `limit` (None when it did not run).
        lse_error: largest absolute error of the log-sum-exp.
        ms: median time of one call on the activations, milliseconds.
        tflops: on a GPU, speed on GPU_SHAPE in fp16; None elsewhere.
    """

    number: str
    name: str
    idea: str
    where: str
    error: float | None = None
    allowed: bool | None = None
    lse_error: float | None = None
    ms: float | None = None
    tflops: float | None = None


# --- truth and yardstick ---------------------------------------------------------------------------------------------


def step_by_step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention in PyTorch in the tensors' own precision, nothing fused: the yardstick of rounding errors."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.softmax((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2), dim=-1)
    return (weights @ v).transpose(1, 2)


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    return float((out.double() - truth).norm() / truth.norm())


def limit(yardstick: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest absolute error that a kernel may have: twice PyTorch's own, plus twice the output's rounding noise."""
    rounded = truth.to(yardstick.dtype)
    noise = ((rounded + 0.3 - 0.3) - rounded).abs().max()
    return 2 * float((yardstick.double() - truth).abs().max()) + 2 * float(noise)


# --- running ---------------------------------------------------------------------------------------------------------


def run_rung(rung: rungs.Rung, data: Activations, truth: tuple[torch.Tensor, torch.Tensor], allowed: float) -> Outcome:
    """Runs, checks and times one rung. A rung that this machine cannot run gives an Outcome without numbers."""
    label = (rung.number, rung.name, rung.idea)
    try:
        device, where = rung.device(), rung.where()
        rung.load()
    except (rungs.RungUnavailable, ImportError) as reason:
        return Outcome(*label, where=str(reason))
    q, k, v = (x.to(device) for x in (data.q, data.k, data.v))
    out, lse = rung.run(q, k, v)  # also the warm-up: compiles, fills caches
    worst = float((out.cpu().double() - truth[0]).abs().max())
    return Outcome(
        *label,
        where,
        error=relative_error(out.cpu(), truth[0]),
        allowed=worst <= allowed,  # False for NaN too
        lse_error=float((lse.cpu().double() - truth[1]).abs().max()),
        ms=median_ms(lambda: rung.run(q, k, v), device),
        tflops=gpu_tflops(rung) if device.type == "cuda" else None,
    )


def median_ms(call, device: torch.device, budget_s: float = 1.5) -> float:
    """Median wall-clock time of a call in milliseconds; at least 3 calls, then as many as fit the budget."""
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - start < budget_s and len(times) < 50):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def gpu_tflops(rung: rungs.Rung) -> float | None:
    """TFLOP/s on GPU_SHAPE, fp16, no mask: a first impression; `fa3 bench` measures properly. None if memory is short."""
    from triton.testing import do_bench

    batch, seqlen, heads, head_dim = GPU_SHAPE
    q, k, v = (torch.randn(GPU_SHAPE, device="cuda", dtype=torch.float16) for _ in range(3))
    attention = rung.load()
    try:
        ms = do_bench(lambda: attention(q, k, v), return_mode="median")
    except torch.OutOfMemoryError:  # rung 0 keeps every score
        return None
    return 4 * batch * heads * seqlen**2 * head_dim / ms * 1e-9


def compile_kernel() -> sass.KernelReport:
    """The library's forward kernel (fp16, head_dim 128, no mask), compiled here for sm_90a. Needs no GPU."""
    from fa3_lib.config import forward_config
    from fa3_lib.forward_sm90 import compile_forward

    config = forward_config(128, 128, causal=False)
    (report,) = sass.compile_report(lambda options: compile_forward(config, torch.float16, options))
    return report


# --- the command -----------------------------------------------------------------------------------------------------


def demo(
    plot: Annotated[Path | None, typer.Option(help="Where the plot goes; out/demo.png by default.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the outcomes as JSON.")] = False,
) -> None:
    """Run every rung that this machine can run on real activations; compare, time, plot.

    Exit status 1 when a rung's error is more than its limit.
    """
    from rich.console import Console

    from fa3_course import demo_view as show

    console = Console(highlight=False, stderr=json)
    plot = plot or paths.out() / "demo.png"
    data = Activations.load()
    with console.status("computing the truth in fp64") as status:
        truth = reference.attention(data.q, data.k, data.v)
        yardstick = step_by_step(data.q, data.k, data.v)
        allowed = limit(yardstick, truth[0])
        outcomes = []
        for rung in rungs.RUNGS:
            status.update(f"rung {rung.number}: {rung.name}")
            outcomes.append(run_rung(rung, data, truth, allowed))
        status.update("compiling the CuTe kernel for sm_90a")
        try:
            report, reason = compile_kernel(), ""
        except (ImportError, sass.ToolMissing) as error:
            report, reason = None, str(error)
        status.update("drawing")
        yardstick_error = relative_error(yardstick, truth[0])
        try:
            show.draw(data, truth[1], outcomes, yardstick_error, plot)
        except OSError as error:
            raise SystemExit(f"fa3 demo: the plot cannot be written: {error}") from None

    if json:
        print(
            json_module.dumps(
                {
                    "source": data.source,
                    "yardstick_error": yardstick_error,
                    "rungs": [asdict(o) for o in outcomes],
                    "kernel": report.as_dict() if report else None,
                    "plot": str(plot),
                },
                indent=2,
            )
        )
    else:
        show.report(console, data, outcomes, yardstick_error, report, reason, plot)
    raise typer.Exit(1 if any(o.allowed is False for o in outcomes) else 0)
