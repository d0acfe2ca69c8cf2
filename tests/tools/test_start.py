"""`ajet init --example` and `ajet demo`: tutorials written from the package, and a model trained at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ajet_sdk.config.config import load_config
from ajet_tools.cli import start
from ajet_tools.cli.app import app

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(p.name.removeprefix("example_") for p in (ROOT / "tutorial").glob("example_*") if p.is_dir())


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    return tmp_path


def ajet(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.output


def test_every_tutorial_is_written_with_paths_of_its_new_place(here: Path) -> None:
    listed = ajet("init", "--example", "list")
    for name in EXAMPLES:
        assert re.search(rf"^  {name} +\S", listed, re.M)
        said = ajet("init", "--example", name)
        assert f"See example_{name}/README.md" in said
        made, source = here / f"example_{name}", ROOT / "tutorial" / f"example_{name}"
        for path in (p for p in made.rglob("*") if p.is_file()):
            assert "tutorial/example_" not in path.read_text(encoding="utf-8"), path
        assert {p.name for p in made.glob("*.py")} == {p.name for p in source.glob("*.py")}
    for config in here.glob("example_*/*.yaml"):
        if re.search("^ajet:", config.read_text(), re.M):
            load_config(config)


def test_a_file_that_is_no_text_is_copied_as_it_is(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = here / "tutorial" / "example_pictures"
    folder.mkdir(parents=True)
    (folder / "README.md").write_bytes(b"# Pictures\r\n\ntutorial/example_pictures/a.png\r\n")
    picture = b"\x89PNG\r\n\x1a\n\0\xff tutorial/example_pictures/"
    (folder / "a.png").write_bytes(picture)
    monkeypatch.setattr(start, "_examples", lambda: {"pictures": folder})
    ajet("init", "--example", "pictures")
    assert (here / "example_pictures" / "a.png").read_bytes() == picture
    assert (here / "example_pictures" / "README.md").read_bytes() == b"# Pictures\r\n\na.png\r\n"


def test_what_an_example_needs_of_another_is_said(here: Path) -> None:
    said = ajet("init", "--example", "feedback_tracing", "mine")
    assert f"ajet init --example math_agent {here / 'example_math_agent'}" in said
    assert "  cd mine\n  ajet run --conf feedback.yaml" in said


def test_an_example_that_is_not_there_is_refused() -> None:
    done = CliRunner().invoke(app, ["init", "--example", "frozenlke"])
    assert done.exit_code == 2 and "did you mean frozenlake?" in done.output
    done = CliRunner().invoke(app, ["init"])
    assert done.exit_code == 2 and "ajet init NAME" in done.output
    done = CliRunner().invoke(app, ["demo", "--view"])
    assert done.exit_code == 2 and "needs a terminal" in done.output


@pytest.mark.slow
def test_the_demo_trains_a_calculator_and_says_what_to_look_at(here: Path) -> None:
    pytest.importorskip("torch")
    said = ajet("demo")
    gained = re.search(r"val/reward ([\d.]+) → ([\d.]+)", said)
    assert gained is not None and float(gained[2]) > float(gained[1]) + 0.1
    assert "ajet trace view ajet-demo/launcher_record/demo" in said
    assert (here / "ajet-demo" / "agent.py").exists()
