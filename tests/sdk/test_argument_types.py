"""Arguments in formats of pairs get the types that their tool declares, however it declares
them."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from ajet_sdk.tokens.argument_types import ArgumentTypes
from ajet_sdk.tokens.formats import PARSERS, ReplyFormat

STRING: dict[str, Any] = {"type": "string"}
CITY = {"$defs": {"City": {"enum": ["1", "2"], "type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}}

DECLARED: list[tuple[dict[str, Any], str, Any]] = [
    (STRING, "90210", "90210"),
    ({"type": "str"}, "90210", "90210"),
    ({"type": "STRING"}, "true", "true"),
    ({"type": ["string", "null"]}, "90210", "90210"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": "string", "nullable": True}, "null", None),
    (STRING, "null", "null"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "90210", "90210"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
    ({"oneOf": [{"type": "null"}, {"type": "string"}]}, "true", "true"),
    ({"allOf": [{"type": "string"}]}, "1e3", "1e3"),
    ({"allOf": [{"$ref": "#/$defs/City"}]}, "1", "1"),
    ({"$ref": "#/$defs/City"}, "2", "2"),
    ({"$ref": "#/$defs/City"}, "90210", "90210"),
    ({"$ref": "#/$defs/Loop"}, "90210", "90210"),
    ({"$ref": "https://example.com/x"}, "90210", "90210"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"enum": [1, "1"]}, "2", "2"),
    ({"enum": [1, 2], "type": "integer"}, "3", 3),
    ({"const": "7"}, "7", "7"),
    ({"const": 7}, "7", 7),
    ({"enum": [True, False]}, "true", True),
    ({"enum": ["a", None]}, "null", None),
    ({"pattern": "[0-9]{5}"}, "90210", "90210"),
    ({"description": "a zip code"}, "90210", "90210"),
    ({}, "null", "null"),
    ({}, '{"a": 1}', {"a": 1}),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "90210", "90210"),
    ({"anyOf": [{"type": "string"}, {"type": "array", "items": STRING}]}, '["a"]', ["a"]),
    ({"anyOf": [{"type": "string"}, {"type": "array", "items": STRING}]}, "[a", "[a"),
    ({"anyOf": [{"type": "string"}, {"type": "object"}]}, '["a"]', '["a"]'),
    ({"type": "integer"}, "7", 7),
    ({"type": "integer"}, "7.0", 7),
    ({"type": "integer"}, "seven", "seven"),
    ({"type": "integer"}, "true", "true"),
    ({"type": "number"}, "7", 7),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "yes", "yes"),
    ({"type": ["integer", "null"]}, "null", None),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
    ({"type": "array"}, "[1, 2]", [1, 2]),
    ({"type": "array"}, "(1, 2)", "(1, 2)"),
    ({"properties": {"a": STRING}}, '{"a": "1"}', {"a": "1"}),
    ({"items": STRING}, "['a']", ["a"]),
    ({"type": "decimal"}, "7", 7),
]


@pytest.mark.parametrize(("schema", "text", "expected"), DECLARED, ids=str)
def test_a_text_is_read_by_its_declared_types(
    schema: dict[str, Any], text: str, expected: Any
) -> None:
    value = ArgumentTypes({"type": "object", "properties": {"x": schema}, **CITY}).read("x", text)
    assert value == expected and type(value) is type(expected)


def test_parameters_are_found_wherever_they_are_declared() -> None:
    for parameters in (
        {"$ref": "#/$defs/Args", "$defs": {"Args": {"properties": {"x": STRING}}}},
        {"allOf": [{"properties": {"y": {"type": "integer"}}}, {"properties": {"x": STRING}}]},
        {"type": "object", "additionalProperties": STRING},
        {"anyOf": [{"properties": {"x": STRING}}, {"properties": {"x": {"type": "integer"}}}]},
    ):
        assert ArgumentTypes(parameters).read("x", "90210") == "90210"
    for parameters in (
        None,
        [],
        "text",
        {"properties": [1]},
        {"properties": {"x": True}},
        {"allOf": {"a": 1}},
    ):
        assert ArgumentTypes(parameters).read("x", "90210") == "90210"


class Colour(Enum):
    ONE = "1"
    TWO = "2"


class Args(BaseModel):
    zip_code: str | None = None
    colour: Colour | None = None
    level: Literal["1", "2"] = "1"
    many: list[str] | None = None
    number: int | None = None
    either: int | str = 1


TOOLS = [{"type": "function", "function": {"name": "find", "parameters": Args.model_json_schema()}}]
WRITTEN = {
    "zip_code": "90210",
    "colour": "1",
    "level": "2",
    "many": '["a"]',
    "number": "5",
    "either": "7",
}
READ = {"zip_code": "90210", "colour": "1", "level": "2", "many": ["a"], "number": 5, "either": "7"}


def pairs(parser: str) -> str:
    if parser == "glm45":
        body = "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in WRITTEN.items()
        )
        return f"<tool_call>find\n{body}</tool_call>"
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in WRITTEN.items())
    return f"<tool_call>\n<function=find>\n{body}</function>\n</tool_call>"


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm45"])
def test_fields_of_pydantic_keep_their_types(parser: str) -> None:
    parsed = ReplyFormat(PARSERS[parser]).parse(pairs(parser), tools=TOOLS)
    [(name, arguments)] = parsed.calls
    assert name == "find" and json.loads(arguments) == READ
    assert Args.model_validate_json(arguments).zip_code == "90210"


def calls_of(parser: str, number: int) -> list[str]:
    if parser == "hermes":
        call = '<tool_call>\n{"name": "find", "arguments": {"number": 5}}\n</tool_call>'
    elif parser == "glm45":
        call = "<tool_call>find\n<arg_key>number</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
    else:
        call = "<tool_call>\n<function=find>\n<parameter=number>\n5\n</parameter>\n</function>\n</tool_call>"
    return [call] * number


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "glm45"])
def test_text_around_calls_and_an_unclosed_last_call_are_read_as_by_engines(parser: str) -> None:
    form = ReplyFormat(PARSERS[parser])
    one, two = calls_of(parser, 2)
    unclosed = one.rpartition("</tool_call>")[0]
    replies = {
        one + "\nI wait for the result.": (1, None),
        "First.\n" + one + " then " + two + " done": (2, "First."),
        one + two: (2, None),
        "First. " + unclosed: (1, "First."),
        one + " and " + unclosed.rstrip(): (2, None),
    }
    for reply, (number, content) in replies.items():
        parsed = form.parse(reply, tools=TOOLS)
        assert [json.loads(arguments) for _, arguments in parsed.calls] == [
            {"number": 5}
        ] * number, reply
        assert parsed.content == content and not parsed.unread


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "glm45"])
def test_a_call_that_is_cut_or_malformed_stays_text(parser: str) -> None:
    form = ReplyFormat(PARSERS[parser])
    [one] = calls_of(parser, 1)
    middle = one.index("5")
    second = one[: one.index("find")]
    for reply in (one[:middle], one[: middle + 1], one + second, one + "\n" + one[:middle]):
        parsed = form.parse(reply, tools=TOOLS)
        assert parsed.calls == () and parsed.content == reply and parsed.unread
