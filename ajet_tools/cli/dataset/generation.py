"""Options and confirmation of commands that generate rows, and the options of commands that ask a
model."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from typer import Option

from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import echo
from ajet_tools.cli.model_option import CONCURRENCY, parse_budget
from ajet_tools.cli.result import TextResult
from ajet_tools.dataset.generate.directory import Directory
from ajet_tools.dataset.generate.estimate import Estimate
from ajet_tools.dataset.generate.records import Call
from ajet_tools.dataset.model.open import ModelSpec
from ajet_tools.dataset.prompts import Prompt

VerifyHow = Annotated[
    str,
    Option(
        metavar="HOW",
        help=(
            "How to verify answers: agreement:K, judge:FILE:NAME, code, llm or none; A,B for both."
        ),
    ),
]


_TYPES: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
}
_SETTINGS: Mapping[str, type] = {
    "temperature": float,
    "max_tokens": int,
    "per_call": int,
    "shots": int,
    "seed": int,
    "similarity": float,
    "max_same_form": int,
    "unfenced": bool,
    "include_validation": bool,
}
"""What `--with` changes in both commands, with the types. `unfenced` runs programs of --verify code
without a sandbox, with your own permissions; `include_validation` also uses seeds that come from
validation tasks."""


def parse_settings(texts: Iterable[str], types: Mapping[str, type]) -> dict[str, Any]:
    """Parses `NAME=VALUE`. Raises ConfigError for an unknown name or a value of the wrong type."""
    values: dict[str, Any] = {}
    for text in texts:
        name, _, written = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in types:
            near = difflib.get_close_matches(name, types, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--with {text}: there is {', '.join(sorted(types))}{hint}")
        kind = types[name]
        value = yaml.safe_load(written) if written else None
        if kind is float and type(value) is int:
            value = float(value)
        # not isinstance: true is an int of Python, and no number of a user
        if type(value) is not kind:
            raise ConfigError(f"--with {text}: {name} is {_TYPES[kind]}")
        values[name] = value
    return values


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
        changes: Change temperature, max_tokens, per_call, shots, seed, similarity, max_same_form, unfenced or
            include_validation; repeatable.
        resume: Continue an earlier run in --out; answered calls are not repeated.
        yes: Do not ask for confirmation before the first call.
        dry_run: Print the prompts, how many calls and tokens are left and what they cost, without sending any.
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
    validation: Annotated[float | None, Option(metavar="SHARE")] = None
    changes: Annotated[list[str] | None, Option("--with", metavar="NAME=VALUE")] = None
    resume: Annotated[bool, Option("--resume")] = False
    yes: Annotated[bool, Option("--yes", "-y")] = False
    dry_run: Annotated[bool, Option("--dry-run")] = False

    def settings(self, **more: type) -> dict[str, Any]:
        return parse_settings(self.changes or (), {**_SETTINGS, **more})

    def call_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments common to `GenerationConfig` and `DocsConfig`."""
        concurrency = self.spec().requests.get("concurrency", CONCURRENCY)
        return {
            "languages": tuple(self.language or ()),
            "validation": self.validation,
            # twice as many, since calls also wait for their verification
            "window": 1 if concurrency == 1 else 2 * int(concurrency),
            **settings,
        }

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
        cache: Path | None = directory.cache
        if self.dry_run and not directory.cache.exists():
            cache = None
        return spec.open(
            os.environ.get("OPENAI_BASE_URL", ""),
            concurrency=CONCURRENCY,
            cache=cache,
            budget=budget,
        )

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


@dataclass(frozen=True)
class DryRun(TextResult):
    estimate: Estimate
    costs: Sequence[str]
    prompts: Sequence[tuple[Call, Prompt]]
    """A call of each prompt."""

    def document(self) -> object:
        return self.estimate

    def lines(self) -> Iterator[str]:
        for number, (call, prompt) in enumerate(self.prompts):
            if number == 0:
                yield f"===== system\n{call.messages[0]['content']}\n"
            yield f"===== {prompt.label}\n{call.messages[1]['content']}\n"
        yield from self.costs
        yield "Nothing was sent."


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
