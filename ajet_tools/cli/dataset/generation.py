"""Options and confirmation of commands that generate rows, and the options of commands that ask a
model."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from typer import Option

from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import echo
from ajet_tools.cli.dataset.options import Map, mapping_of
from ajet_tools.cli.model_option import CONCURRENCY, parse_budget
from ajet_tools.cli.result import TextResult
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.generate.directory import Directory
from ajet_tools.dataset.generate.estimate import Estimate
from ajet_tools.dataset.generate.records import Call
from ajet_tools.dataset.generate.seeds import read_seeds
from ajet_tools.dataset.model.open import ModelSpec
from ajet_tools.dataset.prompts import Prompt
from ajet_tools.dataset.verify.combined import Verify

VerifyHow = Annotated[
    str,
    Option(
        metavar="HOW",
        help=(
            "How to verify answers: agreement:K, judge:FILE:NAME, code, llm or none; A,B for both."
        ),
    ),
]


@dataclass(frozen=True)
class Settings:
    """What `--with NAME=VALUE` changes; `rows` are settings of `CallSettings`."""

    rows: Mapping[str, Any] = field(default_factory=dict)
    unfenced: bool = False
    """Run programs of --verify code without a sandbox, with your own permissions."""
    include_validation: bool = False
    """Also use seeds that come from validation tasks."""
    skip_bad_rows: bool = False
    """Skip seeds that cannot be read."""

    @classmethod
    def parse(cls, texts: Iterable[str], row_settings: Mapping[str, type]) -> Settings:
        """Raises ConfigError for an unknown name or a value of the wrong type."""
        types: dict[str, type] = dict(row_settings)
        for switch in ("unfenced", "include_validation", "skip_bad_rows"):
            types[switch] = bool
        values: dict[str, Any] = {}
        for text in texts:
            name, _, written = text.partition("=")
            name = name.strip().replace("-", "_")
            if name not in types:
                near = difflib.get_close_matches(name, types, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"--with {text}: there is {', '.join(sorted(types))}{hint}")
            value = yaml.safe_load(written) if written else None
            if types[name] is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if not isinstance(value, types[name]) or (
                isinstance(value, bool) != (types[name] is bool)
            ):
                raise ConfigError(f"--with {text}: {name} is {_TYPES[types[name]]}")
            values[name] = value
        rows = {name: values.pop(name) for name in row_settings if name in values}
        return cls(rows, **values)


_TYPES: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
}
ROW_SETTINGS: Mapping[str, type] = {
    "temperature": float,
    "max_tokens": int,
    "per_call": int,
    "shots": int,
    "seed": int,
    "similarity": float,
    "max_same_form": int,
}
"""Settings of both commands that `--with` changes, with their types."""


@dataclass(frozen=True)
class GenerationOptions:
    """Options of both commands that generate rows.

    Args:
        model: The model that writes: NAME@URL, a checkpoint's directory or FILE.py:FUNCTION. After commas price=IN/OUT
            (of a million tokens), key=VARIABLE, concurrency=16, rpm, retries=4.
        budget: Stop before more than this is spent: calls=500,tokens=2000000,usd=5.
        language: Language of the rows. Default: the source's. Repeat it to alternate.
        verify_model: The model that verifies, as --model. Default: the writer.
        eval: Reject rows that are in this evaluation set; repeatable.
        validation: Fraction of validation rows, made from their own seeds or documents. Default: 0.1 of five or more.
        changes: Change temperature, max_tokens, per_call, shots, seed, similarity, max_same_form, unfenced,
            include_validation or skip_bad_rows; repeatable.
        resume: Continue an earlier run in --out; answered calls are not repeated.
        yes: Do not ask for confirmation before the first call.
        show_prompt: Print the prompts without sending them.
        dry_run: Print how many calls and tokens are left and what they cost, without sending any.
    """

    out: Annotated[Path | None, Option("--out", "-o", metavar="DIR", help="Output directory.")] = (
        None
    )
    model: Annotated[
        str | None, Option(metavar="MODEL", envvar="OPENAI_MODEL", show_default=False)
    ] = None
    budget: Annotated[str | None, Option(metavar="LIMIT=N,...")] = None
    language: list[str] | None = None
    verify_model: Annotated[str | None, Option(metavar="MODEL")] = None
    eval: Annotated[list[str] | None, Option(metavar="FILE")] = None
    map: Map = None
    validation: Annotated[float | None, Option(metavar="SHARE")] = None
    changes: Annotated[list[str] | None, Option("--with", metavar="NAME=VALUE")] = None
    resume: Annotated[bool, Option("--resume")] = False
    yes: Annotated[bool, Option("--yes", "-y")] = False
    show_prompt: Annotated[bool, Option("--show-prompt")] = False
    dry_run: Annotated[bool, Option("--dry-run")] = False

    def settings(self, **more: type) -> Settings:
        return Settings.parse(self.changes or (), {**ROW_SETTINGS, **more})

    def row_settings(self, settings: Settings) -> dict[str, Any]:
        """Returns the arguments common to `GenerationConfig` and `DocsConfig`."""
        concurrency = self.spec().requests.get("concurrency", CONCURRENCY)
        return {
            "languages": tuple(self.language or ()),
            "validation": self.validation,
            # twice as many, since calls also wait for their verification
            "window": 1 if concurrency == 1 else 2 * int(concurrency),
            **settings.rows,
        }

    def seeds(self, path: str, settings: Settings) -> list[Row]:
        return read_seeds(
            path,
            mapping=mapping_of(self.map),
            skip_bad=settings.skip_bad_rows,
            include_validation=settings.include_validation,
        )

    def spec(self) -> ModelSpec:
        return ModelSpec.parse(self.model or "", "--model")

    def endpoint(self, directory: Directory) -> ModelClient:
        """Opens the model that writes. A dry run needs none and creates no file. Raises
        ConfigError."""
        spec = self.spec()
        budget = parse_budget(self.budget, spec)
        if self.dry_run and not self.model:
            return ModelClient("http://127.0.0.1:9", "MODEL", budget=budget)
        if not self.model:
            raise ConfigError(
                "no model: pass --model NAME@URL, a checkpoint's directory or FILE.py:FUNCTION"
            )
        if directory.cache.exists() or not self.dry_run:
            cache = directory.cache
        else:
            cache = None
        base_url = os.environ.get("OPENAI_BASE_URL", "")
        how = {"concurrency": CONCURRENCY, "cache": cache, "budget": budget}
        return spec.open(base_url, **how)

    def verification(self, how: str, settings: Settings) -> Verify:
        return Verify(how, self.verify_model, unfenced=settings.unfenced)

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
    for number, (call, prompt) in enumerate(first):
        if number == 0:
            echo(f"===== system\n{call.messages[0]['content']}\n")
        echo(f"===== {prompt.label}\n{call.messages[1]['content']}\n")


@dataclass(frozen=True)
class DryRun(TextResult):
    estimate: Estimate
    costs: Sequence[str]

    def document(self) -> object:
        return self.estimate

    def lines(self) -> list[str]:
        return [*self.costs, "Nothing was sent."]


def confirm(lines: Sequence[str], options: GenerationOptions) -> None:
    """Prints the estimated cost of the work left and, on a terminal, asks for confirmation.

    Raises ConfigError without a terminal, Exit if the user declines.
    """
    for line in lines:
        echo(line, err=True)
    if options.spec().is_scripted or options.yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            "confirmation is needed, but stdin is not a terminal; pass --yes to continue without it"
        )
    if not typer.confirm("Continue?", err=True):
        raise typer.Exit(1)
