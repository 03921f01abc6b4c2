"""Builds the course's notebooks from their sources.

    python -m fa3_course.notebooks build                               every lesson.py and lab.py, executed
    python -m fa3_course.notebooks build 01                            one chapter, by number, folder or file
    python -m fa3_course.notebooks build --no-execute                  new text, stored outputs of unchanged cells kept
    python -m fa3_course.notebooks check                               which notebooks differ from their sources

A source is a jupytext percent file. A cell `# %% exercise="01.3"` without text becomes three cells: the task, the stub
and its check, all from the exercise's solution, so that a lab never holds a second copy of an exercise.
"""

import argparse
import base64
import hashlib
import re
import sys
from pathlib import Path

import jupytext
import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

from fa3_course import paths, plots
from fa3_course.checker import catalogue
from fa3_course.checker.model import Exercise

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_SECONDS = 300  # limit of one cell
LARGEST = 3_000_000  # bytes of a built notebook; more is slow to open and GitHub stops showing it

# what differs between two equal runs
_VOLATILE = ((re.compile(r"/tmp/ipykernel_\d+/\d+\.py"), "<cell>"), (re.compile(r"\bat 0x[0-9a-f]{6,}"), "at 0x0"))


class BuildError(RuntimeError):
    """A notebook cannot be built; the message names the source and, for a failing cell, its text."""


class _ThisPython(AsyncKernelManager):
    """Starts kernels with the Python that runs this, whatever kernel is registered as "python3" on the machine."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, **METADATA["kernelspec"])


def sources(chosen: list[str] | None = None) -> list[Path]:
    """The lesson*.py and lab*.py of all chapters, or of those given by number ("01"), by folder, or one by one.

    Raises:
        BuildError: one of `chosen` names nothing.
    """
    root = paths.checkout() / "chapters"
    places: list[Path] = []
    for name in chosen or ["[0-9][0-9]"]:
        matches = [Path(name)] if Path(name).exists() else sorted(root.glob(f"{name}_*"))
        if chosen and not matches:
            raise BuildError(f"{name} is neither a chapter below {root} nor a path")
        places += matches
    # a chapter of two sittings has lesson_a.py and lesson_b.py
    patterns = ("lesson*.py", "lab*.py")
    found = [path for place in places if place.is_dir() for name in patterns for path in sorted(place.glob(name))]
    found += [place for place in places if place.suffix == ".py"]
    return [path.resolve() for path in found if path.is_file()]


def _exercise_cells(exercise: Exercise) -> list[NotebookNode]:
    """Task, stub and check of an exercise, from its solution."""
    head = exercise.head
    level = "●" * head.difficulty + "○" * (3 - head.difficulty)
    facts = f"{level} · {head.minutes} minutes · needs {head.needs}"
    task = f"## {exercise.number} {head.title}\n\n{facts}\n\n{head.task}"
    code = exercise.stub.split('"""\n', 1)[1].strip()
    code = code.removeprefix("import numpy as np\n").strip()  # the first cell of every lab imports it
    call = f'check("{exercise.number}", {", ".join(exercise.functions)})'
    # where the machine lacks what the exercise needs, the learner sees why a cell fails and the notebook goes on
    tags = {"tags": ["raises-exception"]} if exercise.modules or exercise.hopper else {}
    return [new_markdown_cell(task), new_code_cell(code, metadata=tags), new_code_cell(call, metadata=tags)]


def _expand(cells: list[NotebookNode]) -> list[NotebookNode]:
    expanded: list[NotebookNode] = []
    for cell in cells:
        number = cell.metadata.get("exercise")
        if number and cell.source.strip():
            raise BuildError(f'the cell with exercise="{number}" must be empty: its text comes from the solution')
        expanded += _exercise_cells(catalogue.find(number)) if number else [cell]
    return expanded


def read_source(path: Path) -> NotebookNode:
    """The notebook that a source describes, without outputs.

    A cell's id is a hash of its text: it stays when other cells change, and outputs can be matched to it.
    """
    notebook = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    notebook.cells = _expand(notebook.cells)
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    used: set[str] = set()
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        text, repeat = cell.cell_type + cell.source, 0
        while (name := hashlib.sha256(f"{text}{repeat or ''}".encode()).hexdigest()[:8]) in used:
            repeat += 1
        used.add(name)
        cell.id = name
    return notebook


def execute(notebook: NotebookNode, folder: Path, cell_seconds: int = CELL_SECONDS) -> None:
    """Runs all cells in `folder` and stores their outputs in place.

    Raises:
        BuildError: a cell raised or ran longer than `cell_seconds`.
    """
    client = NotebookClient(
        notebook,
        timeout=cell_seconds,
        kernel_manager_class=_ThisPython,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    try:
        client.execute()
    except CellExecutionError as error:
        raise BuildError(f"a cell fails:\n{error}") from None
    except TimeoutError as error:
        raise BuildError(f"a cell ran longer than {cell_seconds} s: {error}") from None
    _clean(notebook)


def _clean(notebook: NotebookNode) -> None:
    """Takes out what differs from run to run or only a live kernel can use."""
    notebook.metadata = nbformat.from_dict(METADATA)  # no state of widgets, no version of this Python
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.metadata.pop("execution", None)
        outputs: list[NotebookNode] = []
        for output in cell.outputs:
            previous = outputs[-1] if outputs else None
            if output.output_type == "stream" and previous and previous.get("name") == output.name:
                previous.text += output.text
            else:
                outputs.append(output)
        for output in outputs:
            if output.output_type == "stream":
                output.text = _stable(output.text)
            elif "data" in output:
                output.data.pop("application/vnd.jupyter.widget-view+json", None)
                for kind in output.data.keys() & {"text/plain", "text/html"}:
                    output.data[kind] = _stable(output.data[kind])
        cell.outputs = [o for o in outputs if o.get("data") or o.output_type in ("stream", "error")]


def _stable(text: str) -> str:
    for pattern, replacement in _VOLATILE:
        text = pattern.sub(replacement, text)
    return text


def _keep_outputs(notebook: NotebookNode, built: Path) -> None:
    """Takes over the outputs that are stored for cells whose text has not changed."""
    if not built.is_file():
        return
    stored = {cell.id: cell for cell in nbformat.read(built, as_version=4).cells if cell.cell_type == "code"}
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.id in stored:
            cell.outputs, cell.execution_count = stored[cell.id].outputs, stored[cell.id].execution_count


def _shrink_pictures(notebook: NotebookNode) -> None:
    """Stores each plot with a palette of its own."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                png = plots.with_palette(base64.b64decode(output.data["image/png"]))
                output.data["image/png"] = base64.b64encode(png).decode() + "\n"


def build(source: Path, run: bool = True, out: Path | None = None, cell_seconds: int = CELL_SECONDS) -> Path:
    """Builds one notebook.

    Args:
        source: a lesson.py or lab.py; its cells run in its folder.
        run: execute all cells; otherwise stored outputs of unchanged cells are kept.
        out: folder for the result, as `out/CHAPTER/lesson.ipynb`; beside the source when None.
        cell_seconds: time limit of one cell.

    Returns:
        the notebook's path.

    Raises:
        BuildError: a cell fails, or the result is too large.
    """
    built = source.with_suffix(".ipynb")
    notebook = read_source(source)
    if run:
        execute(notebook, source.parent, cell_seconds)
    else:
        _keep_outputs(notebook, built)
    _shrink_pictures(notebook)
    nbformat.validate(notebook)
    text = nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n"
    if len(text.encode()) > LARGEST:
        raise BuildError(f"{built.name} would have {len(text.encode()):,} bytes, at most {LARGEST:,}: smaller figures")
    if out:
        built = out / source.parent.name / built.name
        built.parent.mkdir(parents=True, exist_ok=True)
    built.write_text(text, encoding="utf-8")
    return built


def difference(source: Path) -> str:
    """How the stored notebook differs from its source, or "" when it does not. Outputs are not compared."""
    built = source.with_suffix(".ipynb")
    if not built.is_file():
        return "is missing"
    wanted = [(cell.cell_type, cell.source) for cell in read_source(source).cells]
    stored = [(cell.cell_type, cell.source) for cell in nbformat.read(built, as_version=4).cells]
    for index, (a, b) in enumerate(zip(wanted, stored, strict=False)):
        if a != b:
            return (
                f"differs from {source.name} in cell {index}: {a[1].splitlines()[:1]} against {b[1].splitlines()[:1]}"
            )
    if len(wanted) != len(stored):
        return f"has {len(stored)} cells, {source.name} describes {len(wanted)}"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m fa3_course.notebooks", description="Build the course's notebooks.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("build", "build notebooks"), ("check", "say which notebooks differ from their sources")):
        command = commands.add_parser(name, help=what)
        command.add_argument("chapters", nargs="*", help="chapters (number or folder) or sources; all when left out")
    building = commands.choices["build"]
    building.add_argument("--execute", action=argparse.BooleanOptionalAction, default=True)
    building.add_argument("--out", type=Path, help="write below this folder instead of beside the sources")
    building.add_argument("--cell-seconds", type=int, default=CELL_SECONDS)
    options = parser.parse_args(arguments)
    try:
        found = sources(options.chapters)
        failed = False
        for source in found:
            name = f"{source.parent.name}/{source.stem}.ipynb"
            if options.command == "build":
                built = build(source, options.execute, options.out, options.cell_seconds)
                print(f"{name}: {built.stat().st_size / 1024:.0f} KB", flush=True)
            elif problem := difference(source):
                failed = True
                print(f"{name} {problem}")
    except (BuildError, paths.CheckoutMissing) as error:
        print(error, file=sys.stderr)
        return 1
    if failed:
        print("`python -m fa3_course.notebooks build` builds them again")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
