"""A tiny model from scratch, and a vLLM server of ours over it that a whole module of tests
shares."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.engines.vllm.engine import has_token_route
from ajet_sdk.engines.vllm.sampler import VllmSampler
from ajet_sdk.engines.vllm.server import Settings
from ajet_sdk.learn.learner import ServedWeights
from ajet_sdk.tokens.huggingface import HFTokenizer
from tests.tiny_models import VLLMS, save_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with a tokenizer and a chat template."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", VLLMS)


class Trained:
    """A model in this process, and a server that samples with its weights."""

    def __init__(self, path: Path, directory: Path, lora: Any = None) -> None:
        self.tokenizer = HFTokenizer(str(path))
        self.model = load_model(path, lora=lora, trains_tower=lora is None)
        served = ServedWeights(self.model, self.tokenizer.hf)
        settings = Settings(
            model=str(path),
            tokenizer=str(path),
            name="tiny",
            log=directory / "logs" / "vllm.log",
            dtype="float32",
            max_model_len=4096,
            max_num_seqs=32,
            gpus=(),
            lora_rank=served.lora_rank,
            changing=True,
            takes_pictures=self.tokenizer.pictures is not None,
            token_route=has_token_route(),
        )
        self.sampler = VllmSampler(
            settings,
            eos_ids=self.tokenizer.eos_ids,
            directory=directory,
            write=served.write,
            adapter=served.lora_rank is not None,
            written=served.differs,
            tokenizer=self.tokenizer,
        )
        asyncio.run(self.sampler.ready())

    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """What the model itself says before each token of the output, [T, V]."""
        with torch.inference_mode():
            every = self.model(torch.tensor([[*prompt, *output]])).logits[0]
        return every[len(prompt) - 1 : -1].clone()

    def logprobs(
        self, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0
    ) -> torch.Tensor:
        return self.picked(self.logits(prompt, output) / temperature, output)

    @staticmethod
    def picked(logits_TV: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        return torch.log_softmax(logits_TV, -1).gather(-1, torch.tensor(list(output))[:, None])[
            :, 0
        ]

    async def move(self, size: float = 0.02) -> None:
        """Change every weight that is trained, as a step of training would."""
        async with self.sampler.exclusive():
            with torch.no_grad():
                for parameter in self.model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(torch.randn_like(parameter) * size)
            assert self.sampler.policy_version is not None
            self.sampler.policy_version += 1


@pytest.fixture(scope="session")
def children() -> Callable[[int], list[int]]:
    """Processes that a process has started and that are alive."""

    def of(pid: int) -> list[int]:
        found = []
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                state, parent = file.read_text().rpartition(")")[2].split()[:2]
                if int(parent) == pid and state != "Z":
                    found.append(int(file.parent.name))
        return found

    return of


@pytest.fixture(scope="module")
def trained_with(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Trained]]:
    made: list[Trained] = []

    def make(lora: Any = None) -> Trained:
        made.append(Trained(tiny, tmp_path_factory.mktemp("experiment"), lora))
        return made[-1]

    yield make
    for one in made:
        asyncio.run(one.sampler.aclose())
