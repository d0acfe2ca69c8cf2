"""Where a release of a package differs from what ajet uses of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ajet_sdk
from tests.releases.packages import Package
from tests.releases.settings import trinity_settings, verl_settings, vllm_settings
from tests.releases.uses import USES, breaks

ROOT = Path(ajet_sdk.__file__).parent.parent
SOURCES = sorted((ROOT / "ajet_sdk").rglob("*.py"))
_SETTINGS = {"trinity": trinity_settings, "verl": verl_settings, "vllm": vllm_settings}


def differences(package: Package) -> Iterator[str]:
    """A line for each, with the file of ajet and the name."""
    yield from _lost_imports(package)
    for use, difference in breaks(package) if package.name in USES else ():
        yield f"{use.ours}: {use.module}.{use.name} {difference}"
    lines = (f"{ours}: {key} {why}" for ours, key, why in _SETTINGS[package.name](package))
    yield from dict.fromkeys(lines)  # of several configs


def _lost_imports(package: Package) -> Iterator[str]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                module = node.module or ""
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Import):
                names = []
                module = node.names[0].name
            else:
                continue
            if module.split(".")[0] != package.name:
                continue
            ours = path.relative_to(ROOT)
            if package.module(module) is None:
                yield f"{ours}: {module} is gone"
                continue
            for name in names:
                if package.find(module, name) is None:
                    yield f"{ours}: {module}.{name} is gone"
