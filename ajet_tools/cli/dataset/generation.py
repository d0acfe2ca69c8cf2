"""Options and confirmation of commands that generate rows, and the options of commands that ask a
model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ajet_sdk.config.api_keys import api_key
from ajet_sdk.engines.budget import Budget, Price
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import echo
from ajet_sdk.types import Json
from ajet_tools.cli.dataset.options import Embeddings, Map, Meaning, SkipBad, counted, mapping_of
from ajet_tools.cli.options import IncludeValidation, print_json
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.generate.directory import Directory
from ajet_tools.dataset.generate.estimate import Estimate
from ajet_tools.dataset.generate.records import Call
from ajet_tools.dataset.generate.seeds import read_seeds
from ajet_tools.dataset.generate.settings import CallSettings
from ajet_tools.dataset.model.open import open_endpoint
from ajet_tools.dataset.prompts import Prompt
from ajet_tools.dataset.similarity.meaning import MeaningIndex
from ajet_tools.dataset.verify.combined import Verify

VerifyHow = Annotated[
    str,
    Option(
        metavar="HOW",
        help=(
            "How to verify answers: agreement:K, judge:FILE:NAME, code, llm or none; A+B for both,"
            " A|B for either."
        ),
    ),
]


@dataclass(frozen=True)
class VerifyOptions:
    """Options of the verifying model, if it differs from the writer.

    Args:
        verify_model: Model that verifies, for all of --verify or a part (llm=NAME@URL). Default: the writer.
            Repeatable.
        verify_price: Its price, as --price. Repeatable.
        verify_api_key_env: Environment variable with its API key. Default: OPENAI_API_KEY. Repeatable.
        eval_paraphrases: Ask the verifying model (PART paraphrase) if a row is one of --eval in other words, and reject
            it.
        unfenced: --verify code: run generated programs without a sandbox, with your own permissions.
    """

    verify_model: Annotated[list[str] | None, Option(metavar="[PART=]NAME[@URL]")] = None
    verify_price: Annotated[list[str] | None, Option(metavar="[PART=]IN,OUT")] = None
    verify_api_key_env: Annotated[list[str] | None, Option(metavar="[PART=]NAME")] = None
    eval_paraphrases: Annotated[bool, Option("--eval-paraphrases")] = False
    unfenced: Annotated[bool, Option("--unfenced")] = False

    def of(self, spec: str) -> Verify:
        return Verify(
            spec,
            self.verify_model or (),
            self.verify_price or (),
            self.verify_api_key_env or (),
            paraphrases=self.eval_paraphrases,
            unfenced=self.unfenced,
        )


Temperature = Annotated[
    float, Option(min=0, help="Sampling temperature of the model that writes the rows.")
]


@dataclass(frozen=True)
class OutputOptions:
    """Options about the rows to generate and their files.

    Args:
        language: Language of the rows. Default: the source's. Repeat it to alternate.
        template: Use this prompt (Jinja) instead of the built-in ones.
        eval: Reject rows that are in this evaluation set; repeatable.
        similarity: Similarity (share of equal characters) from which a row is a near duplicate.
        max_same_form: Keep at most N rows that differ only in numbers and names.
        min_new_forms: Stop if a smaller share of 100 rows has a new form (text without numbers and names), twice in a
            row.
        validation: Fraction of validation rows, made from their own seeds or documents. Default: 0.1 with five or more.
        resume: Continue an earlier run in --out; answered calls are not repeated.
        dry_run: Print how many calls and tokens are left and what they cost, without sending any.
    """

    out: Annotated[Path | None, Option("--out", "-o", metavar="DIR", help="Output directory.")] = (
        None
    )
    map: Map = None
    skip_bad_rows: SkipBad = False
    include_validation: IncludeValidation = False
    language: list[str] | None = None
    template: Annotated[Path | None, Option(metavar="FILE")] = CallSettings.template
    eval: Annotated[list[str] | None, Option(metavar="FILE")] = None
    similarity: Annotated[float, Option(min=0.5, max=1)] = CallSettings.similarity
    max_same_form: Annotated[int | None, Option(min=1)] = CallSettings.max_same_form
    min_new_forms: Annotated[float, Option(min=0, max=1, metavar="SHARE")] = (
        CallSettings.min_new_forms
    )
    embeddings: Embeddings = None
    meaning: Meaning = None
    validation: Annotated[float | None, Option(metavar="SHARE")] = CallSettings.validation
    per_call: Annotated[int, Option(min=1, help="Rows requested per call.")] = CallSettings.per_call
    shots: Annotated[int, Option(min=1, help="Examples per prompt.")] = CallSettings.shots
    max_tokens: Annotated[int, Option(min=1, help="Maximum tokens of a reply.")] = (
        CallSettings.max_tokens
    )
    seed: Annotated[int, Option(help="Random seed.")] = CallSettings.seed
    resume: Annotated[bool, Option("--resume")] = False
    yes: Annotated[
        bool, Option("--yes", "-y", help="Do not ask for confirmation before the first call.")
    ] = False
    show_prompt: Annotated[
        bool, Option("--show-prompt", help="Print the prompts without sending them.")
    ] = False
    dry_run: Annotated[bool, Option("--dry-run")] = False

    def settings(self) -> Json:
        """Returns the arguments common to `GenerationConfig` and `DocsConfig`."""
        same = {item.name for item in fields(CallSettings)} & {item.name for item in fields(self)}
        return {
            "languages": tuple(self.language or ()),
            **{name: getattr(self, name) for name in same},
        }

    def seeds(self, path: str) -> list[Row]:
        skip_bad, validation = self.skip_bad_rows, self.include_validation
        return read_seeds(
            path, mapping=mapping_of(self.map), skip_bad=skip_bad, include_validation=validation
        )

    def meanings(self, writer: ModelClient, cache: Path) -> MeaningIndex | None:
        """Returns the index that rejects paraphrases, if --embeddings is given. Raises
        ConfigError."""
        if self.embeddings is None:
            return None
        return MeaningIndex.by(self.embeddings, self.meaning or 0.9, writer, cache)

    def directory(self) -> Directory:
        """Returns the output directory. Raises ConfigError if it is missing or has files of another
        run."""
        if self.out is None:
            if self.dry_run:
                return Directory(Path())
            raise ConfigError("no output given: pass --out data/")
        directory = Directory(self.out)
        directory.check(resume=self.resume)
        return directory


def show_prompts(first: Iterable[tuple[Call, Prompt]]) -> None:
    for number, (asked, prompt) in enumerate(first):
        if number == 0:
            echo(f"===== system\n{asked.messages[0]['content']}\n")
        echo(f"===== {prompt.label}\n{asked.messages[1]['content']}\n")


def confirm(
    taken: Estimate, writing: OutputOptions, *, ask: bool, as_json: bool, before: Sequence[str] = ()
) -> None:
    """Prints what was done and the estimated cost of the rest and, on a terminal, asks for
    confirmation.

    Raises ConfigError without a terminal, Exit if the user declines.
    """
    if writing.dry_run:
        if as_json:
            print_json(taken)
            return
        there = [f"{counted(taken.accepted, 'row')} from stored replies."] if taken.accepted else []
        for line in (*before, *there, f"{taken.as_text()}.", "Nothing was sent."):
            echo(line)
        return
    if ask or not as_json:
        cache_note = " Stored replies cost nothing." if writing.resume else ""
        for line in (*before, f"{taken.as_text()}.{cache_note}"):
            echo(line, err=True)
    if not ask or writing.yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            "confirmation is needed, but stdin is not a terminal; pass --yes to continue without it"
        )
    if not typer.confirm("Continue?", err=True):
        raise typer.Exit(1)


@dataclass(frozen=True)
class ModelOptions:
    """Options of the model, its rate limits and the budget.

    Args:
        base_url: An OpenAI-compatible endpoint.
        model: Model name at --base-url; without --base-url, a checkpoint directory to load.
        api_key_env: Environment variable with the endpoint's API key.
        scripted: replies.py:function that replies instead of a model.
        price: Price of a million input and output tokens, such as 0.15,0.60.
        cache: Cache directory for replies, so that no call is paid for twice.
    """

    base_url: Annotated[
        str | None, Option(metavar="URL", envvar="OPENAI_BASE_URL", show_default=False)
    ] = None
    model: Annotated[
        str | None, Option(metavar="NAME|PATH", envvar="OPENAI_MODEL", show_default=False)
    ] = None
    api_key_env: Annotated[str, Option(metavar="NAME")] = "OPENAI_API_KEY"
    scripted: Annotated[str | None, Option(metavar="FILE:NAME")] = None
    concurrency: Annotated[int, Option(min=1, help="Concurrent requests.")] = 16
    rpm: Annotated[float | None, Option(min=0.1, help="Maximum requests per minute.")] = None
    retries: Annotated[int, Option(min=0, help="Retries after a 5xx or a lost connection.")] = 4
    price: Annotated[str | None, Option(metavar="IN,OUT")] = None
    max_calls: Annotated[int | None, Option(min=1, help="Stop before more than N calls.")] = None
    max_total_tokens: Annotated[
        int | None, Option(min=1, help="Stop before more than N tokens.")
    ] = None
    max_cost: Annotated[
        float | None, Option(min=0, help="Stop before this cost is exceeded; needs --price.")
    ] = None
    cache: Annotated[Path | None, Option(metavar="FILE", show_default="in or beside --out")] = None

    def endpoint(self, cache: Path, *, dry_run: bool = False) -> ModelClient:
        """Opens the model: a scripted function, an endpoint, or a local checkpoint. Raises
        ConfigError.

        `cache` is the default of the option. With `dry_run`, nothing is sent, so no model is needed
        and no file is created.
        """
        price = Price.parse(self.price) if self.price is not None else None
        budget = Budget(self.max_calls, self.max_total_tokens, self.max_cost, price)
        cache_path = self.cache or cache
        if dry_run and not (self.scripted or self.base_url or self.model):
            return ModelClient("http://127.0.0.1:9", "MODEL", budget=budget)
        return open_endpoint(
            self.base_url,
            self.model,
            api_key(self.api_key_env),
            scripted=self.scripted,
            concurrency=self.concurrency,
            per_minute=self.rpm,
            retries=self.retries,
            cache=cache_path if cache_path.exists() or not dry_run else None,
            budget=budget,
        )
