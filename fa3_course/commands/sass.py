"""`fa3 sass RUNG`: compiles a rung's kernel for Hopper, on any Linux machine, and shows what is in its machine code."""

import json as json_module
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from fa3_course import rungs, sass


class NoMachineCode(RuntimeError):
    """The rung is not a kernel."""


# shared memory that one program may use on an A100, in bytes (163 KB): what a Triton rung compiled for sm_80 must fit
_SHARED_MEMORY_SM80 = 166_912


def report_rung(
    number: str, head_dim: int, causal: bool, dtype: str, dump: Path | None = None, capability: int = 90
) -> list[sass.KernelReport]:
    """Compiles the kernel of a rung and reports on it.

    Args:
        number: the rung ("2", "5", "lib").
        head_dim: 8..256, a multiple of 8. causal: bottom-right aligned mask. dtype: "fp16" or "bf16"; "fp8" for rung 10 alone.
        dump: where the SASS goes as text, if anywhere.
        capability: 90 for a Hopper; 80 compiles a Triton rung for an A100 instead, to compare.

    Raises:
        KeyError: no such rung. NoMachineCode: the rung is no kernel, or none for this capability. ToolMissing,
        ImportError: what is missing.
    """
    import torch

    rung = rungs.find(number)
    element = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[dtype]
    if (dtype == "fp8") != (rung is rungs.RUNG10):
        raise NoMachineCode(
            f"rung {rung.number} ({rung.name}) has no {dtype} kernel: fp8 is rung 10's dtype, and its only one"
        )
    if rung.needs == "numpy" or rung.number == "0":
        raise NoMachineCode(f"rung {rung.number} ({rung.name}) has no kernel of its own; kernels begin at rung 2")
    if capability not in ((80, 90) if rung.needs == "triton" else (90,)):
        raise NoMachineCode(
            f"rung {rung.number} ({rung.name}) does not compile for sm_{capability}: Triton rungs for sm_80 and sm_90, "
            "CuTe kernels for sm_90 only"
        )
    if rung.needs == "triton":
        reports = sass.cubin_report(_triton_cubin_apart(rung, head_dim, causal, dtype, capability))
    else:
        if rung.number == "lib":
            from fa3_lib.config import forward_config
            from fa3_lib.forward_sm90 import compile_forward

            compile_fn, config = compile_forward, forward_config(head_dim, head_dim, causal)
        else:
            compile_fn, config = rung.module().compile_rung, rung.module().make_config(head_dim, causal)
        reports = sass.compile_report(lambda options: compile_fn(config, element, options))
    if dump:
        dump.parent.mkdir(parents=True, exist_ok=True)
        dump.write_text(reports[0].listing, encoding="utf-8")
    return reports


def _triton_cubin_apart(rung: rungs.Rung, head_dim: int, causal: bool, dtype: str, capability: int) -> bytes:
    """Compiles in a process of its own: in this one Triton may be its interpreter already, and cannot be both."""
    code = (
        "import sys; from fa3_course.commands.sass import triton_cubin; "
        "sys.stdout.buffer.write(triton_cubin(sys.argv[1], int(sys.argv[2]), sys.argv[3] == 'True', sys.argv[4], int(sys.argv[5])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, rung.number, str(head_dim), str(causal), dtype, str(capability)],
        capture_output=True,
        cwd=rungs.paths.checkout(),
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    if done.returncode:
        raise RuntimeError(f"rung {rung.number} does not compile for sm_{capability}:\n{done.stderr.decode()[-2000:]}")
    return done.stdout


def triton_cubin(number: str, head_dim: int, causal: bool, dtype: str, capability: int = 90) -> bytes:
    """The cubin of a Triton rung's `forward_kernel`, for aligned tensors and lengths; `capability` is 90 or 80.

    No GPU is needed; TRITON_INTERPRET must be 0.
    """
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = rungs.find(number).module()
    element = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    limit = {"shared_memory": _SHARED_MEMORY_SM80} if capability == 80 else {}
    options = module.launch_options(head_dim, head_dim, element, causal, **limit)
    kernel = module.forward_kernel
    constants = {p.name: options[p.name] for p in kernel.params if p.is_constexpr}
    kinds = {
        "Q": f"*{dtype}",
        "K": f"*{dtype}",
        "V": f"*{dtype}",
        "O": f"*{dtype}",
        "LSE": "*fp32",
        "scale_log2": "fp32",
    }
    names = [p.name for p in kernel.params]
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    # what the launcher finds out about usual tensors: 16 divides pointers, strides, lengths and head dims
    aligned = [n for n in names if n not in constants and n not in ("heads", "group", "scale_log2")]
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    launch = {name: options[name] for name in ("num_warps", "num_stages")}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch).asm["cubin"]


def sass_command(
    rung: Annotated[str, typer.Argument(help="Number of the rung, or lib.")] = "lib",
    d: Annotated[int, typer.Option("--d", help="Head dim: a multiple of 8, up to 256.")] = 128,
    causal: Annotated[bool, typer.Option("--causal", help="With the causal mask.")] = False,
    dtype: Annotated[str | None, typer.Option(help="fp16 (default) or bf16; for rung 10 fp8.")] = None,
    dump: Annotated[Path | None, typer.Option(help="Also write the whole SASS to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compile a rung for Hopper (no GPU needed) and count what is in its machine code.

    Exit status 1 when the kernel spills, uses local memory, or ptxas advises against something in it.
    """
    if d % 8 or not 8 <= d <= 256:
        raise typer.BadParameter(f"head dim {d}: a multiple of 8 from 8 to 256", param_hint="--d")
    try:
        dtype = dtype or ("fp8" if rungs.find(rung) is rungs.RUNG10 else "fp16")
        if dtype not in ("fp16", "bf16", "fp8"):
            raise typer.BadParameter(f"{dtype}: fp16 or bf16; for rung 10 fp8", param_hint="--dtype")
        reports = report_rung(rung, d, causal, dtype, dump)
    except KeyError as error:
        raise typer.BadParameter(error.args[0], param_hint="RUNG") from None
    except (NoMachineCode, sass.ToolMissing, ImportError, OSError) as error:
        raise SystemExit(f"fa3 sass: {error}") from None

    if json:
        print(json_module.dumps([r.as_dict() | {"problems": r.problems()} for r in reports], indent=2))
    else:
        from rich.console import Console

        from fa3_course.demo_view import kernel_table

        console = Console(highlight=False)
        for report in reports:
            console.print(
                f"[bold]{rungs.find(rung).name}[/], sm_90a, {dtype}, head_dim {d}, {'causal' if causal else 'no mask'}"
            )
            console.print(kernel_table(report))
        if dump:
            console.print(f"SASS: {dump}")
    raise typer.Exit(1 if any(r.problems() for r in reports) else 0)
