"""`ajet train --sweep KEY=VALUE,VALUE`: one run for each combination of values, one after the other."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ajet_sdk.config.config import Config
from ajet_sdk.errors import AjetError, ConfigError, TraceError
from ajet_sdk.reporting.output import echo, style
from ajet_sdk.trace.reader import open_trace
from ajet_tools.text.clean import flat_keys

_EMPTY = "empty"


def configs_of(
    sweeps: Sequence[str], config: Config, with_overrides: Callable[[Sequence[str]], Config]
) -> dict[str, Config]:
    """The config of each combination of `KEY=VALUE,VALUE` …, by the name of its experiment, in the config's directory.

    Raises ConfigError for an unknown key, and where a config is not valid.
    """
    configs: dict[str, Config] = {}
    known = [key for key, _ in flat_keys(config.model_dump())]
    axes: dict[str, list[str]] = {}
    for sweep in sweeps:
        name, _, listed = sweep.partition("=")
        if not all(listed.split(",")):
            raise ConfigError(f"--sweep takes KEY=VALUE,VALUE, such as lr=1e-4,3e-4 (got {sweep!r})")
        axes[_key(name, known)] = list(dict.fromkeys(listed.split(",")))
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        name = ",".join(f"{key.rpartition('.')[2]}={value.replace('/', '-')}" for key, value in point.items())
        settings = [f"ajet.{key}={value}" for key, value in {**point, "experiment_name": name}.items()]
        directory = {"experiment_dir": str(config.directory / name)}
        configs[name] = with_overrides(settings).model_copy(update=directory)
    return configs


def _key(name: str, known: Sequence[str]) -> str:
    """The key in full; its end alone will do where that is unique."""
    name = name.removeprefix("ajet.")
    fitting = [name] if name in known else [key for key in known if key.endswith(f".{name}")]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ConfigError(f"--sweep: {name} may be {' or '.join(fitting)}; name one in full")
    near = difflib.get_close_matches(name, [*known, *(key.rpartition(".")[2] for key in known)], 1)
    raise ConfigError(f"--sweep: there is no key {name}{f'; did you mean {near[0]}?' if near else ''}")


def run_sweep(configs: Mapping[str, Config], train: Callable[[Config, bool], object], *, resume: bool) -> None:
    """Train each config, by the name of its experiment; a run that fails doesn't end the others.

    With `resume` runs that have finished are passed over, and one that was begun goes on. Raises ConfigError where an
    experiment exists without it, and at the end where runs failed.
    """
    states = {name: _state(config.directory) for name, config in configs.items()}
    begun = [name for name, state in states.items() if state is not None]
    if begun and not resume:
        raise ConfigError(
            f"the sweep was begun: {configs[begun[0]].directory} exists. Go on with --resume, or set another "
            "experiment_name"
        )
    failed: list[str] = []
    for i, (name, config) in enumerate(configs.items(), 1):
        done = states[name] == "finished"
        echo(style(f"run {i} of {len(configs)}: {name}{', finished before' if done else ''}", bold=True))
        try:
            None if done else train(config, states[name] not in (None, _EMPTY))
        except AjetError as error:
            failed.append(name)
            echo(style(f"{type(error).__name__}: {error}", fg="red"), err=True)
    if failed:
        raise ConfigError(f"{len(failed)} of {len(configs)} runs failed: {'; '.join(failed)}; try again with --resume")


def _state(directory: Path) -> str | None:
    """The status of the newest run of an experiment, or that it has none; None if there is no experiment."""
    try:
        with open_trace(directory) as reader:
            table = reader.query("SELECT status FROM runs ORDER BY started_at DESC LIMIT 1")
    except TraceError:
        return _EMPTY if directory.exists() else None
    return str(table[0][0]) if len(table) else _EMPTY
