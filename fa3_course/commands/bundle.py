"""`fa3 bundle OUT`: wheels for a machine without a network."""

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fa3_course import bundle as bundles
from fa3_course import paths


def bundle(
    out: Annotated[Path, typer.Argument(help="Folder to fill; a second call goes on where the first one ended.")],
    python: Annotated[str, typer.Option(help="Python version of the other machine.")] = "3.12",
    arch: Annotated[str, typer.Option(help="Its processor: x86_64 or aarch64.")] = "x86_64",
    part: Annotated[
        list[str] | None, typer.Option(help="kernels, course, peers or torch; repeat it. Default: kernels and course.")
    ] = None,
    archives: Annotated[
        bool, typer.Option("--archives", help="Also pack each part as a .tar.xz, a third of the size.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:
    """Pack wheels for a machine without a network, from your own pip downloads.

    That machine needs Linux and Python with PyTorch (or --part torch, 2.7 GB). Copy OUT and the clone there, run
    OUT/install.sh, then `make demo PY=python3` in the clone.
    """
    parts = part or ["kernels", "course"]
    if unknown := sorted(set(parts) - set(bundles.PARTS)):
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(bundles.PARTS)}", param_hint="--part")
    if arch not in bundles.ARCHITECTURES:
        raise typer.BadParameter(f"{arch}: {' or '.join(bundles.ARCHITECTURES)}", param_hint="--arch")
    if not python.startswith("3.") or not python[2:].isdigit() or int(python[2:]) < 11:
        raise typer.BadParameter(f"{python}: 3.11 or newer, as in 3.12", param_hint="--python")

    def say(line: str) -> None:
        typer.echo(line, err=json)

    pins = bundles.read_pins(paths.checkout() / "constraints.txt")
    say(bundles.NOTICE)
    for name in parts:
        say(f"{name}: {bundles.PARTS[name]}")
    try:
        outcome = bundles.fill(out, parts, bundles.Target(python, arch), pins, say=say)
        packed = bundles.archive(out, parts, pins, say) if archives else []
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"fa3 bundle: {error}") from None
    if json:
        print(json_module.dumps(asdict(outcome) | {"out": str(out), "archives": [str(p) for p in packed]}, indent=2))
        return
    total = sum(file.stat().st_size for file in (out / "wheels").glob("*.whl"))
    say(
        f"\n{out}: {len(outcome.fetched)} wheels came, {len(outcome.kept)} were there, {bundles.megabytes(total)} in all"
    )
    say(f"On the other machine:  {out.name}/install.sh && . {out.name}/env.sh")
