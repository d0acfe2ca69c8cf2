"""`ajet init --example` and `ajet demo`: tutorials written from the package, and a model trained at
once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ajet_sdk.config.config import load_config
from ajet_sdk.errors import CPU_TORCH
from ajet_tools.cli import start
from ajet_tools.cli.app import app

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(
    p.name.removeprefix("example_") for p in (ROOT / "tutorial").glob("example_*") if p.is_dir()
)


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


def test_a_file_that_is_no_text_is_copied_as_it_is(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def without(modules: tuple[str, ...], code: str, here: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python that lacks these modules."""
    absent = f"import sys; sys.modules |= dict.fromkeys({modules!r})\n"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", absent + code]
    return subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_the_demo_writes_nothing_where_a_package_is_missing(here: Path, package: str) -> None:
    command = "from ajet_tools.cli.app import main; sys.argv = ['ajet', 'demo']; main()"
    done = without((package,), command, here)
    assert (
        done.returncode == 2
        and f'{package} is not installed. Install it with: pip install "ajet[local]"' in done.stderr
    )
    assert ("download.pytorch.org/whl/cpu" in done.stderr) == (package == "torch")
    assert list(here.iterdir()) == []


def test_the_cpu_build_that_is_named_is_of_a_version_that_ajet_takes() -> None:
    [bound] = re.findall(r'"torch>=[\d.]+,(<[\d.]+)"', (ROOT / "pyproject.toml").read_text())
    pages = [path.read_text() for path in (ROOT / "README.md", ROOT / "docs/guide/install.md")]
    assert all(f'pip install "torch{bound}" --index-url' in text for text in [CPU_TORCH, *pages])


def test_on_windows_the_import_and_the_command_are_one_message_that_names_wsl(here: Path) -> None:
    done = without(("fcntl",), "import ajet", here)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(
        "ImportError: ajet runs on Linux and macOS"
    )
    as_module = (
        "import runpy; sys.argv[0] = '-m'; runpy.run_module('ajet', run_name='__main__',"
        " alter_sys=True)"
    )
    for command in ("from ajet_tools.cli.app import main", as_module):
        done = without(("fcntl",), command, here)
        [line] = done.stderr.splitlines()
        assert (
            done.returncode == 1
            and line.startswith("Error: ajet runs on Linux and macOS")
            and "WSL" in line
        )


@pytest.mark.slow
def test_what_a_training_run_recommends_is_installed(here: Path) -> None:
    show = (
        "from ajet_sdk.reporting.results import TunedModel\nprint(TunedModel(None,"
        " directory='run'))"
    )
    assert "View with:  ajet trace view run" in without((), show, here).stdout
    assert "View with:  ajet trace ls run" in without(("textual",), show, here).stdout
    text = (ROOT / "pyproject.toml").read_text()
    assert '"ajet[tools]"' in text[text.index("\nlocal = [") : text.index("\ntools = [")]


@pytest.mark.slow
def test_the_demo_trains_a_calculator_and_says_what_to_look_at(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.delitem(
        sys.modules, "agent", raising=False
    )  # of another test's job, in this process
    said = ajet("demo")
    gained = re.search(r"val/reward ([\d.]+) → ([\d.]+)", said)
    assert gained is not None and float(gained[2]) > float(gained[1]) + 0.1
    assert "ajet trace view ajet-demo/launcher_record/demo" in said
    assert (here / "ajet-demo" / "agent.py").exists()
