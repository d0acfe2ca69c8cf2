"""A league: who beats whom, as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ajet_sdk.config.config import load_config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.episode import EpisodeSpec
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.league import League, Score, draw_league, play_league, saved_players, short_names
from ajet_sdk.trace.reader import open_trace
from ajet_tools.cli.app import app

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


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A config beside its agent and tasks, and an endpoint whose models say their own names."""
    (tmp_path / "duel.py").write_text(AGENT)
    rows = [{"question": text} for text in ("fair", "luck", "storm")]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "duel.yaml").write_text(
        "ajet:\n  experiment_name: duel\n  rollout: {user_workflow: duel.py->duel, max_retries: 0, timeout: 20}\n"
        "  task_reader: {type: jsonl_dataset_file, jsonl_dataset_file: {training: {file_path: tasks.jsonl}}}\n"
    )
    with Gateway() as other:
        opened = other.open(EpisodeSpec("other", ScriptedEngine(lambda ask: ask.body["model"])))
        monkeypatch.setenv("OPENAI_BASE_URL", opened.model().base_url)
        monkeypatch.setenv("OPENAI_API_KEY", opened.model().api_key)
        monkeypatch.chdir(tmp_path)
        yield tmp_path / "duel.yaml"


def test_rewards_below_1_are_told_to_win_no_game(job: Path, caplog: pytest.LogCaptureFixture) -> None:
    Path("duel.py").write_text(AGENT.replace("value=float(", "value=0.9 * float("))
    league = play_league(load_config(job), ["strong"], ["weak"])
    assert league.score("strong", "weak") == Score(games=3, wins=0)
    assert "3 of 3 games have a reward above 0 and below 1 and count as not won" in caplog.text


@pytest.mark.slow
def test_everybody_plays_everybody(job: Path) -> None:
    seen: list[tuple[str, str, Score]] = []
    league = play_league(load_config(job), ["weak", "strong"], k=2, on_match=lambda *match: seen.append(match))
    assert seen == [(*pair, score) for pair, score in league.scores.items()]
    assert league.players == league.opponents == ("weak", "strong")
    assert league.score("strong", "weak") == Score(games=6, wins=6)
    assert league.score("weak", "strong").rate == pytest.approx(1 / 3)
    assert league.score("weak", "weak") == Score(games=4, wins=0, failed=2), "a game that failed is nobody's"
    assert league.score("strong").games == 6, "against itself is not counted"
    with open_trace(league.directory) as trace:
        named = trace.query("SELECT name FROM runs ORDER BY started_at").to_pylist()
        seats = trace.query("SELECT DISTINCT target_tag, trainable FROM calls").to_pylist()
    assert [row["name"] for row in named][:2] == ["weak against weak", "weak against strong"] and len(named) == 4
    assert {(row["target_tag"], row["trainable"]) for row in seats} == {("mine", True), ("yours", False)}


@pytest.mark.slow
def test_the_command_prints_a_table_or_json_and_draws(job: Path) -> None:
    options = ["league", "--conf", str(job), "--players", "weak,strong", "--opponents", "middling", "--limit", "2"]
    table = CliRunner().invoke(app, [*options, "--picture", "league.svg"])
    assert table.exit_code == 0, table.output
    lines = table.output.splitlines()
    assert lines[:2] == [
        "match 1 of 2: weak against middling, 1 of 2 games won",
        "match 2 of 2: strong against middling, 2 of 2 games won",
    ]  # fmt: skip
    assert lines[2].split() == ["player", "middling", "all", "others", "95", "%", "games"]
    assert lines[3].split()[:3] == ["weak", "0.50", "0.50"]
    texts = "".join(ElementTree.parse(job.parent / "league.svg").getroot().itertext())
    assert "strong" in texts and "0.50" in texts and "against all others" in texts
    found = json.loads(CliRunner().invoke(app, [*options, "--json"]).output)
    assert [(row["player"], row["opponent"], row["wins"]) for row in found["matches"]] == [
        ("weak", "middling", 1),
        ("strong", "middling", 2),
    ]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["checkpoint@0", "checkpoint@40", "policy"], ["@0", "@40", "policy"]),
        (["runs/one/0123456789abcdef0123/model", "runs/two/4/model"], ["…123456789abcdef0123", "two/4"]),
        (["a/model", "b/model"], ["a", "b"]),
        (["model"], ["model"]),
    ],
)  # fmt: skip
def test_names_are_shown_by_what_differs(names: list[str], shown: list[str], tmp_path: Path) -> None:
    assert list(short_names(League({(one, names[0]): Score(1, 1) for one in names}, tmp_path)).values()) == shown


@pytest.mark.slow
def test_the_same_league_is_the_same_picture(tmp_path: Path) -> None:
    league = League({("a", "b"): Score(8, 2), ("b", "a"): Score(8, 6), ("a", "a"): Score(0, 0, 8)}, tmp_path)
    for name in ("a.svg", "b.svg", "c.png"):
        draw_league(replace(league, scores={**league.scores, ("b", "b"): Score(8, 4)}), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"\.svg, \.png or \.pdf"):
        draw_league(league, tmp_path / "league.gif")


def test_who_is_not_there_is_said(job: Path) -> None:
    config = load_config(job)
    assert saved_players(config) == ["checkpoint@0"]
    with pytest.raises(ConfigError, match="stands twice"):
        play_league(config, ["weak", "weak"])
    with pytest.raises(ConfigError, match="no checkpoint duel@40"):
        play_league(config, ["weak", "duel@40"])
    alone = CliRunner().invoke(app, ["league", "--conf", str(job)])
    assert alone.exit_code == 2 and "no checkpoint yet" in alone.output
    one = CliRunner().invoke(app, ["league", "--conf", str(job), "--players", "policy"])
    assert one.exit_code == 2 and "--players names only policy" in one.output and "checkpoint" not in one.output


@given(games=st.integers(0, 500), share=st.floats(0, 1))
def test_an_interval_holds_its_rate_and_lies_within_0_and_1(games: int, share: float) -> None:
    score = Score(games, round(games * share))
    low, high = score.interval
    assert 0 <= low <= high <= 1
    assert score.rate is None or low - 1e-9 <= score.rate <= high + 1e-9
