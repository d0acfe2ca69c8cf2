"""The service of a CPU run and the stand-in for `tinker`, against plain torch and transformers on the same weights."""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import ajet_sdk
from ajet_sdk.backbones.trinity.cpu import learner as learning
from ajet_sdk.backbones.trinity.cpu.learner import Adam, Learner, Sequences
from ajet_sdk.backbones.trinity.cpu.process import run_service
from ajet_sdk.backbones.trinity.sampler import ServerSampler
from ajet_sdk.errors import ConfigError, ContextOverflow, EngineUnavailable, RequestRefused, TrainingError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Sampling
from tests.waiting import until

pytestmark = pytest.mark.slow

TEMPERATURE = 0.8
LENGTH = 128
SHIMS = Path(ajet_sdk.__file__).parent / "backbones" / "trinity" / "cpu" / "shims"
T = TypeVar("T")


def write_model(place: Path) -> Path:
    """A Qwen3 of random weights with a byte-level tokenizer of single bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>").save_pretrained(place)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=272, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, initializer_range=0.3,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=256, pad_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@dataclass
class Served:
    """A running service, and a loop to talk to it from."""

    url: str
    model: Path
    work_dir: Path
    loop: asyncio.AbstractEventLoop
    tinker: Any

    def run(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(asyncio.ensure_future(work, loop=self.loop))

    def client(self) -> Any:
        return self.tinker.ServiceClient(self.url)

    def trainer(self) -> Any:
        """A training client over the base model's weights."""
        return self.run(self.client().create_lora_training_client_async(base_model=str(self.model), rank=8))

    def post(self, route: str, body: Any, status: int = 200) -> Any:
        reply = httpx.post(f"{self.url}/{route}", json=body, timeout=300)
        assert reply.status_code == status, reply.text
        return reply.json()


def served(model: Path, work_dir: Path) -> Iterator[Served]:
    """A service of its own, and the stand-in as an actor of Trinity's would import it."""
    loop = asyncio.new_event_loop()
    context = run_service(
        model, temperature=TEMPERATURE, max_model_len=LENGTH, work_dir=work_dir, log=work_dir / "logs" / "service.log"
    )
    url = loop.run_until_complete(context.__aenter__())
    try:
        with stand_in(url) as tinker:
            yield Served(url, model, work_dir, loop, tinker)
    finally:
        loop.run_until_complete(context.__aexit__(None, None, None))
        loop.close()


@contextmanager
def stand_in(url: str | None) -> Iterator[Any]:
    """`tinker` imported anew, with that address in the environment; afterwards the name is the SDK's again."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "tinker"]:
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(str(SHIMS))
        patch.delenv("TINKER_BASE_URL", raising=False)
        if url is not None:
            patch.setenv("TINKER_BASE_URL", url)
        try:
            yield importlib.import_module("tinker")
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "tinker"]:
                del sys.modules[name]


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from served(model, tmp_path_factory.mktemp("work"))


def plain(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def logprobs(module: Any, ids: list[int]) -> torch.Tensor:
    """Of every token but the first, at the run's temperature."""
    logits = module(torch.tensor([ids])).logits[0, :-1] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def ask(ids: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt": ids, "temperature": TEMPERATURE, "logprobs": 0, "return_token_ids": True, **more}


def data(types: Any, rows: int = 5) -> list[Any]:
    """Sequences of unlike lengths; the prompt and a stretch in the middle don't count."""
    made = []
    for row in range(rows):
        ids = prompt(100 + row, 12 + 7 * row)
        weights = torch.zeros(len(ids) - 1)
        weights[4 + row :] = 1
        weights[7 + row : 9 + row] = 0
        inputs = {"target_tokens": ids[1:], "weights": weights}
        made.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
    return made


def loss_of(batch: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """A loss that is not linear in the log-probabilities, over tokens that count."""
    total = torch.zeros(())
    for row, (datum, values) in enumerate(zip(batch, logprobs, strict=True)):
        weights = datum.loss_fn_inputs["weights"]
        advantage = 1.0 if row % 2 else -0.5
        total = total - (weights * torch.exp(values * weights + 3.0) * advantage).sum() / weights.sum()
    return total, {"actor/loss": float(total.detach())}


def ids_of(datum: Any) -> list[int]:
    return [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"][-1]]


ADAM = {"learning_rate": 3e-3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1, "grad_clip_norm": 0.7}


def train_plainly(module: Any, batch: list[Any], steps: int) -> list[float]:
    """The same steps by torch alone; gradient norms."""
    optimiser = torch.optim.AdamW(
        module.parameters(), lr=ADAM["learning_rate"], betas=(ADAM["beta1"], ADAM["beta2"]), eps=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
    )  # fmt: skip
    norms = []
    for _ in range(steps):
        loss_of(batch, [logprobs(module, ids_of(datum)) for datum in batch])[0].backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), ADAM["grad_clip_norm"])))
        optimiser.step()
        optimiser.zero_grad()
    return norms


async def train(trainer: Any, types: Any, batch: list[Any], steps: int) -> list[float]:
    """As Trinity's trainer does it: both requests first, then both results."""
    norms = []
    for _ in range(steps):
        done = await trainer.forward_backward_custom_async(batch, loss_of)
        stepped = await trainer.optim_step_async(types.AdamParams(**ADAM))
        assert set((await done).metrics) == {"actor/loss"}
        norms.append((await stepped).metrics["actor/grad_norm"])
    return norms


async def snapshot(trainer: Any, name: str) -> Path:
    return Path((await (await trainer.save_weights_for_sampler_async(name))).path)


def assert_same_weights(one: Any, other: Any, tolerance: float) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=tolerance, rtol=0), name


# Sampling


def test_log_probabilities_are_of_the_distribution_sampled_from(service: Served, model: Path) -> None:
    module = plain(model)
    conversation = prompt(1, 20)
    version = service.post("v1/completions", ask(conversation, max_tokens=1))["policy_version"]
    assert version == 0
    for _ in range(3):  # each turn extends the last: keys and values of the session are used again
        reply = service.post("v1/completions", ask(conversation, max_tokens=9, n=3, session="episode/agent"))
        assert reply["usage"]["prompt_tokens"] == len(conversation)
        assert reply["choices"][0]["prompt_token_ids"] == conversation
        for choice in reply["choices"]:
            ids = choice["token_ids"]
            expected = logprobs(module, conversation + ids)[-len(ids) :]
            assert np.allclose(choice["logprobs"]["token_logprobs"], expected.detach(), atol=1e-4)
            assert choice["finish_reason"] == ("stop" if ids[-1] == 256 else "length")
            assert choice["stop_reason"] is None
        conversation = conversation + reply["choices"][0]["token_ids"] + prompt(2, 3)


def test_a_stop_string_cuts_the_text_and_keeps_the_ids(service: Served) -> None:
    tokenizer = service.run(service.client().create_sampling_client_async(str(service.model))).get_tokenizer()
    first = service.post("v1/completions", ask([65, 66, 67], max_tokens=60, seed=5))["choices"][0]
    words = [tokenizer.decode([i]) for i in first["token_ids"]]
    stop = next(word for word in words[3:] if word.isascii() and word.isprintable())
    again = service.post("v1/completions", ask([65, 66, 67], max_tokens=60, seed=5, stop=["never", stop]))["choices"][0]
    assert again["token_ids"] == first["token_ids"][: words.index(stop) + 1]
    assert (again["finish_reason"], again["stop_reason"]) == ("stop", stop)
    assert again["text"] + stop == tokenizer.decode(again["token_ids"])


def test_a_typed_output_is_sampled_under_its_grammar(service: Served) -> None:
    grammar = '%llguidance {}\nstart: ("yes" | "no") <[256]>\n'
    body = ask([65, 66], max_tokens=9, n=4, structured_outputs={"grammar": grammar})
    for choice in service.post("v1/completions", body)["choices"]:
        assert choice["text"] in ("yes", "no") and choice["finish_reason"] == "stop"


def test_the_attempts_of_a_group_differ_though_trinity_sends_one_seed(service: Served) -> None:
    types = service.tinker.types
    client = service.run(service.client().create_sampling_client_async(base_model=str(service.model)))
    given = types.ModelInput.from_ints(prompt(3, 10))
    params = {"max_tokens": 12, "seed": 42, "temperature": 1.0, "top_k": -1, "top_p": 1}

    async def sample() -> list[Any]:
        return await asyncio.gather(*[client.sample_async(given, params, num_samples=2) for _ in range(4)])

    sequences = [sequence for response in service.run(sample()) for sequence in response.sequences]
    assert len({tuple(sequence.tokens) for sequence in sequences}) == 8
    assert all(len(sequence.tokens) == len(sequence.logprobs) for sequence in sequences)


def test_what_does_not_fit_is_refused_with_its_reason(service: Served) -> None:
    error = service.post("v1/completions", ask(prompt(4, LENGTH)), status=400)["error"]
    assert error["code"] == "context_length_exceeded"
    client = service.run(service.client().create_sampling_client_async(base_model=str(service.model)))
    with pytest.raises(ContextOverflow, match=f"{LENGTH} tokens"):
        service.run(client.sample_async(service.tinker.types.ModelInput.from_ints(prompt(4, LENGTH)), {}))
    for body, named in [
        (ask("text"), "prompt"),
        (ask([1], temperature=-1), "temperature"),
        (ask([1], presence_penalty=1), "presence_penalty"),
        (ask([999]), "prompt"),
    ]:
        assert service.post("v1/completions", body, status=400)["error"]["param"] == named


def test_a_client_that_goes_away_frees_the_sampler(service: Served) -> None:
    """Another's request then takes a fraction of what was left of the four."""
    body = ask(prompt(5, 3), n=128)

    async def timed(body: dict[str, Any], timeout: float = 60.0) -> float:
        begun = time.monotonic()
        async with httpx.AsyncClient(timeout=timeout) as client:
            await client.post(f"{service.url}/v1/completions", json=body)
        return time.monotonic() - begun

    async def leave() -> tuple[float, float]:
        whole = await timed(body)
        left = await asyncio.gather(*[timed(body, timeout=whole / 10) for _ in range(4)], return_exceptions=True)
        assert {type(error) for error in left} == {httpx.ReadTimeout}
        return whole, await timed(ask([1, 2], max_tokens=1))

    whole, after = service.run(leave())
    assert after < whole / 2


# Training


@pytest.mark.parametrize("budget", [8192, 40])
def test_gradients_are_those_of_autograd(model: Path, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over several micro-batches, of which all but one are computed twice."""
    monkeypatch.setattr(learning, "_MICRO_BATCH_TOKENS", budget)
    with stand_in("http://127.0.0.1:1") as tinker:
        batch = data(tinker.types)
    ids = [ids_of(datum) for datum in batch]
    needed = np.concatenate([datum.loss_fn_inputs["weights"].numpy() != 0 for datum in batch])
    lengths = [len(row) - 1 for row in ids]
    learner = Learner(model, TEMPERATURE)
    values_N = learner.forward(
        Sequences(
            np.array(lengths),
            np.concatenate([row[:-1] for row in ids]),
            np.concatenate([row[1:] for row in ids]),
            needed,
        )
    )
    reference = plain(model)
    expected = [logprobs(reference, row) for row in ids]
    assert np.allclose(values_N[needed], torch.cat(expected).detach()[needed], atol=1e-5)
    assert not values_N[~needed].any()
    leaves = [part.clone().requires_grad_() for part in torch.from_numpy(values_N).split(lengths)]
    loss_of(batch, leaves)[0].backward()
    learner.backward(torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None]).numpy())
    loss_of(batch, expected)[0].backward()
    for (name, mine), theirs in zip(learner.model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-5, rtol=1e-5), name


def test_steps_are_torchs_and_reach_the_sampler_with_their_version(service: Served, model: Path) -> None:
    types, reference = service.tinker.types, plain(model)
    batch = data(types)
    trainer = service.trainer()
    norms = service.run(train(trainer, types, batch, 2))
    assert np.allclose(norms, train_plainly(reference, batch, 2), rtol=1e-4)
    assert norms[0] > ADAM["grad_clip_norm"]
    place = service.run(snapshot(trainer, "a b-run-sampler-2"))
    assert_same_weights(plain(place), reference, 1e-5)

    client = service.run(service.client().create_sampling_client_async(model_path=str(place)))
    reply = service.post("v1/completions", ask(prompt(6, 10), max_tokens=8))
    assert reply["policy_version"] == 2
    ids = prompt(6, 10) + reply["choices"][0]["token_ids"]
    expected = logprobs(reference, ids).detach()
    count = len(reply["choices"][0]["token_ids"])
    assert np.allclose(reply["choices"][0]["logprobs"]["token_logprobs"], expected[-count:], atol=1e-4)
    assert not torch.allclose(expected, logprobs(plain(model), ids), atol=1e-2)
    scored = service.run(client.compute_logprobs_async(types.ModelInput.from_ints(ids)))
    assert scored[0] is None and np.allclose(scored[1:], expected, atol=1e-4)
    base = service.run(service.client().create_sampling_client_async(base_model=str(model)))
    scored = service.run(base.compute_logprobs_async(types.ModelInput.from_ints(ids)))
    assert np.allclose(scored[1:], logprobs(plain(model), ids).detach(), atol=1e-4)
    assert service.post("v1/completions", ask([1], max_tokens=1))["policy_version"] == 2


def test_one_version_a_reply_while_weights_change(service: Served, model: Path) -> None:
    types = service.tinker.types
    trainer = service.trainer()
    modules = {}
    for version in (11, 12, 13):
        service.run(train(trainer, types, data(types), 1))
        modules[version] = plain(service.run(snapshot(trainer, f"run-sampler-{version}")))

    async def exercise() -> list[tuple[list[int], Any]]:
        seen: list[tuple[list[int], Any]] = []

        async def sampling(http: httpx.AsyncClient, seed: int) -> None:
            for turn in range(6):
                ids = prompt(1000 + seed, 5 + turn)
                reply = await http.post(f"{service.url}/v1/completions", json=ask(ids, n=2, max_tokens=30, session="s"))
                seen.append((ids, reply.json()))

        async def loading() -> None:
            for version in (11, 12, 13, 11, 12):
                await asyncio.sleep(0.05)
                await service.client().create_sampling_client_async(model_path=f"run-sampler-{version}")

        await service.client().create_sampling_client_async(model_path="run-sampler-13")
        async with httpx.AsyncClient(timeout=300) as http:
            await asyncio.gather(loading(), *[sampling(http, seed) for seed in range(6)])
        return seen

    seen = service.run(exercise())
    assert {reply["policy_version"] for _, reply in seen} > {12}
    for ids, reply in seen:
        for choice in reply["choices"]:
            made = choice["token_ids"]
            expected = logprobs(modules[reply["policy_version"]], ids + made)[-len(made) :]
            assert np.allclose(choice["logprobs"]["token_logprobs"], expected.detach(), atol=1e-4)


def test_a_restored_state_goes_on_as_if_never_interrupted(service: Served, model: Path) -> None:
    types, batch = service.tinker.types, data(service.tinker.types)
    trainer = service.trainer()
    service.run(train(trainer, types, batch, 2))
    path = service.run(trainer.save_state_async("run-state-2"))
    path = service.run(path).path
    service.run(train(trainer, types, batch, 2))
    straight = plain(service.run(snapshot(trainer, "run-sampler-104")))
    for other in served(model, service.work_dir):
        moved = f"/elsewhere/{Path(path).name}"
        resumed = other.run(other.client().create_training_client_from_state_with_optimizer_async(path=moved))
        assert other.client()._info["updates"] == 2
        other.run(train(resumed, types, batch, 2))
        again = plain(other.run(snapshot(resumed, "run-sampler-204")))
    assert_same_weights(straight, again, 0.0)
    with pytest.raises(RequestRefused, match="no checkpoint run-state-9"):
        service.run(service.client().create_training_client_from_state_with_optimizer_async(path="run-state-9"))


def test_a_loss_over_tokens_that_are_not_scored_is_an_error(service: Served) -> None:
    types = service.tinker.types
    with pytest.raises(ValueError, match="weight 0"):
        service.run(
            service.trainer().forward_backward_custom_async(data(types), lambda _, values: (values[0].sum(), {}))
        )


def test_gradients_that_are_not_finite_stop_the_step(model: Path) -> None:
    learner = Learner(model, TEMPERATURE)
    sequences = Sequences.whole(prompt(7, 9))
    learner.forward(sequences)
    learner.backward(np.full(8, np.nan, np.float32))
    with pytest.raises(TrainingError, match="not finite"):
        learner.update(Adam(1e-3))
    assert_same_weights(learner.model, plain(model), 0.0)
    with pytest.raises(RequestRefused, match="not belong to any forward pass"):
        learner.backward(np.zeros(8, np.float32))
    before = copy.deepcopy(learner.model)
    learner.forward(Sequences(np.array([3]), np.arange(3), np.arange(3), np.zeros(3, np.bool_)))
    learner.backward(np.zeros(3, np.float32))  # a batch of which nothing counts
    assert learner.update(Adam(1e-3)) == 0.0
    assert_same_weights(learner.model, before, 0.0)


# Checkpoints


def test_a_deleted_snapshot_is_gone_with_the_next(service: Served) -> None:
    trainer, rest = service.trainer(), service.client().create_rest_client()
    places = [service.run(snapshot(trainer, f"gone-sampler-{i}")) for i in range(3)]
    for expected in ([True, True, True], [False, True, True], [False, False, True]):
        number = 3 - sum(expected)
        service.run(rest.delete_checkpoint_async("ajet", f"gone-sampler-{number}"))
        assert [place.exists() for place in places] == expected
    for name in ("..", ".hidden-sampler-1", "a-state-1"):
        with pytest.raises(RequestRefused):
            service.run(rest.delete_checkpoint_async("ajet", name))
    with pytest.raises(RequestRefused, match="plain file name"):
        service.run(snapshot(trainer, "../outside-sampler-1"))


# The stand-in


def test_the_stand_in_explains_itself_where_there_is_no_service() -> None:
    for url in (None, "https://tinker.example.com"):
        with pytest.raises(ImportError, match="replacement for CPU runs"), stand_in(url):
            pass
    with stand_in("http://127.0.0.1:1") as tinker:
        assert "ajet" in tinker.__version__
        with pytest.raises(EngineUnavailable, match="no ajet service answers"):
            tinker.ServiceClient(base_url="http://127.0.0.1:1")
        with Gateway() as gateway, pytest.raises(ConfigError, match="not an ajet service"):
            tinker.ServiceClient(base_url=gateway.url)


def test_only_the_model_that_is_served_is_supported(service: Served) -> None:
    named = [one.model_name for one in service.client().get_server_capabilities().supported_models]
    assert named == [str(service.model)]
    with pytest.raises(ValueError, match="serves only"):
        service.run(service.client().create_sampling_client_async(base_model="/some/other"))


# The process


def test_it_does_not_start_without_a_model_and_says_why(tmp_path: Path) -> None:
    async def start(model: Path) -> None:
        context = run_service(
            model, temperature=1.0, max_model_len=8, work_dir=tmp_path, log=tmp_path / "logs" / "s.log"
        )
        async with context:
            pytest.fail("it started")

    with pytest.raises(ConfigError, match=r"model\.path"):
        asyncio.run(start(tmp_path / "absent"))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with pytest.raises(EngineUnavailable, match="exited with code 1") as caught:
        asyncio.run(start(broken))
    assert str(tmp_path / "logs" / "s.log") in str(caught.value)
    assert "model.path: " in str(caught.value)
    assert "Traceback" not in str(caught.value)


PARENT = """
import asyncio, os, sys
from pathlib import Path
from ajet_sdk.backbones.trinity.sampler import ServerSampler
from ajet_sdk.backbones.trinity.cpu.process import run_service

async def main():
    place = Path(sys.argv[2])
    async with run_service(sys.argv[1], temperature=1.0, max_model_len=64, work_dir=place, log=place / "s.log") as url:
        print(url, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_it_ends_with_its_parent(model: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(ajet_sdk.__file__).parent.parent)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model), str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert parent.stdout is not None
    url = parent.stdout.readline().strip()
    pid = json.loads(httpx.get(f"{url}/info", timeout=300).text)["pid"]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_connection_outlasts_the_clients_patience(service: Served) -> None:
    """An HTTP client drops a connection that was idle for 5 s; a server that is as patient may close it just then."""
    from http.client import HTTPConnection

    address = httpx.URL(service.url)
    connection = HTTPConnection(address.host, address.port, timeout=300)
    for pause in (0.0, 6.0):
        time.sleep(pause)
        connection.request("GET", "/health")
        reply = connection.getresponse()
        assert reply.status == 200 and json.loads(reply.read())["status"] == "ok"
    connection.close()


class Wrapper:
    """What our sampler reads of Trinity's `ModelWrapper`."""

    def __init__(self, service: Served) -> None:
        self.api_address, self.api_key, self.model_path = service.url, "EMPTY", str(service.model)

    @property
    async def model_version_async(self) -> int:
        return -1  # Trinity's, before the first synchronisation


def test_the_sampler_of_runners_gets_ids_and_logprobs_as_sampled(service: Served, model: Path) -> None:
    sampler = ServerSampler(Wrapper(service), "policy", LENGTH, frozenset({256}))
    ids = prompt(11, 9)
    hot = Sampling(temperature=TEMPERATURE, max_tokens=12, seed=5, n=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TINKER_BASE_URL", raising=False)
        sampled = service.run(sampler.sample(ids, hot, "e/a"))
        again = service.run(sampler.sample(ids, hot, "e/b"))
        greedy = service.run(sampler.sample(ids, Sampling(temperature=0.0, max_tokens=4, n=2), "e/c"))
        with pytest.raises(ContextOverflow, match="max_model_len"):
            service.run(sampler.sample(prompt(1, LENGTH), hot, "e/d"))
        service.run(sampler.aclose())
    assert [list(one.output_ids) for one in sampled] == [list(one.output_ids) for one in again]
    assert len({tuple(one.output_ids) for one in sampled}) > 1, "the choices of one request differ"
    assert len(greedy) == 2 and list(greedy[0].output_ids) == list(greedy[1].output_ids)
    module = plain(model)
    for one in sampled:
        exact = logprobs(module, [*ids, *one.output_ids])[len(ids) - 1 :]
        assert one.policy_version is not None and one.policy_version >= 0
        if one.policy_version == 0:  # else a test before this one has trained what is served
            np.testing.assert_allclose(one.logprobs, exact.detach().numpy(), atol=1e-4)


def test_a_reply_ends_at_the_models_own_ends_and_no_others(service: Served) -> None:
    refused = service.post("v1/completions", ask([1, 2], ignore_eos=True, stop_token_ids=[7]), status=400)
    assert "stop_token_ids" in refused["error"]["message"] or "ignore_eos" in refused["error"]["message"]
