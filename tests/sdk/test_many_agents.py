"""Many agents: whom the policy plays, what answers the others, and with whom each is compared."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ajet
from ajet_sdk.agent.workflow import AjetTuner, Workflow, WorkflowOutput, WorkflowTask
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.engines.frozen import before_training, check_frozen, source_of
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.rollout.attempts import Attempt, check_models, draw_seats
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.run import run, train
from ajet_sdk.samples.build import build
from ajet_sdk.trace.reader import episodes as episodes_of
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.types import Call, Episode, Reward, Task
from tests.sdk.test_local_backbone import job, length

SEATS = ("north", "east", "south", "west")


def replies(tmp_path: Path, *names: str) -> list[dict[str, str]]:
    """Models that say their own names, as sections with the keys of `model`."""
    (tmp_path / "others.py").write_text(
        "".join(f"def {name}(ask):\n    return {name!r}\n" for name in names)
    )
    return [{"scripted": f"{tmp_path / 'others.py'}:{name}", "name": name} for name in names]


def config(**rollout: Any) -> Config:
    return load_config(values={"rollout": {"timeout": 20, **rollout}})


@ajet.workflow(trainable_targets=SEATS)
async def table(model: ajet.Model) -> ajet.Reward:
    """Everybody says something."""
    for number, seat in enumerate(SEATS):
        await model.agent(f"player {number}", target_tag=seat).chat(
            [{"role": "user", "content": seat}]
        )
    return ajet.Reward(value=1.0)


def play(gateway: Gateway, workflow: Any, config: Config, **attempt: Any) -> Episode:
    [episode] = play_all(
        gateway, workflow, config, [Attempt(Task(main_query="q"), "run", **attempt)]
    )
    return episode


def play_all(
    gateway: Gateway, workflow: Any, config: Config, attempts: list[Attempt]
) -> list[Episode]:
    engine = ScriptedEngine(lambda ask: "policy")
    return asyncio.run(
        run_batch(workflow, None, attempts, engine=engine, gateway=gateway, config=config)
    )


def said(episode: Episode) -> dict[str | None, tuple[str, bool]]:
    """What answered each seat, and whether it is trained."""
    assert episode.error is None, episode.error
    return {
        c.target_tag: (c.response["choices"][0]["message"]["content"], c.trainable)
        for c in episode.calls
    }


def test_targets_and_debug_models_of_the_config_come_before_those_of_the_code(
    gateway: Gateway, tmp_path: Path
) -> None:
    one, two = replies(tmp_path, "one", "two")
    given = config(
        trainable_targets="north", opponent=one, debug_models={"south": two, "player 3": "policy"}
    )
    assert said(play(gateway, table, given)) == {
        "north": ("policy", True),
        "east": ("one", False),
        "south": ("two", False),
        "west": ("policy", False),
    }


def test_the_command_line_names_them_too(tmp_path: Path) -> None:
    given = load_config(
        None,
        [
            "ajet.rollout.trainable_targets=[north, south]",
            "ajet.rollout.debug_models.east=gpt-4o",
            "ajet.rollout.opponent=wolves@40",
        ],
    )
    assert given.rollout.trainable_targets == ["north", "south"]
    assert given.rollout.debug_models == {"east": "gpt-4o"} and given.rollout.opponent == [
        "wolves@40"
    ]


class Table(Workflow):
    trainable_targets: list[str] | None = ["north"]

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        for number, seat in enumerate(SEATS):
            client = tuner.as_raw_openai_sdk_client(f"player {number}", seat, debug_model=object())
            await client.chat.completions.create([{"role": "user", "content": seat}])
        return WorkflowOutput(reward=1.0, metadata={"trained": self.trainable_targets})


def test_the_class_api_gets_the_opponents_of_the_config(gateway: Gateway, tmp_path: Path) -> None:
    """Instead of the debug models that its code names, whatever they are."""
    [one] = replies(tmp_path, "one")
    episode = play(gateway, Table, config(trainable_targets=["east", "west"], opponent=one))
    assert episode.output["metadata"] == {"trained": ["east", "west"]}
    assert [content for content, _ in said(episode).values()] == ["one", "policy", "one", "policy"]


def test_an_agent_that_is_not_trained_is_the_opponents_too(
    gateway: Gateway, tmp_path: Path
) -> None:
    @ajet.workflow
    async def duel(model: ajet.Model) -> ajet.Reward:
        await model.agent("a", "mine").chat([{"role": "user", "content": "x"}])
        await model.agent("b", "yours", trainable=False).chat([{"role": "user", "content": "x"}])
        return ajet.Reward(value=1.0)

    [one] = replies(tmp_path, "one")
    assert said(play(gateway, duel, config(opponent=one))) == {
        "mine": ("policy", True),
        "yours": ("one", False),
    }
    assert said(play(gateway, duel, config())) == {
        "mine": ("policy", True),
        "yours": ("policy", False),
    }


@pytest.mark.slow
def test_opponent_and_seats_are_drawn_by_the_seed_and_shared_by_a_group(
    gateway: Gateway, tmp_path: Path
) -> None:
    population = replies(tmp_path, "one", "two", "three")
    given = config(opponent=population, trained_seats=2)
    attempts = [
        Attempt(Task(main_query="q"), group_seed=seed) for seed in range(24) for _ in range(2)
    ]
    drawn = [said(one) for one in play_all(gateway, table, given, attempts)]
    assert (
        drawn[::2]
        == drawn[1::2]
        == [said(one) for one in play_all(gateway, table, given, attempts[::2])]
    )
    trained = Counter(tuple(s for s in SEATS if found[s][1]) for found in drawn[::2])
    assert len(trained) > 3 and {len(seats) for seats in trained} == {2}
    others = [{content for content, mine in found.values() if not mine} for found in drawn]
    assert {len(one) for one in others} == {1}, "one opponent sits at a table"
    assert set().union(*others) == {"one", "two", "three"}


@given(seed=st.integers(0, 2**48), count=st.integers(1, 4))
def test_a_draw_keeps_the_order_of_the_seats(seed: int, count: int) -> None:
    rollout = config(opponent="policy", trained_seats=count).rollout
    drawn = draw_seats(rollout, SEATS, seed)
    assert (
        drawn is not None
        and drawn == [seat for seat in SEATS if seat in drawn]
        and len(drawn) == count
    )


def test_validation_may_have_an_opponent_of_its_own(gateway: Gateway, tmp_path: Path) -> None:
    one, two = replies(tmp_path, "one", "two")
    given = config(trainable_targets="north", opponent=one, val_kwargs={"opponent": two})
    assert said(play(gateway, table, given, split="train"))["west"] == ("one", False)
    assert said(play(gateway, table, given, split="val"))["west"] == ("two", False)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"trained_seats": 1}, "something must play the targets"),
        ({"trained_seats": 3, "opponent": "policy", "trainable_targets": ["a", "b"]}, "at most 2"),
        ({"opponent": []}, "must be longer"),
    ],
)
def test_what_cannot_be_drawn_is_said_at_once(rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**rollout)


def test_seats_without_targets_and_models_that_are_not_there_end_a_run_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)

    @ajet.workflow
    async def nobody(model: ajet.Model) -> str:
        return ""

    with pytest.raises(ConfigError, match="list the target tags"):
        check_models(config(opponent="policy", trained_seats=1), nobody, training=True)
    with pytest.raises(ConfigError, match=r"OPENAI_BASE_URL.*checkpoint@STEP"):
        check_models(config(opponent="gpt-4o"), nobody, training=True)
    with pytest.raises(ConfigError, match=r"no checkpoint checkpoint@40: .*has no checkpoint"):
        check_models(config(opponent="checkpoint@40"), nobody, training=True)
    with pytest.raises(ConfigError, match="backbone local"):
        verl = load_config(
            values={"backbone": "verl", "rollout": {"opponent": "checkpoint@latest"}}
        )
        check_models(verl, nobody, training=True)


@ajet.workflow(trainable_targets=["mine"])
async def duel(question: str, model: ajet.Model) -> str:
    """Two agents, the second of which is a frozen one."""
    reply = await model.agent("a", "mine").chat([{"role": "user", "content": question}])
    await model.agent("b", "yours").chat([{"role": "user", "content": question}], max_tokens=4)
    return reply["content"] or ""


@pytest.mark.slow
def test_a_training_plays_against_its_own_checkpoints(tmp_path: Path, tiny_model: Path) -> None:
    given = job(tmp_path, tiny_model, total_steps=3, save_freq=1, test_freq=0, keep_checkpoints=3)
    rollout = given.rollout.model_copy(update={"opponent": ["checkpoint@latest"]})
    given = given.model_copy(update={"rollout": rollout})
    tuned = train(given, workflow=duel, judge=length)
    with open_trace(given.directory) as reader:
        sql = (
            "SELECT DISTINCT e.step, c.model FROM calls c JOIN episodes e USING (episode_id) WHERE"
            " NOT c.trainable"
        )
        played = {
            (row["step"], row["model"])
            for row in reader.query(sql + " AND e.split = 'train'").to_pylist()
        }
        found = episodes_of(reader)
    assert played == {(1, "checkpoint@0"), (2, "checkpoint@1"), (3, "checkpoint@2")}
    assert all(c.policy_version is None for e in found for c in e.calls if c.agent == "b")
    # Later, each of them can be named.
    later = source_of("checkpoint@2", given)
    assert later is not None and Path(str(later.path)).name == "step_000002"
    named = source_of(f"{given.directory}@latest", given)
    assert named is not None and Path(str(named.path)).name == "step_000003"
    with pytest.raises(ConfigError, match="has the steps 1, 2, 3"):
        source_of("checkpoint@7", given)
    whole = source_of(str(tuned.path), given)
    assert whole is not None and whole.path == str(tuned.path)
    drawn = {str(source_of("checkpoint@any", given, run_id=tuned.run_id, step=3)) for _ in range(3)}
    assert len(drawn) == 1


def test_without_weights_there_is_no_first_model_to_play_against() -> None:
    given = load_config(
        values={"model": {"scripted": "m->f"}, "rollout": {"opponent": "checkpoint@0"}}
    )
    with pytest.raises(ConfigError, match="no initial model"):
        check_frozen(given, training=True)


@pytest.mark.parametrize("named", ["checkpoint@latest", "checkpoint@any"])
def test_outside_of_a_training_the_latest_checkpoint_is_one_of_before(
    named: str, tmp_path: Path
) -> None:
    given = load_config(
        values={
            "experiment_dir": str(tmp_path),
            "model": {"scripted": f"{__file__}:duel"},
            "rollout": {"user_workflow": f"{__file__}->duel", "opponent": named},
        }
    )
    check_frozen(given, training=True)
    with pytest.raises(
        ConfigError, match=rf"no checkpoint {named}.*Train first.*rollout.opponent=policy"
    ):
        run(given, tasks=[{"question": "q"}])


def test_a_model_in_the_making_plays_against_itself() -> None:
    given = before_training(
        config(opponent=["checkpoint@0", "wolves@4"], debug_models={"a": "checkpoint@latest"})
    )
    assert given.rollout.opponent == ["policy", "wolves@4"] and given.rollout.debug_models == {
        "a": "policy"
    }


def call(name: str, agent: str, tag: str | None) -> Call:
    return Call(
        call_id=name,
        episode_id="e",
        agent=agent,
        target_tag=tag,
        prompt_ids=[1],
        output_ids=[2],
        logprobs=[-0.5],
    )  # type: ignore[arg-type]


def advantages(*groups: tuple[Episode, ...]) -> dict[str, float]:
    batch = build([one for group in groups for one in group], normalize_std=False)
    return {
        span.call_id: float(s.advantages[span.start])
        for s in batch.samples
        for span in s.timeline.spans
    }


def game(name: str, seats: dict[str, str | None], values: dict[str, float]) -> Episode:
    calls = tuple(call(f"{name}.{agent}", agent, tag) for agent, tag in seats.items())
    rewards = tuple(Reward(value=value, agent=agent) for agent, value in values.items())
    return Episode(episode_id=name, group_id="g", calls=calls, rewards=rewards)


def test_advantages_compare_within_a_role_whoever_plays_it() -> None:
    first = game("1", {"p1": "wolf", "p2": "seer"}, {"p1": 1.0, "p2": 0.0})
    second = game("2", {"p1": "seer", "p2": "wolf"}, {"p1": 1.0, "p2": 0.0})
    assert advantages((first, second)) == pytest.approx(
        {"1.p1": 0.5, "2.p2": -0.5, "1.p2": -0.5, "2.p1": 0.5}
    )


def test_without_tags_an_agent_is_its_own_role() -> None:
    for tag in (None, "default_target_tag"):
        first = game("1", {"p1": tag, "p2": tag}, {"p1": 1.0, "p2": 4.0})
        second = game("2", {"p1": tag, "p2": tag}, {"p1": 0.0, "p2": 8.0})
        assert advantages((first, second)) == pytest.approx(
            {"1.p1": 0.5, "2.p1": -0.5, "1.p2": -2.0, "2.p2": 2.0}
        )
