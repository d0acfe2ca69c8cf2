"""Builds the grammar of a request's typed output, in llguidance's Lark dialect, and matches replies
against it.

The grammar covers a complete reply: a block of reasoning if the template has one, the value or the
tool calls in the template's format, and the end-of-turn token. It names tokens by id, so that all
engines with the same tokenizer use the same language.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import MissingExtra, RequestRefused
from ajet_sdk.protocols import Tokenizer
from ajet_sdk.tokens.formats import ID, CallFormat, Pairs, ReplyFormat
from ajet_sdk.tokens.probing import KEY, NAME, VALUE
from ajet_sdk.types import Json, JsonView

_JSON = {"whitespace_flexible": True, "whitespace_pattern": r"(\n {0,20}| )", "coerce_one_of": True}
"""White space in JSON is limited, since a reply of blanks would never end."""
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
TYPED = frozenset((*_GUIDED, "structured_outputs", "response_format", "tool_choice"))
"""Parameters that may require a grammar."""
_ID = "/[a-zA-Z0-9]{9}/"
"""Format of call ids that the model writes, as Mistral's templates require."""
_ARGUMENTS = json.dumps({KEY: VALUE})
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def reply_grammar(
    options: JsonView,
    tools: Sequence[JsonView],
    form: ReplyFormat,
    tokenizer: Tokenizer,
    prompt_end: str = "",
) -> str:
    """Builds the grammar of replies to a request whose prompt ends with `prompt_end`; empty if any
    text is allowed.

    Raises RequestRefused with the parameter.
    """
    forced = forces_calls(options.get("tool_choice"), tools)
    wanted = None if forced else _wanted(options)
    if not forced and wanted is None:
        return ""
    text = _Text(tokenizer)
    may_call = bool(tools) and options.get("tool_choice") != "none"
    calls = ""
    if forced or (may_call and form.calls):
        named = (
            isinstance(options.get("tool_choice"), Mapping)
            and options["tool_choice"].get("type") == "function"
        )
        once = named or options.get("parallel_tool_calls") is False
        calls = _calls(text, form, allowed_tools(options.get("tool_choice"), tools), once)
    body = calls
    if wanted is not None:
        value = f"({text.literal(form.preamble)})? " if form.preamble else ""
        value += _value(text, *wanted)
        value += f" ({text.literal(form.postamble)})?" if form.postamble else ""
        body = f"{value} | {calls}" if calls else value
    thought = _thought(text, form, prompt_end)
    ends = " | ".join(f"<[{i}]>" for i in sorted(tokenizer.eos_ids))
    return "\n".join(
        [
            "%llguidance {}",
            f"start: {thought}reply end",
            f"reply: {body}",
            f"end: {ends}",
            *text.rules,
            "",
        ]
    )


def forces_calls(choice: object, tools: Sequence[Mapping[str, object]]) -> bool:
    """Whether `tool_choice` forces a call. Raises RequestRefused if it is malformed or names an
    unknown tool."""
    if choice in (None, "auto", "none"):
        return False
    forced = choice == "required"
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        forced = True
    elif isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        if not isinstance(inner, Mapping) or inner.get("mode") not in ("auto", "required"):
            raise RequestRefused(
                "tool_choice.allowed_tools.mode must be 'auto' or 'required'", "tool_choice"
            )
        forced = bool(inner["mode"] == "required")
    elif not forced:
        raise RequestRefused(
            f"tool_choice={json.dumps(choice, default=str)[:200]} is invalid; use 'auto',"
            ' \'none\', \'required\', {"type": "function", "function": {"name": …}} or'
            ' {"type": "allowed_tools", …}',
            "tool_choice",
        )
    if not tools:
        raise RequestRefused(
            "tool_choice requires a call, but the request has no tools", "tool_choice"
        )
    allowed_tools(choice, tools)
    return bool(forced)


def allowed_tools(choice: object, tools: Sequence[JsonView]) -> list[JsonView]:
    """The tools that `tool_choice` allows. Raises RequestRefused for an unknown one."""
    if not isinstance(choice, Mapping):
        return list(tools)
    if choice.get("type") == "function":
        named = [choice]
    else:
        named = choice.get("allowed_tools", choice).get("tools") or []
    known = {tool["function"].get("name"): tool for tool in tools}
    allowed = []
    for entry in named:
        if isinstance(entry, Mapping):
            name = (entry.get("function") or entry).get("name")
        else:
            name = None
        if name not in known:
            raise RequestRefused(
                f"tool_choice names {name!r}, but tools has"
                f" {', '.join(map(repr, known)) or 'none'}",
                "tool_choice",
            )
        allowed.append(known[name])
    if not allowed:
        raise RequestRefused("tool_choice allows no tool; name one, or use 'none'", "tool_choice")
    return allowed


def _wanted(options: Mapping[str, object]) -> tuple[str, object, str] | None:
    """Kind of the required value, its description, and the parameter; None if any text is
    allowed."""
    constraints = [
        (kind, value, parameter)
        for parameter, kind in _GUIDED.items()
        if (value := options.get(parameter)) is not None
    ]
    outputs = options.get("structured_outputs")
    if outputs is not None:
        if not isinstance(outputs, Mapping) or any(
            v is not None and k not in _KINDS for k, v in outputs.items()
        ):
            raise RequestRefused(
                f"structured_outputs must be an object with one of {', '.join(_KINDS)}",
                "structured_outputs",
            )
        constraints += [
            (kind, outputs[kind], f"structured_outputs.{kind}")
            for kind in _KINDS
            if outputs.get(kind)
        ]
    wanted = _response_format(options.get("response_format"))
    constraints += [wanted] if wanted else []
    if len(constraints) > 1:
        names = " and ".join(parameter for _, _, parameter in constraints)
        raise RequestRefused(f"{names} cannot be combined; use one of them", constraints[1][2])
    return constraints[0] if constraints else None


def _response_format(wanted: Any) -> tuple[str, object, str] | None:
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return "json_object", True, "response_format"
    described = wanted.get("json_schema") if kind == "json_schema" else None
    if isinstance(described, Mapping) and isinstance(described.get("schema"), Mapping):
        return "json", described["schema"], "response_format"
    raise RequestRefused(
        'response_format must be {"type": "text"}, {"type": "json_object"} or {"type":'
        ' "json_schema", "json_schema": {"schema": …}} (got'
        f" {json.dumps(wanted, default=str)[:200]})",
        "response_format",
    )


def _value(text: _Text, kind: str, value: object, parameter: str) -> str:
    if kind == "json_object":
        return _json(text, {"type": "object"}, parameter)
    if kind == "json":
        return _json(text, value, parameter)
    if kind == "choice":
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(choice, str) and choice for choice in value)
        ):
            raise RequestRefused(f"{parameter} must be a list of nonempty strings", parameter)
        return "(" + " | ".join(_quoted(choice) for choice in value) + ")"
    if not isinstance(value, str) or not value:
        raise RequestRefused(f"{parameter} must be a nonempty string", parameter)
    if kind == "regex":
        return text.rule(
            "value",
            f"/{library().regex_to_lark(value).replace(chr(10), chr(92) + 'n')}/",
            parameter,
        )
    try:
        lark = library().grammar_from("grammar", value)
    except (ValueError, NotImplementedError) as error:
        raise RequestRefused(
            f"{parameter} is not a valid Lark or GBNF grammar: {error}", parameter
        ) from error
    lines = "\n".join(line for line in lark.splitlines() if not line.startswith("%llguidance"))
    return text.rule("value", f"%lark {{\n{lines}\n}}", parameter)


def _json(text: _Text, schema: object, parameter: str) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise RequestRefused(f"{parameter} is not valid JSON: {error}", parameter) from error
    if not isinstance(schema, Mapping):
        raise RequestRefused(f"{parameter} must be a JSON schema (an object)", parameter)
    return text.rule("json", f"%json {json.dumps({**schema, 'x-guidance': _JSON})}", parameter)


def _calls(text: _Text, form: ReplyFormat, tools: Iterable[JsonView], once: bool) -> str:
    """Rule for one call, or several unless `once`, in the template's format."""
    if not form.calls:
        raise RequestRefused(
            "tool_choice requires a call, but model.tool_call_parser is none", "tool_choice"
        )
    frame = form.calls[0]
    item = text.rule("call", " | ".join(_call(text, frame, tool["function"]) for tool in tools))
    more = "" if once else f" ({text.literal(frame.separator)} {item})*" if frame.separator else ""
    return " ".join(
        filter(None, (text.literal(frame.open), item + more, text.literal(frame.close)))
    )


def _call(text: _Text, frame: CallFormat, function: JsonView) -> str:
    name = str(function["name"])
    schema = function.get("parameters") or {}
    parameter = f"tools: the parameters of {name!r}"
    if not isinstance(schema, Mapping) or not isinstance(schema.get("properties") or {}, Mapping):
        raise RequestRefused(f"{parameter} must be a JSON schema (an object)", "tools")
    if frame.pairs is not None:
        return (
            f"{text.literal(name + frame.pairs.name_end)}"
            f" {_pairs(text, frame.pairs, schema, parameter)}"
        )
    if frame.python:
        return (
            f"{text.literal(name + '(')} {_keywords(text, schema, parameter)} {text.literal(')')}"
        )
    if frame.middle is not None:
        example = NAME + frame.middle + _ARGUMENTS
    else:
        example = frame.item
    shown = re.search(rf'\{{\s*"{KEY}"\s*:\s*"{VALUE}"\s*\}}', example)
    if shown is None:
        example = json.dumps({"name": NAME, "arguments": {}}).replace("{}", _ARGUMENTS)
        shown = re.search(re.escape(_ARGUMENTS), example)
        assert shown is not None
    schema = {"additionalProperties": bool(schema), "properties": {}, **schema, "type": "object"}
    before, behind = (
        text.literal(part.replace(NAME, name))
        for part in (example[: shown.start()], example[shown.end() :])
    )
    return " ".join(filter(None, (before, _json(text, schema, parameter), behind)))


def _properties(schema: JsonView) -> list[tuple[str, Json, bool]]:
    """Name, schema and whether it is required, of each property in order."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return [
        (
            key,
            {**shared, **(kind if isinstance(kind, Mapping) else {})},
            key in schema.get("required", ()),
        )
        for key, kind in (schema.get("properties") or {}).items()
    ]


def _pairs(text: _Text, marks: Pairs, schema: JsonView, parameter: str) -> str:
    """Parameters in the order of the schema: strings as text or one of `enum`, other values as
    JSON."""
    pairs = []
    for key, kind, required in _properties(schema):
        close = marks.value_close
        named = kind.get("enum", [kind["const"]] if "const" in kind else [])
        plain = kind.get("type") == "string" or (
            named and all(isinstance(item, str) for item in named)
        )
        if plain or not marks.assign_json:
            assign = marks.assign
        else:
            assign = marks.assign_json
        if plain and named:
            value = (
                f"({' | '.join(text.literal(str(item)) for item in named)}) {text.literal(close)}"
            )
        elif plain:
            value = text.until(close)
        else:
            value = f"{_json(text, kind, parameter)} {text.literal(close)}"
        pair = f"{text.literal(marks.key_open + key + assign)} {value}"
        pairs.append(pair if required else f"({pair})?")
    return " ".join(pairs)


def _keywords(text: _Text, schema: Mapping[str, object], parameter: str) -> str:
    """Parameters as keyword arguments, required ones first."""
    ordered = sorted(_properties(schema), key=lambda item: not item[2])
    keywords = [
        f"{text.literal(key + '=')} {_json(text, kind, parameter)}" for key, kind, _ in ordered
    ]
    more = [
        item if ordered[i][2] else f"({item})?"
        for i, item in enumerate([f'", " {item}' for item in keywords])
    ][1:]
    whole = " ".join([*keywords[:1], *more])
    return whole if not keywords or ordered[0][2] else f"({whole})?"


def _thought(text: _Text, form: ReplyFormat, prompt_end: str) -> str:
    """The block of reasoning before the reply: optional, or its rest if the prompt opens it."""
    begun = prompt_end.rstrip()
    marks = [(opening.strip(), closing.strip()) for opening, closing in form.reasoning]
    if not any(opening for opening, _ in marks) or any(
        begun.endswith(closing) for _, closing in marks
    ):
        return ""
    opened = next((opening for opening, _ in marks if opening and begun.endswith(opening)), "")
    rests = [
        f"{'' if opened else text.literal(opening)} {text.until(closing)} /\\n{{0,2}}/"
        for opening, closing in marks
        if opening and (opening == opened or not opened)
    ]
    return f"({' | '.join(rests)}){'' if opened else '?'} "


class _Text:
    """Rules of a grammar, and text in it, with special tokens by their ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.rules: list[str] = []

    def rule(self, kind: str, body: str, parameter: str = "") -> str:
        """Adds a rule derived from `parameter`; returns its name."""
        name = f"{kind}_{len(self.rules)}"
        if parameter:
            reason = problem(f"%llguidance {{}}\nstart: {body}\n")
            if reason:
                raise RequestRefused(
                    f"{parameter} cannot be compiled to a grammar: {reason}",
                    parameter.partition(":")[0],
                )
        self.rules.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Exactly this text, with any id in place of `ID`."""
        first, *following = text.split(ID)
        return f" {_ID} ".join([self._exactly(first), *map(self._exactly, following)]).strip()

    def _exactly(self, text: str) -> str:
        parts = []
        for token_id in self._special(text):
            before, _, text = text.partition(self._tokenizer.token_bytes(token_id).decode())
            parts += [_quoted(before)] if before else []
            parts.append(f"<[{token_id}]>")
        return " ".join(parts + ([_quoted(text)] if text else []))

    def until(self, mark: str) -> str:
        """Any text up to and including the first `mark`."""
        special = self._special(mark)
        if special:
            before = mark.partition(self._tokenizer.token_bytes(special[0]).decode())[0]
            return self.rule("text", "/(?s:.*)/") + " " + self.literal(mark[len(before) :])
        name = f"text_{len(self.rules)}"
        self.rules.append(f"{name}[suffix={_quoted(mark)}]: /(?s:.*)/")
        return name

    def _special(self, text: str) -> list[int]:
        if text:
            return [i for i in self._tokenizer.encode(text) if self._tokenizer.is_special(i)]
        return []


def _quoted(text: str) -> str:
    return json.dumps(text)


class Matcher:
    """The state of a reply under a grammar."""

    def __init__(self, grammar: str, tokenizer: Tokenizer) -> None:
        """Raises RequestRefused if the grammar can't be compiled."""
        self._matcher = _compiled(grammar, tokenizer).deep_copy()
        self._words = np.zeros((1, (len(tokenizer) + 31) // 32), dtype=np.int32)

    def allowed(self) -> npt.NDArray[np.int32]:
        """Mask of the allowed next tokens: a bit for each id, 32 per word, lowest first. Shape (1,
        words)."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        return self._words

    def take(self, token_id: int) -> bool:
        """Advance by a token; False if it is not allowed, after which none is."""
        return bool(self._matcher.consume_token(token_id))


def admits(grammar: str, tokenizer: Tokenizer, output_ids: Sequence[int]) -> bool:
    """Whether a grammar allows a reply, complete or truncated."""
    return bool(
        _compiled(grammar, tokenizer).deep_copy().consume_tokens([int(i) for i in output_ids])
    )


@lru_cache(maxsize=256)
def problem(grammar: str) -> str:
    """The library's error for a grammar without tokens; empty if it compiles."""
    failed, messages = library().LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0].partition("\n   1 |")[0].partition(": ")[2].strip() if failed else ""


@lru_cache(maxsize=256)
def _compiled(grammar: str, tokenizer: Tokenizer) -> Any:
    matcher = library().LLMatcher(_vocabulary(tokenizer), grammar, log_level=0)
    if matcher.is_error():
        raise RequestRefused(
            f"the structured output cannot be compiled: {matcher.get_error().partition(chr(10))[0]}"
        )
    return matcher


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer) -> Any:
    """Converts the tokenizer for the library."""
    return library().LLTokenizer(library().TokenizerWrapper(_Vocabulary(tokenizer)))


class _Vocabulary:
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.tokens = [tokenizer.token_bytes(i) for i in range(len(tokenizer))]
        self.special_token_ids = [i for i in range(len(tokenizer)) if tokenizer.is_special(i)]

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode())


def library() -> Any:
    """Imports `llguidance`. Raises MissingExtra."""
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtra("llguidance", "local") from error
    return llguidance
