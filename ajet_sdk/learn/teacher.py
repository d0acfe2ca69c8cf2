"""On-policy distillation: a teacher's scores of the student's sampled tokens become their
advantages.

The objective is the reverse KL divergence from student to teacher over the student's own replies
(Agarwal et al. 2024, "On-Policy Distillation of Language Models", arXiv:2306.13649, section 3; Gu
et al. 2024, MiniLLM, arXiv:2306.08543, eq. 1). Its estimate for a sampled token x is log
student(x) - log teacher(x), whose negative is the token's undiscounted reward, as in Lu et al.
(2025, "On-Policy Distillation", Thinking Machines Lab): the gradient is the policy gradient with
that advantage.

Both distributions are those of the sampling: the teacher's logits get the same mask, bias,
penalties and temperature, and for `top_p`, `top_k` and `min_p` the student's support. A teacher
equal to the student therefore gives no gradient.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ajet_sdk.config.api_keys import api_key
from ajet_sdk.engines.frozen import source_of
from ajet_sdk.engines.http import Endpoint
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.engines.local.vision import vision_of
from ajet_sdk.errors import ConfigError, EngineError, RequestRefused
from ajet_sdk.learn.batches import MicroBatch, tokens_of_a_pass, trained_positions
from ajet_sdk.learn.losses import policy_pass, score
from ajet_sdk.learn.trainer import batches_of, logprobs_of
from ajet_sdk.learn.trees import shares_prefixes
from ajet_sdk.protocols import Sampling, Tokenizer
from ajet_sdk.samples.build import Batch
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.types import Floats, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ajet_sdk.config.config import Config
    from ajet_sdk.config.trainer_schema import Algorithm

_AT_ONCE = 16
"""Concurrent requests to an endpoint."""
_SECONDS = 600.0
_ALIKE = 0.9
"""Share of an endpoint's tokens whose text must equal ours; notations of bytes and blanks vary."""


async def open_teacher(
    config: Config, tokenizer: HFTokenizer, student: PreTrainedModel | None
) -> LocalTeacher | RemoteTeacher | None:
    """Opens the config's teacher, if any. Raises ConfigError if its tokenizer differs."""
    algorithm = config.trainer_common.algorithm
    if algorithm.adv_estimator != "opd" or algorithm.teacher is None:
        return None
    if algorithm.remote_teacher:
        key = api_key(algorithm.teacher_key_env) or "none"
        teacher = RemoteTeacher(
            Endpoint(algorithm.teacher, key, timeout=_SECONDS), tokenizer, algorithm.teacher_model
        )
        await teacher.check()
        return teacher
    path = algorithm.teacher
    if (directory := config.resolve(path)).exists():
        path = str(directory)
    elif "@" in path and (source := source_of(path, config)) is not None:
        path = source.path or path
    return await asyncio.to_thread(_load, config, path, tokenizer, student)


def _load(
    config: Config, path: str, tokenizer: HFTokenizer, student: PreTrainedModel | None
) -> LocalTeacher:
    if HFTokenizer(path).hf.get_vocab() != tokenizer.hf.get_vocab():
        raise ConfigError(
            f"trainer_common.algorithm.teacher: {path} has another tokenizer than the trained"
            " model, so its log-probabilities are not comparable; use a teacher of the same family"
        )
    model = load_model(path, dtype=config.model.dtype, device=config.model.device)
    tokens = config.trainer_common.micro_batch_tokens or tokens_of_a_pass(
        model, checkpointing=False
    )
    return LocalTeacher(model.requires_grad_(False), tokens, tokenizer, student)


async def distill(
    samples: Sequence[Sample],
    teacher: LocalTeacher | RemoteTeacher,
    sampling: Mapping[str, Sampling],
) -> tuple[list[Sample], dict[str, float]]:
    """Sets the teacher's advantages; also returns the mean divergence in nats per token.

    `sampling` is that of each call, by `call_id`.
    """
    taught = []
    differences = []
    for sample, theirs in zip(samples, await teacher.logprobs(samples, sampling), strict=True):
        at = trained_positions(sample)
        advantages = np.zeros(len(sample.advantages), np.float32)
        advantages[at] = theirs - sample.timeline.logprobs[at]
        differences.append(advantages[at])
        taught.append(sample.model_copy(update={"advantages": advantages}))
    every = np.concatenate(differences)
    if not np.isfinite(every).all():
        raise EngineError(
            "the teacher's log-probability of a token is not finite, so the divergence is undefined"
        )
    return taught, {"teacher_kl": float(-every.mean())}


def unscored(algorithm: Algorithm, batch: Batch) -> str | None:
    """A message about calls that the teacher cannot score as they were sampled, if any."""
    tokens = int(batch.metrics.get("train/tokens_unmaskable", 0))
    if not tokens or not algorithm.remote_teacher:
        return None
    return (
        f"{tokens} of {int(batch.metrics['train/tokens_sampled'])} tokens were sampled at another"
        " temperature than 1, or with limits, bias, penalties or a grammar, which"
        f" {algorithm.teacher} cannot apply: they are not trained (outcome unmaskable). To train"
        " them, name the teacher as a directory, or leave these parameters out"
    )


class LocalTeacher:
    """A teacher in this process. Nothing may be sampled from `student` while it scores.

    Without `student`, which then is at a service, calls must be sampled without limits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        micro_batch_tokens: int,
        tokenizer: Tokenizer,
        student: PreTrainedModel | None,
    ) -> None:
        self.model = model
        self._tokens = micro_batch_tokens
        self._tokenizer = tokenizer
        self._student = student
        self._shares = shares_prefixes(model)
        if student is not None:
            with policy_pass(student):
                self._shares = self._shares and shares_prefixes(student)

    async def logprobs(
        self, samples: Sequence[Sample], sampling: Mapping[str, Sampling]
    ) -> list[Floats]:
        """Log-probabilities of each sample's trained tokens, under the `sampling` of their calls,
        by `call_id`."""
        return await asyncio.to_thread(self._logprobs, samples, sampling)

    def _logprobs(
        self, samples: Sequence[Sample], sampling: Mapping[str, Sampling]
    ) -> list[Floats]:
        device = next(self.model.parameters()).device
        batches = batches_of(
            samples,
            sampling,
            self._tokens,
            device,
            self._tokenizer,
            share=self._shares,
            vision=vision_of(self.model, self._tokenizer),
        )
        return [
            values.float().cpu().numpy() for values in logprobs_of(samples, batches, self._score)
        ]

    def _score(self, batch: MicroBatch) -> torch.Tensor:
        support_MV = None if batch.limits is None else self._support(batch)
        return score(self.model, batch, entropy=False, support_MV=support_MV).logprobs_N

    def _support(self, batch: MicroBatch) -> torch.Tensor:
        """Mask of the student's possible tokens, padded to the teacher's vocabulary."""
        assert self._student is not None
        with policy_pass(self._student):
            support_MV = score(self._student, batch, entropy=False).support_MV
        assert support_MV is not None
        head: Any = self.model.get_output_embeddings()
        return torch.nn.functional.pad(support_MV, (0, head.weight.shape[0] - support_MV.shape[1]))

    async def aclose(self) -> None:
        """Does nothing."""


class RemoteTeacher:
    """A teacher at an endpoint that takes token ids and returns `prompt_logprobs`, as vLLM's
    completions route does.

    These ignore temperature, bias and grammar, so that only plain calls can be scored
    (`Sampling.plain`); `samples_of` leaves out the others.
    """

    def __init__(self, endpoint: Endpoint, tokenizer: HFTokenizer, model: str | None) -> None:
        self._endpoint = endpoint
        self._tokenizer = tokenizer
        self._model = model
        self._at = endpoint.base_url
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def check(self) -> None:
        """Send a test request before training. Raises ConfigError if the endpoint cannot be a
        teacher."""
        await self._name()
        ids = self._tokenizer.encode("What is 6 times 7? It is 42.")
        await self._ask(ids, np.arange(1, len(ids)))

    async def logprobs(
        self, samples: Sequence[Sample], sampling: Mapping[str, Sampling]
    ) -> list[Floats]:
        """As `LocalTeacher.logprobs`; the `sampling` is plain."""
        await self._name()
        return list(await asyncio.gather(*(self._of(sample) for sample in samples)))

    async def _name(self) -> None:
        if self._model is None:
            served = (await self._endpoint.get("models")).get("data")
            if not isinstance(served, list) or not served:
                raise ConfigError(
                    f"{self._endpoint.base_url} lists no model: set"
                    " trainer_common.algorithm.teacher_model"
                )
            self._model = str(served[0]["id"])

    async def _of(self, sample: Sample) -> Floats:
        at = trained_positions(sample)
        return await self._ask(sample.timeline.token_ids[: int(at[-1]) + 1].tolist(), at)

    async def _ask(self, ids: Sequence[int], at: npt.NDArray[np.intp]) -> Floats:
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        async with self._room:
            try:
                answer = await self._endpoint.post("completions", body)
            except RequestRefused as refused:
                raise ConfigError(
                    f"trainer_common.algorithm.teacher: {self._at} refused token ids with"
                    f" prompt_logprobs ({refused}); use a server that returns them, such as vLLM's,"
                    " with a model that has the same tokenizer"
                ) from refused
        return self._read(answer, ids, at)

    def _read(
        self, answer: dict[str, object], ids: Sequence[int], at: npt.NDArray[np.intp]
    ) -> Floats:
        """Reads the log-probabilities at positions `at`. Raises ConfigError if the endpoint's
        tokens are not ours."""
        choices = answer.get("choices")
        if isinstance(choices, list) and choices:
            entries = choices[0].get("prompt_logprobs")
        else:
            entries = None
        if not isinstance(entries, list) or len(entries) != len(ids):
            raise ConfigError(
                f"trainer_common.algorithm.teacher: {self._at} returns no prompt_logprobs for token"
                " ids; vLLM's server does"
            )
        sampled = [
            entries[index].get(str(ids[index]), {}) if entries[index] else {} for index in at
        ]
        ours_of = [self._tokenizer.decode([ids[index]]) for index in at]
        read = [
            (entry.get("decoded_token"), ours) for entry, ours in zip(sampled, ours_of, strict=True)
        ]
        known = [(theirs, ours) for theirs, ours in read if isinstance(theirs, str)]
        alike = sum(
            _plain(theirs) == _plain(ours) or "\ufffd" in theirs + ours for theirs, ours in known
        )
        if alike < _ALIKE * len(known):
            theirs, ours = next((a, b) for a, b in known if _plain(a) != _plain(b))
            raise ConfigError(
                f"trainer_common.algorithm.teacher: {self._at} has another tokenizer than the"
                f" trained model: the token {ours!r} is {theirs!r} there"
            )
        return np.array([entry.get("logprob", np.nan) for entry in sampled], np.float32)

    async def aclose(self) -> None:
        await self._endpoint.aclose()


def _plain(token: str) -> str:
    """A token's text without blanks and their markers."""
    return token.replace("\u0120", "").replace("\u2581", "").replace("\u010a", "").strip()
