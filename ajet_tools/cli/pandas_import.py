"""Keeps pyarrow from importing pandas, which takes longer than most commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class _NoPandas(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if name == "pandas":
            raise ImportError("pandas is not needed here")


def leave_pandas_out() -> None:
    """Makes pyarrow treat pandas as not installed, in commands that run no code of a user.

    pyarrow imports it, if it is installed, when it first converts a list or a time with a zone,
    only to see whether the value is a Series. It tries once: an import that fails is not repeated.
    """
    if "pandas" in sys.modules:
        return
    import pyarrow as pa  # help needs none

    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(finder)
