"""Verdicts on reference answers, and the interface of verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ajet_sdk.dialects.message_parts import parts_of
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import ConfigError
from ajet_sdk.tasks.task_rows import QUERY_COLUMNS


@dataclass(frozen=True)
class RowVerdict:
    """A verifier's verdict on a row."""

    ok: bool
    reason: str
    """In words. Where `ok` is false it is one of few phrases, to count refusals by."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What it was said on, as JSON can hold it."""
    failed: bool = False
    """The check itself could not be made (the judge raised, a grader answered prose). The row is refused too."""

    def as_json(self, name: str) -> dict[str, Any]:
        """The verdict as a row's provenance holds it; `name` is the verifier's."""
        return {"verifier": name, "ok": self.ok, "reason": self.reason, **({"failed": True} if self.failed else {}),
                "details": dict(self.details)}  # fmt: skip


class Verifier(Protocol):
    """A way to check the reference answer of a row. One may check many rows at once."""

    @property
    def name(self) -> str:
        """The spec, for provenance."""
        ...

    @property
    def calls(self) -> int:
        """Replies of the endpoint that a row costs at most, for an estimate before."""
        ...

    async def check(self, row: Mapping[str, Any], endpoint: ModelClient | None) -> RowVerdict:
        """The verdict on a task row.

        `endpoint` is asked where it has none of its own. Raises what an endpoint raises, ConfigError where there is
        none.
        """
        ...


def question_of(row: Mapping[str, Any]) -> str:
    """A row's question: its query, or its messages as a transcript."""
    for name in QUERY_COLUMNS:
        if isinstance(row.get(name), str) and row[name].strip():
            return str(row[name])
    messages = row.get("init_messages") or row.get("messages") or []
    filled_messages = [m for m in messages if isinstance(m, Mapping) and m.get("content")]
    parts = [parts_of({"role": "user", **message}) for message in filled_messages]
    if len(parts) == 1:
        return parts[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in parts)


def required(endpoint: ModelClient | None, what: str) -> ModelClient:
    """The endpoint. Raises ConfigError where there is none."""
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
    max_tokens: int = 2048,
) -> list[str]:  # fmt: skip
    """`count` replies to one prompt, none of which has seen another; fewer where the endpoint gives no more.

    A server that ignores `n` is asked again, with another seed, for those that are missing.
    """
    endpoint, replies = required(endpoint, what), list[str]()
    for turn in range(count):
        replies += await endpoint.chat(
            [{"role": "user", "content": prompt}],
            n=count - len(replies),
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed + turn,
        )
        if len(replies) >= count:
            break
    return replies[:count]
