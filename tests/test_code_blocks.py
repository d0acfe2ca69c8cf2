"""The code blocks of the documentation: Python runs, configs load, and commands are ones that
`ajet` takes."""

from __future__ import annotations
import __future__

import random
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.exceptions import TyperException

import ajet
from ajet_sdk.config.config import load_config
from ajet_tools.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "tutorial").glob("**/*.md")]
)
NEEDS_A_RUN = (
    "job.tune()",
    "scored.jsonl",
    "ajet.run(config",
    'ajet.trace("served")',
    'ajet.trace(\n    "served",',
    'Path("launcher_record',
    "open_trace(",
    "tinker.ServiceClient()",
    "ajet.SwarmClient(",
    "checkpoint/RUN/adapter",
)
"""Blocks that train, serve, or read a file that the page shows: other tests run those programs."""


def blocks(page: Path, *languages: str) -> Iterator[tuple[int, str]]:
    """Line and text of each fenced block of these languages."""
    text = page.read_text()
    for found in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE):
        if found[2] in languages:
            yield text[: found.start()].count("\n") + 2, textwrap.dedent(found[3])


def cases(*languages: str) -> list[Any]:
    pages = [page for page in PAGES if any(blocks(page, *languages))]
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


@pytest.mark.parametrize("page", cases("python"))
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block by block, each with the names of those before it; a framework that is not installed is
    left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_MODEL", "judge")
    for name, key in (("train.jsonl", "question"), ("tasks.jsonl", "main_query")):
        (tmp_path / name).write_text(f'{{"{key}": "1+1", "answer": "2"}}\n')
    names: dict[str, Any] = {
        "__name__": "block",
        "ajet": ajet,
        "random": random,
        "get_weather": lambda city: "sunny",
    }
    for line, code in blocks(page, "python"):
        if any(text in code for text in NEEDS_A_RUN):
            continue
        future = __future__.annotations.compiler_flag
        try:
            exec(
                compile(code, f"{page.name}:{line}", "exec", flags=future, dont_inherit=True), names
            )
        except ModuleNotFoundError as missing:
            assert (missing.name or "").partition(".")[0] not in (
                "ajet",
                "ajet_sdk",
                "ajet_tools",
            ), line


def commands(block: str) -> Iterator[list[str]]:
    """The arguments of each `ajet` in a block of shell, its output and what is piped left out."""
    joined = re.sub(
        r'"[^"]*"', lambda quoted: quoted[0].replace("\n", " "), block.replace("\\\n", " ")
    )
    for line in joined.splitlines():
        text = re.sub(r"^(\$|head\$) ", "", line.strip())
        if not re.match(r"([A-Z_]+=\S+ )*ajet |.*[|&] ajet ", text):
            continue
        part: list[str] = []
        for word in [*shlex.split(text, comments=True), ";"]:
            if word in ("|", "||", "&", "&&", ";", "<", ">", "2>"):
                rest = [one for one in part if one not in ("…", "...")]
                while rest and re.match(r"[A-Z_]+=", rest[0]):
                    del rest[0]
                if rest[:1] == ["ajet"]:
                    yield rest[1:]
                part = []
            else:
                part.append(word)


def refusal(arguments: list[str]) -> str | None:
    """What the command line says against these arguments; None where it takes them. Files need not
    be there."""
    command: Any = typer.main.get_command(app)
    if arguments and arguments[0].startswith("-") and arguments[0] not in ("--help", "--version"):
        arguments = ["train", *arguments]
    while getattr(command, "commands", None) and arguments:
        if arguments[0] not in command.commands:
            return "no such command"
        command, arguments = command.commands[arguments[0]], arguments[1:]
    if getattr(command, "commands", None):
        return None
    try:
        command.make_context("ajet", list(arguments))
    except TyperException as error:
        return None if type(error).__name__ == "BadParameter" else error.format_message()
    return None


def test_a_wrong_option_is_seen() -> None:
    assert "No such option" in str(refusal(["trace", "ls", "--sortt", "reward"]))
    assert refusal(["trace", "lss"]) == "no such command"
    assert refusal(["--conf", "x.yaml", "ajet.rollout.num_repeat=2"]) is None
    assert list(commands("$ ajet run a.py:b \\\n  -k 2 | head  # c\nA=b ajet doctor > x")) == [
        ["run", "a.py:b", "-k", "2"],
        ["doctor"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("page", cases("sh", "bash", "console"))
def test_commands_are_ones_that_ajet_takes(page: Path) -> None:
    found = [
        (line, args)
        for line, block in blocks(page, "sh", "bash", "console")
        for args in commands(block)
    ]
    refused = {f"line {line}: ajet {shlex.join(args)}": refusal(args) for line, args in found}
    assert {command: why for command, why in refused.items() if why} == {}


@pytest.mark.parametrize("page", cases("yaml"))
def test_configs_load(page: Path, tmp_path: Path) -> None:
    for line, text in blocks(page, "yaml"):
        if text.lstrip().startswith("ajet:") and "{{" not in text:
            file = tmp_path / f"line-{line}.yaml"
            file.write_text(text)
            load_config(file)
