"""Option names: each means one thing in every command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict

import pytest

from tests.reference import commands, options

COMMANDS = commands()
SHOWN = [(name, option) for name, command in COMMANDS.items() for option in options(command)]

WITHOUT_JSON = {"ajet trace view", "ajet dataset label"}
"""Two screens, and YAML."""


def test_a_letter_stands_for_one_option() -> None:
    meant = defaultdict(set)
    for _, option in SHOWN:
        for letter in (name for name in option.opts if not name.startswith("--")):
            meant[letter].add(max(option.opts, key=len))
    assert meant["-n"] == {"--limit"} and meant["-f"] == {"--filter"}
    assert {letter: names for letter, names in meant.items() if len(names) > 1} == {}


def test_an_option_is_a_flag_everywhere_or_nowhere() -> None:
    kinds = defaultdict(set)
    for _, option in SHOWN:
        kinds[max(option.opts, key=len)].add((option.is_flag, option.nargs))
    assert {name: kind for name, kind in kinds.items() if len(kind) > 1} == {}


def test_what_lists_has_json() -> None:
    lists = {
        name
        for name in COMMANDS
        if name.count(" ") == 2 and name.split()[1] in ("trace", "dataset", "config")
    }
    with_json = {name for name, option in SHOWN if "--json" in option.opts}
    assert lists - with_json == WITHOUT_JSON and {"ajet run", "ajet doctor"} <= with_json


def test_examples_have_a_heading_and_paragraphs_are_filled() -> None:
    for name, command in COMMANDS.items():
        before, *after = command.help.split("\n\n")
        for paragraph in after:
            assert before.endswith(":") or "\n" not in paragraph, (name, paragraph)
            before = paragraph
        assert "\b" not in command.help


def test_each_command_has_examples_that_fit_a_terminal_and_can_be_copied() -> None:
    for name, command in COMMANDS.items():
        _, heading, rest = command.help.partition(":\n\n")
        examples = rest.partition("\n\n")[0]
        assert heading and "ajet " in examples, name
        assert max(map(len, examples.splitlines())) <= 78, name
        subprocess.run(["bash", "-n", "-c", examples], check=True)
    split = COMMANDS["ajet dataset split"].help
    assert "--fractions train=0.8,validation=0.1,test=0.1 \\\n  -o data/" in split


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("trace l", {"ls", "ledger"}),
        ("trace ls --fi", {"--filter"}),
        ("da", {"dataset"}),
        ("dataset dedup --thr", set()),
    ],
)
def test_a_shell_completes_commands_and_options(typed: str, expected: set[str]) -> None:
    words = f"ajet {typed}"
    asked = {
        "_AJET_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = subprocess.run(
        [sys.executable, "-m", "ajet"], env={**os.environ, **asked}, capture_output=True, text=True
    )
    assert set(done.stdout.split()) == expected, done.stderr
