"""Plans of cluster runs: a model's shape from its config.json, and whether it fits the GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ajet_sdk.backbones.plan import mend, plan, with_changes
from ajet_sdk.backbones.shared.fit import check_shape, indivisible
from ajet_sdk.backbones.shared.model_shape import ModelShape, shape_of
from ajet_sdk.backbones.trinity.placement import engines, trainer_gpus
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.errors import ConfigError
from ajet_tools.cli.app import app

QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "tie_word_embeddings": False, "max_position_embeddings": 32768,
}  # fmt: skip
QWEN_72B = {
    **QWEN_7B, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip


def job(backbone: str = "trinity", nodes: int = 1, gpus: int = 8, **rollout: Any) -> Config:
    return load_config(
        values={
            "backbone": backbone,
            "model": {"path": "org/model"},
            "rollout": rollout,
            "trainer_common": {"nnodes": nodes, "n_gpus_per_node": gpus},
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("Qwen2Config", QWEN_7B),
        ("Qwen2Config", QWEN_72B),
        ("Qwen3Config", {**QWEN_7B, "head_dim": 128, "tie_word_embeddings": True}),
        ("LlamaConfig", {**QWEN_7B, "num_attention_heads": 32, "hidden_size": 4096}),
        (
            "Qwen3MoeConfig",
            {
                "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
                "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
                "head_dim": 128, "num_experts": 128, "vocab_size": 151936,
            },
        ),
        ("GPT2Config", {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}),
    ],
)  # fmt: skip
def test_the_number_of_parameters_is_that_of_transformers(kind: str, sizes: dict[str, Any]) -> None:
    import torch
    import transformers

    config = getattr(transformers, kind)(**{k: v for k, v in sizes.items() if k != "model_type"})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = shape_of(json.loads(config.to_json_string()))
    assert shape.parameters == pytest.approx(model.num_parameters(), rel=0.01)


@pytest.mark.slow
def test_the_number_of_an_adapters_parameters_is_that_of_peft() -> None:
    import torch
    import transformers

    from ajet_sdk.engines.local.loading import add_adapter

    sizes = {name: value for name, value in QWEN_7B.items() if name != "model_type"}
    config = transformers.Qwen2Config(**sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        adapted = add_adapter(model, 16, 32, "all-linear")
    trained = sum(value.numel() for value in adapted.parameters() if value.requires_grad)
    assert shape_of(QWEN_7B).adapter_parameters(16) == trained


def test_an_adapter_of_the_largest_model_fits_eight_gpus_where_all_weights_do_not() -> None:
    full = with_changes(
        job(gpus=8, tensor_parallel_size=4),
        {"trainer_common.ulysses_sequence_parallel_size": 4},
    )
    adapter = with_changes(full, {"model.lora.enabled": True})
    shape = shape_of(QWEN_72B)
    assert plan(full, shape).problems != []
    made = plan(adapter, shape)
    assert made.problems == []
    (_, trainer) = made.cards
    assert trainer.parts["weights"] == pytest.approx(2 * shape.parameters / 4, rel=0.01)
    assert trainer.parts["optimizer"] < 1e9
    assert trainer.parts["gradients"] < 1e9


def test_the_positions_reach_further_with_yarn() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert shape_of(QWEN_7B).context == 32768
    assert shape_of({**QWEN_7B, "rope_scaling": scaling}).context == 131072


def test_a_decoder_inside_a_model_of_pictures_is_found() -> None:
    assert shape_of({"model_type": "any", "text_config": QWEN_7B}) == shape_of(QWEN_7B)


@pytest.mark.parametrize("text", ["[]", "{", '{"hidden_size": 8}', '{"hidden_size": "big"}'])
def test_a_config_of_no_decoder_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    config = with_changes(job(), {"model.path": str(tmp_path)})
    with pytest.raises(ConfigError):
        check_shape(config)


values = st.one_of(st.integers(), st.floats(), st.text(max_size=4), st.none(), st.booleans())
names = st.sampled_from(
    [*QWEN_7B, "head_dim", "num_experts", "moe_intermediate_size", "rope_scaling", "text_config"]
)
scalings = st.dictionaries(
    st.sampled_from(["factor", "original_max_position_embeddings"]), values, max_size=2
)


@given(st.dictionaries(names, st.one_of(values, scalings), max_size=5))
def test_any_config_is_a_shape_or_one_message(changes: dict[str, Any]) -> None:
    try:
        shape = shape_of({**QWEN_7B, **changes})
    except ConfigError:
        return
    assert shape.parameters > 0 and shape.kv_bytes() > 0
    plan(job(), shape)
    plan(job("verl"), shape)


@pytest.mark.parametrize(
    ("rollout", "named"),
    [
        ({"tensor_parallel_size": 8}, "tensor_parallel_size"),
        ({"max_model_len": 131072}, "max_model_len"),
    ],
)
def test_what_no_memory_mends_is_refused_before_a_run(
    rollout: dict[str, Any], named: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    config = with_changes(job(**rollout), {"model.path": str(tmp_path)})
    with pytest.raises(ConfigError, match=named):
        check_shape(config)
    assert len(indivisible(job(**rollout), shape_of(QWEN_7B))) == 1
    assert not indivisible(job(), shape_of(QWEN_7B))


def test_heads_that_ulysses_does_not_divide_are_named() -> None:
    config = with_changes(job(), {"trainer_common.ulysses_sequence_parallel_size": 8})
    [problem] = indivisible(config, shape_of(QWEN_7B))
    assert "ulysses" in problem and "28" in problem


@pytest.mark.parametrize(
    "key", ["rollout.tensor_parallel_size", "trainer_common.ulysses_sequence_parallel_size"]
)
@pytest.mark.parametrize(
    ("size", "fits"), [(2, True), (3, True), (4, False), (6, True), (12, True), (8, False)]
)
def test_key_value_heads_are_split_or_repeated_evenly(key: str, size: int, fits: bool) -> None:
    shape = shape_of({**QWEN_7B, "num_attention_heads": 24, "num_key_value_heads": 6})
    problems = indivisible(with_changes(job(), {key: size}), shape)
    assert [key in problem for problem in problems] == [True] * (not fits)


def test_by_default_half_of_the_gpus_sample() -> None:
    assert (engines(job()), trainer_gpus(job())) == (4, 4)
    assert (engines(job(nodes=2)), trainer_gpus(job(nodes=2))) == (8, 8)
    assert engines(job(tensor_parallel_size=2)) == 2
    assert engines(job(n_vllm_engine=1)) == 1


@pytest.mark.parametrize("backbone", ["trinity", "verl"])
def test_72_billion_parameters_do_not_fit_one_machine(backbone: str) -> None:
    shape = shape_of(QWEN_72B)
    made = plan(job(backbone), shape)
    assert made.problems
    engine, trainer = made.cards
    assert engine.parts["weights"] == pytest.approx(145e9, rel=0.01), "16 bits on one GPU"
    assert trainer.parts["optimizer"] * trainer.count == pytest.approx(8 * 72.7e9, rel=0.01)
    changes = mend(job(backbone), shape, 80e9)
    assert changes is not None and int(str(changes["trainer_common.nnodes"])) > 1


sizes = st.sampled_from([shape_of(QWEN_7B), shape_of(QWEN_72B)])
jobs = st.builds(
    job,
    st.sampled_from(["trinity", "verl"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([4, 8]),
    tensor_parallel_size=st.sampled_from([1, 2, 4]),
    max_model_len=st.sampled_from([4096, 18000, 32768]),
)


@given(jobs, sizes, st.floats(20e9, 200e9))
@settings(max_examples=60, deadline=None)
def test_what_fits_fits_larger_gpus_too(config: Config, shape: ModelShape, memory: float) -> None:
    fits = not plan(config, shape, memory).problems
    assert not fits or not plan(config, shape, 1.2 * memory).problems


@given(jobs, sizes, st.sampled_from([40e9, 80e9, 140e9]))
@settings(max_examples=40, deadline=None)
def test_the_proposed_changes_make_it_fit(config: Config, shape: ModelShape, memory: float) -> None:
    changes = mend(config, shape, memory)
    if changes is not None:
        assert not plan(with_changes(config, changes), shape, memory).problems
    if not plan(config, shape, memory).problems:
        assert changes == {}


def test_the_command_says_whether_it_fits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_72B))
    name = f"ajet.model.path={tmp_path}"
    refused = CliRunner().invoke(app, ["plan", name, "--json"])
    assert refused.exit_code == 1
    told = json.loads(refused.output)
    assert not told["fits"] and told["problems"] and told["changes"]
    changes = [f"ajet.{path}={json.dumps(value)}" for path, value in told["changes"].items()]
    mended = CliRunner().invoke(app, ["plan", name, *changes, "--json"])
    assert mended.exit_code == 0 and json.loads(mended.output)["fits"]


def test_a_plan_is_for_clusters(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    file = tmp_path / "job.yaml"
    file.write_text(f"ajet:\n  model: {{path: {tmp_path}}}\n")
    refused = CliRunner().invoke(app, ["plan", "--conf", str(file)])
    assert refused.exit_code != 0 and isinstance(refused.exception, ConfigError | SystemExit)
    taken = CliRunner().invoke(app, ["plan", "--conf", str(file), "--backbone", "verl", "--json"])
    assert json.loads(taken.output)["parameters"] > 7e9
