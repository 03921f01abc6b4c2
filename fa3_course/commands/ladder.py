"""`fa3 ladder`: the measured ladder as a table and a plot, from the stored rows alone."""

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from fa3_course import ladder as ladders

NOTHING = "No run on a GPU is stored in bench/results. On a Hopper, `fa3 bench` writes one."


def ladder(
    run: Annotated[str | None, typer.Option(help="File name of a stored run; the newest by default.")] = None,
    seqlen: Annotated[int | None, typer.Option(help="Sequence length of the table; 16384 by default.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the ladder into this PNG.")] = None,
    readme: Annotated[
        bool, typer.Option("--readme", help="Rewrite the README's table and plot from the newest run.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Show the measured ladder: TFLOP/s of rungs, library and peers in one run, with their share of its cuBLAS.

    Exit status 1 when no run is stored.
    """
    if readme:
        if run or seqlen or plot:
            raise typer.BadParameter(
                "it takes the newest run as it is: no --run, --seqlen or --plot beside it", param_hint="--readme"
            )
        changed = ladders.update_readme(ladders.chosen_run())
        print(f"README.md {'rewritten' if changed else 'was up to date'}")
        return
    try:
        chosen = ladders.chosen_run(run)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error), param_hint="--run") from None
    if chosen is None:
        print(json_module.dumps(None) if json else NOTHING)
        raise typer.Exit(1)
    try:
        table = ladders.ladder(chosen, seqlen)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--seqlen" if seqlen else "--run") from None
    if json:
        print(json_module.dumps(as_dict(table), indent=2))
    else:
        _show(table)
    if plot:
        try:
            ladders.draw(table, plot)
        except OSError as error:
            raise SystemExit(f"fa3 ladder: the plot cannot be written: {error}") from None
        if not json:
            print(f"Plot: {plot}")


def as_dict(table: ladders.Ladder) -> dict:
    """The table for a script: speeds by kernel and column."""
    return {
        "run": table.run.path.name if table.run.path else None,
        "gpu": table.run.gpu,
        "date": table.run.date,
        "seqlen": table.seqlen,
        "cublas_tflops": table.cublas,
        "kernels": [
            {
                "kernel": line.kernel,
                "dtype": line.dtype,
                "rung": line.rows[0].rung,
                "tflops": {str(c): round(r.tflops, 2) for c, r in line.cells.items()},
                "host_us": line.host_us,
                "error": line.error,
                "stale": line.stale,
            }
            for line in table.lines
        ],
    }


def _show(table: ladders.Ladder) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    run = table.run
    view = Table(box=None, pad_edge=False)
    wide = console.width >= 100
    view.add_column("TFLOP/s" + (" (% of cuBLAS)" if wide else ""), no_wrap=True)
    for column in table.columns:
        view.add_column(str(column).replace(" ", "\n"), justify="right", no_wrap=True)
    view.add_column("host\nus", justify="right")
    view.add_column("error", justify="right", no_wrap=True)
    for line in table.lines:
        cells = [_cell(table, line.cells.get(column), wide) for column in table.columns]
        host = f"{line.host_us:.0f}" if line.host_us is not None else ""
        error = f"{line.error:.0e}" if line.error is not None else ""
        label = f"[bold]{line.label}[/]" if line.ours else line.label
        view.add_row(label + (" [yellow]*[/]" if line.stale else ""), *cells, host, error)
    console.print(view)
    tops = ", ".join(f"{dtype} {tflops:.0f}" for dtype, tflops in sorted(table.cublas.items())) or "not measured"
    console.print(
        f"[dim]{run.gpu}, {run.date[:10]}, sequence length {table.seqlen}, cuBLAS {tops}; bench/results/{run.path.name}[/]"
    )
    if table.stale:
        console.print("[yellow]* its source has changed since this run: `fa3 bench` measures anew[/]")


def _cell(table: ladders.Ladder, row, with_share: bool) -> str:
    if row is None:
        return "[dim]-[/]"
    share = table.share(row) if with_share else None
    return f"{row.tflops:.0f}" + (f" [dim]{share:.0%}[/]" if share is not None else "")
