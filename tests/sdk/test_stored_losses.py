"""What a stored conversation would lose or double by its tokenization is refused or said before the
first step."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.backbones.shared.stored import StoredSteps, open_stored
from ajet_sdk.config.config import load_config
from ajet_sdk.errors import TaskError, TrainingError
from ajet_sdk.protocols import Job
from ajet_sdk.run import train
from ajet_sdk.tokens.huggingface import HFTokenizer
from tests.sdk.test_local_backbone import job as local_job
from tests.sdk.test_local_backbone import length, talk
from tests.sdk.test_stored import job, learnt, rows, said, step

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Renders neither reasoning nor tools."""
OPENS_BLOCK = (
    PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}") + "{# </think> #}"
)
"""As DeepSeek-R1: the generation prompt opens a block of reasoning, which the history leaves
out."""
WITH_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n{{"
    " m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor"
    " %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""As Qwen3-Thinking: both have the block."""
WITHOUT_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
DROPS_TEXT = PLAIN.replace(
    "{{ m.content }}", "{% if m.role != 'assistant' %}{{ m.content }}{% endif %}"
)


@pytest.fixture(scope="module")
def inner(tiny_model: Path) -> Any:
    return HFTokenizer(str(tiny_model)).hf


def tokenizer_of(inner: Any, template: str) -> HFTokenizer:
    own = copy.deepcopy(inner)
    own.chat_template = template
    return HFTokenizer(own)


def stored_of(
    tmp_path: Path, *messages: Sequence[dict[str, Any]], **more: Any
) -> tuple[Job, StoredSteps]:
    values = [{"messages": list(each), **more} for each in messages]
    of = job(
        {"adv_estimator": "sft", "data": rows(tmp_path / "said.jsonl", *values)}, batch=len(values)
    )
    stored = open_stored(of)
    assert stored is not None
    return of, stored


def taught(tmp_path: Path, tokenizer: HFTokenizer, *messages: dict[str, Any]) -> str:
    of, stored = stored_of(tmp_path, messages)
    stored.check(tokenizer, 1)
    [(text, _)] = learnt(of, step(stored, tokenizer, tmp_path), tokenizer)
    return text


def reply(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


ASK = {"role": "user", "content": "Say yes."}


@pytest.mark.parametrize(
    "template", [OPENS_BLOCK, WITH_REASONING], ids=["history without", "history with"]
)
def test_an_opened_block_of_reasoning_is_closed_once(
    inner: Any, tmp_path: Path, template: str
) -> None:
    tokenizer = tokenizer_of(inner, template)
    with_reasoning = taught(tmp_path, tokenizer, ASK, reply("yes", reasoning_content="so"))
    assert with_reasoning == "so\n</think>\n\nyes<|im_end|>"
    assert taught(tmp_path, tokenizer, ASK, reply("yes")) == "\n</think>\n\nyes<|im_end|>"


def test_a_block_within_the_text_is_not_opened_again(inner: Any, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(inner, OPENS_BLOCK)
    for content in ("<think>\nso\n</think>\n\nyes", "so</think>yes"):
        assert taught(tmp_path, tokenizer, ASK, reply(content)) == "so\n</think>\n\nyes<|im_end|>"
    doubled = tokenizer_of(
        inner, WITH_REASONING.replace("<think>\n{{ m.reas", "<think>\n<think>\n{{ m.reas")
    )
    with pytest.raises(TaskError, match=r"said\.jsonl.*<think>"):
        taught(tmp_path, doubled, ASK, reply("yes", reasoning_content="so"))
    unclosed = tokenizer_of(inner, WITH_REASONING.replace("</think>", "", 1) + "{# </think> #}")
    with pytest.raises(TaskError, match="</think>"):
        taught(tmp_path, unclosed, ASK, reply("yes"))


def test_reasoning_that_is_not_rendered_is_said_with_the_row(inner: Any, tmp_path: Path) -> None:
    _, stored = stored_of(tmp_path, said("a", "b"), [ASK, reply("yes", reasoning_content="so")],
                           [ASK, reply("yes", reasoning="so"), ASK, reply("no", reasoning_content="no")])  # fmt: skip
    [message] = stored.check(tokenizer_of(inner, PLAIN), 1)
    assert message.startswith("3 replies") and "said.jsonl" in message
    assert not stored.check(tokenizer_of(inner, WITH_REASONING), 1)


@pytest.mark.parametrize(
    ("template", "message", "named"),
    [
        (WITHOUT_END, reply("yes"), "end sampling"),
        (PLAIN, reply("a <|im_end|> b"), r"<\|im_end\|>"),
        (WITH_REASONING, reply("yes", reasoning_content="a <|im_end|>"), r"<\|im_end\|>"),
        (DROPS_TEXT, reply("yes"), "text"),
    ],
    ids=["no end", "literal end", "literal end in reasoning", "no text"],
)
def test_what_would_be_learned_wrongly_is_refused_with_the_row(
    inner: Any, tmp_path: Path, template: str, message: dict[str, Any], named: str
) -> None:
    tokenizer = tokenizer_of(inner, template)
    _, stored = stored_of(
        tmp_path, [ASK, reply("fine")] if "text" not in named else [ASK, message], [ASK, message]
    )
    with pytest.raises(TaskError, match=named) as caught:
        stored.check(tokenizer, 1)
    assert "said.jsonl" in str(caught.value)
    with pytest.raises(TrainingError):
        step(stored, tokenizer, tmp_path)


def test_calls_are_learned_as_they_are_sampled_or_said(inner: Any, tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}}
    tools = [
        {
            "type": "function",
            "function": {"name": "find", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    of, stored = stored_of(tmp_path, [ASK, reply("", tool_calls=[call])], tools=tools)
    tokenizer = tokenizer_of(inner, PLAIN)
    [message] = stored.check(tokenizer, 1)
    assert "tools" in message and "said.jsonl" in message
    [(text, _)] = learnt(of, step(stored, tokenizer, tmp_path), tokenizer)
    assert '"find"' in text and text.startswith("<tool_call>") and text.endswith("<|im_end|>")
    opened = tokenizer_of(inner, OPENS_BLOCK)
    stored.check(opened, 1)
    [(text, _)] = learnt(of, step(stored, opened, tmp_path), opened)
    assert text.startswith("\n</think>") and '"find"' in text


def test_the_rejected_side_of_a_pair_is_checked_too(inner: Any, tmp_path: Path) -> None:
    row = {"prompt": [ASK], "chosen": [reply("yes")], "rejected": [reply("no<|im_end|>")]}
    stored = open_stored(
        job({"adv_estimator": "dpo", "data": rows(tmp_path / "pairs.jsonl", row)}, batch=1)
    )
    assert stored is not None
    with pytest.raises(TaskError, match=r"pairs\.jsonl"):
        stored.check(tokenizer_of(inner, PLAIN), 1)


@pytest.mark.slow
def test_a_run_ends_before_its_first_step(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "talks.jsonl"
    talks = [{"messages": [ASK, reply("yes")]} for _ in range(9)] + [
        {"messages": [ASK, reply("<|im_end|>")]}
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in talks))
    algorithm = {"adv_estimator": "sft", "data": str(data)}
    config = local_job(tmp_path, tiny_model, total_steps=6, algorithm=algorithm)
    with pytest.raises(TaskError, match=r"talks\.jsonl.*10"):
        train(config, workflow=talk, judge=length)
    assert not list((config.directory / "checkpoint").glob("*/step_*"))
    assert load_config(
        values={"trainer_common": {"algorithm": algorithm}}
    ).trainer_common.algorithm.stored
