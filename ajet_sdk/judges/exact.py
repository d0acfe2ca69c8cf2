"""The exact judge: the same text, but for white space around it."""

from __future__ import annotations

from typing import Any

from ajet_sdk.judges.answer import text_of

__all__ = ["exact"]


def exact(output: Any, answer: Any) -> bool:
    """Whether the output is the answer, white space around it aside."""
    return text_of(output).strip() == text_of(answer).strip()
