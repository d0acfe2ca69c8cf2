"""What goes to a worker process and what comes back, through bytes, without a cluster."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ajet
from ajet_sdk.agent.model import Model
from ajet_sdk.agent.workflow import AjetTuner, WorkflowTask
from ajet_sdk.config.config import load_config
from ajet_sdk.config.objects import load_object
from ajet_sdk.engines.scripted import ByteTokenizer, ScriptedEngine
from ajet_sdk.errors import ConfigError, ContextOverflow, EnvironmentUnavailable
from ajet_sdk.gateway.episode import EpisodeSpec
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.rollout.outcomes import describe_error
from ajet_sdk.rollout.remote_call import (
    ObjectStore,
    RemoteCall,
    dump_object,
    dump_outcome,
    dumps,
    loads,
)
from ajet_sdk.rollout.threads import Outcome
from ajet_sdk.types import Task
from tests.serving import answering, serving

AGENT = """
import threading
import ajet

LOCK = threading.Lock()  # cannot be pickled, as a client cannot

@ajet.workflow
def solve(question: str) -> str:
    with LOCK:
        return question.upper()

class Grader(ajet.BaseJudge):
    def compute_reward(self, task, output):
        return 1.0
"""


@pytest.fixture
def agent(tmp_path: Path) -> Any:
    (tmp_path / "agent_of_calls.py").write_text(AGENT)
    return lambda name: load_object(f"{tmp_path}/agent_of_calls.py->{name}")


def test_a_users_function_goes_by_file_and_name(agent: Any, tmp_path: Path) -> None:
    solve = agent("solve")
    data = dumps((solve, "x"))
    assert loads(data)[0] is solve
    assert str(tmp_path / "agent_of_calls.py").encode() in data


@pytest.mark.parametrize("inside", [False, True], ids=["by itself", "in its task"])
def test_a_fault_of_the_environment_comes_back_though_nobody_raised_it(inside: bool) -> None:
    def swallows(given: Any) -> float:
        with suppress(EnvironmentUnavailable):
            (given.gym_env if inside else given).step({"role": "assistant", "content": "1"})
        return 0.0

    with serving(answering({}, 500)) as url:
        env = ajet.GymEnv(url, "count", "0")
        call = RemoteCall(
            partial(swallows, WorkflowTask(task=Task(), gym_env=env) if inside else env),
            "w",
            9.0,
            None,
        )
        there = loads(dumps(call))
        reply = loads(dump_outcome(Outcome(there.function()), "w", there.environment))
    assert call.environment is env and env.fault is None
    assert (
        reply.value == 0.0
        and isinstance(reply.fault, EnvironmentUnavailable)
        and reply.fault.status == 500
    )


def test_a_function_made_inside_another_goes_by_value() -> None:
    times = 3

    def inner(text: str) -> str:
        return text * times

    assert loads(dumps(inner))("ab") == "ababab"


def test_a_lock_in_a_closure_cannot_go() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        dumps(lambda: lock)


def test_what_stays_the_same_goes_once(agent: Any) -> None:
    config = load_config(None, values={"ajet": {"rollout": {"num_repeat": 7}}, "mine": {"size": 3}})
    judge = agent("Grader")(config)
    kept = ObjectStore()
    first = dumps(
        (config, judge, WorkflowTask(task=ajet.Task(main_query="q"), tokenizer=ByteTokenizer())),
        kept,
    )
    assert len(kept.objects) == 3
    again = dumps((config, judge), kept)
    assert len(kept.objects) == 3
    there = {key: loads(dump_object(thing)) for key, thing in kept.objects.items()}
    config_there, judge_there, task = loads(first, there)
    assert loads(again, there) == (config_there, judge_there)
    assert config_there == config
    assert config_there.mine.size == 3
    assert type(judge_there) is agent("Grader")
    assert task.tokenizer.encode("hi") == ByteTokenizer().encode("hi")


def test_an_exception_comes_back_under_its_name_with_where_it_was_raised() -> None:
    class Odd(Exception):
        def __init__(self, one: int, *, two: Any) -> None:
            super().__init__(f"{one} and {two}")

    try:
        raise Odd(1, two=threading.Lock)
    except Odd as error:
        outcome = loads(dump_outcome(Outcome(error=error), "workflow w")).outcome()
        assert describe_error(outcome.error) == describe_error(error)
    assert type(outcome.error).__name__ == "Odd"
    assert "test_ray_remote_call.py" in describe_error(outcome.error)
    assert outcome.error.infrastructure is False


def test_an_exception_of_ajet_stays_itself() -> None:
    error = EnvironmentUnavailable("no answer")
    outcome = loads(dump_outcome(Outcome(error=error), "workflow w")).outcome()
    assert type(outcome.error) is EnvironmentUnavailable
    assert outcome.error.infrastructure


def test_a_value_that_cannot_travel_says_what_returned_it() -> None:
    outcome = loads(dump_outcome(Outcome(threading.Lock()), "workflow w")).outcome()
    assert isinstance(outcome.error, ConfigError)
    assert "workflow w returned lock" in str(outcome.error)


def test_a_handle_and_a_tuner_work_elsewhere() -> None:
    """The tuner that arrives asks the gateway for what it cannot see, and its model has the same
    address and key."""
    with Gateway() as gateway:
        opened = gateway.open(EpisodeSpec("e1", ScriptedEngine(["hi"])))
        targets = ["wolf"]
        config = load_config(None)
        made = AjetTuner(config, opened.model(), lambda: targets, lambda: False, lambda name: None)
        tuner: AjetTuner = loads(dumps(made))
        assert tuner.as_oai_baseurl_apikey("a", "wolf") == made.as_oai_baseurl_apikey("a", "wolf")
        with pytest.raises(ConfigError, match="wolf"):
            tuner.as_oai_baseurl_apikey("a", "sheep")
        assert tuner.get_context_tracker().context_overflow is False
        opened.fail(ContextOverflow("too long"))
        assert tuner.get_context_tracker().context_overflow is True
        handle = Model("http://h/v1", "k", "n", timeout=3.0)
        back = loads(dumps(handle))
        assert (back.base_url, back.api_key, back.name, back.timeout) == (
            "http://h/v1",
            "k",
            "n",
            3.0,
        )
