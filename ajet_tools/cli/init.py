"""`ajet init`: a starter project that runs at once."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from ajet_sdk.errors import ConfigError
from ajet_sdk.output import echo

__all__ = ["app"]

app = typer.Typer(add_completion=False)

NAMED = ("README.md",)
"""Files in which the word NAME stands for the project's name."""


@app.command()
def init(
    name: Annotated[Path, typer.Argument(help="The directory to make; `.` for the present one.")],
) -> None:
    """Write a starter project that runs at once: an agent, a judge, tasks, a config and scripted replies.

    \b
    ajet init demo
    cd demo
    ajet run agent.py:solve --judge agent.py:exact --tasks tasks.jsonl \\
      --scripted replies.py:reply
    """
    title = name.resolve().name
    if not re.fullmatch(r"[\w.-]+", title):
        raise ConfigError(f"a project's name has letters, digits, dots, dashes and underscores (got {title!r})")
    source = resources.files("ajet_tools.cli") / "starter"
    files = {item.name: item.read_text(encoding="utf-8") for item in source.iterdir() if item.is_file()}
    taken = [file for file in sorted(files) if (name / file).exists()]
    if taken:
        raise ConfigError(f"{name} has {', '.join(taken)} already; nothing was written. Choose another name")
    if name.exists() and not name.is_dir():
        raise ConfigError(f"{name} is a file; nothing was written")
    try:
        name.mkdir(parents=True, exist_ok=True)
        for file, text in sorted(files.items()):
            (name / file).write_text(_titled(text, title) if file in NAMED else text, encoding="utf-8")
            echo(f"  {name / file}")
    except OSError as error:
        raise ConfigError(f"cannot write {name}: {error.strerror or error}") from error
    enter = "" if name.resolve() == Path.cwd() else f"  cd {name}\n"
    echo(
        f"Now run it, without a model:\n{enter}"
        "  ajet run agent.py:solve --judge agent.py:exact --tasks tasks.jsonl --scripted replies.py:reply"
    )


def _titled(text: str, title: str) -> str:
    return re.sub(r"\bNAME\b(?!-)", title, text)
