"""Records of a run of `expand` or `from-docs`: settings, calls, rejected rows, result."""

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
"""The axis of cells whose value a strategy's prompt uses."""


@dataclass(frozen=True)
class CallSettings:
    """The settings of the calls. The same configuration, sources and replies give the same bytes."""

    count: int | None = None
    languages: Sequence[str] = field(default=(), kw_only=True)
    """Of questions and answers, in turns; none is the language of the seeds or the document."""
    per_call: int = field(default=4, kw_only=True)
    shots: int = field(default=4, kw_only=True)
    """Examples in a prompt."""
    temperature: float = field(default=1.0, kw_only=True)
    max_tokens: int = field(default=4096, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    validation: float | None = field(default=None, kw_only=True)
    """The share for validation; None is a tenth, and nothing where there are fewer than five seeds or documents."""
    similarity: float = field(default=0.8, kw_only=True)
    max_same_form: int | None = field(default=None, kw_only=True)
    """Rows that may differ in numbers and names alone (see `forms`); None is any number."""
    window: int = field(default=32, kw_only=True)
    """How many calls may be made beyond those taken in."""
    template: Path | None = field(default=None, kw_only=True)
    """The user's own prompt, in the place of ours."""
    min_new_forms: float = field(default=0.1, kw_only=True)
    """Share of the last 100 rows with a new form, below which a run stops; 0: it never does."""

    def _check(self, **least: int) -> None:
        """Raises ConfigError for a number that is below its least."""
        if self.count is not None and self.count < 1:
            raise ConfigError(f"--count must be at least 1 (got {self.count})")
        if self.validation is not None and not 0 <= self.validation < 1:
            raise ConfigError(f"--validation must be a fraction from 0 to below 1 (got {self.validation:g})")
        for name, bound in {"per_call": 1, "shots": 1, "window": 1, "max_tokens": 1, **least}.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {bound} (got {getattr(self, name)})")

    def provenance(
        self, prompt: Prompt, model: str, seed: int, origin: Mapping[str, object], parameters: Mapping[str, object]
    ) -> dict[str, Any]:
        """Where the rows of a call come from: what they were made of, by which prompt and model, and how."""
        asked = {"temperature": self.temperature, "max_tokens": self.max_tokens, "seed": seed}
        return {
            **origin,
            "prompt": {"name": prompt.name, "version": prompt.version},
            "model": model,
            "parameters": {**parameters, **asked},
        }

    @cached_property
    def _prompts(self) -> Mapping[str, Prompt]:
        """By the strategy or kind of a call."""
        raise NotImplementedError

    def prompt(self, name: str) -> Prompt:
        return self._prompts[name]

    @property
    def wording(self) -> frozenset[str]:
        """The wording of the prompts, which no row may repeat."""
        return frozenset(prompts.wording()).union(*(prompt.wording for prompt in self._prompts.values()))

    def _as_json(self, *shared: str) -> dict[str, Any]:
        """Everything that decides the rows, to compare a resumed run with what was begun."""
        values = {setting.name: getattr(self, setting.name) for setting in dataclasses.fields(self)}
        del values["template"], values["min_new_forms"]
        digests = {name: prompt.digest for name, prompt in self._prompts.items()}
        more = {name.rpartition("/")[2]: prompts.load(name).digest for name in shared}
        return {**values, "languages": list(self.languages), "prompts": {**digests, **more}}


@dataclass(frozen=True)
class GenerationConfig(CallSettings):
    """How many rows of what kinds `expand` makes."""

    count: int
    strategies: Mapping[str, float] = field(default_factory=lambda: dict(STRATEGIES))
    cells: Mapping[str, Sequence[str]] | None = field(default=None, kw_only=True)
    """The values of each axis in which rows differ, beside the seeds' own (see `coverage`); an empty one: no steering.

    `domain` and `persona` take the place of our lists for the strategies of these names.
    """

    def __post_init__(self) -> None:
        self._check()
        if self.template is not None:
            object.__setattr__(self, "strategies", {"own": 1.0})

    def phrases(self, axis: str) -> Sequence[str]:
        """The values of `domain` or `persona`."""
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
    """`harder=2,persona` as weights; nothing is the usual mix. Raises ConfigError."""
    weights: dict[str, float] = {}
    for part in (item.strip() for text in texts for item in text.split(",")):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if name not in STRATEGIES:
            raise ConfigError(
                f"--strategy {name} is unknown; strategies: {', '.join(STRATEGIES)}; with a weight: harder=2"
            )
        try:
            weights[name] = float(number) if equals else 1.0
        except ValueError:
            weights[name] = -1.0
        if not 0 < weights[name] < 1e6:
            raise ConfigError(f"--strategy {part}: a weight must be a number above 0, such as {name}=2")
    return weights or dict(STRATEGIES)


KINDS = ("knowledge", "few-shot")
"""Each is a prompt, `prompts/from-docs/NAME.jinja`."""


@dataclass(frozen=True)
class DocsConfig(CallSettings):
    """How many rows of what kinds `from-docs` makes; without `count` each chunk is asked once."""

    kinds: Sequence[str] = ("knowledge",)
    """They take turns."""
    chunk_size: int = field(default=5120, kw_only=True)
    """Characters."""
    temperature: float = field(default=0.7, kw_only=True)
    passes: int = field(default=3, kw_only=True)
    """How often a chunk is asked at most, where the first pass did not give enough."""

    def __post_init__(self) -> None:
        self._check(chunk_size=200, passes=1)
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise ConfigError(f"--kind {unknown[0] if unknown else ''} is unknown; kinds: {', '.join(KINDS)}")

    @cached_property
    def _prompts(self) -> dict[str, Prompt]:
        if self.template is not None:
            template = prompts.load_file(self.template)
            return dict.fromkeys(self.kinds, template)
        return {kind: prompts.load(f"from-docs/{kind}") for kind in self.kinds}

    def as_json(self) -> dict[str, Any]:
        return {**self._as_json("from-docs/system", "from-docs/open-book"), "kinds": list(self.kinds)}


class NoProgress(AjetError, RuntimeError):
    """Call after call gave no row that could be kept."""


class Interrupted(AjetError, RuntimeError):
    """A signal stopped the run: Ctrl-C, or SIGTERM."""

    def __init__(self, signal: int) -> None:
        super().__init__("stopped: accepted rows are kept; continue with --resume")
        self.signal = signal


@dataclass(frozen=True)
class Checks:
    """Checks of rows that have the right shape."""

    verifier: CombinedVerifier | None = None
    leaks: Leaks | None = None
    held_out: Leaks | None = None
    """Of the validation tasks of the trace that the seeds are from."""
    meanings: MeaningIndex | None = None


NO_CHECKS = Checks()


@dataclass(frozen=True)
class Outlook:
    """The calls and tokens left, as far as they are known."""

    calls: int
    prompt: float
    """Of a call."""
    row: float
    question: float
    check: float
    """Of what a verifier is asked of a row."""
    seeds: int = 0
    """Whose meaning is asked for."""


@dataclass(frozen=True)
class WriterCall:
    """One call: which side of the split it is for, how many rows were asked for, and in what words."""

    number: int
    side: str
    count: int
    messages: list[dict[str, str]]
    seed: int
    provenance: Mapping[str, Any]

    @property
    def cell(self) -> Mapping[str, str]:
        """The requested properties of its rows, by axis."""
        cell: Mapping[str, str] = self.provenance["parameters"].get("cell", {})
        return cell

    def origin(self) -> Mapping[str, Any]:
        """The provenance of its reply."""
        return self.provenance


@dataclass(frozen=True)
class Candidate:
    """A row of a reply that holds by itself, and where it comes from."""

    values: dict[str, Any]
    provenance: Mapping[str, Any]


class Unusable(Exception):
    """A row of a reply that does not hold: `reason` to count by, `detail` to look at, and where it is from."""

    def __init__(self, reason: str, detail: str, provenance: Mapping[str, object]) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail, self.provenance = reason, detail, provenance


@dataclass(frozen=True)
class Rejected:
    """A generated row that is not taken, and why; `row` is None where there was no row, but a reply without one."""

    reason: str
    """One of few phrases, to count by."""
    detail: str
    row: Mapping[str, object] | None
    provenance: Mapping[str, object]
    reply: str | None = None

    def as_row(self) -> dict[str, Any]:
        """The row as `rejected.jsonl` holds it."""
        rejected = {"reason": self.reason, "detail": self.detail}
        if self.reply is not None:
            rejected["reply"] = self.reply[:4000]
        return {**(self.row or {}), "rejected": rejected, "provenance": dict(self.provenance)}


@dataclass
class GenerationResult:
    """The result of a run so far. `stopped` is the reason why it ended with fewer rows than requested."""

    train: list[dict[str, object]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    surplus: int = 0
    """Sound rows that came after the last one that was needed."""
    calls: int = 0
    """Calls for rows that were taken in; those of a verifier are not among them."""
    asked: int = 0
    """Rows that those of the calls which were answered asked for."""
    stopped: AjetError | None = None
    coverage: Mapping[str, Any] = field(default_factory=dict)
    """Figures of how varied the sound rows are, at the end (`Coverage.as_json`)."""
    coverage_text: str = ""

    @property
    def accepted(self) -> int:
        return len(self.train) + len(self.validation)

    @property
    def sound(self) -> int:
        return self.accepted + self.surplus

    def diversity(self) -> Diversity:
        """How many forms the accepted rows have."""
        return diversity_of([*self.train, *self.validation])

    def provenances(self) -> Iterator[Mapping[str, Any]]:
        """Of all rows, those refused too."""
        yield from (row["provenance"] for row in (*self.train, *self.validation))
        yield from (rejected.provenance for rejected in self.rejected)

    @property
    def refused(self) -> Counter[str]:
        return Counter(rejected.reason for rejected in self.rejected)
