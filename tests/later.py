"""Heavy packages of a few tests, imported where they are used: every worker of pytest-xdist collects every test."""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """Stands for a module; its first attribute imports it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
