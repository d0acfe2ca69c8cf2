"""The structure that the design promises: layers, a light import, exports that match, a reference
that is complete."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ajet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
HEAVY = {
    "torch",
    "transformers",
    "ray",
    "vllm",
    "trinity",
    "textual",
    "duckdb",
    "openai",
    "polars",
    "pyarrow",
}


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_import_points_down() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout


WRONG = {
    "ajet_sdk/errors.py": "import ajet_tools.text.clean",
    "ajet_sdk/samples/build.py": "import ajet_sdk.run",
    "ajet_tools/trace/locate.py": "import ajet_tools.cli.app",
    "ajet_sdk/backbones/local.py": "import ajet_sdk.backbones.debug",
    "ajet_tools/trace/decoding.py": "import ajet_tools.trace.export",
    "ajet_tools/dataset/files/values.py": "import ajet_tools.dataset.readers",
    "ajet_tools/tui/widgets/chart.py": "import ajet_tools.tui.trace.app",
    "ajet_sdk/trace/owner.py": "import ajet_sdk.trace.writer",
    "ajet_sdk/samples/splits.py": "import torch",
    "ajet_sdk/learn/trainer.py": "import ray",
    "ajet_tools/dataset/curation/stats.py": "import textual",
    "ajet_sdk/reporting/loggers.py": "import duckdb",
}
"""For each contract, in their order, an import that breaks it."""


@pytest.mark.slow
def test_each_contract_can_fail(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("ajet", "ajet_sdk", "ajet_tools"):
        shutil.copytree(ROOT / package, tmp_path / package)
    for name, line in WRONG.items():
        with (tmp_path / name).open("a") as file:
            file.write(f"\n{line}\n")
    lint = Path(sys.executable).with_name("lint-imports")
    said = subprocess.run([lint], capture_output=True, text=True, cwd=tmp_path, timeout=300).stdout
    results = re.findall(r"^.+ (KEPT|BROKEN)\b", said, re.MULTILINE)
    assert results == ["BROKEN"] * len(WRONG), said


def test_import_is_light() -> None:
    loaded = python(
        "import sys, ajet; ajet.workflow; ajet.judge; print(*{m.split('.')[0] for m in"
        " sys.modules})"
    )
    assert HEAVY.isdisjoint(loaded.split())


@pytest.mark.parametrize("name", ajet.__all__)
def test_every_export_loads(name: str) -> None:
    assert getattr(ajet, name) is not None
    assert name in dir(ajet)


def test_the_exports_are_what_type_checkers_see() -> None:
    tree = ast.parse((ROOT / "ajet/__init__.py").read_text())
    guarded = next(n for n in tree.body if isinstance(n, ast.If))
    typed = {
        alias.asname for n in guarded.body if isinstance(n, ast.ImportFrom) for alias in n.names
    }
    assert typed == set(ajet.__all__)


def test_an_unknown_name_says_so() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        ajet.nothing  # noqa: B018


def test_the_import_name_holds_nothing_else() -> None:
    names = {p.name for p in (ROOT / "ajet").iterdir() if p.name != "__pycache__"}
    assert names == {"__init__.py", "__main__.py", "py.typed"}


@pytest.mark.slow
def test_paths_of_earlier_programs_work() -> None:
    code = (
        "from ajet.workflow import Workflow; from ajet.schema.task import Task, WorkflowTask,"
        " WorkflowOutput;from ajet.task_judge.base_judge import BaseJudge; import ajet;assert"
        " ajet.Workflow is Workflow and ajet.Task is Task and ajet.BaseJudge is BaseJudge;assert"
        " callable(ajet.workflow)"
    )
    python(code)


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The product's Python files by their path."""
    files = (
        path
        for package in ("ajet", "ajet_sdk", "ajet_tools")
        for path in sorted((ROOT / package).rglob("*.py"))
    )
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in files}


def prints(tree: ast.AST) -> list[str]:
    """Where a module prints without `ajet_sdk.reporting.output`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "print":
            found.append(f"line {node.lineno}: print")
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in LAST_OF_PRINTS
            and ast.unparse(node) in PRINTS
        ):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            last = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if last in ("Console", "print") and ast.unparse(node.func) in CONSOLES:
                found.append(f"line {node.lineno}: {ast.unparse(node.func)}")
    return found


PRINTS = {f"sys.{stream}.write" for stream in ("stdout", "stderr")} | {
    f"{module}.{function}"
    for module in ("typer", "click")
    for function in ("echo", "secho", "style")
}


LAST_OF_PRINTS = {name.rpartition(".")[2] for name in PRINTS}
"""Looked at first: to write a node as text takes long."""
CONSOLES = ("Console", "rich.console.Console", "rich.print")


@pytest.mark.slow
def test_nothing_prints_past_the_output_module() -> None:
    """A reply, a row or an error's message that reached a terminal as it is could rewrite what
    stands on it."""
    assert (
        len(
            prints(
                ast.parse(
                    "print(1); typer.echo(2); x = print; sys.stderr.write(3); Console().print(4)"
                )
            )
        )
        == 5
    )
    past = {
        path: prints(tree) for path, tree in modules().items() if not path.endswith("/output.py")
    }
    assert {path: lines for path, lines in past.items() if lines} == {}


DOTTED = re.compile(r"\bajet_(?:sdk|tools)(?:\.(?!NAME\b)[A-Za-z_]\w*)+")
DOCUMENTS = (
    "pyproject.toml",
    "justfile",
    "README.md",
    "CONTRIBUTING.md",
    "docs/**/*.md",
    "tutorial/**/*.md",
)


def dotted(tree: ast.Module) -> Iterator[str]:
    """The own modules and names that a module's strings name, f-strings with the module's constants
    put in."""
    assigned = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    ]
    known = {
        ast.unparse(target): str(ast.literal_eval(node.value))
        for node in assigned
        for target in node.targets
    }

    def written(node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(written, node.values))
        if isinstance(node, ast.FormattedValue):
            return known.get(ast.unparse(node.value), "\0")
        return str(node.value) if isinstance(node, ast.Constant) else "\0"

    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            yield from DOTTED.findall(written(node))
        elif isinstance(node, ast.Dict) and [written(key) for key in node.keys if key] == [
            "path",
            "name",
        ]:
            yield from DOTTED.findall(
                ".".join(map(written, node.values))
            )  # how verl names a class of ours


@functools.cache
def defined(tree: ast.AST) -> dict[str, ast.AST]:
    """What a module or a class binds, without what stands inside functions."""
    found: dict[str, ast.AST] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0]: node for alias in node.names}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = node
        found |= defined(node)
    return found


def exists(name: str) -> bool:
    """Whether a dotted name is a module's or of something that the module binds; nothing is
    imported."""
    steps = name.split(".")
    for end in range(len(steps), 0, -1):
        path, rest = "/".join(steps[:end]), steps[end:]
        if not rest and (ROOT / path).is_dir():
            return True
        tree = modules().get(f"{path}.py") or modules().get(f"{path}/__init__.py")
        if tree is not None:
            found: ast.AST | None = tree
            for step in rest:
                found = defined(found).get(step) if found is not None else None
            return found is not None
    return False


@pytest.mark.slow
def test_names_in_text_exist() -> None:
    """Tables of plug-ins, class names for Trinity, verl and Ray, entry points, `-m` commands,
    documents."""
    example = ast.parse('_A = "ajet_sdk.x"\nf"{_A}.B", {"path": f"pkg://{_A}.rows", "name": "C"}')
    assert {"ajet_sdk.x", "ajet_sdk.x.B", "ajet_sdk.x.rows.C"} <= set(dotted(example))
    assert (
        exists("ajet_sdk.errors.ConfigError")
        and not exists("ajet_sdk.errors.Nothing")
        and not exists("ajet_sdk.x")
    )
    named = {name: path for path, tree in modules().items() for name in dotted(tree)}
    for file in (file for pattern in DOCUMENTS for file in sorted(ROOT.glob(pattern))):
        text = re.sub(r"(ajet_[\w.]+):(\w)", r"\1.\2", file.read_text())
        named |= dict.fromkeys(DOTTED.findall(text), str(file.relative_to(ROOT)))
    assert {
        "ajet_sdk.trainer_service.server",
        "ajet_sdk.backbones.trinity.plugins.DriverMonitor",
    } <= set(named)
    assert {"ajet_sdk.backbones.verl.batches.BatchPositions", "ajet_tools.cli.app.main"} <= set(
        named
    )
    assert {name: path for name, path in named.items() if not exists(name)} == {}


def imported(statement: ast.AST) -> list[str]:
    """What an import statement names, in full; nothing of any other statement."""
    if isinstance(statement, ast.ImportFrom):
        return [f"{statement.module}.{alias.name}" for alias in statement.names]
    return [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []


def imports_in_functions(tree: ast.AST, inside: bool = False) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if inside:
            yield from imported(node)
        yield from imports_in_functions(
            node, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        )


IN_FUNCTIONS = {
    "IPython",  # only in a notebook
    "gepa",
    *(
        "agentscope",
        "bs4",
        "datasets",
        "docx",
        "huggingface_hub",
        "hydra",
        "math_verify",
        "matplotlib",
        "omegaconf",
    ),
    "PIL",  # only for a picture
    *("gymnasium", "mcp", "openenv", "verifiers"),  # in the processes of an environment
    *(
        "llguidance",
        "peft",
        "pypdf",
        "ray",
        "safetensors",
        "swanlab",
        "tensorboard",
        "tokenizers",
        "torch",
    ),
    *("google", "opentelemetry", "tinker"),  # the protobuf classes of OTLP and of the Tinker API
    *("transformers", "trinity", "verl", "wandb"),  # not everybody has them
    *(
        "aiohttp",
        "anyio",
        "asyncio",
        "duckdb",
        "httpx",
        "jinja2",
        "openai",
        "polars",
        "pyarrow",
        "pydantic",
        "rapidfuzz",
        "rich",
        "starlette",
        "uvicorn",
    ),  # slow, and not always needed
    "pdb",  # only for a breakpoint
}
"""Packages that may be imported inside functions."""


@pytest.mark.slow
def test_imports_stand_at_the_top() -> None:
    """Inside functions only other people's packages are imported, so that import-linter's graph is
    the whole one."""
    example = (
        "import a\ndef f():\n    import b.c, d\n    async def g():\n        from e import x, y"
    )
    assert list(imports_in_functions(ast.parse(example))) == ["b.c", "d", "e.x", "e.y"]
    assert {
        name.partition(".")[0] for tree in modules().values() for name in imports_in_functions(tree)
    } - IN_FUNCTIONS == set()


DOCUMENT = ROOT / "docs/architecture.md"


def drawn(text: str) -> dict[str, list[set[str]]]:
    """The layers of each package in the document's picture, from the top down."""
    found: dict[str, list[set[str]]] = {}
    for line in text.partition("```text\n")[2].partition("```")[0].splitlines():
        name = line.removeprefix("  ").partition("  ")[0].strip()
        if line and not line.startswith(" "):
            layers = found[line] = []
        elif name.startswith("| "):
            layers[-1].add(name[2:])
        elif name:
            layers.append({name})
    return found


def test_the_picture_shows_the_layers_of_the_contracts() -> None:
    assert drawn("```text\na\n  b    x | y\n  | c  z\n  d    z\n```") == {"a": [{"b", "c"}, {"d"}]}
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    within = [contract for contract in contracts if "containers" in contract]
    layers = {
        c["containers"][0]: [set(layer.split(" | ")) for layer in c["layers"]] for c in within
    }
    assert drawn(DOCUMENT.read_text()) == layers


@pytest.mark.slow
def test_the_document_names_what_is_there() -> None:
    """Each file and name that it gives exists, and it names every package of the first two
    levels."""
    text = DOCUMENT.read_text()
    quoted = set(re.findall(r"`([^`\n]+)`", text))
    paths = {name for name in quoted if "/" in name or name.endswith((".py", ".md", ".toml"))}
    assert len(paths) > 80
    assert {path for path in paths if not (ROOT / path).exists()} == set()
    sources = "\n".join((ROOT / path).read_text() for path in modules())
    names = {
        name.removesuffix("()")
        for name in quoted - paths
        if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", name)
    }
    words = {word for name in names for word in name.split(".")}
    assert len(words) > 40
    assert {word for word in words if not re.search(rf"\b{word}\b", sources)} == set()
    named = {
        f"{top}/{name}".replace(".", "/")
        for top, rows in drawn(text).items()
        for row in rows
        for name in row
    }
    packages = {
        path.removesuffix("/__init__.py") for path in modules() if path.endswith("/__init__.py")
    }
    missing = {package for package in packages if 1 <= package.count("/") <= 2} - named
    assert {package for package in missing if f"`{package}/" not in text} == set()


def test_the_readme_and_contributing_lead_to_the_document() -> None:
    for name, link in (
        ("README.md", "docs/architecture.md"),
        ("CONTRIBUTING.md", "docs/architecture.md"),
    ):
        assert f"({link})" in (ROOT / name).read_text()
    assert "(architecture.md)" in (ROOT / "docs/README.md").read_text()
