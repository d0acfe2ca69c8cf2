"""Grammars of forced calls: whatever they admit is read back as a call, in each of the formats."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.tokens.formats import ID, PARSERS, CallFormat, ReplyFormat
from ajet_sdk.tokens.grammars import Matcher, admits, reply_grammar

TOKENIZER = ByteTokenizer()
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "word": {"type": "string", "enum": ["a", "b c"]},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
    },
    "required": ["count", "word"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("add", "look_up")
]
_WITH_ID = CallFormat(
    "[", ", ", "]", item=f'{{"id": "{ID}", "name": "zqname", "arguments": {{"zqkey": "zqvalue"}}}}'
)
FORMS = {f"{name} {i}": form for name, forms in PARSERS.items() for i, form in enumerate(forms)}


def drawn(grammar: str, seed: int) -> list[int]:
    """A reply that the grammar admits, token after token at random."""
    matcher, rng, ids = Matcher(grammar, TOKENIZER), random.Random(seed), list[int]()
    while not ids or ids[-1] not in TOKENIZER.eos_ids:
        bits = np.unpackbits(matcher.allowed().view(np.uint8)[0], bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        calm = [i for i in allowed if i not in (10, 32)]  # few blanks
        ids.append(rng.choice(calm or allowed))
        assert matcher.take(ids[-1])
    return ids


@pytest.mark.parametrize("form", [*FORMS.values(), _WITH_ID], ids=[*FORMS, "learnt with an id"])
def test_what_a_grammar_of_forced_calls_admits_is_read_as_calls(form: CallFormat) -> None:
    reply = ReplyFormat((form,))
    for seed in range(4):
        choice = ["required", {"type": "function", "function": {"name": "look_up"}}][seed % 2]
        options = {"tool_choice": choice, "parallel_tool_calls": False}
        grammar = reply_grammar(options, TOOLS, reply, TOKENIZER)
        ids = drawn(grammar, seed)
        assert admits(grammar, TOKENIZER, ids) and not admits(grammar, TOKENIZER, [ord("?"), *ids])
        parsed = reply.parse(TOKENIZER.decode(ids[:-1]), tools=TOOLS)
        [(name, arguments)] = parsed.calls
        assert name == "look_up" or (choice == "required" and name == "add")
        value = json.loads(arguments)
        assert 0 <= value["count"] <= 99 and value["word"] in ("a", "b c"), arguments
        assert type(value.get("flag", True)) is bool and set(value.get("list", ())) <= {1, 2}


def test_reasoning_comes_before_a_typed_value_as_the_prompt_leaves_it() -> None:
    form = ReplyFormat((), (("<think>", "</think>"),))
    said = [*TOKENIZER.encode("yes"), *TOKENIZER.eos_ids]
    thought = [*TOKENIZER.encode("hm</think>\n\n"), *said]

    def admitted(ids: list[int], end: str) -> bool:
        return admits(
            reply_grammar({"guided_choice": ["yes"]}, (), form, TOKENIZER, end), TOKENIZER, ids
        )

    assert admitted(said, "") and admitted([*TOKENIZER.encode("<think>"), *thought], "")
    assert admitted(thought, "<think>\n") and not admitted(said, "<think>\n")
    assert admitted(said, "<think>\n\n</think>\n\n") and not admitted(
        thought, "<think>\n\n</think>\n\n"
    )
