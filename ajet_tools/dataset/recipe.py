"""What a run of `expand` is asked for: everything that decides the rows, and nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset import prompts
from ajet_tools.dataset.prompts import Prompt

__all__ = ["CIRCUMSTANCE", "STRATEGIES", "Recipe", "strategies_of"]

STRATEGIES: Mapping[str, float] = {
    "same-style": 4,
    "harder": 2,
    "easier": 1,
    "other-domain": 2,
    "rephrase": 1,
    "compositional": 1,
    "persona": 1,
}
"""Each with its weight where none is asked for; each is a prompt, `prompts/expand/NAME.jinja`."""
CIRCUMSTANCE: Mapping[str, str] = {"other-domain": "domain", "persona": "persona"}
"""The drawn phrase that a strategy's prompt uses."""


@dataclass(frozen=True)
class Recipe:
    """How many rows, of what kinds, asked for how. The same recipe, seeds and replies give the same bytes."""

    count: int
    strategies: Mapping[str, float] = field(default_factory=lambda: dict(STRATEGIES))
    languages: Sequence[str] = ()
    per_call: int = 4
    """Rows asked for in a call."""
    shots: int = 4
    """Examples in a prompt."""
    temperature: float = 1.0
    max_tokens: int = 4096
    seed: int = 0
    validation: float | None = None
    """The share for validation; None is a tenth, and nothing where there are fewer than five seeds."""
    similarity: float = 0.8
    max_same_form: int | None = None
    """Rows that may differ in numbers and names alone (see `forms`); None is any number."""
    window: int = 32
    """How many calls may be made beyond those taken in."""
    template: Path | None = None
    """The user's own prompt, in the place of the strategies."""
    personas: Sequence[str] = ()
    domains: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"-n is how many rows to make, at least 1 (got {self.count})")
        if self.validation is not None and not 0 <= self.validation < 1:
            raise ConfigError(f"--validation is a share of the rows, from 0 to below 1 (got {self.validation:g})")
        for name, least in (("per_call", 1), ("shots", 1), ("window", 1), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')} is at least {least} (got {getattr(self, name)})")
        if self.template is not None:
            object.__setattr__(self, "strategies", {"own": 1.0})
        object.__setattr__(self, "personas", tuple(self.personas) or prompts.phrases("expand/personas"))
        object.__setattr__(self, "domains", tuple(self.domains) or prompts.phrases("expand/domains"))

    def prompt(self, strategy: str) -> Prompt:
        return self._prompts[strategy]

    @cached_property
    def _prompts(self) -> dict[str, Prompt]:
        if self.template is not None:
            return {"own": prompts.load_file(self.template)}
        return {name: prompts.load(f"expand/{name}") for name in self.strategies}

    def as_json(self) -> dict[str, Any]:
        """Everything that decides the rows, to compare a resumed run with what was begun."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        del values["template"]
        for name in ("personas", "domains"):
            values[name] = hashlib.blake2b("\n".join(values[name]).encode(), digest_size=8).hexdigest()
        own = {name: prompt.digest for name, prompt in self._prompts.items()}
        shared = {name: prompts.load(f"expand/{name}").digest for name in ("system", "form")}
        return {**values, "strategies": dict(self.strategies), "languages": list(self.languages),
                "prompts": {**own, **shared}}  # fmt: skip


def strategies_of(texts: Sequence[str]) -> dict[str, float]:
    """`harder=2,persona` as weights; nothing is the usual mix. Raises ConfigError."""
    weights: dict[str, float] = {}
    for part in (one.strip() for text in texts for one in text.split(",")):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if name not in STRATEGIES:
            raise ConfigError(f"--strategy {name}: there are {', '.join(STRATEGIES)}; a weight reads harder=2")
        try:
            weights[name] = float(number) if equals else 1.0
        except ValueError:
            weights[name] = -1.0
        if not 0 < weights[name] < 1e6:
            raise ConfigError(f"--strategy {part}: a weight is a number above 0, such as {name}=2")
    return weights or dict(STRATEGIES)
