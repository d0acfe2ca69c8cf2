"""The prompts of the dataset commands: Jinja files in our own words, each with a version.

A file's first line is `{# version N #}`; N goes up when its words change. A user's own template has, for its version, a
hash of its text.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from ajet_sdk.errors import ConfigError

__all__ = ["Prompt", "lines_of", "load", "load_file", "phrases"]

_FOLDER = Path(__file__).parent
_VERSION = re.compile(r"\{#\s*version (\d+)\s*#\}")


@dataclass(frozen=True)
class Prompt:
    """A template with the name and version that provenance records."""

    name: str
    version: str
    digest: str
    """Of its text and of every text that it may build on: what a prompt is compared by when a run is resumed."""
    template: jinja2.Template

    def render(self, **variables: Any) -> str:
        """The text. Raises ConfigError where the template asks for what there is not, or fails."""
        try:
            return self.template.render(**variables).strip()
        except jinja2.TemplateError as error:
            known = ", ".join(sorted(variables))
            raise ConfigError(f"the template {self.name} failed: {error}; it may use {known}") from error

    @property
    def label(self) -> str:
        return f"{self.name} version {self.version}"


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=False,
        autoescape=False,  # prompts are plain text
    )
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment


@functools.cache
def load(name: str) -> Prompt:
    """One of our own, such as `expand/harder`. Raises ConfigError that names those there are."""
    path = _FOLDER / f"{name}.jinja"
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else _FOLDER
        there = ", ".join(sorted(p.relative_to(_FOLDER).with_suffix("").as_posix() for p in folder.rglob("*.jinja")))
        raise ConfigError(f"there is no prompt {name!r}; prompts: {there}")
    text = path.read_text(encoding="utf-8")
    found = _VERSION.match(text)
    if found is None:
        raise ConfigError(f"the prompt {name} does not start with its version: {{# version 1 #}}")
    family = "".join(p.read_text(encoding="utf-8") for p in sorted({path, *path.parent.glob("base.jinja")}))
    return Prompt(name, found.group(1), _digest(family), _environment().get_template(f"{name}.jinja"))


def load_file(path: Path) -> Prompt:
    """A user's own template. Raises ConfigError with file and line where it cannot be read or parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the template {path}: {error}") from error
    try:
        template = _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{path} line {error.lineno} is not valid Jinja: {error.message}") from error
    return Prompt(path.name, _digest(text)[:8], _digest(text), template)


@functools.cache
def phrases(name: str) -> tuple[str, ...]:
    """The lines of one of our lists, such as `expand/personas`."""
    return lines_of(_FOLDER / f"{name}.txt")


def lines_of(path: Path) -> tuple[str, ...]:
    """The lines of a text file that are not blank."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    found = tuple(line.strip() for line in lines if line.strip())
    if not found:
        raise ConfigError(f"{path} is empty; it needs one phrase per line")
    return found


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
