"""What a run of `from-docs` is asked for: everything that decides the rows, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset import prompts
from ajet_tools.dataset.prompts import Prompt

__all__ = ["KINDS", "DocsRecipe"]

KINDS = ("knowledge", "few-shot")
"""Each is a prompt, `prompts/from-docs/NAME.jinja`."""


@dataclass(frozen=True)
class DocsRecipe:
    """How many rows, of what kinds, asked for how. The same recipe, documents and replies give the same bytes."""

    count: int | None = None
    """Rows to make; None asks each chunk once and takes what comes."""
    kinds: Sequence[str] = ("knowledge",)
    """They take turns."""
    languages: Sequence[str] = ()
    """Of questions and answers, in turns; none is the language of the document."""
    chunk_size: int = 5120
    """Characters."""
    per_call: int = 4
    """Rows asked for in a call."""
    shots: int = 4
    """Examples in a few-shot prompt."""
    temperature: float = 0.7
    max_tokens: int = 4096
    seed: int = 0
    validation: float | None = None
    """The share for validation; None is a tenth, and nothing where there are fewer than five documents."""
    similarity: float = 0.8
    max_same_form: int | None = None
    """Rows that may differ in numbers and names alone (see `forms`); None is any number."""
    window: int = 32
    """How many calls may be made beyond those taken in."""
    passes: int = 3
    """How often a chunk is asked at most, where the first pass did not give enough."""
    template: Path | None = None
    """The user's own prompt, in the place of all kinds."""

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ConfigError(f"-n is how many rows to make, at least 1 (got {self.count})")
        if self.validation is not None and not 0 <= self.validation < 1:
            raise ConfigError(f"--validation is a share of the rows, from 0 to below 1 (got {self.validation:g})")
        least = {"chunk_size": 200, "per_call": 1, "shots": 1, "window": 1, "max_tokens": 1, "passes": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"--{name.replace('_', '-')} is at least {bound} (got {getattr(self, name)})")
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise ConfigError(f"--kind {unknown[0] if unknown else ''}: there are {', '.join(KINDS)}")

    def prompt(self, kind: str) -> Prompt:
        return self._prompts[kind]

    @cached_property
    def _prompts(self) -> dict[str, Prompt]:
        if self.template is not None:
            own = prompts.load_file(self.template)
            return dict.fromkeys(self.kinds, own)
        return {kind: prompts.load(f"from-docs/{kind}") for kind in self.kinds}

    def as_json(self) -> dict[str, Any]:
        """Everything that decides the rows, to compare a resumed run with what was begun."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        del values["template"]
        digests = {name: prompt.digest for name, prompt in self._prompts.items()}
        shared = {name: prompts.load(f"from-docs/{name}").digest for name in ("system", "open-book")}
        return {**values, "kinds": list(self.kinds), "languages": list(self.languages),
                "prompts": {**digests, **shared}}  # fmt: skip
