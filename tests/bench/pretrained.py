"""A real pretrained model on a CPU: a training step and sampling, beside plain torch and
transformers' `generate`.

Four prompts of 88 tokens with 8 attempts of 16 tokens each, one thread; float32, and products in
bfloat16 where the processor has instructions for them. Tokens per processor second; of training,
all tokens of all samples are counted, however often they are computed. Needs
`ajet model fetch smollm2-135m`.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ajet_sdk.config.model_source import NAMED_MODELS
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.engines.local.products import instructions, multiply_in
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.protocols import Sampling
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.types import Sample, Span, Timeline
from tests.bench import Figure
from tests.bench.training import cpu_seconds

TASKS, ATTEMPTS, PROMPT, REPLY = 4, 8, 88, 16
MODEL = NAMED_MODELS["smollm2-135m"]


def ids(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(100, 40_000) for _ in range(length)]


def sample(group: int, attempt: int, prompt: list[int], reply: list[int]) -> Sample:
    mask = np.arange(PROMPT + REPLY) >= PROMPT
    name = f"{group}.{attempt}"
    line = Timeline(
        agent="",
        token_ids=[*prompt, *reply],
        loss_mask=mask,
        logprobs=np.where(mask, -8.0, 0.0),
        call_ids=(name,),
        spans=(Span(call_id=name, start=PROMPT, end=PROMPT + REPLY),),
    )
    advantages = np.where(mask, 1.0 if attempt % 2 else -1.0, 0.0).astype(np.float32)
    return Sample(
        timeline=line, episode_id=name, group_id=str(group), reward=0.0, advantages=advantages
    )


def plain_step(
    model: Any, optimizer: torch.optim.Optimizer, prompts: list[list[int]], replies: list[Any]
) -> None:
    """A policy-gradient step as one would write it by hand, each group's prompt computed once."""
    for prompt, group in zip(prompts, replies, strict=True):
        row, depths, owner, at, targets = [*prompt], [*range(PROMPT)], [0] * PROMPT, [], []
        for k, reply in enumerate(group):
            at += [PROMPT - 1, *range(len(row), len(row) + REPLY - 1)]
            targets += reply
            row += reply[:-1]
            depths += range(PROMPT, PROMPT + REPLY - 1)
            owner += [k + 1] * (REPLY - 1)
        owns = torch.tensor(owner)
        seen = torch.ones(len(row), len(row), dtype=torch.bool).tril() & (
            (owns == 0) | (owns[:, None] == owns)
        )
        mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
        out = model.model(
            input_ids=torch.tensor([row]),
            position_ids=torch.tensor([depths]),
            attention_mask=mask,
            use_cache=False,
        )
        logits = model.lm_head(out.last_hidden_state[0][torch.tensor(at)])
        (
            torch.log_softmax(logits, -1).gather(1, torch.tensor(targets)[:, None]).mean() / TASKS
        ).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def products_seconds(model: Any, passes: Sequence[tuple[int, int]], products: torch.dtype) -> float:
    """Processor seconds of passes' matrix products alone, the limit of what computes them: for each
    pass its tokens, and those of them that have logits. The head multiplies in float32."""
    body = [
        layer.weight.detach().to(products)
        for layer in model.model.modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    head = model.lm_head.weight.detach()
    inputs = {
        (w.shape[1], w.dtype): torch.ones(1024, w.shape[1], dtype=w.dtype) for w in (*body, head)
    }

    def multiply(tokens: int, weight: torch.Tensor) -> None:
        torch.nn.functional.linear(inputs[weight.shape[1], weight.dtype][:tokens], weight)

    def work() -> None:
        with torch.inference_mode():
            for tokens, scored in passes:
                for weight in body:
                    multiply(tokens, weight)
                multiply(scored, head)

    return cpu_seconds(work, 2)


def of_limit(what: str, seconds: float, least: float, goal: float) -> Figure:
    """Its time over that of its matrix products alone."""
    ratio = seconds / least
    return Figure(
        f"{what} over its matrix products alone", ratio, "×", f"at most {goal:g}", ratio <= goal
    )


def training(prompts: list[list[int]], draw: random.Random) -> list[Figure]:
    replies = [[ids(draw, REPLY) for _ in range(ATTEMPTS)] for _ in prompts]
    samples = [
        sample(i, k, prompt, reply)
        for i, (prompt, group) in enumerate(zip(prompts, replies, strict=True))
        for k, reply in enumerate(group)
    ]
    tokens = len(samples) * (PROMPT + REPLY)
    forward = [(PROMPT + ATTEMPTS * (REPLY - 1), ATTEMPTS * (REPLY - 1) + 1)] * TASKS
    step = forward * 3  # the backward pass has twice as many products
    model = load_model(MODEL.directory, dtype="float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    plain = cpu_seconds(lambda: plain_step(model, optimizer, prompts, replies), 2)
    trainer = Trainer(model, TrainerSettings(lr=1e-9))
    ours = cpu_seconds(lambda: trainer.step(samples), 2)
    figures = [
        Figure("training", tokens / ours, "tokens/CPU-s"),
        Figure(f"the same over plain torch, prompt once ({tokens / plain:,.0f} tokens/CPU-s)", plain / ours, "×",
               "at least 0.77", plain / ours >= 1 / 1.3),
        of_limit("training", ours, products_seconds(model, step, torch.float32), 1.4),
    ]  # fmt: skip
    if instructions():
        multiply_in(model, torch.bfloat16)
        lower = cpu_seconds(lambda: trainer.step(samples), 2)
        figures.append(
            Figure(f"bfloat16 over float32 ({tokens / lower:,.0f} tokens/CPU-s)", ours / lower, "×")
        )
        figures.append(
            of_limit(
                "training in bfloat16", lower, products_seconds(model, step, torch.bfloat16), 1.7
            )
        )
    return figures


def sampling(prompts: list[list[int]]) -> list[Figure]:
    model = load_model(MODEL.directory, dtype="float32")
    tokenizer = HFTokenizer(MODEL.directory)
    count = len(prompts) * ATTEMPTS * REPLY

    async def rate() -> float:
        sampler = LocalSampler(model, tokenizer, model_name="m", max_model_len=256, max_batch=64)
        how = Sampling(max_tokens=REPLY, ignore_eos=True)

        async def replies() -> None:
            await asyncio.gather(
                *(
                    sampler.sample(p, how, f"{i}/{k}")
                    for i, p in enumerate(prompts)
                    for k in range(ATTEMPTS)
                )
            )
            async with sampler.exclusive():
                pass

        seconds = await asyncio.to_thread(cpu_seconds, lambda: asyncio.run(replies()), 2)
        await sampler.aclose()
        return count / seconds

    def generate(rows: Sequence[list[int]]) -> None:
        with torch.inference_mode():
            model.generate(
                torch.tensor(rows),
                do_sample=True,
                top_k=0,
                max_new_tokens=REPLY,
                min_new_tokens=REPLY,
                pad_token_id=2,
            )

    theirs = count / cpu_seconds(lambda: generate([p for p in prompts for _ in range(ATTEMPTS)]), 2)
    ours = asyncio.run(rate())
    rows = len(prompts) * ATTEMPTS
    passes = [(len(prompts) * PROMPT, len(prompts)), *[(rows, rows)] * (REPLY - 1)]
    figures = [
        Figure("sampling", ours, "tokens/CPU-s"),
        Figure(
            f"the same over transformers generate ({theirs:,.0f} tokens/CPU-s)", ours / theirs, "×"
        ),
        of_limit("sampling", count / ours, products_seconds(model, passes, torch.float32), 1.4),
    ]
    if instructions():
        multiply_in(model, torch.bfloat16)
        lower = asyncio.run(rate())
        figures.append(
            Figure(
                f"sampling in bfloat16 over float32 ({lower:,.0f} tokens/CPU-s)", lower / ours, "×"
            )
        )
        figures.append(
            of_limit(
                "sampling in bfloat16",
                count / lower,
                products_seconds(model, passes, torch.bfloat16),
                1.7,
            )
        )
    return figures


def main() -> list[Figure]:
    if not (MODEL.directory / "config.json").is_file():
        print(
            f"pretrained: skipped, {MODEL.directory} is not there; ajet model fetch {MODEL.name}",
            file=sys.stderr,
        )
        return []
    torch.set_num_threads(1)
    draw = random.Random(0)
    prompts = [ids(draw, PROMPT) for _ in range(TASKS)]
    return training(prompts, draw) + sampling(prompts)
