"""Stored conversations through other tokenizers and templates: predicted merging, splits, refusals, lengths."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

import ajet
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.engines.retokenize import retokenise
from ajet_sdk.engines.scripted import TEMPLATE, ByteTokenizer, ScriptedEngine
from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Ask
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.samples.timelines import merge
from ajet_sdk.trace.reader import episodes, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, LedgerEntry, Run, Task
from ajet_tools.trace.rerun.preflight import LoadedTokenizer, Preflight, load_tokenizer, preflight
from ajet_tools.trace.rerun.remerge import Policy, policy_of, remerge

SETTINGS: Config = load_config(values={"ajet": {"backbone": "debug"}})
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "calc", "arguments": '{"e": "1+1"}'}}

FORGETFUL = TEMPLATE.replace("{%- if message.reasoning_content %}", "{%- if message.reasoning_content and loop.last %}")
STRICT = "{%- if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}" + TEMPLATE


class Other(ByteTokenizer):
    """The scripted engine's tokenizer with another template, or with ids that are another tokenizer's."""

    def __init__(self, template: str | None, shift: int = 0) -> None:
        self.chat_template = template
        self.shift = shift
        self.eos_ids = frozenset(i + shift for i in ByteTokenizer.eos_ids)

    def encode(self, text: str) -> list[int]:
        return [i + self.shift for i in super().encode(text)]

    def decode(self, ids: Any) -> str:
        return super().decode([max(0, i - self.shift) for i in ids])

    def is_special(self, token_id: int) -> bool:
        return super().is_special(token_id - self.shift)


@ajet.workflow
async def agent(task: Task, model: ajet.Model) -> str:
    """Three turns: one that thinks, one that calls a tool, and the answer."""
    history: list[dict[str, Any]] = [
        {"role": "system", "content": "Think first."},
        {"role": "user", "content": task.main_query},
    ]
    for following in ({"role": "user", "content": "go on"}, {"role": "tool", "tool_call_id": "1", "content": "2"}):
        history += [dict(await model.chat(history, tools=[TOOL])), following]
    return str((await model.chat(history, tools=[TOOL]))["content"])


@ajet.judge
def graded(episode: Episode) -> float:
    return float(episode.attempt)


def replies(ask: Ask) -> Any:
    last = ask.body["messages"][-1]
    if last["role"] == "tool":
        return "It is 2."
    if last["content"] == "go on":
        return {"role": "assistant", "content": "", "tool_calls": [CALL]}
    return {"role": "assistant", "content": "One moment.", "reasoning_content": "one and one"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Episode]]:
    """Two steps of two tasks of two attempts, as `local` would book them."""
    path = tmp_path_factory.mktemp("run")
    settings = SETTINGS.model_copy(update={"backbone": "local"})
    attempts = [
        Attempt(Task(main_query=f"q{task}"), "r", f"g{step}{task}", attempt, step)
        for step in (1, 2)
        for task in (0, 1)
        for attempt in (0, 1)
    ]

    async def go() -> list[Episode]:
        with TraceWriter(path / "trace.duckdb") as writer, Gateway(writer) as gateway:
            config = {"ajet": settings.model_dump(mode="json")}
            writer.put(Run(run_id="r", backbone="local", config=config, status="finished"))
            found = await run_batch(
                agent, graded, attempts, engine=ScriptedEngine(replies), gateway=gateway, config=SETTINGS, writer=writer
            )
            for e in found:
                for call in e.calls:
                    assert call.output_ids is not None
                    at = {"run_id": "r", "step": e.step, "episode_id": e.episode_id, "call_id": call.call_id}
                    writer.put(LedgerEntry(**at, outcome="trained", tokens=len(call.output_ids)))
            return found

    asyncio.run(go())
    return path, episodes(open_trace(path), "r")


def fly(stored: list[Episode], tokenizer: Any, limit: int | None = None) -> Preflight:
    return preflight([stored], LoadedTokenizer(tokenizer, limit))


def test_with_the_run_s_own_tokenizer_the_prediction_is_what_was_recorded(
    recorded: tuple[Path, list[Episode]],
) -> None:
    found = fly(recorded[1], ByteTokenizer())
    assert found.own_ids == found.predicted.calls == 24 and found.episodes == 8
    assert found.predicted == found.recorded and found.predicted.timelines == 8 and found.kinds == {}
    for episode in recorded[1]:
        for was, now in zip(episode.calls, retokenise(episode.calls, ByteTokenizer()).calls, strict=True):
            assert was.prompt_ids is not None and now.prompt_ids is not None
            assert was.prompt_ids.tolist() == now.prompt_ids.tolist()


def test_replies_of_another_tokenizer_are_encoded_as_the_template_writes_them(
    recorded: tuple[Path, list[Episode]],
) -> None:
    found = fly(recorded[1], Other(TEMPLATE, shift=1000))
    assert found.own_ids == 0 and found.predicted == found.recorded, "the same but for the ids"
    bare = [e.model_copy(update={"calls": tuple(map(without_ids, e.calls))}) for e in recorded[1]]
    found = fly(bare, ByteTokenizer())
    assert found.own_ids == 0 and found.recorded.ratio is None
    assert found.predicted.held == sum(len(t.token_ids) for e in recorded[1] for t in merge(e.calls).timelines)


def without_ids(call: Call) -> Call:
    return call.model_copy(update={"prompt_ids": None, "output_ids": None, "logprobs": None, "trainable": False})


def test_sampled_ids_that_no_text_would_give_are_kept() -> None:
    """A reply that spells a special token letter by letter: rendered and encoded again, it would come out otherwise."""
    tokenizer, at = ByteTokenizer(), datetime(2026, 1, 1, tzinfo=timezone.utc)
    asked: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    reply = {"role": "assistant", "content": "say <think> aloud"}
    prompt = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    longer = [*asked, reply, {"role": "user", "content": "more"}]
    sampled = [*b"say <think> aloud", *tokenizer.eos_ids]
    assert sampled != tokenizer.encode("say <think> aloud<|im_end|>")
    calls = [
        Call(
            episode_id="e",
            request={"messages": messages},
            response={"choices": [{"message": said}]},
            prompt_ids=prompt,
            output_ids=ids,
            started_at=at + timedelta(seconds=2 * turn),
            ended_at=at + timedelta(seconds=2 * turn + 1),
        )
        for turn, (messages, said, ids) in enumerate(
            [
                (asked, reply, sampled),
                (longer, {"role": "assistant", "content": "ok"}, [111, 107]),
            ]
        )
    ]
    made = retokenise(calls, tokenizer)
    assert made.own_ids == 2 and made.calls[1].prompt_ids is not None
    assert made.calls[1].prompt_ids.tolist()[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    assert fly([Episode(calls=tuple(calls))], tokenizer).predicted.timelines == 1


def test_a_template_that_forgets_reasoning_splits_and_says_what_it_costs(
    recorded: tuple[Path, list[Episode]],
) -> None:
    found = fly(recorded[1], Other(FORGETFUL))
    [kind] = found.by_cost
    assert kind.cause == "think_stripped" and kind.splits == 8 and "send `reasoning_content` back" in kind.hint
    assert found.predicted.timelines == 16 and found.extra_tokens == kind.extra_tokens > 0
    assert found.predicted.ratio is not None and found.recorded.ratio is not None
    assert found.predicted.ratio < found.recorded.ratio
    example = kind.example
    assert example is not None and "<think>one and one</think>" in example.before
    assert "<think>" not in example.after and "One moment." in example.after
    call = next(c for e in recorded[1] for c in e.calls if c.call_id == example.call_id)
    assert call.episode_id == example.episode_id and call.request["messages"][-1]["content"] == "go on"


def test_refusals_by_cause(recorded: tuple[Path, list[Episode]]) -> None:
    found = fly(recorded[1], Other(STRICT))
    [(why, refusals)] = found.refused.items()
    assert "no system role here" in why and len(refusals) == 24 and refusals[0].call_id
    assert found.predicted.calls == 0 and found.predicted.ratio is None and found.quantiles() == {}
    picture = Call(
        episode_id="e",
        request={"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        response={"choices": [{"message": {"role": "assistant", "content": "a cat"}}]},
    )
    found = fly([Episode(calls=(picture,))], ByteTokenizer())
    assert list(found.refused) == ["a message contains a part of type 'image_url'; only text is supported"]


def test_lengths_against_the_limit(recorded: tuple[Path, list[Episode]]) -> None:
    found = fly(recorded[1], ByteTokenizer(), limit=200)
    prompts = sorted(len(c.prompt_ids) for e in recorded[1] for c in e.calls if c.prompt_ids is not None)
    wholes = [len(c.prompt_ids) + len(c.output_ids) for e in recorded[1] for c in e.calls
              if c.prompt_ids is not None and c.output_ids is not None]  # fmt: skip
    assert found.quantiles()["max"] == prompts[-1] and found.quantiles()["median"] in prompts
    for limit in (200, prompts[0], prompts[-1], 10_000):
        assert found.too_long(limit) == (sum(n >= limit for n in prompts), sum(n > limit for n in wholes))
    assert found.too_long() == found.too_long(200)
    assert fly(recorded[1], ByteTokenizer()).too_long() == (0, 0)


def test_other_dialects_and_calls_without_a_reply_are_left_out() -> None:
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    said = {"choices": [{"message": {"role": "assistant", "content": "ho"}}]}
    calls = (
        Call(
            episode_id="e", request={**messages, "system": "x"}, response={"content": [{"type": "text", "text": "a"}]}
        ),
        Call(episode_id="e", request={"input": "hi"}, response={"output": "x"}),
        Call(episode_id="e", request=messages, error="HTTP 500"),
        Call(episode_id="e", request=messages, response=said),
        Call(episode_id="e", request={"prompt": "once"}, response={"choices": [{"text": " upon"}]}),
        Call(episode_id="e", request=messages, response=said, phase="judge"),
    )
    found = fly([Episode(calls=calls)], ByteTokenizer())
    assert (found.foreign, found.predicted.calls, found.refused) == (3, 2, {})


def test_tokenizers_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nor a model in the Hugging Face cache, and nothing is downloaded"):
        load_tokenizer("no-such-org/no-such-model")
    with pytest.raises(ConfigError, match="neither a local directory"):
        load_tokenizer("not a name at all: *")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="no chat template"):
        fly([Episode(calls=(Call(episode_id="e", request={"messages": []}),))], Other(None))


def _templates() -> list[Path]:
    found = importlib.util.find_spec("trl")
    return sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja")) if found and found.origin else []


@pytest.mark.parametrize("path", _templates(), ids=lambda path: path.stem)
def test_published_templates_account_for_every_call(path: Path, recorded: tuple[Path, list[Episode]]) -> None:
    found = fly(recorded[1], Other(path.read_text(encoding="utf-8")))
    refused = sum(len(refusals) for refusals in found.refused.values())
    assert found.predicted.calls + refused + found.foreign == 24
    if found.predicted.calls:
        assert found.predicted.held > 0 and found.predicted.timelines >= 1
        assert found.predicted.timelines - 8 <= sum(kind.splits for kind in found.kinds.values())
    assert all(kind.cause and kind.hint for kind in found.kinds.values())


# remerge, over the same run


def test_the_run_s_own_policy_gives_what_it_booked(recorded: tuple[Path, list[Episode]]) -> None:
    reader, steps = open_trace(recorded[0]), list[int]()
    own = policy_of(SETTINGS)
    found = remerge(reader, "r", own, own, decode=ByteTokenizer().decode, progress=steps.append)
    assert not found.untrained and steps == [1, 1]
    assert found.booked == dict(found.own.outcomes) == dict(found.other.outcomes)
    assert found.own.samples == 8 and found.own == found.other and found.as_booked


def test_another_estimator_and_length(recorded: tuple[Path, list[Episode]]) -> None:
    reader, own = open_trace(recorded[0]), policy_of(SETTINGS)
    rloo = remerge(reader, "r", own, replace(own, estimator="rloo")).other
    assert rloo.mean_advantage == pytest.approx(1.0), "rewards 0 and 1: each against the other"
    plain = remerge(reader, "r", own, replace(own, normalize_std=False)).other
    assert plain.mean_advantage == pytest.approx(0.5)
    short = remerge(reader, "r", own, replace(own, max_tokens=260))
    assert short.other.outcomes["truncated"] > 0
    assert short.other.outcomes.total() == short.own.outcomes.total(), "every sampled token is accounted for"


def test_another_tokenizer_s_template_changes_samples_and_splits(recorded: tuple[Path, list[Episode]]) -> None:
    reader, own = open_trace(recorded[0]), policy_of(SETTINGS)
    found = remerge(reader, "r", own, own, tokenizer=Other(FORGETFUL))
    assert found.own.samples == 8 and found.other.samples == 16
    assert found.other.splits == {"think_stripped": 8} and found.other.extra_tokens > 0
    assert found.other.trained == found.own.trained and (found.refused, found.foreign) == (0, 0)
    assert remerge(reader, "r", own, own, tokenizer=Other(STRICT)).refused == 24


def test_a_reward_for_failures(tmp_path: Path) -> None:
    @ajet.workflow
    async def fragile(model: ajet.Model, episode: Episode) -> str:
        await model.chat([{"role": "user", "content": "x"}])
        if episode.attempt == 0:
            raise RuntimeError("on purpose")
        return "fine"

    async def go() -> None:
        with TraceWriter(tmp_path / "trace.duckdb") as writer, Gateway(writer) as gateway:
            writer.put(Run(run_id="r", status="finished"))
            attempts = [Attempt(Task(main_query="q"), "r", "g", i, 1) for i in (0, 1)]
            engine = ScriptedEngine(["said"])
            for e in await run_batch(
                fragile, graded, attempts, engine=engine, gateway=gateway, config=SETTINGS, writer=writer
            ):
                at = {"run_id": "r", "step": 1, "episode_id": e.episode_id, "call_id": e.calls[0].call_id}
                outcome: Any = "zero_advantage" if e.attempt else "failed"
                writer.put(LedgerEntry(**at, outcome=outcome, tokens=5))

    asyncio.run(go())
    own = Policy()
    found = remerge(open_trace(tmp_path), "r", own, replace(own, failure_reward=0.0))
    assert dict(found.own.outcomes) == found.booked == {"failed": 5, "zero_advantage": 5}
    assert dict(found.other.outcomes) == {"trained": 10}


def test_what_is_json_stays_json(recorded: tuple[Path, list[Episode]]) -> None:
    from dataclasses import asdict

    kinds = [asdict(kind) for kind in fly(recorded[1], Other(FORGETFUL)).by_cost]
    assert kinds and json.loads(json.dumps(kinds)) == [
        {name: list(value) if isinstance(value, tuple) else value for name, value in kind.items()} for kind in kinds
    ]
