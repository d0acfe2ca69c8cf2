"""Combines verifiers: all must pass."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
_KIND = rf"(?=(?:{'|'.join(KINDS)})(?:[:,+|]|$))"
_COMMA = re.compile(rf",{_KIND}")
_NO_COMMA = re.compile(rf"[+|]{_KIND}")


@dataclass(frozen=True)
class Verify:
    """The settings of verification; the options `--verify...` of the commands."""

    spec: str = "none"
    model: str | None = None
    """A `ModelSpec`; a NAME without URL is at the writer's endpoint. Default: the writer."""
    unfenced: bool = False
    """Run programs without a sandbox."""

    @classmethod
    def of(cls, given: str | Verify) -> Verify:
        return cls(given) if isinstance(given, str) else given

    def endpoint(self, writer: ModelClient) -> ModelClient:
        """Opens the model that verifies; by default it is the writer. Raises ConfigError."""
        if self.model is None:
            return writer
        spec = ModelSpec.parse(self.model, "--verify-model")
        return spec.open(
            writer.base_url,
            concurrency=writer.concurrency,
            retries=writer.retries,
            cache=writer.cache,
            budget=writer.budget.part(spec.price),
        )


def split_spec(spec: str) -> list[str]:
    """Splits `agreement:3,code`; a comma in the name of a file stays. Raises ConfigError."""
    if _NO_COMMA.search(spec):
        raise ConfigError(
            f"--verify {spec}: several verifiers are separated by commas, and all of them must pass"
        )
    return _COMMA.split(spec.strip())


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
    """A row passes if every verifier passes it; the others are not asked after a refusal."""

    name: str
    parts: Sequence[VerifierPart]

    @property
    def endpoints(self) -> list[ModelClient]:
        return [part.endpoint for part in self.parts if part.endpoint is not None]

    @property
    def calls(self) -> int:
        return sum(part.verifier.calls for part in self.parts)

    @property
    def needs_answer(self) -> bool:
        return any(part.verifier.needs_answer for part in self.parts)

    def refuse_unanswered(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raises ConfigError if it compares answers, and none of these rows has a field that is
        known as one."""
        if not rows or not self.needs_answer or any(answer_of(row) is not None for row in rows):
            return
        columns = sorted(set[str]().union(*map(_fields, rows)))
        raise ConfigError(
            f"--verify {self.name} compares answers, but no seed has a known answer: the"
            f" fields are {', '.join(columns)}, and an answer is named {', '.join(ANSWERS[:3])},"
            " solution, label, output, ... Name the field (`ajet dataset filter --map"
            " FIELD=metadata.answer`), or pass --verify none"
        )

    async def check(self, row: Mapping[str, object], endpoint: ModelClient | None) -> RowVerdict:
        if not self.parts:
            return RowVerdict(True, "not verified")
        verdict = await self._ask(row, endpoint)
        if verdict.ok and any(part.kind in KINDS for part in self.parts):
            # a writer and a checker make the same mistakes; a calculation makes none
            return inconsistency(row) or verdict
        return verdict

    async def _ask(self, row: Mapping[str, object], endpoint: ModelClient | None) -> RowVerdict:
        if len(self.parts) == 1:
            return await self.parts[0].verifier.check(row, self.parts[0].endpoint or endpoint)
        records: list[dict[str, object]] = []
        for part in self.parts:
            verdict = await part.verifier.check(row, part.endpoint or endpoint)
            records.append(verdict.as_json(part.verifier.name))
            if not verdict.ok:
                details = {"parts": records}
                return RowVerdict(False, verdict.reason, details, failed=verdict.failed)
        names = " and ".join(part.verifier.name for part in self.parts)
        return RowVerdict(True, f"passes {names}", {"parts": records})

    def model(self, writer: ModelClient) -> list[str] | None:
        """Returns the endpoint and name of the model that verifies, if it isn't the writer's."""
        for endpoint in self.endpoints:
            place = [endpoint.base_url, endpoint.model]
            return place if place != [writer.base_url, writer.model] else None
        return None


def _fields(row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        if name == "metadata" and isinstance(value, Mapping):
            yield from (f"metadata.{inner}" for inner in value)
        elif name != "provenance":
            yield name


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
    checked: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for provenance in provenances:
        for verdict in single_verdicts(provenance.get("verdict") or {}):
            checked[verdict["verifier"]] += 1
            refused[verdict["verifier"]] += not verdict["ok"]
    if verifier is None:
        return []
    checks = []
    for part in verifier.parts:
        name = part.verifier.name
        check = Check(name, None, checked[name], refused[name], None)
        if part.endpoint is not None:
            check = replace(check, model=part.endpoint.model, budget=part.endpoint.budget)
        checks.append(check)
    return checks


def single_verdicts(verdict: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the verdict of each part from a row's provenance."""
    parts = (verdict.get("details") or {}).get("parts")
    if parts:
        yield from parts
    elif "verifier" in verdict:
        yield verdict
