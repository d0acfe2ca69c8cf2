"""The checks of `ajet config check`: three separate results, so that missing data is not reported
as a config error."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ajet_sdk.agent.workflow import check_signature
from ajet_sdk.backbones.shared.fit import check_shape
from ajet_sdk.config.api_keys import api_key, placeholder_keys
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.config.model_source import is_cached, named_model
from ajet_sdk.engines.fetch import fetched
from ajet_sdk.errors import (
    AjetError,
    ConfigError,
    EnvironmentUnavailable,
    MissingResource,
    TaskError,
)
from ajet_sdk.judges.load import load_judge
from ajet_sdk.tasks.load import TaskSets, load_tasks

_PATIENCE = 2.0
"""Seconds for an endpoint to accept a connection."""
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass
class CheckPart:
    """One of the three results."""

    checked: bool = True
    problems: list[str] = field(default_factory=list)
    found: dict[str, object] = field(default_factory=dict)
    """Resources by kind."""

    def add(self, problem: object) -> None:
        self.problems += str(problem).splitlines()


@dataclass
class Checked:
    """The results for a file. Problems in `schema` and `imports` are the config's, in `resources`
    the machine's."""

    file: Path
    schema: CheckPart = field(default_factory=CheckPart)
    imports: CheckPart = field(default_factory=lambda: CheckPart(checked=False))
    resources: CheckPart = field(default_factory=lambda: CheckPart(checked=False))
    notices: list[str] = field(default_factory=list)
    unreadable: int = 0
    """Number of resources that exist and are invalid, such as a row that is no task."""

    @property
    def parts(self) -> dict[str, CheckPart]:
        return {"schema": self.schema, "imports": self.imports, "resources": self.resources}

    @property
    def wrong(self) -> int:
        """Number of problems other than missing resources."""
        return len(self.schema.problems) + len(self.imports.problems) + self.unreadable

    def plain(self) -> dict[str, object]:
        parts = {
            name: {"checked": p.checked, "problems": p.problems, **p.found}
            for name, p in self.parts.items()
        }
        return {"file": str(self.file), "notices": self.notices, **parts}


def check_file(file: Path, overrides: list[str]) -> Checked:
    """Checks a config file and what it names, without downloads or model calls."""
    checked = Checked(file)
    try:
        config = load_config(file, overrides)
    except AjetError as error:
        checked.schema.add(error)
        return checked
    checked.notices = config.notices()
    checked.imports.checked = checked.resources.checked = True
    with placeholder_keys():
        workflow = _workflow(config, checked)
        judge = _judge(config, checked)
    if config.backbone in ("trinity", "verl"):
        try:
            check_shape(config)
        except ConfigError as error:
            checked.schema.add(error)
    sets = _tasks(config, checked)
    _given(config, checked.resources)
    _model(config, checked.resources)
    if sets is not None and workflow is not None:
        try:
            check_signature(workflow, judge, sets.train[0], config)
        except AjetError as error:
            checked.imports.add(error)
    return checked


def _workflow(config: Config, checked: Checked) -> object:
    path = config.rollout.user_workflow
    if not path:
        return None
    try:
        workflow = config.load(path)
    except AjetError as error:
        checked.imports.add(f"rollout.user_workflow: {error}")
        return None
    checked.imports.found["workflow"] = path
    return workflow


def _judge(config: Config, checked: Checked) -> object:
    try:
        judge = load_judge(config)
    except MissingResource as error:
        checked.resources.add(error)
        return None
    except AjetError as error:
        checked.imports.add(error)
        return None
    section = config.task_judge
    if judge is not None:
        if section.judge_type == "customized_protocol":
            judge_name = section.judge_protocol
        else:
            judge_name = section.judge_type
        checked.imports.found["judge"] = getattr(judge, "__name__", None) or judge_name
    return judge


def _tasks(config: Config, checked: Checked) -> TaskSets | None:
    """Returns the tasks if reading them is free; else only checks their sources."""
    if config.task_reader.type in ("data_generation", "tracing"):
        for key, path in _sources(config):
            if not config.resolve(path.removeprefix("file://")).exists():
                checked.resources.add(
                    f"task_reader.{key}: there is no {path} ({config.origin(f'task_reader.{key}')})"
                )
        checked.resources.found["tasks"] = {"made": "when the job runs"}
        return None
    try:
        sets = load_tasks(config)
    except (MissingResource, EnvironmentUnavailable) as error:
        checked.resources.add(error)
    except TaskError as error:  # they exist, but are invalid
        checked.resources.add(error)
        checked.unreadable += 1
    except AjetError as error:
        checked.imports.add(error)
    else:
        counts = {"train": len(sets.train), "val": len(sets.val)}
        checked.resources.found["tasks"] = counts
        return sets
    return None


def _sources(config: Config) -> list[tuple[str, str]]:
    """Returns the files from which tasks are generated, with their keys."""
    reader = config.task_reader
    if reader.type == "tracing":
        trace = reader.feedback_tracing.base_url
        if trace and "://" not in trace.removeprefix("file://"):
            return [("feedback_tracing.base_url", trace)]
        return []
    generation = reader.data_generation
    files = generation.query_reader.jsonl_dataset_file
    seeds = {part: getattr(files, part).file_path for part in ("training", "validation")}
    return [
        *(
            ("data_generation.document_reader.document_path", path)
            for path in generation.document_reader.document_path
        ),
        *(
            (f"data_generation.query_reader.jsonl_dataset_file.{part}.file_path", path)
            for part, path in seeds.items()
            if path
        ),
    ]


def _given(config: Config, resources: CheckPart) -> None:
    """Checks for the recorded conversations to learn from."""
    algorithm = config.trainer_common.algorithm
    if (
        algorithm.data
        and (algorithm.stored or algorithm.replays)
        and not config.resolve(algorithm.data).exists()
    ):
        key = "trainer_common.algorithm.data"
        resources.add(
            f"{key}: there is no file or directory {algorithm.data} ({config.origin(key)})"
        )


def _model(config: Config, resources: CheckPart) -> None:
    """Checks for weights or the endpoint; a Hugging Face name is not a missing path."""
    model = config.model
    if model.scripted:
        return
    if model.base_url:
        _endpoint("model", model.base_url, model.api_key_env, resources)
    elif model.path and not model.recipe and not config.resolve(model.path).is_dir():
        if (known := named_model(model.path)) is not None:
            if fetched(known):
                there = "fetched"
            else:
                there = f"to be fetched ({known.megabytes:,} MB)"
            resources.found["model"] = f"{known.name} ({known.source}), {there}"
        elif _HUB_NAME.fullmatch(model.path):
            if is_cached(model.path):
                there = "downloaded"
            else:
                there = "to be downloaded"
            resources.found["model"] = f"{model.path} of the Hugging Face hub, {there}"
        else:
            resources.add(
                f"model.path: there is no directory {model.path} ({config.origin('model.path')})"
            )
    judge = config.task_judge
    if judge.judge_type == "llm" and judge.llm.base_url:
        _endpoint("task_judge.llm", judge.llm.base_url, judge.llm.api_key_env, resources)


def _endpoint(section: str, url: str, key: str, resources: CheckPart) -> None:
    place = urlsplit(url)
    host = place.hostname or ""
    port = place.port or (443 if place.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), timeout=_PATIENCE).close()
    except OSError as error:
        resources.add(
            f"{section}.base_url: {host}:{port} cannot be reached ({error.strerror or error})"
        )
    if api_key(key) is None and host not in ("localhost", "127.0.0.1", "::1"):
        resources.add(f"{section}.api_key_env: the environment variable {key} is not set")
