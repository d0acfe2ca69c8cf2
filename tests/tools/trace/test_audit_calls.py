"""`ajet trace check --deep`: names and arguments of stored tool calls are those that the sampled
ids spell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Run, now
from ajet_tools.cli.app import app
from ajet_tools.trace.files.audit import Audit, audit

pytestmark = pytest.mark.slow

PLACES = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PLACES}}]
SPELT = {
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city":  "K\\u00f6ln", "days":'
        " 2}}\n</tool_call>"
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>"
    ),
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln", "days": 2}}]',
    "kimi_k2": (
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city":'
        ' "Köln", "days": 2}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "pythonic": "[weather(city='Köln', days=2)]",
}
ASKED = {"name": "weather", "arguments": '{"days": 2, "city": "Köln"}'}


def audited(
    path: Path, spelt: str, *functions: dict[str, str], content: str | None = None
) -> Audit:
    tokenizer = ByteTokenizer()
    calls = [
        {"id": str(i), "type": "function", "function": function}
        for i, function in enumerate(functions)
    ]
    reply: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": calls}
    call = Call(
        call_id="c",
        episode_id="e",
        request={"messages": [{"role": "user", "content": "Hot?"}], "tools": TOOLS},
        response={"choices": [{"index": 0, "message": reply}]},
        prompt_ids=tokenizer.encode("Hot?"),
        output_ids=tokenizer.encode(spelt + "<|im_end|>"),
        finish_reason="tool_calls",
    )
    config = {"ajet": {"model": {"scripted": "replies.py"}}}
    with TraceWriter(path / "trace.duckdb") as writer:
        writer.put(
            Run(run_id="r", config=config, status="finished"),
            call,
            Episode(episode_id="e", run_id="r"),
        )
    return audit(path / "trace.duckdb")


def texts(result: Audit) -> list[str]:
    return [entry.stored for entry in result.differs if entry.check == "texts"]


@pytest.mark.parametrize("spelling", SPELT)
def test_calls_as_they_were_sampled_pass_and_edited_ones_do_not(
    tmp_path: Path, spelling: str
) -> None:
    sound = audited(tmp_path / "sound", SPELT[spelling], ASKED)
    assert texts(sound) == [] and not any(entry.check == "texts" for entry in sound.unchecked)
    edits = ({"days": 3, "city": "Köln"}, {"days": 2, "town": "Köln"}, {"days": 2})
    for i, edit in enumerate(edits):
        result = audited(
            tmp_path / str(i), SPELT[spelling], {**ASKED, "arguments": json.dumps(edit)}
        )
        assert texts(result) == [json.dumps([["weather", edit]], ensure_ascii=False)]
    assert len(texts(audited(tmp_path / "twice", SPELT[spelling], ASKED, ASKED))) == 1


@pytest.mark.parametrize(
    ("spelt", "stored"), [(SPELT["hermes"], ["None"]), ("4", ["None"]), ("", []), (" \n", [])]
)
def test_a_reply_whose_content_and_calls_were_removed_does_not_pass(
    tmp_path: Path, spelt: str, stored: list[str]
) -> None:
    assert texts(audited(tmp_path, spelt)) == stored


def test_a_service_of_many_files_is_told_in_few_lines(tmp_path: Path) -> None:
    path, run = tmp_path / "trace.duckdb", CliRunner()
    times: dict[str, Any] = {"started_at": now(), "ended_at": now()}
    with TraceWriter(path) as writer:
        for i in range(5):
            call = Call(call_id=f"c{i}", episode_id=f"e{i}", **times)
            episode = Episode(episode_id=f"e{i}", run_id=f"r{i}", **times)
            writer.put(
                Run(run_id=f"r{i}", backbone="trace", status="finished", **times), episode, call
            )
    told = run.invoke(app, ["trace", "check", "--deep", str(path)]).output
    assert told.count("not checked") == told.count("run r0, r1, r2 and 2 more") == 3, told
    assert "\n\n\n" not in run.invoke(app, ["trace", "ls", str(path)]).output


def test_a_spelling_that_cannot_be_read_is_not_checked(tmp_path: Path) -> None:
    result = audited(tmp_path, "CALL weather OF Köln FOR 2", ASKED)
    assert texts(result) == []
    [unchecked] = [entry.reason for entry in result.unchecked if entry.check == "texts"]
    assert unchecked == "tool calls of 1 message cannot be read from the sampled tokens"
