"""Combines verifiers, each with its own model: all must pass, or one of a group."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ajet_sdk.engines.budget import Budget, Usage
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import ConfigError
from ajet_sdk.tasks.questions import answer_of
from ajet_sdk.tasks.row_names import ANSWERS
from ajet_tools.dataset.model.open import ModelSpec
from ajet_tools.dataset.verify.consistency import inconsistency
from ajet_tools.dataset.verify.verdict import RowVerdict, Verifier

KINDS = ("agreement", "judge", "code", "llm", "none")
PARTS = KINDS[:-1]
_JOINED = re.compile(rf"([+|])(?=(?:{'|'.join(KINDS)})(?:[:+|]|$))")


@dataclass(frozen=True)
class Verify:
    """The settings of verification; the options `--verify...` of the commands.

    An entry of `models` is `[PART=]MODEL`, where PART is `agreement`, `judge`, `code` or `llm`;
    without PART it is the default of all parts.
    """

    spec: str = "none"
    models: Sequence[str] = ()
    """MODEL is a `ModelSpec`; a NAME without URL is at the writer's endpoint."""
    unfenced: bool = False
    """Run programs without a sandbox."""

    @classmethod
    def of(cls, given: str | Verify) -> Verify:
        return cls(given) if isinstance(given, str) else given

    def endpoint(self, kind: str, writer: ModelClient) -> ModelClient:
        """Opens the model of a part: its own, else the writer's with separate counts. Raises
        ConfigError."""
        models = self._models()
        model = models.get(kind, models.get(""))
        if model is None:
            return writer.counted_apart()
        spec = ModelSpec.parse(model, "--verify-model")
        return spec.open(
            writer.base_url,
            concurrency=writer.concurrency,
            retries=writer.retries,
            cache=writer.cache,
            budget=writer.budget.part(spec.price),
        )

    def _models(self) -> dict[str, str]:
        """Returns the models by part; "" is the default. Raises ConfigError."""
        models: dict[str, str] = {}
        for text in self.models:
            part, _, model = text.partition("=")
            if part not in PARTS:
                part = ""
                model = text
            if not model.strip():
                raise ConfigError(f"--verify-model {text!r} names nothing")
            if models.setdefault(part, model) != model:
                raise ConfigError(
                    f"--verify-model is given twice for {part or 'every part'}: {models[part]} and"
                    f" {model}"
                )
        return models


def split_spec(spec: str) -> list[list[str]]:
    """Parses `agreement:3+code|llm` to [[agreement:3], [code, llm]]: AND of OR groups."""
    groups, last = [[""]], ""
    for piece in _JOINED.split(spec.strip()):
        if piece in ("+", "|"):
            last = piece
        elif last == "|":
            groups[-1].append(piece)
        else:
            groups = [*groups, [piece]] if last else [[piece]]
    return groups


@dataclass
class VerifierPart:
    """A verifier with its endpoint."""

    verifier: Verifier
    endpoint: ModelClient | None = None
    """None if it asks no model."""

    @property
    def kind(self) -> str:
        return self.verifier.name.partition(":")[0]


@dataclass
class CombinedVerifier:
    """A row passes if a verifier of every group passes it; they are asked until the result is
    known."""

    name: str
    groups: Sequence[Sequence[VerifierPart]]
    """Any of a group, of each group."""
    parts: list[VerifierPart] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = [part for group in self.groups for part in group]

    @property
    def calls(self) -> int:
        return sum(part.verifier.calls for part in self.parts)

    @property
    def needs_answer(self) -> bool:
        return any(all(part.verifier.needs_answer for part in group) for group in self.groups)

    def refuse_unanswered(self, rows: Sequence[Mapping[str, Any]], source: str) -> None:
        """Raises ConfigError if it compares answers, and none of these rows has a field that is
        known as one."""
        if not rows or not self.needs_answer or any(answer_of(row) is not None for row in rows):
            return
        columns = sorted({path for row in rows for path in _fields(row)})
        raise ConfigError(
            f"--verify {self.name} compares answers, but no row of {source} has a known answer: the"
            f" fields are {', '.join(columns)}, and an answer is named {', '.join(ANSWERS[:3])},"
            " solution, label, output, ... Name the field with --map FIELD=metadata.answer, or"
            " pass --verify none"
        )

    async def check(self, row: Mapping[str, object], endpoint: ModelClient | None) -> RowVerdict:
        if not self.parts:
            return RowVerdict(True, "not verified")
        verdict = await self._ask(row, endpoint)
        if verdict.ok and any(part.kind in PARTS for part in self.parts):
            # a writer and a checker make the same mistakes; a calculation makes none
            return inconsistency(row) or verdict
        return verdict

    async def _ask(self, row: Mapping[str, object], endpoint: ModelClient | None) -> RowVerdict:
        if len(self.parts) == 1:
            return await self.parts[0].verifier.check(row, self.parts[0].endpoint or endpoint)
        records: list[dict[str, object]] = []
        for group in self.groups:
            verdicts = list[RowVerdict]()
            for part in group:
                verdicts.append(await part.verifier.check(row, part.endpoint or endpoint))
                records.append(verdicts[-1].as_json(part.verifier.name))
                if verdicts[-1].ok:
                    break
            if not verdicts[-1].ok:
                failed = all(verdict.failed for verdict in verdicts)
                return RowVerdict(False, verdicts[-1].reason, {"parts": records}, failed=failed)
        passed = " and ".join(str(record["verifier"]) for record in records if record["ok"])
        return RowVerdict(True, f"passes {passed}", {"parts": records})

    def models(self, writer: ModelClient) -> dict[str, list[str]] | None:
        """Returns the endpoints that differ from the writer's, by verifier, or None."""
        models = {
            p.verifier.name: [p.endpoint.base_url, p.endpoint.model]
            for p in self.parts
            if p.endpoint
        }
        return {
            name: at for name, at in models.items() if at != [writer.base_url, writer.model]
        } or None


def _fields(row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        if name == "metadata" and isinstance(value, Mapping):
            yield from (f"metadata.{inner}" for inner in value)
        elif name != "provenance":
            yield name


def endpoints_of(verifier: Verifier | None) -> list[ModelClient]:
    """Returns the endpoints of a verifier's parts."""
    parts = verifier.parts if isinstance(verifier, CombinedVerifier) else []
    return [part.endpoint for part in parts if part.endpoint is not None]


@dataclass(frozen=True)
class Check:
    """The result and cost of a verifier."""

    verifier: str
    model: str | None
    checked: int
    refused: int
    budget: Budget | None

    def as_json(self) -> dict[str, Any]:
        spent = self.budget.spent if self.budget is not None else Usage()
        return {
            "verifier": self.verifier, "model": self.model, "checked": self.checked, "refused": self.refused,
            "calls": spent.calls, "cached": spent.cached, "input_tokens": spent.input_tokens,
            "output_tokens": spent.output_tokens, "money": self.budget.cost if self.budget is not None else None,
        }  # fmt: skip

    def in_words(self) -> str:
        """Describes the result, without costs that depend on the cache."""
        return (
            f"{self.checked:,} rows checked{f' by {self.model}' if self.model else ''},"
            f" {self.refused:,} refused"
        )


def checks_of(
    verifier: CombinedVerifier | None, provenances: Iterable[Mapping[str, Any]]
) -> list[Check]:
    """Returns the result of each verifier over all rows of a run, by their provenance."""
    checked, refused = Counter[str](), Counter[str]()
    for provenance in provenances:
        for verdict in single_verdicts(provenance.get("verdict") or {}):
            checked[verdict["verifier"]] += 1
            refused[verdict["verifier"]] += not verdict["ok"]
    checks = []
    for part in verifier.parts if verifier is not None else []:
        name, at = part.verifier.name, part.endpoint
        model, budget = (at.model, at.budget) if at is not None else (None, None)
        checks.append(Check(name, model, checked[name], refused[name], budget))
    return checks


def single_verdicts(verdict: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the verdict of each part from a row's provenance."""
    parts = (verdict.get("details") or {}).get("parts")
    if parts:
        yield from parts
    elif "verifier" in verdict:
        yield verdict
