"""Finds and masks secrets in JSON and YAML by the names of their keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ajet_sdk.addresses import names_secret, public

LEAVES = frozenset((str, int, float, bool, type(None)))
"""Types of JSON scalars."""


def is_secret(key: object, beside: Mapping[object, object] | None = None) -> bool:
    """Whether a key names a secret. `beside` is its mapping: a `token` next to a `logprob` is part
    of a reply."""
    sampled = key == "token" and beside is not None and "logprob" in beside
    return isinstance(key, str) and names_secret(key) and not sampled


def masked(value: object, by: str, address: Callable[[str, str], str] = public) -> Any:
    """Replace secrets in a value by `by`.

    Secrets are texts and lists of texts under secret keys, and whatever `address` replaces in other
    texts: by default passwords and keys of addresses.
    """
    if type(value) is str:
        return address(value, by)
    if type(value) in LEAVES:
        return value
    if isinstance(value, dict | Mapping):  # checking for dict first is faster
        result = dict[object, object]()
        for key, item in value.items():
            hidden = is_secret(key, value)
            key = address(key, by) if type(key) is str else key
            result[key] = _hidden(item, by, address) if hidden else masked(item, by, address)
        return result
    if isinstance(value, list | tuple):
        return [masked(item, by, address) for item in value]
    return value


def without(value: object, secrets: Collection[str], by: str = "***") -> Any:
    """Replace known secrets in the texts of a JSON value, as servers repeat a key that they refuse.

    `masked` goes by names and addresses, and cannot know a key in other texts.
    """
    longest_first = sorted(secrets, key=len, reverse=True)

    def replaced(text: str, by: str) -> str:
        for secret in longest_first:
            text = text.replace(secret, by)
        return text

    return masked(value, by, replaced) if secrets else value


def _hidden(value: object, by: str, address: Callable[[str, str], str]) -> Any:
    if isinstance(value, str):
        return by if value else value
    if isinstance(value, list | tuple):
        return [_hidden(item, by, address) for item in value]
    return masked(
        value, by, address
    )  # such as the schema of a password, whose texts are no secrets
