"""What travels to other machines, and where it is found there. No Ray is needed for these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ajet_sdk.cluster import code as code_module
from ajet_sdk.cluster.code import CodePackage, is_library_file, package_code
from ajet_sdk.errors import ConfigError


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(root: Path) -> set[str]:
    return {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}


def test_what_runs_leave_behind_does_not_travel(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "proj",
        agent_dot_py="",
        data__d_dot_txt="",
        launcher_record__x__trace_dot_duckdb="",
        own__trace_dot_duckdb="",
    )
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "agent.pyc").write_bytes(b"")
    with CodePackage((folder,), (folder,), leave_out=(folder / "own",)).write() as root:
        users = {n for n in names(root) if n.startswith("0/")}
        assert users == {"0/proj/agent.py", "0/proj/data/d.txt"}
        assert {"ajet/__init__.py", "ajet_sdk/cluster/code.py", "ajet_tools/cli/app.py"} <= names(
            root
        )
        assert not [n for n in names(root) if n.endswith(".pyc")]


def test_what_git_ignores_does_not_travel(tmp_path: Path) -> None:
    folder = written(tmp_path / "proj", agent_dot_py="", new_dot_py="", weights_dot_bin="")
    (folder / ".gitignore").write_text("*.bin\n")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "add", "agent.py"], check=True)
    with CodePackage((folder,), ()).write() as root:
        assert {n for n in names(root) if n.startswith("0/")} == {
            "0/proj/agent.py",
            "0/proj/new.py",
        }


def test_a_folder_under_the_working_directory_keeps_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "here" / "examples" / "one", agent_dot_py="")
    monkeypatch.chdir(tmp_path / "here")
    with CodePackage((folder,), (folder, tmp_path / "here")).write() as root:
        assert (root / "here" / "examples" / "one" / "agent.py").is_file()
        manifest = json.loads((root / "ajet_code.json").read_text())
        assert manifest["paths"] == ["here/examples/one"]
        assert manifest["folders"] == {"here/examples/one": str(folder)}


def test_too_much_is_an_error_that_names_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "proj", agent_dot_py="", big_dot_bin="x" * 4000)
    monkeypatch.setattr(code_module, "_MOST_BYTES", 2000)
    with (
        pytest.raises(ConfigError, match=r"big\.bin.*\.gitignore"),
        CodePackage((folder,), ()).write(),
    ):
        pass


def test_a_module_brings_its_folder_and_a_package_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "src", pkg____init___dot_py="", pkg__deep____init___dot_py="")
    package = tmp_path / "src" / "pkg1"
    written(package, deep__agent_dot_py="def f():\n    return 1\n")
    (package / "__init__.py").write_text("")
    (package / "deep" / "__init__.py").write_text("")
    alone = written(tmp_path / "alone", lonely_dot_py="def g():\n    return 2\n")
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    monkeypatch.syspath_prepend(str(alone))
    import lonely
    import pkg1.deep.agent

    made = package_code(pkg1.deep.agent.f, lonely.g)
    assert {package, alone} <= set(made.folders)
    assert {tmp_path / "src", alone} <= set(made.paths)
    assert tmp_path / "src" not in made.folders
    assert not [f for f in made.folders if is_library_file(f / "x.py")]


@pytest.mark.slow
def test_unpacked_modules_import_and_relative_paths_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "work"
    inside = written(base / "tools", near_dot_py="WHERE = 'near'", notes_dot_txt="hello")
    outside = written(tmp_path / "other", far_dot_py="WHERE = 'far'")
    monkeypatch.chdir(base)
    code = (
        "from ajet_sdk.cluster.code import install_code, installed_code; install_code(); found ="
        " installed_code();import near, far, pathlib, json;print(json.dumps([near.WHERE,"
        " far.WHERE,"
        f" pathlib.Path('tools/notes.txt').read_text(),str(found.local_path({str(outside / 'far.py')!r})),"
        " far.__file__, found.original_paths(near.__file__)]))"
    )
    with CodePackage((inside, outside), (inside, outside)).write() as root:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
    assert done.returncode == 0, done.stderr
    near, far, notes, found, file, original_paths = json.loads(done.stdout)
    assert (near, far, notes) == ("near", "far", "hello")
    assert found == file
    assert original_paths == str(inside / "near.py")
