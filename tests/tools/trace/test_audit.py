"""`ajet trace check --deep`: what a training wrote passes; an edit from which something follows is
found."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ajet_sdk.run import train
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.schema import COLUMNS
from ajet_tools.cli.app import app
from ajet_tools.trace.files.audit import audit
from tests.tiny_models import save_tiny
from tests.tools.trace.audited_runs import discuss, job, trained

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return trained(tmp_path_factory.mktemp("run"), model) / "trace.duckdb"


@pytest.fixture
def path(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(sound, tmp_path))


CALL = (
    "(SELECT min(call_id) FROM trained JOIN calls USING (call_id) WHERE agent = 'solver' AND"
    " extends_call_id IS NULL)"
)
"""A first call that was trained."""
LATER = (
    "(SELECT min(call_id) FROM trained JOIN calls USING (call_id) WHERE extends_call_id IS NOT"
    " NULL)"
)
OTHER = "(SELECT max(call_id) FROM trained JOIN calls USING (call_id) WHERE agent = 'critic')"
EPISODE = f"(SELECT episode_id FROM calls WHERE call_id = {CALL})"
FAILED = "(SELECT min(episode_id) FROM episodes WHERE status = 'failed' AND split = 'train')"

EDITS: dict[str, list[str]] = {
    "calls.call_id": [f"call_id = 'x' WHERE call_id = {CALL}"],
    "calls.episode_id": [f"episode_id = {FAILED} WHERE call_id = {CALL}"],
    "calls.index": [
        f"index = CASE index WHEN 0 THEN 1 WHEN 1 THEN 0 ELSE index END WHERE episode_id = {EPISODE}",
        f"index = 9 WHERE call_id = {CALL}",
    ],
    "calls.agent": [f"agent = 'critic' WHERE call_id = {CALL}", f"agent = 'solver' WHERE call_id = {OTHER}"],
    "calls.target_tag": [f"target_tag = 'judge' WHERE call_id = {CALL}", f"target_tag = NULL WHERE call_id = {OTHER}"],
    "calls.trainable": [f"trainable = false WHERE call_id = {CALL}", "trainable = true WHERE agent = 'fixed'"],
    "calls.model": [f"model = 'another' WHERE call_id = {CALL}"],
    "calls.policy_version": [
        f"policy_version = policy_version + 1 WHERE call_id = {CALL}",
        f"policy_version = policy_version - 1 WHERE call_id = {CALL}",
        "policy_version = 0 WHERE episode_id IN (SELECT episode_id FROM episodes WHERE step = 2 AND split = 'val')",
    ],
    "calls.weight_updates": [
        f"weight_updates = [1] WHERE call_id = {CALL}",
        f"weight_updates = [0] WHERE call_id = {OTHER}",
        f"weight_updates = [9999] WHERE call_id = {OTHER}",
    ],
    "calls.request": [f"""request = '{{"tools": [{{"type": "function"}}]}}' WHERE call_id = {CALL}"""],
    "calls.response": [
        f"response = replace(response::VARCHAR, '\"content\": \"', '\"content\": \"x') WHERE call_id = {CALL}",
        f"response = regexp_replace(response::VARCHAR, 'completion_tokens\": [0-9]+', 'completion_tokens\": 9') "
        f"WHERE call_id = {CALL}",
    ],
    "calls.parent_call_id": [f"parent_call_id = NULL WHERE call_id = {LATER}"],
    "calls.prefix_len": [f"prefix_len = prefix_len - 1 WHERE call_id = {LATER}"],
    "calls.prompt_suffix": [
        f"prompt_suffix = list_concat([7], prompt_suffix[2:]) WHERE call_id = {CALL}",
        f"prompt_suffix = list_concat(prompt_suffix, [7]) WHERE call_id = {LATER}",
    ],
    "calls.prefix_messages": [f"prefix_messages = prefix_messages - 1 WHERE call_id = {LATER}"],
    "calls.messages_suffix": [
        f"messages_suffix = replace(messages_suffix::VARCHAR, 'Answer', 'Guess') WHERE call_id = {CALL}"
    ],
    "calls.pictures": [f"""pictures = '[[0, 1, "{"a" * 64}", 1]]' WHERE call_id = {CALL}"""],
    "calls.output_ids": [
        f"output_ids = list_concat([40], output_ids[2:]) WHERE call_id = {CALL}",
        f"output_ids = output_ids[:-2], logprobs = logprobs[:-2] WHERE call_id = {CALL}",
    ],
    "calls.logprobs": [
        f"logprobs = list_concat([0.5], logprobs[2:]) WHERE call_id = {CALL}",
        f"logprobs = list_concat(['nan'::FLOAT], logprobs[2:]) WHERE call_id = {CALL}",
        f"logprobs = list_concat([logprobs[1] - 0.01], logprobs[2:]) WHERE call_id = {CALL}",
        f"logprobs = NULL WHERE call_id = {CALL}",
    ],
    "calls.finish_reason": [f"finish_reason = 'content_filter' WHERE call_id = {CALL}"],
    "calls.started_at": [f"started_at = ended_at + INTERVAL 1 MINUTE WHERE call_id = {CALL}"],
    "calls.ended_at": [f"ended_at = ended_at + INTERVAL 1 MINUTE WHERE call_id = {CALL}"],
    "calls.error": [f"error = 'undelivered' WHERE call_id = {CALL}"],
    "calls.request_id": [f"request_id = (SELECT request_id FROM calls WHERE call_id = {CALL}) WHERE call_id = {LATER}"],
    "calls.sampling": [f"sampling = replace(sampling::VARCHAR, '1.0', '0.7') WHERE call_id = {CALL}"],
    "calls.phase": [f"phase = 'judge' WHERE call_id = {LATER}"],
    "calls.extends_call_id": [f"extends_call_id = NULL WHERE call_id = {LATER}"],
    "calls.cut_tokens": [f"cut_tokens = 2 WHERE call_id = {CALL}"],
    "episodes.episode_id": [f"episode_id = 'x' WHERE episode_id = {EPISODE}"],
    "episodes.run_id": [f"run_id = 'x' WHERE episode_id = {EPISODE}"],
    "episodes.group_id": [f"group_id = 'x' WHERE episode_id = {EPISODE}"],
    "episodes.attempt": [f"attempt = 7 WHERE episode_id = {EPISODE}"],
    "episodes.step": [f"step = 3 - step WHERE episode_id = {EPISODE}"],
    "episodes.split": [f"split = 'val' WHERE episode_id = {EPISODE}"],
    "episodes.task_id": [f"task_id = 'x' WHERE episode_id = {EPISODE}"],
    "episodes.task": [f"task = replace(task::VARCHAR, 'Say', 'Do not say') WHERE episode_id = {EPISODE}"],
    "episodes.status": [
        f"status = 'failed' WHERE episode_id = {EPISODE}",
        f"status = 'succeeded' WHERE episode_id = {FAILED}",
    ],
    "episodes.error": [f"error = NULL WHERE episode_id = {FAILED}", f"error = 'x' WHERE episode_id = {EPISODE}"],
    "episodes.cause": [f"cause = 'TypeError' WHERE episode_id = {FAILED}"],
    "episodes.infrastructure": [f"infrastructure = true WHERE episode_id = {EPISODE}"],
    "episodes.is_success": [
        f"is_success = NOT (SELECT sum(weight * value) >= 1 FROM rewards WHERE episode_id = {EPISODE}) "
        f"WHERE episode_id = {EPISODE}"
    ],
    "episodes.metrics": [f"""metrics = '{{"speed": 1.5}}' WHERE episode_id = {EPISODE}"""],
    "episodes.started_at": [f"started_at = started_at + INTERVAL 1 HOUR WHERE episode_id = {EPISODE}"],
    "episodes.ended_at": [f"ended_at = ended_at - INTERVAL 1 HOUR WHERE episode_id = {EPISODE}"],
    "episodes.superseded": [f"superseded = true WHERE episode_id = {EPISODE}"],
    "episodes.decoding": [f"decoding = 'greedy' WHERE episode_id = {EPISODE}"],
    "rewards.episode_id": [f"episode_id = {FAILED} WHERE episode_id = {EPISODE}"],
    "rewards.value": [f"value = -value WHERE episode_id = {EPISODE}", f"value = 'nan' WHERE episode_id = {EPISODE}"],
    "rewards.weight": [
        f"weight = 0 WHERE episode_id = {EPISODE} AND weight = 1",
        f"weight = 1 WHERE episode_id = {EPISODE} AND weight = 0",
    ],
    "rewards.name": [f"name = NULL WHERE episode_id = {EPISODE}"],
    "rewards.agent": [f"agent = 'critic' WHERE episode_id = {EPISODE} AND name = 'length'"],
    "rewards.call_id": [f"call_id = {CALL} WHERE episode_id = {EPISODE} AND name = 'length'"],
    "metrics.run_id": ["run_id = 'x' WHERE name = 'train/reward' AND step = 1"],
    "metrics.step": ["step = step + 1 WHERE name = 'train/tokens_trained'"],
    "metrics.name": ["name = 'train/tokens_stale' WHERE name = 'train/tokens_trained' AND step = 1"],
    "metrics.value": ["value = 'nan' WHERE name = 'train/loss' AND step = 1"],
    "metrics.at": ["\"at\" = \"at\" + INTERVAL 1 DAY WHERE step = 1"],
    "ledger.run_id": [f"run_id = 'x' WHERE call_id = {CALL}"],
    "ledger.step": [f"step = 3 - step WHERE call_id = {CALL}"],
    "ledger.episode_id": [f"episode_id = {FAILED} WHERE call_id = {CALL}"],
    "ledger.call_id": [f"call_id = {OTHER} WHERE call_id = {CALL}"],
    "ledger.outcome": [
        f"outcome = 'stale' WHERE call_id = {CALL}",
        "outcome = 'failed' WHERE outcome = 'zero_advantage'",
        "outcome = 'trained' WHERE outcome = 'evaluation' AND step = 2",
    ],
    "ledger.tokens": [f"tokens = tokens + 1 WHERE call_id = {CALL}"],
    "trained.run_id": [f"run_id = 'x' WHERE call_id = {CALL}"],
    "trained.step": [f"step = 3 - step WHERE call_id = {CALL}"],
    "trained.episode_id": [f"episode_id = {FAILED} WHERE call_id = {CALL}"],
    "trained.call_id": [f"call_id = {OTHER} WHERE call_id = {CALL}"],
    "trained.advantages": [
        "advantages = list_transform(advantages, lambda a: -a) WHERE step = 1",
        f"advantages = list_concat([0], advantages[2:]) WHERE call_id = {CALL}",
        f"advantages = list_concat(['nan'::FLOAT], advantages[2:]) WHERE call_id = {CALL}",
        "advantages = list_transform(advantages, lambda a: a * 2)",
    ],
    "trained.logprobs": [
        f"logprobs = list_concat([0.5], logprobs[2:]) WHERE call_id = {CALL}",
        f"logprobs = list_concat([logprobs[1] - 0.01], logprobs[2:]) WHERE call_id = {CALL}",
    ],
    "trained.entropy": [f"entropy = list_concat([entropy[1] + 1], entropy[2:]) WHERE call_id = {CALL}"],
}  # fmt: skip
"""Column -> edits of it, each of which is found."""

FOLLOWING = (
    "train/reward",
    "train/loss",
    "train/reward_std",
    "train/solved_share",
    "train/failed_share",
    "train/entropy",
    "train/logprob_gap_mean",
    "train/merge_ratio",
    "train/timelines",
    "train/splits",
    "train/groups",
    "train/groups_zero_variance",
    "train/staleness",
    "train/tokens_failed",
    "train/tokens_sampled",
    "train/calls_per_episode",
    "train/policy_version",
    "train/tokens_per_second",
    "val/reward",
    "val/greedy_reward",
    "val/pass@1",
    "val/pass@2",
    "val/failed_share",
    "val/solved_share",
)
"""Metrics that follow from rows."""

NOTHING_FOLLOWS = {"episodes.output", "episodes.events", "episodes.client", "rewards.reason"}
"""Columns from which nothing else in a trace follows; of a reward's name only that it has one."""


def test_each_column_has_an_edit() -> None:
    tables = ("calls", "episodes", "rewards", "metrics", "ledger", "trained")
    assert {f"{table}.{column}" for table in tables for column in COLUMNS[table]} == set(
        EDITS
    ) | NOTHING_FOLLOWS


def test_what_a_training_wrote_passes(sound: Path) -> None:
    audited = audit(sound)
    assert (audited.differs, audited.unchecked) == ((), ())
    with duckdb.connect(str(sound), read_only=True) as connection:
        outcomes = {
            row[0] for row in connection.execute("SELECT DISTINCT outcome FROM ledger").fetchall()
        }
    assert outcomes >= {"trained", "failed", "zero_advantage", "evaluation", "untrainable"}


@pytest.mark.parametrize(
    "edit", [f"{column}: {edit}" for column, edits in EDITS.items() for edit in edits]
)
def test_an_edit_is_found(path: Path, edit: str) -> None:
    column, change = edit.split(": ", 1)
    with duckdb.connect(str(path)) as connection:
        before = connection.execute(f"SELECT md5(string_agg(t::VARCHAR, ' ' ORDER BY t::VARCHAR)) "
                                    f"FROM {column.split('.')[0]} t").fetchall()  # fmt: skip
        connection.execute(f"UPDATE {column.split('.')[0]} SET {change}")
        after = connection.execute(f"SELECT md5(string_agg(t::VARCHAR, ' ' ORDER BY t::VARCHAR)) "
                                   f"FROM {column.split('.')[0]} t").fetchall()  # fmt: skip
    assert before != after, "the edit changes nothing"
    assert audit(path).differs


def test_an_edit_of_a_metric_is_found(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        edit = (
            "UPDATE metrics SET value = value * 1.001 + 1e-4 WHERE step = 2 AND list_contains(?,"
            " name)"
        )
        assert connection.execute(edit, [FOLLOWING]).fetchall() == [(len(FOLLOWING),)]
    [differs] = audit(path).differs
    assert (differs.check, differs.count) == ("metrics", len(FOLLOWING))


def test_the_command_names_the_row_and_exits_with_1(path: Path) -> None:
    run = CliRunner()
    passed = run.invoke(app, ["trace", "check", "--deep", str(path)])
    assert passed.exit_code == 0 and "recomputed, nothing differs" in passed.output
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            "UPDATE trained SET advantages = list_transform(advantages, lambda a: -a)"
        )
        [(first,)] = connection.execute(
            "SELECT arg_min(call_id, (c.step, c.episode_id, c.index)) FROM trained JOIN (SELECT"
            " call_id, e.step, episode_id, index FROM calls JOIN episodes e USING (episode_id)) c"
            " USING (call_id)"
        ).fetchall()
    shallow = run.invoke(app, ["trace", "check", str(path)])
    assert shallow.exit_code == 1 and shallow.output.startswith(
        "edited: edited after it was written ("
    )
    failed = run.invoke(app, ["trace", "check", "--deep", str(path)])
    assert failed.exit_code == 1
    assert first in failed.output and "expected" in failed.output and "stored" in failed.output
    told = json.loads(run.invoke(app, ["trace", "check", "--deep", "--json", str(path)]).output)
    differs = {entry["check"]: entry["row"] for entry in told["audits"][0]["differs"]}
    assert not told["sound"] and differs == {"advantages": first, "metrics": "train/loss in step 1"}


def test_a_copy_is_named_beside_its_original_also_where_digests_were_made_anew(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        [(original,)] = connection.execute(f"SELECT {CALL}").fetchall()
        connection.execute(
            f"INSERT INTO calls SELECT * REPLACE ('zz' AS call_id) FROM calls WHERE call_id = {CALL}"
        )
    [copy] = [entry for entry in audit(path).differs if entry.check == "copies"]
    assert copy.row == "zz" and original in copy.stored and copy.count == 1


def test_log_probabilities_are_those_of_the_weights_that_sampled(
    sound: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(sound.parent, tmp_path / "run")  # with its checkpoints
    trace = directory / "trace.duckdb"
    passed = audit(trace, weights=True)
    assert (passed.differs, passed.unchecked) == ((), ()) and passed.rows["weights"] > 50
    edits = {
        "metrics SET value = value * 1.01 WHERE name = 'train/grad_norm' AND step = 2": "",
        "calls SET logprobs = list_concat([logprobs[1] - 0.01], logprobs[2:]) WHERE policy_version = 1": (
            "sampled with"
        ),
        "calls SET policy_version = 0 WHERE policy_version = 2": "sampled with",
        "trained SET logprobs = list_concat([logprobs[1] - 0.01], logprobs[2:]) WHERE step = 1": (
            "of the trainer"
        ),
    }
    for i, (edit, whose) in enumerate(edits.items()):
        edited = Path(shutil.copy(trace, directory / f"trace-{i}.duckdb"))
        with duckdb.connect(str(edited)) as connection:
            connection.execute(f"UPDATE {edit}")
        [differs] = [
            entry for entry in audit(edited, weights=True).differs if entry.check == "weights"
        ]
        if whose:
            assert whose in differs.stored and "within 0.001" in differs.expected
        else:
            assert (differs.row, differs.count) == ("train/grad_norm in step 2", 1)


def test_a_recipes_model_is_that_of_the_runs_seed_whatever_the_link_says(
    sound: Path, model: Path, tmp_path: Path
) -> None:
    trace = Path(shutil.copy(sound, tmp_path))  # without its checkpoints
    own = Path(shutil.copytree(model, tmp_path / "models" / ".tiny.seed-0"))
    last = Path(shutil.copytree(model, tmp_path / "models" / ".tiny.seed-1"))
    weights = load_file(last / "model.safetensors")
    save_file(
        {name: tensor * 1.5 for name, tensor in weights.items()},
        last / "model.safetensors",
        {"format": "pt"},
    )
    (tmp_path / "models" / "tiny").symlink_to(last.name)
    with duckdb.connect(str(trace)) as connection:
        [(seed,)] = connection.execute(
            "SELECT config->>'$.ajet.trainer_common.seed' FROM runs"
        ).fetchall()
        patch = json.dumps(
            {"ajet": {"model": {"path": "./models/tiny", "recipe": "recipe.py->recipe"}}}
        )
        connection.execute("UPDATE runs SET config = json_merge_patch(config, ?)", [patch])
    assert seed == "0"
    passed = audit(trace, weights=True)
    assert passed.differs == () and passed.rows["weights"] > 20
    (own / ".ajet").write_text(
        "{}"
    )  # the recipe's mark: it made the seed's model again, after the run
    remade = audit(trace, weights=True)
    assert remade.differs == () and remade.rows["weights"] == 0
    assert any("made it after the run's first call" in entry.reason for entry in remade.unchecked)
    shutil.rmtree(own)
    unknown = audit(trace, weights=True)
    assert unknown.differs == () and unknown.rows["weights"] == 0
    assert any(
        entry.check == "weights" and "no weights at hand" in entry.reason
        for entry in unknown.unchecked
    )
    command = CliRunner().invoke(app, ["trace", "check", "--weights", str(trace)])
    assert command.exit_code == 1 and "--weights compared no call" in command.output


def test_the_gradient_of_an_adapter_is_that_of_its_checkpoint(tmp_path: Path, model: Path) -> None:
    config = job(tmp_path / "lora", model, total_steps=3)
    lora = config.model.lora.model_copy(update={"enabled": True, "r": 4})
    train(
        config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})}),
        workflow=discuss,
    )
    audited = audit(config.directory, weights=True)  # two checkpoints are kept, of steps 2 and 3
    assert audited.differs == () and audited.rows["weights"] > 30
    assert [one.reason for one in audited.unchecked] == [
        "versions 1: no weights at hand, or sampled with limits"
    ]
    with duckdb.connect(str(config.directory / "trace.duckdb")) as connection:
        connection.execute("UPDATE metrics SET value = value * 1.01 WHERE name = 'train/grad_norm'")
    assert [one.row for one in audit(config.directory, weights=True).differs] == [
        "train/grad_norm in step 3"
    ]


def test_without_the_tokenizer_texts_are_not_checked(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            'UPDATE runs SET config = replace(config::VARCHAR, \'"path": "/\', \'"path":'
            " \"/absent/')"
        )
    audited = audit(path)
    assert audited.differs == ()
    assert {one.check for one in audited.unchecked} == {"texts", "templates"}
    assert all("/absent/" in one.reason for one in audited.unchecked)


def test_values_of_another_shape_are_differences_or_named(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            "UPDATE calls SET response = '[3]', request = '3', messages_suffix = '[3]', sampling"
            " = '3'"
        )
        connection.execute("UPDATE calls SET output_ids = [NULL, -5]")
        connection.execute("UPDATE metrics SET value = 'nan'")
    checks = {one.check for one in audit(path).differs}
    assert checks >= {"texts", "templates", "metrics", "log-probabilities", "sampling"}
    for config in ("[]", '{"ajet": 3}'):
        with duckdb.connect(str(path)) as connection:
            connection.execute("UPDATE runs SET config = ?", [config])
        assert "ledger, advantages, metrics" in {one.check for one in audit(path).unchecked}


SETTINGS: dict[str, dict[str, Any]] = {
    "discounted": {"algorithm": {"adv_estimator": "grpo"}, "rollout": {"gamma": 0.9}},
    "a batch": {
        "algorithm": {"adv_estimator": "reinforce_plus_plus"},
        "rollout": {"failure_reward": 0.1, "gamma": 0.5},
    },
    "others": {
        "algorithm": {"adv_estimator": "rloo"},
        "rollout": {"max_staleness": 1},
        "mini_batch_num": 2,
    },
    "cut": {
        "algorithm": {"adv_estimator": "opo"},
        "data": {"max_response_length": 24},
        "ppo_epochs": 2,
    },
    "overlong": {
        "rollout": {
            "overlong_filtering": True,
            "failure_reward": -1.0,
            "max_response_length_in_one_turn": 9,
        }
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_other_estimators_and_limits_pass(tmp_path: Path, model: Path, name: str) -> None:
    directory = trained(tmp_path, model, **SETTINGS[name])
    assert audit(directory).differs == ()
    with duckdb.connect(str(directory / "trace.duckdb")) as connection:
        connection.execute(
            "UPDATE trained SET advantages = list_transform(advantages, lambda a: -a)"
        )
    assert "advantages" in {one.check for one in audit(directory).differs}


def test_demonstrations_pairs_and_a_teacher_are_audited(tmp_path: Path, model: Path) -> None:
    said = tmp_path / "said.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Say {w}."},
                {"role": "assistant", "content": w},
            ]
        }
        for w in "ab"
    ]
    said.write_text("".join(json.dumps(row) + "\n" for row in rows))
    taught = trained(
        tmp_path / "sft", model, algorithm={"adv_estimator": "sft", "data": str(said)}, val_pass_n=0
    )
    distilled = trained(
        tmp_path / "opd",
        model,
        algorithm={"adv_estimator": "opd", "teacher": str(model)},
        val_pass_n=0,
    )
    assert [(one.check, one.reason) for one in audit(distilled).unchecked] == [
        ("advantages", "opd takes them from a teacher")
    ]
    assert (audit(distilled).differs, audit(taught).differs, audit(taught).unchecked) == (
        (),
        (),
        (),
    )
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": row["messages"][:1], "chosen": row["messages"][1:],
             "rejected": [{"role": "assistant", "content": "c"}]} for row in rows]  # fmt: skip
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, data in (("attempts", {}), ("pairs", {"data": str(pairs)})):
        compared = trained(
            tmp_path / name, model, algorithm={"adv_estimator": "dpo", **data}, val_pass_n=0
        )
        assert (audit(compared).differs, audit(compared).unchecked) == ((), ()), name
        with duckdb.connect(str(compared / "trace.duckdb")) as connection:
            connection.execute(
                "UPDATE trained SET advantages = list_transform(advantages, lambda a: -a)"
            )
        assert [one.check for one in audit(compared).differs] == ["advantages"], name
    edits = {
        "trained SET advantages = list_transform(advantages, lambda a: a / 2)": "advantages",
        "metrics SET value = value * 1.001 WHERE name = 'train/loss' AND step = 2": "metrics",
        "ledger SET outcome = 'stale' WHERE step = 1": "ledger",
        "trained SET step = 3 - step": "trained rows",
    }
    for edit, check in edits.items():
        edited = Path(shutil.copy(taught / "trace.duckdb", tmp_path / "edited.duckdb"))
        with duckdb.connect(str(edited)) as connection:
            connection.execute(f"UPDATE {edit}")
        assert check in {one.check for one in audit(edited).differs}, edit


_KILLED = """
import asyncio, sys
from pathlib import Path
import ajet
from tests.tools.trace.audited_runs import discuss, trained

resume = len(sys.argv) > 3
started = []

async def held_at_step_4(question: str, model: ajet.Model):
    started.append(question)
    if not resume and len(started) > 26:  # three steps of eight episodes, two validations of one
        await asyncio.Event().wait()
    return await discuss(question, model)

trained(Path(sys.argv[1]), Path(sys.argv[2]), workflow=held_at_step_4,
        resume=resume, total_steps=4, save_freq=2, val_pass_n=0)
"""


@pytest.mark.long
def test_a_run_that_was_killed_and_resumed_passes(tmp_path: Path, model: Path) -> None:
    command = [sys.executable, "-u", "-c", _KILLED, str(tmp_path), str(model)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as run:
        assert run.stdout is not None
        assert any(line.startswith("step 3/4") for line in run.stdout)
        with open_trace(tmp_path / "experiment") as trace:
            while not trace.query("SELECT 1 FROM ledger WHERE step = 3").num_rows:
                time.sleep(0.1)
        run.send_signal(signal.SIGKILL)
    directory = tmp_path / "experiment"
    interrupted = audit(directory)
    assert interrupted.differs == ()
    assert [one.check for one in interrupted.unchecked] == ["steps that are not finished"]
    subprocess.run([*command, "resume"], check=True, capture_output=True, env=environment)
    resumed = audit(directory)
    assert (resumed.differs, resumed.unchecked) == ((), ())
    with duckdb.connect(str(directory / "trace.duckdb"), read_only=True) as connection:
        assert connection.execute(
            "SELECT count(*) FROM ledger WHERE outcome = 'superseded'"
        ).fetchall() != [(0,)]
