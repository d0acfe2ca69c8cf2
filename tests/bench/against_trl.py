"""Steps of GRPO against TRL's GRPOTrainer: one checkpoint, the same tasks, one process and one
thread, in turn.

Ours goes through an HTTP client (httpx on the lake, the OpenAI SDK in the single turn), capture,
the gateway and the trace file; TRL's samples in process. The lake agent moves by tool calls in
both, for a fixed number of turns, so that both sample episodes of like length. A step of ours comes
before each of TRL's, so that what else the machine does strikes both; ratios are of medians, by the
clock and by the processor. Needs the extra `bench`.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import openai

import ajet
from ajet_sdk.backbones.shared.garbage import freeze_gc
from ajet_sdk.capture.hooks import installed
from ajet_sdk.config.config import load_config
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.gateway.episode import SamplingOverride
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.learn.objective import LossSettings
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.samples.build import build
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Reward, Sample, Task, Timeline
from tests.bench import Figure
from tests.bench._lake import REPEAT, SYSTEM, TASKS, checkpoint, walking_agent
from tests.bench._measure import Stopwatch, Taken, paired
from tests.bench._trl import LakeEnvironment, their_steps, their_trainer

LAKE_STEPS, SINGLE_STEPS = 5, 12
SINGLE_TOKENS = 24
QUESTION = "The goal is down 2 right 1 and you are at 0 3. Which way is it from here? Say a word. "


def agents() -> tuple[Any, Any]:
    client = openai.AsyncOpenAI(api_key="none")
    plain = httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None))

    @ajet.workflow
    async def lake(seed: int) -> Reward:
        return await walking_agent(plain, seed)

    @ajet.workflow
    async def single(main_query: str) -> Reward:
        messages: Any = [{"role": "user", "content": main_query}]
        await client.chat.completions.create(
            model="lake", messages=messages, max_tokens=SINGLE_TOKENS
        )
        return Reward(value=random.random())

    return lake, single


class OurRun:
    """A run of ours, one `step` (sampling, merging, training) at a time; `takes` and `episodes`
    tell of them."""

    def __init__(self, place: Path, workflow: Any, tasks: Sequence[Task], folder: Path) -> None:
        self.workflow, self.tasks = workflow, tasks
        self.takes: list[Taken] = []
        self.episodes: list[Episode] = []
        self.config = load_config(values={"ajet": {"rollout": {"max_env_worker": TASKS * REPEAT}}})
        model, tokenizer = load_model(place, dtype="float32"), HFTokenizer(place)
        self.sampler = LocalSampler(
            model, tokenizer, model_name="lake", max_model_len=4096, max_batch=TASKS * REPEAT
        )
        self.engine, self.trainer = (
            TokenEngine(self.sampler, tokenizer),
            Trainer(model, TrainerSettings(lr=1e-4)),
        )
        self._open = ExitStack()
        self.writer = self._open.enter_context(TraceWriter(folder / "trace.duckdb"))
        self.gateway = self._open.enter_context(Gateway(self.writer))
        self._open.enter_context(installed())
        self._loop = asyncio.new_event_loop()
        self._open.callback(self._loop.close)

    def __enter__(self) -> OurRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._loop.run_until_complete(self.engine.aclose())
        self._open.close()

    def step(self) -> None:
        with (
            freeze_gc()
        ):  # as long as a run of ours lasts, and no longer: TRL has Python's own collections
            watch = Stopwatch()
            self._loop.run_until_complete(self._step(len(self.takes)))
            self.takes.append(watch.read())

    async def _step(self, step: int) -> None:
        attempts = [
            Attempt(task=task, run_id="bench", group_id=f"{step}.{i}", attempt=n, step=step)
            for i, task in enumerate(self.tasks)
            for n in range(REPEAT)
        ]
        self.episodes = await run_batch(
            self.workflow,
            None,
            attempts,
            engine=self.engine,
            gateway=self.gateway,
            config=self.config,
            writer=self.writer,
            sampling=SamplingOverride(temperature=1.0),
        )
        batch = build(self.episodes)
        async with self.sampler.exclusive():
            self.trainer.step(batch.samples)


def loss_times(place: Path, trl_trainer: Any, length: int = 108) -> tuple[Taken, Taken]:
    """One forward and backward pass over 128 sequences, ours and TRL's."""
    import numpy as np
    import torch

    generator, count, prompt = (
        torch.Generator().manual_seed(0),
        TASKS * REPEAT,
        length - SINGLE_TOKENS,
    )
    ids = torch.randint(20, 300, (count, length), generator=generator)
    mask = np.arange(length) >= prompt
    samples = [
        Sample(
            timeline=Timeline(
                agent="a",
                token_ids=row,
                loss_mask=mask,
                logprobs=np.where(mask, -3.0, 0.0),
                call_ids=("c",),
            ),
            episode_id=str(i),
            group_id="g",
            reward=0.0,
            advantages=np.where(mask, 1.0, 0.0),
        )
        for i, row in enumerate(ids.numpy())
    ]
    ours = Trainer(
        load_model(place, dtype="float32"),
        TrainerSettings(lr=0.0, loss=LossSettings(), micro_batch_tokens=10**6),
    )
    inputs = {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": torch.ones(count, prompt, dtype=torch.long),
        "completion_ids": ids[:, prompt:],
        "completion_mask": torch.ones(count, SINGLE_TOKENS, dtype=torch.long),
        "advantages": torch.ones(count),
        "old_per_token_logps": torch.full((count, SINGLE_TOKENS), -3.0),
        "num_items_in_batch": torch.tensor(count * SINGLE_TOKENS),
    }
    model = trl_trainer.model.train()

    def theirs() -> None:
        trl_trainer._compute_loss(model, inputs).backward()
        model.zero_grad()

    return paired(lambda: ours.step(samples), theirs)


def compared(
    name: str, place: Path, run: OurRun, trainer: Any
) -> tuple[list[Figure], Taken, Taken]:
    """Both runs' steps in turn, the first of each left out: figures, and what a step of each
    took."""
    takes, logged = their_steps(trainer, run.step)
    ours, theirs = Taken.median(run.takes[1:]), Taken.median(takes[1:])
    calls = [call for episode in run.episodes for call in episode.calls]
    sampled = sum(len(call.output_ids) for call in calls if call.output_ids is not None)
    figures = [
        Figure(f"{name} step, ours", ours.wall, "s"),
        Figure(f"{name} step, ours, processor", ours.cpu, "s"),
        Figure(f"{name} step, TRL", theirs.wall, "s"),
        Figure(f"{name} step, TRL, processor", theirs.cpu, "s"),
        Figure(f"{name}, tokens sampled of an episode, ours", sampled / len(run.episodes), ""),
        Figure(f"{name}, tokens sampled of an episode, TRL", logged["completions/mean_length"], ""),
        Figure(f"{name}, calls of an episode, ours", len(calls) / len(run.episodes), ""),
        Figure(f"{name}, calls of an episode, TRL", 1 + logged.get("tools/call_frequency", 0), ""),
    ]
    return figures, ours, theirs


def main() -> list[Figure]:
    import torch

    torch.set_num_threads(1)
    lake, single = agents()
    with tempfile.TemporaryDirectory() as name:
        folder, place = Path(name), Path(name) / "model"
        checkpoint(place)
        return on_the_lake(place, lake, folder / "lake") + in_one_turn(
            place, single, folder / "single"
        )


def on_the_lake(place: Path, workflow: Any, folder: Path) -> list[Figure]:
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ""}]
    trainer = their_trainer(
        place,
        folder / "trl",
        [{"prompt": prompt, "seed": i} for i in range(64)],
        3000,
        LAKE_STEPS + 1,
        environment_factory=LakeEnvironment,
        reward_funcs=[],
    )
    tasks = [Task(main_query=str(i), metadata={"seed": i}) for i in range(TASKS)]
    with OurRun(place, workflow, tasks, folder) as run:
        figures, ours, theirs = compared("lake", place, run, trainer)
    return [*figures, *ratios("lake step, TRL / ours", theirs.over(ours), 2.0)]


def in_one_turn(place: Path, workflow: Any, folder: Path) -> list[Figure]:
    trainer = their_trainer(
        place,
        folder / "trl",
        [{"prompt": [{"role": "user", "content": QUESTION + str(i)}]} for i in range(64)],
        SINGLE_TOKENS,
        SINGLE_STEPS + 1,
        reward_funcs=[lambda completions, **_: [random.random() for _ in completions]],
    )
    tasks = [Task(main_query=QUESTION + str(i)) for i in range(TASKS)]
    with OurRun(place, workflow, tasks, folder) as run:
        figures, ours, theirs = compared("single turn", place, run, trainer)
    a, b = loss_times(place, trainer)
    return [
        *figures,
        *ratios("single-turn step, ours / TRL", ours.over(theirs), 1.5, most=True),
        *ratios("loss and gradient alone, ours / TRL", a.over(b), 1.0, most=True),
    ]


def ratios(name: str, value: Taken, goal: float, *, most: bool = False) -> list[Figure]:
    """A figure by the clock and one by the processor, with one goal."""

    def figure(name: str, value: float) -> Figure:
        sign = "at most" if most else "at least"
        return Figure(
            name, value, "×", f"{sign} {goal:g} ×", value <= goal if most else value >= goal
        )

    return [figure(name, value.wall), figure(f"{name}, processor", value.cpu)]
