"""What a newcomer reads first must be true: links, commands, the example, minutes, the two commands of the Makefile."""

import re
import subprocess

import pytest
import torch

from fa3_course import cli, paths

ROOT = paths.checkout()
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "chapters/README.md"]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [t.partition("#")[0] for t in re.findall(r"\]\(([^)]+)\)", text) if "://" not in t]
    assert [t for t in targets if not ((ROOT / page).parent / t).exists()] == []


def test_the_examples_run():
    """On a Hopper as they stand, elsewhere on CPU tensors."""
    code = "".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL))
    if not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
        code = code.replace('device="cuda"', 'device="cpu"')
    names: dict = {}
    exec(code, names)
    assert names["out"].shape == names["q"].shape and names["out"].isfinite().all()
    assert names["lse"].shape == (2, 16, 1024)
    error = (names["out8"].float() - names["out"].float()).norm() / names["out"].float().norm()
    assert 0 < error < 0.1  # 8 bits beside 16


def test_the_readme_names_every_command():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"the `fa3` command: `([^`]*)`", text)
    assert set(listed.split()) == set(cli.COMMANDS)


def test_minutes_of_a_lab_are_those_of_its_exercises():
    text = (ROOT / "chapters" / "README.md").read_text(encoding="utf-8")
    folders = [exercises.parent for exercises in sorted((ROOT / "chapters").glob("*/exercises"))]
    assert folders
    for folder in folders:
        heads = [f.read_text(encoding="utf-8") for f in (folder / "exercises").glob("ex*.py")]
        minutes = sum(int(re.search(r"Difficulty \d of 3, (\d+) minutes", head)[1]) for head in heads)
        assert f"[{minutes} min]({folder.name}/lab.ipynb)" in text


def make(*arguments: str) -> str:
    """What make would do, without doing it."""
    done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("goal, runs", [("demo", "-m fa3_course demo"), ("test", "-m pytest")])
def test_an_existing_environment_gets_nothing_installed(goal, runs):
    plan = make(goal, "PY=somewhere/python3")
    assert f"somewhere/python3 {runs}" in plan
    assert "pip install" not in plan and "venv" not in plan


@pytest.mark.parametrize("goal, runs", [("demo", "-m fa3_course demo"), ("test", "-m pytest")])
def test_a_new_clone_installs_the_pins_first(goal, runs):
    plan = make(goal, "--always-make", "PYTHON=python3.99")
    assert plan.index("python3.99 -m venv .venv") < plan.index("pip install") < plan.index(f".venv/bin/python {runs}")
    assert "-c constraints.txt -e '.[course,test]'" in plan


def test_ci_runs_the_test_command_of_the_readme():
    assert "\nmake test" in (ROOT / ".ci" / "run").read_text()
    assert "\nmake test " in (ROOT / "README.md").read_text(encoding="utf-8")
