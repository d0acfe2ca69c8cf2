"""What a run exports computes what the policy computes, whatever its adapter changes; or it isn't
exported."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.errors import CheckpointError
from ajet_sdk.learn.checkpoint import check_export, export
from ajet_sdk.tokens.huggingface import HFTokenizer
from tests.tiny_models import save_tiny

IDS = torch.arange(20)[None]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tied")


@pytest.fixture(scope="module")
def untied(tied: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(tied)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone() * 2)
    model.config.tie_word_embeddings = False
    path = tied.with_name("untied")
    model.save_pretrained(path)
    HFTokenizer(str(tied)).hf.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def experts(tied: Path) -> Path:
    tokenizer = HFTokenizer(str(tied)).hf
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
    )
    path = tied.with_name("experts")
    MixtralForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def trained(model: Any) -> Any:
    """The model as if it had been trained: its trainable weights are changed."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def with_new_adapter(base: Path, targets: str | list[str]) -> Any:
    lora = SimpleNamespace(enabled=True, r=4, alpha=8, target_modules=targets)
    return trained(load_model(base, device="cpu", lora=lora))


def with_loaded_adapter(base: Path, directory: Path, config: Any) -> Any:
    """The model with an adapter that another program made, to be trained on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        trained(made).save_pretrained(directory)
    lora = SimpleNamespace(enabled=True, r=4, alpha=8, target_modules="all-linear")
    return load_model(directory, device="cpu", lora=lora)


def check_exported(model: Any, base: Path, directory: Path) -> None:
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        path = export(directory, model, HFTokenizer(str(base)).hf)
        exported = AutoModelForCausalLM.from_pretrained(path)
        torch.testing.assert_close(exported(IDS).logits, before, atol=1e-4, rtol=0)
        torch.testing.assert_close(model(input_ids=IDS).logits, before, atol=1e-5, rtol=0)
        adapter: Any = load_model(path / "adapter", device="cpu")
        torch.testing.assert_close(adapter(input_ids=IDS).logits, before, atol=1e-5, rtol=0)
        assert not torch.allclose(
            load_model(base, device="cpu")(input_ids=IDS).logits, before, atol=1e-2
        )
    shared = exported.lm_head.weight is exported.model.embed_tokens.weight
    assert exported.config.tie_word_embeddings is shared, "other programs read the config alone"


TARGETS: list[str | list[str]] = [
    "all-linear",
    ["lm_head"],
    ["embed_tokens"],
    ["lm_head", "embed_tokens", "q_proj"],
]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_the_export_of_an_adapter_is_the_policy(
    targets: str | list[str], kind: str, tied: Path, untied: Path, tmp_path: Path
) -> None:
    base = tied if kind == "tied" else untied
    check_exported(with_new_adapter(base, targets), base, tmp_path / "model")


def test_an_adapter_of_experts(experts: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of patterns that it sets itself
        check_exported(with_new_adapter(experts, "all-linear"), experts, tmp_path / "model")


def lora(**changes: Any) -> peft.LoraConfig:
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, **changes)


ADAPTERS: dict[str, Any] = {
    "dora": lambda: lora(target_modules=["q_proj", "up_proj"], use_dora=True),
    "rank pattern": lambda: lora(
        target_modules=["q_proj", "up_proj"], use_rslora=True, rank_pattern={"q_proj": 2}
    ),
    "saved head": lambda: lora(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "saved embedding": lambda: lora(target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    "saved norm": lambda: lora(target_modules=["q_proj"], modules_to_save=["norm"]),
    "single tokens": lambda: lora(target_modules=["q_proj"], trainable_token_indices=[1, 2, 5]),
    "tied adapters": lambda: lora(
        target_modules=["lm_head", "embed_tokens"], ensure_weight_tying=True
    ),
    "ia3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]
    ),
    "loha": lambda: peft.LoHaConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["k_proj", "down_proj"]
    ),
    "vera": lambda: peft.VeraConfig(task_type="CAUSAL_LM", r=4, target_modules=["down_proj"]),
}


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_another_program_trained_on(kind: str, tied: Path, tmp_path: Path) -> None:
    model = with_loaded_adapter(tied, tmp_path / "adapter", ADAPTERS[kind]())
    check_exported(trained(model), tied, tmp_path / "model")


@pytest.mark.filterwarnings("ignore")
def test_an_export_that_differs_from_the_policy_is_no_export(tied: Path, tmp_path: Path) -> None:
    tokenizer = HFTokenizer(str(tied)).hf
    sound = export(tmp_path / "model", with_new_adapter(tied, "all-linear"), tokenizer)
    before = (sound / "model.safetensors").read_bytes()
    # made by peft alone, the adapter of the head is merged into the tied embedding, too
    wrong = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tied), lora(target_modules=["lm_head"])
    )
    with pytest.raises(CheckpointError, match=str(tmp_path / "model")):
        export(tmp_path / "model", trained(wrong.eval()), tokenizer)
    assert (sound / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "no draft is left"


def test_a_small_difference_is_found(tied: Path, tmp_path: Path) -> None:
    model = with_new_adapter(tied, "all-linear")
    path = export(tmp_path / "model", model, HFTokenizer(str(tied)).hf)
    assert (check_export(path, policy=model) or 0.0) < 1e-5
    with torch.no_grad():
        next(parameter for parameter in model.parameters() if parameter.requires_grad).mul_(1.02)
    with pytest.raises(CheckpointError):
        check_export(path, policy=model)
