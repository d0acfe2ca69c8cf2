"""The source of a package, read without importing it: from an installation, or from a wheel."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Definition:
    """A name of a package, where it is defined."""

    module: str
    node: ast.AST

    @property
    def parameters(self) -> ast.arguments | None:
        """The parameters of a function; None of anything else."""
        if isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return self.node.args
        return None


@dataclass
class Package:
    """Modules of a package by name. `read` returns the text of a file, or None."""

    name: str
    read: Callable[[str], str | None]
    files: tuple[str, ...]
    """Paths of all its Python files."""
    _parsed: dict[str, ast.Module | None] = field(default_factory=dict)

    @classmethod
    def of_directory(cls, name: str, root: Path) -> Package:
        """Of the directory that has the package's own."""

        def read(path: str) -> str | None:
            file = root / path
            return file.read_text(encoding="utf-8") if file.is_file() else None

        paths = (str(path.relative_to(root)) for path in (root / name).rglob("*.py"))
        return cls(name, read, tuple(sorted(paths)))

    @classmethod
    def of_wheel(cls, name: str, wheel: zipfile.ZipFile) -> Package:
        names = set(wheel.namelist())

        def read(path: str) -> str | None:
            return wheel.read(path).decode() if path in names else None

        inside = [path for path in names if path.startswith(f"{name}/") and path.endswith(".py")]
        return cls(name, read, tuple(sorted(inside)))

    def module(self, name: str) -> ast.Module | None:
        """A module's syntax tree; None if there is no such module."""
        if name not in self._parsed:
            path = name.replace(".", "/")
            text = self.read(f"{path}.py")
            if text is None:
                text = self.read(f"{path}/__init__.py")
            self._parsed[name] = None if text is None else ast.parse(text)
        return self._parsed[name]

    def find(self, module: str, name: str) -> Definition | None:
        """The definition of `name` (`function`, `Class`, `Class.member`), also if the module only
        imports it; of a member also in the class's bases."""
        first, _, rest = name.partition(".")
        found = self._top_level(module, first)
        if found is None or not rest:
            return found
        return self._member(found, rest)

    def _top_level(self, module: str, name: str) -> Definition | None:
        tree = self.module(module)
        if tree is None:
            return None
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._imported(module, node, alias.name)
                    if alias.name == "*":
                        found = self._imported(module, node, name)
                        if found.node is not node:
                            return found
            elif name in _bound(node):
                return Definition(module, node)
        if self.module(f"{module}.{name}") is not None:
            return Definition(module, tree)
        return None

    def _imported(self, module: str, node: ast.ImportFrom, name: str) -> Definition:
        source = node.module or ""
        if node.level:
            is_package = self.read(f"{module.replace('.', '/')}/__init__.py") is not None
            parts = module.split(".")
            above = parts[: len(parts) - node.level + (1 if is_package else 0)]
            source = ".".join([*above, *([node.module] if node.module else [])])
        # A package imports its own modules by its own name.
        if source.split(".")[0] == self.name and source != module:
            found = self._top_level(source, name)
            if found is not None:
                return found
        return Definition(module, node)  # of another package, or made while it is imported

    def _member(self, owner: Definition, name: str) -> Definition | None:
        if not isinstance(owner.node, ast.ClassDef):
            return None
        for node in _statements(owner.node.body):
            if name in _bound(node):
                return Definition(owner.module, node)
        for node in ast.walk(owner.node):
            if name in _set_on_self(node):
                return Definition(owner.module, node)
        for base in owner.node.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            above = self.find(owner.module, ast.unparse(base).rpartition(".")[2])
            found = self._member(above, name) if above is not None else None
            if found is not None:
                return found
        return None

    def classes(self, name: str, below: str) -> Iterator[Definition]:
        """All classes of a name in the modules below a folder, wherever a release has them."""
        for path in self.files:
            if not path.startswith(f"{below}/"):
                continue
            if f"class {name}" not in (self.read(path) or ""):
                continue
            module = str(PurePosixPath(path).with_suffix("")).replace("/", ".")
            tree = self.module(module)
            for node in tree.body if tree is not None else []:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    yield Definition(module, node)


def fields(package: Package, owner: Definition) -> dict[str, ast.AnnAssign]:
    """The annotated fields of a class and of its bases."""
    assert isinstance(owner.node, ast.ClassDef)
    found: dict[str, ast.AnnAssign] = {}
    for base in owner.node.bases:
        above = package.find(owner.module, ast.unparse(base).rpartition(".")[2])
        if above is not None and isinstance(above.node, ast.ClassDef):
            found |= fields(package, above)
    for node in owner.node.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, also those under a condition, but not in functions."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            handled = [inner for handler in node.handlers for inner in handler.body]
            yield from _statements([*node.body, *handled, *node.orelse, *node.finalbody])


def _bound(node: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name for alias in node.names}
    return {part.id for part in _targets(node) if isinstance(part, ast.Name)}


def _set_on_self(node: ast.AST) -> set[str]:
    """The attributes of an instance that a statement sets."""
    attributes = [part for part in _targets(node) if isinstance(part, ast.Attribute)]
    return {part.attr for part in attributes if ast.unparse(part.value) == "self"}


def _targets(node: ast.AST) -> list[ast.expr]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    parts = []
    for target in targets:
        parts += target.elts if isinstance(target, ast.Tuple) else [target]
    return parts
