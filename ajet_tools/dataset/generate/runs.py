"""Complete runs of `expand` and `from-docs`, for commands and training jobs: from sources to output
files."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import TaskError
from ajet_sdk.rollout.event_loop import run_to_end
from ajet_tools.dataset.card import Facts
from ajet_tools.dataset.documents.corpus import Corpus, prepare
from ajet_tools.dataset.documents.read import Document, Unreadable, read_documents
from ajet_tools.dataset.generate.directory import Directory, Journal
from ajet_tools.dataset.generate.estimate import Estimate
from ajet_tools.dataset.generate.learning import with_pass_rate
from ajet_tools.dataset.generate.pipeline import Pipeline, Source
from ajet_tools.dataset.generate.records import Checks, GenerationResult
from ajet_tools.dataset.generate.settings import DocsConfig
from ajet_tools.dataset.similarity.decontaminate import Leaks
from ajet_tools.dataset.verify import open_verification
from ajet_tools.dataset.verify.combined import Check, Verify, checks_of
from ajet_tools.trace.redact import Redactor

if TYPE_CHECKING:
    from ajet_tools.dataset.generate.learning import LearningValue


log = logging.getLogger("ajet.dataset")
Watching = Callable[[Pipeline], AbstractContextManager[Callable[[GenerationResult], None]]]
"""Makes a context around a run; its value is called after each decided call."""


@dataclass(frozen=True)
class GenerationRun:
    """The result of a run, its files, and what its verifiers did."""

    result: GenerationResult
    estimate: Estimate
    """Of the work that was left at its start."""
    files: list[Path]
    checks: list[Check]


def read_corpus(
    paths: Iterable[str | Path],
    config: DocsConfig,
    *,
    encoding: str | None = None,
    redact: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> Corpus:
    """Reads, splits and chunks the documents. Unreadable ones are skipped with a warning.

    Secrets and personal data are replaced before a model sees them, with `redact`.

    Raises ConfigError for an invalid path, TaskError if no document can be read.
    """

    counts = Counter[str]()

    def documents() -> Iterator[Document | Unreadable]:
        for read, done, total in read_documents(paths, encoding=encoding):
            if on_progress is not None:
                on_progress(done, total)
            if isinstance(read, Unreadable):
                log.warning("%s", read.problem)
                yield read
            else:
                yield _redacted(read, counts) if redact else read

    corpus = prepare(
        documents(), size=config.chunk_size, seed=config.seed, validation=config.validation
    )
    if not corpus.held:
        number = len(corpus.unreadable)
        raise TaskError(
            f"no document can be read, of {number:,}; the first: {corpus.unreadable[0].problem}"
        )
    if counts:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))
        log.warning("redacted in the documents: %s; --with redact=false keeps them", kinds)
    for name, original in corpus.copies:
        log.info("%s is a copy of %s and is left out", name, original)
    return corpus


def _redacted(document: Document, counts: Counter[str]) -> Document:
    redactor = Redactor()
    blocks = tuple(
        replace(block, text=redactor.text(block.text), heading=redactor.text(block.heading))
        for block in document.blocks
    )
    counts.update(redactor.counts)
    return replace(document, blocks=blocks)


def generate(
    source: Source,
    directory: Directory,
    endpoint: ModelClient,
    *,
    verify: str | Verify = "none",
    evals: Sequence[str | Path] = (),
    value: LearningValue | None = None,
    held_out: Leaks | None = None,
    confirm: Callable[[Estimate], None] | None = None,
    dry_run: bool = False,
    watching: Watching | None = None,
) -> GenerationRun:
    """Generates rows and writes them; `failure` has the reason of an incomplete success.

    Args:
        source: composes the calls, such as `Expansion(seeds, GenerationConfig(500))`.
        directory: after its `check`. An earlier run with the same settings is continued.
        endpoint: closed at the end. Its cache keeps the replies of verifiers; the journal of
            `directory` has those of the writer.
        verify: how answers are checked, and by which model.
        evals: files of evaluation sets; rows that occur in them are refused.
        value: refuses rows that its policy solves always or never; the policy is closed at the end.
        held_out: validation tasks of the seeds' trace; rows that repeat them are refused.
        confirm: called with the estimate before the first call; it raises to cancel.
        dry_run: only estimate the work left.
        watching: see `Watching`.

    Ctrl-C and SIGTERM in the main thread end the run like a spent budget. Raises ConfigError and
    TaskError before the first call; later errors are in `result.stopped`, except errors on writing
    the files.
    """
    verifier = open_verification(verify, endpoint, seed=source.config.seed)
    if verifier is not None:
        verifier.refuse_unanswered([example.values for example in source.examples])
    facts = {
        **source.settings,
        "endpoint": endpoint.base_url,
        "model": endpoint.model,
        "verify": verifier.name if verifier is not None else "none",
        "verify_model": verifier.model(endpoint) if verifier is not None else None,
        "eval": [str(path) for path in evals],
        "for": value.as_json() if value is not None else None,
    }
    if value is not None:
        verifier = value.after(verifier)
    leaks = Leaks.of(evals) if evals else None
    checks = Checks(verifier, leaks, held_out=held_out)
    directory.compare(facts)
    if dry_run:
        pipeline = Pipeline(source, endpoint, checks, Journal(directory.replies(create=False)))
        run_to_end(pipeline.aclose())
        return GenerationRun(pipeline.result, Estimate.of(pipeline, value), [], [])
    with directory.locked():
        pipeline = Pipeline(source, endpoint, checks, Journal(directory.replies(create=True)))
        estimate = Estimate.of(pipeline, value)
        if confirm is not None:
            confirm(estimate)
        context = watching(pipeline) if watching is not None else nullcontext()
        with context as pipeline.on_change:
            run_to_end(_generate(pipeline, directory, facts, value))
        result = pipeline.result
        for side in result.sides.values():
            side.rows[:] = map(with_pass_rate, side.rows)
        reports = checks_of(verifier, result.provenances())
        card = _card(pipeline, facts, reports, value)
        files = directory.write(result, card, source.documents)
    return GenerationRun(result, estimate, files, reports)


async def _generate(
    pipeline: Pipeline,
    directory: Directory,
    facts: Mapping[str, object],
    value: LearningValue | None,
) -> None:
    """Runs the pipeline and closes the models. The first SIGINT or SIGTERM waits for calls in
    flight."""
    try:
        if value is not None:
            await value.policy.check()
        directory.begin(facts)
        with _stop_on_signals(pipeline):
            await pipeline.run()
    finally:
        await pipeline.aclose()
        if value is not None:
            await value.policy.aclose()


def _card(
    pipeline: Pipeline,
    facts: Mapping[str, object],
    reports: Sequence[Check],
    value: LearningValue | None,
) -> Facts:
    source = pipeline.source
    result = pipeline.result
    checks = pipeline.checks
    card = source.card()
    counts = {**card.counts, "calls for rows": result.calls, "surplus": result.surplus}
    parameters: dict[str, object] = {
        "model": facts["model"],
        "verify": facts["verify"],
        "seed": source.config.seed,
        **card.parameters,
    }
    if checks.held_out is not None:
        counts["validation tasks compared with"] = len(checks.held_out.known)
    if value is not None:
        parameters["pass rate"] = f"{value.band}, of {value.k} attempts of {value.model}"
    for report in reports:
        parameters[f"verified by {report.verifier}"] = report.in_words()
    made_by = f"ajet dataset {source.command}"
    return replace(card, made_by=made_by, counts=counts, parameters=parameters)


@contextmanager
def _stop_on_signals(pipeline: Pipeline) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def restore() -> None:
        with suppress(ValueError, NotImplementedError, RuntimeError):
            for number in signals:
                loop.remove_signal_handler(number)

    def request_stop(number: signal.Signals) -> None:
        restore()  # a second signal ends the process
        pipeline.stopped_by = number
        pipeline.stop.set()

    # only the main thread can have handlers
    with suppress(ValueError, NotImplementedError, RuntimeError):
        for number in signals:
            loop.add_signal_handler(number, request_stop, number)
    try:
        yield
    finally:
        restore()
