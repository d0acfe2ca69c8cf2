"""What ajet uses of Trinity-RFT and verl is what the installed releases have, and is in the table
that `python -m tests.releases` compares with the newest ones."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.releases.differences import ROOT, SOURCES, differences
from tests.releases.packages import Package
from tests.releases.uses import USES, Use, breaks


def installed(name: str) -> Package:
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs {name}: just install-trinity")
    return Package.of_directory(name, Path(spec.submodule_search_locations[0]).parent)


@pytest.mark.parametrize("name", ["trinity", "verl", "vllm"])
def test_the_installed_release_has_what_ajet_uses(name: str) -> None:
    assert list(differences(installed(name))) == []


@pytest.mark.parametrize("name", sorted(USES))
def test_every_method_that_ajet_replaces_is_in_the_table(name: str) -> None:
    """Of its subclasses of the package's classes."""
    package = installed(name)
    listed = {(use.ours, use.name) for use in USES[name]}
    missing = []
    for ours, module, owner in subclasses(name):
        for base, member in owner:
            if package.find(module, f"{base}.{member}") is None:
                continue  # a method of our own
            if (ours, f"{base}.{member}") not in listed:
                missing.append(f"{ours}: {module}: {base}.{member}")
    assert missing == []


def subclasses(name: str) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Our file, the module of the class that one of ours inherits from, and the methods of ours
    with the base's name."""
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        imported = {
            alias.name: node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == name
            for alias in node.names
        }
        for owner in tree.body:
            if not isinstance(owner, ast.ClassDef):
                continue
            methods = [
                node.name
                for node in owner.body
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            for base in owner.bases:
                module = imported.get(ast.unparse(base))
                if module is not None:
                    named = [(ast.unparse(base), method) for method in methods]
                    yield str(path.relative_to(ROOT)), module, named


@pytest.fixture
def release(tmp_path: Path) -> Package:
    """A wheel with a class that is imported from another module, and has a base."""
    files = {
        "trinity/__init__.py": "",
        "trinity/api.py": "from .inner import Engine\ndef helper():\n    from x import hidden\n",
        "trinity/inner.py": (
            "class Base:\n    def start(self, config, *, wait=True): ...\n"
            "class Engine(Base):\n    size: int = 1\n"
            "    def __init__(self, config):\n        self.state, self.other = config, None\n"
            "    async def step(self, tasks, limit): ...\n"
            "if True:\n    def late(name, **more): ...\n"
        ),
    }
    with zipfile.ZipFile(tmp_path / "trinity.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return Package.of_wheel("trinity", zipfile.ZipFile(tmp_path / "trinity.whl"))


@pytest.mark.parametrize(
    ("use", "difference"),
    [
        (Use("f.py", "trinity.api", "Engine"), ""),
        (Use("f.py", "trinity.api", "Engine.size"), ""),
        (Use("f.py", "trinity.api", "Engine.state"), ""),
        (Use("f.py", "trinity.api", "Engine.other"), ""),
        (Use("f.py", "trinity.api", "Engine.start", "calls", ("config",)), ""),
        (Use("f.py", "trinity.api", "Engine.start", "calls", ("config", "wait")), ""),
        (Use("f.py", "trinity.inner", "late", "calls", ("name", "anything")), ""),
        (Use("f.py", "trinity.api", "Engine.step", "overrides", ("tasks", "limit")), ""),
        (Use("f.py", "trinity.gone", "Engine"), "trinity.gone is gone"),
        (Use("f.py", "trinity.api", "Lost"), "is gone"),
        (Use("f.py", "trinity.api", "hidden"), "is gone"),
        (Use("f.py", "trinity.api", "Engine.lost"), "is gone"),
        (Use("f.py", "trinity.api", "Engine.start", "calls", ("settings",)), "settings"),
        (Use("f.py", "trinity.api", "Engine.step", "calls", ("tasks",)), "requires limit"),
        (Use("f.py", "trinity.api", "Engine.step", "overrides", ("tasks",)), "tasks, limit"),
    ],
)
def test_what_is_gone_or_has_other_parameters_is_found(
    release: Package, use: Use, difference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(USES, "trinity", [use])
    found = list(breaks(release))
    if difference:
        assert [row for row, _ in found] == [use]
        assert difference in found[0][1]
    else:
        assert found == []
