"""API keys in the environment: the user's keys, and placeholders for clients that require a key."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

KEYS: dict[str, tuple[str, ...]] = {
    "OPENAI_API_KEY": (),
    "ANTHROPIC_API_KEY": (
        "ANTHROPIC_AUTH_TOKEN",
        "ANTHROPIC_PROFILE",
        "ANTHROPIC_FEDERATION_RULE_ID",
    ),
    "GOOGLE_API_KEY": ("GEMINI_API_KEY",),
    "AZURE_OPENAI_API_KEY": ("AZURE_OPENAI_AD_TOKEN",),
    "MISTRAL_API_KEY": (),
    "GROQ_API_KEY": (),
    "TOGETHER_API_KEY": ("TOGETHERAI_API_KEY",),
    "FIREWORKS_API_KEY": ("FIREWORKS_AI_API_KEY",),
    "CEREBRAS_API_KEY": (),
    "DEEPSEEK_API_KEY": (),
    "OPENROUTER_API_KEY": (),
    "XAI_API_KEY": (),
}
"""Variables of captured clients, each with alternatives: if one of these is set, a placeholder
would hide it."""

_PREFIX = "ajet-placeholder."


class _Placeholders:
    """Number of blocks that need the placeholders."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0


_PLACEHOLDERS = _Placeholders()


@contextmanager
def placeholder_keys() -> Iterator[None]:
    """Set a placeholder in every unset variable of `KEYS`, so that clients can be created without a
    key.

    Re-entrant and counted: the last to leave removes them. They are never sent to a provider; see
    `placeholder_in`.
    """
    with _PLACEHOLDERS.lock:
        _PLACEHOLDERS.users += 1
        for name, aliases in KEYS.items():
            if not any(os.environ.get(variable) for variable in (name, *aliases)):
                os.environ[name] = _PREFIX + name
    try:
        yield
    finally:
        with _PLACEHOLDERS.lock:
            _PLACEHOLDERS.users -= 1
            if _PLACEHOLDERS.users == 0:
                for name in KEYS:
                    if placeholder_in(os.environ.get(name, "")):
                        del os.environ[name]


def api_key(name: str) -> str | None:
    """The user's key in an environment variable; None if it is unset or a placeholder."""
    value = os.environ.get(name)
    return None if value is None or placeholder_in(value) else value


def without_placeholders(environment: Mapping[Any, Any]) -> dict[Any, Any]:
    """Remove placeholders from the variables of a child process, whose clients would send them to
    the provider."""
    return {
        name: value
        for name, value in environment.items()
        if name not in KEYS or not placeholder_in(str(value))
    }


def placeholder_in(text: str) -> str | None:
    """The variable whose placeholder a text (a key, a header, a query) contains, or None."""
    _, marker, suffix = text.partition(_PREFIX)
    if marker:
        return next((name for name in KEYS if suffix.startswith(name)), None)
    return None
