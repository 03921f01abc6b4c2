"""A rung's file in a lesson: its module, its machine code, a check and a time on this machine's card. Registered or not."""

from pathlib import Path

import torch

from fa3_course import paths, rungs, sass
from fa3_course.results import Row, Run
from fa3_lib import reference

# batch, query and key lengths, heads, KV heads, head dim: around the tiles, GQA, more queries than keys
SHAPES = ((1, 1, 1, 1, 1, 64), (2, 239, 600, 4, 2, 128), (1, 700, 129, 2, 1, 256))


def module(file: str):
    """The module of a CuTe rung, by its file relative to the repository's root."""
    from fa3_course import rung_host

    return rung_host.edited(paths.checkout() / file)


def machine_code(file: str, head_dim: int = 128, causal: bool = False) -> sass.KernelReport:
    """A CuTe rung compiled for sm_90a here and now; no GPU is needed."""
    rung = module(file)
    config = rung.make_config(head_dim, causal)
    return sass.compile_report(lambda options: rung.compile_rung(config, torch.bfloat16, options))[0]


def stored(run: Run | None, file: str, **shape: object) -> Row | None:
    """The stored bf16 forward row of a rung by its file, or of a kernel by its name ("fa3_lib"); None if there is none."""
    return run.one(kernel=Path(file).stem, direction="fwd", dtype="bf16", **shape) if run else None


def check(file: str) -> None:
    """On a Hopper: raises AssertionError unless the error is within twice that of PyTorch in bf16, on every shape."""
    attention, eager = module(file).attention, rungs.find("0").load()
    for b, sq, sk, h, hk, d in SHAPES:
        for causal in (False, True):
            shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, d))
            q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
            out, lse = attention(q, k, v, causal=causal)
            want, want_lse = reference.attention(q, k, v, causal=causal)
            allowed = 2 * (eager(q, k, v, causal=causal)[0].double() - want).abs().max()
            allowed += 4 * torch.finfo(q.dtype).eps * want.abs().max()
            assert (out.double() - want).abs().max() <= allowed, (file, b, sq, sk, h, hk, d, causal)
            assert torch.equal(lse == -torch.inf, want_lse == -torch.inf), (file, b, sq, sk, h, hk, d, causal)


def tflops(file: str, head_dim: int = 128, seqlen: int = 8192) -> float:
    """On a Hopper: TFLOP/s of the paper's benchmark (16k tokens, hidden size 2048), without a mask, bf16."""
    import triton

    shape = (16_384 // seqlen, seqlen, 2048 // head_dim, head_dim)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    attention = module(file).attention
    ms = triton.testing.do_bench(lambda: attention(q, k, v), return_mode="median")
    return 4 * seqlen * 16_384 * 2048 / ms / 1e9


def check_and_measure(file: str, run: Run | None) -> str:
    """What a lesson prints of a rung: checked and timed on a Hopper, and the stored row at d 128, 8k, full."""
    row = stored(run, file, head_dim=128, causal=False, seqlen=8192)
    kept = f"stored: {row.tflops:.0f} TFLOP/s on {run.gpu} ({row.shape})" if row else "no stored row of this rung yet"
    name = Path(file).stem
    if not rungs.has_hopper():
        return f"{name} needs a Hopper to run; its protocol ran on the simulated SM\n{kept}"
    check(file)
    return f"{name}: right on every shape; your card: {tflops(file):.0f} TFLOP/s (d 128, 8k, full)\n{kept}"
