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
from typing import TYPE_CHECKING, Any, TypeVar

from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import AjetError, ConfigError, TaskError
from ajet_sdk.rollout.event_loop import run_to_end
from ajet_tools.dataset.card import Facts
from ajet_tools.dataset.documents.corpus import Corpus, prepare
from ajet_tools.dataset.documents.read import Document, Unreadable, read_documents
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.generate.expand import Expansion
from ajet_tools.dataset.generate.from_docs import FromDocs
from ajet_tools.dataset.generate.learning import with_pass_rate
from ajet_tools.dataset.generate.loop import Generation
from ajet_tools.dataset.generate.output import Directory, Estimate, digest_of, write
from ajet_tools.dataset.generate.records import (
    Checks,
    DocsConfig,
    GenerationConfig,
    GenerationResult,
)
from ajet_tools.dataset.similarity.decontaminate import Leaks
from ajet_tools.dataset.similarity.paraphrase import Paraphrases
from ajet_tools.dataset.verify import open_verification
from ajet_tools.dataset.verify.combined import Check, Verify, checks_of
from ajet_tools.trace.redact import Redactor

if TYPE_CHECKING:
    from ajet_tools.dataset.generate.learning import LearningValue
    from ajet_tools.dataset.similarity.meaning import MeaningIndex


log = logging.getLogger("ajet.dataset")
_Settings = TypeVar("_Settings", DocsConfig, GenerationConfig)
_Run = TypeVar("_Run", bound=Generation[Any])


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
        log.warning("redacted in the documents: %s; --no-redact keeps them", kinds)
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
    config, checks = _begin(config, directory, endpoint, verify, evals, meanings)
    if checks.verifier is not None:
        checks.verifier.refuse_unanswered([row.values for row in seeds], "the seeds")
    run = FromDocs(corpus, config, endpoint, checks, seeds=seeds)
    facts = {"source": "from-docs", "documents": corpus.digest, **_facts(run, seeds, evals)}
    parameters = {
        "chunk size": config.chunk_size,
        "prompts": ", ".join(config.prompt(kind).label for kind in config.kinds),
        "languages": ", ".join(config.languages) or "those of the documents",
    }
    sides = Counter(entry.side for entry in corpus.held)
    counts = {
        **{f"documents for {side}": count for side, count in sorted(sides.items())},
        "documents that could not be read": len(corpus.unreadable),
        "documents that are copies": len(corpus.copies),
        "chunks": sum(len(entry.chunks) for entry in corpus.held),
        "seeds": len(seeds),
    }
    note = (
        "Each answer is in a quotation verified in its document; a document is on one side of the"
        " split only."
    )
    card_facts = Facts(
        made_by="ajet dataset from-docs", counts=counts, parameters=parameters, notes=[note]
    )
    return _run_to_end(run, directory, facts, card_facts, corpus=corpus, **how)


def _begin(
    config: _Settings,
    directory: Directory,
    writer: ModelClient,
    verify: str | Verify,
    evals: Sequence[str | Path],
    meanings: MeaningIndex | None,
) -> tuple[_Settings, Checks]:
    """Returns the config, with the window of a resumed run, and the checks."""
    begun = directory.begun()
    if begun is not None:
        config = replace(config, window=begun["options"]["window"])
    leaks = Leaks.of(evals) if evals else None
    verify = Verify.of(verify)
    if verify.paraphrases and leaks is None:
        raise ConfigError(
            "--eval-paraphrases compares rows with an evaluation set; pass --eval FILE"
        )
    first = Paraphrases(leaks.known) if verify.paraphrases and leaks is not None else None
    return config, Checks(
        open_verification(verify, writer, seed=config.seed, first=first), leaks, meanings=meanings
    )


def _facts(
    run: FromDocs | Expansion, seeds: Sequence[Row], evals: Sequence[str | Path]
) -> dict[str, object]:
    """Returns the settings that determine the rows."""
    endpoint, verifier, meanings = run.endpoint, run.checks.verifier, run.checks.meanings
    return {
        "options": run.config.as_json(),
        "seeds": digest_of(seeds) if seeds else None,
        "endpoint": endpoint.base_url,
        "model": endpoint.model,
        "verify": verifier.name if verifier is not None else "none",
        "verify_models": verifier.models(endpoint) if verifier is not None else None,
        "eval": [str(path) for path in evals],
        "embeddings": meanings.as_json() if meanings is not None else None,
    }


def _run_to_end(
    run: _Run,
    directory: Directory,
    facts: Mapping[str, object],
    card_facts: Facts,
    *,
    value: LearningValue | None = None,
    corpus: Corpus | None = None,
    confirm: Callable[[Estimate], None] | None = None,
    dry_run: bool = False,
    watching: (
        Callable[[_Run], AbstractContextManager[Callable[[GenerationResult], None]]] | None
    ) = None,
) -> GenerationRun:
    """Runs the generation and writes its files; `card_facts` has the caller's facts for the card.

    A dry run processes cached replies, and sends and writes nothing.
    """
    directory.compare(facts)
    if dry_run:
        if value is not None:
            value.halted = True
        run.halt()
        run_to_end(_run(run, value))
    if confirm is not None:
        confirm(Estimate.of(run, value))
    if dry_run:
        return GenerationRun(run.result, [], [], corpus)
    with watching(run) if watching is not None else nullcontext() as run.on_change:
        result = run_to_end(_run(run, value, lambda: directory.begin(facts)))
    for rows in (result.train, result.validation):
        rows[:] = map(with_pass_rate, rows)
    checked = checks_of(run.checks.verifier, result.provenances())
    meanings = run.checks.meanings
    parameters = {
        "model": facts["model"],
        "verify": facts["verify"],
        "seed": run.config.seed,
        **({"embeddings": meanings.in_words()} if meanings is not None else {}),
        **{f"verified by {check.verifier}": check.in_words() for check in checked},
        **card_facts.parameters,
    }
    counts = {**card_facts.counts, "calls for rows": result.calls}
    counts |= {"surplus": result.surplus} if corpus is None else {}
    documents = corpus.as_rows() if corpus is not None else ()
    card_facts = replace(card_facts, counts=counts, parameters=parameters)
    return GenerationRun(result, write(directory, result, card_facts, documents), checked, corpus)


async def _run(
    generation: Generation[Any],
    value: LearningValue | None,
    begin: Callable[[], None] = lambda: None,
) -> GenerationResult:
    """Runs the generation and closes its endpoints. The first SIGINT or SIGTERM waits for calls in
    flight.

    `begin` is called when the policy is ready, before the first call.
    """
    try:
        if value is not None and not value.halted:
            await value.policy.check()
        begin()
        with _stop_on_signals(generation):
            return await generation.run()
    finally:
        await generation.aclose()
        if value is not None and not value.halted:
            await value.policy.aclose()


@contextmanager
def _stop_on_signals(generation: Generation[Any]) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def hear(change: Callable[[signal.Signals], object]) -> None:
        with suppress(ValueError, NotImplementedError, RuntimeError):
            for signal_number in (signal.SIGINT, signal.SIGTERM):
                change(signal_number)

    def request_stop(signal_number: signal.Signals) -> None:
        hear(loop.remove_signal_handler)
        generation.stopped_by = signal_number
        generation.stop.set()

    hear(lambda signal_number: loop.add_signal_handler(signal_number, request_stop, signal_number))
    try:
        yield
    finally:
        hear(loop.remove_signal_handler)


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
        endpoint: closed at the end. Its cache should be `directory.cache`, which makes runs resumable.
        verify: how answers are checked, and by which models.
        evals: files of evaluation sets; rows that occur in them are refused.
        meanings: refuses paraphrases of other rows; closed at the end.
        value: refuses rows that its policy solves always or never; the policy is closed at the end.
        known: existing rows; near copies of them are refused.
        held_out: validation tasks of the seeds' trace; rows that repeat them are refused.
        how: `confirm`: called with the estimate before the first call; it raises to cancel. `dry_run`: only estimate
            the work beyond cached replies. `watching`: a context manager around the run, whose value is called after
            each processed call.

    Ctrl-C and SIGTERM in the main thread end the run like a spent budget. Raises ConfigError and
    TaskError before the first call; later errors are in `result.stopped`, except errors on writing
    the files.
    """
    config, checks = _begin(config, directory, endpoint, verify, evals, meanings)
    if checks.verifier is not None:
        checks.verifier.refuse_unanswered([row.values for row in seeds], "the seeds")
    checks = replace(checks, held_out=held_out)
    if value is not None:
        checks = replace(checks, verifier=value.after(checks.verifier))
    run = Expansion(seeds, config, endpoint, checks, known=known)
    facts = {
        **_facts(run, [*seeds, *known], evals),
        "for": value.as_json() if value is not None else None,
    }
    parameters = {
        "strategies": ", ".join(f"{name} {weight:g}" for name, weight in config.strategies.items()),
        "prompts": ", ".join(config.prompt(name).label for name in config.strategies),
    }
    if value is not None:
        parameters["pass rate"] = f"{value.band}, of {value.k} attempts of {value.model}"
    counts = {
        "seeds": len(seeds),
        **({"validation tasks compared with": len(held_out.known)} if held_out else {}),
    }
    card_facts = Facts(made_by="ajet dataset expand", counts=counts, parameters=parameters)
    return _run_to_end(run, directory, facts, card_facts, value=value, **how)
