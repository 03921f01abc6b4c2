"""Shows results: a table in a terminal (rich), the same table as HTML in a notebook."""

import html
import re
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fa3_course.checker.runner import Outcome, Result

MARK = {"passed": "✓", "failed": "✗", "not started": "○", "not possible": "–"}
COLOUR = {"passed": "green", "failed": "red", "not started": "yellow", "not possible": "yellow"}


def headline(result: Result) -> str:
    """One line: what was checked and how it ended."""
    name = f"{result.number} {result.title}"
    if result.problem:
        return f"{name}: {result.problem}"
    total = len(result.outcomes)
    if result.state == "not started":
        return f"{name}: not started. The check will ask for {total} properties"
    return f"{name}: {result.holding} of {total} properties hold ({result.origin}, seed {result.seed})"


def footer(result: Result) -> str:
    """How to get the next hint, or nothing when none is needed or left."""
    shown = len(result.hints)
    if result.state == "passed" or result.problem or shown >= result.levels:
        return ""
    return f"Stuck? hint={shown + 1} shows hint {shown + 1} of {result.levels}."


def _cells(result: Result, outcome: Outcome) -> tuple[str, str, str]:
    if result.state == "not started":
        return MARK["not started"], outcome.name, ""
    return MARK["passed" if outcome.passed else "failed"], outcome.name, outcome.seen


def as_html(result: Result) -> str:
    """The report as HTML that is readable without its styles too (GitHub strips them)."""
    rows = []
    for outcome in result.outcomes:
        mark, name, seen = (html.escape(cell) for cell in _cells(result, outcome))
        colour = COLOUR["not started" if mark == MARK["not started"] else "passed" if outcome.passed else "failed"]
        hint = f"<br><i>{_code(outcome.hint)}</i>" if seen and outcome.hint else ""
        detail = f"<br><code>{seen}</code>{hint}" if seen else ""
        rows.append(
            f'<tr><td style="color:{colour};vertical-align:top"><b>{mark}</b></td>'
            f'<td style="text-align:left">{name}{detail}</td></tr>'
        )
    hints = "".join(f"<li>{_code(hint)}</li>" for hint in result.hints)
    return (
        f"<p><b>{MARK[result.state]} {html.escape(headline(result))}</b></p>"
        + (f"<table>{''.join(rows)}</table>" if rows else "")
        + (f"<p>Hints</p><ol>{hints}</ol>" if hints else "")
        + (f"<p>{_code(footer(result))}</p>" if footer(result) else "")
    )


def _code(text: str) -> str:
    """Escaped text with `backticks` as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def print_result(result: Result, console: Console | None = None) -> None:
    """The report in a terminal."""
    console = console or Console(highlight=False)
    console.print(f"[bold {COLOUR[result.state]}]{MARK[result.state]} {escape(headline(result))}")
    table = Table(show_header=False, box=None, padding=(0, 1))
    for outcome in result.outcomes:
        mark, name, seen = _cells(result, outcome)
        colour = "yellow" if mark == MARK["not started"] else "green" if outcome.passed else "red"
        detail = (
            f"\n[bold]{escape(seen)}[/]" + (f"\n[dim]{escape(outcome.hint)}[/]" if outcome.hint else "") if seen else ""
        )
        table.add_row(f"[{colour}]{mark}[/]", escape(name) + detail)
    if result.outcomes:
        console.print(table)
    for level, hint in enumerate(result.hints, start=1):
        console.print(f"Hint {level}: {escape(hint)}")
    if footer(result):
        console.print(f"[dim]{escape(footer(result).replace('hint=', '--hint '))}[/]")


def print_board(results: Sequence[Result], console: Console | None = None) -> None:
    """Many results, one line each."""
    table = Table(box=None, padding=(0, 2))
    for column in ("", "exercise", "state", "properties"):
        table.add_column(column, justify="left")
    for result in results:
        colour = COLOUR[result.state]
        counted = f"{result.holding}/{len(result.outcomes)}" if result.state in ("passed", "failed") else ""
        table.add_row(
            f"[{colour}]{MARK[result.state]}[/]",
            escape(f"{result.number} {result.title}"),
            result.problem or result.state,
            counted,
        )
    (console or Console(highlight=False)).print(table)


def board_html(results: Sequence[Result]) -> str:
    """The same in a notebook."""
    rows = "".join(
        f'<tr><td style="color:{COLOUR[r.state]}"><b>{MARK[r.state]}</b></td><td style="text-align:left">'
        f'{html.escape(f"{r.number} {r.title}")}</td><td style="text-align:left">{html.escape(r.problem or r.state)}</td></tr>'
        for r in results
    )
    done = sum(map(bool, results))
    return f"<p><b>{done} of {len(results)} exercises pass</b></p><table>{rows}</table>"


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


def show(result: Result) -> None:
    """The report, where the learner sees it."""
    _show(as_html(result), lambda console: print_result(result, console))


def show_board(results: Sequence[Result]) -> None:
    """The chapter's board, where the learner sees it."""
    _show(board_html(results), lambda console: print_board(results, console))


def _show(markup: str, write) -> None:
    if not in_notebook():
        write(None)
        return
    from IPython.display import display

    with (console := Console(highlight=False, width=100, force_jupyter=False, color_system=None)).capture() as text:
        write(console)
    display({"text/html": markup, "text/plain": text.get()}, raw=True)
