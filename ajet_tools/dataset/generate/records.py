"""Records of `expand` and `from-docs`: settings, calls, rejected rows, results."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.errors import AjetError, ConfigError
from ajet_tools.dataset import prompts
from ajet_tools.dataset.curation.forms import Diversity, diversity_of
from ajet_tools.dataset.prompts import Prompt

if TYPE_CHECKING:
    from ajet_tools.dataset.similarity.decontaminate import Leaks
    from ajet_tools.dataset.similarity.meaning import MeaningIndex
    from ajet_tools.dataset.verify.combined import CombinedVerifier


STRATEGIES: Mapping[str, float] = {
    "same-style": 4, "harder": 2, "easier": 1, "other-domain": 2, "rephrase": 1, "compositional": 1, "persona": 1,
}  # fmt: skip
"""Default weight of each strategy; its prompt is `prompts/expand/NAME.jinja`."""
CIRCUMSTANCE: Mapping[str, str] = {"other-domain": "domain", "persona": "persona"}
"""The axis whose value a strategy's prompt uses."""


@dataclass(frozen=True)
class CallSettings:
    """Settings of the calls. Equal settings, sources and replies give equal bytes."""

    count: int | None = None
    languages: Sequence[str] = field(default=(), kw_only=True)
    """Languages of questions and answers, in turns; empty means that of the seeds or documents."""
    per_call: int = field(default=4, kw_only=True)
    shots: int = field(default=4, kw_only=True)
    """Examples per prompt."""
    temperature: float = field(default=1.0, kw_only=True)
    max_tokens: int = field(default=4096, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    validation: float | None = field(default=None, kw_only=True)
    """Validation share. Default: a tenth, or 0 with fewer than five seeds or documents."""
    similarity: float = field(default=0.8, kw_only=True)
    max_same_form: int | None = field(default=None, kw_only=True)
    """Maximum number of rows that differ only in numbers and names (see `forms`). None: no
    limit."""
    window: int = field(default=32, kw_only=True)
    """Maximum number of calls beyond the processed ones."""
    template: Path | None = field(default=None, kw_only=True)
    """The user's prompt, which replaces the built-in ones."""
    min_new_forms: float = field(default=0.1, kw_only=True)
    """Minimum share of new forms in the last 100 rows, below which a run stops; 0: no limit."""

    def _check(self, **least: int) -> None:
        if self.count is not None and self.count < 1:
            raise ConfigError(f"--count must be at least 1 (got {self.count})")
        if self.validation is not None and not 0 <= self.validation < 1:
            raise ConfigError(
                f"--validation must be a fraction from 0 to below 1 (got {self.validation:g})"
            )
        for name, bound in {
            "per_call": 1,
            "shots": 1,
            "window": 1,
            "max_tokens": 1,
            **least,
        }.items():
            if getattr(self, name) < bound:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be at least {bound} (got"
                    f" {getattr(self, name)})"
                )

    def provenance(
        self,
        prompt: Prompt,
        model: str,
        seed: int,
        origin: Mapping[str, object],
        parameters: Mapping[str, object],
    ) -> dict[str, Any]:
        """Returns the provenance of a call's rows: sources, prompt, model and parameters."""
        asked = {"temperature": self.temperature, "max_tokens": self.max_tokens, "seed": seed}
        return {
            **origin,
            "prompt": {"name": prompt.name, "version": prompt.version},
            "model": model,
            "parameters": {**parameters, **asked},
        }

    @cached_property
    def _prompts(self) -> Mapping[str, Prompt]:
        raise NotImplementedError

    def prompt(self, name: str) -> Prompt:
        return self._prompts[name]

    @property
    def wording(self) -> frozenset[str]:
        """The word runs of the prompts, which no row may repeat."""
        return frozenset(prompts.wording()).union(
            *(prompt.wording for prompt in self._prompts.values())
        )

    def _as_json(self, *shared: str) -> dict[str, Any]:
        """Returns the settings that determine the rows, to compare when a run is resumed."""
        values = {setting.name: getattr(self, setting.name) for setting in dataclasses.fields(self)}
        del values["template"], values["min_new_forms"]
        digests = {name: prompt.digest for name, prompt in self._prompts.items()}
        more = {name.rpartition("/")[2]: prompts.load(name).digest for name in shared}
        return {**values, "languages": list(self.languages), "prompts": {**digests, **more}}


@dataclass(frozen=True)
class GenerationConfig(CallSettings):
    """Settings of `expand`."""

    count: int
    strategies: Mapping[str, float] = field(default_factory=lambda: dict(STRATEGIES))
    cells: Mapping[str, Sequence[str]] | None = field(default=None, kw_only=True)
    """Values of additional axes (see `coverage`); an empty mapping disables steering.

    `domain` and `persona` replace the built-in lists of the strategies of these names.
    """

    def __post_init__(self) -> None:
        self._check()
        if self.template is not None:
            object.__setattr__(self, "strategies", {"own": 1.0})

    @property
    def wording(self) -> frozenset[str]:
        lists = [self.phrases(axis) for axis in CIRCUMSTANCE.values()]
        return super().wording.union(
            *(prompts.runs_of_phrase(phrase) for some in lists for phrase in some)
        )

    def phrases(self, axis: str) -> Sequence[str]:
        """Returns the values of `domain` or `persona`."""
        return (self.cells or {}).get(axis) or prompts.phrases(f"expand/{axis}s")

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
    for part in (item.strip() for text in texts for item in text.split(",")):
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
    chunk_size: int = field(default=5120, kw_only=True)
    """In characters."""
    temperature: float = field(default=0.7, kw_only=True)
    passes: int = field(default=3, kw_only=True)
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


class NoProgress(AjetError, RuntimeError):
    """Many consecutive calls gave no accepted row."""


class Interrupted(AjetError, RuntimeError):
    """A signal stopped the run: Ctrl-C, or SIGTERM."""

    def __init__(self, signal: int) -> None:
        super().__init__("stopped: accepted rows are kept; continue with --resume")
        self.signal = signal


@dataclass(frozen=True)
class Checks:
    """Checks of valid rows."""

    verifier: CombinedVerifier | None = None
    leaks: Leaks | None = None
    held_out: Leaks | None = None
    """The validation tasks of the seeds' trace."""
    meanings: MeaningIndex | None = None


NO_CHECKS = Checks()


@dataclass(frozen=True)
class Outlook:
    """An estimate of calls and tokens left."""

    calls: int
    prompt: float
    """Tokens per call."""
    row: float
    question: float
    check: float
    """Tokens of a verifier's prompt per row."""
    seeds: int = 0
    """Number of seeds to embed."""


@dataclass(frozen=True)
class WriterCall:
    """A call for rows of a split side."""

    number: int
    side: str
    count: int
    messages: list[dict[str, str]]
    seed: int
    provenance: Mapping[str, Any]

    @property
    def cell(self) -> Mapping[str, str]:
        """The requested values, by axis."""
        cell: Mapping[str, str] = self.provenance["parameters"].get("cell", {})
        return cell

    def origin(self) -> Mapping[str, Any]:
        """Returns the provenance of its reply."""
        return self.provenance


@dataclass(frozen=True)
class Candidate:
    """A valid row of a reply, with its provenance."""

    values: dict[str, Any]
    provenance: Mapping[str, Any]


class Unusable(Exception):
    """An invalid row of a reply: `reason` to count by, `detail` to read, and its provenance."""

    def __init__(self, reason: str, detail: str, provenance: Mapping[str, object]) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail, self.provenance = reason, detail, provenance


@dataclass(frozen=True)
class Rejected:
    """A rejected row with the reason; `row` is None if the reply had no row."""

    reason: str
    """One of a few phrases, to count by."""
    detail: str
    row: Mapping[str, object] | None
    provenance: Mapping[str, object]
    reply: str | None = None

    def as_row(self) -> dict[str, Any]:
        """Returns the row of `rejected.jsonl`."""
        rejected = {"reason": self.reason, "detail": self.detail}
        if self.reply is not None:
            rejected["reply"] = self.reply[:4000]
        return {**(self.row or {}), "rejected": rejected, "provenance": dict(self.provenance)}


@dataclass
class GenerationResult:
    """The result of a run so far. `stopped` is the reason if it ended with too few rows."""

    train: list[dict[str, object]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    surplus: int = 0
    """Sound rows beyond the target."""
    calls: int = 0
    """Processed calls for rows, without those of verifiers."""
    asked: int = 0
    """Rows requested by answered calls."""
    stopped: AjetError | None = None
    coverage: Mapping[str, Any] = field(default_factory=dict)
    """Final variety of the sound rows (`Coverage.as_json`)."""
    coverage_text: str = ""

    @property
    def accepted(self) -> int:
        return len(self.train) + len(self.validation)

    @property
    def sound(self) -> int:
        return self.accepted + self.surplus

    def diversity(self) -> Diversity:
        """Returns the diversity of the accepted rows."""
        return diversity_of([*self.train, *self.validation])

    def provenances(self) -> Iterator[Mapping[str, Any]]:
        """Yields the provenance of all rows, including refused ones."""
        yield from (row["provenance"] for row in (*self.train, *self.validation))
        yield from (rejected.provenance for rejected in self.rejected)

    @property
    def refused(self) -> Counter[str]:
        return Counter(rejected.reason for rejected in self.rejected)
