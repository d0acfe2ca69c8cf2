"""The prompts of the dataset commands: Jinja files, each with a version.

The first line of a file is `{# version N #}`; increment N when the wording changes. The version of
a user's template is a hash of its text.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ajet_sdk.errors import ConfigError
from ajet_sdk.tasks.lineage import plain_text

if TYPE_CHECKING:
    import jinja2

_FOLDER = Path(__file__).parent
_RUN = 6
"""Number of consecutive words that identify a sentence of a prompt."""
_PHRASE = 4
"""Shorter phrases, such as a domain in one word, occur in tasks by themselves."""
_HEADING = 3
_EDGES = " .,;:!?()"
_MARKUP = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", re.DOTALL)
"""Matches the markup of a template."""
_ITEMS = re.compile(r"(?:^|\n)\s*-\s|\n\s*\n")
_SENTENCES = re.compile(r"(?<=[.:!?])\s+")
_VERSION = re.compile(r"\{#\s*version (\d+)\s*#\}")


@dataclass(frozen=True)
class Prompt:
    """A template with the name and version that provenance records."""

    name: str
    version: str
    digest: str
    """Of its text and its base template; compared when a run is resumed."""
    template: jinja2.Template
    wording: frozenset[str]
    """Word runs of its sentences, as plain text, which a generated row should not repeat."""

    def render(self, **variables: object) -> str:
        """Renders the text. Raises ConfigError if the template fails or uses an unknown
        variable."""
        import jinja2

        try:
            return self.template.render(**variables).strip()
        except jinja2.TemplateError as error:
            known = ", ".join(sorted(variables))
            raise ConfigError(
                f"the template {self.name} failed: {error}; it may use {known}"
            ) from error

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
    """Loads a built-in prompt, such as `expand/harder`."""
    path = _FOLDER / f"{name}.jinja"
    text = path.read_text(encoding="utf-8")
    version_match = _VERSION.match(text)
    assert version_match is not None, f"{path} does not start with its version: {{# version 1 #}}"
    family = "".join(
        p.read_text(encoding="utf-8") for p in sorted({path, *path.parent.glob("base.jinja")})
    )
    template = _environment().get_template(f"{name}.jinja")
    return Prompt(name, version_match.group(1), _digest(family), template, _runs(text))


def load_file(path: Path) -> Prompt:
    """Loads a user's template. Raises ConfigError, with file and line, if it cannot be read or
    parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the template {path}: {error}") from error
    import jinja2

    try:
        template = _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{path} line {error.lineno} is not valid Jinja: {error.message}"
        ) from error
    return Prompt(path.name, _digest(text)[:8], _digest(text), template, _runs(text))


@functools.cache
def wording() -> tuple[str, ...]:
    """Returns the word runs of all prompts for generating rows."""
    files = [path for kind in ("expand", "from-docs") for path in (_FOLDER / kind).glob("*.jinja")]
    lists = [
        runs_of_phrase(phrase)
        for name in ("personas", "domains")
        for phrase in phrases(f"expand/{name}")
    ]
    return tuple(
        sorted(
            set[str]().union(*(_runs(path.read_text(encoding="utf-8")) for path in files), *lists)
        )
    )


def runs_of_phrase(phrase: str) -> frozenset[str]:
    """Returns the word runs of a persona or domain that no row may repeat: its start, without the
    article."""
    words = plain_text(phrase).split()
    words = words[1:] if words and words[0] in ("a", "an", "the") else words
    return frozenset([" ".join(words[:_RUN]).strip(_EDGES)] if len(words) >= _PHRASE else ())


class Runs:
    """Word runs, to be looked for in many texts."""

    def __init__(self, runs: Iterable[str]) -> None:
        self._by_word: dict[str, list[str]] = {}
        """The runs by their longest inner word; a text without it has none of them."""
        for run in runs:
            inner = run.split()[1:-1]
            self._by_word.setdefault(max(inner, key=len, default=""), []).append(run)

    def first_in(self, text: str) -> str | None:
        """Returns the first run, in alphabetical order, that a text contains, or None."""
        plain = plain_text(text)
        words = self._by_word.keys() & {"", *plain.split()}
        return min(
            (run for word in words for run in self._by_word[word] if run in plain), default=None
        )


@functools.cache
def runs_of_prompts() -> Runs:
    """Returns the word runs of all prompts for generating rows."""
    return Runs(wording())


def _runs(template: str) -> frozenset[str]:
    """Returns every six consecutive words of a template's sentences, and its short headings
    (`Keep to this:`)."""
    runs = set[str]()
    for text in _MARKUP.split(template):
        sentences = chain.from_iterable(
            _SENTENCES.split(item.strip()) for item in _ITEMS.split(text)
        )
        for sentence in sentences:
            words = plain_text(sentence).split()
            runs.update(
                " ".join(words[start : start + _RUN]).strip(_EDGES)
                for start in range(len(words) - _RUN + 1)
            )
            if sentence[:1].isupper() and sentence.endswith(":") and _HEADING <= len(words) < _RUN:
                runs.add(" ".join(words))
    return frozenset(runs)


@functools.cache
def phrases(name: str) -> tuple[str, ...]:
    """Returns the lines of a built-in list, such as `expand/personas`."""
    return lines_of(_FOLDER / f"{name}.txt")


def lines_of(path: Path) -> tuple[str, ...]:
    """Returns the non-blank lines of a text file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    stripped = tuple(filter(None, map(str.strip, lines)))
    if not stripped:
        raise ConfigError(f"{path} is empty; it needs one phrase per line")
    return stripped


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
