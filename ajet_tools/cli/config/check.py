"""`ajet config check`: what is wrong with files, and with what they name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ajet_sdk.agent.workflow import check_signature
from ajet_sdk.capture.hooks import ensure_api_key
from ajet_sdk.config.config import load_config
from ajet_sdk.errors import AjetError, ConfigError
from ajet_sdk.judges.load import load_judge
from ajet_sdk.reporting.output import echo, json_line, style
from ajet_sdk.tasks.load import load_tasks
from ajet_tools.cli.options import AsJson

__all__ = ["app"]

app = typer.Typer(add_completion=False)


@app.command()
def check(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE... KEY=VALUE...", help="Config files with the root `ajet:`, and overrides."),
    ] = None,
    conf: Annotated[list[Path] | None, typer.Option("--conf", "-c", help="A config file; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check files: keys and values, then the workflow, judge and tasks that each names.

    \b
    ajet config check math.yaml
    ajet config check *.yaml ajet.backbone=debug
    """
    ensure_api_key()
    given = arguments or []
    files = [*(conf or []), *(Path(text) for text in given if not _is_override(text))]
    if not files:
        raise ConfigError("say which config file to check: ajet config check FILE")
    sound = [_check(file, [text for text in given if _is_override(text)], as_json) for file in files]
    raise typer.Exit(0 if all(sound) else 2)


def _is_override(text: str) -> bool:
    return "=" in text and not Path(text).is_file()


def _check(file: Path, overrides: list[str], as_json: bool) -> bool:
    """Check one file and print what was found; whether it is fine."""
    problems: list[str] = []
    notices: list[str] = []
    found: dict[str, Any] = {}
    try:
        config = load_config(file, overrides)
        notices = config.notices()
        found = _check_references(config, problems)
    except AjetError as error:
        problems += str(error).splitlines()
    if as_json:
        echo(json_line({"file": str(file), "problems": problems, "notices": notices, **found}))
        return not problems
    for problem in problems:
        echo(f"{style('ConfigError', fg='red', bold=True)}: {problem}", err=True)
    for name, value in found.items():
        echo(f"{name}: {_counts(value) if name == 'tasks' else value}")
    echo(f"{file} has {len(problems)} problem(s)" if problems else f"{file} is fine")
    return not problems


def _counts(tasks: Mapping[str, Any]) -> str:
    if "made" in tasks:
        return f"made {tasks['made']}"
    skipped = sum(tasks["skipped"].values())
    return f"{tasks['train']} to train on, {tasks['val']} to validate on" + (f", {skipped} skipped" if skipped else "")


def _check_references(config: Any, problems: list[str]) -> dict[str, Any]:
    """Whether what the config names is there: workflow, judge, tasks; and whether a task fills their parameters."""
    found: dict[str, Any] = {}
    workflow = judge = None
    try:
        if config.rollout.user_workflow:
            workflow = config.load(config.rollout.user_workflow)
            found["workflow"] = config.rollout.user_workflow
    except AjetError as error:
        problems.append(f"rollout.user_workflow: {error}")
    try:
        judge = load_judge(config)
        found["judge"] = getattr(judge, "__name__", None) or config.task_judge.judge_protocol
    except AjetError as error:
        problems.append(str(error))
    if config.task_reader.type in ("data_generation", "tracing"):
        found["tasks"] = {"made": "when the job runs"}  # by a model, which a check does not pay
        return found
    try:
        sets = load_tasks(config)
        found["tasks"] = {"train": len(sets.train), "val": len(sets.val), "skipped": dict(sets.skipped)}
        if workflow is not None:
            check_signature(workflow, judge, sets.train[0], config)
    except AjetError as error:
        problems.append(str(error))
    return found
