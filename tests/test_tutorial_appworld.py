"""The AppWorld tutorial: its agent on the stand-in, and what is said without AppWorld's data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.config.config import load_config
from ajet_sdk.environments.client import GymEnv
from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import Ask
from ajet_sdk.run import train
from ajet_sdk.types import Episode
from ajet_tools.cli.app import app
from tests.sdk.environments.test_service import hosted, say

pytestmark = pytest.mark.usefixtures("audited")

FOLDER = Path(__file__).parents[1] / "tutorial" / "example_appworld"

CODE = """token = apis.shop.login(apis.supervisor.show_password())
thing = {thing!r}"""
ENDS = {
    "Buy": "apis.shop.buy(thing, token)\napis.supervisor.complete_task()",
    "What": "apis.supervisor.complete_task(answer=apis.shop.show_price(thing, token))",
}


def coder(ask: Ask) -> str:
    """What a model would write: a look at the apps, a mistake, then the task."""
    messages = ask.body["messages"]
    wanted = messages[1]["content"]
    thing = next(
        word.strip(".?") for word in wanted.split() if word.strip(".?") in ("tea", "cake", "lamp")
    )
    turns = [
        "```python\nprint(apis.api_docs.show_api_descriptions(app_name='shop'))\n```",
        "```python\napis.shop.buy('tea', 'no token')\n```",
        f"```python\n{CODE.format(thing=thing)}\n```",
        f"```python\n{ENDS[wanted.split()[0]]}\n```",
    ]
    return turns[len(messages) // 2 - 1]


def lazy(ask: Ask) -> str:
    """It says that the task is done."""
    return "```python\napis.supervisor.complete_task()\n```"


@pytest.mark.slow
def test_the_agent_does_the_stand_ins_tasks(tmp_path: Path) -> None:
    (tmp_path / "replies.py").write_text(
        "from ajet_sdk.engines.scripted import ScriptedEngine\n"
        "from test_tutorial_appworld import coder, lazy\n"
        "replies = ScriptedEngine(coder)\n"
    )
    sys.modules.setdefault("test_tutorial_appworld", sys.modules[__name__])
    with hosted(f"{FOLDER / 'shop_env.py'}:Shop", name="appworld") as (url, instances):
        overrides: list[Any] = [
            "ajet.backbone=debug",
            "ajet.debug.debug_first_n_tasks=4",
            "ajet.rollout.timeout=60",
            f"ajet.task_reader.env_service.env_url={url}",
            f"ajet.model.scripted={tmp_path / 'replies.py'}->replies",
            f"ajet.experiment_dir={tmp_path / 'experiment'}",
        ]
        tuned = train(load_config(FOLDER / "appworld.yaml", overrides))
        assert tuned.metrics == {"debug/reward": 1.5}
        assert [len(episode.calls) for episode in tuned.episodes] == [4, 4, 4, 4]
        assert not instances.listed()
        assert branched(tmp_path, tuned.episodes[0], "replies") == [1.5, 1.5]
        rewards = branched(tmp_path, tuned.episodes[0], "lazy")
        assert all(reward is not None and reward < 1 for reward in rewards)
        assert not instances.listed()


def branched(directory: Path, episode: Episode, model: str) -> list[float | None]:
    """The rewards of two forks from the third call on: each has an instance of its own, which the
    first two calls led to where the original was."""
    forks = ["--at", "2", "-k", "2", "--model", f"{directory / 'replies.py'}:{model}", "--json"]
    trace, to = str(directory / "experiment"), ["--exp-dir", str(directory / model)]
    result = CliRunner().invoke(app, ["trace", "branch", episode.episode_id, trace, *forks, *to])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["counted"] == 2 and all(fork["not_replayed"] is None for fork in told["forks"])
    return [fork["reward"] for fork in told["forks"]]


def test_the_stand_in_scores_what_was_changed() -> None:
    with hosted(f"{FOLDER / 'shop_env.py'}:Shop", name="appworld") as (url, _):
        env = GymEnv(url, "appworld", "order_tea")
        env.create()
        assert "block" in say(env, "I will buy tea.")[0]
        assert "PermissionError" in say(env, "```python\napis.shop.buy('tea', 'x')\n```")[0]
        assert say(env, "```python\napis.supervisor.complete_task()\n```")[2]
        assert (env.evaluate(), env.evaluate(params={"sparse": True})) == (
            pytest.approx(2 / 3),
            0.0,
        )
        env.release()


def test_without_appworld_two_commands_are_named() -> None:
    try:
        from appworld import load_task_ids

        load_task_ids("train")
    except Exception:  # noqa: BLE001  AppWorld raises a plain Exception where its data are absent
        with pytest.raises(ConfigError) as raised, hosted(f"{FOLDER / 'appworld_env.py'}:World"):
            pass
        assert "pip install appworld && appworld install" in str(raised.value)
        assert "appworld download data" in str(raised.value)
    else:
        pytest.skip("AppWorld is here")
