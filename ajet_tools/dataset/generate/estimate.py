"""Estimates what the rest of a run costs, before its first call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ajet_sdk.engines.budget import tokens_of

if TYPE_CHECKING:
    from ajet_tools.dataset.generate.learning import LearningValue
    from ajet_tools.dataset.generate.pipeline import Pipeline

ROW_TOKENS = 110
"""Tokens of a row whose length is not known: of a question with its answer and quotation."""
ANSWER_TOKENS = 250
"""Tokens of a verifier's reply."""
RUBRIC_TOKENS = 100
"""Tokens of a verifier's prompt, besides the row."""


@dataclass
class Estimate:
    """An estimate of the work left; `accepted` rows are there already."""

    calls: int
    checks: int = 0
    """Replies of verifying models."""
    input_tokens: int = 0
    output_tokens: int = 0
    money: float | None = None
    accepted: int = 0
    attempts: int = 0
    """Episodes of the policy."""

    @classmethod
    def of(cls, pipeline: Pipeline, value: LearningValue | None) -> Estimate:
        """Estimates the remaining work, with verification and trials, from one call's prompt and
        rows as long as the known ones."""
        source = pipeline.source
        calls = source.calls_left(pipeline.result)
        rows = calls * pipeline.config.per_call
        row_tokens = ROW_TOKENS
        if source.examples:
            texts = [json.dumps(example.values, default=str) for example in source.examples]
            row_tokens = round(sum(map(tokens_of, texts)) / len(texts))
        estimate = cls(calls, accepted=pipeline.result.accepted)
        call, _ = source.previews()[0]
        estimate.input_tokens = calls * tokens_of(list(call.messages))
        estimate.output_tokens = rows * row_tokens
        if value is not None:
            estimate.attempts = rows * value.k
        price = pipeline.endpoint.budget.price
        if price is not None:
            estimate.money = price.of(estimate.input_tokens, estimate.output_tokens)
        verifier = pipeline.checks.verifier
        if verifier is None:
            return estimate
        for part in verifier.parts:
            replies = rows * part.verifier.calls
            estimate.checks += replies
            read = replies * (row_tokens + RUBRIC_TOKENS + source.context_tokens)
            estimate.input_tokens += read
            estimate.output_tokens += replies * ANSWER_TOKENS
            if part.endpoint is not None:
                price = part.endpoint.budget.price
            else:
                price = None
            if price is not None:
                money = price.of(read, replies * ANSWER_TOKENS)
                estimate.money = (estimate.money or 0.0) + money
        return estimate

    def as_text(self) -> str:
        parts = [f"About {self.calls:,} calls for rows"]
        if self.checks:
            parts.append(f"{self.checks:,} replies to verify them")
        if self.attempts:
            parts.append(f"{self.attempts:,} attempts of the policy")
        tokens = f"about {self.input_tokens:,} tokens in, {self.output_tokens:,} out"
        money = "" if self.money is None else f", {self.money:.2f} in money"
        return f"{', '.join(parts)}: {tokens}{money}"
