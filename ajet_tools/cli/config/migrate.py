"""`ajet config migrate`: a config written for AgentJet, by ajet's own names."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from ajet_sdk.config.agentjet import IGNORED_ROOTS, WITHOUT_EFFECT
from ajet_sdk.config.config import Config, is_idle, load_config, plain_yaml
from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import echo
from ajet_sdk.whole_file import write_whole

__all__ = ["app"]

app = typer.Typer(add_completion=False)

_CHECKLIST = "rollout.compute_madness_checklist"


@app.command()
def migrate(
    file: Annotated[Path, typer.Argument(help="A config file written for AgentJet.")],
    output: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write it to this file, which must not be there yet.")
    ] = None,
) -> None:
    """Print a config that was written for AgentJet by ajet's own names, with what each key does and what was left out.

    \b
    ajet config migrate math_agent.yaml
    ajet config migrate math_agent.yaml -o math.yaml
    """
    text = _text(load_config(file), file.name)
    if output is None:
        echo(text.rstrip("\n"))
        return
    if output.exists():
        raise ConfigError(f"there is a file {output} already; choose another --out")
    try:
        write_whole(output, text)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror or error}") from error


def _text(config: Config, name: str) -> str:
    """The file's text: what was left out, then each key that was given, then the other roots."""
    translated = config.translated
    lines = [f"# {name}, by `ajet config migrate`."]
    left_out = [(path, WITHOUT_EFFECT[path]) for path, _ in translated.dropped]
    left_out += [(f"the root {root}", IGNORED_ROOTS[root]) for root in translated.roots]
    lines += [f"# Left out: {path}: {reason}." for path, reason in left_out]
    values = config.model_dump(mode="json", exclude_unset=True)
    if not config.is_set(_CHECKLIST):
        values.setdefault("rollout", {})["compute_madness_checklist"] = ["nonsense"]
    renamed = {new: old for old, new in translated.renamed}
    lines += ["ajet:", *_keys(config, Config, values, "", renamed)]
    return "\n".join(lines) + "\n" + (plain_yaml(config.roots.plain()) if config.roots else "")


def _keys(
    config: Config, model: type[BaseModel], values: Mapping[str, Any], prefix: str, renamed: Mapping[str, str]
) -> Iterator[str]:
    margin = "  " * (prefix.count(".") + 1)
    for name, value in values.items():
        path, field = f"{prefix}{name}", model.model_fields[name]
        if not config.is_set(path) and path not in ("rollout", _CHECKLIST):
            continue  # made of another key
        if path in renamed:
            yield f"{margin}# There: {renamed[path]}."
        kind = field.annotation
        if isinstance(kind, type(BaseModel)):
            yield f"{margin}{name}:"
            yield from _keys(config, kind, value, f"{path}.", renamed)
            continue
        said = [field.description or "", "No effect in this version." if is_idle(path) else ""]
        said += ["AgentJet's default; ajet's is an empty list." if not config.is_set(path) else ""]
        comment = textwrap.wrap(" ".join(filter(None, said)), 116 - len(margin))
        yield from (f"{margin}# {line}" for line in comment)
        yield textwrap.indent(plain_yaml({name: value}).rstrip("\n"), margin)
