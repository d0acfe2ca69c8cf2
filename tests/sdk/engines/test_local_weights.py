"""Checkpoints and adapters whose tensors do not fit their model are refused where they are loaded,
by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from ajet_sdk.engines.local.gguf import convert
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.engines.local.weights import read_causal_lm
from ajet_sdk.errors import AjetError, CheckpointError, ConfigError
from ajet_sdk.learn.checkpoint import read_weights
from ajet_sdk.trainer_service.policies import BaseModel

Tensors = dict[str, torch.Tensor]
MLP = "model.layers.1.mlp.up_proj.weight"


def saved_model(path: Path, *, tied: bool) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("models") / "untied", tied=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="module")
def adapter(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    lora = SimpleNamespace(enabled=True, r=4, alpha=8, target_modules="all-linear")
    path = tmp_path_factory.mktemp("models") / "adapter"
    load_model(untied, device="cpu", lora=lora).save_pretrained(path)
    return path


def rewritten(source: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    shutil.copytree(source, target)
    [file] = target.glob("*.safetensors")
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return target


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + key: value for key, value in tensors.items()}


DAMAGES: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no output embedding": (without("lm_head.weight"), "lm_head.weight"),
    "one weight less": (without(MLP), MLP),
    "peft's names": (prefixed("base_model.model."), "merge_and_unload"),
    "names of torch.compile": (prefixed("_orig_mod."), "_orig_mod."),
    "names of DDP": (prefixed("module."), "module."),
    "another shape": (lambda tensors: {**tensors, MLP: torch.zeros(23, 16)}, "(23, 16)"),
    "a layer more": (
        lambda tensors: {**tensors, "model.layers.2.mlp.x.weight": torch.zeros(1)},
        "model.layers.2",
    ),
    "a value head": (
        lambda tensors: {**tensors, "v_head.summary.weight": torch.zeros(1)},
        "v_head",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    untied: Path, tmp_path: Path, damage: str
) -> None:
    change, name = DAMAGES[damage]
    broken = rewritten(untied, tmp_path / "broken", change)
    with pytest.raises(ConfigError) as caught:
        load_model(broken, device="cpu")
    assert name in str(caught.value) and str(broken) in str(caught.value)
    with pytest.raises(ConfigError):
        BaseModel(str(broken), device="cpu")
    _, mismatch = read_causal_lm(broken, device_map="meta", trust_remote_code=False)
    assert mismatch, "names and shapes alone give the same answer"


def test_a_config_of_another_depth_is_refused(untied: Path, tmp_path: Path) -> None:
    shutil.copytree(untied, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config.update(num_hidden_layers=1, layer_types=config["layer_types"][:1])
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="unexpected"):
        load_model(file.parent, device="cpu")
    config.update(num_hidden_layers=3)
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError):
        load_model(file.parent, device="cpu")


def test_an_adapter_of_an_incomplete_base_is_refused(
    untied: Path, adapter: Path, tmp_path: Path
) -> None:
    base = rewritten(untied, tmp_path / "base", without(MLP))
    shutil.copytree(adapter, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": str(base)})
    )
    with pytest.raises(ConfigError, match=MLP):
        load_model(file.parent, device="cpu")


def test_what_a_complete_checkpoint_may_lack_or_have(
    untied: Path, tied: Path, tmp_path: Path
) -> None:
    ids = torch.tensor([[5, 6, 7]])
    expected = load_model(untied, device="cpu")(input_ids=ids).logits
    inverse = "model.layers.0.self_attn.rotary_emb.inv_freq"
    old = rewritten(untied, tmp_path / "old", lambda tensors: {**tensors, inverse: torch.zeros(4)})
    torch.testing.assert_close(load_model(old, device="cpu")(input_ids=ids).logits, expected)
    bare = rewritten(
        untied,
        tmp_path / "bare",
        lambda tensors: {k.removeprefix("model."): v for k, v in tensors.items()},
    )
    torch.testing.assert_close(load_model(bare, device="cpu")(input_ids=ids).logits, expected)
    mtp = rewritten(
        untied, tmp_path / "mtp", lambda tensors: {**tensors, "mtp.norm.weight": torch.zeros(4)}
    )
    torch.testing.assert_close(load_model(mtp, device="cpu")(input_ids=ids).logits, expected)
    model: Any = load_model(tied, device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_parts_for_images_belong_to_a_checkpoint_of_several_modalities(
    untied: Path, tmp_path: Path
) -> None:
    def with_tower(tensors: Tensors) -> Tensors:
        return {**tensors, "vision_tower.blocks.0.weight": torch.zeros(4)}

    path = rewritten(untied, tmp_path / "model", with_tower)
    with pytest.raises(ConfigError, match="vision_tower"):
        load_model(path, device="cpu")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vision_config": {"depth": 1}}))
    assert (
        load_model(path, device="cpu").num_parameters()
        == load_model(untied, device="cpu").num_parameters()
    )


def test_a_separate_output_embedding_of_a_tied_model_is_said_in_its_config(
    tied: Path, tmp_path: Path
) -> None:
    def with_head(tensors: Tensors) -> Tensors:
        return {**tensors, "lm_head.weight": torch.randn(64, 16)}

    model: Any = load_model(rewritten(tied, tmp_path / "model", with_head), device="cpu")
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings is False


def damaged(adapter: Path, target: Path, damage: str) -> Path:
    def change(tensors: Tensors) -> Tensors:
        name = min(tensors)
        if damage == "missing":
            return without(name)(tensors)
        if damage == "unexpected":
            return {**tensors, name.replace("layers.0", "layers.7"): tensors[name].clone()}
        if damage == "reshaped":
            return {**tensors, name: tensors[name][:3].clone()}
        return {key.removeprefix("base_model.model."): value for key, value in tensors.items()}

    return rewritten(adapter, target, change)


@pytest.mark.parametrize("damage", ["missing", "unexpected", "reshaped", "names"])
def test_an_adapter_that_does_not_fit_is_refused(
    adapter: Path, tmp_path: Path, damage: str
) -> None:
    broken = damaged(adapter, tmp_path / "broken", damage)
    with pytest.raises(ConfigError, match=r"mlp\.down_proj") as caught:
        load_model(broken, device="cpu")
    assert str(broken) in str(caught.value)
    with pytest.raises(CheckpointError):
        read_weights(broken, load_model(adapter, device="cpu"))


def test_an_adapter_without_a_base_says_what_to_set(adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    whole = json.loads(file.read_text())
    for content in (json.dumps({**whole, "base_model_name_or_path": None}), "{}", "[]", "not JSON"):
        file.write_text(content)
        with pytest.raises(AjetError, match=r"adapter_config\.json"):
            load_model(file.parent, device="cpu")


def gguf_file(path: Path, *, without: str = "") -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(24)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(32)
    shapes = {"token_embd": (32, 16), "output_norm": (16,), "output": (32, 16)}
    for name in ("attn_norm", "ffn_norm"):
        shapes[f"blk.0.{name}"] = (16,)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        shapes[f"blk.0.{name}"] = (16, 16)
    shapes |= {"blk.0.ffn_gate": (24, 16), "blk.0.ffn_up": (24, 16), "blk.0.ffn_down": (16, 24)}
    for name, shape in shapes.items():
        if name != without:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_without_a_tensor_is_not_converted(tmp_path: Path) -> None:
    whole = gguf_file(tmp_path / "whole.gguf")
    _, mismatch = read_causal_lm(tmp_path, gguf_file=whole.name, trust_remote_code=False)
    assert not mismatch
    broken = gguf_file(tmp_path / "broken.gguf", without="blk.0.ffn_up")
    with pytest.raises(SystemExit, match="up_proj"):
        convert(broken, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()
