"""Reading, checking and overriding a config; the messages about what is wrong."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

import ajet
from ajet_sdk.config.config import Config, is_idle, keys, load_config
from ajet_sdk.config.schema import IDLE
from ajet_sdk.config.trainer_schema import TrainerCommon
from ajet_sdk.errors import AjetError, ConfigError

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str, name: str = "math.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def message(path: Path | None, *overrides: str, values: Any = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, values)
    return str(caught.value)


def test_defaults_are_those_of_the_documented_system() -> None:
    config = load_config()
    assert (config.data.max_prompt_length, config.data.max_response_length) == (None, None)
    assert config.data.train_batch_size == 32
    rollout = config.rollout
    assert (rollout.max_env_worker, rollout.gamma, rollout.agent_madness_reward) == (64, 1.0, -1)
    assert (rollout.max_response_length_in_one_turn, rollout.max_model_len) == (4096, 18000)
    assert (rollout.multi_turn.max_sample_per_task, rollout.multi_turn.expected_steps) == (30, 1)
    assert (rollout.num_repeat, rollout.temperature, rollout.top_p, rollout.name) == (
        4,
        0.9,
        1,
        "auto",
    )
    values = rollout.val_kwargs
    assert (
        values.temperature,
        values.top_k,
        values.top_p,
        values.do_sample,
        values.num_repeat,
    ) == (0, -1, 1, False, 1)
    assert config.task_reader.type == "huggingface_dat_repo"
    assert config.task_judge.judge_type == "customized_protocol"
    trainer = config.trainer_common
    assert (trainer.val_pass_n, trainer.save_freq, trainer.test_freq, trainer.total_epochs) == (
        4,
        20,
        20,
        50,
    )
    assert (trainer.use_kl_loss, trainer.kl_loss_coef, trainer.kl_loss_type) == (
        True,
        0.002,
        "low_var_kl",
    )
    assert config.debug.debug_first_n_tasks == 2
    assert config.debug.debug_vllm_seed == 12345
    assert config.context_tracker.timeline_merging_policy.timeline_compare_level == "token"
    assert config.backbone == "local"


def test_a_group_of_one_is_refused_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, "ajet:\n  rollout:\n    temperature: 1\n    num_repeat: 1\n")
    assert (
        message(path)
        == "rollout.num_repeat must be at least 2 for grpo (got 1, in math.yaml line 4): "
        "with one attempt per task every advantage is 0"
    )
    assert "for rloo" in message(path, "ajet.trainer_common.algorithm.adv_estimator=rloo")
    whole_batch = "ajet.trainer_common.algorithm.adv_estimator=reinforce_plus_plus"
    assert load_config(path, [whole_batch]).rollout.num_repeat == 1
    assert load_config(path, ["ajet.backbone=debug"]).rollout.num_repeat == 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "rollout: {num_repeats: 3}",
            "is not a known key (in math.yaml line 2); did you mean rollout.num_repeat?",
        ),
        ("trainer_common: {lr: 1e-6}", "did you mean trainer_common.optim.lr?"),
        ("num_repeat: 8", "did you mean rollout.num_repeat?"),
        (
            "rolout: {num_repeat: 8}",
            "rolout is not a known key (in math.yaml line 2); did you mean rollout?",
        ),
        (
            "rollout: {temperature: -1}",
            "rollout.temperature must be at least 0 (got -1, in math.yaml line 2)",
        ),
        ("rollout: {top_p: 0}", "rollout.top_p must be more than 0 (got 0"),
        ("rollout: {timeout: soon}", "rollout.timeout must be a number (got 'soon'"),
        ("rollout: {num_repeat: true}", "rollout.num_repeat must be a whole number (got True"),
        ("rollout: {num_repeat: 2.5}", "rollout.num_repeat must be a whole number (got 2.5"),
        (
            "rollout: {deterministic: perhaps}",
            "rollout.deterministic must be true or false (got 'perhaps'",
        ),
        ("rollout: 5", "rollout must be a section with keys of its own (got 5"),
        ("rollout: {policy_models: gpt}", "rollout.policy_models must be a list (got 'gpt'"),
        ("backbone: locl", "did you mean local? (got 'locl'"),
        ("trainer_common: {logger: wandbb}", "did you mean wandb? (got 'wandbb'"),
        (
            "trainer_common: {optim: {betas: [0.9, 1]}}",
            "trainer_common.optim.betas must both be at least 0",
        ),
        (
            "trainer_common: {optim: {betas: [0.9]}}",
            "optim.betas must be a list of two values (got [0.9]",
        ),
        ("task_judge: {judge_type: regex}", "task_judge.pattern is required for judge_type: regex"),
        (
            "task_judge: {combined: [{judge: exact, wieght: 2}]}",
            (
                "combined.wieght is not a known key (in math.yaml line 2); did you mean"
                " task_judge.combined.weight?"
            ),
        ),
        (
            "task_judge: {combined: [{judge: exact, x: 2}]}",
            "task_judge.combined has judge, weight, name",
        ),
        (
            "task_judge: {combined: [{judge: exact}, {weight: much}]}",
            "task_judge.combined.1.weight must be a number (got 'much'",
        ),
        ("rollout: {val_kwargs: {num_repeat: 4}}", "pass@k means nothing"),
        ("rollout: {val_kwargs: {num_repeat: 4, do_sample: true}}", "pass@k means nothing"),
        (
            "rollout: {max_model_len: 9, max_response_length_in_one_turn: 10}",
            "at most rollout.max_model_len (9)",
        ),
        ("rollout: {failure_reward: .nan}", "rollout.failure_reward must be a finite number"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, line: str, expected: str) -> None:
    said = message(write(tmp_path, f"ajet:\n  {line}\n"))
    assert expected in said
    assert "math.yaml line 2" in said


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "ajet:\n  rollout:\n    temperature: -1\n    num_repeats: 3\n  data:\n   "
        " train_batch_size: 0\n",
    )
    said = message(path, "ajet.debug.debug_max_parallel=0").splitlines()
    assert len(said) == 4
    assert "debug.debug_max_parallel must be at least 1 (got 0, on the command line)" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "ajet:\n  rollout:\n  num_repeat: 2\n  rollout: {}\n",
            "ajet.rollout is given twice in math.yaml: lines 2 and 4",
        ),
        (
            "ajjet:\n  rollout: {}\n",
            "math.yaml has no top-level key `ajet:`; is ajjet (in math.yaml line 1) a typo?",
        ),
        ("rollout: {}\n", "put rollout under it"),
        ("ajet: {rollout: [}\n", "math.yaml line 1 is not valid YAML"),
        ("- 1\n", "math.yaml must be a mapping"),
        ("", "math.yaml must be a mapping"),
        ("ajet: 3\n", "ajet must be a section"),
    ],
)
def test_a_file_that_is_no_config_is_said(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in message(write(tmp_path, text))


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "ajet: {}\n")
    assert f"did you mean {tmp_path / 'math.yaml'}?" in message(tmp_path / "maths.yaml")


def test_later_sources_win_and_each_value_knows_where_it_came_from(tmp_path: Path) -> None:
    path = write(
        tmp_path, "ajet:\n  rollout:\n    num_repeat: 4\n    temperature: 1.0\n    top_p: 0.9\n"
    )
    values = {"ajet": {"rollout": {"temperature": 0.5, "num_repeat": 6}}}
    config = load_config(path, ["ajet.rollout.num_repeat=8"], values)
    rollout = config.rollout
    assert (rollout.num_repeat, rollout.temperature, rollout.top_p, rollout.top_k) == (
        8,
        0.5,
        0.9,
        -1,
    )
    origins = [
        config.origin(f"rollout.{name}") for name in ("num_repeat", "temperature", "top_p", "top_k")
    ]
    assert origins == ["on the command line", "argument", "in math.yaml line 5", "default"]
    assert config.is_set("rollout")
    assert not config.is_set("data")
    assert load_config(path, values={}).rollout.num_repeat == 4


def test_override_values_are_yaml_and_their_roots_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path, "ajet: {}\nfrozen_lake: {size: 4}\n")
    config = load_config(
        path, ["ajet.rollout.policy_models=[a, b]", "frozen_lake.size=8", "ajet.model.path=x=y"]
    )
    assert config.rollout.policy_models == ["a", "b"]
    assert config.frozen_lake.size == 8
    assert config.model.path == "x=y"
    assert (
        message(path, "rollout.num_repeat=8")
        == "an override starts with its top-level key: ajet.rollout.num_repeat=8"
    )
    assert "has no top-level key 'frozen_lak'; it has ajet, frozen_lake" in message(
        path, "frozen_lak.size=1"
    )
    assert "an override has the form key=value" in message(path, "ajet.rollout.num_repeat")


def test_configs_are_equal_by_value_and_by_root() -> None:
    def config(**roots: Any) -> Config:
        return load_config(values={"ajet": {"experiment_name": "x"}, **roots})

    other = load_config(
        overrides=["ajet.experiment_name=x"], values={"ajet": {}, "lake": {"size": 4}}
    )
    assert config(lake={"size": 4}) == other
    assert config(lake={"size": 4}) != config(lake={"size": 5})
    assert "gamma" in config().dump_yaml()
    assert "gamma" not in config().dump_yaml(only_set=True)


def test_a_section_that_is_emptied_leaves_no_origin() -> None:
    config = load_config(overrides=["ajet.rollout=null"], values={"rollout": {"temperature": 0.5}})
    assert config.rollout.temperature == 0.9
    assert config.origin("rollout.temperature") == "default"
    assert not config.is_set("rollout.temperature")


def test_other_roots_pass_through(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, "ajet: {}\nfrozen_lake:\n  lr: 1e-3\n  map: {size: 4}\ntrinity: null\n")
    )
    assert config.frozen_lake.lr == 0.001
    assert config.frozen_lake.map.size == 4
    assert config.roots["trinity"] is None
    assert dict(config.roots.plain()) == {
        "frozen_lake": {"lr": 0.001, "map": {"size": 4}},
        "trinity": None,
    }
    assert config.ajet.rollout is config.rollout
    with pytest.raises(AttributeError, match="did you mean frozen_lake"):
        _ = config.frozen_lak
    with pytest.raises(AttributeError, match="it has lr, map"):
        _ = config.frozen_lake.size
    assert pickle.loads(pickle.dumps(config)).frozen_lake.map.size == 4


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config().rollout.num_repeat = 5  # type: ignore[misc]


def test_text_comparison_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    level = "ajet.context_tracker.timeline_merging_policy.timeline_compare_level=text"
    with caplog.at_level(logging.WARNING, logger="ajet.config"):
        config = load_config(overrides=[level])
    assert "text comparison is not supported" in caplog.text
    assert len(config.notices()) == 1
    assert load_config().notices() == []


def test_the_name_comes_from_the_file_and_the_time(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "ajet: {}\n"))
    assert config.experiment_name.startswith("math-20")
    assert config.directory == Path("launcher_record") / config.experiment_name
    assert load_config(overrides=["ajet.experiment_name=x"]).directory == Path("launcher_record/x")
    assert load_config(overrides=["ajet.experiment_dir=runs/x"]).directory == Path("runs/x")


def test_paths_are_looked_for_beside_the_file_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "example"
    folder.mkdir()
    (folder / "tasks.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    config = load_config(write(folder, "ajet: {}\n"))
    assert config.resolve("tasks.jsonl") == folder / "tasks.jsonl"
    assert config.resolve("other.jsonl") == Path("other.jsonl")
    assert config.resolve(folder) == folder


def test_a_config_of_the_documented_system_is_accepted(tmp_path: Path) -> None:
    text = """
ajet:
  project_name: appworld
  experiment_dir: auto
  backbone: trinity
  model: {path: /models/Qwen2.5-14B-Instruct}
  data: {max_prompt_length: 3000, max_response_length: 15000, train_batch_size: 32}
  rollout:
    user_workflow: tutorial.example_appworld.appworld->ExampleAgentScopeWorkflow
    max_env_worker: 128
    name: vllm
    n_vllm_engine: 2
    multi_turn: {max_sample_per_task: 30, max_steps: 30, expected_steps: 1}
    val_kwargs: {temperature: 0.0, top_k: -1, top_p: 1.0, do_sample: False, num_repeat: 1}
  task_reader:
    type: env_service
    env_service: {env_type: appworld, env_url: "http://127.0.0.1:8080", env_action_preference: code}
  task_judge:
    judge_type: customized_protocol
    judge_protocol: ajet.task_judge.env_service_as_judge->EnvServiceJudge
    alien_llm_model: qwen3-235b-a22b-instruct-2507
    alien_llm_response_length: 512
  context_tracker:
    timeline_merging_policy: {timeline_compare_level: text, ignore_tools: True}
    fix_retokenization_drift: True
  debug: {debug_max_parallel: 16, debug_vllm_port: 18000, debug_tensor_parallel_size: 4}
  trainer_common:
    val_before_train: False
    n_gpus_per_node: 8
    logger: swanlab
    fsdp_config: {param_offload: True, optimizer_offload: True}
    algorithm: {adv_estimator: grpo, use_kl_in_reward: False}
    optim:
      lr: 1e-6
"""
    config = load_config(write(tmp_path, text))
    assert config.trainer_common.optim.lr == 1e-6
    assert config.trainer_common.logger == ["swanlab"]
    assert config.rollout.n_vllm_engine == 2


def test_an_empty_section_is_its_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "ajet:\n  rollout:\n  data:\n")).rollout.num_repeat == 4


def test_a_runner_on_ray_is_refused_and_one_in_threads_is_what_there_is() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(values={"rollout": {"runner": "ray"}})
    assert "rollout.runner" in str(refused.value)
    threads = load_config(values={"rollout": {"runner": "thread", "num_repeat": 3}})
    assert threads.rollout == load_config(values={"rollout": {"num_repeat": 3}}).rollout


def test_errors_are_value_errors_of_ours() -> None:
    with pytest.raises(AjetError):
        load_config(values={"rollout": {"num_repeat": 1}})
    with pytest.raises(ValueError, match=r"got 1, argument"):
        load_config(values={"rollout": {"num_repeat": 1}})


LEAVES = [path for path in keys() if not any(other.startswith(path + ".") for other in keys())]


def default(path: str) -> Any:
    value: Any = load_config().model_dump(mode="json")
    for step in path.split("."):
        value = value[step]
    return value


@given(st.sampled_from(LEAVES))
def test_a_key_set_to_its_default_changes_nothing(path: str) -> None:
    config = load_config(
        overrides=["ajet.experiment_name=x", f"ajet.{path}={json.dumps(default(path))}"]
    )
    assert config == load_config(overrides=["ajet.experiment_name=x"]) or path == "experiment_name"
    assert config.origin(path) == "on the command line"


@given(st.sampled_from(LEAVES), st.integers(0, 40), st.sampled_from("qzx_"))
def test_a_misspelt_key_is_never_accepted(path: str, position: int, letter: str) -> None:
    parent, dot, last = path.rpartition(".")
    position = position % (len(last) + 1)
    misspelt = f"{parent}{dot}{last[:position]}{letter}{last[position:]}"
    if misspelt in keys():
        return
    with pytest.raises(ConfigError, match="is not a known key") as caught:
        load_config(overrides=[f"ajet.{misspelt}=1"])
    assert "did you mean" in str(caught.value)


@pytest.mark.slow
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "rollout": st.fixed_dictionaries(
                {"num_repeat": st.integers(2, 64), "top_p": st.floats(0.01, 1)}
            ),
            "data": st.fixed_dictionaries({"train_batch_size": st.integers(1, 512)}),
            "model": st.fixed_dictionaries({"path": st.text(min_size=1, max_size=8)}),
        },
    ),
    st.dictionaries(
        st.from_regex(r"root_[a-z]{1,8}", fullmatch=True),
        st.dictionaries(st.text(max_size=4), st.integers(), max_size=3),
        max_size=2,
    ),
)
@example({}, {"root_a": {"\x85": 1, "\u2028": 2}})  # YAML breaks lines there
def test_what_is_dumped_reads_back_as_the_same_config(
    ours: dict[str, Any], roots: dict[str, Any]
) -> None:
    config = load_config(values={"ajet": ours, **roots})
    for text in (config.dump_yaml(), config.dump_yaml(only_set=True)):
        again = load_config(values=yaml.safe_load(text))
        assert again == config
        assert again.roots.plain() == roots


def test_what_has_no_effect_is_said_where_it_is_given(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "ajet:\n  context_tracker: {fix_retokenization_drift: false}\n  rollout: {max_num_seqs: 10,"
        " top_p: 0.5}\n  trainer_common: {nnodes: 2}\n",
    )
    said = [
        (
            "without effect in this version: context_tracker.fix_retokenization_drift (token ids"
            " are always the sampled ones)"
        ),
        "without effect with backbone local: trainer_common.nnodes",
    ]
    assert load_config(path).notices() == said  # max_num_seqs has its default
    assert load_config(path, ["ajet.backbone=trinity"]).notices() == said[:1]


@pytest.mark.parametrize(
    ("algorithm", "more", "said"),
    [
        (
            "sft",
            {"kl_loss_coef": 0.5, "entropy_coef": 0.01},
            (
                "without effect with sft: trainer_common.kl_loss_coef, trainer_common.entropy_coef "
                "(only for grpo, rloo, opo, reinforce_plus_plus)"
            ),
        ),
        ("sft", {"use_kl_loss": False, "entropy_coef": 0.0}, None),
        ("grpo", {"use_kl_loss": True, "clip_ratio_low": 0.1}, None),
        (
            {"adv_estimator": "opd", "teacher": "x", "data": "y.jsonl"},
            {"clip_ratio_low": 0.1},
            "without effect with opd: trainer_common.algorithm.data (only for sft, dpo, replay)",
        ),
        (
            {"adv_estimator": "rloo", "beta": 0.2},
            {},
            "without effect with rloo: trainer_common.algorithm.beta (only for dpo)",
        ),
    ],
)
def test_what_an_algorithm_does_not_read_is_said(
    algorithm: Any, more: dict[str, Any], said: str | None
) -> None:
    common = {"algorithm": algorithm, **more}
    assert load_config(values={"ajet": {"trainer_common": common}}).notices() == (
        [said] if said else []
    )
    assert (
        load_config(values={"ajet": {"trainer_common": common, "backbone": "trinity"}}).notices()
        == []
    )


def test_what_the_rubric_grader_does_not_read_is_said_with_the_reason() -> None:
    grader = {
        "sampling_mode": "smart_sampling",
        "query_specific_generate_number": 4,
        "input_data_type": "other",
    }
    config = load_config(values={"ajet": {"task_judge": {"rubrics_auto_grader": grader}}})
    [said] = config.notices()
    assert all(re.search(rf"task_judge\.rubrics_auto_grader\.{name} \(\w", said) for name in grader)


@pytest.mark.slow
def test_every_other_key_is_read_somewhere() -> None:
    files = [
        p
        for folder in ("ajet_sdk", "ajet_tools")
        for p in (ROOT / folder).rglob("*.py")
        if p.name != "config.py"
    ]
    text = "\n".join(p.read_text(encoding="utf-8") for p in files)
    names = {path.rpartition(".")[2] for path in LEAVES if not is_idle(path)}
    names -= {
        "force_disable_toolcalls"
    }  # config.py makes it the parser that reads none, as tested below
    assert [name for name in sorted(names) if not re.search(rf"[.\"']{name}\b", text)] == []
    assert all(path in set(keys()) for path in IDLE)


def test_tool_calls_may_be_left_in_the_text() -> None:
    config = load_config(
        overrides=["ajet.rollout.force_disable_toolcalls=true", "ajet.model.path=m"]
    )
    assert (config.model.tool_call_parser, config.model.path) == ("none", "m")
    assert config.notices() == [] and load_config().model.tool_call_parser == "auto"
    off = load_config(
        overrides=[
            "ajet.rollout.force_disable_toolcalls=false",
            "ajet.model.tool_call_parser=hermes",
        ]
    )
    assert off.model.tool_call_parser == "hermes"


def test_the_schema_describes_every_key() -> None:
    def described(model: Any) -> None:
        for name, field in model.model_fields.items():
            assert field.description, name
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                described(field.annotation)

    described(Config)


@pytest.mark.parametrize(
    "name",
    [
        "..",
        ".",
        ".hidden",
        "../x",
        "../../../x",
        "/abs",
        "a/b",
        "a\\b",
        "a\nb",
        "a\0b",
        "\x1b[3m",
        "x" * 201,
        " x",
    ],
)
def test_a_name_that_would_lead_elsewhere_is_refused(name: str) -> None:
    for build in (
        lambda: load_config(values={"experiment_name": name}),
        lambda: load_config(overrides=[f"ajet.experiment_name={json.dumps(name)}"]),
        lambda: ajet.AjetJob(experiment_name=name).config,
    ):
        with pytest.raises(ConfigError, match="experiment_name must be a valid directory name"):
            build()


@given(st.text(max_size=60))
def test_what_is_accepted_as_a_name_stays_below_the_directory_of_experiments(name: str) -> None:
    try:
        config = load_config(values={"experiment_name": name})
    except ConfigError:
        return
    assert (
        config.directory.parent == Path("launcher_record")
        and Path(os.path.normpath(config.directory)) == config.directory
    )


def test_a_config_made_in_python_says_what_a_file_would(tmp_path: Path) -> None:
    made = Config(
        model={"path": tmp_path}, rollout={"num_repeat": 3}, trainer_common=TrainerCommon(seed=7)
    )
    assert (
        made.model.path == str(tmp_path)
        and made.rollout.num_repeat == 3
        and made.trainer_common.seed == 7
    )
    assert made.is_set("rollout.num_repeat") and not made.is_set("rollout.temperature")
    assert (
        made.experiment_name.startswith("ajet-")
        and made.origin("trainer_common.seed") == "argument"
    )
    with pytest.raises(
        ConfigError,
        match=r"rollout\.num_repeets is not a known key.*did you mean rollout\.num_repeat\?",
    ):
        Config(rollout={"num_repeets": 3})
    with pytest.raises(ConfigError, match=r"rollout\.num_repeat must be at least 2"):
        Config(rollout={"num_repeat": 1})
    with pytest.raises(ConfigError, match=r"rolout is not a known key.*did you mean rollout\?"):
        Config(rolout={})
