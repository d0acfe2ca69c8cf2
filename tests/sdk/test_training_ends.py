"""How a training run ends: what became of the model, which checkpoint is offered, the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import ajet
from ajet_sdk.reporting.results import TunedModel
from ajet_sdk.run import train
from ajet_sdk.types import Episode
from ajet_tools.cli.app import app
from tests.sdk.test_local_backbone import job, length, outcomes, talk

AGENT = """
import ajet

@ajet.workflow
async def talk(question: str, model: ajet.Model) -> str:
    return (await model.chat([{"role": "user", "content": question}]))["content"] or ""

@ajet.judge
def never(output: str) -> float:
    return 0.0

@ajet.judge
def length(output: str, episode: ajet.Episode) -> float:
    return len(output) / 10 if episode.split == "train" else 1.0 - episode.step / 10
"""


def run_command(tmp_path: Path, model: Path, judge: str) -> tuple[int, str]:
    (tmp_path / "ending.py").write_text(AGENT)  # another test imports its `agent`
    config = job(tmp_path, model, save_freq=0, test_freq=1)
    (tmp_path / "job.yaml").write_text(config.dump_yaml())
    agent = [f"{tmp_path}/ending.py:talk", "--judge", f"{tmp_path}/ending.py:{judge}"]
    done = CliRunner().invoke(app, ["train", *agent, "--conf", f"{tmp_path}/job.yaml"])
    return done.exit_code, done.output


@pytest.mark.slow
def test_a_run_without_an_update_says_so_and_has_an_exit_code_of_its_own(
    tmp_path: Path, tiny_model: Path
) -> None:
    code, output = run_command(tmp_path, tiny_model, "never")
    assert code == 3, output
    [*_, last] = output.strip().splitlines()
    assert (
        last.startswith("no update was made: ")
        and "trained model saved" not in output
        and "Try it" not in output
    )
    [saved] = (tmp_path / "experiment").glob("checkpoint/*/model/model.safetensors")
    assert saved.read_bytes() == (tiny_model / "model.safetensors").read_bytes()
    first = "step 1: the rewards have no variance: all attempts at each task got the same reward"
    assert (
        f"{first}, so there is nothing to learn from (mean reward 0, pass@1 0.00, pass@4 0.00)"
        in output
    )
    assert "no attempt solved its task: choose easier tasks" in output
    assert output.count("the rewards have no variance") == 1, "the second step says nothing new"
    assert set(outcomes(job(tmp_path, tiny_model))) == {"zero_advantage", "evaluation"}


@pytest.mark.slow
def test_a_run_that_got_worse_says_so_last_and_offers_its_start(
    tmp_path: Path, tiny_model: Path
) -> None:
    code, output = run_command(tmp_path, tiny_model, "length")
    assert code == 0, output
    assert (
        "trained model saved to" in output and f"Try it with: ajet serve {tiny_model}\n" in output
    )
    [*_, last] = output.strip().splitlines()
    assert (
        last
        == "worse than the start; best was step 0 (val/reward 1.000 at step 0, 0.800 at step 2)"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scores", "best", "warning"),
    [
        (
            [0.5, 0.9, 0.2, 0.3],
            1,
            "worse than the start; best was step 1 (val/reward 0.500 at step 0, 0.300 at step 3",
        ),
        ([0.5, 0.6, 0.9, 0.7], 2, ""),
        ([0.5, 0.6, 0.7, 0.7], 3, ""),
    ],
)
def test_the_checkpoint_with_the_best_validation_is_kept_and_offered(
    tmp_path: Path, tiny_model: Path, scores: list[float], best: int, warning: str
) -> None:
    @ajet.judge
    def by_step(output: str, episode: Episode) -> float:
        return length(output) if episode.split == "train" else scores[episode.step]

    config = job(tmp_path, tiny_model, total_steps=3, test_freq=1, save_freq=0, keep_checkpoints=1)
    tuned = train(config, workflow=talk, judge=by_step)
    assert tuned.path is not None and tuned.best is not None and tuned.trained_tokens
    assert tuned.best == (tuned.path if best == 3 else tuned.path.with_name(f"step_{best:06d}"))
    assert (tuned.best / "model.safetensors").is_file()
    assert tuned.warning().startswith(warning) and bool(tuned.warning()) == bool(warning)
    assert f"ajet serve {tuned.best}" in repr(tuned)


@pytest.mark.slow
def test_tokens_that_were_sampled_and_not_trained_are_told(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the step at once, and by the result, whose last line stays what it was."""
    config = job(tmp_path, tiny_model)
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"max_response_length": 3})}
    )
    tuned = train(config, workflow=talk, judge=length)
    assert tuned.outcomes is not None and tuned.outcomes["truncated"] > 0 and tuned.trained_tokens
    assert "truncated (beyond the longest training sequence" in tuned.warning()
    said = [
        record.getMessage()
        for record in caplog.records
        if "were not trained" in record.getMessage()
    ]
    assert len(said) == 1 and said[0].startswith("step 1: ")
    assert not TunedModel(tuned.path, outcomes={"trained": 100, "truncated": 5}).warning()


@pytest.mark.slow
def test_a_step_without_reward_after_better_ones_claims_no_cause(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @ajet.judge
    def broken(output: str, episode: Episode) -> float:
        """The judge changes, and no update is to blame."""
        return length(output) if episode.step < 2 else 0.0

    train(job(tmp_path, tiny_model, total_steps=3), workflow=talk, judge=broken)
    said = capsys.readouterr().out.replace("\n", " ")
    assert "step 1 had" in said and "doesn't tell why" in said
    assert "broke the policy" not in said and "lower trainer_common.optim.lr" not in said


@pytest.mark.slow
def test_the_learning_rate_of_short_and_longer_runs_is_said(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optim = {"lr": 1e-3, "lr_scheduler_type": "linear", "warmup_steps": 3}
    train(job(tmp_path, tiny_model, total_steps=2, optim=optim), workflow=talk, judge=length)
    assert "longer than the run" in " ".join(capsys.readouterr().out.split())
    tuned = train(
        job(tmp_path, tiny_model, total_steps=5, optim=optim),
        workflow=talk,
        judge=length,
        resume=True,
    )
    assert "planned for 2 updates and now has 5" in " ".join(capsys.readouterr().out.split())
    rates = [1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3, 0.5e-3]
    assert list(tuned.history["train/lr"].values()) == pytest.approx(rates)


@pytest.mark.slow
def test_a_run_ends_once_its_tasks_are_solved(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three steps in a row, and one more validation; a step that is not solved in between starts
    the count anew."""

    @ajet.judge
    def from_step_3(output: str, episode: Episode) -> float:
        return 1.0 if episode.split == "val" or episode.step in (1, 3, 4, 5) else length(output)

    train(
        job(tmp_path, tiny_model, total_steps=9, stop_when=["solved"]),
        workflow=talk,
        judge=from_step_3,
    )
    output = " ".join(capsys.readouterr().out.split())
    assert "step 1: solved: every attempt solved its task (mean reward 1" in output
    assert "nothing to learn from" not in output
    assert "stopped after step 5 of 9: solved, every attempt of 3 steps" in output
    assert "step 5/9 val" in output or "val/reward" in output
