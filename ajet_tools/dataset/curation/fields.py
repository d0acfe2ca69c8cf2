"""Fields of rows: their names, and the task id that a reader would assign."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from ajet_sdk.errors import AjetError, ConfigError
from ajet_sdk.tasks.task_rows import to_task
from ajet_tools.dataset.files.blocks import Row


def task_id_of(values: Mapping[str, object]) -> str | None:
    """Returns the task id that a reader would assign; None for an invalid task."""
    try:
        return to_task(Row("", dict(values)), {}).task_id
    except AjetError:
        return None


def field_names(values: Mapping[str, object], before: str = "", depth: int = 0) -> list[str]:
    """Returns the paths of a row's fields, such as `metadata.answer`, to a depth of four."""
    names = []
    for name, inner in values.items():
        path = f"{before}{name}"
        names.append(path)
        if isinstance(inner, Mapping) and depth < 3:
            names += field_names(inner, f"{path}.", depth + 1)
    return names


def unknown_field(name: str, known: Iterable[str]) -> ConfigError:
    """Returns the error for a field that no row has, with the nearest one that there is."""
    names = list(known)
    # `levle` is near `metadata.level` too
    leaves = {path.rpartition(".")[2]: path for path in names}
    near = difflib.get_close_matches(name, [*names, *leaves], n=1)
    hint = "there are"
    if near:
        hint = f"did you mean {leaves.get(near[0], near[0])}? There are"
    return ConfigError(f"no row has a field {name!r}; {hint} {', '.join(names[:40])}")
