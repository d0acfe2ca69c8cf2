"""A whole run of `expand` or `from-docs`, from seeds or documents to the files that `output` lists.

It is what a command and a training job call.
"""

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
from ajet_tools.dataset.card.card import Facts
from ajet_tools.dataset.documents.corpus import Corpus, prepare
from ajet_tools.dataset.documents.read import Unreadable, read_documents
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.generate.expand import Expansion
from ajet_tools.dataset.generate.from_docs import FromDocs
from ajet_tools.dataset.generate.learning import with_pass_rate
from ajet_tools.dataset.generate.loop import Generation
from ajet_tools.dataset.generate.output import Directory, Estimate, digest_of, write
from ajet_tools.dataset.generate.records import Checks, DocsConfig, GenerationConfig, GenerationResult
from ajet_tools.dataset.similarity.decontaminate import Leaks
from ajet_tools.dataset.similarity.paraphrase import Paraphrases
from ajet_tools.dataset.verify import open_verification
from ajet_tools.dataset.verify.combined import Check, Verify, checks_of

if TYPE_CHECKING:
    from ajet_tools.dataset.generate.learning import LearningValue
    from ajet_tools.dataset.similarity.meaning import MeaningIndex


log = logging.getLogger("ajet.dataset")

_Settings = TypeVar("_Settings", DocsConfig, GenerationConfig)
_Run = TypeVar("_Run", bound=Generation[Any])


class DocumentsFailed(AjetError, RuntimeError):
    """Some documents could not be read; there are rows from the others."""


@dataclass(frozen=True)
class GenerationRun:
    """The result of a run, and the files that it wrote; `corpus` are its documents, if any."""

    result: GenerationResult
    files: list[Path]
    checks: list[Check]
    corpus: Corpus | None = None

    @property
    def failure(self) -> AjetError | None:
        """Why the run is no full success; documents that could not be read are a failure, too."""
        if self.result.stopped is not None or self.corpus is None or not self.corpus.unreadable:
            return self.result.stopped
        bad = len(self.corpus.unreadable)
        return DocumentsFailed(
            f"{bad} of {bad + len(self.corpus.held) + len(self.corpus.copies)} documents could not be "
            "read (listed above and in documents.jsonl); the rows are from the others"
        )


def read_corpus(
    paths: Iterable[str | Path],
    config: DocsConfig,
    *,
    encoding: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Corpus:
    """Read, cut and split the documents. What cannot be read is warned about and left out.

    Raises ConfigError where a path is none, TaskError where no document can be read.
    """

    def warn_of_unreadable() -> Iterator[Any]:
        for read, done, of in read_documents(paths, encoding=encoding):
            if isinstance(read, Unreadable):
                log.warning("%s", read.problem)
            if on_progress is not None:
                on_progress(done, of)
            yield read

    corpus = prepare(warn_of_unreadable(), size=config.chunk_size, seed=config.seed, validation=config.validation)
    if not corpus.held:
        failed = "the document" if len(corpus.unreadable) == 1 else f"none of the {len(corpus.unreadable)} documents"
        verb = "cannot be read" if len(corpus.unreadable) == 1 else "can be read"
        raise TaskError(f"{failed} {verb}: {corpus.unreadable[0].problem}")
    for name, original in corpus.copies:
        log.info("%s is a copy of %s and is left out", name, original)
    return corpus


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
    """Tasks out of documents, as `grow` makes them out of seeds; `seeds` are examples for few-shot tasks.

    A check that asks a model shows it the passage.
    """
    config, checks = _begin(config, directory, endpoint, verify, evals, meanings)
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
        "Each answer stands in a quotation that was found word for word in its document; a document is on one side "
        "of the split only."
    )
    card_facts = Facts(made_by="ajet dataset from-docs", counts=counts, parameters=parameters, notes=[note])
    return _run_to_end(run, directory, facts, card_facts, corpus=corpus, **how)


def _begin(
    config: _Settings,
    directory: Directory,
    writer: ModelClient,
    verify: str | Verify,
    evals: Sequence[str | Path],
    meanings: MeaningIndex | None,
) -> tuple[_Settings, Checks]:
    """The configuration with the window of a run that is gone on with, and what rows are checked by."""
    begun = directory.begun()
    if begun is not None:
        config = replace(config, window=begun["options"]["window"])
    leaks = Leaks.of(evals) if evals else None
    verify = Verify.of(verify)
    if verify.paraphrases and leaks is None:
        raise ConfigError("--eval-paraphrases compares rows with an evaluation set; pass --eval FILE")
    first = Paraphrases(leaks.known) if verify.paraphrases and leaks is not None else None
    return config, Checks(open_verification(verify, writer, seed=config.seed, first=first), leaks, meanings=meanings)


def _facts(run: FromDocs | Expansion, seeds: Sequence[Row], evals: Sequence[str | Path]) -> dict[str, object]:
    """Everything that decides the rows."""
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
    told: Facts,
    *,
    value: LearningValue | None = None,
    corpus: Corpus | None = None,
    confirm: Callable[[Estimate], None] | None = None,
    dry_run: bool = False,
    watching: Callable[[_Run], AbstractContextManager[Callable[[GenerationResult], None]]] | None = None,
) -> GenerationRun:
    """The run, and its files; `told` is what the card says beside what this knows.

    A dry run takes in the replies that are kept, sends nothing and writes nothing.
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
        **told.parameters,
    }
    counts = {**told.counts, "calls for rows": result.calls}
    counts |= {"surplus": result.surplus} if corpus is None else {}
    documents = corpus.as_rows() if corpus is not None else ()
    told = replace(told, counts=counts, parameters=parameters)
    return GenerationRun(result, write(directory, result, told, documents), checked, corpus)


async def _run(
    generation: Generation[Any], value: LearningValue | None, begin: Callable[[], None] = lambda: None
) -> GenerationResult:
    """Run it and close its endpoints. The first SIGINT or SIGTERM lets what is under way come back.

    `begin` is called once the policy is there, before the first call.
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
    """Only the main thread hears them."""
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
    """Run to the end and write what there is; `failure` says what went wrong, where something did.

    Args:
        seeds: as `seeds.read_seeds` gives them.
        directory: its `check` was called. What was begun there is gone on with, if it was the same.
        endpoint: closed at the end. Its cache should be `directory.cache`, or no run can be resumed.
        verify: how answers are checked, and by which models.
        evals: files of evaluation sets; a row that is in one is refused.
        meanings: refuses rows that say the same as another in other words; closed at the end.
        value: refuses rows that its policy solves always or never; the policy is closed at the end.
        known: rows that are there already; a new one that is near to one of them is refused.
        held_out: validation tasks of the trace that the seeds are from; a row that asks one is refused.
        how: `confirm`: told what the run may take before the first call; it raises to call it off. `dry_run`: only
            that, of what is left beyond the replies that are kept; nothing is sent or written. `watching`: a context
            around the run, whose value is called after each call that was taken in.

    Ctrl-C and SIGTERM in the main thread end the run as a spent budget does. Raises ConfigError and TaskError before
    the first call; what fails afterwards is in `result.stopped`, but for a disk that does not take the files.
    """
    config, checks = _begin(config, directory, endpoint, verify, evals, meanings)
    checks = replace(checks, held_out=held_out)
    if value is not None:
        checks = replace(checks, verifier=value.after(checks.verifier))
    run = Expansion(seeds, config, endpoint, checks, known=known)
    facts = {**_facts(run, [*seeds, *known], evals), "for": value.as_json() if value is not None else None}
    parameters = {
        "strategies": ", ".join(f"{name} {weight:g}" for name, weight in config.strategies.items()),
        "prompts": ", ".join(config.prompt(name).label for name in config.strategies),
    }
    if value is not None:
        parameters["pass rate"] = f"{value.band}, of {value.k} attempts of {value.model}"
    counts = {"seeds": len(seeds), **({"validation tasks compared with": len(held_out.known)} if held_out else {})}
    card_facts = Facts(made_by="ajet dataset expand", counts=counts, parameters=parameters)
    return _run_to_end(run, directory, facts, card_facts, value=value, **how)
