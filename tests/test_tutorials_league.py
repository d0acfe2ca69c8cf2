"""The league of the werewolves tutorial: who beats whom, over models that say their own names."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from ajet_sdk.config.config import load_config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.episode import EpisodeSpec
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.trace.reader import open_trace

pytestmark = pytest.mark.usefixtures("audited")

AGENT = """
import ajet

ORDER = ["weak", "middling", "strong"]

@ajet.workflow(trainable_targets=["mine"])
async def duel(question: str, model: ajet.Model) -> ajet.Reward:
    said = [await model.agent(tag, tag).chat([{"role": "user", "content": question}]) for tag in ("mine", "yours")]
    mine, yours = (ORDER.index(one["content"]) for one in said)
    if question == "storm" and mine == yours:
        raise RuntimeError("the board blew away")
    return ajet.Reward(value=float(mine > yours or (question == "luck" and mine < yours)))
"""


@pytest.mark.slow
def test_everybody_plays_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tutorial/example_werewolves"))
    league = importlib.import_module("league")
    (tmp_path / "duel.py").write_text(AGENT)
    rows = [{"question": text} for text in ("fair", "luck", "storm")]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "duel.yaml").write_text(
        "ajet:\n  experiment_name: duel\n  rollout: {user_workflow: duel.py->duel, max_retries: 0,"
        " timeout: 20}\n  task_reader: {type: jsonl_dataset_file, jsonl_dataset_file: {training:"
        " {file_path: tasks.jsonl}}}\n"
    )
    monkeypatch.chdir(tmp_path)
    config = load_config("duel.yaml")
    with Gateway() as other:
        opened = other.open(EpisodeSpec("other", ScriptedEngine(lambda ask: ask.body["model"])))
        monkeypatch.setenv("OPENAI_BASE_URL", opened.model().base_url)
        monkeypatch.setenv("OPENAI_API_KEY", opened.model().api_key)
        games = league.play(config, ["weak", "strong"])
        monkeypatch.setattr(
            sys, "argv", ["league.py", "duel.yaml", "weak", "strong", "--limit", "2"]
        )
        league.main()
        with pytest.raises(ConfigError, match="no checkpoint duel@40"):
            league.play(config, ["weak", "duel@40"])
    assert games["strong", "weak"] == [True] * 3 and games["weak", "strong"] == [False, True, False]
    assert games["weak", "weak"] == [False, False], "a game that failed is nobody's"
    with open_trace(config.directory / "league") as trace:
        seats = trace.query("SELECT DISTINCT target_tag, trainable FROM calls").to_pylist()
    assert {(row["target_tag"], row["trainable"]) for row in seats} == {
        ("mine", True),
        ("yours", False),
    }
    assert capsys.readouterr().out.splitlines()[-1].split() == ["strong", "1.00", "0.00", "1.00"]
