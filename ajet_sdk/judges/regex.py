"""The regex judge: what a pattern finds in the output."""

from __future__ import annotations

import re
from typing import Any

from ajet_sdk.errors import ConfigError
from ajet_sdk.judges.answer import text_of

__all__ = ["compile_pattern", "matches"]


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The compiled pattern; ConfigError says where it is wrong."""
    try:
        return re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise ConfigError(f"task_judge.pattern {pattern!r} is no regular expression: {error}") from None


def matches(pattern: re.Pattern[str], output: str, answer: Any | None) -> bool:
    """Whether the first group of the last match is the answer; for a pattern without groups, whether it matches."""
    if not pattern.groups:
        return pattern.search(output) is not None
    found = [match.group(1) for match in pattern.finditer(output)]
    return bool(found) and (found[-1] or "").strip() == text_of(answer).strip()
