"""Secrets and personal data in text, found by documented patterns and replaced by placeholders.

A value becomes `[kind n]`, and within one episode the same value always gets the same number, so that what was said
of it can still be followed. Patterns that would also fit ordinary numbers are confirmed by a checksum (cards: Luhn,
ISO/IEC 7812; IBAN: mod 97, ISO 13616; national ids: their own) or by what stands around them.

What this cannot do: names, addresses, dates of birth and other personal facts in prose; secrets without a known form
(a password in a sentence); text in pictures or encoded data (base64, ROT13); numbers that JSON holds as numbers.
Read what you publish.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping

from ajet_sdk.addresses import secrets_in
from ajet_sdk.secret_keys import is_secret
from ajet_tools.trace.redact_rules import DIGITS, RULES, Rule
from ajet_tools.trace.redact_rules import KINDS as KINDS

_PLACED = re.compile(rf"\[(?:{'|'.join(KINDS)}) \d+\]|\[removed by ajet\]")


class Redactor:
    """Replaces values in the text of one episode, and counts how many there were of each kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._numbers: dict[tuple[str, str], int] = {}
        self._known: dict[str, str] = {}
        self._objects: dict[int, tuple[object, object]] = {}
        """By identity: the calls of an episode share the messages that they repeat."""

    def text(self, text: str) -> str:
        """The text with what was found replaced; JSON stays JSON."""
        if len(text) < 6:
            return text
        redacted = self._known.get(text)
        if redacted is None:
            redacted = self._known[text] = self._json(text)
        return redacted

    def value(self, value: object) -> object:
        """The same JSON value with its texts redacted; the value itself where there is nothing to redact."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            known = self._objects.get(id(value))
            if known is None:
                known = self._objects[id(value)] = (value, self._object(value))
            return known[1]
        if isinstance(value, list | tuple):
            items = [self.value(v) for v in value]
            return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
        return value

    def _object(self, value: Mapping[object, object]) -> object:
        pairs = {k: self._secret(v) if is_secret(k, value) else self.value(v) for k, v in value.items()}
        return pairs if any(pairs[k] is not value[k] for k in pairs) else value

    def _json(self, text: str) -> str:
        """A text that is itself JSON (a tool call's arguments) is redacted inside, so that it can still be read."""
        if text[0] in "{[" and text[-1] in "}]":
            try:
                parsed = json.loads(text)
            except (ValueError, RecursionError):
                return self._plain(text)
            changed = self.value(parsed)
            return text if changed is parsed else json.dumps(changed, ensure_ascii=False)
        return self._plain(text)

    def _plain(self, text: str) -> str:
        if "://" in text:
            text = self._addresses(text)
        lower, digits = text.lower(), DIGITS.search(text) is not None
        for rule in RULES:
            if rule.may_fit(lower, digits):
                text = rule.pattern.sub(lambda match, rule=rule: self._replaced(rule, match), text)  # type: ignore[misc]
        return text

    def _addresses(self, text: str) -> str:
        parts, last = list[str](), 0
        for start, end in secrets_in(text):
            value = text[start:end]
            parts += (text[last:start], value if _PLACED.search(value) else self._placeholder("password", value))
            last = end
        return "".join((*parts, text[last:]))

    def _replaced(self, rule: Rule, match: re.Match[str]) -> str:
        group = "value" if "value" in rule.pattern.groupindex else 0
        value = match[group]
        if _PLACED.search(value) or (rule.check and not rule.check(match)):
            return match[0]
        start, end = match.start(group) - match.start(), match.end(group) - match.start()
        return match[0][:start] + self._placeholder(rule.kind, value) + match[0][end:]

    def _secret(self, value: object) -> object:
        """The value of a key that names a secret."""
        if isinstance(value, str):
            return self._placeholder("secret", value) if value and not _PLACED.fullmatch(value) else value
        if isinstance(value, list | tuple):
            return [self._secret(item) for item in value] or value
        return self.value(value)

    def _placeholder(self, kind: str, value: str) -> str:
        number = self._numbers.get((kind, value))
        if number is None:
            self.counts[kind] += 1
            number = self._numbers[kind, value] = self.counts[kind]
        return f"[{kind} {number}]"
