"""Complete runs of `expand` and `from-docs`, for commands and training jobs: from sources to output
files."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import AjetError, TaskError
from ajet_sdk.rollout.event_loop import run_to_end
from ajet_tools.dataset.card import Facts
from ajet_tools.dataset.documents.corpus import Corpus, prepare
from ajet_tools.dataset.documents.read import Document, Unreadable, read_documents
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.generate.directory import Directory, digest_of
from ajet_tools.dataset.generate.estimate import Estimate
from ajet_tools.dataset.generate.expand import Expansion
from ajet_tools.dataset.generate.from_docs import FromDocs
from ajet_tools.dataset.generate.learning import with_pass_rate
from ajet_tools.dataset.generate.pipeline import Pipeline, Source
from ajet_tools.dataset.generate.records import Checks, GenerationResult
from ajet_tools.dataset.generate.settings import CallSettings, DocsConfig, GenerationConfig
from ajet_tools.dataset.similarity.decontaminate import Leaks
from ajet_tools.dataset.verify import open_verification
from ajet_tools.dataset.verify.combined import Check, Verify, checks_of
from ajet_tools.trace.redact import Redactor

if TYPE_CHECKING:
    from ajet_tools.dataset.generate.learning import LearningValue
    from ajet_tools.dataset.similarity.meaning import MeaningIndex


log = logging.getLogger("ajet.dataset")
Watching = Callable[[Pipeline], AbstractContextManager[Callable[[GenerationResult], None]]]
"""Makes a context around a run; its value is called after each decided call."""


class DocumentsFailed(AjetError, RuntimeError):
    """Some documents could not be read; the others gave rows."""


@dataclass(frozen=True)
class GenerationRun:
    """The result of a run and its files; `corpus` has its documents, if any."""

    result: GenerationResult
    files: list[Path]
    checks: list[Check]
    corpus: Corpus | None = None

    @property
    def failure(self) -> AjetError | None:
        """The reason for an incomplete success, including unreadable documents."""
        if self.result.stopped is not None or self.corpus is None or not self.corpus.unreadable:
            return self.result.stopped
        bad = len(self.corpus.unreadable)
        total = bad + len(self.corpus.held) + len(self.corpus.copies)
        return DocumentsFailed(
            f"{bad} of {total} documents could not be read (listed above and in documents.jsonl); "
            "the rows are from the others"
        )


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

    def warn_of_unreadable() -> Iterator[Any]:
        for read, done, of in read_documents(paths, encoding=encoding):
            if isinstance(read, Unreadable):
                log.warning("%s", read.problem)
            if on_progress is not None:
                on_progress(done, of)
            yield _redacted(read, counts) if redact and isinstance(read, Document) else read

    counts = Counter[str]()
    corpus = prepare(
        warn_of_unreadable(), size=config.chunk_size, seed=config.seed, validation=config.validation
    )
    if not corpus.held:
        failed = (
            "the document"
            if len(corpus.unreadable) == 1
            else f"none of the {len(corpus.unreadable)} documents"
        )
        verb = "cannot be read" if len(corpus.unreadable) == 1 else "can be read"
        raise TaskError(f"{failed} {verb}: {corpus.unreadable[0].problem}")
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


def make_tasks(
    corpus: Corpus,
    config: DocsConfig,
    directory: Directory,
    endpoint: ModelClient,
    *,
    seeds: Sequence[Row] = (),
    verify: str | Verify = "none",
    evals: Sequence[str | Path] = (),
    meanings: MeaningIndex | None = None,
    **how: Any,
) -> GenerationRun:
    """Generates tasks from documents, as `grow` does from seeds; `seeds` are examples for few-shot
    tasks.

    Verifiers that ask a model get the passage too.
    """
    checks = _checks(config, endpoint, seeds, verify=verify, evals=evals, meanings=meanings)
    source = FromDocs(corpus, config, seeds)
    facts = {
        "source": "from-docs",
        "documents": corpus.digest,
        **_settings(source.config, endpoint, checks, seeds=seeds, evals=evals),
    }
    counts = Counter(f"documents for {entry.side}" for entry in corpus.held)
    card = Facts(
        made_by="ajet dataset from-docs",
        counts={
            **dict(sorted(counts.items())),
            "documents that could not be read": len(corpus.unreadable),
            "documents that are copies": len(corpus.copies),
            "chunks": sum(len(entry.chunks) for entry in corpus.held),
            "seeds": len(seeds),
        },
        parameters={
            "chunk size": config.chunk_size,
            "prompts": ", ".join(config.prompt(kind).label for kind in config.kinds),
            "languages": ", ".join(config.languages) or "those of the documents",
        },
        notes=[
            "Each answer is in a quotation verified in its document; a document is on one side of"
            " the split only."
        ],
    )
    job = _Job(source, endpoint, checks, directory, facts=facts, card=card, corpus=corpus)
    return job.run(**how)


def grow(
    seeds: Sequence[Row],
    config: GenerationConfig,
    directory: Directory,
    endpoint: ModelClient,
    *,
    verify: str | Verify = "none",
    evals: Sequence[str | Path] = (),
    meanings: MeaningIndex | None = None,
    value: LearningValue | None = None,
    known: Sequence[Row] = (),
    held_out: Leaks | None = None,
    **how: Any,
) -> GenerationRun:
    """Grows a dataset from seeds and writes it; `failure` has the reason of an incomplete success.

    Args:
        seeds: the result of `read_seeds`.
        directory: after its `check`. An earlier run with the same settings is continued.
        endpoint: closed at the end. Its cache keeps the replies of verifiers; the journal of
            `directory` has those of the writer.
        verify: how answers are checked, and by which models.
        evals: files of evaluation sets; rows that occur in them are refused.
        meanings: refuses paraphrases of other rows; closed at the end.
        value: refuses rows that its policy solves always or never; the policy is closed at the end.
        known: existing rows; near copies of them are refused.
        held_out: validation tasks of the seeds' trace; rows that repeat them are refused.
        how: `confirm`: called with the estimate before the first call; it raises to cancel.
            `dry_run`: only estimate the work left. `watching`: see `Watching`.

    Ctrl-C and SIGTERM in the main thread end the run like a spent budget. Raises ConfigError and
    TaskError before the first call; later errors are in `result.stopped`, except errors on writing
    the files.
    """
    checks = _checks(config, endpoint, seeds, verify=verify, evals=evals, meanings=meanings)
    checks = replace(checks, held_out=held_out)
    if value is not None:
        checks = replace(checks, verifier=value.after(checks.verifier))
    source = Expansion(seeds, config, known=known)
    facts = {
        **_settings(config, endpoint, checks, seeds=[*seeds, *known], evals=evals),
        "for": value.as_json() if value is not None else None,
    }
    weights = [f"{name} {weight:g}" for name, weight in config.strategies.items()]
    labels = [config.prompt(name).label for name in config.strategies]
    parameters = {"strategies": ", ".join(weights), "prompts": ", ".join(labels)}
    if value is not None:
        parameters["pass rate"] = f"{value.band}, of {value.k} attempts of {value.model}"
    counts = {"seeds": len(seeds)}
    if held_out is not None:
        counts["validation tasks compared with"] = len(held_out.known)
    card = Facts(made_by="ajet dataset expand", counts=counts, parameters=parameters)
    job = _Job(source, endpoint, checks, directory, facts=facts, card=card, value=value)
    return job.run(**how)


def _checks(
    config: CallSettings,
    writer: ModelClient,
    seeds: Sequence[Row],
    *,
    verify: str | Verify,
    evals: Sequence[str | Path],
    meanings: MeaningIndex | None,
) -> Checks:
    leaks = Leaks.of(evals) if evals else None
    verifier = open_verification(verify, writer, seed=config.seed)
    if verifier is not None:
        verifier.refuse_unanswered([row.values for row in seeds], "the seeds")
    return Checks(verifier, leaks, meanings=meanings)


def _settings(
    config: DocsConfig | GenerationConfig,
    endpoint: ModelClient,
    checks: Checks,
    *,
    seeds: Sequence[Row],
    evals: Sequence[str | Path],
) -> dict[str, object]:
    """Returns the settings that the rows depend on."""
    verifier, meanings = checks.verifier, checks.meanings
    return {
        "options": config.as_json(),
        "seeds": digest_of(seeds) if seeds else None,
        "endpoint": endpoint.base_url,
        "model": endpoint.model,
        "verify": verifier.name if verifier is not None else "none",
        "verify_models": verifier.models(endpoint) if verifier is not None else None,
        "eval": [str(path) for path in evals],
        "embeddings": meanings.as_json() if meanings is not None else None,
    }


@dataclass(frozen=True)
class _Job:
    """A pipeline with its directory; `facts` are compared when it is resumed, `card` describes
    it."""

    source: Source
    endpoint: ModelClient
    checks: Checks
    directory: Directory
    facts: Mapping[str, object] = field(kw_only=True)
    card: Facts = field(kw_only=True)
    value: LearningValue | None = field(default=None, kw_only=True)
    corpus: Corpus | None = field(default=None, kw_only=True)

    def run(
        self,
        *,
        confirm: Callable[[Estimate], None] | None = None,
        dry_run: bool = False,
        watching: Watching | None = None,
    ) -> GenerationRun:
        """Asks for confirmation, generates the rows and writes the files."""
        self.directory.compare(self.facts)
        if dry_run:
            pipeline = self._pipeline(create=False)
            run_to_end(pipeline.aclose())
            if confirm is not None:
                confirm(Estimate.of(pipeline, self.value))
            return GenerationRun(pipeline.result, [], [], self.corpus)
        with self.directory.locked():
            pipeline = self._pipeline(create=True)
            if confirm is not None:
                confirm(Estimate.of(pipeline, self.value))
            context = watching(pipeline) if watching is not None else nullcontext()
            with context as pipeline.on_change:
                run_to_end(self._generate(pipeline))
            return self._write(pipeline.result)

    def _pipeline(self, *, create: bool) -> Pipeline:
        journal = self.directory.journal(create=create)
        return Pipeline(self.source, self.endpoint, self.checks, journal)

    async def _generate(self, pipeline: Pipeline) -> None:
        """Runs the pipeline and closes the models. The first SIGINT or SIGTERM waits for calls in
        flight."""
        try:
            if self.value is not None:
                await self.value.policy.check()
            self.directory.begin(self.facts)
            with _stop_on_signals(pipeline):
                await pipeline.run()
        finally:
            await pipeline.aclose()
            if self.value is not None:
                await self.value.policy.aclose()

    def _write(self, result: GenerationResult) -> GenerationRun:
        for side in result.sides.values():
            side.rows[:] = map(with_pass_rate, side.rows)
        checks = checks_of(self.checks.verifier, result.provenances())
        parameters = {
            "model": self.facts["model"],
            "verify": self.facts["verify"],
            "seed": self.source.config.seed,
        }
        if self.checks.meanings is not None:
            parameters["embeddings"] = self.checks.meanings.in_words()
        for check in checks:
            parameters[f"verified by {check.verifier}"] = check.in_words()
        counts = {**self.card.counts, "calls for rows": result.calls}
        if self.corpus is None:
            counts["surplus"] = result.surplus
        card = replace(self.card, counts=counts, parameters={**parameters, **self.card.parameters})
        documents = self.corpus.as_rows() if self.corpus is not None else ()
        files = self.directory.write(result, card, documents)
        return GenerationRun(result, files, checks, self.corpus)


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
