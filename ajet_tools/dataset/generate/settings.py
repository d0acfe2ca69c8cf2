"""The settings of `expand` and `from-docs`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset import prompts
from ajet_tools.dataset.prompts import Prompt

STRATEGIES: Mapping[str, float] = {
    "same-style": 4, "harder": 2, "easier": 1, "other-domain": 2, "rephrase": 1, "compositional": 1, "persona": 1,
}  # fmt: skip
"""Default weight of each strategy; its prompt is `prompts/expand/NAME.jinja`."""
CIRCUMSTANCE: Mapping[str, str] = {"other-domain": "domain", "persona": "persona"}
"""The axis whose value a strategy's prompt uses."""


@dataclass(frozen=True)
class CallSettings:
    """Settings of the calls and of the rows."""

    count: int | None = None
    _: KW_ONLY
    languages: Sequence[str] = ()
    """Languages of questions and answers, in turns; empty means that of the seeds or documents."""
    per_call: int = 4
    shots: int = 4
    """Examples per prompt."""
    temperature: float = 1.0
    max_tokens: int = 4096
    seed: int = 0
    validation: float | None = None
    """Validation share. Default: a tenth, or 0 with fewer than five seeds or documents."""
    similarity: float = 0.8
    max_same_form: int | None = None
    """Maximum number of rows that differ only in numbers and names (see `forms`). None: no
    limit."""
    window: int = 32
    """Maximum number of calls in flight; with 1, equal replies give equal rows."""
    template: Path | None = None
    """The user's prompt, which replaces the built-in ones."""

    def _check(self, **least: int) -> None:
        if self.count is not None and self.count < 1:
            raise ConfigError(f"--count must be at least 1 (got {self.count})")
        if self.validation is not None and not 0 <= self.validation < 1:
            raise ConfigError(
                f"--validation must be a fraction from 0 to below 1 (got {self.validation:g})"
            )
        bounds = {"per_call": 1, "shots": 1, "window": 1, "max_tokens": 1, **least}
        for name, bound in bounds.items():
            value = getattr(self, name)
            if value < bound:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} must be at least {bound} (got {value})")

    def provenance(
        self,
        prompt: Prompt,
        model: str,
        seed: int,
        origin: Mapping[str, object],
        parameters: Mapping[str, object],
    ) -> dict[str, Any]:
        """Returns the provenance of a call's rows: sources, prompt, model and parameters."""
        sampling = {"temperature": self.temperature, "max_tokens": self.max_tokens, "seed": seed}
        return {
            **origin,
            "prompt": {"name": prompt.name, "version": prompt.version},
            "model": model,
            "parameters": {**parameters, **sampling},
        }

    def messages(self, system: str, text: str) -> list[dict[str, str]]:
        """Returns the messages of a call; `system` names the prompt of the first."""
        return [
            {"role": "system", "content": prompts.load(system).render()},
            {"role": "user", "content": text},
        ]

    @cached_property
    def _prompts(self) -> Mapping[str, Prompt]:
        raise NotImplementedError

    def prompt(self, name: str) -> Prompt:
        return self._prompts[name]

    @property
    def wording(self) -> frozenset[str]:
        """The word runs of the prompts, which no row may repeat."""
        own = [prompt.wording for prompt in self._prompts.values()]
        return frozenset(prompts.wording()).union(*own)

    def _as_json(self, *shared: str) -> dict[str, Any]:
        """Returns the settings that the rows depend on, to compare when a run is resumed."""
        values = {setting.name: getattr(self, setting.name) for setting in dataclasses.fields(self)}
        del values["template"], values["window"]
        digests = {name: prompt.digest for name, prompt in self._prompts.items()}
        for name in shared:
            digests[name.rpartition("/")[2]] = prompts.load(name).digest
        return {**values, "languages": list(self.languages), "prompts": digests}


@dataclass(frozen=True)
class GenerationConfig(CallSettings):
    """Settings of `expand`."""

    count: int
    strategies: Mapping[str, float] = field(default_factory=lambda: dict(STRATEGIES))
    _: KW_ONLY
    cells: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Values by axis (see `cells`); `domain` and `persona` replace the lists of the strategies of
    these names."""

    def __post_init__(self) -> None:
        self._check()
        if self.template is not None:
            object.__setattr__(self, "strategies", {"own": 1.0})

    @property
    def wording(self) -> frozenset[str]:
        wording = super().wording
        for axis in CIRCUMSTANCE.values():
            wording = wording.union(*map(prompts.runs_of_phrase, self.phrases(axis)))
        return wording

    def phrases(self, axis: str) -> Sequence[str]:
        """Returns the values of `domain` or `persona`."""
        return self.cells.get(axis) or prompts.phrases(f"expand/{axis}s")

    @cached_property
    def _prompts(self) -> dict[str, Prompt]:
        if self.template is not None:
            return {"own": prompts.load_file(self.template)}
        return {name: prompts.load(f"expand/{name}") for name in self.strategies}

    def as_json(self) -> dict[str, Any]:
        phrases = [self.phrases(axis) for axis in CIRCUMSTANCE.values()]
        return {
            **self._as_json("expand/system", "expand/form"),
            "strategies": dict(self.strategies),
            "phrases": hashlib.blake2b(repr(phrases).encode(), digest_size=8).hexdigest(),
        }


def strategies_of(texts: Sequence[str]) -> dict[str, float]:
    """Parses `harder=2,persona` to weights; empty means the defaults. Raises ConfigError."""
    weights: dict[str, float] = {}
    for part in filter(None, ",".join(texts).split(",")):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if name not in STRATEGIES:
            raise ConfigError(
                f"--strategy {name} is unknown; known: {', '.join(STRATEGIES)}; with a weight:"
                " harder=2"
            )
        try:
            weights[name] = float(number) if equals else 1.0
        except ValueError:
            weights[name] = -1.0
        if not 0 < weights[name] < 1e6:
            raise ConfigError(
                f"--strategy {part}: a weight must be a number above 0, such as {name}=2"
            )
    return weights or dict(STRATEGIES)


KINDS = ("knowledge", "few-shot")
"""Kinds of tasks; their prompts are `prompts/from-docs/NAME.jinja`."""


@dataclass(frozen=True)
class DocsConfig(CallSettings):
    """Settings of `from-docs`; without `count`, each chunk is asked once."""

    kinds: Sequence[str] = ("knowledge",)
    """Kinds of tasks, in turns."""
    _: KW_ONLY
    chunk_size: int = 5120
    """In characters."""
    temperature: float = 0.7
    passes: int = 3
    """Maximum number of requests per chunk, if the first pass gives too few rows."""

    def __post_init__(self) -> None:
        self._check(chunk_size=200, passes=1)
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise ConfigError(
                f"--kind {unknown[0] if unknown else ''} is unknown; kinds: {', '.join(KINDS)}"
            )

    @cached_property
    def _prompts(self) -> dict[str, Prompt]:
        if self.template is not None:
            template = prompts.load_file(self.template)
            return dict.fromkeys(self.kinds, template)
        return {kind: prompts.load(f"from-docs/{kind}") for kind in self.kinds}

    def as_json(self) -> dict[str, Any]:
        return {
            **self._as_json("from-docs/system", "from-docs/open-book"),
            "kinds": list(self.kinds),
        }
