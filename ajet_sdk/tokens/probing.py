"""Learns the format of replies by rendering a chat template with sentinels; generates call ids."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import Tokenizer
from ajet_sdk.tokens.formats import ID, PARSERS, CallFormat, Pairs, ReplyFormat, json_at, named
from ajet_sdk.tokens.template import ChatTemplate

NAME = "zqname"
OTHER = "zqother"
KEY = "zqkey"
KEY_2 = "zqsecond"
VALUE = "zqvalue"
NUMBER = 70707
TEXT = "zqtext"
REASON = "zqreason"

_BY_TEMPLATE = ("auto", "template")
"""Values of `model.tool_call_parser` for which the format is learnt."""


def learn(tokenizer: Tokenizer, parser: str = "auto") -> ReplyFormat:
    """Learns the format of a tokenizer's template.

    Raises ConfigError for an unknown `parser`, or one that doesn't match the template.
    """
    if parser not in _BY_TEMPLATE and parser not in PARSERS:
        known = ", ".join([*_BY_TEMPLATE, *PARSERS])
        raise ConfigError(f"model.tool_call_parser: {parser!r} is unknown; choose {known}")
    template = ChatTemplate.of(tokenizer.chat_template, tokenizer.variables)
    if "calls" in template.lacks and parser not in (*_BY_TEMPLATE, "hermes", "none"):
        raise ConfigError(
            f"model.tool_call_parser: {parser} does not read what the model is shown: the chat"
            " template renders no tool calls, so they are written in the Hermes form. Set auto, or"
            " a chat template that renders them"
        )
    return format_of(
        template,
        tuple(filter(None, (tokenizer.decode([i]) for i in sorted(tokenizer.eos_ids)))),
        parser,
    )


def format_of(template: ChatTemplate, ends: tuple[str, ...], parser: str = "auto") -> ReplyFormat:
    """The format of a template, or of `parser`; `ends` are the texts that end a turn."""
    probe = _Probe(template, ends)
    calls = probe.calls() if parser in _BY_TEMPLATE else PARSERS[parser]
    if "calls" in template.lacks:  # any text after it is the end of the turn
        calls = tuple(
            replace(call, close=call.close.partition("</tool_call>")[0] + "</tool_call>")
            for call in calls
        )
    return ReplyFormat(calls, probe.reasoning(calls), probe.preamble, probe.postamble)


def call_id(prompt: bytes, output_ids: Sequence[int], choice: int, index: int) -> str:
    """An id of nine letters and digits, as Mistral's templates require, determined by the hash of
    the prompt and the sampled tokens."""
    digest = hashlib.blake2b(prompt, digest_size=8)
    digest.update(np.asarray([choice, index, *output_ids], dtype=np.int64).tobytes())
    number = int.from_bytes(digest.digest(), "big")
    letters = "0123456789abcdefghijklmnopqrstuvwxyz"
    return "".join(letters[number // 36**i % 36] for i in range(9))


class _Probe:
    """Renders replies with sentinels by a template."""

    def __init__(self, template: ChatTemplate, ends: tuple[str, ...]) -> None:
        self._template = template
        self._ends = ends
        plain = template.reply_text({"role": "assistant", "content": TEXT}, _TOOLS)
        plain = plain or template.reply_text({"role": "assistant", "content": TEXT})
        before, _, self._ending = plain.partition(TEXT) if TEXT in plain else ("", "", "")
        self.preamble = self._without_reasoning(before)
        if any(end in self._ending for end in ends):
            self.postamble = self._until_end(self._ending)
        else:
            self.postamble = ""
        self.postamble = self.postamble if self.postamble.strip() else ""

    def _until_end(self, text: str) -> str:
        """Cuts a text at the end of the turn."""
        places = [at for end in self._ends if (at := text.find(end)) >= 0]
        text = text[: min(places)] if places else text
        ending = self._ending.rstrip()
        if places or not ending:
            return text
        return text.rstrip().removesuffix(ending)

    def _without_reasoning(self, text: str) -> str:
        """Removes an empty block of reasoning from a text."""
        if self._template.reasoning is not None:
            opening, closing = (re.escape(mark.strip()) for mark in self._template.reasoning)
            text = re.sub(rf"\s*(?:{opening})?\s*{closing}\s*", "", text)
        return text if text.strip() else ""

    def _reply(self, calls: Sequence[tuple[str, Mapping[str, object]]], **more: object) -> str:
        """Renders calls; their ids contain the names if the template shows only ids."""
        for written in (f"{ID[:-1]}{{number}}", "functions.{name}:{number}"):
            items = [
                {
                    "id": written.format(name=name, number=number),
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for number, (name, arguments) in enumerate(calls)
            ]
            text = self._template.reply_text(
                {"role": "assistant", "content": "", "tool_calls": items, **more}, _TOOLS
            )
            if calls[0][0] in text:
                break
        return re.sub(ID[:-1] + r"\d", ID, text)

    def calls(self) -> tuple[CallFormat, ...]:
        """The learnt format of calls, else all known ones."""
        single = self._until_end(self._reply([(NAME, {KEY: VALUE})]))
        double = self._until_end(self._reply([(NAME, {KEY: VALUE}), (OTHER, {KEY: VALUE})]))
        call_format = (
            self._of_json(single, double)
            or self._of_python(single, double)
            or self._of_pairs(single, double)
        )
        if call_format is None:
            return tuple(form for forms in PARSERS.values() for form in forms)
        if call_format.open.strip():
            return (call_format,)
        return (call_format, *PARSERS["llama3_json"][:1])

    def reasoning(self, calls: Sequence[CallFormat]) -> tuple[tuple[str, str], ...]:
        """The marks around reasoning before content, and before calls if different."""
        if self._template.reasoning is not None:
            pairs = [self._template.reasoning]
        else:
            pairs = []
        pairs = [(self._opening(before, mark), mark) for before, mark in pairs]
        text = self._reply([(NAME, {KEY: VALUE})], reasoning_content=REASON, thinking=REASON)
        before, _, after = text.partition(REASON)
        opening = calls[0].open.strip()[:1] if calls else ""
        call = calls[0].begins.search(after) if opening and calls else None
        if call is not None and (mark := after[: call.start()].strip()):
            pair = (self._opening(before, mark) or (pairs[0][0] if pairs else ""), mark)
            if pair[0].strip() and (pair[0].strip(), mark) not in [
                (a.strip(), b.strip()) for a, b in pairs
            ]:
                pairs.append(pair)
        return tuple(pairs)

    def _opening(self, before: str, closing: str) -> str:
        """The mark that opens reasoning: the text before it, or else the end of the generation
        prompt.

        The latter may be an empty block, which ends with `closing`.
        """
        if before.strip():
            return before
        head = self._template.render(
            [self._template.form({"role": "user", "content": "x"})], _TOOLS
        )
        marks: list[str] = re.findall(r"(<[^<>\s]+>)\s*(?=<|$)", head[-200:])
        while marks and marks[-1] == closing.strip():
            marks.pop()
        if marks and head.rstrip().endswith((marks[-1], closing.strip())):
            return marks[-1]
        return ""

    def _of_json(self, single: str, double: str) -> CallFormat | None:
        first = _json_item(single, NAME)
        separator = ""
        if first is None:
            return None
        start, end, middle = first
        if NAME in double and OTHER in double:
            a = _json_item(double, NAME)
            b = _json_item(double, OTHER)
            if a is not None and b is not None and a[1] <= b[0]:
                separator = double[a[1] : b[0]]
        return self._format(single, start, end, separator, middle=middle)

    def _of_python(self, single: str, double: str) -> CallFormat | None:
        item = rf"{KEY}=(['\"]){VALUE}\1\)"
        first = re.search(rf"{NAME}\({item}", single)
        both = re.search(rf"{NAME}\({item}(.*?){OTHER}\(", double, re.DOTALL)
        if first is None:
            return None
        return self._format(
            single, first.start(), first.end(), both.group(2) if both else "", python=True
        )

    def _of_pairs(self, single: str, double: str) -> CallFormat | None:
        """Learns a format with pairs of keys and values, whose marks are found by a second
        argument."""
        both = self._until_end(self._reply([(NAME, {KEY: VALUE, KEY_2: NUMBER})]))
        shown = re.search(
            rf"{NAME}(.*?){KEY}(.*?){VALUE}(.*?){KEY_2}(.*?){NUMBER}", both, re.DOTALL
        )
        if shown is None or KEY not in single or VALUE not in single:
            return None
        head, assign, between, assign_json = shown.groups()
        at = head.rfind("<")
        key_open = head[at:]
        if at < 0 or not between.endswith(key_open):
            return None
        value_close = between[: len(between) - len(key_open)]
        if KEY in value_close or NAME in head:
            return None
        marks = Pairs(
            head[:at], key_open, assign, value_close, assign_json if assign_json != assign else ""
        )
        remaining = _behind(single.partition(VALUE)[2], value_close)
        if OTHER in double:
            separator = _behind(double.partition(VALUE)[2].partition(OTHER)[0], value_close)
        else:
            separator = ""
        if remaining is None or separator is None:
            return None
        return self._format(
            single, single.find(NAME), len(single) - len(remaining), separator, pairs=marks
        )

    def _format(self, text: str, start: int, end: int, separator: str, **more: Any) -> CallFormat:
        opening = self._without_reasoning(text[:start])
        return CallFormat(opening, separator, text[end:], item=text[start:end], **more)


def _tool(name: str) -> dict[str, object]:
    properties = {
        KEY: {"type": "string", "description": ""},
        KEY_2: {"type": "integer", "description": ""},
    }
    parameters = {"type": "object", "properties": properties, "required": []}
    return {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": parameters},
    }


_TOOLS = [_tool(NAME), _tool(OTHER)]


def _behind(text: str, mark: str) -> str | None:
    """The text after a mark, regardless of blanks; None if the text doesn't start with it."""
    text = text.lstrip()
    return text[len(mark.strip()) :] if text.startswith(mark.strip()) else None


def _json_item(text: str, name: str) -> tuple[int, int, str | None] | None:
    """Start, end and middle of the item that calls `name`."""
    at = text.find(name)
    if at < 0:
        return None
    for start in (i for i in range(at) if text[i] == "{"):
        parsed = json_at(text, start)
        if parsed is not None and parsed[1] > at and named(parsed[0]) is not None:
            return start, parsed[1], None
    brace = text.find("{", at)
    parsed = json_at(text, brace) if brace >= 0 else None
    if parsed is None or not isinstance(parsed[0], dict) or KEY not in parsed[0]:
        return None
    return at, parsed[1], text[at + len(name) : brace]
