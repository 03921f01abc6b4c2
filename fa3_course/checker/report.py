"""Shows results: a table in a terminal (rich), the same table as HTML in a notebook."""

import html
import re
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fa3_course.checker.runner import Result, State

MARK = {"passed": "✓", "failed": "✗", "not started": "○", "not possible": "~"}
COLOUR = {"passed": "green", "failed": "red", "not started": "yellow", "not possible": "yellow"}
# readable on white and on black
HTML_COLOUR = {"passed": "#2e8b57", "failed": "#d1343f", "not started": "#b8860b", "not possible": "#b8860b"}
LEFT = 'style="text-align:left"'


def headline(result: Result) -> str:
    """One line: what was checked and how it ended."""
    name = f"{result.number} {result.title}"
    if result.problem:
        return f"{name}: {result.problem}"
    total = len(result.outcomes)
    if result.state == "not started":
        return f"{name}: not started ({result.origin}). The check will ask for {total} properties"
    return f"{name}: {result.holding} of {total} properties hold ({result.origin}, seed {result.seed})"


def footer(result: Result) -> str:
    """How to get the next hint, or nothing when none is needed or left."""
    shown = len(result.hints)
    if result.state == "passed" or result.problem or shown >= result.levels:
        return ""
    level = shown + 1
    return f"Stuck? `hint={level}` (in a terminal `--hint {level}`) shows hint {level} of {result.levels}."


def _rows(result: Result) -> list[tuple[State, str, list[str]]]:
    """State, name, and what was seen with its hint: nothing for a stub, and a repeated error only once."""
    if result.state == "not started":
        return [("not started", outcome.name, []) for outcome in result.outcomes]
    rows: list[tuple[State, str, list[str]]] = []
    before = ""
    for outcome in result.outcomes:
        details = [text for text in (outcome.seen, outcome.hint) if text]
        if outcome.seen and outcome.seen == before:
            details = ["the same"]
        rows.append(("passed" if outcome.passed else "failed", outcome.name, details))
        before = outcome.seen or before
    return rows


def _mark(state: str) -> str:
    return f'<td style="color:{HTML_COLOUR[state]};vertical-align:top"><b>{MARK[state]}</b></td>'


def as_html(result: Result) -> str:
    """The report as HTML that is readable without its styles too (GitHub strips them)."""
    rows = []
    for state, name, details in _rows(result):
        seen = "".join(f"<br><code>{_lines(text)}</code>" for text in details[:1])
        hint = "".join(f"<br><i>{_code(text)}</i>" for text in details[1:])
        rows.append(f"<tr>{_mark(state)}<td {LEFT}>{html.escape(name)}{seen}{hint}</td></tr>")
    hints = "".join(f"<li>{_code(hint)}</li>" for hint in result.hints)
    return (
        f"<p><b>{MARK[result.state]} {html.escape(headline(result))}</b></p>"
        + (f"<table>{''.join(rows)}</table>" if rows else "")
        + (f"<p>Hints</p><ol>{hints}</ol>" if hints else "")
        + (f"<p>{_code(footer(result))}</p>" if footer(result) else "")
    )


def _lines(text: str) -> str:
    """Escaped text that keeps its lines and their indents."""
    return html.escape(text).replace("\n", "<br>").replace("  ", "&nbsp; ")


def _code(text: str) -> str:
    """Escaped text with `backticks` as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def print_result(result: Result, console: Console | None = None) -> None:
    """The report in a terminal."""
    console = console or Console(highlight=False)
    console.print(f"[bold {COLOUR[result.state]}]{MARK[result.state]} {escape(headline(result))}")
    table = Table(show_header=False, box=None, padding=(0, 1))
    for state, name, details in _rows(result):
        styled = [f"[{style}]{escape(text)}[/]" for style, text in zip(("bold", "dim"), details, strict=False)]
        table.add_row(f"[{COLOUR[state]}]{MARK[state]}[/]", "\n".join([escape(name), *styled]))
    if result.outcomes:
        console.print(table)
    for level, hint in enumerate(result.hints, start=1):
        console.print(f"Hint {level}: {escape(hint)}")
    if footer(result):
        console.print(f"[dim]{escape(footer(result))}[/]")


def _state(result: Result) -> str:
    """The state in a board's cell: with a count where some properties hold and some do not."""
    if result.state == "failed" and not result.problem:
        return f"{result.holding} of {len(result.outcomes)} hold"
    return result.problem or result.state


def print_board(results: Sequence[Result], console: Console | None = None) -> None:
    """Many results, one line each."""
    table = Table(show_header=False, box=None, padding=(0, 1))
    for result in results:
        mark = f"[{COLOUR[result.state]}]{MARK[result.state]}[/]"
        table.add_row(mark, escape(f"{result.number} {result.title}"), escape(_state(result)))
    console = console or Console(highlight=False)
    console.print(table)
    console.print(f"{sum(map(bool, results))} of {len(results)} exercises pass")


def board_html(results: Sequence[Result]) -> str:
    """The same in a notebook."""
    rows = []
    for result in results:
        name, state = html.escape(f"{result.number} {result.title}"), html.escape(_state(result))
        rows.append(f"<tr>{_mark(result.state)}<td {LEFT}>{name}</td><td {LEFT}>{state}</td></tr>")
    return f"<p><b>{sum(map(bool, results))} of {len(results)} exercises pass</b></p><table>{''.join(rows)}</table>"


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
