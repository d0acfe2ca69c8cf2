"""Prompts: which texts of an agent's file they are, how they are rewritten, and a search over real
HTTP."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example as example_of
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ajet_sdk.config.config import load_config
from ajet_sdk.errors import ConfigError, TrainingError
from ajet_sdk.trace.reader import episodes, open_trace
from ajet_tools.cli.app import app
from ajet_tools.tuning import Prompts, prompts_of, tune
from tests.serving import serving

EXAMPLE = Path(__file__).parents[2] / "tutorial" / "example_prompt_tuning"

FILE = '''"""An agent — with two prompts."""

import ajet

SYSTEM: str = "Be short."
RULES = """
One.
Two.
"""  # kept
UNUSED, COUNT = "x", 3
OTHER = "never asked"


@ajet.workflow
async def solve(question: str, model: ajet.Model) -> str:
    return (await model.chat([{"role": "system", "content": SYSTEM + RULES}]))["content"]
'''


def agent(place: Path, text: str = FILE) -> Any:
    path = place / "an_agent.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("an_agent", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_prompts_are_the_texts_that_the_workflow_uses(tmp_path: Path) -> None:
    module = agent(tmp_path)
    assert dict(prompts_of(module.solve).texts) == {
        "SYSTEM": "Be short.",
        "RULES": "\nOne.\nTwo.\n",
    }
    assert dict(prompts_of(module.solve, ["OTHER"]).texts) == {"OTHER": "never asked"}
    with pytest.raises(
        ConfigError, match="assigns no text to COUNT at its top level; it has SYSTEM, RULES, OTHER"
    ):
        prompts_of(module.solve, ["COUNT"])


def test_a_text_is_tried_and_put_back(tmp_path: Path) -> None:
    module = agent(tmp_path)
    with pytest.raises(KeyError), prompts_of(module.solve).trying({"SYSTEM": "Be long."}):
        assert module.SYSTEM == "Be long."
        raise KeyError
    assert module.SYSTEM == "Be short."


@example_of("", "\\'")
@given(st.text(), st.text(alphabet=st.sampled_from("a\"'\\\n{}é"), max_size=12))
def test_whatever_is_written_reads_back_and_nothing_else_changes(
    tmp_path_factory: Any, one: str, two: str
) -> None:
    place = tmp_path_factory.mktemp("agent")
    path = place / "an_agent.py"
    path.write_text(FILE, encoding="utf-8")
    scope: dict[str, Any] = {}
    prompts = Prompts(path, {"SYSTEM": "Be short.", "RULES": "\nOne.\nTwo.\n"}, scope)
    texts = {"SYSTEM": one, "RULES": two}
    written = prompts.rewritten(texts)
    path.write_text(written, encoding="utf-8", newline="")
    found = dict(prompts_of(agent(place, written).solve).texts)
    assert found == texts
    assert written.startswith(FILE[: FILE.index('"Be short."')]) and "  # kept\nUNUSED" in written


@pytest.mark.parametrize(
    ("text", "other", "wrong"),
    [
        ("Be short.", 'Say {"a": 1} or {b}.', None),
        ("Answer {question} now.", "Now answer: {question}, {{and}} go.", None),
        ("Answer {question} now.", "Answer now.", "SYSTEM has lost {question}"),
        (
            "Answer {question} now.",
            "Answer {question} as {form}.",
            "SYSTEM has {form}, which nothing fills",
        ),
        (
            "Answer {question} now.",
            'Answer {question} as {"a": 1}.',
            "SYSTEM has braces that str.format can't read",
        ),
        ("{} and {}", "{}", "SYSTEM has lost {1}"),
        ("{0} and {who.name!r:>9}", "{who.name}", "SYSTEM has lost {0}"),
        ('As {"a": 1}: {question}', 'As {"b": {"c": 1}}: {question}', None),
        ('As {"a": 1}: {question}', 'As {"a": 1}.', "SYSTEM has lost {question}"),
    ],
)
def test_a_placeholder_survives_a_rewrite(text: str, other: str, wrong: str | None) -> None:
    assert Prompts(Path("agent.py"), {"SYSTEM": text}, {}).wrong({"SYSTEM": other}) == wrong


@pytest.mark.slow
def test_a_candidate_without_its_placeholder_is_not_run(
    example: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = (
        (example / "agent.py").read_text().replace('"Answer the question."', '"Answer {question}"')
    )
    (example / "agent.py").write_text(
        source.replace('"content": SYSTEM}', '"content": SYSTEM.format(question=1)}')
    )
    for name in ("train", "val"):
        tasks = (example / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (example / f"{name}.jsonl").write_text("".join(tasks[:4]))
    asked = list[str]()

    def reflect(text: str) -> str:
        asked.append(text)
        return "```\nAnswer in one word.\n```"

    with serving(server(example, monkeypatch)) as url:
        config = load_config(example / "prompt_tuning.yaml", [f"ajet.model.base_url={url}/v1"])
        tuned = tune(config, reflect, budget=8)
    assert not tuned.changed and tuned.candidates == 1
    assert "rejected a rewritten prompt: SYSTEM has lost {question}" in caplog.text
    assert asked and all("{question}" in text.split("Keep in the prompt")[1] for text in asked)
    with open_trace(config.directory) as reader:
        traced = [one for one in episodes(reader) if one.task.env_type == "reflection"]
    assert [one.task.main_query for one in traced] == asked
    assert {one.output for one in traced} == {"```\nAnswer in one word.\n```"}


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the tutorial, whose agent is imported anew."""
    for name in ("agent", "dates", "model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(EXAMPLE, tmp_path / "example"))


def server(example: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("gepa")
    monkeypatch.syspath_prepend(str(example))
    spec = importlib.util.spec_from_file_location("model", example / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.app


@pytest.mark.long
@pytest.mark.slow
def test_the_tutorial_finds_the_three_rules_and_writes_them_down(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(server(example, monkeypatch)) as url:
        command = ["tune-prompt", "--conf", str(example / "prompt_tuning.yaml"), "--reflect-with", "writer",
                   "--model", f"clerk@{url}/v1", "--budget", "200",
                   "--apply", "--json"]  # fmt: skip
        done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["before"], said["after"]) == (0.0, 1.0) and said["gain"]["low"] == 1.0
    for rule in ("ISO 8601", "day first", "this century"):
        assert rule in said["diff"] and rule in (example / "agent.py").read_text()
    with open_trace(Path(said["directory"])) as reader:
        found = episodes(reader)
    reflections = [one for one in found if one.task.env_type == "reflection"]
    assert len(found) == said["episodes"] + 2 * 60 + len(reflections) and len(reflections) >= 3
    assert [len(one.calls) for one in reflections] == [1] * len(reflections)
    assert {call.model for one in reflections for call in one.calls} == {"writer"}
    assert not any(call.trainable for one in reflections for call in one.calls)


@pytest.mark.slow
def test_a_search_that_finds_nothing_changes_nothing(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (example / "agent.py").read_text()
    with serving(server(example, monkeypatch)) as url:
        config = load_config(example / "prompt_tuning.yaml", [f"ajet.model.base_url={url}/v1"])
        tuned = tune(config, lambda text: "```\nSay nothing.\n```", budget=40)
    assert not tuned.changed and tuned.gain.mean == 0 and tuned.prompts.diff(tuned.best) == ""
    assert (example / "agent.py").read_text() == before


def test_an_episode_without_a_reward_is_no_zero(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = (
        (example / "agent.py")
        .read_text()
        .replace("    reply =", "    raise KeyError(question)\n    reply =")
    )
    (example / "agent.py").write_text(broken)
    pytest.importorskip("gepa")
    config = load_config(
        example / "prompt_tuning.yaml", ["ajet.model.base_url=http://127.0.0.1:9/v1"]
    )
    with pytest.raises(TrainingError, match=r"has no reward \(KeyError: .*rollout.failure_reward"):
        tune(config, str, budget=4)
