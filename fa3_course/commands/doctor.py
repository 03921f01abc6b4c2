"""`fa3 doctor`: what this machine has, what is missing, and the command that mends it."""

import json as json_module
from dataclasses import asdict
from typing import Annotated

import typer

from fa3_course import machine
from fa3_course.machine import Finding


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    network: Annotated[bool, typer.Option("--network/--no-network", help="Ask pip's index whether it answers.")] = True,
) -> None:
    """Check this machine: GPU, driver, CUDA, packages against the tested pins, disk, network.

    Exit status 0 when nothing is red, 1 otherwise. Yellow lines are differences that the course lives with.
    """
    findings = machine.examine(network)
    bad = sum(f.status == "bad" for f in findings)
    if json:
        print(json_module.dumps([asdict(f) for f in findings], indent=2))
    else:
        _show(findings, bad)
    raise typer.Exit(1 if bad else 0)


def _show(findings: list[Finding], bad: int) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    style = {"ok": "green", "warn": "yellow", "bad": "red"}
    table = Table(box=None, pad_edge=False)
    for column in ("", "what", "found", "expected"):
        table.add_column(column, overflow="fold")
    for f in findings:
        table.add_row(f"[{style[f.status]}]{f.status}[/]", f.name, escape(f.found), f"[dim]{escape(f.expected)}[/]")
    console.print(table)
    mends = [f for f in findings if f.fix]
    for f in mends:
        console.print(f"\n[{style[f.status]}]{escape(f.name)}[/]: {escape(f.found)}")
        console.print(f"  {f.fix}", markup=False, soft_wrap=True)  # one line, ready to paste
    warned = sum(f.status == "warn" for f in findings)
    colour = "red" if bad else "green"
    console.print(f"\n[{colour}]{bad} to mend[/], {warned} to know about, {len(findings) - bad - warned} in order")
