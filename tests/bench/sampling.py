"""The local sampler: tokens per CPU second against transformers' own `generate`, what kept keys and
values save, and requests a second through `ajet serve`. The model has 0.12M parameters and random
weights.
"""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.protocols import Sampling
from ajet_sdk.tokens.huggingface import HFTokenizer
from tests.bench import Figure

BATCH, PROMPT, NEW = 128, 84, 64
TURNS, OBSERVATION, ACTION, EPISODES = 20, 25, 4, 16
CONCURRENCY, REQUESTS, REPLY = 16, 320, 24


def tiny() -> tuple[Any, PreTrainedTokenizerFast]:
    """A Qwen3 of 0.12M parameters that never ends a turn by itself, and a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate([*specials, *letters])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|end|>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=360,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=359,
        pad_token_id=0,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval(), tokenizer


def ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 250), k=count)


def sampler_of(model: Any, tokenizer: PreTrainedTokenizerFast) -> LocalSampler:
    return LocalSampler(
        model, HFTokenizer(tokenizer), model_name="tiny", max_model_len=2048, max_batch=BATCH
    )


async def sampled(sampler: LocalSampler, prompts: Sequence[list[int]], new: int, name: str) -> int:
    """Tokens sampled, all prompts at once; then everything kept of them is dropped."""
    how = Sampling(max_tokens=new)
    replies = await asyncio.gather(
        *(sampler.sample(p, how, f"{name}{i}") for i, p in enumerate(prompts))
    )
    async with sampler.exclusive():
        pass
    return sum(len(reply.output_ids) for [reply] in replies)


def generated(model: Any, prompts: Sequence[list[int]], new: int) -> int:
    with torch.inference_mode():
        out = model.generate(
            torch.tensor(prompts), do_sample=True, max_new_tokens=new, eos_token_id=359, top_k=0
        )
    return int((out.shape[1] - len(prompts[0])) * len(prompts))


def throughput(model: Any, tokenizer: PreTrainedTokenizerFast, batch: int) -> tuple[float, float]:
    """Tokens per CPU second of ours and of `generate`, over different prompts, the best of three
    rounds each."""

    async def ours() -> float:
        sampler = sampler_of(model, tokenizer)
        rates = []
        for seed in range(3):
            prompts = [ids(PROMPT, seed * BATCH + i) for i in range(batch)]
            begin = time.process_time()
            count = await sampled(sampler, prompts, NEW, "s")
            rates.append(count / (time.process_time() - begin))
        await sampler.aclose()
        return max(rates)

    theirs = []
    for seed in range(3):
        prompts = [ids(PROMPT, seed * BATCH + i) for i in range(batch)]
        begin = time.process_time()
        count = generated(model, prompts, NEW)
        theirs.append(count / (time.process_time() - begin))
    return asyncio.run(ours()), max(theirs)


def turns(model: Any, tokenizer: PreTrainedTokenizerFast) -> float:
    """CPU time of episodes of many turns with nothing kept between turns, over that with everything
    kept."""

    async def episodes(sampler: LocalSampler, keep: bool) -> float:
        begin = time.process_time()

        async def episode(number: int) -> None:
            prompt = ids(PROMPT, number)
            for turn in range(TURNS):
                session = f"e{number}" if keep else f"e{number}-{turn}"
                [reply] = await sampler.sample(prompt, Sampling(max_tokens=ACTION), session)
                prompt = [*prompt, *reply.output_ids, *ids(OBSERVATION, turn)]
                if not keep:
                    sampler.forget(session)

        await asyncio.gather(*(episode(i) for i in range(EPISODES)))
        return time.process_time() - begin

    async def both() -> float:
        sampler = sampler_of(model, tokenizer)
        await episodes(sampler, keep=True)
        kept = await episodes(sampler, keep=True)
        async with sampler.exclusive():
            pass
        again = await episodes(sampler, keep=False)
        await sampler.aclose()
        return again / kept

    return asyncio.run(both())


async def requests(url: str) -> tuple[float, float]:
    """Requests a second and the median time of one in milliseconds, from raw clients."""
    times: list[float] = []

    async def client(http: httpx.AsyncClient, number: int) -> None:
        for turn in range(REQUESTS // CONCURRENCY):
            message = {"role": "user", "content": f"What is {number} + {turn}?"}
            begin = time.perf_counter()
            answer = await http.post(
                "/chat/completions", json={"messages": [message], "max_tokens": REPLY}
            )
            answer.raise_for_status()
            times.append(time.perf_counter() - begin)

    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        await asyncio.gather(*(client(http, i) for i in range(CONCURRENCY)))
        times.clear()
        begin = time.perf_counter()
        await asyncio.gather(*(client(http, i) for i in range(CONCURRENCY)))
        rate = len(times) / (time.perf_counter() - begin)
    return rate, sorted(times)[len(times) // 2] * 1000


def served(model: Any, tokenizer: PreTrainedTokenizerFast) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "tiny"
        model.save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
        command = [sys.executable, "-m", "ajet", "serve", str(checkpoint), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            found = next(m for line in server.stdout if (m := re.search(r"http://\S+/v1", line)))
            return asyncio.run(requests(found[0]))
        finally:
            server.terminate()
            server.wait(timeout=20)


def main() -> list[Figure]:
    torch.set_num_threads(1)
    model, tokenizer = tiny()
    rate, theirs = throughput(model, tokenizer, BATCH)
    one, their_one = throughput(model, tokenizer, 1)
    saved = turns(model, tokenizer)
    served_rate, median = served(model, tokenizer)
    return [
        Figure(
            f"tokens per CPU second, {BATCH} at once",
            rate,
            "tok/s",
            "≥ 11,000 on a quiet core",
            rate >= 11_000,
        ),
        Figure(f"the same over transformers generate ({theirs:,.0f} tok/s)", rate / theirs, "×"),
        Figure("tokens per CPU second, one at a time", one, "tok/s"),
        Figure(
            f"the same over transformers generate ({their_one:,.0f} tok/s)", one / their_one, "×"
        ),
        Figure(f"{TURNS} turns: nothing kept over everything kept", saved, "×", "≥ 2", saved >= 2),
        Figure(f"ajet serve, {CONCURRENCY} clients, {REPLY} tokens", served_rate, "requests/s"),
        Figure("ajet serve, median time of a request", median, "ms"),
    ]
