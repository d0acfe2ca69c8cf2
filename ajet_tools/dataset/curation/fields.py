"""Fields of rows: their names, and the task id that a reader would assign."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from ajet_sdk.errors import AjetError, ConfigError
from ajet_sdk.tasks.task_rows import to_task
from ajet_tools.dataset.files.blocks import Block, LineBlock, Row
from ajet_tools.dataset.files.lines import Path
from ajet_tools.dataset.files.values import POSITION


def has_dotted_key(block: Block, paths: Sequence[Path]) -> bool:
    """Whether a key may contain a dot, or a path may mean a length, so that rows have to be
    read."""
    if any(
        POSITION.fullmatch(step) or step in ("count", "chars")
        for path in paths
        for step in path[1:]
    ):
        return True
    inner = [
        ".".join(path[i:j])
        for path in paths
        for i in range(len(path))
        for j in range(i + 2, len(path) + 1)
    ]
    if isinstance(block, LineBlock):
        return any(
            bool(block.lines.str.contains(f'"{name}"', literal=True).any()) for name in inner
        )
    return any("." in column for column in block.data.schema.names)


def task_id_of(values: Mapping[str, object]) -> str | None:
    """Returns the task id that a reader would assign; None for an invalid task."""
    try:
        return to_task(Row("", dict(values)), {}).task_id
    except AjetError:
        return None


def field_names(values: Mapping[str, object], before: str = "", depth: int = 0) -> list[str]:
    names = []
    for name, inner in values.items():
        names.append(f"{before}{name}")
        if isinstance(inner, Mapping) and depth < 3:
            names += field_names(inner, f"{before}{name}.", depth + 1)
    return names


def unknown_field(name: str, known: Iterable[str]) -> ConfigError:
    names = list(known)
    leaves = {path.rpartition(".")[2]: path for path in names}
    near = difflib.get_close_matches(name, [*names, *leaves], n=1)
    hint = f"did you mean {leaves.get(near[0], near[0])}? There are" if near else "there are"
    return ConfigError(f"no row has a field {name!r}; {hint} {', '.join(names[:40])}")
