"""The local sampler against the model itself: every log-probability recomputed, every reply
independent of company."""

from __future__ import annotations

import asyncio
import copy
import gc
import random
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ajet_sdk.engines.local.batch import RunningBatch
from ajet_sdk.engines.local.cache import RowCache
from ajet_sdk.engines.local.forward import LlamaForward, ModelForward, distance, forward_of
from ajet_sdk.engines.local.products import exact_products, multiply_in, products_of
from ajet_sdk.engines.local.sampler import LocalSampler, SamplingCopy
from ajet_sdk.engines.local.single import SingleConversation
from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.errors import ConfigError, ContextOverflow, EngineUnavailable, RequestRefused
from ajet_sdk.protocols import Sampled, Sampling, SamplingCancelled
from ajet_sdk.types import Call
from tests.waiting import until_async

VOCABULARY = 320
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def make(architecture: str, **changes: Any) -> Any:
    configs: dict[str, tuple[Any, Any]] = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
        "gemma2": (Gemma2Config, Gemma2ForCausalLM),
        "gpt2": (GPT2Config, GPT2LMHeadModel),
        "bloom": (BloomConfig, BloomForCausalLM),
        "mamba": (MambaConfig, MambaForCausalLM),
    }
    config_class, model_class = configs[architecture]
    torch.manual_seed(0)
    model = model_class(config_class(**(_SIZES | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


class Tokens:
    """Id i is the byte i; 300 ends a turn."""

    chat_template = None
    pictures = None
    variables: dict[str, Any] = {}
    eos_ids = frozenset({300})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return make("qwen3", tie_word_embeddings=True)


def open_sampler(model: Any, **options: Any) -> LocalSampler:
    return LocalSampler(model, Tokens(), **{"model_name": "tiny", "max_model_len": 256, **options})


def run(
    model: Any, body: Callable[[LocalSampler], Coroutine[Any, Any, None]], **options: Any
) -> None:
    async def main() -> None:
        sampler = open_sampler(model, **options)
        try:
            await body(sampler)
        finally:
            await sampler.aclose()

    asyncio.run(main())


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    chance = random.Random(seed)
    return [
        [chance.randrange(256) for _ in range(chance.randrange(1, longest))] for _ in range(count)
    ]


def recomputed(
    model: Any, prompt: Sequence[int], reply: Sampled, sampling: Sampling
) -> np.ndarray[Any, Any]:
    """Log-probabilities of the reply from one full pass, by the definition of each sampling
    parameter."""
    ids = [*prompt, *reply.output_ids]
    with torch.inference_mode():
        logits = (
            model(input_ids=torch.tensor([ids]), use_cache=False)
            .logits[0, len(prompt) - 1 : -1]
            .double()
        )
    logits = logits / (sampling.temperature or 1.0)
    for row in logits if sampling.top_k > 0 or sampling.top_p < 1 else ():
        order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))
        allowed = order[: sampling.top_k] if sampling.top_k > 0 else order
        weights = torch.softmax(row[torch.tensor(allowed)], 0).tolist()
        total, nucleus = 0.0, set()
        for token, weight in zip(allowed, weights, strict=True):
            if total < sampling.top_p:
                nucleus.add(token)
            total += weight
        row[[i for i in range(len(row)) if i not in nucleus]] = -torch.inf
    logprobs = torch.log_softmax(logits, -1)
    return np.array([float(logprobs[i, token]) for i, token in enumerate(reply.output_ids)])


def check(
    model: Any, prompt: Sequence[int], reply: Sampled, sampling: Sampling, tolerance: float = 1e-4
) -> None:
    assert len(reply.logprobs) == len(reply.output_ids)
    np.testing.assert_allclose(
        reply.logprobs, recomputed(model, prompt, reply, sampling), atol=tolerance
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "changes", "batch", "forward"),
    [
        ("qwen3", {"tie_word_embeddings": True}, RunningBatch, LlamaForward),
        ("qwen2", {}, RunningBatch, LlamaForward),
        ("llama", {"attention_bias": True, "num_key_value_heads": 4}, RunningBatch, LlamaForward),
        ("llama", {"mlp_bias": True, "num_key_value_heads": 1}, RunningBatch, ModelForward),
        ("mistral", {"sliding_window": None}, RunningBatch, LlamaForward),
        ("mistral", {"sliding_window": 16}, SingleConversation, None),
        ("gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 8}, SingleConversation, None),
        ("gpt2", {}, RunningBatch, ModelForward),
        ("bloom", {}, SingleConversation, None),
        ("mamba", {}, SingleConversation, None),
    ],
)
def test_logprobs_are_those_of_a_full_pass_over_two_turns(
    architecture: str, changes: dict[str, Any], batch: type, forward: type | None
) -> None:
    model = make(architecture, **changes)

    async def body(sampler: LocalSampler) -> None:
        assert isinstance(sampler._batch, batch)
        if forward is not None:
            assert isinstance(sampler._batch._forward, forward)  # type: ignore[union-attr]
        how = Sampling(max_tokens=12)
        first = prompts(9)
        replies = await asyncio.gather(
            *(sampler.sample(p, how, f"s{i}") for i, p in enumerate(first))
        )
        later = [
            [*p, *r[0].output_ids, *extra]
            for p, r, extra in zip(first, replies, prompts(9, 1, 20), strict=True)
        ]
        again = await asyncio.gather(
            *(sampler.sample(p, how, f"s{i}") for i, p in enumerate(later))
        )
        for prompt, [reply] in zip([*first, *later], [*replies, *again], strict=True):
            check(model, prompt, reply, how)

    run(model, body)


@pytest.mark.filterwarnings("error:.*past_key_values:FutureWarning")
def test_eager_attention_and_lora_give_the_same_logprobs() -> None:
    peft = pytest.importorskip("peft")
    for architecture, changes in (("qwen3", {}), ("llama", {"mlp_bias": True})):
        model = make(architecture, **changes)
        model.config._attn_implementation = "eager"
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, target_modules="all-linear", lora_dropout=0.5
        )
        model = peft.get_peft_model(model, config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        model.train()

        async def body(sampler: LocalSampler, model: Any = model) -> None:
            for prompt in prompts(3):
                [reply] = await sampler.sample(prompt, Sampling(max_tokens=6), "s")
                check(model, prompt, reply, Sampling())

        run(model, body)


@pytest.mark.slow
@settings(max_examples=15)
@given(
    st.floats(0.3, 2.0),
    st.sampled_from([-1, 1, 3, 40]),
    st.sampled_from([1.0, 0.9, 0.4, 1e-6]),
    st.integers(0, 99),
)
def test_logprobs_are_of_the_distribution_drawn_from(
    temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    model = _shared_model()
    how = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=4, seed=seed)

    async def body(sampler: LocalSampler) -> None:
        others = asyncio.gather(
            *(sampler.sample(p, Sampling(max_tokens=9), f"o{p[0]}") for p in prompts(3, seed))
        )
        [reply] = await sampler.sample(prompts(1, seed)[0], how, "mine")
        await others
        check(model, prompts(1, seed)[0], reply, how)

    run(model, body)


_MODELS: list[Any] = []


def _shared_model() -> Any:
    if not _MODELS:
        _MODELS.append(make("qwen3"))
    return _MODELS[0]


@pytest.mark.slow
def test_tokens_come_with_their_probability(qwen3: Any) -> None:
    how = Sampling(temperature=0.8, top_p=0.8, max_tokens=1, n=200)
    prompt = prompts(1)[0]

    async def body(sampler: LocalSampler) -> None:
        replies = [r for _ in range(12) for r in await sampler.sample(prompt, how, "s")]
        counts: dict[int, int] = {}
        chance: dict[int, float] = {}
        for reply in replies:
            token = reply.output_ids[0]
            counts[token] = counts.get(token, 0) + 1
            chance[token] = float(np.exp(reply.logprobs[0]))
        # Each share lies within five standard deviations of its probability.
        for token, probability in chance.items():
            spread = 5 * np.sqrt(probability * (1 - probability) / len(replies))
            assert abs(counts[token] / len(replies) - probability) <= spread + 1e-9
        assert sum(chance.values()) == pytest.approx(1, abs=0.05)

    run(qwen3, body)


@pytest.mark.slow
@settings(max_examples=6)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 1.0]))
def test_a_reply_does_not_depend_on_company_or_cache(seed: int, temperature: float) -> None:
    model = _shared_model()
    how = Sampling(temperature=temperature, max_tokens=10, seed=seed, top_p=0.95)
    mine = prompts(1, seed)[0]
    alone: list[Sampled] = []

    async def solitary(sampler: LocalSampler) -> None:
        alone.extend(await sampler.sample(mine, how, "mine"))

    async def crowded(sampler: LocalSampler) -> None:
        async def other(i: int, prompt: list[int]) -> None:
            await asyncio.sleep(0.001 * (i % 5))
            await sampler.sample(prompt, Sampling(max_tokens=30 - i), f"o{i}")

        related = [mine[: len(mine) // 2] + p for p in prompts(6, seed + 1)]
        others = asyncio.gather(
            *(other(i, p) for i, p in enumerate([*related, *prompts(9, seed + 2), mine]))
        )
        await asyncio.sleep(0.002)
        [reply] = await sampler.sample(mine, how, "mine")
        await others
        assert reply.output_ids == alone[0].output_ids
        np.testing.assert_allclose(reply.logprobs, alone[0].logprobs, atol=1e-4)

    run(model, solitary, deterministic=True)
    run(model, crowded, max_batch=7, kv_bytes=1)


@pytest.mark.slow
@settings(max_examples=4)
@given(st.integers(0, 10_000))
def test_any_walk_of_turns_and_forks_is_exact_in_little_memory(seed: int) -> None:
    """Sessions extend, rewind, fork and end at random; whatever was cached or evicted, the numbers
    are the model's."""
    model = _shared_model()
    chance = random.Random(seed)

    async def session(sampler: LocalSampler, name: str) -> None:
        history = [chance.randrange(256) for _ in range(chance.randrange(1, 25))]
        for _ in range(4):
            how = Sampling(max_tokens=chance.randrange(1, 9), n=chance.randrange(1, 3))
            replies = await sampler.sample(history, how, name)
            for reply in replies:
                check(model, history, reply, how)
            cut = chance.choice([0, 0, chance.randrange(len(history))])
            history = (
                history[: len(history) - cut] + list(chance.choice(replies).output_ids) + [1, 2, 3]
            )
            if chance.random() < 0.2:
                sampler.forget(name)

    async def body(sampler: LocalSampler) -> None:
        await asyncio.gather(*(session(sampler, f"s{i % 4}") for i in range(8)))

    run(model, body, max_batch=5, kv_bytes=100_000)


def test_a_turn_computes_only_what_is_new(qwen3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    forward = LlamaForward.__call__

    def counting(self: Any, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        computed.append(ids.numel())
        return forward(self, ids, *rest)

    async def body(sampler: LocalSampler) -> None:
        monkeypatch.setattr(LlamaForward, "__call__", counting)
        prompt = prompts(1)[0][:30] * 5
        [reply] = await sampler.sample(prompt, Sampling(max_tokens=1), "s")
        assert computed == [len(prompt)]
        computed.clear()
        await sampler.sample([*prompt, *reply.output_ids, 5, 6], Sampling(max_tokens=1), "s")
        assert computed == [3]
        computed.clear()
        await asyncio.gather(
            *(sampler.sample([*prompt, 7, 8], Sampling(max_tokens=1), f"t{i}") for i in range(4))
        )
        assert sum(computed) <= 2 + 4 * 2

    run(qwen3, body)


def test_a_late_request_joins_the_running_batch(qwen3: Any) -> None:
    ended: list[str] = []

    async def body(sampler: LocalSampler) -> None:
        async def call(name: str, tokens: int) -> None:
            await sampler.sample(prompts(1)[0], Sampling(max_tokens=tokens), name)
            ended.append(name)

        long = asyncio.create_task(call("long", 190))
        while not sampler._batch.running:
            await asyncio.sleep(0.001)
        await call("short", 3)
        await long

    run(qwen3, body)
    assert ended == ["short", "long"]


class Parrot(Qwen3ForCausalLM):
    """Says `words` over and over: behind each byte comes the next, whatever the weights."""

    words = "abcdefgé".encode()

    def forward(self, *arguments: Any, **named: Any) -> Any:
        answer = super().forward(*arguments, **named)
        keep = named.get("logits_to_keep", 0)
        logits = torch.full((*named["input_ids"].shape, VOCABULARY), -50.0)
        for b, row in enumerate(named["input_ids"].tolist()):
            for t, token in enumerate(row):
                logits[b, t, self.words[(self.words.find(token) + 1) % len(self.words)]] = 50.0
        answer.logits = logits[:, keep] if isinstance(keep, torch.Tensor) else logits[:, -keep:]
        return answer


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("def",), "bc"),
        (("zzz", "fg", "ef"), "bcd"),
        (("g", "cdefg"), "b"),
        (("é",), "bcdefg"),
        (("b",), ""),
    ],
)
def test_stop_strings_end_a_reply_wherever_tokens_end(stop: tuple[str, ...], expected: str) -> None:
    model = Parrot(Qwen3Config(**_SIZES)).eval()

    async def body(sampler: LocalSampler) -> None:
        how = Sampling(temperature=0, max_tokens=20, stop=stop)
        results = await asyncio.gather(
            *(sampler.sample([ord("a")], how, f"s{i}") for i in range(3))
        )
        for [reply] in results:
            assert (reply.text, reply.finish_reason) == (expected, "stop")
            full = Tokens().decode(reply.output_ids)
            assert full.startswith(expected) and full[len(expected) :].startswith(stop)
        [free] = await sampler.sample(
            [ord("a")], Sampling(temperature=0, max_tokens=3, stop=("xyz",)), "t"
        )
        assert (free.text, free.finish_reason, len(free.output_ids)) == (None, "length", 3)

    run(model, body)


def test_an_end_of_turn_token_ends_a_reply_and_is_part_of_it(qwen3: Any) -> None:
    async def body(sampler: LocalSampler) -> None:
        replies = await sampler.sample(
            prompts(1)[0], Sampling(temperature=3.0, n=60, max_tokens=150), "s"
        )
        for reply in replies:
            if reply.finish_reason == "stop":
                assert reply.output_ids[-1] == 300
            assert 300 not in reply.output_ids[:-1]
        assert {r.finish_reason for r in replies} == {"stop", "length"}
        assert len({tuple(r.output_ids) for r in replies}) == len(replies)

    run(qwen3, body)


def test_seeds_repeat_and_their_absence_varies(qwen3: Any) -> None:
    async def body(sampler: LocalSampler) -> None:
        async def ids(seed: int | None, n: int = 1) -> list[list[int]]:
            replies = await sampler.sample([1, 2, 3], Sampling(seed=seed, n=n, max_tokens=8), "s")
            return [list(reply.output_ids) for reply in replies]

        assert await ids(-5) == await ids(-5)
        assert await ids(1) != await ids(2)
        assert await ids(None) != await ids(None)
        assert (await ids(7, n=3))[0] == (await ids(7))[0]

    run(qwen3, body)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "one conversation at a time"])
def test_deterministic_sampling_repeats_to_the_bit_whatever_else_arrives(kind: str) -> None:
    model = (
        make("qwen3")
        if kind == "rows"
        else make("gemma2", sliding_window=16, query_pre_attn_scalar=8)
    )

    def replies(order: list[int], at_once: bool) -> dict[int, list[tuple[Any, Any]]]:
        found: dict[int, list[tuple[Any, Any]]] = {}

        async def session(sampler: LocalSampler, i: int) -> None:
            prompt = [7] * 20 + prompts(1, i)[0]
            for turn in range(3):
                [reply] = await sampler.sample(
                    prompt, Sampling(max_tokens=6, seed=i * 10 + turn), f"s{i}"
                )
                found.setdefault(i, []).append((reply.output_ids, reply.logprobs))
                prompt = [*prompt, *reply.output_ids, 1, 2, 3]

        async def body(sampler: LocalSampler) -> None:
            if at_once:
                await asyncio.gather(*(session(sampler, i) for i in order))
            else:
                for i in order:
                    await session(sampler, i)

        run(model, body, deterministic=True)
        return found

    alone = replies([0, 1, 2, 3, 4, 5, 6], at_once=False)
    assert (
        replies([3, 6, 1, 0, 5, 2, 4], at_once=True)
        == alone
        == {**alone, **replies([3], at_once=False)}
    )


def test_exclusive_frees_the_keys_and_values_of_the_cache() -> None:
    """A laptop has the memory once: for keys and values while sampling, for activations while
    training."""
    model = make("llama", num_hidden_layers=8, num_key_value_heads=4, head_dim=64)
    rows, length = 16, 400
    cached = rows * length * 2 * 8 * 4 * 64 * 4

    async def body(sampler: LocalSampler) -> None:
        for _ in range(2):
            await sampler.sample(
                [7] * length, Sampling(n=rows, max_tokens=3, ignore_eos=True), "session"
            )
            before = bytes_of_tensors()
            async with sampler.exclusive():
                assert before - bytes_of_tensors() >= cached

    run(model, body, max_model_len=512)


def bytes_of_tensors() -> int:
    """Bytes of the storages of all tensors that are alive; what the allocator keeps of freed ones
    isn't counted."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def test_exclusive_suspends_running_calls_holds_new_ones_and_drops_what_was_cached(
    qwen3: Any,
) -> None:
    async def body(sampler: LocalSampler) -> None:
        versions: dict[str, int | None] = {}
        updates_of: dict[str, int] = {}

        async def call(name: str, tokens: int) -> None:
            sampling = Sampling(max_tokens=tokens, ignore_eos=True)
            [reply] = await sampler.sample(prompts(1)[0], sampling, name)
            versions[name] = reply.policy_version
            updates_of[name] = len(reply.weight_updates)

        early = asyncio.create_task(call("early", 150))
        while not sampler._batch.running:
            await asyncio.sleep(0.001)
        late: list[asyncio.Task[None]] = []

        async def update(version: int) -> None:
            async with sampler.exclusive():
                assert not sampler._batch.running  # `early` goes on later
                assert not sampler._batch.resting  # a trainer on a GPU has the memory
                late.append(asyncio.create_task(call(f"late{version}", 2)))
                await asyncio.sleep(0.05)
                assert f"late{version}" not in versions
                sampler.policy_version = version

        updates = asyncio.gather(update(1), update(2))
        await asyncio.sleep(0.01)
        abandoned = asyncio.create_task(update(3))
        await asyncio.sleep(0.01)
        abandoned.cancel()
        await updates
        await asyncio.gather(early, *late)
        assert versions == {"early": 0, "late1": 2, "late2": 2}
        assert updates_of == {"early": 2, "late1": 0, "late2": 0}

    run(qwen3, body)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])  # batched, and one at a time
@pytest.mark.parametrize("apart", [False, True])
def test_each_token_has_the_probability_of_the_weights_of_its_version(
    architecture: str, apart: bool
) -> None:
    """Weights change up to 12 times under 12 replies, more than are sampled at once."""
    model = make(architecture)
    copies = {0: copy.deepcopy(model)}
    asked = prompts(4)

    async def body(sampler: LocalSampler) -> None:
        async def call(prompt: list[int], i: int) -> list[Sampled]:
            stop = ("never",) if i % 2 else ()
            sampling = Sampling(n=3, max_tokens=40, ignore_eos=True, seed=i, stop=stop)
            return await sampler.sample(prompt, sampling, f"session{i}")

        calls = asyncio.gather(*(call(prompt, i) for i, prompt in enumerate(asked)))
        for version in range(1, 13):
            await until_async(lambda: bool(sampler._batch.running) or calls.done())
            async with sampler.exclusive():
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter) * 0.05)
                copies[version] = copy.deepcopy(model)
                sampler.policy_version = version
        spans = 0
        for prompt, replies in zip(asked, await calls, strict=True):
            for reply in replies:
                assert len(reply.output_ids) == 40
                spans += len(reply.weight_updates)
                assert_of_its_versions(copies, prompt, reply)
        assert spans >= 6

    run(model, body, max_batch=8, apart=apart)


def assert_of_its_versions(copies: dict[int, Any], prompt: Sequence[int], reply: Sampled) -> None:
    """Each log-probability is that of the model of the token's version, given all before it."""
    call = Call(
        episode_id="e",
        output_ids=reply.output_ids,
        logprobs=reply.logprobs,
        policy_version=reply.policy_version,
        weight_updates=reply.weight_updates,
    )
    assert call.versions is not None
    versions = call.versions.tolist()
    assert versions == sorted(versions)
    ids = torch.tensor([[*prompt, *reply.output_ids]])
    expected = {}
    for version in set(versions):
        with torch.no_grad():
            logits = copies[version](ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        scores = torch.log_softmax(logits, -1)
        expected[version] = scores.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    for place, version in enumerate(versions):
        assert abs(float(expected[version][place]) - reply.logprobs[place]) < 1e-4, (place, version)


def test_a_suspended_call_can_be_cancelled(qwen3: Any) -> None:
    async def body(sampler: LocalSampler) -> None:
        sampling = Sampling(n=2, max_tokens=400, ignore_eos=True)
        call = asyncio.create_task(sampler.sample([1, 2], sampling, "s"))
        await until_async(lambda: bool(sampler._batch.running))
        async with sampler.exclusive():
            call.cancel()
            with pytest.raises(SamplingCancelled) as cancelled:
                await call
        assert cancelled.value.tokens >= 2
        [reply] = await sampler.sample([1, 2], Sampling(max_tokens=3, ignore_eos=True), "s")
        assert len(reply.output_ids) == 3

    run(qwen3, body)


def test_new_weights_are_the_ones_sampled_from() -> None:
    model = make("qwen3")

    async def body(sampler: LocalSampler) -> None:
        prompt = prompts(1)[0]
        before = await sampler.sample(prompt, Sampling(max_tokens=5, seed=1), "s")
        async with sampler.exclusive():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            model.train()
        after = await sampler.sample(prompt, Sampling(max_tokens=5, seed=1), "s")
        check(model.eval(), prompt, after[0], Sampling())
        assert before[0].logprobs != after[0].logprobs

    run(model, body)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc keeps a heap for each thread")
@pytest.mark.slow
def test_memory_that_a_trainer_freed_goes_back_to_the_system() -> None:
    """In a process of its own, whose resident memory nothing else changes."""
    program = """
import asyncio
from ajet_sdk.memory import resident_bytes
from ajet_sdk.protocols import Sampling
from tests.sdk.engines.test_local_sampler import make, run

def train():
    blocks = [bytearray(100_000) for _ in range(4_000)]
    return blocks[::40]  # each in another part of the heap

async def body(sampler):
    before = resident_bytes()
    async with sampler.exclusive():
        kept = await asyncio.to_thread(train)
        after = resident_bytes()
    await sampler.sample([1, 2], Sampling(max_tokens=1), "s")
    print(after - before > 300e6, resident_bytes() - before < 100e6, len(kept))

run(make("qwen3"), body)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True True 100\n"


def test_a_sharp_model_in_bfloat16_takes_the_short_pass() -> None:
    """Rounding is relative: logits of 50 are off by more than those of 1, and are as right."""
    model = make("qwen3").to(torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight.mul_(30)
    assert isinstance(forward_of(model, RowCache()), LlamaForward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_other_arithmetic_is_found_however_flat_its_logits_are(
    dtype: torch.dtype,
) -> None:
    model = make("qwen3").to(dtype)
    with torch.no_grad():
        model.model.norm.weight.mul_(0.01)
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3
    assert isinstance(forward_of(model, RowCache()), ModelForward)


@pytest.mark.slow
def test_an_adapter_in_bfloat16_is_sampled_as_it_is_trained() -> None:
    """Merged into bfloat16 weights, steps as small as those of training would be rounded away."""
    import peft

    torch.manual_seed(0)
    base = make("qwen3", tie_word_embeddings=True).to(torch.bfloat16)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 3e-3)

    async def body(sampler: LocalSampler) -> None:
        for prompt in prompts(8):
            [reply] = await sampler.sample(prompt, Sampling(max_tokens=12), "s")
            check(model, prompt, reply, Sampling(), tolerance=0.1)

    run(model, body)


@pytest.mark.parametrize("adapted", [False, True])
def test_products_in_bfloat16_are_sampled_in_the_short_pass_as_they_are_trained(
    adapted: bool,
) -> None:
    torch.manual_seed(0)
    model = make("qwen3", tie_word_embeddings=True)
    if adapted:
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
        ).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.add_(torch.randn_like(parameter) * 3e-2)
    ids = torch.arange(1, 9)[None]
    exact = model(ids).logits
    multiply_in(model, torch.bfloat16)
    assert isinstance(forward_of(model, RowCache()), LlamaForward)
    assert products_of(model) == torch.bfloat16, "compared exactly, and put back"
    rounded = model(ids).logits
    assert 1e-5 < distance(rounded, exact) < 0.03 and rounded.dtype == torch.float32
    with exact_products(model):
        assert torch.equal(model(ids).logits, exact)

    async def body(sampler: LocalSampler) -> None:
        for prompt in prompts(8):
            [reply] = await sampler.sample(prompt, Sampling(max_tokens=12), "s")
            check(model, prompt, reply, Sampling(), tolerance=0.2)  # 8 bits: 0.1 of -9

    run(model, body)


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_an_adapter_outside_the_layers_is_part_of_the_model(name: str) -> None:
    """A new one changes nothing, so that no trial would tell."""
    import peft

    base = make("qwen3", tie_word_embeddings=False)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", name])).eval()
    assert isinstance(forward_of(model, RowCache()), ModelForward)


def test_a_copy_of_a_model_with_products_in_bfloat16_has_weights_of_its_own() -> None:
    model, ids = make("qwen3"), torch.arange(1, 9)[None]
    multiply_in(model, torch.bfloat16)
    copied = SamplingCopy(model)
    before = model(ids).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(copied.module(ids).logits, before)
    copied.catch_up()
    assert torch.equal(copied.module(ids).logits, model(ids).logits)


def test_cancelling_frees_the_row_and_the_queue(qwen3: Any) -> None:
    async def body(sampler: LocalSampler) -> None:
        calls = [
            asyncio.create_task(sampler.sample([i + 1], Sampling(max_tokens=250), f"s{i}"))
            for i in range(6)
        ]
        while sampler._batch.running < 2:
            await asyncio.sleep(0.001)
        for call in calls:
            call.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results)
        [reply] = await sampler.sample([9], Sampling(max_tokens=2), "t")
        assert len(reply.output_ids) == 2
        assert sampler._batch.running == 0 and not sampler._waiting

    run(qwen3, body, max_batch=2)


@pytest.mark.parametrize(
    ("rope", "steady"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, 64),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [8.0] * 4,
                "original_max_position_embeddings": 32,
            },
            32,
        ),
    ],
    ids=lambda value: str(value)[:24],
)
def test_angles_that_hang_on_the_longest_conversation_are_refused_beyond_their_length(
    rope: Any, steady: int
) -> None:
    """Below it every log-probability is the model's, whoever shares the batch; beyond it none would
    have to be."""
    model = make("llama", max_position_embeddings=64, rope_parameters={"rope_theta": 1e4, **rope})

    async def body(sampler: LocalSampler) -> None:
        asked = [[7] * (steady - 5), [8, 9], [1] * 20]
        for prompt, [reply] in zip(asked, await asyncio.gather(*(
            sampler.sample(prompt, Sampling(max_tokens=5), str(i)) for i, prompt in enumerate(asked)
        )), strict=True):  # fmt: skip
            check(model, prompt, reply, Sampling())

    run(model, body, max_model_len=steady)
    with pytest.raises(ConfigError, match=f"beyond {steady} tokens the model's rotary embedding"):
        open_sampler(model, max_model_len=steady + 1)


def test_lengths_are_kept(qwen3: Any) -> None:
    async def body(sampler: LocalSampler) -> None:
        [reply] = await sampler.sample([1] * 250, Sampling(max_tokens=50), "s")
        assert (len(reply.output_ids), reply.finish_reason) == (6, "length")
        with pytest.raises(ContextOverflow, match="256"):
            await sampler.sample([1] * 256, Sampling(), "s")
        for wrong in (Sampling(n=0), Sampling(max_tokens=0)):
            with pytest.raises(RequestRefused):
                await sampler.sample([1], wrong, "s")
        for ids in ([], [VOCABULARY], [-1]):
            with pytest.raises(RequestRefused):
                await sampler.sample(ids, Sampling(), "s")

    run(qwen3, body)


def test_a_broken_model_fails_its_calls_and_not_the_next_ones() -> None:
    model = make("qwen3")

    async def body(sampler: LocalSampler) -> None:
        weight = model.model.norm.weight
        kept = weight.detach().clone()
        async with sampler.exclusive():
            weight.data.fill_(float("nan"))
        with pytest.raises(EngineUnavailable, match="not finite"):
            await sampler.sample([1, 2], Sampling(n=3), "s")
        async with sampler.exclusive():
            weight.data.copy_(kept)
        [reply] = await sampler.sample([1, 2], Sampling(max_tokens=3), "s")
        check(model, [1, 2], reply, Sampling())

    run(model, body)


def test_closing_fails_what_runs_and_what_comes_later(qwen3: Any) -> None:
    async def main() -> None:
        sampler = open_sampler(qwen3, max_batch=1)
        calls = [
            asyncio.create_task(sampler.sample([1], Sampling(max_tokens=250), "s"))
            for _ in range(3)
        ]
        await asyncio.sleep(0.02)
        await sampler.aclose()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert any(isinstance(r, EngineUnavailable) for r in results)
        assert all(isinstance(r, (EngineUnavailable, list)) for r in results)
        with pytest.raises(EngineUnavailable):
            await sampler.sample([1], Sampling(), "s")

    asyncio.run(main())


def test_calls_from_several_event_loops_are_answered(qwen3: Any) -> None:
    async def body(sampler: LocalSampler) -> None:
        def other_loop(i: int) -> int:
            [reply] = asyncio.run(sampler.sample([i + 1], Sampling(max_tokens=5), f"s{i}"))
            return len(reply.output_ids)

        assert (
            await asyncio.gather(*(asyncio.to_thread(other_loop, i) for i in range(5))) == [5] * 5
        )

    run(qwen3, body)


def test_forgotten_sessions_leave_no_rows(qwen3: Any) -> None:
    async def body(sampler: LocalSampler) -> None:
        running = asyncio.create_task(sampler.sample([5], Sampling(max_tokens=40), "s0"))
        await asyncio.gather(
            *(sampler.sample([i + 1], Sampling(max_tokens=2), f"s{i}") for i in range(4))
        )
        for i in range(4):
            sampler.forget(f"s{i}")
        await running
        sampler.forget("s0")
        await sampler.sample([1], Sampling(max_tokens=1), "last")
        await until_async(lambda: sampler._batch.resting == 1)

    run(qwen3, body)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


def test_the_byte_tokenizer_serves_too() -> None:
    tokenizer = ByteTokenizer()
    size = max([*tokenizer.eos_ids, 255]) + 1
    model = make("qwen3", vocab_size=max(size, 272))

    async def main() -> None:
        sampler = LocalSampler(model, tokenizer, model_name="tiny", max_model_len=64, max_batch=4)
        replies = await sampler.sample(
            tokenizer.encode("hello"), Sampling(max_tokens=4, stop=("\x00",)), "s"
        )
        assert 1 <= len(replies[0].output_ids) <= 4
        await sampler.aclose()

    asyncio.run(main())
