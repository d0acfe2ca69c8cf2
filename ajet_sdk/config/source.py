"""Sources of config values: YAML with line numbers, overrides and arguments."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ajet_sdk.errors import ConfigError
from ajet_sdk.types import Json, JsonView


class Roots(JsonView):
    """A mapping whose keys are attributes too: `roots.frozen_lake.map_size`."""

    def __init__(self, values: JsonView) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> object:
        value = self._values[name]
        return Roots(value) if isinstance(value, Mapping) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"the config has no {name!r}; it has {', '.join(map(str, self)) or 'no keys'}"
            ) from None

    def __repr__(self) -> str:
        return f"Roots({self._values!r})"

    def plain(self) -> Json:
        return dict(self._values)


class _Loader(yaml.SafeLoader):
    """YAML where `1e-6` is a number: YAML 1.1 wants `1.0e-6` and would read text."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """The value of a node. Raises YAMLError also for values that crash PyYAML: `!!int x`,
        2024-99-99."""
        try:
            value = super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError):
            kind = node.tag.rpartition(":")[2]
            problem = f"{str(node.value)[:60]!r} is no {kind}"
        else:
            if not isinstance(value, int) or value.bit_length() <= _BITS:
                return value
            problem = "the number is too large"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


_BITS = 4096
"""Digits of an integer: Python refuses to print larger ones."""

_Loader.yaml_implicit_resolvers = {
    k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = yaml.resolver.re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")  # type: ignore[attr-defined]
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


class _Composer(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Parses with libyaml in a tenth of the time; `_Loader` has the better error messages."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


@dataclass
class Source:
    """A document under construction, with the origin of each value by dotted path."""

    document: Json = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def merge(self, values: JsonView, origin: str) -> None:
        """Merge `values` into the document; mappings are merged, everything else is replaced."""
        self._merge(self.document, values, "", origin)

    def _merge(self, into: Json, values: JsonView, prefix: str, origin: str) -> None:
        for name, value in values.items():
            path = f"{prefix}{name}"
            present = into.get(name)
            if isinstance(value, Mapping) and (
                isinstance(present, dict) or (present is None and value)
            ):
                into[name] = present if present is not None else {}
                self._merge(into[name], value, f"{path}.", origin)
            else:
                into[name] = deepcopy(value)
                self.origins = {
                    k: v for k, v in self.origins.items() if not k.startswith(path + ".")
                } | {path: origin}

    def set(self, path: str, value: Any, origin: str = "on the command line") -> None:
        for step in reversed(path.split(".")):
            value = {step: value}
        self.merge(value, origin)

    def get(self, path: str, default: object = None) -> Any:
        """The value at a dotted path."""
        value: Any = self.document
        for step in path.split("."):
            if not isinstance(value, Mapping) or step not in value:
                return default
            value = value[step]
        return value

    def move(self, old: str, new: str) -> None:
        """Rename `old` to `new`; mappings are merged, everything else is replaced."""
        origins = {
            new + known[len(old) :]: origin
            for known, origin in self.origins.items()
            if _within(known, old)
        }
        self.set(new, self.remove(old), "")
        self.origins |= origins

    def remove(self, path: str) -> Any:
        *steps, name = path.split(".")
        parent = self.document
        for step in steps:
            parent = parent[step]
        self.origins = {
            known: origin for known, origin in self.origins.items() if not _within(known, path)
        }
        return parent.pop(name)

    def origin(self, path: str) -> str | None:
        """The origin of the value at a path, else of its nearest parent that was set."""
        while path:
            if path in self.origins:
                return self.origins[path]
            inside = next(
                (origin for known, origin in self.origins.items() if known.startswith(path + ".")),
                None,
            )
            if inside:
                return inside
            path = path.rpartition(".")[0]
        return None


def _within(path: str, section: str) -> bool:
    return path == section or path.startswith(f"{section}.")


def read_document(path: Path, sections: Sequence[str]) -> Source:
    """Read a YAML file with the root `ajet:`. `sections` are the names below it, for error
    messages."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}{_beside(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from error
    try:
        node = _node(text)
        _refuse_placeholders(node, path.name)
        origins = _lines(node, path.name)
        document = _value(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if mark is not None:  # `{{A}}/{{B}}` without quotes is no YAML at all
            _refuse("".join(text.splitlines()[mark.line : mark.line + 1]), path.name, mark.line)
        raise ConfigError(f"{path.name} {_flaw(error)}") from None
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path.name} must be a mapping with the top-level key `ajet:` (got"
            f" {type(document).__name__})"
        )
    _check_root(document, path.name, origins, sections)
    return Source(document, origins)


_PLACEHOLDER = re.compile(r"\{\{\s*([A-Z][A-Z0-9_]*)\s*\}\}")


def _refuse_placeholders(node: yaml.Node | None, name: str) -> None:
    """Raise ConfigError for the first placeholder `{{NAME}}`, except in multi-line texts."""
    nodes = [node]
    seen = set[int]()
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        line = node.start_mark.line
        if isinstance(node, yaml.ScalarNode) and "\n" not in node.value:
            _refuse(node.value, name, line)
        elif isinstance(node, yaml.SequenceNode):
            nodes += reversed(node.value)
        elif isinstance(node, yaml.MappingNode):
            for key, _ in node.value:
                if isinstance(key, yaml.MappingNode):  # `{{NAME}}` without quotes
                    inner = [
                        child.value for child, _ in key.value if isinstance(child, yaml.ScalarNode)
                    ]
                    _refuse("{{" + inner[0] + "}}" if len(inner) == 1 else "", name, line)
            nodes += [child for pair in reversed(node.value) for child in reversed(pair)]


def _refuse(text: str, name: str, line: int) -> None:
    placeholders = _PLACEHOLDER.findall(text)
    if placeholders:
        names = ", ".join(f"{{{{{placeholder}}}}}" for placeholder in dict.fromkeys(placeholders))
        raise ConfigError(
            f"{name} line {line + 1}: {names} is a placeholder; replace it with a value"
        )


_DEPTH = 100
_VALUES = 100_000
"""Limits of a config with its aliases expanded: a kilobyte of YAML can expand to more than the
memory."""


def _node(text: str) -> yaml.Node | None:
    """The root node of a YAML document. Raises YAMLError, also if it is too deep or too large."""
    try:
        return _composed(text, _Composer)
    except yaml.YAMLError:
        return _composed(text, _Loader)


def _composed(text: str, loader: type[yaml.SafeLoader]) -> yaml.Node | None:
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):  # before it is composed, which recurses
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                event, yaml.CollectionEndEvent
            )
            if depth > _DEPTH:
                problem = f"nested more than {_DEPTH} levels deep"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]
        node: yaml.Node | None = yaml.compose(text, Loader=loader)
    except (ValueError, OverflowError) as error:  # the escape of no character, such as "\UFFFFFFFF"
        raise yaml.YAMLError(str(error)) from error
    if node is not None:
        _count(node, {}, 0)
    return node


def _value(node: yaml.Node | None) -> object:
    return _Loader("").construct_document(node) if node is not None else None


def load_yaml(text: str) -> object:
    """The content of a YAML document. Raises YAMLError if it can't be read."""
    return _value(_node(text))


def _count(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """The number of values of a node, with aliases expanded."""
    if id(node) in known:
        return known[id(node)]
    count = 1
    if isinstance(node, yaml.CollectionNode):
        known[id(node)] = _VALUES  # met again inside itself
        if isinstance(node, yaml.MappingNode):
            below = [child for pair in node.value for child in pair]
        else:
            below = node.value
        count += sum(_count(child, known, depth + 1) for child in below)
        if count > _VALUES or depth > _DEPTH:
            problem = f"its aliases expand to more than {_VALUES:,} values, or to themselves"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    known[id(node)] = count
    return count


def _flaw(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return (
            f"is not valid YAML: the character {chr(error.character)!r} at position"
            f" {error.position} is not allowed"
        )
    if isinstance(error, yaml.MarkedYAMLError):
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        return f"line {line} is not valid YAML for a config: {error.problem or error.context}"
    return f"is not valid YAML: {error}"


def _check_root(
    document: Mapping[object, object],
    name: str,
    origins: Mapping[str, str],
    sections: Sequence[str],
) -> None:
    if "ajet" in document:
        return
    near = difflib.get_close_matches("ajet", [str(root) for root in document], n=1, cutoff=0.6)
    if near:
        raise ConfigError(
            f"{name} has no top-level key `ajet:`; is {near[0]} ({origins.get(near[0], name)}) a"
            " typo?"
        )
    ours = [str(root) for root in document if root in sections]
    if ours:
        raise ConfigError(f"{name} has no top-level key `ajet:`; put {', '.join(ours)} under it")
    raise ConfigError(
        f"{name} has no top-level key `ajet:`; it has {', '.join(map(str, document)) or 'no keys'}"
    )


def _lines(node: yaml.Node | None, name: str, prefix: str = "") -> dict[str, str]:
    """The file and line of each path. A duplicate key is an error."""
    lines: dict[str, str] = {}
    if not isinstance(node, yaml.MappingNode):
        return lines
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        step = str(key_node.value)
        line = key_node.start_mark.line + 1
        if step == "<<":
            continue
        if step in seen:
            raise ConfigError(
                f"{prefix}{step} is given twice in {name}: lines {seen[step]} and {line}"
            )
        seen[step] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            lines.update(_lines(value_node, name, f"{prefix}{step}."))
            lines.setdefault(f"{prefix}{step}", f"in {name} line {line}")
        else:
            lines[f"{prefix}{step}"] = f"in {name} line {line}"
    return lines


def _beside(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; there is no directory {path.parent} either"
    names = sorted(p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml"))
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; did you mean {path.with_name(near[0])}?" if near else ""


def read_override(text: str, known: Sequence[str], roots: Sequence[str]) -> tuple[str, object]:
    """Parse `ajet.rollout.num_repeat=8` into path and value. `known` are the sections, `roots` the
    file's roots."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path or any(not step for step in path.split(".")):
        raise ConfigError(
            "an override has the form key=value, for example ajet.rollout.num_repeat=8 (got"
            f" {text!r})"
        )
    root = path.split(".")[0]
    if root != "ajet" and root not in roots:
        if root in known:
            raise ConfigError(f"an override starts with its top-level key: ajet.{text}")
        raise ConfigError(
            f"{text}: the config has no top-level key {root!r}; it has"
            f" {', '.join(dict.fromkeys(('ajet', *roots)))}"
        )
    try:
        node = _node(value)
        return path, _value(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of the override {text[:200]!r} {_flaw(error)}") from None
