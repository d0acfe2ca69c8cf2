"""`expand` keeps no wrong answer, in whatever field the seeds have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ajet_tools.cli.app import app

REPLIES = """
import json, pathlib, random, re

ROW = {row}

def fill(value, question, answer):
    if isinstance(value, str):
        return value.replace("QUESTION", question).replace("ANSWER", answer)
    if isinstance(value, list):
        return [fill(item, question, answer) for item in value]
    return {{name: fill(inner, question, answer) for name, inner in value.items()}}

def reply(ask):
    with pathlib.Path("asked.txt").open("a") as file:
        file.write("1")
    text = ask.body["messages"][-1]["content"]
    asked = re.search(r"What is (\\d+) plus (\\d+)\\?\\s*$", text)
    if asked and "array of" not in text:
        return f"ANSWER: {{int(asked[1]) + int(asked[2]) + {checker_off}}}"
    chance = random.Random(text + str(ask.body.get("seed")))
    rows = []
    for _ in range(int(re.search(r"array of (\\d+)", text)[1])):
        a, b = chance.randint(100, 999), chance.randint(100, 999)
        rows.append(fill(ROW, f"What is {{a}} plus {{b}}?", str(a + b + {writer_off})))
    return json.dumps(rows)
"""
SHAPES: dict[str, dict[str, Any]] = {
    "solution": {"main_query": "QUESTION", "metadata": {"solution": "ANSWER"}},
    "alpaca": {"instruction": "QUESTION", "output": "ANSWER"},
    "label": {"question": "QUESTION", "label": "ANSWER"},
    "gold": {"problem": "QUESTION", "gold": "ANSWER"},
    "chosen": {"prompt": "QUESTION", "chosen": "ANSWER", "rejected": "no"},
    "messages": {
        "messages": [
            {"role": "user", "content": "QUESTION"},
            {"role": "assistant", "content": "It is ANSWER."},
        ]
    },
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "QUESTION"},
            {"from": "gpt", "value": "ANSWER"},
        ]
    },
}


def filled(row: Any, question: str, answer: str) -> Any:
    text = json.dumps(row).replace("QUESTION", question).replace("ANSWER", answer)
    return json.loads(text)


@pytest.fixture
def expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)

    def run(row: dict[str, Any], writer_off: int, checker_off: int) -> Result:
        seeds = [filled(row, f"What is {i} plus {i + 11}?", str(2 * i + 11)) for i in (12, 340, 56)]
        Path("seeds.jsonl").write_text("".join(json.dumps(seed) + "\n" for seed in seeds))
        text = REPLIES.format(row=repr(row), writer_off=writer_off, checker_off=checker_off)
        Path("replies.py").write_text(text)
        options = [
            "--count",
            "4",
            "--model",
            "replies.py:reply",
            "--verify",
            "agreement:3",
            "--validation",
            "0",
        ]
        return CliRunner().invoke(
            app, ["dataset", "expand", "seeds.jsonl", *options, "-y", "-o", "out"]
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("writer_off", "checker_off"), [(1, 0), (1, 1)])
def test_a_wrong_answer_is_not_kept(
    shape: str, writer_off: int, checker_off: int, expand: Callable[..., Result]
) -> None:
    result = expand(SHAPES[shape], writer_off, checker_off)
    assert result.exit_code != 0
    assert not Path("out/train.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_right_answer_is_kept(shape: str, expand: Callable[..., Result]) -> None:
    result = expand(SHAPES[shape], 0, 0)
    assert result.exit_code == 0, result.output
    assert len(Path("out/train.jsonl").read_text().splitlines()) == 4


def test_without_a_known_answer_nothing_is_paid_for(expand: Callable[..., Result]) -> None:
    result = expand({"question": "QUESTION", "remark": "ANSWER"}, 0, 0)
    assert result.exit_code == 2
    assert "remark" in result.output and "--map" in result.output
    assert not Path("asked.txt").exists()
