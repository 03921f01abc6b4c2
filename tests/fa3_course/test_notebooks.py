"""The notebooks: they agree with their sources and run top to bottom, the labs unsolved and solved."""

import shutil
import subprocess
import sys

import nbformat
import pytest

from fa3_course import notebooks
from fa3_course.checker import catalogue, submission, workspace

CELL_SECONDS = 300
SOURCES = {f"{source.parent.name}/{source.stem}": source for source in notebooks.sources()}
LABS = {name: source for name, source in SOURCES.items() if source.stem == "lab"}


@pytest.mark.parametrize("name", SOURCES)
def test_notebook_agrees_with_its_source(name):
    problem = notebooks.difference(SOURCES[name])
    assert not problem, f"{name}.ipynb {problem}; `python -m fa3_course.notebooks build` builds it again"


@pytest.mark.parametrize("name", SOURCES)
def test_notebook_runs(name):
    """nbval, lax: every cell runs; outputs are compared only where a cell asks for it."""
    notebook = SOURCES[name].with_suffix(".ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env", "-q", "-p", "no:cacheprovider"]
    command += ["--nbval-cell-timeout", str(CELL_SECONDS), str(notebook)]
    done = subprocess.run(command, cwd=notebook.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("name", LABS)
def test_lab_runs_solved(name, tmp_path, monkeypatch):
    """The unsolved lab with every solution caught up: each check passes, and the cells that build on answers run."""
    chapter = tmp_path / "chapters" / LABS[name].parent.name
    shutil.copytree(LABS[name].parent, chapter)
    monkeypatch.chdir(chapter)
    workspace.reset(chapter.name[:2])
    workspace.catch_up(chapter.name[:2])
    lab = notebooks.read_source(chapter / "lab.py")
    notebooks.execute(lab, chapter, CELL_SECONDS)

    exercises = catalogue.exercises(chapter.name[:2])
    possible = [exercise for exercise in exercises if not submission.lacking_here(exercise)]
    outputs = [output for cell in lab.cells if cell.cell_type == "code" for output in cell.outputs]
    errors = [output.evalue for output in outputs if output.output_type == "error"]
    assert not errors or len(possible) < len(exercises), errors
    texts = [output.get("text", "") + output.get("data", {}).get("text/html", "") for output in outputs]
    assert f"<b>{len(possible)} of " in texts[-1], texts[-1]
    assert not any("Solve " in text or "Still to solve" in text for text in texts), "a cell did not get its answers"


def write(path, *cells):
    path.write_text("".join(f"# %%{head}\n{text}\n\n" for head, text in cells), encoding="utf-8")
    return path


def outputs(path):
    cells = nbformat.read(path, as_version=4).cells
    return {cell.source: "".join(output.text for output in cell.outputs) for cell in cells if cell.cell_type == "code"}


def test_unchanged_cells_keep_id_and_output(tmp_path):
    first, second = "import random\nprint(random.random())", "print(2)"
    source = write(tmp_path / "lesson.py", ("", first), (" [markdown]", "# text"), ("", second))
    before = nbformat.read(notebooks.build(source), as_version=4)
    kept = outputs(source.with_suffix(".ipynb"))
    assert kept[second] == "2\n" and notebooks.difference(source) == ""

    write(source, ("", "print(0)"), ("", first), ("", second), ("", second))
    assert "cell 0" in notebooks.difference(source)
    built = notebooks.build(source, run=False)
    after = nbformat.read(built, as_version=4)
    assert outputs(built)[first] == kept[first] and outputs(built)["print(0)"] == ""
    ids = [cell.id for cell in after.cells]
    assert ids[1:3] == [before.cells[0].id, before.cells[2].id] and len(set(ids)) == len(ids)


def test_other_folder_and_stable_text(tmp_path):
    text = "print(object()); import warnings; warnings.warn('careful', stacklevel=1)"
    (tmp_path / "01_x").mkdir()
    source = write(tmp_path / "01_x" / "lab.py", ("", text))
    built = notebooks.build(source, out=tmp_path / "out")
    again = notebooks.build(source, out=tmp_path / "again")
    assert built == tmp_path / "out" / "01_x" / "lab.ipynb" and not source.with_suffix(".ipynb").exists()
    assert built.read_text() == again.read_text(), "two builds of one source differ"


@pytest.mark.parametrize(
    ("text", "message"), [("x = 1\nx / 0", "ZeroDivisionError"), ("while True:\n    pass", "longer than 2 s")]
)
def test_a_bad_cell_stops_the_build(tmp_path, text, message):
    source = write(tmp_path / "lesson.py", ("", "print(1)"), ("", text))
    with pytest.raises(notebooks.BuildError, match=message):
        notebooks.build(source, cell_seconds=2)
    assert not source.with_suffix(".ipynb").exists()


def test_exercise_cells_come_from_the_solution(tmp_path):
    exercise = catalogue.exercises()[0]
    source = write(tmp_path / "lab.py", (f' exercise="{exercise.number}"', ""))
    task, stub, check = notebooks.read_source(source).cells
    assert exercise.head.title in task.source and exercise.head.task in task.source
    assert "region learner" in stub.source and "NotImplementedError" in stub.source
    assert check.source.startswith(f'check("{exercise.number}", ')
    write(source, (f' exercise="{exercise.number}"', "print(1)"))
    with pytest.raises(notebooks.BuildError, match="must be empty"):
        notebooks.read_source(source)


def test_command_line(tmp_path, capsys):
    source = write(tmp_path / "lesson.py", ("", "print(1)"))
    assert notebooks.main(["check", str(source)]) == 1
    assert "is missing" in capsys.readouterr().out
    assert notebooks.main(["build", "--no-execute", str(source)]) == 0
    assert notebooks.main(["check", str(source)]) == 0
    assert notebooks.main(["build", "no_such_chapter"]) == 1
    assert "neither a chapter" in capsys.readouterr().err
