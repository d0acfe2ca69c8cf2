"""A 200-turn tool-calling conversation: the time to render, match and tokenise it, and how often a
token is encoded.

In CPU time: the work is single-threaded, and the machine may be shared.
"""

from __future__ import annotations

import json
import time
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from ajet_sdk.engines.prompts import PromptBuilder
from tests.bench import Figure
from tests.sdk.conftest import Tok

TURNS, CHARACTERS = 200, 165_000
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\nTools:\\n' }}
{%- for t in tools %}{{- t | tojson + '\\n' }}{% endfor %}{{- '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- (c.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
WORDS = [
    "the",
    "search",
    "found",
    "a",
    "page",
    "about",
    "trains",
    "that",
    "leave",
    "at",
    "nine",
    "and",
    "another",
]


def counting() -> Tok:
    """A byte-level tokenizer that counts what it encodes."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special, alphabet = ["<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([" ".join(WORDS), json.dumps(TOOL)] * 9, trainer)
    inner.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    return Tok(inner, TEMPLATE)


def converse(tokenizer: Tok) -> tuple[float, int, float]:
    """CPU seconds, characters, and encoded tokens per token that was not sampled."""
    tokens = PromptBuilder(tokenizer)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You search."},
        {"role": "user", "content": "Go."},
    ]
    seconds, sampled, spent = 0.0, 0, 0
    text, size = "", CHARACTERS // TURNS - 190
    for turn in range(TURNS):
        query = {"query": f"page {turn}: {WORDS[turn % len(WORDS)]}"}
        call = {
            "id": f"c{turn}",
            "type": "function",
            "function": {"name": "search", "arguments": json.dumps(query)},
        }
        reply = {"role": "assistant", "content": "I search.", "tool_calls": [call]}
        spelled = f'I search.\n<tool_call>\n{{"name":"search","arguments":{json.dumps(query)}}}\n</tool_call><|im_end|>'
        output = tokenizer.encode(spelled)
        sampled += len(output)
        request = json.loads(
            json.dumps(messages)
        )  # as a server sees it: nothing is shared with the last request
        before, started = tokenizer.encoded, time.process_time()
        prompt = tokens.prompt(request, [TOOL])
        tokens.commit(prompt, output, reply)
        seconds += time.process_time() - started
        spent += tokenizer.encoded - before
        if prompt.cause is not None:
            raise RuntimeError(f"turn {turn} did not go on from the one before: {prompt.cause}")
        text = prompt.text
        found = " ".join(WORDS[(turn + i) % len(WORDS)] for i in range(size))[:size]
        messages += [reply, {"role": "tool", "tool_call_id": f"c{turn}", "content": found}]
    return seconds, len(text), spent / (len(prompt.ids) - (sampled - len(output)))


def main() -> list[Figure]:
    seconds, characters, share = min(converse(counting()) for _ in range(3))
    return [
        Figure(
            f"{TURNS} turns, {characters:,} characters: prompts in all",
            seconds,
            "CPU-s",
            "under 2",
            seconds < 2,
        ),
        Figure(
            "tokens encoded per token that was not sampled", share, "x", "1.0 to 1.1", share < 1.1
        ),
    ]
