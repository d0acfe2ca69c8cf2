"""On-policy distillation: what a teacher says of sampled tokens, over both doors, and where it
moves the student."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM

from ajet_sdk.config.config import load_config
from ajet_sdk.engines.http import Endpoint
from ajet_sdk.errors import ConfigError, EngineError
from ajet_sdk.learn.batches import collate
from ajet_sdk.learn.losses import loss_of, score
from ajet_sdk.learn.objective import LossSettings
from ajet_sdk.learn.teacher import LocalTeacher, RemoteTeacher, distill, open_teacher
from ajet_sdk.run import train
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.types import Sample, Timeline
from ajet_tools.trace.files.check import check
from tests.sdk.learn.test_loss import tiny
from tests.sdk.test_local_backbone import job as local_job
from tests.sdk.test_local_backbone import outcomes, talk
from tests.serving import completing, serving


@pytest.fixture(scope="module")
def teacher_model(tiny_model: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    return model


def sample(ids: list[int], learnt: list[int], logprob: float = -2.0) -> Sample:
    mask = np.isin(np.arange(len(ids)), learnt)
    line = Timeline(
        agent="default",
        token_ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, logprob, 0.0),
        call_ids=(),
    )
    return Sample(
        timeline=line, episode_id="e", group_id="g", reward=0.0, advantages=mask.astype(np.float32)
    )


SAMPLES = [sample([260, 261, 90, 91, 92, 93], [3, 5]), sample([260, 100, 101], [1, 2])]


def by_hand(model: Any, one: Sample) -> list[float]:
    ids = one.timeline.token_ids.tolist()
    logprobs_TV = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
    return [logprobs_TV[t - 1, ids[t]].item() for t in np.flatnonzero(one.timeline.loss_mask)]


def endpoint_of(model: Any, tokenizer: HFTokenizer, *, shift: int = 0) -> Starlette:
    """vLLM's completions route with `prompt_logprobs`, of a model here; with `shift` in other
    words."""

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "big"}]})

    async def completions(request: Request) -> JSONResponse:
        body = await request.json()
        ids = body["prompt"]
        assert (body["model"], body["max_tokens"], body["prompt_logprobs"]) == ("big", 1, 0)
        logprobs_TV = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
        entries: list[Any] = [None]
        for t in range(1, len(ids)):
            said = tokenizer.decode([ids[t] + shift])
            entries.append(
                {str(ids[t]): {"logprob": logprobs_TV[t - 1, ids[t]].item(), "decoded_token": said}}
            )
        return JSONResponse({"choices": [{"index": 0, "text": "", "prompt_logprobs": entries}]})

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/completions", completions, methods=["POST"]),
        ]
    )


async def asked(url: str, tokenizer: HFTokenizer) -> list[Any]:
    teacher = RemoteTeacher(Endpoint(f"{url}/v1", "none", timeout=600, retries=0), tokenizer, None)
    try:
        return await teacher.logprobs(SAMPLES, {})
    finally:
        await teacher.aclose()


def test_a_teacher_says_the_same_in_this_process_and_at_an_endpoint(
    teacher_model: Any, tiny_model: Path
) -> None:
    tokenizer = HFTokenizer(tiny_model)
    local = asyncio.run(
        LocalTeacher(teacher_model, 1, tokenizer, teacher_model).logprobs(SAMPLES, {})
    )
    elsewhere = asyncio.run(LocalTeacher(teacher_model, 1, tokenizer, None).logprobs(SAMPLES, {}))
    for here, there in zip(local, elsewhere, strict=True):
        np.testing.assert_array_equal(here, there, "a service has the student")
    with serving(endpoint_of(teacher_model, tokenizer)) as url:
        remote = asyncio.run(asked(url, tokenizer))
    for one, here, there in zip(SAMPLES, local, remote, strict=True):
        assert here.tolist() == pytest.approx(by_hand(teacher_model, one), abs=1e-5)
        assert there.tolist() == pytest.approx(here.tolist(), abs=1e-5)


def test_another_tokenizer_is_refused(teacher_model: Any, tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = HFTokenizer(tiny_model)
    with (
        serving(endpoint_of(teacher_model, tokenizer, shift=1)) as url,
        pytest.raises(ConfigError, match="has another tokenizer than the trained model: the token"),
    ):
        asyncio.run(asked(url, tokenizer))
    other = HFTokenizer(tiny_model).hf
    other.add_tokens(["oui"])
    other.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has another tokenizer"):
        opened(str(tmp_path), tokenizer)


def opened(teacher: str, tokenizer: HFTokenizer) -> Any:
    algorithm = {"adv_estimator": "opd", "teacher": teacher, "teacher_model": "big"}
    values = {"trainer_common": {"algorithm": algorithm}, "rollout": {"temperature": 1.0}}
    return asyncio.run(open_teacher(load_config(values=values), tokenizer, None))


def test_what_cannot_be_a_teacher_is_refused_before_training(tiny_model: Path) -> None:
    with (
        completing(lambda request: 400) as (url, _),
        pytest.raises(
            ConfigError, match=r"refused token ids with prompt_logprobs \(refused.*such as vLLM's"
        ),
    ):
        opened(url, HFTokenizer(tiny_model))
    with pytest.raises(ConfigError, match="there is no checkpoint nobody@latest"):
        opened("nobody@latest", HFTokenizer(tiny_model))


def test_an_endpoint_without_prompt_logprobs_says_so(tiny_model: Path) -> None:
    async def completions(_: Request) -> JSONResponse:
        return JSONResponse({"choices": [{"text": "yes"}]})

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "big"}]})

    routes = [Route("/v1/models", models), Route("/v1/completions", completions, methods=["POST"])]
    with (
        serving(Starlette(routes=routes)) as url,
        pytest.raises(ConfigError, match="returns no prompt_logprobs"),
    ):
        asyncio.run(asked(url, HFTokenizer(tiny_model)))


def test_a_tokens_advantage_is_how_much_likelier_the_teacher_finds_it(teacher_model: Any) -> None:
    told, metrics = asyncio.run(
        distill(SAMPLES, LocalTeacher(teacher_model, 10**6, None, teacher_model), {})
    )
    expected = [[value + 2.0 for value in by_hand(teacher_model, one)] for one in SAMPLES]
    for one, advantages in zip(told, expected, strict=True):
        assert one.advantages[one.timeline.loss_mask].tolist() == pytest.approx(
            advantages, abs=1e-5
        )
        assert not one.advantages[~one.timeline.loss_mask].any()
    assert metrics["teacher_kl"] == pytest.approx(
        -np.mean([a for row in expected for a in row]), abs=1e-5
    )


def test_a_token_that_the_teacher_cannot_say_is_an_error() -> None:
    class Silent:
        async def logprobs(self, samples: Any, sampling: Any) -> Any:
            return [
                np.full(int(one.timeline.loss_mask.sum()), -np.inf, np.float32) for one in samples
            ]

        async def aclose(self) -> None: ...

    with pytest.raises(EngineError, match="is not finite"):
        asyncio.run(distill(SAMPLES, Silent(), {}))


def mean_gradient(student: Any, teacher: Any, prompt: list[int]) -> dict[str, torch.Tensor]:
    """Of the loss over every token that the student could say next, each weighed with its
    probability."""
    with torch.no_grad():
        logprobs_V = torch.log_softmax(student(input_ids=torch.tensor([prompt])).logits[0, -1], -1)
    samples = [
        sample([*prompt, x], [len(prompt)], logprobs_V[x].item()) for x in range(len(logprobs_V))
    ]
    told, _ = asyncio.run(distill(samples, LocalTeacher(teacher, 10**6, None, student), {}))
    batch = collate(told)
    loss_N, _ = loss_of(score(student, batch, entropy=False), batch, LossSettings())
    (loss_N * logprobs_V.exp()).sum().backward()
    return {name: parameter.grad for name, parameter in student.named_parameters()}


def test_on_average_the_student_moves_down_the_reverse_divergence() -> None:
    """The expectation of the sampled gradient is that of KL(student ‖ teacher), which takes the
    whole vocabulary."""
    student, teacher, prompt = tiny(1), tiny(0), [3, 5, 7]
    sampled = mean_gradient(student, teacher, prompt)
    exact = tiny(1)
    mine, theirs = (
        torch.log_softmax(m(input_ids=torch.tensor([prompt])).logits[0, -1], -1)
        for m in (exact, teacher)
    )
    (mine.exp() * (mine - theirs.detach())).sum().backward()
    for name, parameter in exact.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(sampled[name], parameter.grad, atol=1e-6), name


@pytest.mark.slow
def test_that_gradient_is_trls_of_the_reverse_divergence() -> None:
    """Beta 1 of TRL's generalised Jensen-Shannon divergence is KL(student ‖ teacher)."""
    gkd = pytest.importorskip("trl.experimental.gkd")
    student, teacher, prompt = tiny(1), tiny(0), [3, 5, 7]
    sampled = mean_gradient(student, teacher, prompt)
    exact = tiny(1)
    logits = [m(input_ids=torch.tensor([prompt])).logits[:, -1:] for m in (exact, teacher)]
    gkd.GKDTrainer.generalized_jsd_loss(
        logits[0], logits[1].detach(), beta=1.0, reduction="batchmean"
    ).backward()
    for name, parameter in exact.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(sampled[name], parameter.grad, atol=1e-6), name


@pytest.mark.slow
def test_a_student_learns_of_its_teacher_without_a_reward(
    tmp_path: Path, tiny_model: Path, teacher_model: Any
) -> None:
    """A run of two steps: no judge, every sampled token in the ledger, the teacher's word in the
    trace."""
    teacher = tmp_path / "teacher"
    teacher_model.save_pretrained(teacher)
    HFTokenizer(tiny_model).hf.save_pretrained(teacher)
    algorithm = {"adv_estimator": "opd", "teacher": str(teacher)}
    config = local_job(
        tmp_path, tiny_model, algorithm=algorithm, val_before_train=False, test_freq=0, save_freq=0
    )
    tuned = train(config, workflow=talk)
    assert set(outcomes(config)) == {"trained", "evaluation"}
    assert tuned.metrics["train/teacher_kl"] > 0
    assert "val/reward" not in tuned.metrics
    assert check(config.directory) == []


def test_opd_without_a_teacher_is_an_error() -> None:
    with pytest.raises(ConfigError, match="teacher is required for opd"):
        load_config(overrides=["ajet.trainer_common.algorithm=opd"])
