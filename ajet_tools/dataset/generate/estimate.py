"""Estimates what the rest of a run costs, before its first call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajet_tools.dataset.generate.learning import LearningValue
    from ajet_tools.dataset.generate.pipeline import Pipeline

ANSWER_TOKENS = 250
"""Estimated tokens of a verifier's reply."""


@dataclass
class Estimate:
    """An estimate of the work left; `accepted` rows are there already."""

    calls: int
    checks: int = 0
    """Replies of verifying models."""
    embeddings: int = 0
    """Requests for embeddings, of many texts each."""
    input_tokens: int = 0
    output_tokens: int = 0
    money: float | None = None
    accepted: int = 0
    attempts: int = 0
    """Episodes of the policy."""

    @classmethod
    def of(cls, pipeline: Pipeline, value: LearningValue | None) -> Estimate:
        """Estimates the remaining work, with verification and trials."""
        left = pipeline.source.outlook(pipeline.result)
        rows = left.calls * pipeline.config.per_call
        estimate = cls(left.calls, accepted=pipeline.result.accepted)
        if value is not None:
            estimate.attempts = rows * value.k
        read = left.calls * left.prompt
        written = rows * left.row
        if pipeline.checks.meanings is not None:
            estimate.embeddings = pipeline.checks.meanings.requests(left.calls, left.seeds)
        if estimate.embeddings:
            read += (rows + left.seeds) * left.question
        if pipeline.endpoint.budget.price is not None:
            estimate.money = pipeline.endpoint.budget.price.of(read, written)
        verifier = pipeline.checks.verifier
        for part in verifier.parts if verifier is not None else []:
            replies = rows * part.verifier.calls
            part_read = replies * left.check
            part_written = replies * ANSWER_TOKENS
            estimate.checks += replies
            read += part_read
            written += part_written
            if part.endpoint is not None and part.endpoint.budget.price is not None:
                money = part.endpoint.budget.price.of(part_read, part_written)
                estimate.money = (estimate.money or 0.0) + money
        estimate.input_tokens = round(read)
        estimate.output_tokens = round(written)
        return estimate

    def as_text(self) -> str:
        parts = [f"About {self.calls:,} calls for rows"]
        if self.checks:
            parts.append(f"{self.checks:,} replies to verify them")
        if self.embeddings:
            parts.append(f"{self.embeddings:,} requests for embeddings")
        if self.attempts:
            parts.append(f"{self.attempts:,} attempts of the policy")
        tokens = f"about {self.input_tokens:,} tokens in, {self.output_tokens:,} out"
        money = "" if self.money is None else f", {self.money:.2f} in money"
        return f"{', '.join(parts)}: {tokens}{money}"
