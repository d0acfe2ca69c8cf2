"""`ajet trace check FILE`: rollouts of other trainers pass; each way in which one trains what was not
sampled is named.

`dumps/verifiers-0.4.0.jsonl` was written by its Trace, its graph and its trace_store (its configs
and runtimes, which need services, were stand-ins), `dumps/tinker-cookbook-0.6.1.jsonl` by its
capture exporter, `dumps/rllm-0.3.0.jsonl` by `Episode.to_dict()`, `dumps/trl-1.16.0.jsonl` are
`RolloutSample`s by `dataclasses.asdict`; Datums are the SDK's.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.errors import ConfigError, TaskError
from ajet_sdk.trace.reader import episodes, open_trace
from ajet_tools.cli.app import app
from ajet_tools.trace.imports import import_files
from ajet_tools.trace.imports.audited import Dump, audit_dump
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.slow

DUMPS = Path(__file__).parent / "dumps"


def datum(advantage: float = 0.5, **more: Any) -> dict[str, Any]:
    """A line as the guide writes it of a Datum."""
    tinker = pytest.importorskip("tinker")
    made = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2, 3, 4, 5]),
        loss_fn_inputs={
            "target_tokens": [2, 3, 4, 5, 6],
            "logprobs": [0.0, 0.0, -0.5, -0.25, 0.0],
            "advantages": [0.0, 0.0, advantage, advantage, 0.0],
        },
    ).with_provenance(
        model_input=[
            tinker.PromptProvenanceSpan(sequence_id="s", length=3),
            tinker.SampledProvenanceSpan(sequence_id="s", length=2),
        ],
        loss_fn_inputs=[
            tinker.PromptProvenanceSpan(sequence_id="s", offset=1, length=2),
            tinker.SampledProvenanceSpan(sequence_id="s", length=2),
            tinker.PromptProvenanceSpan(sequence_id="t", offset=5, length=1),
        ],
    )
    spans = {
        name: [{"type": type(span).__name__, **vars(span)} for span in getattr(made, name)]
        for name in ("model_input_spans", "loss_fn_input_spans")
    }
    inputs = {name: tensor.tolist() for name, tensor in made.loss_fn_inputs.items()}
    return {"model_input": made.model_input.model_dump(), "loss_fn_inputs": inputs, **spans, **more}


def stored(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DUMPS / name).read_text().splitlines()]


SOUND: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "agent-lightning": lambda: [event for rollout in stored("agentlightning-1.0.2.jsonl") for event in rollout],
    "verifiers": lambda: stored("verifiers-0.4.0.jsonl"),
    "tinker": lambda: [datum(0.5, group_idx=0, traj_idx=0), datum(-0.5, group_idx=0, traj_idx=1)],
    "trl": lambda: [
        *stored("trl-1.16.0.jsonl"),
        {"prompt_ids": [[1], [2]], "completion_ids": [[3, 4], [5]], "logprobs": [[-1, -2], [-3]],
         "env_mask": [[1, 0], [1]]},
    ],
    "rllm": lambda: stored("rllm-0.3.0.jsonl"),
}  # fmt: skip


def audited(tmp_path: Path, rows: list[dict[str, Any]]) -> Dump:
    file = tmp_path / "dump.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return audit_dump([file])


@pytest.mark.parametrize("format", SOUND)
def test_what_a_trainer_wrote_passes(tmp_path: Path, format: str) -> None:
    dump = audited(tmp_path, SOUND[format]())
    assert (list(dump.formats.values()), dump.problems, dump.audit.differs, dump.splits) == (
        [format],
        [],
        (),
        [],
    )
    assert dump.sound and dump.calls >= dump.episodes >= 2


def test_captured_requests_of_one_trajectory_are_one_episode(tmp_path: Path) -> None:
    rows = stored("tinker-cookbook-0.6.1.jsonl")
    dump = audited(tmp_path, rows)
    assert (dump.sound, dump.episodes, dump.calls, dump.splits) == (True, 2, 3, [])
    rows[1]["prompt_tokens"][1] = 9
    [split] = audited(tmp_path, rows).splits
    assert "shares 1 of the 6 tokens of its prompt" in split


def test_without_token_ids_nothing_is_said_to_be_right(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no call has token ids"):
        audited(
            tmp_path,
            [
                {
                    "messages": [
                        {"role": "user", "content": "Hi"},
                        {"role": "assistant", "content": "yes"},
                    ]
                }
            ],
        )


def node(index: int, **changes: Any) -> Callable[[list[dict[str, Any]]], object]:
    return lambda rows: rows[0]["traces"][0]["nodes"][index].update(changes)


def of(column: str, value: Any, **more: Any) -> Callable[[list[dict[str, Any]]], object]:
    def change(rows: list[dict[str, Any]]) -> None:
        place = rows[0]
        for name in column.split(".")[:-1]:
            place = place[int(name)] if isinstance(place, list) else place[name]  # type: ignore[unreachable]
        place[column.split(".")[-1]] = value

    return change


def test_events_of_agent_lightning(tmp_path: Path) -> None:
    """As its 1.0.2 wrote them: of one rollout whole, of the other as triplets."""
    out = tmp_path / "t.duckdb"
    done = import_files([DUMPS / "agentlightning-1.0.2.jsonl"], out)
    assert (done.formats, done.bad_rows) == (
        {str(DUMPS / "agentlightning-1.0.2.jsonl"): "agent-lightning"},
        0,
    )
    with open_trace(out) as reader:
        whole, triplets = sorted(
            episodes(reader), key=lambda episode: len(episode.calls), reverse=True
        )
    first, second, failed = whole.calls
    assert (
        first.request["messages"] == [{"role": "user", "content": "turn 0"}]
        and first.policy_version == 3
    )
    assert second.prompt_ids is not None and second.prompt_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (failed.error, failed.output_ids) == ("the request failed", None)
    assert (whole.reward, triplets.reward) == (1.0, 0.0), "the last one, as it trains on"
    [call] = triplets.calls
    assert call.output_ids is not None and call.logprobs is not None
    assert (call.output_ids.tolist(), call.logprobs.tolist()) == ([5, 6], [-0.5, -0.5])


def test_of_refused_rows_it_is_not_said_that_nothing_differs(tmp_path: Path) -> None:
    rows = SOUND["trl"]()
    rows[0]["completion_mask"] = [0]
    file = tmp_path / "dump.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    told = CliRunner().invoke(app, ["trace", "check", str(file)])
    assert told.exit_code == 1
    assert "mask for 1 of 6 tokens" in told.output and "the other rows: recomputed" in told.output


def test_an_attempt_with_a_reward_and_no_request_is_counted(tmp_path: Path) -> None:
    rows = SOUND["agent-lightning"]()
    reward = next(row for row in rows if row["event_type"] == "reward")
    file = tmp_path / "dump.jsonl"
    file.write_text(
        "".join(f"{json.dumps(row)}\n" for row in [{**reward, "attempt_id": "silent"}, *rows])
    )
    said = CliRunner().invoke(app, ["trace", "check", str(file)])
    assert said.exit_code == 0, said.output
    assert (
        "3 episodes with" in said.output
        and "1 episode without a request: a reward alone" in said.output
    )


BROKEN: list[tuple[str, Callable[[list[dict[str, Any]]], object], str]] = [
    ("verifiers", node(2, logprobs=[0.5, -0.5]), "log-probabilities: dump.jsonl line 1, call 0"),
    ("verifiers", node(2, logprobs=[float("nan"), -0.5]), "log-probabilities: dump.jsonl line 1, call 0"),
    ("verifiers", node(2, logprobs=[-0.5]), "logprobs for 1 of 2 sampled tokens"),
    ("verifiers", node(2, mask=[False, True, True]), "node 2: mask for 3 of 4 tokens"),
    ("verifiers", node(2, mask=[True, False, True, True]), "node 2: a token is not sampled, but one before it is"),
    ("verifiers", node(3, mask=[True] * 12), "node 3: the mask is on tokens that no model sampled"),
    ("verifiers", node(2, advantages=[1.0]), "advantages for 1 of 2 sampled tokens"),
    ("verifiers", node(2, parent=4), "the parent of node 2 is node 4, which is no earlier one"),
    ("verifiers", lambda rows: (node(2, advantages=[-0.5] * 2)(rows), node(4, advantages=[-0.6] * 2)(rows)),
     "advantages of a group: dump.jsonl line 1"),
    ("agent-lightning", of("data.response.choices.0.logprobs.content.0.logprob", 0.25),
     "log-probabilities: dump.jsonl line 1, call 0"),
    ("agent-lightning", of("data.response.choices.0.token_ids", [5]), "logprobs for 2 of 1 sampled tokens"),
    ("agent-lightning", of("data.response.choices.0.token_ids", "yes"), "the token ids are no lists"),
    ("tinker", of("loss_fn_inputs.logprobs", [0, 0, -0.5, 0.25, 0]), "log-probabilities: dump.jsonl line 1, call 0"),
    ("tinker", of("loss_fn_inputs.logprobs", [0, 0, -0.5]), "logprobs for 3 of 5 targets"),
    ("tinker", of("loss_fn_inputs.target_tokens", [2, 3, 4, 6, 6]), "the targets are not the input shifted by one"),
    ("tinker", of("loss_fn_inputs.target_tokens", [1, 2, 3, 4, 5]), "the targets are not the input shifted by one"),
    ("tinker", of("loss_fn_inputs.advantages", [0, 0.5, 0.5, 0.5, 0]), "token 2 was not sampled and has the advantage"),
    ("tinker", of("loss_fn_inputs.advantages", [0, 0, 0.75, 0.75, 0]), "advantages of a group: dump.jsonl line"),
    ("tinker", lambda rows: rows[0]["loss_fn_input_spans"].pop(), "spans for 4 of 5 tokens"),
    ("trl", of("completion_mask", [0, 0, 1, 1]), "mask for 4 of 6 tokens"),
    ("trl", of("old_log_probs", [0, 0, -0.5, 3, 0, -1]), "log-probabilities: dump.jsonl line 1, call 0"),
    ("trl", of("old_log_probs", [-0.5]), "logprobs for 1 of 6 tokens"),
    ("trl", of("advantage", -2.0), "advantages of a group: dump.jsonl line 1"),
    ("trl", of("advantage", [0, 1, 1, 1, 0, 1]), "token 1 was not sampled and has the advantage 1"),
    ("trl", of("advantage", float("nan")), "an advantage is not a finite number"),
    ("trl", of("input_ids", [-100, 2, 3, 4, 5, 6]), "-100 is no token id"),
    ("trl", of("input_ids", [1, 2, 3, 4, 5, 2**40]), "1099511627776 is no token id"),
    ("trl", of("completion_mask", [1, 0, 1, 1, 0, 1]), "mask is on token 0, which no model sampled"),
    ("trl", lambda rows: rows[2]["logprobs"].pop(), "logprobs for 1 of 2 completions"),
    ("rllm", of("trajectories.0.steps.0.logprobs", [-0.5]), "logprobs for 1 of 2 sampled tokens"),
    ("rllm", of("trajectories.0.steps.0.logprobs", [-0.5, 1e-3]), "log-probabilities: dump.jsonl line 1, call 0"),
    ("rllm", of("trajectories.0.steps.0.response_ids", "yes"), "the token ids are no lists"),
    ("rllm", of("trajectories.0.reward", -1.0), "advantages of a group: dump.jsonl line 2"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(BROKEN)))
def test_what_is_wrong_is_named_with_its_row(tmp_path: Path, case: int) -> None:
    format, change, told = BROKEN[case]
    rows = copy.deepcopy(SOUND[format]())
    change(rows)
    dump = audited(tmp_path, rows)
    assert not dump.sound
    named = [*dump.problems, *(f"{entry.check}: {entry.row}" for entry in dump.audit.differs)]
    assert len(named) == 1 and told in named[0] and "dump.jsonl line" in named[0]
    if dump.problems:
        with pytest.raises(TaskError, match="skip-bad-rows"):
            import_files([tmp_path / "dump.jsonl"], tmp_path / "out.duckdb")


def test_with_a_tokenizer_ids_must_be_the_text_of_the_reply(tmp_path: Path) -> None:
    tokenizer = save_tiny(tmp_path / "model")
    file, run = DUMPS / "verifiers-0.4.0.jsonl", CliRunner()
    passed = run.invoke(app, ["trace", "check", str(file), "--tokenizer", str(tokenizer)])
    assert passed.exit_code == 0 and "recomputed, nothing differs" in passed.output, passed.output
    rows = stored(file.name)
    rows[1]["traces"][0]["nodes"][4]["token_ids"][2] = rows[1]["traces"][0]["nodes"][2][
        "token_ids"
    ][2]
    wrong = tmp_path / "traces.jsonl"
    wrong.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run.invoke(app, ["trace", "check", str(wrong)]).exit_code == 0, (
        "no text is compared without a tokenizer"
    )
    told = run.invoke(app, ["trace", "check", str(wrong), "--tokenizer", str(tokenizer), "--json"])
    [differs] = json.loads(told.output)["audit"]["differs"]
    assert told.exit_code == 1 and (differs["check"], differs["row"]) == (
        "texts",
        "traces.jsonl line 2, call 1",
    )


def test_a_tokenizer_that_is_named_and_missing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tokenizer.json").write_text("{}")
    for place, told in (
        ("absent", "there is no tokenizer in"),
        ("damaged", "cannot be loaded as a tokenizer"),
    ):
        arguments = [
            "trace",
            "check",
            str(DUMPS / "verifiers-0.4.0.jsonl"),
            "--tokenizer",
            str(tmp_path / place),
        ]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 2 and told in done.output, done.output
        assert "recomputed" not in done.output


def test_a_datum_that_does_not_say_what_was_sampled_is_not_checked(tmp_path: Path) -> None:
    rows = [datum(0.5, group_idx=0, traj_idx=0, reward=1.0)]
    for spans in ("loss_fn_input_spans", "model_input_spans"):
        rows[0].pop(spans)
    rows[0]["loss_fn_inputs"]["advantages"] = [
        1.0,
        0.0,
        1.0,
        1.0,
        0.0,
    ]  # of a prompt's token, the first one
    dump = audited(tmp_path, rows)
    [reason] = [entry.reason for entry in dump.audit.unchecked if entry.check == "what is trained"]
    assert dump.sound
    assert (
        reason
        == "1 row has neither mask, weights nor spans: tokens with an advantage are taken as the"
        " sampled ones"
    )
    told = CliRunner().invoke(app, ["trace", "check", str(tmp_path / "dump.jsonl")])
    assert told.exit_code == 0 and "what is trained: 1 row has neither" in told.output
    whole = audited(tmp_path, [datum(0.5)])
    assert not [entry for entry in whole.audit.unchecked if entry.check == "what is trained"]


def test_where_every_row_is_refused_nothing_was_checked(tmp_path: Path) -> None:
    rows = [datum(0.5)]
    rows[0]["loss_fn_inputs"]["logprobs"].pop()
    (tmp_path / "dump.jsonl").write_text(json.dumps(rows[0]) + "\n")
    told = CliRunner().invoke(app, ["trace", "check", str(tmp_path / "dump.jsonl")])
    assert told.exit_code == 1 and "logprobs for 4 of 5 targets" in told.output
    assert "nothing was checked" in told.output and "differs" not in told.output
