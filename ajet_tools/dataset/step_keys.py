"""What the rows of a step depend on, part by part: where no part has changed, the step need not run again."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ajet_tools.dataset.digests import digest, digest_of_path, digest_of_values
from ajet_tools.dataset.steps import KINDS, TEACHER, Step

__all__ = ["changes", "key_of", "parts_of"]

FILES = (
    *("eval", "against", "seeds", "template", "personas", "domains", "verify", "judge", "rubric", "workflow", "conf"),
    *("scripted", "model", "embeddings"),
)
"""Options that name files, alone or inside, as in `judge:agent.py:exact`."""
UNIMPORTANT = (
    "concurrency",
    "rpm",
    "retries",
    "timeout",
    "price",
    "max_calls",
    "max_total_tokens",
    "max_cost",
    "api_key_env",
)
"""Options that say how fast or how dear a step may be, not what its rows are."""
_ENVIRONMENT = {"base_url": "OPENAI_BASE_URL", "model": "OPENAI_MODEL"}
_CONTENT = "content "
"""Before a digest, which says nothing to a reader."""
_PACKAGE = Path(__file__).parent


def parts_of(step: Step, sources: Mapping[str, Sequence[tuple[str, str]]], directory: Path) -> dict[str, str]:
    """Name -> value of each thing that the rows of a step depend on.

    Args:
        step: the step.
        sources: split -> (name, digest) of each file that it reads.
        directory: where the names of files are meant from.
    """
    kind = KINDS[step.kind]
    parts = {"command": step.kind, "write": step.write}
    for split, files in sources.items():
        for name, content in files:
            parts[f"{name}:{split}" if split else name] = f"{_CONTENT}{content}"
    for name, value in step.parameters.items():
        if name not in UNIMPORTANT:
            parts[name] = json.dumps(value, sort_keys=True, default=str)
        if name in FILES:
            parts |= {file: f"{_CONTENT}{digest_of_path(directory / file)}" for file in _files_in(value, directory)}
    for name, weight in step.weights.items():
        parts[f"weight of {name}"] = f"{weight:g}"
    if kind.asks and "scripted" not in step.parameters and (kind.taught or any(n in step.parameters for n in TEACHER)):
        for name, variable in _ENVIRONMENT.items():
            if name not in step.parameters and os.environ.get(variable):
                parts[name] = json.dumps(os.environ[variable])
    for folder in kind.prompts:
        for file in sorted((_PACKAGE / "prompts" / folder).glob("*.*")):
            parts[f"prompt {folder}/{file.stem}"] = f"{_CONTENT}{digest_of_path(file)}"
    parts["code of the toolkit"] = f"{_CONTENT}{_code()}"
    return parts


def key_of(parts: Mapping[str, str]) -> str:
    return digest_of_values(parts)


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs, in words."""
    said = []
    for name in dict.fromkeys((*before, *now)):
        one, other = before.get(name), now.get(name)
        if one == other:
            continue
        if one is None:
            said.append(f"{name} is new" if str(other).startswith(_CONTENT) else f"{name} is {other}")
        elif other is None:
            said.append(f"{name} is gone")
        else:
            said.append(f"{name} changed" if other.startswith(_CONTENT) else f"{name} was {one}, is {other}")
    return said


def _files_in(value: Any, directory: Path) -> Iterator[str]:
    """Names in an option that are files or directories here: `judge:agent.py:exact` names agent.py."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str):
            for piece in dict.fromkeys((text, *text.replace("->", ":").split(":"))):
                if piece and len(piece) < 1000 and "\n" not in piece and (directory / piece).exists():
                    yield piece


@functools.cache
def _code() -> str:
    """Of the package's own source: another version of it may make other rows."""
    files = sorted(_PACKAGE.glob("**/*.py"))
    return digest(part for file in files for part in (file.name.encode(), file.read_bytes()))
