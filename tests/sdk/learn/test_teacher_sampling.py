"""A teacher scores tokens under the distribution that the student drew them from: its mask, bias,
penalties, limits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import ajet
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.errors import ConfigError
from ajet_sdk.learn.teacher import LocalTeacher, distill
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.protocols import Sampled, Sampling
from ajet_sdk.run import train
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.types import Sample
from tests.sdk.learn import test_processed as processed
from tests.sdk.learn import test_typed as typed
from tests.sdk.learn.test_teacher import endpoint_of
from tests.sdk.test_local_backbone import job as local_job
from tests.sdk.test_local_backbone import outcomes
from tests.serving import serving

ways = st.builds(
    replace,
    processed.ways,
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([-1, 3]),
)


def assert_no_gradient(
    policy: Any, tokenizer: Any, samples: list[Sample], how: dict[str, Sampling]
) -> None:
    """The student's own weights are the teacher."""
    teacher = LocalTeacher(policy, 10**6, tokenizer, policy)
    told, metrics = asyncio.run(distill(samples, teacher, how))
    assert abs(metrics["teacher_kl"]) < 1e-4
    assert max(np.abs(one.advantages).max() for one in told) < 1e-4
    trainer = Trainer(policy, TrainerSettings(lr=0.0, weight_decay=0.0), tokenizer)
    assert trainer.step(told, how)["grad_norm"] < 1e-3


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(ways)
def test_a_teacher_with_the_students_weights_gives_no_gradient_under_any_sampling(
    how: Sampling,
) -> None:
    [reply] = processed.sample(how)
    assert_no_gradient(
        processed.model(), processed.TOKENIZER, [processed.trained(how, reply)], {"c": how}
    )


@pytest.mark.slow
@settings(max_examples=2, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([0.0, 0.6, 1.0]), st.sampled_from([1.0, 0.9]))
def test_a_teacher_with_the_students_weights_gives_no_gradient_under_any_grammar(
    seed: int, temperature: float, top_p: float
) -> None:
    asks = [
        typed.ask(
            options, seed + i, temperature=temperature, top_p=top_p, presence_penalty=0.5 * (i % 2)
        )
        for i, options in enumerate(typed.OPTIONS.values())
    ]
    replies = typed.answers(*asks)
    how = {
        str(i): replace(one.sampling, grammar=answer.grammar)
        for i, (one, answer) in enumerate(zip(asks, replies, strict=True))
    }
    samples = [typed.trained(answer, str(i)) for i, answer in enumerate(replies)]
    assert_no_gradient(typed.model(), typed.TOKENIZER, samples, how)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(processed.ways)
def test_another_teacher_scores_by_the_same_definition(how: Sampling) -> None:
    """But for min_p, whose tokens are the student's."""
    how = replace(how, min_p=0.0)
    teacher = typed.model(seed=1)
    [reply] = processed.sample(how)
    sample = processed.trained(how, reply)
    [scored] = asyncio.run(
        LocalTeacher(teacher, 1, processed.TOKENIZER, processed.POLICY).logprobs(
            [sample], {"c": how}
        )
    )
    np.testing.assert_allclose(scored, processed.defined(how, reply, teacher), atol=1e-4)


def test_limits_leave_a_teacher_the_students_tokens() -> None:
    """A token that is in the student's nucleus and not in the teacher's has a finite
    probability."""
    how = Sampling(max_tokens=14, seed=4, top_k=2)
    replies: list[Sampled] = processed.sample(*(replace(how, seed=seed) for seed in range(8)))
    samples = [processed.trained(how, reply) for reply in replies]
    teacher = LocalTeacher(typed.model(seed=1), 10**6, processed.TOKENIZER, processed.POLICY)
    [scores] = [asyncio.run(teacher.logprobs(samples, {"c": how}))]
    assert -20 < np.concatenate(scores).min() < np.log(0.5), (
        "likelier under the student than one of two"
    )


@ajet.workflow
async def typed_talk(question: str, model: ajet.Model) -> str:
    """A free reply, a typed one and one with a bias."""
    messages = [{"role": "user", "content": question}]
    free = await model.chat(messages)
    await model.chat(messages, guided_choice=["yes", "no"])
    await model.chat(messages, logit_bias={"65": 5.0})
    return free["content"] or ""


def opd_job(folder: Path, model: Path, teacher: str) -> Config:
    algorithm = {"adv_estimator": "opd", "teacher": teacher}
    common = {"total_steps": 1, "val_before_train": False, "test_freq": 0, "save_freq": 0}
    return local_job(folder, model, algorithm=algorithm, **common)


@pytest.mark.slow
def test_a_run_whose_teacher_is_the_student_has_no_divergence(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = opd_job(tmp_path, tiny_model, str(tiny_model))
    tuned = train(config, workflow=typed_talk)
    assert abs(tuned.metrics["train/teacher_kl"]) < 1e-4 and tuned.metrics["train/grad_norm"] < 1e-3
    assert set(outcomes(config)) == {"trained", "evaluation"}


@pytest.mark.slow
def test_an_endpoint_scores_only_what_was_sampled_as_it_scores(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with serving(endpoint_of(model, HFTokenizer(tiny_model))) as url:
        config = opd_job(tmp_path, tiny_model, f"{url}/v1")
        tuned = train(config, workflow=typed_talk)
    assert abs(tuned.metrics["train/teacher_kl"]) < 1e-4
    assert set(outcomes(config)) == {"trained", "unmaskable", "evaluation"}
    told = " ".join(capsys.readouterr().out.split())
    assert (
        f"{outcomes(config)['unmaskable']} of " in told
        and "are not trained (outcome unmaskable)" in told
    )


@pytest.mark.parametrize(
    "rollout", [{}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 4}]
)
def test_an_endpoint_is_refused_where_no_call_is_sampled_as_it_scores(
    rollout: dict[str, Any],
) -> None:
    algorithm = {"adv_estimator": "opd", "teacher": "http://127.0.0.1:9/v1"}
    values = {"trainer_common": {"algorithm": algorithm}, "rollout": rollout}
    with pytest.raises(
        ConfigError, match=r"rollout.temperature must be 1.0.*teacher at an endpoint"
    ):
        load_config(values=values)
    assert load_config(values={**values, "rollout": {**rollout, "sampling": "request"}})
