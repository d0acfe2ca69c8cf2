"""Keys that configs for AgentJet hold, each with its effect on episodes that really ran."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import ajet
from ajet_sdk.agent.workflow import AjetTuner, Workflow, WorkflowOutput, WorkflowTask
from ajet_sdk.backbones.shared.steps import samples_of, total_steps
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.engines.scripted import ByteTokenizer, ScriptedEngine
from ajet_sdk.errors import ConfigError
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.rollout.judging import overlong, repeats
from ajet_sdk.rollout.outcomes import solved
from ajet_sdk.samples.build import Batch, balance
from ajet_sdk.samples.draft import output_tokens
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.types import Call, Episode, Task
from tests.gateways import shared_gateway
from tests.serving import answering, serving

LOOP = "the lake " * 40
TOOLS = [
    {
        "type": "function",
        "function": {"name": "move", "parameters": {"type": "object", "properties": {}}},
    }
]


def config(**sections: Any) -> Config:
    return load_config(values={"ajet": sections})


def run(
    workflow: Any, replies: Sequence[str], settings: Config, judge: Any = None, n: int = 1
) -> list[Episode]:
    async def main() -> list[Episode]:
        attempts = [Attempt(Task(main_query="q"), "run", "group", attempt=i) for i in range(n)]
        engine = ScriptedEngine(replies, logprob=-1.0)
        return await run_batch(
            workflow, judge, attempts, engine=engine, gateway=shared_gateway(), config=settings
        )

    return asyncio.run(main())


def samples(episodes: Sequence[Episode], settings: Config) -> Batch:
    batch = samples_of(settings, episodes, ByteTokenizer())
    assert balance(batch.ledger, [call for episode in episodes for call in episode.calls]) == []
    return batch


class Talk(Workflow):
    """A conversation of three turns; `fresh` forgets what was said."""

    fresh: bool = False
    tools: bool = False

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client()
        messages = list(workflow_task.task.init_messages)
        for turn in range(3):
            asked = [{"role": "user", "content": f"turn {turn}"}] if self.fresh else messages
            reply = await client.chat.completions.create(asked, tools=TOOLS if self.tools else [])
            messages += [{"role": "assistant", "content": reply.choices[0].message.content or ""}]
            messages += [{"role": "user", "content": f"turn {turn}"}]
        return WorkflowOutput(reward=float(workflow_task.task_thread_index))


# Mad replies


@given(st.text("ab \n", min_size=1, max_size=12), st.text(max_size=50), st.text(max_size=50))
@example("🙂", "", "")
def test_a_piece_repeated_over_two_hundred_characters_is_nonsense(
    piece: str, before: str, after: str
) -> None:
    times = max(10, -(-200 // len(piece)))
    assert repeats(before + piece * times + after)


@given(st.lists(st.integers(0, 10**9), max_size=60, unique=True))
@example([])
def test_lists_of_different_things_are_no_nonsense(numbers: list[int]) -> None:
    assert not repeats("".join(f"- item {number}, and so on\n" for number in numbers))


def test_a_reply_that_repeats_itself_ends_the_episode_with_the_reward_given() -> None:
    settings = config(
        rollout={"compute_madness_checklist": ["nonsense"], "agent_madness_reward": -0.5}
    )
    [episode] = run(Talk, ["a", LOOP, "without the adapter"], settings)
    assert (episode.status, episode.reward, episode.is_success) == ("succeeded", -0.5, False)
    assert [reward.reason for reward in episode.rewards] == ["nonsense"]
    answered, refused = (
        [c for c in episode.calls if c.error is None],
        [c for c in episode.calls if c.error],
    )
    assert len(answered) == 2 and len(refused) == 1 and "nonsense" in str(refused[0].error)
    without = run(
        Talk, ["a", LOOP, "asked"], config(rollout={"compute_madness_checklist": []}), n=2
    )
    assert [e.reward for e in without] == [0.0, 1.0] and [len(e.calls) for e in without] == [3, 3]


def test_a_reply_that_repeats_itself_alone_takes_the_reward_where_episodes_go_on() -> None:
    rollout = {
        "compute_madness_checklist": ["nonsense"],
        "agent_madness_termination": False,
        "max_model_len": 5000,
    }
    settings = config(rollout=rollout)
    episodes = run(Talk, ["a", LOOP, "b"], settings, n=2)
    for episode, own in zip(episodes, (0.0, 1.0), strict=True):
        assert [episode.value(c.agent, c.call_id) for c in episode.calls] == [own, -1.0, own]


@given(st.integers(1, 50), st.integers(0, 50), st.floats(0, 10))
def test_replies_lose_reward_only_within_the_buffer(buffer: int, size: int, penalty: float) -> None:
    """arXiv:2503.14476, equation 13, with 50 as the maximum length."""
    call = Call(episode_id="e", agent="a", output_ids=list(range(size)))
    value = sum(reward.value for reward in overlong([call], 50, buffer, penalty))
    assert value == pytest.approx(-penalty * max(0, size - (50 - buffer)) / buffer)
    assert overlong([call.model_copy(update={"trainable": False})], 50, buffer, penalty) == []


def test_a_long_reply_alone_loses_reward_and_in_training_only() -> None:
    rollout = {"overlong_buffer": 8, "max_response_length_in_one_turn": 10}
    wrong, episode = run(Talk, ["a", "a long one", "b"], config(rollout=rollout), n=2)
    assert episode.reward == 0.0 and solved(episode) and not solved(wrong)  # it was worth 1
    lost = [sum(r.value for r in episode.rewards if r.call_id == c.call_id) for c in episode.calls]
    sizes = [output_tokens(call) for call in episode.calls]
    assert lost == [-max(0, size - 2) / 8 for size in sizes] and min(lost) < max(lost)
    with pytest.raises(ConfigError, match="overlong_buffer must be at most"):
        config(rollout={"overlong_buffer": 11, "max_response_length_in_one_turn": 10})


@pytest.mark.parametrize(
    ("reply", "mad"),
    [
        ('<tool_call>{"name": "move", "arguments": {}</tool_call>', True),
        ('<tool_call>{"name": "move", "arguments": {}}</tool_call>', False),
        ("no call", False),
    ],
)
def test_a_tool_call_that_cannot_be_read_ends_the_episode(reply: str, mad: bool) -> None:
    settings = config(rollout={"compute_madness_checklist": ["nonsense", "wrong_toolcall"]})
    [episode] = run(Talk(tools=True), [reply, "b", "c"], settings)
    assert episode.reward == (-1.0 if mad else 0.0)
    [without_tools] = run(Talk, [reply, "b", "c"], settings)
    assert without_tools.reward == 0.0


@pytest.mark.parametrize("detail", [False, True])
def test_tool_calls_that_cannot_be_read_are_logged(
    detail: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = {"log_tool_format_check": True, "log_tool_format_error_detail": detail}
    [episode] = run(
        Talk(tools=True),
        ["<tool_call>{oops</tool_call>", "b", "c"],
        config(context_tracker=tracker),
    )
    [line] = [
        record.message for record in caplog.records if "could not be parsed" in record.message
    ]
    assert episode.calls[0].call_id in line and ("oops" in line) is detail


def test_splits_are_logged_where_asked(caplog: pytest.LogCaptureFixture) -> None:
    [episode] = run(
        Talk(fresh=True), ["a", "b", "c"], config(context_tracker={"detect_timeline_snap": True})
    )
    lines = [
        record.message for record in caplog.records if "starts a new timeline" in record.message
    ]
    assert [episode.calls[i].call_id in line for i, line in zip((1, 2), lines, strict=True)] == [
        True,
        True,
    ]


# What is trained


def test_gamma_discounts_the_reward_for_each_later_turn() -> None:
    settings = config(
        rollout={"gamma": 0.5}, trainer_common={"algorithm": {"normalize_std": False}}
    )
    episodes = run(Talk, ["a", "b", "c"], settings, n=2)
    batch = samples(episodes, settings)
    of = {sample.episode_id: sample for sample in batch.samples}
    worth = of[episodes[1].episode_id]
    found = [float(worth.advantages[span.start]) for span in worth.timeline.spans]
    baseline = (0.25 + 0.5 + 1) / 3 / 2
    assert found == pytest.approx([0.25 - baseline, 0.5 - baseline, 1 - baseline])
    plain = samples(episodes, config(trainer_common={"algorithm": {"normalize_std": False}}))
    flat = next(s for s in plain.samples if s.episode_id == episodes[1].episode_id)
    assert {float(flat.advantages[span.start]) for span in flat.timeline.spans} == {0.5}


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "reinforce_plus_plus"])
def test_a_discount_alone_teaches_nothing(estimator: str) -> None:
    """Attempts that earned the same differ only in where their turns stand."""
    settings = config(
        rollout={"gamma": 0.5}, trainer_common={"algorithm": {"adv_estimator": estimator}}
    )
    episodes = run(Talk, ["a", "b", "c"], settings, n=2)
    equal = [episode.model_copy(update={"rewards": episodes[1].rewards}) for episode in episodes]
    assert samples(episodes, settings).samples
    batch = samples(equal, settings)
    assert not batch.samples and {row.outcome for row in batch.ledger} == {"zero_advantage"}


def test_at_most_so_many_samples_of_an_episode_are_trained() -> None:
    settings = config(rollout={"multi_turn": {"max_sample_per_task": 2}})
    episodes = run(Talk(fresh=True), ["a", "b", "c"], settings, n=2)
    batch = samples(episodes, settings)
    assert len(batch.samples) == 4 and batch.metrics["train/tokens_truncated"] == 4
    assert [s.timeline.call_ids for s in batch.samples] == [
        s.timeline.call_ids for s in samples(episodes, settings).samples
    ]
    assert len(samples(episodes, config()).samples) == 6


@pytest.mark.parametrize(
    ("data", "trained"),
    [
        ({}, [2, 2, 2]),
        ({"max_response_length": 2}, [2, 0, 0]),
        ({"max_response_length": 1}, [1, 0, 0]),
        ({"max_prompt_length": 1}, [2, 2, 2]),
        ({"max_prompt_length": 1, "max_response_length": 49}, [2, 2, 0]),
        ({"max_prompt_length": 1000, "max_response_length": 58}, [2, 2, 2]),
    ],
)
def test_a_sample_is_as_long_as_its_prompt_and_response_may_be(
    data: dict[str, Any], trained: list[int]
) -> None:
    settings = config(data=data)
    episodes = run(Talk, ["a", "b", "c"], settings, n=2)
    calls = episodes[0].calls
    assert [len(call.prompt_ids) for call in calls if call.prompt_ids is not None] == [20, 48, 76]
    ledger = samples(episodes, settings).ledger
    found = [
        sum(r.tokens for r in ledger if r.call_id == c.call_id and r.outcome == "trained")
        for c in calls
    ]
    assert found == trained


@pytest.mark.parametrize(
    ("common", "steps"),
    [
        ({"total_epochs": 8}, 10),
        ({"total_epochs": 8, "total_training_steps": 3}, 3),
        ({"total_epochs": 8, "total_training_steps": 99}, 10),
        ({"total_steps": 7, "total_training_steps": 5}, 5),
    ],
)
def test_total_training_steps_ends_training_before_the_epochs_do(
    common: dict[str, Any], steps: int
) -> None:
    assert total_steps(config(trainer_common=common, data={"train_batch_size": 8}), 10) == steps


# Who is trained


class Two(Workflow):
    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        self.seen = self.trainable_targets
        for role in ("wolf", "sheep"):
            client = tuner.as_raw_openai_sdk_client(
                agent_name=role, target_tag=role, debug_model="frozen"
            )
            await client.chat.completions.create([{"role": "user", "content": "?"}])
        return WorkflowOutput(reward=1.0, metadata={"seen": self.seen})


@ajet.workflow(trainable_targets=["sheep"])
async def both(task: Task, model: Any) -> ajet.Reward:
    for role in ("wolf", "sheep"):
        await model.agent(role, debug_model="frozen").chat([{"role": "user", "content": "?"}])
    return ajet.Reward(value=1.0)


REPLY = {
    "model": "frozen",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "b"}}],
}


@pytest.mark.parametrize("workflow", [Two, both])
@pytest.mark.parametrize("given", ["wolf", ["wolf"]])
def test_trainable_targets_of_the_config_hold(workflow: Any, given: Any) -> None:
    with serving(answering(REPLY)) as url:
        settings = config(rollout={"trainable_targets": given}, model={"base_url": f"{url}/v1"})
        [episode] = run(workflow, ["a"], settings)
    assert episode.error is None
    assert {call.agent: call.trainable for call in episode.calls} == {"wolf": True, "sheep": False}
    if workflow is Two:
        assert episode.output["metadata"]["seen"] == ["wolf"]
    with pytest.raises(ConfigError, match="trainable_targets"):
        load_config(overrides=["ajet.rollout.trainable_targets=[]"])
    assert load_config(
        overrides=["ajet.rollout.trainable_targets=[wolf]"]
    ).rollout.trainable_targets == ["wolf"]


# Names and values


def test_random_dummy_tasks_have_a_number_each() -> None:
    sets = load_tasks(config(task_reader={"type": "random_dummy"}))
    numbers = [task.metadata["random_number"] for task in (*sets.train, *sets.val)]
    assert len(set(numbers)) == 80 and all(isinstance(n, int) and 0 <= n < 2**32 for n in numbers)


def test_a_file_by_its_older_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(
        "ajet:\n  experiment_name: read_yaml_name\n  rollout: {tensor_model_parallel_size: 2, mode:"
        " async}\n  task_reader:\n    type: dataset_file\n    dataset_file: {training: {file_path:"
        " t.jsonl}}\n  execute_test: true\nhydra: {searchpath: []}\ndefaults: [a]\ntrainer:"
        " {logger: [console]}\n"
    )
    with caplog.at_level(logging.WARNING):
        found = load_config(path, ["ajet.rollout.tensor_parallel_size=4"])
    assert found.rollout.tensor_parallel_size == 4 and found.experiment_name.startswith("old-")
    assert found.task_reader.type == "jsonl_dataset_file"
    assert found.task_reader.jsonl_dataset_file.training.file_path == "t.jsonl"
    assert found.origin("task_reader.jsonl_dataset_file.training.file_path") == "in old.yaml line 6"
    assert not found.roots and load_config(path).rollout.tensor_parallel_size == 2
    assert [record.message for record in caplog.records][:2] == [
        (
            "ignored: `hydra:`, `defaults:` (it belongs to Hydra; ajet has built-in defaults); "
            "`trainer:` (it belongs to verl; put verl's keys under `verl:`)"
        ),
        (
            "without effect: rollout.mode (every engine answers calls concurrently); "
            "execute_test (it controls AgentJet's own tests)"
        ),
    ]
    path.write_text("ajet:\n  rollout: {tensor_model_parallel_size: 2, tensor_parallel_size: 4}\n")
    with pytest.raises(ConfigError, match="are one key"):
        load_config(path)


@pytest.mark.parametrize(
    "value", ["{{MODEL}}", '"{{ MODEL }}"', '"{{BASE}}/{{MODEL}}"', "{{BASE}}/{{MODEL}}"]
)
def test_a_placeholder_is_named(value: str, tmp_path: Path) -> None:
    path = tmp_path / "template.yaml"
    path.write_text(f"ajet:\n  # {{{{A}}}}\n  model:\n    path: {value}\n")
    with pytest.raises(
        ConfigError, match=r"template\.yaml line 4: .*\{\{MODEL\}\}.* is a placeholder"
    ):
        load_config(path)
    path.write_text("ajet: {}\nmine:\n  prompt: |\n    Say {{MODEL}}\n  other: '{{ lower }}'\n")
    assert load_config(path).mine.prompt == "Say {{MODEL}}\n"


def test_validation_attempts_are_val_pass_n_unless_only_num_repeat_is_given() -> None:
    repeat = {"val_kwargs": {"num_repeat": 3, "do_sample": True, "temperature": 0.5}}
    assert config().validation_attempts == 4 and config(rollout=repeat).validation_attempts == 3
    assert config(rollout=repeat, trainer_common={"val_pass_n": 2}).validation_attempts == 2


def test_no_checklist_is_an_empty_one() -> None:
    for nothing in (None, "None", []):
        assert (
            config(rollout={"compute_madness_checklist": nothing}).rollout.compute_madness_checklist
            == []
        )
