"""What Trinity's route without GPUs adds to `ajet trainer serve`: a child process, and the sampler
of runners."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import ajet_sdk
from ajet_sdk.backbones.trinity.learner import run_learner
from ajet_sdk.backbones.trinity.sampler import ServiceSampler
from ajet_sdk.config.config import load_config
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.errors import (
    ConfigError,
    ContextOverflow,
    EngineError,
    EngineUnavailable,
    RequestRefused,
    TrainingError,
)
from ajet_sdk.protocols import Sampled, Sampling
from ajet_sdk.tokens.huggingface import HFTokenizer
from tests.tinker.servers import IDS, Server, datum, train
from tests.tinker.test_losses import fetch
from tests.waiting import until

OPTIONS: dict[str, Any] = {"temperature": 0.8, "max_model_len": 64}
LENGTH = 48


@pytest.mark.slow
def test_it_does_not_start_without_a_model_and_says_why(tmp_path: Path) -> None:
    async def start(model: Path) -> None:
        async with run_learner(str(model), tmp_path / "state", log, **OPTIONS):
            pytest.fail("it started")

    log = tmp_path / "logs" / "learner.log"
    with pytest.raises(ConfigError, match=r"model\.path: .*it has no config\.json"):
        asyncio.run(start(tmp_path / "absent"))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    log.parent.mkdir()
    log.write_text("ajet: an error of the start before\n")
    with pytest.raises(EngineUnavailable, match="exited with code 1 during startup") as caught:
        asyncio.run(start(broken))
    assert str(log) in str(caught.value) and "model.path: " in str(caught.value)
    assert "Traceback" not in str(caught.value) and "the start before" not in str(caught.value)


PARENT = """
import asyncio, sys
from pathlib import Path
from ajet_sdk.backbones.trinity.learner import run_learner

async def main():
    place = Path(sys.argv[2])
    async with run_learner(sys.argv[1], place, place / "log", temperature=1.0, max_model_len=64) as learner:
        print(learner.process.pid, learner.url, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.slow
def test_it_asks_for_a_key_and_ends_with_its_parent(tiny: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(ajet_sdk.__file__).parent.parent)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert parent.stdout is not None
    pid, url = parent.stdout.readline().split()
    assert httpx.get(f"{url}/api/v1/get_server_capabilities").status_code == 401
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.slow
def test_a_dead_learner_ends_what_waits_for_it(tiny: Path, tmp_path: Path) -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("in order")

    async def run() -> None:
        async with run_learner(
            str(tiny), tmp_path / "state", tmp_path / "log", **OPTIONS
        ) as learner:
            assert os.environ["TINKER_BASE_URL"] == learner.url
            waiting = asyncio.ensure_future(learner.beside(work()))
            await asyncio.sleep(0)
            learner.process.kill()
            await waiting

    with pytest.raises(
        TrainingError, match=r"the learner ended with exit code -9; .*log.* Continue with --resume"
    ):
        asyncio.run(run())
    assert ended == ["in order"] and "TINKER_BASE_URL" not in os.environ


class Wrapper:
    """What our sampler reads of Trinity's `ModelWrapper`."""

    def __init__(self, model: Path) -> None:
        self.path = self.model_name = str(model)
        self.model = self.get_model_path = self

    def remote(self) -> Awaitable[str]:
        async def answer() -> str:
            return self.path

        return answer()


def scored(model: Any, ids: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([ids])).logits[0, :-1] / OPTIONS["temperature"]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def check_scores(model: Any, sampled: list[Sampled]) -> None:
    for reply in sampled:
        with torch.no_grad():
            exact = scored(model, [*IDS, *map(int, reply.output_ids)])[len(IDS) - 1 :]
        np.testing.assert_allclose(reply.logprobs, exact.numpy(), atol=1e-4)


@pytest.mark.slow
def test_runners_sample_with_the_weights_that_trinity_gave_its_model_last(
    server: Server, service: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ids and log-probabilities, each reply with the version of its weights, and no two of a
    group alike."""
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    settings = {"backbone": "trinity", "experiment_name": "e", "model": {"path": "elsewhere"},
                "tinker": {"base_url": "https://hosted.invalid"},
                "rollout": {"max_model_len": LENGTH}}  # fmt: skip
    wrapper, tokenizer = Wrapper(tiny), HFTokenizer(str(tiny))
    hot = Sampling(temperature=OPTIONS["temperature"], max_tokens=12, n=4)
    trainer, rest = train(service, tiny), service.create_rest_client()
    for _ in range(2):
        trainer.forward_backward([datum()], "cross_entropy")
        trainer.optim_step(service_adam()).result()
    saved = trainer.save_weights_for_sampler("run-trinity-sampler-7").result().path

    async def sample() -> list[list[Sampled]]:
        sampler = ServiceSampler(wrapper, load_config(values=settings), tokenizer)  # type: ignore[arg-type]
        first = [*await asyncio.gather(*(sampler.sample(IDS, hot, "e/a") for _ in range(2)))]
        wrapper.path = saved
        await sampler.sample(IDS, hot, "e/a")
        await asyncio.to_thread(
            rest.delete_checkpoint(*saved.removeprefix("tinker://").split("/", 1)).result
        )
        later = await sampler.sample(
            IDS, hot, "e/a"
        )  # a run may still be sampling with what its trainer deletes
        with pytest.raises(ContextOverflow, match="max_model_len"):
            await sampler.sample([5] * LENGTH, hot, "e/a")
        with pytest.raises(RequestRefused, match="structured output"):
            await sampler.sample(IDS, Sampling(grammar="start: x"), "e/a")
        wrapper.path = saved.replace("sampler-7", "sampler-8")
        with pytest.raises(EngineUnavailable):
            await sampler.sample(IDS, hot, "e/a")
        wrapper.path = saved.replace("-sampler-7", "")
        with pytest.raises(EngineError, match="the step of the weights at"):
            await sampler.sample(IDS, hot, "e/a")
        await sampler.aclose()
        return [*first, later]

    *first, later = asyncio.run(sample())
    together = [reply for replies in first for reply in replies]
    assert len({tuple(reply.output_ids) for reply in together}) == len(together)
    assert {reply.policy_version for reply in together} == {0} and {
        r.policy_version for r in later
    } == {7}
    check_scores(load_model(tiny, device="cpu"), together)
    check_scores(
        load_model(fetch(service, trainer, "copy", tmp_path / "adapter"), device="cpu"), later
    )


def service_adam() -> Any:
    from tinker import types

    return types.AdamParams(learning_rate=0.05)
