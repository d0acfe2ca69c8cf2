"""Verdicts on reference answers, and the interface of verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import ConfigError


@dataclass(frozen=True)
class RowVerdict:
    """A verifier's verdict on a row."""

    ok: bool
    reason: str
    """If `ok` is false, one of a few phrases, so refusals can be counted."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """The evidence, as JSON values."""
    failed: bool = False
    """The check itself failed (the judge raised, the grader's reply was invalid). The row is
    refused too."""

    def as_json(self, name: str) -> dict[str, Any]:
        """Returns the verdict for a row's provenance, under the verifier's name."""
        return {
            "verifier": name,
            "ok": self.ok,
            "reason": self.reason,
            **({"failed": True} if self.failed else {}),
            "details": dict(self.details),
        }


class Verifier(Protocol):
    """Checks the reference answers of rows, possibly many at once."""

    @property
    def name(self) -> str:
        """The spec, for provenance."""
        ...

    @property
    def calls(self) -> int:
        """Maximum number of replies per row, for estimates."""
        ...

    @property
    def needs_answer(self) -> bool:
        """Whether it compares the row's answer, so that a row without one can't pass."""
        ...

    async def check(self, row: Mapping[str, Any], endpoint: ModelClient | None) -> RowVerdict:
        """Checks a task row.

        `endpoint` is used if the verifier has none of its own. Raises the endpoint's errors,
        ConfigError without an endpoint.
        """
        ...


def required(endpoint: ModelClient | None, what: str) -> ModelClient:
    """Returns the endpoint. Raises ConfigError if there is none."""
    if endpoint is None:
        raise ConfigError(f"--verify {what} needs a model: pass --base-url URL --model NAME")
    return endpoint


async def independent(
    endpoint: ModelClient | None,
    prompt: str,
    count: int,
    *,
    seed: int,
    what: str,
    temperature: float = 0.7,
) -> list[str]:
    """Returns `count` independent replies to a prompt, or fewer if the endpoint returns no more.

    Servers that ignore `n` are asked again with another seed.
    """
    endpoint = required(endpoint, what)
    replies: list[str] = []
    for turn in range(count):
        replies += await endpoint.chat(
            [{"role": "user", "content": prompt}],
            n=count - len(replies),
            temperature=temperature,
            max_tokens=2048,
            seed=seed + turn,
        )
        if len(replies) >= count:
            break
    return replies[:count]
