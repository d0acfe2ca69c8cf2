"""vLLM's server as a sampler: exact ids, the probabilities really sampled from, new weights, and
its death."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ajet_sdk.dialects.openai_chat import CHAT
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.logits import process, processors
from ajet_sdk.engines.vllm.engine import has_token_route
from ajet_sdk.engines.vllm.sampler import VllmSampler
from ajet_sdk.engines.vllm.server import Settings
from ajet_sdk.errors import ContextOverflow, EngineError, EngineUnavailable, RequestRefused
from ajet_sdk.protocols import Sampling
from ajet_sdk.tokens.grammars import admits, reply_grammar
from ajet_sdk.tokens.probing import learn

pytest.importorskip("vllm", reason="needs vLLM: just install-trinity")

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def trained(trained_with: Callable[..., Any]) -> Any:
    return trained_with()


def sample(trained: Any, prompt: list[int] = PROMPT, **sampling: Any) -> list[Any]:
    made: list[Any] = asyncio.run(trained.sampler.sample(prompt, Sampling(**sampling), "s"))
    return made


# What is sampled


def test_greedy_ids_are_those_of_transformers(trained: Any) -> None:
    import transformers

    [one] = sample(trained, temperature=0.0, max_tokens=60)
    options = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=60,
        eos_token_id=sorted(trained.tokenizer.eos_ids),
        pad_token_id=0,
    )
    generated = trained.model.generate(torch.tensor([PROMPT]), generation_config=options)
    assert list(one.output_ids) == generated[0, len(PROMPT) :].tolist()
    assert torch.allclose(
        torch.tensor(one.logprobs), trained.logprobs(PROMPT, one.output_ids), atol=1e-4
    )


def test_log_probabilities_are_of_the_distribution_sampled_from(trained: Any) -> None:
    for one in sample(trained, temperature=0.7, max_tokens=50, n=4):
        expected = trained.logprobs(PROMPT, one.output_ids, 0.7)
        assert torch.allclose(torch.tensor(one.logprobs), expected, atol=1e-4)
        plain = trained.logprobs(PROMPT, one.output_ids)
        assert not torch.allclose(torch.tensor(one.logprobs), plain, atol=1e-2)


def test_top_k_is_in_them(trained: Any) -> None:
    for one in sample(trained, temperature=1.0, top_k=3, max_tokens=30, n=2):
        logits = trained.logits(PROMPT, one.output_ids)
        kept = logits.masked_fill(logits < logits.topk(3).values[:, -1:], -torch.inf)
        assert torch.allclose(
            torch.tensor(one.logprobs), trained.picked(kept, one.output_ids), atol=1e-4
        )


def test_a_typed_output_is_of_the_grammar_and_its_mask_is_the_trainers(trained: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy"]}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    asked = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    }
    grammar = reply_grammar(asked, (), learn(trained.tokenizer), trained.tokenizer)
    for one in sample(trained, temperature=1.0, max_tokens=200, n=8, grammar=grammar):
        assert admits(grammar, trained.tokenizer, one.output_ids)
        places, how = range(len(one.output_ids)), Sampling(grammar=grammar)
        logits = trained.logits(PROMPT, one.output_ids)
        masked = process(logits, processors(how, PROMPT, trained.tokenizer), one.output_ids, places)
        assert torch.allclose(
            torch.tensor(one.logprobs), trained.picked(masked, one.output_ids), atol=1e-4
        )
        if one.finish_reason == "stop":
            value = json.loads(trained.tokenizer.decode(one.output_ids[:-1]))
            assert value["a"] <= 99 and value["b"] in ("x", "yy")


@pytest.mark.parametrize(
    "asked",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": -1.0},
        {"repetition_penalty": 1.7},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 0.8},
        {"logit_bias": ((7, 4.0), (8, -100.0))},
        {"min_tokens": 30, "logit_bias": ((2, 5.0),)},
        {"min_tokens": 20, "ignore_eos": True, "stop_token_ids": (9, 11)},
        {"logit_bias": ((7, 3.0),), "frequency_penalty": 1.0, "min_tokens": 5},
    ],
    ids=lambda asked: "+".join(asked),
)
def test_what_changes_the_logits_does_so_as_in_the_trainer(
    trained: Any, asked: dict[str, Any]
) -> None:
    how = Sampling(temperature=0.8, max_tokens=40, n=4, **asked)
    for one in sample(trained, **{"temperature": 0.8, "max_tokens": 40, "n": 4, **asked}):
        ids = one.output_ids
        changed = process(
            trained.logits(PROMPT, ids),
            processors(how, PROMPT, trained.tokenizer),
            ids,
            range(len(ids)),
        )
        assert torch.allclose(
            torch.tensor(one.logprobs), trained.picked(changed / 0.8, ids), atol=1e-4
        )
        assert not torch.allclose(
            torch.tensor(one.logprobs), trained.logprobs(PROMPT, ids, 0.8), atol=1e-4
        )


def test_min_p_is_in_them(trained: Any) -> None:
    for one in sample(trained, temperature=1.0, min_p=0.6, max_tokens=30, n=2):
        logits = trained.logits(PROMPT, one.output_ids)
        p = logits.softmax(-1)
        kept = logits.masked_fill(p < 0.6 * p.max(-1, keepdim=True).values, -torch.inf)
        assert torch.allclose(
            torch.tensor(one.logprobs), trained.picked(kept, one.output_ids), atol=1e-4
        )


def test_greedy_and_random_calls_at_once_keep_their_own(trained: Any) -> None:
    """In one batch of the server, as when a validation and a training step meet."""

    async def body() -> list[list[Any]]:
        asked = [Sampling(temperature=t, max_tokens=30) for t in (0.0, 0.7, 1.3) * 4]
        return await asyncio.gather(*(trained.sampler.sample(PROMPT, one, "s") for one in asked))

    for number, [one] in enumerate(asyncio.run(body())):
        expected = trained.logprobs(PROMPT, one.output_ids, (1.0, 0.7, 1.3)[number % 3])
        assert torch.allclose(torch.tensor(one.logprobs), expected, atol=1e-4)


def test_a_seed_repeats_and_choices_differ(trained: Any) -> None:
    def ids(**sampling: Any) -> list[tuple[int, ...]]:
        return [tuple(one.output_ids) for one in sample(trained, max_tokens=20, **sampling)]

    assert ids(seed=2**64 + 3, n=3) == ids(seed=2**64 + 3, n=3)
    assert len(set(ids(seed=3, n=3) + ids(seed=4, n=3))) == 6
    assert len(set(ids() + ids() + ids())) == 3
    assert len(set(ids(temperature=0.0, n=3))) == 1 and len(ids(temperature=0.0, n=3)) == 3


def test_a_reply_ends_with_the_id_that_ended_it(trained: Any) -> None:
    ends = trained.tokenizer.eos_ids
    replies = sample(trained, max_tokens=400, n=16)
    stopped = [one for one in replies if one.finish_reason == "stop"]
    assert stopped and all(one.output_ids[-1] in ends and one.text is None for one in stopped)
    assert all(ends.isdisjoint(one.output_ids[:-1]) for one in stopped)
    assert all(len(one.output_ids) == 400 for one in replies if one.finish_reason == "length")


def test_a_stop_string_cuts_the_text_and_no_id(trained: Any) -> None:
    decode = trained.tokenizer.decode
    [whole] = sample(trained, max_tokens=40, seed=11)
    ids = list(whole.output_ids)
    plain = (
        k
        for k in range(3, 40)
        if (piece := decode([ids[k]])).isascii() and piece not in decode(ids[:k])
    )
    stop = decode([ids[next(plain)]])
    [cut] = sample(trained, max_tokens=40, seed=11, stop=(stop,))
    assert cut.finish_reason == "stop"
    ids = list(cut.output_ids)
    assert ids == list(whole.output_ids[: len(ids)])
    assert stop in decode(ids) and stop not in decode(ids[:-1])
    assert cut.text == decode(ids).partition(stop)[0]
    assert torch.allclose(torch.tensor(cut.logprobs), trained.logprobs(PROMPT, ids), atol=1e-4)


def test_an_engine_keeps_the_ids_of_a_conversation(trained: Any) -> None:
    """The second prompt begins with the first prompt and exactly the ids that were sampled."""
    engine = TokenEngine(trained.sampler, trained.tokenizer)
    question = {"role": "user", "content": "Say yes."}

    async def body() -> None:
        first = await engine.answer(CHAT.ask({"messages": [question], "max_tokens": 30}, "e", "a"))
        [choice] = first.choices
        messages = [question, choice.message, question]
        second = await engine.answer(CHAT.ask({"messages": messages, "max_tokens": 5}, "e", "a"))
        assert (
            first.prompt_ids is not None
            and second.prompt_ids is not None
            and choice.output_ids is not None
        )
        head = [*first.prompt_ids, *choice.output_ids]
        assert list(second.prompt_ids[: len(head)]) == head
        versions = {each.policy_version for each in (*first.choices, *second.choices)}
        assert versions == {trained.sampler.policy_version}

    asyncio.run(body())


# What is refused


def test_a_prompt_that_fills_the_context_is_an_overflow(trained: Any) -> None:
    with pytest.raises(ContextOverflow, match=r"max_model_len"):
        sample(trained, [5] * 4096)
    [last] = sample(trained, [5] * 4095)
    assert len(last.output_ids) == 1


@pytest.mark.parametrize(
    ("prompt", "sampling"), [([], {}), ([10**6], {}), (PROMPT, {"max_tokens": 0})]
)
def test_a_senseless_request_is_refused(
    trained: Any, prompt: list[int], sampling: dict[str, Any]
) -> None:
    with pytest.raises(RequestRefused):
        sample(trained, prompt, **sampling)


def test_a_cancelled_call_is_cancelled_in_the_server(trained: Any) -> None:
    """A server that still sampled could not be paused before it had done so."""

    async def body() -> tuple[float, float]:
        long = Sampling(max_tokens=400, n=8)

        trained.sampler._eos_ids, kept = [], trained.sampler._eos_ids

        async def timed(cancel: bool) -> float:
            calls = [
                asyncio.create_task(trained.sampler.sample(PROMPT, long, "s")) for _ in range(4)
            ]
            await asyncio.sleep(1.0)
            if cancel:
                for call in calls:
                    call.cancel()
            begun = time.monotonic()
            await trained.sampler._there(trained.sampler._server.control("pause?mode=wait"))
            seconds = time.monotonic() - begun
            await trained.sampler._there(trained.sampler._server.control("resume"))
            await asyncio.wait(calls)
            return seconds

        try:
            return await timed(cancel=True), await timed(cancel=False)
        finally:
            trained.sampler._eos_ids = kept

    cancelled, waited = asyncio.run(body())
    assert cancelled < waited / 3, (cancelled, waited)


# New weights


def test_new_weights_are_sampled_with_and_named(trained: Any) -> None:
    server = trained.sampler.pid
    version = trained.sampler.policy_version
    [before] = sample(trained, max_tokens=40, seed=1)
    asyncio.run(trained.move())
    [after] = sample(trained, max_tokens=40, seed=1)
    assert (before.policy_version, after.policy_version) == (version, version + 1)
    assert list(before.logprobs) != list(after.logprobs)
    assert torch.allclose(
        torch.tensor(after.logprobs), trained.logprobs(PROMPT, after.output_ids), atol=1e-4
    )
    assert trained.sampler.pid == server, "it was started anew instead of loading the weights"


def test_each_token_is_of_the_version_that_is_named_for_it(trained: Any) -> None:
    """Weights change twice under long calls; each token is checked against a copy of its
    version."""
    copies = {trained.sampler.policy_version: copy.deepcopy(trained.model)}

    async def call(length: int) -> list[Any]:
        sampling = Sampling(max_tokens=length, n=2, ignore_eos=True)
        sampled: list[Any] = await trained.sampler.sample(PROMPT, sampling, "s")
        return sampled

    async def body() -> list[Any]:
        running = [asyncio.create_task(call(2000)) for _ in range(3)]
        short = await call(20)  # once it has ended, the long ones are being sampled
        for _ in range(2):
            await trained.move(0.05)
            copies[trained.sampler.policy_version] = copy.deepcopy(trained.model)
            short += await call(20)
        long = [one for replies in await asyncio.gather(*running) for one in replies]
        return [*long, *short]

    replies = asyncio.run(body())
    assert {one.policy_version for one in replies} == set(copies)
    spanning = [one for one in replies if len(one.weight_updates) == 2]
    assert len(spanning) == (6 if has_token_route() else 0)
    now = trained.model
    for one in replies:
        places = np.arange(len(one.output_ids))
        later = np.searchsorted(one.weight_updates, places, side="right")
        for version, model in copies.items():
            trained.model = model
            gaps = torch.tensor(one.logprobs) - trained.logprobs(PROMPT, one.output_ids)
            of_version = torch.from_numpy(one.policy_version + later == version)
            assert torch.all(gaps[of_version].abs() < 1e-4), (version, one.weight_updates)
    trained.model = now


def test_weights_that_stay_are_not_written(trained: Any) -> None:
    async def body() -> None:
        async with trained.sampler.exclusive():
            trained.sampler._write, kept = None, trained.sampler._write
        trained.sampler._write = kept

    asyncio.run(body())


# Death


def test_a_killed_server_is_started_again_with_the_newest_weights(
    trained: Any, children: Any
) -> None:
    """The call under way is answered all the same, by the new server."""
    asyncio.run(trained.move())
    trained.sampler._eos_ids, kept = (
        [],
        trained.sampler._eos_ids,
    )  # a reply that is not over before the kill

    async def body() -> Any:
        call = asyncio.create_task(trained.sampler.sample(PROMPT, Sampling(max_tokens=1000), "s"))
        await asyncio.sleep(0.5)
        [server] = children(trained.sampler.pid)
        assert not call.done()
        os.kill(server, signal.SIGKILL)
        [one] = await call
        return server, one

    try:
        server, one = asyncio.run(body())
    finally:
        trained.sampler._eos_ids = kept
    assert children(trained.sampler.pid) != [server]
    assert one.policy_version == trained.sampler.policy_version
    assert torch.allclose(
        torch.tensor(one.logprobs), trained.logprobs(PROMPT, one.output_ids), atol=1e-4
    )


def test_a_failed_reload_ends_the_sampling_with_its_cause(trained: Any) -> None:
    """The last test of this server: whoever had no new weights must not go on with old ones."""
    write = trained.sampler._write
    trained.sampler._write = lambda place: place.mkdir()  # a directory without weights
    with pytest.raises(EngineError, match=r"(?s)could not load the weights of version.*vllm.log"):
        asyncio.run(trained.move())
    trained.sampler._write = write
    with pytest.raises(EngineError, match="could not load the weights"):
        sample(trained)


def test_a_closed_sampler_says_so(tiny: Path, tmp_path: Path, children: Any) -> None:
    """Closed while it starts: calls that wait are told, and no process is left."""
    settings = Settings(
        model=str(tiny), tokenizer=str(tiny), name="t", log=tmp_path / "vllm.log", gpus=()
    )
    sampler = VllmSampler(settings, eos_ids=frozenset({2}), directory=tmp_path)

    async def body() -> list[int]:
        waiting = asyncio.create_task(sampler.sample(PROMPT, Sampling(), "s"))
        await asyncio.sleep(3)
        assert sampler.pid is not None
        pids = [sampler.pid, *children(sampler.pid)]
        await sampler.aclose()
        with pytest.raises(EngineUnavailable, match="is closed"):
            await waiting
        with pytest.raises(EngineUnavailable, match="is closed"):
            await sampler.sample(PROMPT, Sampling(), "s")
        return pids

    pids = asyncio.run(body())
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert [file.name for file in tmp_path.iterdir()] == ["vllm.log"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_ends_leaves_nothing(
    tiny: Path, tmp_path: Path, how: signal.Signals, children: Any
) -> None:
    """By Ctrl-C, or by a death that it does not notice."""
    program = f"""
        import asyncio
        from pathlib import Path
        from ajet_sdk.engines.vllm.engine import Settings, VllmSampler

        async def main():
            settings = Settings(model={str(tiny)!r}, tokenizer={str(tiny)!r}, name="t", gpus=(),
                                log=Path({str(tmp_path)!r}) / "vllm.log")
            sampler = VllmSampler(settings, eos_ids=frozenset(), directory=Path({str(tmp_path)!r}))
            while sampler.pid is None:
                await asyncio.sleep(0.05)
            print(sampler.pid, flush=True)
            try:
                await sampler.ready()
            finally:
                await sampler.aclose()

        asyncio.run(main())
    """
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    keeper = int(run.stdout.readline())
    time.sleep(3)
    [server] = children(keeper)
    run.send_signal(how)
    run.wait(60)
    run.stdout.close()
    end = time.monotonic() + 30
    while Path(f"/proc/{server}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not Path(f"/proc/{server}").exists()
    while [file.name for file in tmp_path.iterdir()] != ["vllm.log"] and time.monotonic() < end:
        time.sleep(0.1)
    assert [file.name for file in tmp_path.iterdir()] == ["vllm.log"]
