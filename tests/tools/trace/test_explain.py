"""`ajet trace explain`: each claim is made where its cause is in the trace, and only there."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import ajet
from ajet_sdk.errors import QueryError
from ajet_sdk.judges.llm_prompts import Material, messages, question
from ajet_sdk.run import train
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, LedgerEntry, Metric, Reward, Run, Task, Trained
from ajet_tools.cli.app import app
from ajet_tools.trace.compare.diff import diff_runs
from ajet_tools.trace.compare.explain import StepChange, explain, lines_of
from tests.tiny_models import save_tiny
from tests.tools.conftest import reply
from tests.tools.trace.audited_runs import job

TASKS, ATTEMPTS = 8, 4


@dataclass
class Attempt:
    """What an attempt says and earns; `reward` None: it failed with `cause`."""

    reward: float | None = 1.0
    says: str = "Forty-two."
    cause: str = "KeyError"
    held_out: float | None = None
    message: dict[str, Any] | None = None
    finish: str = "stop"
    rewritten: bool = False
    """A second call, whose history is not that of the first."""
    advantage: float = 0.0
    asked: str = "What is six times seven?"
    tools: tuple[str, ...] = ()
    sampling: dict[str, Any] | None = None
    rubric: str = ""
    """Of an LLM judge, whose call is recorded beside the attempt's."""


Says = Callable[[int, int], Attempt]
"""Task, attempt -> what it does."""


def write(
    path: Path,
    steps: Sequence[Says],
    metrics: Sequence[dict[str, float]] = (),
    *,
    split: Any = "train",
    code: dict[str, Any] | None = None,
    **more: Any,
) -> Path:
    """A run with these steps, each with the same tasks."""
    with TraceWriter(path) as writer:
        writer.put(
            Run(
                run_id="run",
                name="run",
                backbone="local",
                config={"ajet": {"model": {"scripted": "a.py->b"}}, "code": code or {}},
            )
        )
        for step, says in enumerate(steps, 1):
            for task, attempt in np.ndindex(TASKS, ATTEMPTS):
                does, id = says(task, attempt), f"{split}{step}-{task}-{attempt}"
                ask = [{"role": "user", "content": does.asked}]
                response = {
                    "choices": [
                        does.message or {"message": {"role": "assistant", "content": does.says}}
                    ]
                }
                said = {
                    "response": response,
                    "finish_reason": does.finish,
                    "sampling": does.sampling or {},
                }
                if does.tools:
                    tools = [
                        {"type": "function", "function": {"name": name}} for name in does.tools
                    ]
                    said["request"] = {"messages": ask, "tools": tools}
                calls = [reply(f"{id}c", id, 0, ask, does.says).model_copy(update=said)]
                if does.rewritten:
                    history = [{"role": "user", "content": "Quite another question?"}]
                    calls.append(reply(f"{id}d", id, 1, history, does.says))
                if does.rubric:
                    material = [Material(does.asked, does.says)]
                    text = question("pointwise", None, material, does.rubric, (), (0.0, 1.0))
                    judged = reply(f"{id}j", id, 1, messages(text), '{"score": 1}')
                    calls.append(judged.model_copy(update={"phase": "judge"}))
                rewards = [] if does.reward is None else [Reward(value=does.reward)]
                if does.held_out is not None:
                    rewards.append(Reward(name="strict", value=does.held_out, weight=0.0))
                ended: dict[str, Any] = (
                    {}
                    if does.reward is not None
                    else {"status": "failed", "cause": does.cause, "error": "it broke"}
                )
                asked = Task(task_id=f"t{task}", main_query=f"Q{task}?")
                writer.put(
                    *calls,
                    Episode(
                        episode_id=id,
                        run_id="run",
                        step=step,
                        split=split,
                        task=asked,
                        group_id=f"{step}-{task}",
                        attempt=attempt,
                        output=does.says,
                        rewards=tuple(rewards),
                        **ended,
                        **more,
                    ),
                )
                size = 0 if calls[0].output_ids is None else len(calls[0].output_ids)
                values = np.full(size, does.advantage, np.float32)
                if does.advantage:
                    writer.put(Trained(run_id="run", step=step, episode_id=id, call_id=f"{id}c", advantages=values,
                                       logprobs=values, entropy=values))  # fmt: skip
        for step, of in enumerate(metrics, 1):
            writer.put(
                *(
                    Metric(run_id="run", step=step, name=name, value=value)
                    for name, value in of.items()
                )
            )
    return path


def changes(path: Path, step: int | None = None) -> dict[str, list[str]]:
    """The sentences by kind, of all that is explained."""
    with open_trace(path) as reader:
        found = explain(reader, "run", step, path).changes
    return by_kind(found)


def by_kind(found: Sequence[StepChange]) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for change in found:
        for finding in change.findings:
            kinds.setdefault(finding.kind, []).append(finding.text)
    return kinds


def varied(task: int, attempt: int) -> Attempt:
    return Attempt(float((task + attempt) % 2), f"Answer {task} {attempt}.")


def test_what_did_not_change_is_left_out(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.duckdb",
        [varied, varied],
        [{"train/entropy": 0.5}, {"train/entropy": 0.51}],
    )
    assert changes(path, 2) == {}
    with open_trace(path) as reader:
        assert "  nothing changed" in lines_of(explain(reader, "run", 2))


def only_change(path: Path) -> StepChange:
    with open_trace(path) as reader:
        [change] = explain(reader, "run", 2).changes
    return change


@pytest.mark.parametrize(
    ("earlier", "later", "words"),
    [
        ({"tools": ("search",)}, {"tools": ("lookup",)}, ("tools", "search", "lookup")),
        (
            {"sampling": {"temperature": 1.0}},
            {"sampling": {"temperature": 0.2}},
            ("temperature", "1.0", "0.2"),
        ),
        ({"sampling": {"top_p": 1.0}}, {"sampling": {"top_p": 0.5}}, ("top_p",)),
        (
            {"rubric": "It is right."},
            {"rubric": "It is short."},
            ("rubric of the judge", "It is right.", "It is short."),
        ),
        (
            {"rubric": f"1. {'It is right. ' * 20}\n2. It is kind."},
            {"rubric": f"1. {'It is right. ' * 20}\n2. It is curt."},
            ("rubric of the judge", "kind", "curt"),
        ),
    ],
)
def test_what_is_no_message_is_compared_first(
    tmp_path: Path, earlier: dict[str, Any], later: dict[str, Any], words: tuple[str, ...]
) -> None:
    metrics = [{"train/grad_norm": 0.3, "train/lr": 0.1}, {"train/grad_norm": 9.0, "train/lr": 0.1}]
    path = write(
        tmp_path / "trace.duckdb",
        [
            lambda t, a: replace(varied(t, a), **earlier),
            lambda t, a: Attempt(0.0, f"No {t}.", **later),
        ],
        metrics,
    )
    change = only_change(path)
    assert change.findings[0].kind == "setup"
    assert all(word in change.findings[0].text and word in change.headline for word in words)
    assert not [finding for finding in change.findings if finding.kind == "notice"], (
        "no sign that blames the update"
    )


def test_an_answer_is_no_part_of_the_rubric(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.duckdb",
        [
            lambda t, a: replace(varied(t, a), rubric="It is right."),
            lambda t, a: Attempt(0.0, "<rubric>All is right.</rubric>", rubric="It is right."),
        ],
    )
    assert [finding for finding in only_change(path).findings if finding.kind == "setup"] == []


def test_a_judge_that_changed_is_told_by_equal_answers(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.duckdb", [varied, lambda t, a: replace(varied(t, a), reward=0.25)]
    )
    change = only_change(path)
    assert change.findings[0].kind == "judge" and change.findings[0].after == 32
    assert "judge changed at step 2" in change.headline and "tools no" in change.headline
    assert len(change.findings[0].episodes) == 32


def test_a_judge_that_disagrees_with_itself_is_not_said_to_have_changed(tmp_path: Path) -> None:
    def noisy(task: int, attempt: int) -> Attempt:
        return Attempt(float(attempt % 2), "The same answer.")

    change = only_change(write(tmp_path / "trace.duckdb", [noisy, noisy]))
    assert not [finding for finding in change.findings if finding.kind in ("judge", "setup")]


def test_an_update_is_blamed_only_where_nothing_else_changed(tmp_path: Path) -> None:
    metrics = [{"train/kl": 0.01}, {"train/kl": 0.5}]
    worse = [varied, lambda t, a: Attempt(0.0, f"No {t}.")]
    assert "the update" in only_change(write(tmp_path / "a.duckdb", worse, metrics)).headline
    changed = [
        lambda t, a: replace(varied(t, a), tools=("x",)),
        lambda t, a: Attempt(0.0, f"No {t}.", tools=("y",)),
    ]
    assert "the update" not in only_change(write(tmp_path / "b.duckdb", changed, metrics)).headline


def test_what_chance_explains_has_no_cause(tmp_path: Path) -> None:
    def slightly_worse(task: int, attempt: int) -> Attempt:
        return Attempt(0.0) if (task, attempt) == (0, 1) else varied(task, attempt)

    metrics = [{"train/kl": 0.01}, {"train/kl": 0.5}]
    change = only_change(write(tmp_path / "trace.duckdb", [varied, slightly_worse], metrics))
    assert {finding.kind for finding in change.findings} >= {"reward", "kl"}
    assert "chance" in change.headline and "update" not in change.headline


def test_validations_name_the_updates_in_between(tmp_path: Path) -> None:
    metrics = [{"train/grad_norm": 0.3}, {"train/grad_norm": 0.3}]
    fell = [varied, lambda t, a: Attempt(0.0, f"No {t}.")]
    change = only_change(
        write(tmp_path / "trace.duckdb", fell, metrics, split="val", decoding="sampled")
    )
    assert "most likely: the updates in between" in change.headline
    assert [f.text for f in change.findings if f.kind == "updates"] == [
        "1 step with updates in between: 2"
    ]


def test_a_gradient_that_shrinks_is_no_cause(tmp_path: Path) -> None:
    metrics = [{"train/grad_norm": 9.0}, {"train/grad_norm": 0.3}]
    change = only_change(
        write(tmp_path / "trace.duckdb", [varied, lambda t, a: Attempt(0.0, f"No {t}.")], metrics)
    )
    assert (
        "grad_norm" in {finding.kind for finding in change.findings}
        and "gradient" not in change.headline
    )
    assert "the update in between, or other tasks" in change.headline, "nothing exonerates it"


def test_an_update_after_which_nothing_was_trained_is_not_exonerated(tmp_path: Path) -> None:
    """A collapse leaves no metrics of the step after it."""
    metrics = [{"train/grad_norm": 0.36, "train/lr": 0.01, "train/kl": 0.01}, {}]
    change = only_change(
        write(tmp_path / "trace.duckdb", [varied, lambda t, a: Attempt(0.0, f"No {t}.")], metrics)
    )
    assert "the update in between" in change.headline and "update no" not in change.headline


def test_a_fall_is_told_by_task_with_its_interval_and_the_token(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.duckdb", [varied, lambda t, a: Attempt(0.0, f"Answer {t} wrong.")]
    )
    found = changes(path)
    assert found["reward"] == ["mean reward 0.5 → 0 (32 and 32 episodes)"]
    assert found["tasks"] == [
        "of 8 tasks attempted before (step 1), 8 fell and 0 rose: mean change -0.5, 95 % interval"
        " -0.5 to -0.5"
    ]
    assert found["signal"] == [
        "8 of 8 groups gave every attempt the same reward and trained nothing (8 of reward 0); 0 of"
        " 8 before"
    ]
    first = found["task"][0]
    assert first.startswith(
        '"Q0?" 0.5 → 0: train1-0-1 (reward 1, step 1) and train2-0-0 (reward 0, step 2) part at'
        " token"
    )
    assert first.endswith('(message 1): assistant "Answer 0 1." and assistant "Answer 0 wrong."')
    assert len(found["task"]) == 3, "the tasks that fell most, not all"


def test_a_rise_is_told_the_other_way_round(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.duckdb", [varied, lambda t, a: Attempt(1.0, f"Answer {t} {a} right.")]
    )
    found = changes(path)
    assert "0 fell and 8 rose: mean change +0.5" in found["tasks"][0]
    assert (
        "train2-0-0 (reward 1, step 2) and train1-0-0 (reward 0, step 1) part" in found["task"][0]
    )


def test_attempts_of_new_tasks_are_compared_within_the_step(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.duckdb", [varied])
    with TraceWriter(path) as writer:
        for attempt in range(4):
            id = f"new-{attempt}"
            ask = [{"role": "user", "content": "And now?"}]
            writer.put(reply(f"{id}c", id, 0, ask, f"Say {attempt}."))
            task, rewards = (
                Task(task_id="new", main_query="Now?"),
                (Reward(value=float(attempt == 3)),),
            )
            writer.put(Episode(episode_id=id, run_id="run", step=2, task=task, group_id="n", attempt=attempt,
                               rewards=rewards))  # fmt: skip
    [text] = changes(path, 2)["task"]
    assert text.startswith(
        '"Now?": new-3 (reward 1, step 2) and new-0 (reward 0, step 2) part at token'
    )


@pytest.mark.parametrize(
    ("kind", "does", "text"),
    [
        (
            "failures",
            lambda t, a: Attempt(None if a == 0 else 1.0),
            "8 of 32 episodes failed with KeyError (a new cause)",
        ),
        (
            "length",
            lambda t, a: Attempt(1.0, "Forty-two, " * 20),
            "sampled tokens per episode: 11 → 221",
        ),
        (
            "cut",
            lambda t, a: Attempt(finish="length"),
            "replies per episode that end at the maximum length: 0 → 1",
        ),
        (
            "unread",
            lambda t, a: Attempt(
                message={"message": {"content": "<tool_call>{"}, "unread_tool_call": True}
            ),
            "tool calls per episode that cannot be parsed: 0 → 1",
        ),
        (
            "cut_call",
            lambda t, a: Attempt(
                message={"message": {}, "unread_tool_call": True}, finish="length"
            ),
            "tool calls per episode that are cut at the maximum length: 0 → 1",
        ),
        (
            "tools",
            lambda t, a: Attempt(
                message={
                    "message": {
                        "content": None,
                        "tool_calls": [{"function": {"name": "calc", "arguments": "{}"}}],
                    }
                }
            ),
            "tool-calling replies per episode: 0 → 1",
        ),
        ("calls", lambda t, a: Attempt(rewritten=True), "calls per episode: 1 → 2"),
        ("splits", lambda t, a: Attempt(rewritten=True), "splits of timelines per episode: 0 → 1"),
    ],
)
def test_each_change_of_behaviour_is_told_with_its_episodes(
    tmp_path: Path, kind: str, does: Says, text: str
) -> None:
    path = write(tmp_path / "trace.duckdb", [lambda t, a: Attempt(), does])
    with open_trace(path) as reader:
        [change] = explain(reader, "run", 2, path).changes
    told = [finding for finding in change.findings if finding.kind == kind]
    assert (
        told[0].text == text
        and told[0].episodes
        and all(id.startswith("train2-") for id in told[0].episodes)
    )
    if kind == "splits":
        assert "32 splits of timelines by new_conversation, a new cause" in told[1].text
    else:
        assert len(told) == 1
    if kind == "unread":
        assert kind not in changes(write(tmp_path / "same.duckdb", [does, does]), 2)


def test_the_update_is_told_where_only_behaviour_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.duckdb", [varied, lambda t, a: replace(varied(t, a), finish="length")],
                 [{"train/lr": 0.05}])  # fmt: skip
    assert changes(path, 2)["update"] == [
        "the update in between is that of step 1: learning rate 0.05"
    ]


def test_metrics_of_training(tmp_path: Path) -> None:
    told: dict[str, tuple[float, float, str]] = {
        "entropy": (0.5, 0.1, "entropy: 0.5 → 0.1"),
        "sampler_kl": (0.0, 0.05, "KL between sampler and trainer: 0 → 0.05"),
        "kl": (0.01, 0.5, "KL to the reference model: 0.01 → 0.5"),
        "clip_share": (0.0, 0.2, "the share of clipped tokens: 0 → 0.2"),
        "staleness": (0.0, 2.0, "staleness (updates between sampling and training): 0 → 2"),
        "logprob_gap_mean": (
            0.0,
            0.05,
            "the gap between the log-probabilities of trainer and sampler: 0 → 0.05",
        ),
        "grad_norm": (0.3, 9.0, "the gradient norm: 0.3 → 9"),
    }
    metrics = [
        {f"train/{name}": before for name, (before, _, _) in told.items()},
        {f"train/{name}": after for name, (_, after, _) in told.items()},
    ]
    path = write(tmp_path / "trace.duckdb", [varied, varied], metrics)
    assert changes(path, 2) == {name: [text] for name, (_, _, text) in told.items()}


def test_tokens_that_were_not_trained_are_told_by_cause(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.duckdb", [varied, varied])
    with TraceWriter(path) as writer:
        of: dict[str, Any] = {"run_id": "run", "episode_id": "e", "call_id": "c", "tokens": 100}
        writer.put(LedgerEntry(step=1, outcome="trained", **of), LedgerEntry(step=2, outcome="trained", **of),
                   LedgerEntry(step=2, outcome="stale", **of))  # fmt: skip
    [text] = changes(path, 2)["ledger"]
    assert text.startswith("50.0% of the sampled tokens were not trained: 50.0% stale")


def test_a_held_out_judge_that_falls_while_the_reward_rises(tmp_path: Path) -> None:
    def before(t: int, a: int) -> Attempt:
        return Attempt(float(a == 0), f"Answer {t} {a}.", held_out=float(a < 3))

    def after(t: int, a: int) -> Attempt:
        return Attempt(1.0, f"Answer {t} {a}.", held_out=float(a == 0))

    [text] = changes(write(tmp_path / "trace.duckdb", [before, after]))["suspect"]
    assert (
        text
        == "since step 1 the reward rose from 0.25 to 1, while the held-out judge strict (weight 0)"
        " went from 0.75 to 0.25"
    )


def test_validation_is_explained_beside_training(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.duckdb", [varied, varied, varied])
    write(path, [varied, varied, lambda t, a: Attempt(0.0)], split="val", decoding="sampled")
    with open_trace(path) as reader:
        found = explain(reader, "run", 3, path)
    assert [(c.split, c.decoding, c.before, c.step) for c in found.changes] == [
        ("train", None, 2, 3), ("val", "sampled", 2, 3),
    ]  # fmt: skip
    assert [finding.kind for finding in found.changes[0].findings] == []
    assert "validation, sampled: step 3 against step 2" in lines_of(found)


def test_the_command(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.duckdb",
        [varied, varied, lambda t, a: Attempt(0.0), lambda t, a: Attempt(0.0)],
    )
    done = CliRunner().invoke(app, ["trace", "explain", "run", str(path)])
    lines = done.stdout.splitlines()
    assert lines[0] == "run run, step 3: the largest change of the mean reward in training: 0.5 → 0"
    assert "  mean reward 0.5 → 0 (32 and 32 episodes)" in lines
    document = json.loads(
        CliRunner().invoke(app, ["trace", "explain", str(path), "--step", "4", "--json"]).stdout
    )
    assert document["step"] == 4 and document["changes"][0]["findings"] == []
    wrong = CliRunner().invoke(app, ["trace", "explain", "run", str(path), "--step", "1"])
    assert wrong.exit_code == 2 and "its steps are 1 to 4" in wrong.stderr


def test_tasks_that_never_earned_anything_are_a_line_of_the_run(tmp_path: Path) -> None:
    def late(task: int, attempt: int) -> Attempt:
        return Attempt(float(task > 2), "No.") if task else Attempt(None)

    path = write(tmp_path / "trace.duckdb", [late, late, varied])
    with open_trace(path) as reader:
        found = explain(reader, "run", 2)
        assert (found.tasks, found.unsolved) == (
            7,
            ("Q1?", "Q2?"),
        ), "nothing is known of the one that failed"
        [tokens] = reader.query(
            "SELECT sum(len(output_ids)) AS n FROM calls WHERE call_id LIKE 'train_-%'"
        ).to_pylist()
        at_3 = explain(reader, "run", 3)
        assert (at_3.tasks, at_3.unsolved, at_3.tokens) == (8, (), int(tokens["n"]))
        assert found.tokens < at_3.tokens
    assert lines_of(found)[-2].endswith('2 of 7 training tasks never earned anything: "Q1?", "Q2?"')


@pytest.mark.parametrize("only_long", [True, False])
def test_trained_episodes_are_compared_with_all_that_were_sampled(
    tmp_path: Path, only_long: bool
) -> None:
    """Half of the tasks is solved by each attempt, in few words: they train nothing."""

    def says(task: int, attempt: int) -> Attempt:
        if task % 2:
            return Attempt(1.0, "short")
        return Attempt(float(attempt % 2), "long " * (20 if only_long else 1))

    path = write(tmp_path / "trace.duckdb", [says, says, says])
    with open_trace(path) as reader:
        calls = reader.query("SELECT call_id, len(output_ids) AS tokens FROM calls").to_pylist()
    tokens = {call["call_id"]: call["tokens"] for call in calls}
    with TraceWriter(path) as writer:
        for step, task, attempt in np.ndindex(3, TASKS, ATTEMPTS):
            episode = f"train{step + 1}-{task}-{attempt}"
            entry: dict[str, Any] = {
                "run_id": "run",
                "episode_id": episode,
                "call_id": f"{episode}c",
                "step": step + 1,
            }
            if task % 2:
                writer.put(LedgerEntry(**entry, outcome="zero_advantage", tokens=9))
            else:  # the beginning alone is trained, and still the episode is
                size = tokens[f"{episode}c"]
                writer.put(LedgerEntry(**entry, outcome="trained", tokens=2))
                writer.put(LedgerEntry(**entry, outcome="truncated", tokens=size - 2))
    with open_trace(path) as reader:
        explanation = explain(reader, "run", 2)
    found = explanation.selection
    assert found is not None
    assert (found.sampled, found.trained, found.left_out) == (64, 32, {"zero_advantage": 32})
    measures = {measure.name: measure for measure in found.measures}
    trained = tokens["train1-0-0c"]
    assert measures["tokens"].trained == trained
    assert measures["tokens"].sampled == (trained + tokens["train1-1-0c"]) / 2
    assert measures["tokens"].differs == only_long
    assert measures["reward of the group"].differs
    assert measures["reward of the group"].trained == 0.5
    assert measures["reward of the group"].sampled == 0.75
    assert not measures["seconds"].differs
    told = [line for line in lines_of(explanation) if "trained episodes differ" in line]
    assert ["tokens" in line for line in told] == [only_long]


def test_processor_time_up_to_the_step_is_beside_the_tokens(tmp_path: Path) -> None:
    spent = [{"time/cpu": 60.0}, {"time/cpu": 40.0}, {"time/cpu": 5.0}]
    path = write(tmp_path / "trace.duckdb", [varied, varied, varied], spent)
    with open_trace(path) as reader:
        assert [explain(reader, "run", step).cpu_seconds for step in (2, 3)] == [100.0, 105.0]


def test_a_judge_or_an_agent_whose_file_was_edited_is_told_of_two_runs(tmp_path: Path) -> None:
    """The replies and rewards are equal, so that only the recorded code can tell."""
    code = {
        "judge": {"name": "judge:exact", "source": "a1"},
        "workflow": {"name": "agent:solve", "source": "b1"},
    }
    others = {
        "edited": {**code, "judge": {"name": "judge:exact", "source": "a2"}},
        "other": {**code, "judge": {"name": "judge:near", "source": "a1"}},
        "same": code,
    }
    texts = {}
    before = write(tmp_path / "a.duckdb", [varied], code=code)
    for name, edited in others.items():
        after = write(tmp_path / f"{name}.duckdb", [varied], code=edited)
        with open_trace(before) as one, open_trace(after) as two:
            changes = diff_runs((one, "run"), (two, "run")).changes
        texts[name] = [change.text for change in changes if change.kind == "setup"]
    assert texts["same"] == []
    assert len(texts["edited"]) == 1 and "judge:exact" in texts["edited"][0]
    assert len(texts["other"]) == 1 and "judge:near" in texts["other"][0]


def test_a_run_records_its_code_and_the_section_of_a_judge_that_was_named(tmp_path: Path) -> None:
    file = tmp_path / "judging.py"
    file.write_text("def exact(output, answer):\n    return float(output == answer)\n")
    (tmp_path / "replies.py").write_text("def reply(ask):\n    return 'four'\n")
    (tmp_path / "tasks.jsonl").write_text('{"question": "2 + 2?", "answer": "four"}\n')
    digests = []
    for name in ("one", "two"):
        options = ["--judge", f"{file}:exact", "--tasks", str(tmp_path / "tasks.jsonl")]
        options += ["--model", f"{tmp_path}/replies.py:reply", "--exp-dir", str(tmp_path)]
        agent = f"{Path(__file__).with_name('echo_agent.py')}:answer"
        done = CliRunner().invoke(app, ["run", agent, *options, f"ajet.experiment_name={name}"])
        assert done.exit_code == 0, done.output
        with open_trace(tmp_path / name) as reader:
            [row] = reader.query("SELECT config FROM runs").to_pylist()
        config = json.loads(row["config"])
        assert config["ajet"]["task_judge"]["judge_protocol"].endswith("judging.py:exact")
        digests.append({part: code["source"] for part, code in config["code"].items()})
        file.write_text(file.read_text() + "# edited\n")
    assert digests[0]["workflow"] == digests[1]["workflow"]
    assert digests[0]["judge"] != digests[1]["judge"]


def test_two_steps_of_a_run_are_compared(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.duckdb",
        [varied, varied, lambda t, a: Attempt(0.0, f"Answer {t} .", finish="length")],
    )
    done = CliRunner().invoke(app, ["trace", "compare", "run@1", "run@last", str(path), "--json"])
    found = json.loads(done.stdout)
    assert (found["a"]["step"], found["b"]["step"], found["a"]["reward"], found["b"]["reward"]) == (
        1,
        3,
        0.5,
        0.0,
    )
    assert found["test"]["mean"] == -0.5 and found["config"] == []
    assert {change["kind"] for change in found["changes"]} == {"task", "cut"}
    shown = CliRunner().invoke(app, ["trace", "compare", "@1", "@3", str(path)]).stdout
    assert "train1-0-1 (reward 1, step 1) and train3-0-0 (reward 0, step 3) part at token" in shown
    assert "replies per episode that end at the maximum length: 0 → 1" in shown
    listed = CliRunner().invoke(
        app, ["trace", "ls", str(path), "-f", "step=last_step and reward=0", "--json"]
    )
    assert json.loads(listed.stdout)["count"] == 32
    wrong = CliRunner().invoke(app, ["trace", "compare", "run@1", "run@7", str(path)])
    assert (
        wrong.exit_code == 2
        and "no finished episode at step 7 to compare; it has steps 1, 2, 3" in wrong.stderr
    )


def test_steps_of_different_kinds_are_refused_with_what_each_kind_has(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.duckdb", [varied, varied], decoding="sampled")
    write(path, [lambda t, a: Attempt()], split="val", decoding="sampled")
    with TraceWriter(path) as writer:
        writer.put(
            *(
                Episode(
                    episode_id=f"greedy{step}",
                    run_id="run",
                    step=step,
                    split="val",
                    decoding="greedy",
                    task=Task(task_id="t0"),
                    rewards=(Reward(value=1.0),),
                )
                for step in (1, 3)
            )
        )
    done = CliRunner().invoke(
        app, ["trace", "compare", "run@1", "run@2", str(path), "--split", "val"]
    )
    assert done.exit_code == 2 and done.stderr.strip().endswith(
        "nothing of one kind on both sides: run run has train sampled at steps 1, 2; val greedy at"
        " steps 1, 3; val sampled at steps 1"
    )


def test_a_run_of_one_step_has_nothing_to_compare(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.duckdb", [varied])
    with open_trace(path) as reader, pytest.raises(QueryError, match="no two steps with rewards"):
        explain(reader, "run")


def trained(place: Path, says: Says, **trainer: Any) -> Path:
    """A training of the smallest model whose episodes answer and earn what `says` of their step
    tells them."""
    begun: dict[str, int] = {}

    @ajet.workflow
    async def agent(question: str, model: ajet.Model) -> ajet.WorkflowOutput:
        attempt = begun[question] = begun.get(question, -1) + 1
        said = await model.chat([{"role": "user", "content": question}])
        does = says(attempt // 4, attempt % 4)
        text = does.says or (said["content"] or "")
        rewards = [ajet.Reward(value=does.reward or 0.0)]
        if does.held_out is not None:
            rewards.append(ajet.Reward(name="strict", value=does.held_out, weight=0.0))
        return ajet.WorkflowOutput(metadata={"output": text}, reward=rewards)

    model = save_tiny(place / "model")
    config = job(place / "run", model, data={"train_batch_size": 4},
                 val_before_train=False, test_freq=10, save_freq=10, **trainer)  # fmt: skip
    train(config, workflow=agent)
    return config.directory / "trace.duckdb"


@pytest.mark.slow
def test_a_training_that_collapses(tmp_path: Path) -> None:
    path = trained(tmp_path, lambda step, a: Attempt(float(a % 2) if step == 0 else 0.0, ""))
    with open_trace(path) as reader:
        [run] = reader.query("SELECT run_id FROM runs").to_pylist()
        found = explain(reader, run["run_id"], trace=path)
    assert (found.step, found.chosen) == (
        2,
        "largest change of the mean reward in training: 0.5 → 0",
    )
    kinds = by_kind(found.changes)
    assert kinds["update"][0].startswith("the update in between is that of step 1: learning rate")
    assert kinds["signal"] == [
        "4 of 4 groups gave every attempt the same reward and trained nothing (4 of reward 0); 0 of"
        " 4 before"
    ]
    assert (
        "of 4 tasks attempted before (step 1), 4 fell and 0 rose: mean change -0.5"
        in kinds["tasks"][0]
    )
    assert len(kinds["task"]) == 3 and all(
        "part at" in text or "the same to the end" in text for text in kinds["task"]
    )


@pytest.mark.slow
def test_a_training_that_games_its_judge(tmp_path: Path) -> None:
    def says(step: int, a: int) -> Attempt:
        return (
            Attempt(1.0, "Certainly correct.", held_out=0.0)
            if step
            else Attempt(a / 8, "", held_out=float(a > 0))
        )

    path = trained(tmp_path, says)
    ids = CliRunner().invoke(app, ["trace", "explain", str(path), "--json"])
    findings = json.loads(ids.stdout)["changes"][0]["findings"]
    [held_out] = [finding for finding in findings if finding["kind"] == "suspect"]
    assert "the held-out judge strict (weight 0) went from 0.75 to 0" in held_out["text"]
    shown = CliRunner().invoke(app, ["trace", "show", held_out["episodes"][0][:12], str(path)])
    assert shown.exit_code == 0 and "Certainly correct." in shown.stdout


def test_two_steps_of_a_run_are_compared_by_their_requests(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.duckdb",
        [
            lambda t, a: replace(varied(t, a), tools=("search",)),
            lambda t, a: replace(varied(t, a), tools=("lookup",)),
        ],
    )
    with open_trace(path) as reader:
        found = diff_runs((reader, "run"), (reader, "run"), steps=(1, 2))
    assert found.changes[0].kind == "setup" and "lookup" in found.changes[0].text
