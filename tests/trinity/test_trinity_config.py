"""What we map is what Trinity knows: its structured config takes it, and a misspelt key of
`trinity:` is told."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ajet_sdk.backbones.trinity.backbone import trinity
from ajet_sdk.backbones.trinity.launch import parse_config, validate_config
from ajet_sdk.backbones.trinity.mapping import TrinityPlace, to_trinity
from ajet_sdk.config.config import load_config
from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Job
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Task

FEW = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
share = st.floats(0.0, 1.0, width=16)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Configs of ours that Trinity can honour."""
    cpu = draw(st.booleans())
    repeat, batch = draw(st.integers(2, 16)), draw(st.integers(1, 64))
    kl = not cpu and draw(st.booleans())
    longest, nodes = draw(st.integers(64, 20_000)), draw(st.integers(1, 4))
    return {
        "backbone": "trinity",
        "experiment_name": "job",
        "model": {
            "path": "org/model",
            "dtype": draw(st.sampled_from(["auto", "float32", "bfloat16", "float16"])),
            "lora": {
                "enabled": draw(st.booleans()),
                "r": draw(st.integers(1, 512)),
                "target_modules": draw(st.sampled_from(["all-linear", ["q_proj", "o_proj"]])),
            },
        },
        "data": {"train_batch_size": batch},
        "rollout": {
            "num_repeat": repeat,
            "temperature": draw(st.floats(0.25, 2, width=16)),
            "top_p": draw(st.floats(0.125, 1, width=16)),
            "top_k": draw(st.sampled_from([-1, 1, 50])),
            "max_model_len": longest,
            "max_response_length_in_one_turn": draw(st.integers(1, longest)),
            "max_env_worker": draw(st.integers(1, 300)),
            "n_vllm_engine": None if nodes > 1 else draw(st.sampled_from([None, 1, 2, 3])),
            "tensor_parallel_size": draw(st.sampled_from([1, 2])),
            "max_staleness": draw(st.integers(0, 3)),
            "gpu_memory_utilization": draw(st.sampled_from([None, 0.5])),
            "timeout": draw(st.floats(1, 5000, width=32)),
        },
        "trainer_common": {
            "n_gpus_per_node": 0 if cpu else 8,
            "nnodes": nodes,
            "use_kl_loss": kl,
            "kl_loss_type": draw(st.sampled_from(["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])),
            "entropy_coef": 0.0 if cpu else draw(share),
            "clip_ratio_low": draw(share),
            "save_freq": draw(st.integers(-1, 30)),
            "test_freq": draw(st.integers(-1, 30)),
            "val_before_train": draw(st.booleans()),
            "optim": {"lr": draw(st.sampled_from([None, 1e-6])), "lr_scheduler_type": draw(
                st.sampled_from(["constant", "cosine"]))},
        },
    }  # fmt: skip


def mapped(document: dict[str, Any], **roots: Any) -> dict[str, Any]:
    config = load_config(values={"ajet": document, **roots})
    place = TrinityPlace(
        run_id="r1",
        model="org/model",
        steps=5,
        lr=config.trainer_common.optim.lr,
        checkpoints=Path("/store"),
        tasks=Path("/store/r1/tasks"),
        val_tasks=2,
        workflow_args={"run_id": "r1", "config": {"a": [1, None]}},
    )
    return to_trinity(config, place)


@FEW
@given(documents())
def test_trinity_takes_every_config_that_we_map(document: dict[str, Any]) -> None:
    mapping = mapped(document)
    config = parse_config(mapping)
    assert config.algorithm.repeat_times == document["rollout"]["num_repeat"]
    assert config.model.temperature == document["rollout"]["temperature"]
    assert (
        config.explorer.rollout_model.engine_type
        == mapping["explorer"]["rollout_model"]["engine_type"]
    )
    given_ = config.buffer.explorer_input.tasksets[0].workflow_args
    assert given_ == {
        "run_id": "r1",
        "config": {"a": [1, None]},
    }, "what our workflow is given arrives whole"
    ways = [
        mapping["algorithm"][name] for name in ("algorithm_type", "advantage_fn", "sample_strategy")
    ]
    assert all(way.startswith("ajet_sdk.") for way in ways)


@FEW
@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.none() | st.integers(1, 20),
    st.sampled_from([1, 2, 3, 4, 8, 16]),
)
def test_what_we_take_trinitys_validators_take(
    tmp_path_factory: pytest.TempPathFactory, nodes: int, gpus: int, engines: int | None, size: int
) -> None:
    """And what they refuse we refuse, with the numbers that they take."""
    document = {
        "backbone": "trinity", "experiment_name": "job", "model": {"path": "org/model"},
        "rollout": {"n_vllm_engine": engines, "tensor_parallel_size": size},
        "trainer_common": {"nnodes": nodes, "n_gpus_per_node": gpus},
    }  # fmt: skip
    store = str(tmp_path_factory.mktemp("store"))
    try:
        mapping = mapped(document)
    except ConfigError as told:
        offered = re.search(r"set it to ([\d, ]+), or null", str(told))
        for one in (int(word) for word in offered[1].split(",")) if offered else ():
            document["rollout"] = {"n_vllm_engine": one, "tensor_parallel_size": size}
            assert validate_config({**mapped(document), "checkpoint_root_dir": store})
        return
    config = validate_config({**mapping, "checkpoint_root_dir": store})
    cluster = config.cluster
    assert cluster.trainer_gpu_num + cluster.rollout_gpu_num == nodes * gpus
    assert (
        cluster.trainer_node_num * cluster.trainer_gpu_num_per_node == cluster.trainer_gpu_num >= 1
    )
    assert config.algorithm.sample_strategy_args["ranks"] == cluster.trainer_gpu_num


@pytest.mark.parametrize(("rank", "maximum"), [(4, 8), (16, 16), (100, 128), (512, 512)])
def test_engines_have_room_for_the_adapters_of_every_version_in_flight(
    tmp_path: Path, rank: int, maximum: int
) -> None:
    """And no model is made, as Trinity would for an adapter that nobody uses."""
    document = {
        "backbone": "trinity",
        "experiment_name": "job",
        "model": {"path": "org/model", "lora": {"enabled": True, "r": rank}},
        "rollout": {"max_staleness": 3},
        "trainer_common": {"n_gpus_per_node": 8},
    }
    config = validate_config({**mapped(document), "checkpoint_root_dir": str(tmp_path)})
    model = config.explorer.rollout_model
    assert model.enable_lora
    assert model.enable_runtime_lora_updating
    assert model.lora_kwargs["max_lora_rank"] == maximum
    assert model.lora_kwargs["max_loras"] == 3 + 2
    assert config.synchronizer.sync_method.value == "memory"
    assert not list(tmp_path.rglob("dummy_lora"))


AUXILIARY = {"model_path": "org/judge", "engine_num": 1, "tensor_parallel_size": 1}


@pytest.mark.parametrize(
    ("own", "gpus", "ranks"),
    [
        ({}, 6, 6),
        ({"explorer": {"rollout_model": {"engine_num": 4}}}, 4, 4),
        ({"explorer": {"rollout_model": {"tensor_parallel_size": 2}}}, 4, 4),
        ({"explorer": {"rollout_model": {"data_parallel_size": 2}}}, 4, 4),
        ({"explorer": {"auxiliary_models": [AUXILIARY, AUXILIARY]}}, 4, 4),
        ({"cluster": {"gpu_per_node": 16}}, 14, 14),
        ({"cluster": {"node_num": 2}, "explorer": {"rollout_model": {"engine_num": 8}}}, 8, 8),
        ({"trainer": {"ulysses_sequence_parallel_size": 2}}, 6, 3),
        (
            {
                "trainer": {
                    "trainer_strategy": "megatron",
                    "megatron": {"tensor_model_parallel_size": 2},
                }
            },
            6,
            3,
        ),
        ({"mode": "explore"}, 0, 1),
    ],
)
def test_loss_and_batches_are_scaled_by_the_ranks_that_trinity_has(
    tmp_path: Path, own: dict[str, Any], gpus: int, ranks: int
) -> None:
    """Two engines on eight GPUs, and whatever the root says of how they are shared."""
    from trinity.algorithm import ADVANTAGE_FN

    document = {
        "backbone": "trinity", "experiment_name": "job", "model": {"path": "org/model"},
        "rollout": {"n_vllm_engine": 2}, "trainer_common": {"n_gpus_per_node": 8},
    }  # fmt: skip
    config = validate_config(
        {**mapped(document, trinity=own), "checkpoint_root_dir": str(tmp_path)}
    )
    algorithm = config.algorithm
    assert (config.cluster.trainer_gpu_num, algorithm.sample_strategy_args["ranks"]) == (
        gpus,
        ranks,
    )
    assert (
        ADVANTAGE_FN.get(algorithm.advantage_fn)(**algorithm.advantage_fn_args).multiple_of == ranks
    )


def test_gpus_that_do_not_divide_into_groups_are_told_at_the_desk(tmp_path: Path) -> None:
    document = {"backbone": "trinity", "experiment_name": "job", "model": {"path": "org/model"},
                "rollout": {"n_vllm_engine": 1}, "trainer_common": {"n_gpus_per_node": 8}}  # fmt: skip
    mapping = mapped(document, trinity={"trainer": {"ulysses_sequence_parallel_size": 2}})
    with pytest.raises(
        ConfigError, match=r"ulysses_sequence_parallel_size: 2 does not divide the 7 GPUs"
    ):
        validate_config({**mapping, "checkpoint_root_dir": str(tmp_path)})


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 2), (1, 8), (2, 8), (4, 8), (3, 4), (16, 8)])
def test_a_cluster_of_several_gpus_needs_no_number_of_engines(
    tmp_path: Path, nodes: int, gpus: int
) -> None:
    for size in (one for one in (1, 2, 4) if one < nodes * gpus and not gpus % one and one < gpus):
        document = {
            "backbone": "trinity", "experiment_name": "job", "model": {"path": "org/model"},
            "rollout": {"tensor_parallel_size": size}, "trainer_common": {"nnodes": nodes, "n_gpus_per_node": gpus},
        }  # fmt: skip
        assert (
            validate_config(
                {**mapped(document), "checkpoint_root_dir": str(tmp_path)}
            ).cluster.rollout_gpu_num
            >= size
        )


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"explorer": {"runer_per_model": 4}}, "runer_per_model"),
        ({"algoritm": {}}, "algoritm"),
        ({"buffer": {"trainer_input": {"experience_buffer": {"capacity": "many"}}}}, "capacity"),
    ],
)
def test_a_wrong_key_of_the_root_trinity_is_one_message_that_names_it(
    own: dict[str, Any], named: str
) -> None:
    document = {"backbone": "trinity", "experiment_name": "job", "model": {"path": "org/model"}}
    with pytest.raises(ConfigError, match=named) as told:
        parse_config(mapped(document, trinity=own))
    assert "trinity" in str(told.value) and "\n" not in str(told.value)


def test_our_parts_are_found_where_trinity_looks_for_them() -> None:
    """By the registries with which its actors load them on every node."""
    from trinity.algorithm import ADVANTAGE_FN, ALGORITHM_TYPE, SAMPLE_STRATEGY
    from trinity.buffer.selector import SELECTORS
    from trinity.common.workflows import WORKFLOWS
    from trinity.utils.monitor import MONITOR

    mapping = mapped(
        {"backbone": "trinity", "experiment_name": "job", "model": {"path": "org/model"}}
    )
    algorithm, inputs = mapping["algorithm"], mapping["buffer"]["explorer_input"]
    found = {
        "WithReference": ALGORITHM_TYPE.get(algorithm["algorithm_type"]),
        "GivenAdvantages": ADVANTAGE_FN.get(algorithm["advantage_fn"]),
        "WholeSteps": SAMPLE_STRATEGY.get(algorithm["sample_strategy"]),
        "OrderOfLocal": SELECTORS.get(inputs["tasksets"][0]["data_selector"]["selector_type"]),
        "AjetWorkflow": WORKFLOWS.get(inputs["default_workflow_type"]),
        "DriverMonitor": MONITOR.get(mapping["monitor"]["monitor_type"]),
    }
    assert {name: one.__name__ for name, one in found.items()} == {name: name for name in found}


def test_a_key_that_cannot_be_honoured_is_told_before_the_model_is_looked_for(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray", reason="needs Ray: just install-trinity")
    values = {
        "backbone": "trinity",
        "model": {"path": str(tmp_path / "nowhere")},
        "trainer_common": {
            "n_gpus_per_node": 0,
            "logger": [],
            "algorithm": {"use_kl_in_reward": True},
        },
    }
    job = Job(config=load_config(values=values), workflow=None, judge=None, train=[Task(main_query="q")], val=[],
              run_id="r", directory=tmp_path)  # fmt: skip
    with (
        TraceWriter(tmp_path / "trace.duckdb") as writer,
        Gateway(writer) as gateway,
        pytest.raises(ConfigError, match="use_kl_in_reward"),
    ):
        asyncio.run(trinity(job, gateway, writer))
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("timelines", [3, 24, 129])
def test_a_step_over_verl_is_one_update_however_many_timelines_it_has(
    tiny: Path, timelines: int
) -> None:
    """verl cuts a batch into mini-batches of a fixed size, and refuses one that this does not
    divide."""
    pytest.importorskip("verl", reason="needs verl: just install-trinity")
    pytest.importorskip(
        "vllm.entrypoints.chat_utils",
        reason="Trinity's actors over verl import vLLM up to 0.23",
        exc_type=ImportError,
    )
    import torch
    from tensordict import TensorDict
    from trinity.trainer.verl.config import build_verl_config
    from verl.utils.tensordict_utils import make_iterator

    from ajet_sdk.backbones.trinity.actors import set_mini_batch_size

    ranks = 3
    document = {
        "backbone": "trinity",
        "model": {"path": str(tiny)},
        "trainer_common": {"n_gpus_per_node": ranks + 1},
    }
    mapping = mapped({"experiment_name": "job", **document})
    mapping["model"]["model_path"] = str(tiny)
    config = parse_config(mapping)
    config.cluster.trainer_gpu_num = ranks
    verl = build_verl_config(config)
    set_mini_batch_size(verl, timelines)
    size = verl.actor.ppo_mini_batch_size
    assert size % ranks == 0
    rows = TensorDict({"ids": torch.arange(timelines // ranks)}, batch_size=[timelines // ranks])
    assert len(list(make_iterator(rows, size // ranks, epochs=1))) == 1
