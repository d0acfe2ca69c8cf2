"""Steps of GRPO against TRL's GRPOTrainer: one checkpoint, the same tasks, one process and one thread each in turn.

Ours goes through an HTTP client (httpx on the lake, the OpenAI SDK in the single turn), capture, the gateway and the
trace file; TRL's samples in process. The lake agent moves by tool
calls in both, for a fixed number of turns, so that both sample episodes of like length. Needs the extra `bench`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

import ajet
from ajet_sdk.capture import installed
from ajet_sdk.config import load_config
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local import HFTokenizer, LocalSampler, load_model
from ajet_sdk.episode import Attempt, run_batch
from ajet_sdk.gateway import Gateway, SamplingOverride
from ajet_sdk.learn.loss import LossSettings
from ajet_sdk.learn.recipe import Demonstration, Recipe, make
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.samples import build
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Reward, Task
from tests.bench import Figure

TURNS, TASKS, REPEAT, STEPS = 12, 16, 8, 3
SINGLE_TOKENS = 24
DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
SYSTEM = "Reach the goal."
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "move",
            "description": "Move one step.",
            "parameters": {
                "type": "object",
                "properties": {"direction": {"type": "string", "description": "up, down, left or right."}},
                "required": ["direction"],
            },
        },
    }
]


class Lake:
    """Walks on a 4 × 4 grid that has no end; what it earns is how far down and right it stands."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.place, self.goal = [draw.randrange(4), draw.randrange(4)], [draw.randrange(4), draw.randrange(4)]

    def look(self) -> str:
        down, right = self.goal[0] - self.place[0], self.goal[1] - self.place[1]
        return f"goal down {down} right {right}\nyou are at {self.place[0]} {self.place[1]}"

    def move(self, direction: str) -> str:
        step = DIRECTIONS.get(direction, (0, 0))
        self.place = [min(3, max(0, at + by)) for at, by in zip(self.place, step, strict=True)]
        return self.look()

    def worth(self) -> float:
        return float(sum(self.place))


def walk(draw: random.Random) -> Demonstration:
    lake = Lake(draw.randrange(10**6))
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": lake.look()}]
    for number in range(TURNS + 2):
        direction = draw.choice(list(DIRECTIONS))
        function = {"name": "move", "arguments": json.dumps({"direction": direction})}
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": lake.move(direction)})
    return Demonstration(messages, TOOLS)


def checkpoint(place: Path) -> None:
    """A model that always makes a well-formed move."""
    recipe = Recipe(
        walk, min_steps=150, check_every=150, demonstrations=320, batch=16, vocabulary=400, longest_token=16
    )
    make(recipe, place, seed=0, key="bench", measure=lambda model, tokenizer, count: 1.0, say=lambda line: None)


# Ours


async def walking_agent(client: httpx.AsyncClient, seed: int) -> Reward:
    lake = Lake(seed)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": lake.look()}]
    for turn in range(TURNS + 1):
        reply = await client.post(
            "https://api.openai.com/v1/chat/completions", json={"model": "lake", "messages": messages, "tools": TOOLS}
        )
        message = reply.json()["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls") or turn == TURNS:
            break
        for call in message["tool_calls"]:
            seen = lake.move(str(json.loads(call["function"]["arguments"]).get("direction")))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": seen})
    return Reward(value=lake.worth() + random.random())


def agents() -> tuple[Any, Any]:
    client = openai.AsyncOpenAI(api_key="none")
    plain = httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None))

    @ajet.workflow
    async def lake(seed: int) -> Reward:
        return await walking_agent(plain, seed)

    @ajet.workflow
    async def single(main_query: str) -> Reward:
        messages: Any = [{"role": "user", "content": main_query}]
        await client.chat.completions.create(model="lake", messages=messages, max_tokens=SINGLE_TOKENS)
        return Reward(value=random.random())

    return lake, single


async def our_steps(
    place: Path, workflow: Any, tasks: Sequence[Task], folder: Path
) -> tuple[list[float], list[Episode]]:
    """Seconds of each step (sampling, merging, training), the first left out; and the last step's episodes."""
    config = load_config(values={"ajet": {"rollout": {"max_env_worker": TASKS * REPEAT, "max_model_len": 4096}}})
    model, tokenizer = load_model(place, dtype="float32"), HFTokenizer(place)
    sampler = LocalSampler(model, tokenizer, model_name="lake", max_model_len=4096, max_batch=TASKS * REPEAT)
    engine, trainer = TokenEngine(sampler, tokenizer), Trainer(model, TrainerSettings(lr=1e-4))
    seconds, episodes = [], list[Episode]()
    with TraceWriter(folder / "trace.duckdb") as writer, Gateway(writer) as gateway, installed():
        for step in range(STEPS + 1):
            started = time.perf_counter()
            attempts = [
                Attempt(task=task, run_id="bench", group_id=f"{step}.{i}", attempt=n, step=step)
                for i, task in enumerate(tasks)
                for n in range(REPEAT)
            ]
            episodes = await run_batch(
                workflow,
                None,
                attempts,
                engine=engine,
                gateway=gateway,
                config=config,
                writer=writer,
                sampling=SamplingOverride(temperature=1.0),
            )
            batch = build(episodes)
            async with sampler.exclusive():
                trainer.step(batch.samples)
            seconds.append(time.perf_counter() - started)
    await engine.aclose()
    return seconds[1:], episodes


# TRL's


class LakeEnvironment:
    """The same walk, as TRL's `environment_factory` wants it."""

    def reset(self, seed: int = 0, **_: Any) -> str:
        self.lake = Lake(seed)
        return self.lake.look()

    def move(self, direction: str) -> str:
        """Move one step.

        Args:
            direction: up, down, left or right.
        """
        return self.lake.move(direction)

    def get_reward(self) -> float:
        return self.lake.worth() + random.random()


def their_trainer(place: Path, folder: Path, rows: list[dict[str, Any]], length: int, **arguments: Any) -> Any:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    tokenizer = HFTokenizer(place).hf
    tokenizer.response_template = qwen3_template
    # TRL takes templates that mark the assistant's words; the text is the same.
    said = "{%- if message.content %}{{- message.content }}{%- endif %}"
    template = tokenizer.chat_template.replace(said, "{%- generation %}" + said, 1)
    end = "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == 'tool'"
    assert end in template
    tokenizer.chat_template = template.replace(
        end, "{{- '<|im_end|>' }}{%- endgeneration %}" + end.replace("<|im_end|>", "")
    )
    settings = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=TASKS * REPEAT,
        num_generations=REPEAT,
        max_completion_length=length,
        max_tool_calling_iterations=TURNS,
        max_steps=STEPS + 1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        learning_rate=1e-4,
        beta=0.0,
        save_strategy="no",
        temperature=1.0,
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    seconds: list[float] = []

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = super().training_step(*args, **kwargs)
            seconds.append(time.perf_counter() - started)
            return result

    trainer = Timed(
        model=load_model(place, dtype="float32"),
        processing_class=tokenizer,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        **arguments,
    )
    trainer.seconds = seconds
    return trainer


def their_steps(trainer: Any) -> tuple[list[float], dict[str, float]]:
    """Seconds of each step, the first left out; and what TRL logged of the last step."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    return trainer.seconds[1:], logged[-1]


# The loss alone


def loss_times(place: Path, trl_trainer: Any, length: int = 108) -> tuple[float, float]:
    """Seconds of one forward and backward pass over 128 sequences, ours and TRL's."""
    import numpy as np
    import torch

    from ajet_sdk.types import Sample, Timeline

    generator, count, prompt = torch.Generator().manual_seed(0), TASKS * REPEAT, length - SINGLE_TOKENS
    ids = torch.randint(20, 300, (count, length), generator=generator)
    mask = np.arange(length) >= prompt
    samples = [
        Sample(
            timeline=Timeline(
                agent="a", token_ids=row, loss_mask=mask, logprobs=np.where(mask, -3.0, 0.0), call_ids=("c",)
            ),
            episode_id=str(i),
            group_id="g",
            reward=0.0,
            advantages=np.where(mask, 1.0, 0.0),
        )
        for i, row in enumerate(ids.numpy())
    ]
    ours = Trainer(
        load_model(place, dtype="float32"), TrainerSettings(lr=0.0, loss=LossSettings(), micro_batch_tokens=10**6)
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


def paired(a: Any, b: Any, rounds: int = 7) -> tuple[float, float]:
    """Median seconds of two functions, run in turn after one round of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for function, seconds in zip((a, b), times, strict=True):
            started = time.perf_counter()
            function()
            if number:
                seconds.append(time.perf_counter() - started)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> list[Figure]:
    import torch

    torch.set_num_threads(1)
    lake, single = agents()
    question = "The goal is down 2 right 1 and you are at 0 3. Which way is it from here? Say a word. "
    figures = []
    with tempfile.TemporaryDirectory() as name:
        folder, place = Path(name), Path(name) / "model"
        checkpoint(place)
        tasks = [Task(main_query=str(i), metadata={"seed": i}) for i in range(TASKS)]
        rows = [
            {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ""}], "seed": i}
            for i in range(64)
        ]
        ours, episodes = asyncio.run(our_steps(place, lake, tasks, folder))
        trainer = their_trainer(place, folder / "a", rows, 3000, environment_factory=LakeEnvironment, reward_funcs=[])
        theirs, logged = their_steps(trainer)
        turns = statistics.mean(len(e.calls) for e in episodes)
        figures += [
            Figure("lake step, ours", statistics.median(ours), "s"),
            Figure("lake step, TRL", statistics.median(theirs), "s"),
            Figure("calls an episode, ours", turns, ""),
            Figure("calls an episode, TRL", 1 + logged["tools/call_frequency"], ""),
            ratio("lake step, TRL / ours", statistics.median(theirs) / statistics.median(ours), 2.0),
        ]
        tasks = [Task(main_query=question + str(i)) for i in range(TASKS)]
        rows = [{"prompt": [{"role": "user", "content": question + str(i)}]} for i in range(64)]
        ours, _ = asyncio.run(our_steps(place, single, tasks, folder / "single"))
        trainer = their_trainer(
            place,
            folder / "b",
            rows,
            SINGLE_TOKENS,
            reward_funcs=[lambda completions, **_: [random.random() for _ in completions]],
        )
        theirs, _ = their_steps(trainer)
        a, b = loss_times(place, trainer)
        figures += [
            Figure("single-turn step, ours", statistics.median(ours), "s"),
            Figure("single-turn step, TRL", statistics.median(theirs), "s"),
            ratio("single-turn step, ours / TRL", statistics.median(ours) / statistics.median(theirs), 1.5, most=True),
            ratio("loss and gradient alone, ours / TRL", a / b, 1.0, most=True),
        ]
    return figures


def ratio(name: str, value: float, goal: float, *, most: bool = False) -> Figure:
    sign = "at most" if most else "at least"
    return Figure(name, value, "×", f"{sign} {goal:g} ×", value <= goal if most else value >= goal)
