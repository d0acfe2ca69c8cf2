"""A workflow's prompts: texts that its module assigns to names. Reading, replacing for a trial, rewriting."""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from types import CodeType
from typing import Any

from ajet_sdk.errors import ConfigError
from ajet_sdk.whole_file import write_whole


@dataclass(frozen=True)
class Prompts:
    """Texts by name, in the order of the file that assigns them."""

    path: Path
    texts: Mapping[str, str]
    scope: dict[str, object]
    """The module's names, as the running workflow looks them up."""

    @contextmanager
    def trying(self, texts: Mapping[str, str]) -> Iterator[None]:
        """Other texts under these names, as long as the block lasts."""
        self.scope.update(texts)
        try:
            yield
        finally:
            self.scope.update(self.texts)

    def wrong(self, texts: Mapping[str, str]) -> str | None:
        """The first new text that lacks a `{placeholder}` of the text it replaces, or has an unknown one."""
        for name, text in self.texts.items():
            expected = placeholders(text)
            lost, new = expected - placeholders(texts[name]), placeholders(texts[name]) - expected
            if lost:
                return f"{name} has lost {_braced(lost)}"
            if expected and new and _fields(text) is not None:
                return f"{name} has {_braced(new)}, which nothing fills"
            if expected and _fields(text) is not None and _fields(texts[name]) is None:
                return f"{name} has braces that str.format can't read"
        return None

    def rewritten(self, texts: Mapping[str, str]) -> str:
        """The source with other texts, otherwise unchanged."""
        source = self.path.read_text(encoding="utf-8")
        lines = source.splitlines(keepends=True)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line.encode()))
        content = source.encode()
        for name, node in reversed(list(_assigned(source).items())):
            if name in texts and texts[name] != self.texts[name]:
                begin = starts[node.lineno - 1] + node.col_offset
                end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
                content = content[:begin] + _literal(texts[name]).encode() + content[end:]
        return content.decode()

    def diff(self, texts: Mapping[str, str]) -> str:
        """The changes of the file as a unified diff; empty if there are none."""
        before, after = self.path.read_text(encoding="utf-8"), self.rewritten(texts)
        lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
        return "".join(difflib.unified_diff(lines[0], lines[1], str(self.path), str(self.path)))

    def apply(self, texts: Mapping[str, str]) -> None:
        """Write the file with other texts."""
        write_whole(self.path, self.rewritten(texts).encode())


def prompts_of(workflow: Callable[..., object], names: Sequence[str] = ()) -> Prompts:
    """The named texts of the workflow's module, or those that its code uses.

    Raises ConfigError where there is none, or one is not assigned there as a plain text.
    """
    function: Any = getattr(workflow, "execute", None) if inspect.isclass(workflow) else inspect.unwrap(workflow)
    scope = function.__globals__
    path = Path(inspect.getsourcefile(function) or "")
    known = {name: node.value for name, node in _assigned(path.read_text(encoding="utf-8")).items()}
    used = set(_names(function.__code__)) if not inspect.isclass(workflow) else known.keys()
    chosen = list(names) or [name for name in known if name in used]
    for name in chosen:
        if name not in known:
            raise ConfigError(
                f"{path} assigns no text to {name} at its top level; it has {', '.join(known) or 'none'}. A prompt is "
                'tuned where it is a text there (`SYSTEM = "..."`), which the agent reads when it is called'
            )
    if not chosen:
        raise ConfigError(
            f"the workflow uses no text that {path} assigns at its top level: write its prompt there "
            '(`SYSTEM = "..."`), or name one with --prompt'
        )
    return Prompts(path, {name: str(known[name]) for name in known if name in chosen}, scope)


def _assigned(source: str) -> dict[str, ast.Constant]:
    """The texts that a module assigns to single names at its top level."""
    constants: dict[str, ast.Constant] = {}
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if not isinstance(target, ast.Name) or not isinstance(value, ast.Constant) or target.id.startswith("__"):
            continue
        if isinstance(value.value, str):
            constants[target.id] = value
    return constants


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function looks up, and those of functions within it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def placeholders(text: str) -> set[str]:
    """The names in the text's `{placeholders}`, as `str.format` reads them; `{}` and `{}` are 0 and 1.

    A text with other braces, such as JSON, has what looks like `{name}`.
    """
    names = _fields(text)
    return set(re.findall(r"\{(\w+)\}", text)) if names is None else names


def _fields(text: str) -> set[str] | None:
    """The fields of `str.format`; None if the text has other braces."""
    try:
        names = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
    except ValueError:
        return None
    if not all(re.fullmatch(r"(\w*)([.\[].*)?", name) for name in names):
        return None
    counted = itertools.count()
    return {name or str(next(counted)) for name in names}


def _braced(names: set[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in sorted(names))


def _literal(text: str) -> str:
    """The text as Python writes it; one of several lines stays so."""
    whole = '"""' + text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"') + '"""'
    if "\n" in text and not text.endswith('"') and ast.literal_eval(whole) == text:
        return whole
    written = repr(text)  # has double quotes already where the text has an apostrophe and none of them
    return written if '"' in text or written.startswith('"') else f'"{written[1:-1]}"'
