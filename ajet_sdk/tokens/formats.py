"""Formats of tool calls and reasoning, and the parser of replies.

A reply is parsed as `reasoning content OPEN item (SEPARATOR item)* CLOSE`. A malformed call stays
text and is never an error. Blanks between marks may vary, and so may digits in them, which number
the calls in some formats.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from ajet_sdk.tokens.argument_types import ArgumentTypes, json_or_literal
from ajet_sdk.types import JsonView

ID = "zqid00000"
"""Placeholder in a mark for the id of a call, which the model writes."""

Tools = Sequence[JsonView]
_decoder = json.JSONDecoder(strict=False)
_BRACE = re.compile(r"\s*(?=\{)")
_NAME = r"\s*([^\s\"'{}\[\]<>(),]+)"
_LONGEST_CALL = 64
"""Maximum number of closing brackets to try as the end of a call in Python syntax."""


@dataclass(frozen=True)
class Parsed:
    """A parsed reply: reasoning, content, and calls as (name, JSON of the arguments)."""

    content: str | None
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    ids: tuple[str | None, ...] = ()
    """Ids of the calls, if the model wrote them."""
    unread: bool = False
    """Whether it contains an unparsable tool call, whose text is then content."""
    behind_first: int = 0
    """Number of characters after the first call and its closing mark."""


@dataclass(frozen=True, slots=True)
class _Item:
    name: str
    arguments: Mapping[str, object]
    end: int
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Pairs:
    """Marks of arguments written as pairs: NAME name_end (key_open KEY assign VALUE
    value_close)*."""

    name_end: str
    key_open: str
    assign: str
    value_close: str
    assign_json: str = ""
    """The mark before a value that is no string, if different."""


@dataclass(frozen=True)
class CallFormat:
    """A format of tool calls; by default an item is a JSON object with name and arguments."""

    open: str
    separator: str
    close: str
    middle: str | None = None
    """Items are NAME MIDDLE {arguments as JSON}."""
    pairs: Pairs | None = None
    """Items are a name and pairs."""
    python: bool = False
    """Items are NAME(KEY=VALUE, …)."""
    item: str = ""
    """An item in the template's format, if learnt."""

    @property
    def begins(self) -> re.Pattern[str]:
        """Pattern of the mark before tool calls."""
        return re.compile(_loose(self.open) if self.open.strip() else r"^\s*(?=\{|\[)")

    def opens(self, text: str) -> bool:
        """Whether a text has the opening mark, or the beginning of a call's JSON if the mark is
        only a bracket."""
        if self.open.strip(" \n[{"):
            return self.begins.search(text) is not None
        return (
            not self.python
            and re.match(r'\s*\[?\s*\{\s*"(name|tool_name|function)"\s*:', text) is not None
        )

    def find(self, text: str, tools: Tools) -> tuple[str, tuple[_Item, ...]] | None:
        """Finds the calls, and the text before them; None without calls, or if one is malformed."""
        start = self.begins.search(text)
        if start is None:
            return None
        if self._tagged:
            calls = self._find_tagged(text, start.end(), tools)
            return None if calls is None else (text[: start.start()], calls)
        items: list[_Item] = []
        at = start.end()
        written = start.groupdict().get("id")
        while True:
            item = self._item(text, at, tools, written)
            if item is None:
                return None
            items.append(item)
            at = item.end
            if self.separator.strip():
                following = re.compile(_loose(self.separator)).match(text, at)
            else:
                following = None
            if (
                following is None
                and not self.separator.strip()
                and self._item(text, at, tools, None) is not None
            ):
                continue
            if following is None:
                break
            at = following.end()
            written = following.groupdict().get("id")
        end = re.compile(_loose(self.close)).match(text, at)
        if end is None or text[end.end() :].strip():
            return None
        offered = {(tool.get("function") or {}).get("name") for tool in tools}
        if (
            self.python
            and not self.open.strip(" [")
            and not {item.name for item in items} <= offered
        ):
            return None  # a list in brackets rather than calls
        return text[: start.start()], tuple(items)

    @property
    def _tagged(self) -> bool:
        """Whether each call has its own marks, such as `<tool_call>` and `</tool_call>`."""
        opening, separator, closing = (
            re.sub(r"\s", "", mark) for mark in (self.open, self.separator, self.close)
        )
        return bool(opening) and closing.startswith("</") and separator == closing + opening

    def _find_tagged(self, text: str, at: int, tools: Tools) -> tuple[_Item, ...] | None:
        """Finds calls with marks of their own, as the parsers of vLLM do: text between them and
        behind them is dropped, and the last one needs no closing mark. None if one is malformed."""
        closing = re.compile(_loose(self.close))
        items: list[_Item] = []
        while True:
            item = self._item(text, at, tools, None)
            if item is None:
                return None
            items.append(item)
            end = closing.match(text, item.end)
            if end is None:
                begun = re.sub(r"\s", "", self.close).startswith(
                    re.sub(r"\s", "", text[item.end :])
                )
                return tuple(items) if begun else None
            following = self.begins.search(text, end.end())
            if following is None:
                return tuple(items)
            at = following.end()

    def end_of(self, item: _Item, text: str) -> int:
        """The end of a call, including the mark that closes it regardless of further calls."""
        both = zip(self.separator.strip(), self.close.strip(), strict=False)
        alike = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], both))
        mark = alike[: max(alike.rfind(">"), alike.rfind("]")) + 1]
        if mark:
            end = re.compile(r"\s*" + _loose(mark, inner=True)).match(text, item.end)
        else:
            end = None
        return item.end if end is None else end.end()

    def _item(self, text: str, at: int, tools: Tools, written: str | None) -> _Item | None:
        if self.python:
            return _python_item(text, at)
        if self.pairs is not None:
            return self._item_of_pairs(text, at, tools, self.pairs)
        head = None
        if self.middle is not None:
            head = re.compile(_NAME + _loose(self.middle)).match(text, at)
            if head is None:
                return None
            at = head.end()
        parsed = json_at(text, at)
        if parsed is None:
            return None
        value, end = parsed
        if head is None:
            call = named(value)
            if call is None:
                return None
            return _Item(call[0], call[1], end, call[2])
        if not isinstance(value, dict):
            return None
        name = head.group(1)
        if self.open.rstrip().endswith("functions."):  # Kimi's, whose id is functions.NAME:number
            written = "functions." + head.group(0).strip().partition("<")[0].strip()
        return _Item(name, value, end, head.groupdict().get("id") or written)

    def _item_of_pairs(self, text: str, at: int, tools: Tools, marks: Pairs) -> _Item | None:
        name_end = _loose(marks.name_end)
        first_closing = (
            self.close.strip().partition(">")[0] + ">"
        )  # all that a last, unclosed call may have of them
        endings = (marks.key_open, first_closing, self.close, self.separator)
        ends = "|".join(_loose(mark) for mark in endings if mark.strip(" >"))
        ends = ends.replace("?P<id>", "?:")
        head = re.compile(_NAME + name_end + f"(?={ends}|$)").match(text, at)
        if head is None:
            return None
        at = head.end()
        types = ArgumentTypes.of(head.group(1), tools)
        arguments = dict[str, object]()
        while (pair := _pair(marks, ends).match(text, at)) is not None:
            key = pair["key"].strip()
            value = pair["value"]
            if pair["raw"] is None:
                arguments[key] = json_or_literal(value)
            else:
                arguments[key] = value if marks.assign_json else types.read(key, value)
            at = pair.end()
        return _Item(head.group(1), arguments, at)


@dataclass(frozen=True)
class ReplyFormat:
    """A template's format of replies."""

    calls: tuple[CallFormat, ...]
    reasoning: tuple[tuple[str, str], ...] = ()
    """Marks before and after reasoning, which may depend on what follows."""
    preamble: str = ""
    """Text before plain content that isn't part of it, such as the header of a channel."""
    postamble: str = ""
    """Text between content and the end of the turn."""

    def parse(self, text: str, *, prompt: str = "", tools: Tools = ()) -> Parsed:
        """Parse a reply to a prompt that ends with `prompt`. Without `tools`, calls stay text."""
        reasoning, reply, closed = self._reasoning(text, prompt)
        if self.preamble and reply.startswith(self.preamble):
            reply = reply[len(self.preamble) :]
        if tools:
            for form in self.calls:
                match = form.find(reply if closed else reasoning or "", tools)
                if match is not None:
                    before = match[0].strip() or None
                    items = match[1]
                    content, thought = (before, reasoning) if closed else (None, before)
                    calls = tuple(
                        (i.name, json.dumps(i.arguments, ensure_ascii=False)) for i in items
                    )
                    ids = _distinct([i.id for i in items])
                    whole = reply if closed else reasoning or ""
                    return Parsed(
                        content,
                        thought,
                        calls,
                        ids,
                        behind_first=len(whole) - form.end_of(items[0], whole),
                    )
        if self.postamble and reply.endswith(self.postamble):
            reply = reply[: -len(self.postamble)]
        return Parsed(reply, reasoning, unread=bool(tools) and self.unread(reply))

    def unread(self, text: str) -> bool:
        """Whether a reply contains an unparsable tool call."""
        return any(form.opens(text) for form in self.calls) and not any(
            form.find(text, ()) for form in self.calls
        )

    def _reasoning(self, text: str, prompt: str) -> tuple[str | None, str, bool]:
        """Splits off the reasoning; returns it, the rest, and whether it was closed."""
        for opening, closing in ((a.strip(), b.strip()) for a, b in self.reasoning):
            body = text.lstrip()
            if opening and body.startswith(closing):  # empty reasoning
                return None, body[len(closing) :].lstrip("\n"), True
            if not (opening and prompt.rstrip().endswith(opening)):
                if not opening or not body.startswith(opening):
                    continue
                body = body[len(opening) :]
            closings = [b.strip() for a, b in self.reasoning if a.strip() == opening]
            matches = [(at, -len(mark), mark) for mark in closings if (at := body.find(mark)) >= 0]
            if not matches:
                return body.strip() or None, "", False
            at, _, mark = min(matches)
            return body[:at].strip() or None, body[at + len(mark) :].lstrip("\n"), True
        return None, text, True


_HERMES = CallFormat("<tool_call>", "</tool_call><tool_call>", "</tool_call>")
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_V3 = ("function<｜tool▁sep｜>", "```json", "```")
PARSERS: dict[str, tuple[CallFormat, ...]] = {
    "hermes": (_HERMES,),
    "qwen3_coder": (
        CallFormat(
            "<tool_call><function=", "</function></tool_call><tool_call><function=", "</function></tool_call>",
            pairs=Pairs(">\n", "<parameter=", ">\n", "\n</parameter>\n"),
        ),
    ),
    "glm45": (
        CallFormat(
            "<tool_call>", "</tool_call><tool_call>", "</tool_call>",
            pairs=Pairs("\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
    ),
    "mistral": (
        CallFormat("[TOOL_CALLS][", ",", "]"),
        CallFormat("[TOOL_CALLS]", "[TOOL_CALLS]", "", middle=f"[CALL_ID]{ID}[ARGS]"),
        CallFormat("[TOOL_CALLS]", "[TOOL_CALLS]", "", middle="[ARGS]"),
        CallFormat("[TOOL_CALLS]", "[TOOL_CALLS]", "", middle=""),
    ),
    "deepseek_v3": (
        CallFormat(
            _DEEPSEEK[0] + _V3[0], f"{_V3[2]}{_DEEPSEEK[1]}<｜tool▁call▁begin｜>{_V3[0]}",
            _V3[2] + _DEEPSEEK[1] + _DEEPSEEK[2], middle=_V3[1],
        ),
    ),
    "deepseek_v31": (
        CallFormat(
            _DEEPSEEK[0], _DEEPSEEK[1] + "<｜tool▁call▁begin｜>", _DEEPSEEK[1] + _DEEPSEEK[2], middle="<｜tool▁sep｜>"
        ),
    ),
    "kimi_k2": (
        CallFormat(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
            "<|tool_call_end|><|tool_call_begin|>functions.", "<|tool_call_end|><|tool_calls_section_end|>",
            middle=":0<|tool_call_argument_begin|>",
        ),
    ),
    "granite": (
        CallFormat("<|tool_call|>[", ",", "]"),
        CallFormat("<tool_call>[", ",", "]"),
        CallFormat("<function_call>", "<function_call>", ""),
    ),
    "cohere": (
        CallFormat("<|START_ACTION|>[", ",", "]<|END_ACTION|>"),
        CallFormat("Action: ```json[", ",", "]```"),
    ),
    "pythonic": (CallFormat("<|python_start|>[", ",", "]<|python_end|>", python=True),
                 CallFormat("[", ",", "]", python=True)),
    "llama3_json": (CallFormat("<|python_tag|>", ";", ""), CallFormat("", ";", "")),
    "none": (),
}  # fmt: skip
"""Formats by name, for templates that don't show their format; `auto` tries all if none is
learnt."""


def _distinct(ids: Sequence[str | None]) -> tuple[str | None, ...]:
    """The ids, or None for each if two are equal."""
    known = [i for i in ids if i]
    if len(set(known)) == len(known):
        return tuple(i or None for i in ids)
    return (None,) * len(ids)


def json_at(text: str, at: int) -> tuple[object, int] | None:
    """Parses the JSON object at a position, after blanks; also returns its end."""
    begin = _BRACE.match(text, at)
    try:
        if begin is None:
            return None
        return _decoder.raw_decode(text, begin.end())
    except (ValueError, RecursionError):
        return None


def named(value: object) -> tuple[str, JsonView, str | None] | None:
    """Reads name, arguments and id of a call from a JSON object."""
    if not isinstance(value, dict):
        return None
    written = value.get("id")
    call = value.get("function")
    if not isinstance(call, dict):
        call = value
    name = next((call[key] for key in ("name", "tool_name", "function") if key in call), None)
    arguments = next(
        (call[key] for key in ("arguments", "parameters", "args") if key in call), None
    )
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name, arguments, written if isinstance(written, str) else None


def _python_item(text: str, at: int) -> _Item | None:
    """Parses `NAME(KEY=VALUE, …)` with literals of Python or JSON."""
    head = re.compile(r"\s*([\w.\-]+)\(").match(text, at)
    if head is None:
        return None
    closing = [match.end() for match in re.finditer(r"\)", text[head.end() :])][:_LONGEST_CALL]
    for end in (head.end() + length for length in closing):
        try:
            call = ast.parse("f(" + text[head.end() : end], mode="eval").body
            if (
                not isinstance(call, ast.Call)
                or call.args
                or any(k.arg is None for k in call.keywords)
            ):
                return None
            return _Item(head.group(1), {str(k.arg): _literal(k.value) for k in call.keywords}, end)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
    return None


_WORDS = {"true": True, "false": False, "null": None}


def _literal(node: ast.AST) -> object:
    """Evaluates a literal. Raises ValueError for any other expression."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List):
        return [_literal(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(_literal(k or node)): _literal(v)
            for k, v in zip(node.keys, node.values, strict=True)
        }
    value = ast.literal_eval(node)  # type: ignore[arg-type]
    if not isinstance(value, (str, bool, int, float, type(None))):
        raise ValueError(f"{value!r} is not a JSON value")
    return value


@lru_cache(maxsize=256)
def _pair(marks: Pairs, ends: str) -> re.Pattern[str]:
    """Pattern of an argument, with its exact value."""
    close = (r"\n?" if marks.value_close.startswith("\n") else "") + _loose(
        marks.value_close.strip(), inner=True
    )

    def assign(mark: str) -> str:
        return _loose(mark.rstrip(), inner=True) + (r"\n?" if mark.endswith("\n") else "")

    raw = f"(?P<raw>{assign(marks.assign)})"
    if marks.assign_json:
        either = f"(?:{raw}|{assign(marks.assign_json)})"
    else:
        either = raw
    return re.compile(
        _loose(marks.key_open)
        + r"(?P<key>[^<>\n]+?)\s*"
        + either
        + rf"(?P<value>.*?){close}(?={ends}|\s*$)",
        re.DOTALL,
    )


@lru_cache(maxsize=256)
def _loose(mark: str, inner: bool = False) -> str:
    """Pattern of a mark with any blanks (around it unless `inner`), numbers and id."""
    pieces = re.findall(rf"{ID}|\d+|[^\W\d]+|[^\w\s]", mark)
    spelt = [
        r"(?P<id>[\w.:\-]+)" if p == ID else r"\d+" if p.isdigit() else re.escape(p) for p in pieces
    ]
    whole = r"\s*".join(spelt)
    return whole if inner else r"\s*" + whole + (r"\s*" if pieces else "")
