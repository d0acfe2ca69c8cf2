"""Wrong answers of a training service end in an error that names it, and never in training on
them."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ajet_sdk.engines.tinker.answers import WrongAnswer, check_agreement, check_logprobs
from ajet_sdk.engines.tinker.sdk import SdkWeights, _Warnings
from ajet_sdk.engines.tinker.service import wait
from ajet_sdk.errors import EngineUnavailable, TrainingError
from ajet_tools.trace.compare.gap import gap_message

SERVICE = "https://wrong.example"


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


VARIED = floats(*(-0.1 * i for i in range(20)))


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        ([floats(-1.0)], [1, 1]),
        ([floats(-1.0), floats(-1.0)], [1]),
        ([floats(-1.0, -2.0)], [1]),
        ([floats(-1.0)], [2]),
        ([floats()], [2]),
        ([np.zeros((2, 2), np.float32)], [4]),
        ([floats(-1.0, float("nan"))], [2]),
        ([floats(-1.0, float("-inf"))], [2]),
        ([floats(-1.0, 0.5)], [2]),
        ([floats(*[-0.5] * 20)], [20]),
        ([floats(*[-0.5] * 10), floats(*[-0.5] * 10)], [10, 10]),
    ],
    ids=str,
)
def test_wrong_log_probabilities_name_the_service(values: list[Any], sizes: list[int]) -> None:
    with pytest.raises(WrongAnswer, match=SERVICE):
        check_logprobs(SERVICE, "forward", values, sizes)


def test_right_log_probabilities_pass() -> None:
    check_logprobs(SERVICE, "forward", [], [])
    check_logprobs(SERVICE, "forward", [VARIED, floats(*[-0.5] * 15)], [20, 15])
    check_logprobs(SERVICE, "forward", [floats(*[0.0] * 40)], [40])
    check_logprobs(SERVICE, "forward", [floats(1e-6, -1e-6)], [2])


def test_a_sampler_and_a_trainer_that_disagree_are_named() -> None:
    check_agreement(SERVICE, VARIED, VARIED + 0.05)
    check_agreement(SERVICE, floats(), floats())
    with pytest.raises(WrongAnswer, match=SERVICE):
        check_agreement(SERVICE, VARIED, VARIED - 5)


class Session:
    name, stall, reason = SERVICE, 1.0, ""
    tinker = SimpleNamespace(
        ModelInput=SimpleNamespace(from_ints=lambda ids: ids), SamplingParams=lambda **given: given
    )

    def describe(self, action: str, error: Exception) -> str:
        return f"{self.name} failed at {action}: {error}"


def answered(**sequence: Any) -> list[Any]:
    parts = {"tokens": [5, 6], "logprobs": [-1.0, -0.5], "stop_reason": "stop", **sequence}
    answer = SimpleNamespace(sequences=[SimpleNamespace(**parts)])
    future: Future[Any] = Future()
    future.set_result(answer)
    client: Any = SimpleNamespace(sample=lambda *_: future)
    weights = SdkWeights(Session(), client)  # type: ignore[arg-type]
    asked: dict[str, Any] = {
        "max_tokens": 30,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "seed": 1,
        "stop": [],
    }
    return asyncio.run(weights.sample([1, 2], 1, **asked, vocabulary=100))


@pytest.mark.parametrize(
    "sequence",
    [
        {"tokens": [5, 100]},
        {"tokens": [5, 10**9]},
        {"tokens": [-1, 5]},
        {"tokens": list(range(31)), "logprobs": [-0.1 * i for i in range(31)]},
        {"logprobs": None},
        {"logprobs": [-1.0]},
        {"logprobs": [-1.0, None]},
        {"logprobs": [-1.0, 0.5]},
        {"logprobs": [-1.0, float("nan")]},
        {"tokens": list(range(20)), "logprobs": [-0.5] * 20},
    ],
    ids=str,
)
def test_a_wrong_sample_is_a_fault_of_the_service(sequence: dict[str, Any]) -> None:
    with pytest.raises(EngineUnavailable, match=SERVICE):
        answered(**sequence)


def test_a_right_sample_passes() -> None:
    [reply] = answered()
    assert reply.output_ids == [5, 6] and reply.logprobs == [-1.0, -0.5] and reply.stopped
    [greedy] = answered(tokens=list(range(20)), logprobs=[0.0] * 20)
    assert len(greedy.output_ids) == 20


def test_a_service_that_does_not_answer_is_named_with_what_its_sdk_says() -> None:
    warnings = _Warnings()
    warnings.emit(
        logging.LogRecord(
            "tinker", logging.WARNING, "", 0, "paused due to billing status", None, None
        )
    )
    service = SimpleNamespace(name=SERVICE, reason=f": {warnings.newest}")
    with pytest.raises(TrainingError) as caught:
        wait(Future(), 0.01, "forward", service)
    assert SERVICE in str(caught.value) and "billing" in str(caught.value)


def test_a_gap_at_a_service_is_not_blamed_on_settings() -> None:
    parts = {"numerics": (50.0, 10), "turn 1": (50.0, 10)}
    assert "model.dtype" in gap_message(parts)
    assert "model.dtype" not in gap_message(parts, SERVICE) and SERVICE in gap_message(
        parts, SERVICE
    )
