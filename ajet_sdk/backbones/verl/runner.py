"""Runs groups of attempts for `manager` in a process on each node; the job file; and a sampler over
verl's engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.backbones.shared.node import Node, serialize_job
from ajet_sdk.cluster.mailbox import emptied
from ajet_sdk.config.config import Config
from ajet_sdk.dialects.finish import finish_of
from ajet_sdk.engines.picture_text import picture_spans, placeholder_id, with_placeholders
from ajet_sdk.engines.vllm.completions import FORBIDDEN
from ajet_sdk.errors import EngineError, EngineUnavailable, first_line
from ajet_sdk.gateway.episode import SamplingOverride
from ajet_sdk.pictures import PlacedPicture
from ajet_sdk.protocols import Sampled, Sampling
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.types import Episode, Task
from ajet_sdk.whole_file import write_whole

if TYPE_CHECKING:
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    from ajet_sdk.protocols import Job

_BARE: dict[str, object] = {"request": {}, "response": {}}


def write_job(path: Path, job: Job, val: Sequence[Task], model: str, traces: Path) -> None:
    """Write a job for other processes to a private file. `traces` is the directory of the nodes'
    trace files."""
    content = {
        **serialize_job(job),
        "directory": str(traces),
        "model": model,
        "train": [task.model_dump(mode="json") for task in job.train],
        "val": [task.model_dump(mode="json") for task in val],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content), private=True)


def read_job(path: Path) -> dict[str, Any]:
    content: dict[str, object] = json.loads(path.read_text())
    return content


class Runner:
    """Runs groups of attempts over verl's client; `rollout.max_env_worker` is split among the
    runners."""

    def __init__(self, job: Mapping[str, object], client: LLMServerClient, runners: int) -> None:
        def sampler(config: Config, tokenizer: HFTokenizer) -> ClientSampler:
            return ClientSampler(client, tokenizer, config.model_name, config.rollout.max_model_len)

        self._node = Node(job, sampler, runners)
        self._rooms: dict[int, asyncio.Semaphore] = {}

    async def run(
        self, group: Sequence[Attempt], sampling: SamplingOverride | None
    ) -> list[Episode]:
        """Run a group; the returned episodes have no requests, responses and outputs."""
        # As many groups at once as the node's share of episodes allows.
        room = asyncio.Semaphore(max(1, self._node.at_once // max(1, len(group))))
        async with self._rooms.setdefault(len(group), room):
            episodes = await self._node.run(group, sampling)
        self._node.writer.flush()
        return emptied(episodes, _BARE)


def takes_pictures(tokenizer: HFTokenizer) -> bool:
    """Whether verl trains the model with pictures: it computes positions in three dimensions for
    all models that take any."""
    return tokenizer.pictures is not None and tokenizer.pictures.has_grid_positions


class ClientSampler:
    """A `Sampler` over verl's `LLMServerClient`.

    Calls of a session go to the same engine, for its prefix cache. The version is the training step
    of the engine's weights, which is the number of updates.
    """

    def __init__(
        self, client: LLMServerClient, tokenizer: HFTokenizer, model: str, max_model_len: int
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self.model = model
        self.max_model_len = max_model_len
        self.takes_pictures = takes_pictures(tokenizer)
        if tokenizer.pictures:
            self._never_sampled = tokenizer.pictures.never_sampled
        else:
            self._never_sampled = ()

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session: str,
        pictures: Sequence[PlacedPicture] = (),
    ) -> list[Sampled]:
        """Raises EngineUnavailable if the engine fails or aborts, EngineError for an incomplete
        response."""
        each = [
            replace(sampling, n=1, seed=None if sampling.seed is None else sampling.seed + index)
            for index in range(sampling.n)
        ]
        return list(
            await asyncio.gather(
                *(self._generate(prompt_ids, single, session, pictures) for single in each)
            )
        )

    async def _generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session: str,
        pictures: Sequence[PlacedPicture],
    ) -> Sampled:
        limit = min(sampling.max_tokens or self.max_model_len, self.max_model_len - len(prompt_ids))
        parameters: dict[str, object] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": limit,
            "logprobs": True,
        }
        parameters |= {"stop": list(sampling.stop)} if sampling.stop else {}
        parameters |= {"seed": sampling.seed % 2**63} if sampling.seed is not None else {}
        if self._never_sampled:
            parameters["logit_bias"] = dict.fromkeys(self._never_sampled, FORBIDDEN)
        prompt = [int(token) for token in prompt_ids]
        shown: dict[str, Any] = {}
        if pictures:
            spans = picture_spans(prompt, pictures, self._tokenizer)
            prompt = with_placeholders(prompt, spans, placeholder_id(self._tokenizer))
            shown = {"image_data": [span.picture.image() for span in spans]}
        try:
            output = await self._client.generate(
                session, prompt_ids=prompt, sampling_params=parameters, **shown
            )
        except Exception as error:  # Ray wraps any error of the engine
            cause = first_line(getattr(error, "cause", None) or error)
            raise EngineUnavailable(
                f"verl's engine failed: {type(error).__name__}: {cause}"
            ) from error
        if output.stop_reason is not None and finish_of(output.stop_reason) is None:
            raise EngineUnavailable(f"verl's engine ended the call for {output.stop_reason!r}")
        ids = [int(i) for i in output.token_ids]
        if not set(self._never_sampled).isdisjoint(ids):
            raise EngineUnavailable("verl's engine sampled an image token, which was forbidden")
        if output.log_probs is None or len(output.log_probs) != len(ids):
            raise EngineError(
                "verl's engine did not return a log-probability for each token; set "
                "actor_rollout_ref.rollout.calculate_log_probs to true"
            )
        return self._sampled(ids, output, sampling, limit)

    def _sampled(
        self, ids: list[int], output: TokenOutput, sampling: Sampling, limit: int
    ) -> Sampled:
        """Make the sample; verl does not report whether an end-of-turn token, a stop string or the
        limit ended it."""
        ended = bool(ids) and ids[-1] in self._tokenizer.eos_ids
        if ended or not sampling.stop:
            text = None
        else:
            text = self._before(ids, sampling.stop)
        version = (output.extra_fields or {}).get("global_steps")
        return Sampled(
            output_ids=ids,
            logprobs=[float(value) for value in output.log_probs],
            finish_reason="stop" if ended or text is not None or len(ids) < limit else "length",
            policy_version=None if version is None else int(version),
            text=text,
        )

    def _before(self, ids: Sequence[int], stops: Sequence[str]) -> str | None:
        """The text before the first stop string; None without one."""
        text = self._tokenizer.decode(ids)
        places = [at for stop in stops if (at := text.find(stop)) >= 0]
        return text[: min(places)] if places else None

    def forget(self, session: str) -> None:
        """Does nothing: the engines manage their caches."""

    async def aclose(self) -> None:
        """Does nothing: verl owns the client."""
