"""What is released: the wheel and the source archive, built and installed in environments of their
own."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from importlib import import_module, metadata
from pathlib import Path

import pytest

import ajet

ROOT = Path(__file__).parents[1]


def test_the_package_is_whole() -> None:
    """Every public name is there, and the package says what it needs."""
    assert all(getattr(ajet, name) is not None for name in ajet.__all__)
    assert import_module("ajet_tools.cli.app").app
    about = metadata.metadata("ajet")
    assert about["Requires-Python"] == ">=3.10" and "local" in about.get_all("Provides-Extra", [])


def test_every_public_name_and_method_says_what_it_is() -> None:
    undocumented = [name for name in ajet.__all__ if not getattr(ajet, name).__doc__]
    for name in ajet.__all__:
        members = vars(getattr(ajet, name)) if inspect.isclass(getattr(ajet, name)) else {}
        for member, value in members.items():
            code = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if inspect.isfunction(code) and not member.startswith("_") and not code.__doc__:
                undocumented.append(f"{name}.{member}")
    assert undocumented == []


@pytest.mark.slow
def test_the_types_of_the_public_names_are_complete() -> None:
    pytest.importorskip("pyright", reason="needs `pip install pyright`")
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--verifytypes",
        "ajet",
        "--ignoreexternal",
        "--outputjson",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert json.loads(done.stdout)["typeCompleteness"]["completenessScore"] >= 0.95


def call(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OPENAI_API_KEY": "none", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [str(one) for one in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """The wheel, built into a folder from the source archive, which is built from this checkout."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    needed = ("hatchling>=1.26", "hatch-fancy-pypi-readme>=24")
    call(*pip, "install", "--target", folder / "hatch", *needed, cwd=folder)
    build = (
        f"import sys; sys.path.insert(0, {str(folder / 'hatch')!r}); from hatchling.build import"
    )
    call(sys.executable, "-c", f"{build} build_sdist; build_sdist({str(folder)!r})", cwd=ROOT)
    (archive,) = folder.glob("ajet-*.tar.gz")
    call("tar", "xzf", archive, cwd=folder)
    source = folder / archive.name.removesuffix(".tar.gz")
    call(sys.executable, "-c", f"{build} build_wheel; build_wheel({str(folder)!r})", cwd=source)
    (wheel,) = folder.glob("ajet-*.whl")
    return wheel


@pytest.mark.slow
def test_the_source_archive_takes_what_belongs_to_it_and_nothing_beside(tmp_path: Path) -> None:
    """A clone in which somebody worked has runs, agents and keys of their own in it."""
    clone = tmp_path / "clone"
    files = call("git", "ls-files", cwd=ROOT).split("\n")
    for file in filter(None, files):
        (clone / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, clone / file)
    for own in (
        "demo/agent.py",
        "example_text_to_sql/train.jsonl",
        ".env",
        "notes.md",
        "runs/x/trace.duckdb",
    ):
        (clone / own).parent.mkdir(parents=True, exist_ok=True)
        (clone / own).touch()
    call(sys.executable, "-m", "pip", "-q", "install", "--target", tmp_path / "hatch", "hatchling>=1.26",
         "hatch-fancy-pypi-readme>=24", cwd=tmp_path)  # fmt: skip
    build = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'hatch')!r}); from hatchling.build import"
        " build_sdist"
    )
    call(sys.executable, "-c", f"{build}; build_sdist({str(tmp_path)!r})", cwd=clone)
    (archive,) = tmp_path.glob("ajet-*.tar.gz")
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
        about = opened.extractfile(f"{archive.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert about is not None
        description = about.read().decode()
    assert packed - set(files) == {"PKG-INFO"}
    assert {
        "ajet/__init__.py",
        "tests/test_wheel.py",
        "docs/README.md",
        "README.md",
        "LICENSE",
    } <= packed
    assert "# ajet" in description and "](docs/" not in description and "![" not in description


@pytest.mark.slow
@pytest.mark.timeout(2000)  # three minutes on a quiet machine: it starts first
def test_wheel_and_source_archive_are_built_and_work_where_nothing_else_is(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    venv.create(tmp_path / "fresh", with_pip=True)
    python, command = tmp_path / "fresh/bin/python", tmp_path / "fresh/bin/ajet"
    call(
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "-q",
        "install",
        wheel,
        "pytest",
        cwd=tmp_path,
    )

    pages = tmp_path / "pages"
    for folder in ("docs", "tutorial"):
        shutil.copytree(
            ROOT / folder, pages / folder, ignore=shutil.ignore_patterns("launcher_record")
        )
    for file in ("README.md", "tests/test_code_blocks.py"):
        (pages / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, pages / file)
    assert " passed" in call(python, "-m", "pytest", "-q", "tests", cwd=pages)

    here = tmp_path / "here"
    here.mkdir()
    assert f"ajet {ajet.__version__}" in call(command, "--version", cwd=here)
    call(command, "init", "demo", cwd=here)
    run = ("run", "agent.py:solve", "--judge", "agent.py:exact", "--tasks", "tasks.jsonl")
    assert "Mean reward 0.75" in call(
        command, *run, "--model", "replies.py:reply", cwd=here / "demo"
    )
    assert "succeeded" in call(command, "trace", "ls", cwd=here / "demo")
    listed = call(command, "init", "--example", "list", cwd=here).split()
    for example in (ROOT / "tutorial").glob("example_*"):
        assert example.name.removeprefix("example_") in listed
        call(command, "init", "--example", example.name.removeprefix("example_"), cwd=here)
    for extra, lacking in (("local", ("demo",)), ("tools", ("trace", "view", "--web"))):
        done = subprocess.run(
            [command, *lacking], cwd=here / "demo", capture_output=True, text=True, check=False
        )
        assert (
            done.returncode == 2
            and f'pip install "ajet[{extra}]"' in done.stderr
            and "Trace" + "back" not in done.stderr
        )
