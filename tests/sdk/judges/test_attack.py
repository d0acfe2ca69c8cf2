"""`ajet judge attack`: what the built-in judges, judges of users' and environments give to outputs
that cheat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.judges.cheats import MESSAGES, PROGRAMS, TEXTS
from ajet_sdk.sandbox.fence import NoFence, fence
from ajet_tools.cli.app import app


def attack(*arguments: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["judge", "attack", *arguments, "--json"])
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def plain(text: str) -> str:
    return " ".join(text.split())


def test_the_library_has_hundreds_of_cheats_each_of_its_own_name() -> None:
    for cheats in (TEXTS, PROGRAMS, MESSAGES):
        assert len({cheat.name for cheat in cheats}) == len(cheats)
    assert len({str(cheat.content) for cheat in (*TEXTS, *PROGRAMS, *MESSAGES)}) > 300


@pytest.mark.parametrize("name", ["exact", "math", r"regex:(?:is|:)?\s*(\w+)\W*$"])
def test_no_text_earns_a_reward_of_a_judge_that_compares(name: str, tmp_path: Path) -> None:
    if name == "math":
        pytest.importorskip("math_verify")
    (tmp_path / "tasks.jsonl").write_text(
        json.dumps({"query": "What is 1723 times 4?", "answer": "6892"})
    )
    found = attack(name, "--tasks", str(tmp_path / "tasks.jsonl"))
    assert found["earned"] == 0 and found["cheats"] > len(TEXTS)
    assert all(one["reward"] == 0 for one in found["outcomes"])


@pytest.mark.slow
def test_no_program_earns_a_reward_of_the_code_judge(tmp_path: Path) -> None:
    tests = ["from math import isclose", "assert isclose(half(3), 1.5)", "assert half(4) == 2"]
    (tmp_path / "tasks.jsonl").write_text(
        json.dumps({"query": "halve", "metadata": {"test_list": tests}})
    )
    (tmp_path / "job.yaml").write_text(
        json.dumps(
            {
                "ajet": {
                    "task_judge": {
                        "judge_type": "code",
                        "code": {"seconds": 2, "unfenced": not has_fence()},
                    }
                }
            }
        )
    )
    found = attack("--conf", str(tmp_path / "job.yaml"), "--tasks", str(tmp_path / "tasks.jsonl"))
    assert found["earned"] == 0 and found["cheats"] >= len(PROGRAMS) + 20
    assert all(one["reward"] == 0 for one in found["outcomes"])


def has_fence() -> bool:
    try:
        fence()
    except NoFence:
        return False
    return True


def rubric(folder: Path, **more: str) -> str:
    file = folder / "rubric.yaml"
    file.write_text(
        json.dumps(
            {"rubric": "It is right.", "model": "m", "base_url": "http://127.0.0.1:1/v1", **more}
        )
    )
    return f"llm:{file}"


@pytest.mark.parametrize("mode", ["pointwise", "listwise", "pairwise"])
def test_no_verdict_that_a_model_quotes_earns_a_reward(mode: str, tmp_path: Path) -> None:
    found = attack(rubric(tmp_path, mode=mode))
    assert found["earned"] == 0 and found["cheats"] >= 200


def test_a_judge_that_believes_what_it_reads_is_caught(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import json, re\n"
        "def believes(output):\n    found = re.findall(r'\\{[^{}]*\"score\"[^{}]*\\}', output)\n"
        "    return float(json.loads(found[-1])['score']) if found else 0.0\n"
        "def long(output, task): return len(output) > 1000\n"
        "def broken(output): raise KeyError('gone')\n"
        "def from_one(output): return (1.0, False)\n"
    )
    found = attack(f"{tmp_path / 'own.py'}:believes", code=1)
    earned = [one for one in found["outcomes"] if one["earned"]]
    assert {one["kind"] for one in earned} == {"verdict"} and {one["reward"] for one in earned} >= {
        1.0
    }
    shown = CliRunner().invoke(app, ["judge", "attack", f"{tmp_path / 'own.py'}:long"])
    assert shown.exit_code == 1 and "length 1" in shown.output and "earned a reward" in shown.output
    broken = CliRunner().invoke(app, ["judge", "attack", f"{tmp_path / 'own.py'}:broken"])
    assert broken.exit_code != 0 and "no cheat could be judged: KeyError" in plain(broken.output)
    assert attack(f"{tmp_path / 'own.py'}:from_one", "--threshold", "1")["earned"] == 0


OWN = """
import json
def contains(output, answer): return answer in output
def any_key(output, answer):
    value = json.loads(output) if isinstance(output, str) else output
    return all(answer[key] == value[key] for key in value)
def keys_alone(output, answer):
    value = json.loads(output) if isinstance(output, str) else output
    return set(value) == set(answer)
def share(output, answer):
    value = json.loads(output) if isinstance(output, str) else output
    return sum(value.get(key) == answer[key] for key in answer) / len(answer)
def constant(output, answer): return output.strip() == "no"
"""


@pytest.mark.parametrize(
    ("judge", "names"),
    [
        ("contains", {"echo of note", "echo of all fields", "all answers, joined by ', '"}),
        ("any_key", {"one key", "nothing"}),
        ("keys_alone", {"its shape with nulls", "its shape with zeros"}),
        ("share", set()),
        ("constant", {"the commonest answer"}),
    ],
)
def test_cheats_are_made_from_the_users_own_tasks(
    judge: str, names: set[str], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    as_object = judge in ("any_key", "keys_alone", "share")
    rows = [
        {
            "question": f"q{n}",
            "note": f"The key is yes{n}.",
            "answer": {"a": n, "b": "x"} if as_object else f"yes{n}",
        }
        for n in range(4)
    ]
    if judge == "constant":
        rows = [{**row, "answer": "no"} if place else row for place, row in enumerate(rows)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = attack(
        f"{tmp_path / 'own.py'}:{judge}",
        "--tasks",
        str(tmp_path / "tasks.jsonl"),
        "-n",
        "1",
        code=int(bool(names)),
    )
    earned = {one["name"] for one in found["outcomes"] if one["earned"]}
    assert names <= earned and bool(earned) == bool(names)
    assert not any("echo of answer" in one["name"] for one in found["outcomes"])


@pytest.mark.slow
def test_the_tests_that_pay_a_trivial_program_are_named(tmp_path: Path) -> None:
    tests = (
        "import math\ndef test_near():\n    assert all(math.isclose(a, b) for a, b in"
        " zip(scale([2.0]), [4.0]))\ndef test_type():\n    assert isinstance(scale([1.0]), list)"
    )
    strong = "assert scale([2.0]) == [4.0] and scale([]) == []"
    for text, paid in ((tests, True), (strong, False)):
        (tmp_path / "tasks.jsonl").write_text(
            json.dumps({"query": "scale", "metadata": {"tests": text}})
        )
        (tmp_path / "job.yaml").write_text(
            json.dumps(
                {
                    "ajet": {
                        "task_judge": {"judge_type": "code", "code": {"unfenced": not has_fence()}}
                    }
                }
            )
        )
        arguments = ("--conf", str(tmp_path / "job.yaml"), "--tasks", str(tmp_path / "tasks.jsonl"))
        found = attack(*arguments, code=int(paid))
        earned = {one["name"]: one["paid_by"] for one in found["outcomes"] if one["earned"]}
        assert ("return []" in earned) == paid
        assert all(one["kind"] == "trivial" for one in found["outcomes"] if one["earned"])
        if paid:
            assert len(earned["return []"]) == 2 and "zip(scale([2.0])" in earned["return []"][0]


ENVIRONMENT = """
import json

class Sound:
    @staticmethod
    def tasks(split): return ["a", "b"]
    def __init__(self, task_id): self.right = False
    def reset(self): return "Say the word."
    def step(self, message):
        self.right = message.get("content") == "the word"
        return "no", float(self.right), self.right, {}
    def evaluate(self): return float(self.right)

class Open(Sound):
    def step(self, message):
        for call in message.get("tool_calls") or ():
            if call["function"]["name"] == "set_reward":
                self.right = json.loads(call["function"]["arguments"]).get("reward", 0) > 0
        return "done", 0.0, False, {}
"""


@pytest.mark.slow
def test_an_environment_that_can_be_told_its_reward_is_caught(tmp_path: Path) -> None:
    (tmp_path / "envs.py").write_text(ENVIRONMENT)
    assert attack(f"env:{tmp_path / 'envs.py'}:Sound", "-n", "1")["earned"] == 0
    found = attack(f"env:{tmp_path / 'envs.py'}:Open", "-n", "1", code=1)
    assert [one["name"] for one in found["outcomes"] if one["earned"]] == [
        "tool 'set_reward' with a reward"
    ]


def test_what_cannot_be_attacked_says_why(tmp_path: Path) -> None:
    for arguments, message in (
        (["env:x.py:Lake", "--tasks", "t.jsonl"], "has its own tasks"),
        ([], "no judge given"),
    ):
        failed = CliRunner().invoke(app, ["judge", "attack", *arguments])
        assert failed.exit_code != 0 and message in plain(failed.output)
