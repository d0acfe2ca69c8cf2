"""Task readers of jobs that generate their tasks: `task_reader.type: data_generation` and
`tracing`.

`ajet_sdk.tasks.load` loads them by entry point. Results are cached in the experiment's directory by
content: a second run with the same documents, seeds, parameters, prompts and model makes no
requests.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from ajet_sdk.config.api_keys import api_key
from ajet_sdk.config.config import Config
from ajet_sdk.config.task_schema import TracingFilterParams
from ajet_sdk.engines.budget import Budget
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import AjetError, ConfigError, MissingResource, TaskError
from ajet_sdk.tasks.jsonl import json_rows
from ajet_sdk.tasks.lineage import plain_text
from ajet_sdk.tasks.questions import text_of
from ajet_sdk.tasks.task_rows import Row as TaskRow
from ajet_sdk.whole_file import write_whole
from ajet_tools.dataset.curation.descent import descended_rows
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.files.rows import read
from ajet_tools.dataset.files.writer import Writer
from ajet_tools.dataset.from_traces.export import task_rows
from ajet_tools.dataset.from_traces.grader import EpisodeGrader
from ajet_tools.dataset.from_traces.sources import opened_sources
from ajet_tools.dataset.generate.directory import Directory
from ajet_tools.dataset.generate.expand import Expansion
from ajet_tools.dataset.generate.from_docs import FromDocs
from ajet_tools.dataset.generate.pipeline import Source
from ajet_tools.dataset.generate.records import Interrupted
from ajet_tools.dataset.generate.runs import generate, read_corpus
from ajet_tools.dataset.generate.seeds import read_seeds
from ajet_tools.dataset.generate.settings import DocsConfig, GenerationConfig
from ajet_tools.dataset.model.open import open_endpoint
from ajet_tools.dataset.similarity.near import NearIndex, check_threshold
from ajet_tools.dataset.verify.combined import Verify

log = logging.getLogger("ajet.tasks")
Rows = tuple[Iterator[TaskRow], Iterator[TaskRow]]
_GENERATION = "task_reader.data_generation"
_TRACING = "task_reader.feedback_tracing"
_LEAST_SIMILARITY = 0.5
_DONE = "done.json"
"""Lists the files of a finished generation and their digests."""


def read_generated(config: Config) -> Rows:
    """Generates tasks from `data_generation`'s documents or seeds; returns training and validation
    rows.

    With documents, seeds set the style. A validation file of `query_reader` is the validation set,
    and generated tasks are decontaminated against it; else a share of the generated tasks is for
    validation, from separate seeds or documents.
    """
    generation = config.task_reader.data_generation
    seeds = file_of(config, "training")
    validation = file_of(config, "validation")
    paths = generation.document_reader.document_path
    documents = [_there(config, text, "document_reader.document_path") for text in paths]
    if not documents and seeds is None:
        raise ConfigError(
            f"{_GENERATION} has no source for tasks: set document_reader.document_path or "
            "query_reader.jsonl_dataset_file.training.file_path"
        )
    if seeds is not None and validation is not None:
        _check_apart(seeds, validation)
    files = _generated(config, documents, seeds, validation)
    mapping = config.task_reader.field_mapping
    if "train" in files:
        train = job_rows(read(files["train"]), mapping)
    else:
        train = iter(())
    if validation is not None:
        return train, json_rows(validation)
    return train, (
        job_rows(read(files["validation"]), mapping) if "validation" in files else iter(())
    )


def _generated(
    config: Config, documents: list[Path], seeds: Path | None, validation: Path | None
) -> dict[str, Path]:
    """Returns the file of each split in the experiment's `data/DIGEST/`, generating them if needed.

    Raises the error that ended the generation; the next attempt continues it.
    """
    settings = config.task_reader.data_generation
    generation = generation_config(config, documents, seeds, validation)
    # the defaults of `expand` and `from-docs`
    if documents and not config.is_set(f"{_GENERATION}.verify"):
        verify = "llm"
    else:
        verify = settings.verify
    writer = _writer_of(config)
    mapping = {
        column: target
        for column, target in config.task_reader.field_mapping.items()
        if not documents
    }
    named = (*writer.values(), verify, settings.verify_model)
    # the content of files that options name: `judge:agent.py:exact` names agent.py
    names: set[str] = set()
    for option in filter(None, named):
        names.update((str(option), *re.split(r"->|[:,]", str(option))))
    facts = {
        "generation": generation.as_json(),
        "options": [*writer.values(), verify, mapping, settings.verify_model],
        "files": {
            str(file): _digest_of_path(file)
            for file in (*documents, seeds, validation)
            if file is not None
        },
        "named": {
            name: _digest_of_path(Path(name))
            for name in sorted(names)
            if name and Path(name).exists()
        },
    }
    data = config.directory.resolve() / "data"
    directory = Directory(data / _digest([json.dumps(facts, sort_keys=True, default=str).encode()]))
    if (files := _finished(directory.path)) is not None:
        return files
    endpoint = open_writer(config)
    rows = read_seeds(seeds, mapping=mapping) if seeds is not None else []
    source: Source
    unread: AjetError | None = None
    if isinstance(generation, DocsConfig):
        corpus = read_corpus(documents, generation)
        unread = corpus.failure
        source = FromDocs(corpus, generation, rows)
    else:
        source = Expansion(rows, generation)
    run = generate(
        source,
        directory,
        endpoint,
        verify=Verify(verify, settings.verify_model, unfenced=settings.unfenced),
        evals=[validation] if validation is not None else [],
        confirm=lambda estimate: log.info("data_generation: %s", estimate.as_text()),
    )
    failure = run.result.stopped or unread
    if isinstance(failure, Interrupted):
        raise KeyboardInterrupt
    if failure is not None:
        raise failure
    log.info("data_generation: %d rows, in %s", run.result.accepted, directory.path)
    files = {path.stem: path for path in (directory.train, directory.validation) if path.exists()}
    write_whole(
        directory.path / _DONE,
        json.dumps({path.name: _digest_of_path(path) for path in files.values()}),
    )
    return files


def _finished(folder: Path) -> dict[str, Path] | None:
    """Returns the files of a finished generation, if all exist. Raises ConfigError if one was
    edited."""
    done = folder / _DONE
    digests: dict[str, str] = json.loads(done.read_text(encoding="utf-8")) if done.is_file() else {}
    files = {name.partition(".")[0]: folder / name for name in digests}
    if not files or not all(path.exists() for path in files.values()):
        return None
    for path in files.values():
        if _digest_of_path(path) != digests[path.name]:
            raise ConfigError(
                f"{path} was edited: train on it with task_reader.type: jsonl_dataset_file, or"
                " delete it"
            )
    return files


def generation_config(
    config: Config, documents: list[Path], seeds: Path | None, validation: Path | None
) -> DocsConfig | GenerationConfig:
    generation = config.task_reader.data_generation
    filtered = generation.deduplication_filter
    _check_limits(config)
    limits: dict[str, Any] = {
        "max_tokens": generation.sampling_params.get("max_tokens", generation.llm_response_length),
        "seed": config.trainer_common.seed,
        "similarity": filtered.params.similarity_threshold if filtered.enabled else 1.0,
        "window": 1 if generation.num_workers == 1 else 2 * generation.num_workers,
    }
    if generation.sampling_params.get("temperature") is not None:
        limits["temperature"] = generation.sampling_params["temperature"]
    if validation is not None:
        limits["validation"] = 0.0
    elif config.is_set(f"{_GENERATION}.validation_share"):
        limits["validation"] = generation.validation_share
    if not documents:
        return GenerationConfig(generation.task_num, **limits)
    kind = "knowledge" if seeds is None else "few-shot"
    return DocsConfig(
        generation.task_num, (kind,), chunk_size=generation.document_reader.chunk_size, **limits
    )


def _writer_of(config: Config) -> dict[str, Any]:
    generation = config.task_reader.data_generation
    if generation.scripted is not None:
        return {
            "base_url": None,
            "model": None,
            "scripted": _class_path(config, generation.scripted),
        }
    model = generation.llm_model or os.environ.get("OPENAI_MODEL")
    base_url = generation.base_url or os.environ.get("OPENAI_BASE_URL")
    if model is None or not (base_url or Path(model).is_dir()):
        raise ConfigError(
            f"no model to generate tasks: set {_GENERATION}.llm_model, for an endpoint also"
            " base_url (OPENAI_BASE_URL)"
        )
    return {"base_url": base_url, "model": model}


def open_writer(config: Config, budget: Budget | None = None) -> ModelClient:
    """Opens the model that writes the tasks; all runs of the experiment share its cache."""
    return open_endpoint(
        **_writer_of(config),
        api_key=api_key("OPENAI_API_KEY"),
        concurrency=config.task_reader.data_generation.num_workers,
        cache=config.directory.resolve() / "data" / "replies.sqlite",
        budget=budget,
    )


def _check_limits(config: Config) -> None:
    generation = config.task_reader.data_generation
    for name in generation.sampling_params:
        if name not in ("temperature", "max_tokens"):
            key = f"{_GENERATION}.sampling_params.{name}"
            log.warning(
                "%s has no effect (%s): only temperature and max_tokens are sent",
                key,
                config.origin(key),
            )
    threshold = generation.deduplication_filter.params.similarity_threshold
    key = f"{_GENERATION}.deduplication_filter.params.similarity_threshold"
    if generation.deduplication_filter.enabled and threshold < _LEAST_SIMILARITY:
        raise ConfigError(
            f"{key} must be at least {_LEAST_SIMILARITY} (got {threshold:g}, {config.origin(key)})"
        )


def file_of(config: Config, split: str) -> Path | None:
    """Returns the seeds (`training`) or validation tasks of `query_reader`."""
    reader = config.task_reader.data_generation.query_reader
    if reader.type != "jsonl_dataset_file":
        key = f"{_GENERATION}.query_reader.type"
        raise ConfigError(
            f"{key} must be jsonl_dataset_file (got {reader.type!r}, {config.origin(key)})"
        )
    text = getattr(reader.jsonl_dataset_file, split).file_path
    if text is None:
        return None
    return _there(config, text, f"query_reader.jsonl_dataset_file.{split}.file_path")


def _there(config: Config, text: str, key: str) -> Path:
    path = config.resolve(text).resolve()
    if not path.exists():
        raise MissingResource(
            f"{_GENERATION}.{key}: there is no {text} ({config.origin(f'{_GENERATION}.{key}')})"
        )
    return path


def _class_path(config: Config, text: str) -> str:
    """Returns `replies.py->reply` with the file's absolute path."""
    file, _, name = text.replace("->", ":").rpartition(":")
    if file.endswith(".py"):
        return f"{config.resolve(file).resolve()}:{name}"
    return text


def _check_apart(seeds: Path, validation: Path) -> None:
    """Raises TaskError for a seed that is also a validation task."""
    held_out = {}
    for row in read(validation, pictures=True):
        held_out[plain_text(text_of(row.values))] = row.where
    for row in read(seeds, pictures=True):
        held_out_at = held_out.get(plain_text(text_of(row.values)))
        if held_out_at is not None:
            raise TaskError(
                f"{row.where} is also a validation task ({held_out_at}); remove it from the seeds"
            )
    for seed, held_out_row in descended_rows(list(read(seeds)), list(read(validation))):
        raise TaskError(
            f"{seed.where} was grown from a validation task ({held_out_row.where}); remove it from"
            " the seeds"
        )


def job_rows(rows: Iterable[Row], mapping: Mapping[str, str]) -> Iterator[Row]:
    """Renames columns back as the job's `field_mapping` expects them, and drops provenance."""
    for row in rows:
        values = {name: value for name, value in row.values.items() if name != "provenance"}
        metadata = dict(values.get("metadata") or {})
        for column, target in mapping.items():
            root, _, name = target.partition(".")
            values[column] = (
                metadata.pop(name, None) if root == "metadata" else values.pop(target, None)
            )
        yield Row(row.where, {**values, "metadata": metadata} if "metadata" in values else values)


def _digest_of_path(path: Path) -> str:
    """Hashes a file, or the names and contents of a directory, except hidden files. Raises
    ConfigError."""
    try:
        if not path.is_dir():
            return _digest_of_file(path)
        parts: list[bytes] = []
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path)
            hidden = any(part[0] == "." or part == "__pycache__" for part in name.parts)
            if file.is_file() and not hidden:
                parts += (name.as_posix().encode(), _digest_of_file(file).encode())
        return _digest(parts)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error


def _digest_of_file(path: Path) -> str:
    hasher = hashlib.blake2b(digest_size=10)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            hasher.update(chunk)
    return hasher.hexdigest()


def _digest(parts: Iterable[bytes]) -> str:
    """Hashes parts with their lengths, so that their borders matter."""
    hasher = hashlib.blake2b(digest_size=10)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big") + part)
    return hasher.hexdigest()


def read_traced(config: Config) -> Rows:
    """Returns tasks of a deployed agent, from episodes that pass every filter: training,
    validation.

    Repeated tasks become one row, secrets and personal data are redacted, and equal questions are
    on one side of the split.
    """
    tracing = config.task_reader.feedback_tracing
    with ExitStack() as stack:
        grader = _grader(config)
        sources = stack.enter_context(opened_sources([_traces(config)]))
        graded, rows = task_rows(sources, grader=grader)
        distinct = _distinct(rows, config)
    if graded.stopped:
        raise TaskError(f"{_TRACING}: grading stopped: {graded.stopped}")
    if any(entry.params.print_reason for entry in tracing.filters):
        for row in graded.rejected_rows:
            log.info("%s: %s", row["task_id"], row["reason"])
    log.info(
        "tracing: %d tasks of %d episodes, %d rejected",
        len(distinct),
        graded.of,
        len(graded.rejected_rows),
    )
    if tracing.train_output_path is not None and distinct:
        with Writer(Path(tracing.train_output_path)) as writer:
            for values in distinct:
                writer.write(values)
    sides: dict[str, list[Row]] = {"train": [], "validation": []}
    for number, values in enumerate(distinct, 1):
        task = {name: value for name, value in values.items() if name != "provenance"}
        sides[_side(values, tracing.validation_share)].append(Row(f"traced task {number}", task))
    return iter(sides["train"]), iter(sides["validation"])


def _distinct(rows: Iterable[Mapping[str, Any]], config: Config) -> list[Mapping[str, Any]]:
    """Removes rows too similar to an earlier one, by the strictest `deduplication` filter."""
    filters = _filters(config, "deduplication")
    if not filters:
        return list(rows)
    index = NearIndex(check_threshold(min(params.similarity_threshold for params in filters)))
    distinct = list[Mapping[str, Any]]()
    for number, values in enumerate(rows):
        text = text_of(values)
        if index.find(text) is None:
            index.add(str(number), text)
            distinct.append(values)
    return distinct


def _filters(
    config: Config, kind: Literal["llm_evaluate", "deduplication"]
) -> list[TracingFilterParams]:
    return [
        entry.params
        for entry in config.task_reader.feedback_tracing.filters
        if entry.enabled and entry.type == kind
    ]


def _traces(config: Config) -> Path:
    base_url = config.task_reader.feedback_tracing.base_url
    key = f"{_TRACING}.base_url"
    if base_url is None:
        raise ConfigError(
            f"{key} is not set; give the trace of the deployed agent, a directory or a file"
        )
    if "://" in base_url and not base_url.startswith("file://"):
        raise ConfigError(
            f"{key}: {base_url} is a URL ({config.origin(key)}); give a trace directory, or the"
            " file that the service writes (AgentScope Studio's database.sqlite, OTLP or OpenAI"
            " logs)"
        )
    path = config.resolve(base_url.removeprefix("file://"))
    if not path.exists():
        raise MissingResource(f"{key}: there is no {path} ({config.origin(key)})")
    return path


def _grader(config: Config) -> EpisodeGrader | None:
    """Returns a grader with the rubrics of all filters, or None."""
    tracing = config.task_reader.feedback_tracing
    filters = _filters(config, "llm_evaluate")
    if not filters:
        return None
    rubric = "\n".join(params.custom_rubrics.strip() for params in filters).strip()
    if not rubric:
        raise ConfigError(
            f"{_TRACING}.filters: llm_evaluate needs custom_rubrics, which describe a good episode"
        )
    base_urls = (
        *(params.base_url for params in filters),
        tracing.llm_base_url,
        os.environ.get("OPENAI_BASE_URL"),
    )
    keys = (*(params.api_key for params in filters), api_key("OPENAI_API_KEY"))
    endpoint = open_endpoint(
        next(filter(None, base_urls), None),
        tracing.alien_llm_model or os.environ.get("OPENAI_MODEL"),
        next(filter(None, keys), None),
        scripted=None if tracing.scripted is None else _class_path(config, tracing.scripted),
        concurrency=max(params.max_thread for params in filters),
        cache=config.directory / "data" / "grades.sqlite",
    )
    temperature = min(params.temperature for params in filters)
    return EpisodeGrader(
        endpoint, rubric, temperature=temperature, max_tokens=tracing.alien_llm_response_length
    )


def _side(values: Mapping[str, Any], share: float) -> str:
    """Assigns a side by the question's hash, so that it is stable when other tasks come and go."""
    digest = hashlib.blake2b(
        plain_text(text_of(values)).encode("utf-8", "replace"), digest_size=8
    ).digest()
    if int.from_bytes(digest, "big") < share * 2**64:
        return "validation"
    return "train"
