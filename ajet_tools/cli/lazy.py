"""Command groups that import a command's module when it runs, so that help and other commands stay
fast.

Formats the help: paragraphs are filled, examples get a heading and fit 80 columns. The help of an
option is in its declaration or, if too long, in the docstring under `Args:`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from ajet_tools.cli.options import expand_options

if TYPE_CHECKING:
    from typer._click import Command, Context, Parameter

EXAMPLE_WIDTH = 78
"""Columns of an example: an 80-column terminal minus the margins of the help."""
_ARGUMENT = re.compile(r"^    (\w+): (.+(?:\n {5}.+)*)", re.MULTILINE)
_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")


class LazyGroup(TyperGroup):
    """A group of the commands in `panels`. `group.commands[name]` imports a command's module."""

    package: ClassVar[str] = ""
    panels: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """The panels of the group's help, in order, with the module in `package` of each command; it
    has a function of that name (with a trailing underscore if the name is taken), or for a group
    `app`.
    """
    moved: ClassVar[Mapping[str, str]] = {}
    """What replaces a name that is gone, after the name of the program."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        _lay_out(self)
        self.modules: dict[str, str] = {}
        for commands in self.panels.values():
            self.modules |= commands
        self.commands: Any = _Commands(self.package, self.modules)

    def get_params(self, ctx: Context) -> list[Parameter]:
        """Returns the options, including those for shell completion, which Typer adds last."""
        params = super().get_params(ctx)
        _hide_flag_types(params)
        return params

    def list_commands(self, ctx: Context) -> list[str]:
        return list(self.modules)

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        """Returns a stub with the short help, for lists; `resolve_command` imports the command."""
        if cmd_name not in self.modules:
            return None
        [panel] = (panel for panel, commands in self.panels.items() if cmd_name in commands)
        return TyperCommand(cmd_name, help=self.summary_of(cmd_name), rich_help_panel=panel)

    def summary_of(self, command: str) -> str:
        """Returns the first paragraph of a command's docstring from the source, without importing
        it."""
        module = self._source(command)
        source = (
            module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
        ).read_text(encoding="utf-8")
        function = command.replace("-", "_")
        docstring = re.search(
            rf'^def {function}_?\(.*?^    """(.*?)(?:\n\n|""")', source, re.DOTALL | re.MULTILINE
        )
        if docstring:
            return " ".join(docstring[1].split())
        return ""

    def _source(self, command: str) -> Path:
        """Returns a group's directory, or a command's file without suffix."""
        return Path(__file__).parent.joinpath(*self.package.split(".")[2:], self.modules[command])

    def resolve_command(
        self, ctx: Context, args: list[str]
    ) -> tuple[str | None, Command | None, list[str]]:
        name, *remaining = args
        if name in self.modules:
            return name, self.commands[name], remaining
        if name in self.moved:
            ctx.fail(f"No such command {name!r}: use `ajet {self.moved[name]}`")
        if not ctx.resilient_parsing:  # not during shell completion
            groups = [group for group in self.modules if self._source(group).is_dir()]
            near = [
                f"{group} {name}"
                for group in groups
                if name in getattr(self.commands[group], "modules", ())
            ]
            near += difflib.get_close_matches(name, self.modules, n=1)
            if near:
                hint = f"Did you mean {near[0]!r}?"
            else:
                hint = f"There are {', '.join(self.modules)}."
            ctx.fail(f"No such command {name!r}. {hint}")
        return None, None, remaining


class _Commands(Mapping[str, "Command"]):
    """Commands by name, imported on access."""

    def __init__(self, package: str, modules: Mapping[str, str]) -> None:
        self._package = package
        self._modules = modules

    def __getitem__(self, name: str) -> Command:
        module = importlib.import_module(f"{self._package}.{self._modules[name]}")
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer(add_completion=False)
            function = name.replace("-", "_")
            app.command()(
                expand_options(getattr(module, f"{function}_", None) or getattr(module, function))
            )
        command: Command = typer.main.get_command(app)
        command.name = name
        if not isinstance(command, LazyGroup):
            for each_command in (command, *getattr(command, "commands", {}).values()):
                _lay_out(each_command)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


def _lay_out(command: Command) -> None:
    """Joins each paragraph to one line, except examples (`\\b`), which get a heading. Flags show no
    type."""
    parts = list[str]()
    texts = dict[str, str]()
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("Args:\n"):
            texts |= {name: " ".join(text.split()) for name, text in _ARGUMENT.findall(paragraph)}
            continue
        if "\b" not in paragraph:
            parts.append(" ".join(paragraph.split()))
            continue
        if not parts or not parts[-1].endswith(":"):
            parts.append("Examples:")
        parts.append(
            "\n".join(map(_folded, inspect.cleandoc(paragraph.replace("\b", "")).splitlines()))
        )
    command.help = "\n\n".join(parts)
    parameters = command.get_params(
        command.context_class(command, help_option_names=["--help", "-h"])
    )
    _hide_flag_types(parameters)
    for parameter in parameters:
        if isinstance(parameter, TyperArgument | TyperOption) and parameter.name in texts:
            parameter.help = texts[parameter.name]
        if isinstance(parameter, TyperArgument) and parameter.metavar is None and parameter.name:
            parameter.metavar = parameter.name.upper()


def _folded(line: str) -> str:
    """Wraps a long command line with backslashes; an option stays with its value."""
    if len(line) <= EXAMPLE_WIDTH:
        return line
    goes_on = line.endswith(" \\")
    groups = list[str]()
    for word in _WORD.findall(line.removesuffix(" \\")):
        if (
            groups
            and groups[-1].startswith(("-", "|", ">"))
            and " " not in groups[-1]
            and word[0] not in "-|>"
        ):
            groups[-1] += f" {word}"
        else:
            groups.append(word)
    indent = " " * (len(line) - len(line.lstrip()))
    lines = [indent + groups[0]]
    for group in groups[1:]:
        if len(lines[-1]) + len(group) + 3 > EXAMPLE_WIDTH:
            lines.append(f"{indent.ljust(2)}{group}")
        else:
            lines[-1] += f" {group}"
    return " \\\n".join(lines) + (" \\" if goes_on else "")


def _hide_flag_types(options: Sequence[Parameter]) -> None:
    for option in options:
        if isinstance(option, TyperOption) and option.is_flag:
            option.metavar = ""
