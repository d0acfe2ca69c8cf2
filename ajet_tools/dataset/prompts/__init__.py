"""The prompts of the dataset commands: Jinja files in our own words, each with a version.

A file's first line is `{# version N #}`; N goes up when its words change. A user's own template has, for its version, a
hash of its text.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ajet_sdk.errors import ConfigError
from ajet_sdk.tasks.lineage import plain_text

if TYPE_CHECKING:
    import jinja2

_FOLDER = Path(__file__).parent
_RUN = 6
"""Words in a row that say where a sentence is from."""
_HEADING = 3
_EDGES = " .,;:!?()"
_MARKUP = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", re.DOTALL)
"""What is not text in a template."""
_ITEMS = re.compile(r"(?:^|\n)\s*-\s|\n\s*\n")
_SENTENCES = re.compile(r"(?<=[.:!?])\s+")
_VERSION = re.compile(r"\{#\s*version (\d+)\s*#\}")


@dataclass(frozen=True)
class Prompt:
    """A template with the name and version that provenance records."""

    name: str
    version: str
    digest: str
    """Of its text and of every text that it may build on: what a prompt is compared by when a run is resumed."""
    template: jinja2.Template
    wording: frozenset[str]
    """Runs of words of its own sentences, as plain text, which no row has a reason to repeat."""

    def render(self, **variables: object) -> str:
        """The text. Raises ConfigError where the template asks for what there is not, or fails."""
        import jinja2

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
    import jinja2

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
    """One of our own, such as `expand/harder`."""
    path = _FOLDER / f"{name}.jinja"
    text = path.read_text(encoding="utf-8")
    version_match = _VERSION.match(text)
    assert version_match is not None, f"{path} does not start with its version: {{# version 1 #}}"
    family = "".join(p.read_text(encoding="utf-8") for p in sorted({path, *path.parent.glob("base.jinja")}))
    template = _environment().get_template(f"{name}.jinja")
    return Prompt(name, version_match.group(1), _digest(family), template, _runs(text))


def load_file(path: Path) -> Prompt:
    """A user's own template. Raises ConfigError with file and line where it cannot be read or parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the template {path}: {error}") from error
    import jinja2

    try:
        template = _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{path} line {error.lineno} is not valid Jinja: {error.message}") from error
    return Prompt(path.name, _digest(text)[:8], _digest(text), template, _runs(text))


@functools.cache
def wording() -> tuple[str, ...]:
    """The wording of our prompts to a model that writes rows, in runs of words."""
    files = [path for kind in ("expand", "from-docs") for path in (_FOLDER / kind).glob("*.jinja")]
    return tuple(sorted(set[str]().union(*(_runs(path.read_text(encoding="utf-8")) for path in files))))


def repeated(text: str, said: Iterable[str]) -> str | None:
    """A run of words that a text shares with the prompts; None if there is none."""
    plain = plain_text(text)
    return next((run for run in said if run in plain), None)


def _runs(template: str) -> frozenset[str]:
    """Every six words in a row of a template's sentences, and its short headings (`Keep to this:`)."""
    runs = set[str]()
    for text in _MARKUP.split(template):
        for sentence in (part for item in _ITEMS.split(text) for part in _SENTENCES.split(item.strip())):
            words = plain_text(sentence).split()
            runs.update(" ".join(words[at : at + _RUN]).strip(_EDGES) for at in range(len(words) - _RUN + 1))
            if sentence[:1].isupper() and sentence.endswith(":") and _HEADING <= len(words) < _RUN:
                runs.add(" ".join(words))
    return frozenset(runs)


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
    stripped_lines = tuple(line.strip() for line in lines if line.strip())
    if not stripped_lines:
        raise ConfigError(f"{path} is empty; it needs one phrase per line")
    return stripped_lines


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
