"""Real programs as agents, against the scripted engine over HTTP; a program that is not there is
skipped.

They are looked for in the folders of AJET_PROGRAMS, written as PATH is, else on PATH: `aider`,
`mini`, `claude`, `codex`, `node` with the npm package `openai`, `go`. For example:

    npm install openai @anthropic-ai/claude-code @openai/codex
    pip install aider-chat; pip install mini-swe-agent mcp      # in an environment each
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ajet
from ajet_sdk.config.config import load_config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Ask
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_episode

pytestmark = pytest.mark.slow

PATH = os.environ.get("AJET_PROGRAMS", "") + os.pathsep + os.environ.get("PATH", "")


def program(name: str) -> str:
    found = shutil.which(name, path=PATH)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def npm_package(name: str) -> Path:
    for folder in PATH.split(os.pathsep):
        package = Path(folder).parent / name
        if folder.endswith("node_modules/.bin") and package.is_dir():
            return package
    pytest.skip(f"the npm package {name} is not installed")


def episode(
    command: list[str],
    replies: Callable[[Ask], Any],
    folder: Path,
    *,
    handle: bool = True,
    **env: str,
) -> ajet.Episode:
    """One episode whose agent is the command, with a home and a working directory of its own."""
    variables = {"HOME": str(folder), "PATH": PATH, "LITELLM_LOCAL_MODEL_COST_MAP": "True", **env}

    async def run(model: ajet.Model | None) -> str:
        done = await ajet.run_program(
            command, cwd=folder, env={**ajet.child_env(model), **variables}, timeout=600
        )
        return done.stdout

    @ajet.workflow
    async def with_handle(model: ajet.Model, question: str) -> str:
        return await run(model)

    @ajet.workflow
    async def without(question: str) -> str:
        return await run(None)

    @ajet.judge
    def judge() -> float:
        return 1.0

    async def main() -> ajet.Episode:
        with Gateway() as gateway:
            return await run_episode(
                with_handle if handle else without,
                judge,
                Attempt(ajet.Task(task_id="one", main_query="go")),
                engine=ScriptedEngine(replies),
                gateway=gateway,
                config=load_config(values={"ajet": {}}),
            )

    finished = asyncio.run(main())
    assert finished.status == "succeeded", finished.error
    assert all(
        call.trainable and call.output_ids is not None and call.error is None
        for call in finished.calls
    )
    return finished


def turns(ask: Ask) -> int:
    return sum(message["role"] == "assistant" for message in ask.messages or ())


def call(ask: Ask, **arguments: Any) -> dict[str, Any]:
    """A call of the first tool that takes these arguments."""
    for tool in ask.tools or ():
        function = tool["function"]
        if set(arguments) <= set(function.get("parameters", {}).get("properties", {})):
            spelt = {"name": function["name"], "arguments": json.dumps(arguments)}
            return {
                "content": "",
                "tool_calls": [{"id": f"call_{turns(ask)}", "type": "function", "function": spelt}],
            }
    raise AssertionError(f"no tool takes {list(arguments)}: {ask.tools}")


def codex() -> list[str]:
    """The program, told where the policy is: it reads its provider's base URL from its settings
    only."""
    settings = {
        "model_provider": "ajet",
        "model_providers.ajet.name": "ajet",
        "model_providers.ajet.env_key": "OPENAI_API_KEY",
        "model_providers.ajet.wire_api": "responses",
        "web_search": "disabled",
    }
    words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    script = 'exec "$0" exec -c model_providers.ajet.base_url="$OPENAI_BASE_URL" "$@"'
    free = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "policy"]
    return ["sh", "-c", script, program("codex"), *words, *free]


def test_codex_works_in_turns_that_merge(tmp_path: Path) -> None:
    """Over Responses, with its own tools, those of its namespaces among them."""
    steps = ["echo hi > out.txt", "cat out.txt"]

    def reply(ask: Ask) -> Any:
        return call(ask, cmd=steps[turns(ask)]) if turns(ask) < len(steps) else "done"

    finished = episode([*codex(), "write hi"], reply, tmp_path)
    assert (tmp_path / "out.txt").read_text() == "hi\n" and str(finished.output).strip() == "done"
    merged = ajet.merge(finished.calls)
    assert len(finished.calls) == 3 and len(merged.timelines) == 1 and merged.splits == ()


def test_the_compaction_of_codex_is_an_explained_split(tmp_path: Path) -> None:
    """Past its limit it has its history summarised, without tools, and goes on from the summary."""

    def reply(ask: Ask) -> Any:
        if not ask.tools:
            return "SUMMARY: one line is written"
        said = json.dumps(ask.messages)
        return "done" if "SUMMARY" in said else call(ask, cmd="echo hi >> out.txt")

    finished = episode(
        [*codex(), "-c", "model_auto_compact_token_limit=31000", "write hi"], reply, tmp_path
    )
    assert (tmp_path / "out.txt").read_text() == "hi\n" and str(finished.output).strip() == "done"
    merged = ajet.merge(finished.calls)
    assert len(finished.calls) == len(merged.timelines) == 3
    assert [split.cause for split in merged.splits] == ["tools_changed", "history_edited"]


def test_claude_code_works_in_turns(tmp_path: Path) -> None:
    """Over Messages."""
    steps = ["echo hi > out.txt", "cat out.txt"]

    def reply(ask: Ask) -> Any:
        return (
            call(ask, command=steps[turns(ask)])
            if ask.tools and turns(ask) < len(steps)
            else "done"
        )

    command = [
        program("claude"),
        "-p",
        "--model",
        "policy",
        "--allowedTools",
        "Bash",
        "--",
        "write hi",
    ]
    quiet = {"DISABLE_AUTOUPDATER": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    finished = episode(command, reply, tmp_path, **quiet)
    assert (tmp_path / "out.txt").read_text() == "hi\n" and str(finished.output).strip() == "done"
    merged = ajet.merge(finished.calls)
    assert len(finished.calls) == 3 and len(merged.timelines) == 1 and merged.splits == ()


@pytest.mark.parametrize("handle", [True, False])
def test_node_with_the_openai_package(tmp_path: Path, handle: bool) -> None:
    (tmp_path / "agent.mjs").write_text(
        f"import OpenAI from '{npm_package('openai')}/index.mjs'\nconst stream = await new"
        " OpenAI().chat.completions.create(\n  {model: 'any', messages: [{role: 'user', content:"
        " 'ping'}], stream: true})\nfor await (const part of stream)"
        " process.stdout.write(part.choices[0]?.delta?.content ?? '')\n"
    )
    finished = episode([program("node"), "agent.mjs"], lambda ask: "pong", tmp_path, handle=handle)
    assert finished.output == "pong" and len(finished.calls) == 1


def test_a_go_program(tmp_path: Path) -> None:
    go = program("go")
    (tmp_path / "agent.go").write_text(
        'package main\nimport ("fmt"; "io"; "net/http"; "os"; "strings")\nfunc main() {\n  body :='
        ' strings.NewReader(`{"model": "any", "messages": [{"role": "user", "content":'
        ' "ping"}]}`)\n  request, _ := http.NewRequest("POST", os.Getenv("OPENAI_BASE_URL") +'
        ' "/chat/completions", body)\n  request.Header.Set("Authorization", "Bearer " +'
        ' os.Getenv("OPENAI_API_KEY"))\n  request.Header.Set("Content-Type", "application/json")\n '
        " answer, err := http.DefaultClient.Do(request)\n  if err != nil { panic(err) }\n  text, _"
        " := io.ReadAll(answer.Body)\n  fmt.Print(string(text))\n}\n"
    )
    finished = episode(
        [go, "run", "agent.go"], lambda ask: "pong", tmp_path, GOCACHE=str(tmp_path / "cache")
    )
    assert json.loads(str(finished.output))["choices"][0]["message"]["content"] == "pong"


def test_aider_edits_a_file(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("")
    quiet = [
        "--yes-always",
        "--no-git",
        "--no-check-update",
        "--no-show-model-warnings",
        "--analytics-disable",
    ]
    command = [
        program("aider"),
        "--model",
        "openai/policy",
        *quiet,
        "--message",
        "print hello",
        "hello.py",
    ]
    finished = episode(
        command, lambda ask: "Done.\n\nhello.py\n```\nprint('hello')\n```\n", tmp_path
    )
    assert (tmp_path / "hello.py").read_text() == "print('hello')\n"
    assert len(finished.calls) == 1


def test_mini_swe_agent_works_in_turns_that_merge(tmp_path: Path) -> None:
    steps = ["echo hi > out.txt", "cat out.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    command = [
        program("mini"),
        "--model",
        "openai/policy",
        "--yolo",
        "--exit-immediately",
        "--task",
        "write hi",
    ]
    settings = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    finished = episode(
        command, lambda ask: call(ask, command=steps[turns(ask)]), tmp_path, **settings
    )
    assert (tmp_path / "out.txt").read_text() == "hi\n"
    merged = ajet.merge(finished.calls)
    assert len(finished.calls) == 3 and len(merged.timelines) == 1 and merged.splits == ()
