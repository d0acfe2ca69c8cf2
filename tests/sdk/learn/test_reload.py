"""An export is a model that loads and computes what was trained, or an error that says what is
wrong with it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ajet_sdk.backbones.shared.driver import ClusterRun, export
from ajet_sdk.config.config import load_config
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.errors import CheckpointError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.learn.checkpoint import check_export
from ajet_sdk.protocols import Job, Sampling
from ajet_sdk.reporting.loggers import Loggers
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Run, Task
from tests.tiny_models import save_tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights large enough that its distributions are not flat."""
    place = save_tiny(tmp_path_factory.mktemp("model") / "tiny")
    return rewritten(place, lambda weights: {name: value * 8 for name, value in weights.items()})


def rewritten(place: Path, change: Any) -> Path:
    file = place / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(made, tmp_path / "model"))


def sampled(model: Path, temperature: float) -> list[Call]:
    """Calls as our own sampler records them."""
    tokenizer = HFTokenizer(str(model))
    loaded = load_model(model, dtype="float32", device="cpu")
    sampler = LocalSampler(loaded, tokenizer, model_name="tiny", max_model_len=64, seed=1)
    prompt = tokenizer.encode("Say yes.")

    async def ask() -> list[Any]:
        try:
            return await sampler.sample(
                prompt, Sampling(temperature=temperature, max_tokens=20, n=3), "one"
            )
        finally:
            await sampler.aclose()

    return [
        Call(episode_id="e", prompt_ids=prompt, output_ids=one.output_ids, logprobs=one.logprobs,
             sampling={"temperature": temperature, "top_p": 1.0, "top_k": -1})
        for one in asyncio.run(ask())
    ]  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_sound_export_computes_what_the_sampler_did(place: Path, temperature: float) -> None:
    assert check_export(place) is None, "nothing to compare with"
    gap = check_export(place, sampled(place, temperature))
    assert gap is not None and gap < 1e-4


def test_calls_that_cannot_be_compared_are_not(place: Path) -> None:
    calls = sampled(place, 1.0)
    odd: list[dict[str, Any]] = [
        {"sampling": {"temperature": 0.0}}, {"sampling": {"temperature": 1.0, "top_p": 0.5}},
        {"sampling": {"temperature": 1.0, "top_k": 3}}, {"logprobs": None}, {"prompt_ids": None},
    ]  # fmt: skip
    assert (
        check_export(place, [call.model_copy(update=one) for call in calls for one in odd]) is None
    )


def test_another_models_weights_are_found_by_their_probabilities(made: Path, place: Path) -> None:
    calls = sampled(made, 1.0)
    generator = torch.Generator().manual_seed(1)

    def shuffled(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: (
                value
                if value.dim() < 2
                else torch.randn(value.shape, generator=generator) * value.std()
            )
            for name, value in weights.items()
        }

    with pytest.raises(CheckpointError, match="it is not the model that was trained"):
        check_export(rewritten(place, shuffled), calls)


def with_adapter(place: Path) -> Path:
    """A directory as verl 0.8 leaves it of a LoRA run: the PEFT model's own state dict under
    `model.safetensors`."""
    import peft

    model = AutoModelForCausalLM.from_pretrained(place)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    state = {name: value.clone() for name, value in wrapped.state_dict().items()}
    return rewritten(place, lambda _: state)


def test_the_export_of_an_adapter_under_a_models_name_is_refused(place: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\d+ missing .* \d+ unexpected"):
        check_export(with_adapter(place))


def test_weights_that_are_not_all_there_are_counted_and_named(place: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"

    def less(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: value for key, value in weights.items() if key != name}

    with pytest.raises(CheckpointError, match=rf"1 missing \({name}\)"):
        check_export(rewritten(place, less))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(place: Path, value: float) -> None:
    def spoilt(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weights["model.norm.weight"][0] = value
        return weights

    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* not finite"):
        check_export(rewritten(place, spoilt))


def test_no_model_and_half_a_file_are_one_message(place: Path) -> None:
    file = place / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for wrong in (place, place / "nowhere"):
        with pytest.raises(CheckpointError, match="can't be loaded"):
            check_export(wrong)


def test_what_does_not_load_does_not_replace_what_does(
    made: Path, place: Path, tmp_path: Path
) -> None:
    target = tmp_path / "trained"
    export(made, target)
    before = (target / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError):
        export(with_adapter(place), target)
    assert (target / "model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_what_a_cluster_trained_is_announced_only_if_it_loads(place: Path, tmp_path: Path) -> None:
    config = load_config(values={"model": {"path": "org/model"}})
    job = Job(config=config, workflow=None, judge=None, train=[Task(main_query="q")], val=[], run_id="r",
              directory=tmp_path)  # fmt: skip
    calls = sampled(place, 1.0)
    with TraceWriter(tmp_path / "trace.duckdb") as writer, Gateway(writer):
        writer.put(
            Run(run_id="r"), *(call.model_copy(update={"policy_version": 3}) for call in calls)
        )
        writer.put(Episode(episode_id="e", run_id="r", step=3, split="val", task=job.train[0]))
        writer.flush()
        said: list[str] = []
        loggers = Loggers([], directory=tmp_path, run_id="r", writer=writer, total_steps=3)
        loggers.say = said.append  # type: ignore[method-assign]
        run = ClusterRun(job, writer, loggers, 3)
        assert run.export(place) == tmp_path / "checkpoint" / "r" / "model"
        assert "log-probabilities" in said[0] and len(said) == 1
        assert (
            run.result(tmp_path / "model").trained_tokens == 0
            and "no update was made; model saved" in said[1]
        )
        said.clear()
        with pytest.raises(CheckpointError):
            run.export(with_adapter(place))
        assert said == []
