"""Which embeddings compare meanings; imports no client."""

from __future__ import annotations

from dataclasses import dataclass

from ajet_sdk.errors import ConfigError
from ajet_tools.text.model_name import ModelName
from ajet_tools.text.settings import split_settings


@dataclass(frozen=True)
class Embedding:
    """The vectors that compare meanings, as `--embed` names them: `NAME@URL` or a model's
    directory, and after a comma `meaning=COSINE` from which two texts are alike."""

    model: ModelName
    meaning: float | None = None

    @classmethod
    def parse(cls, text: str) -> Embedding:
        """Raises ConfigError."""
        place, settings = split_settings(text, ("meaning",))
        meaning = None
        if "meaning" in settings:
            try:
                meaning = float(settings["meaning"])
            except ValueError:
                meaning = -1.0
            if not 0 <= meaning <= 1:
                raise ConfigError(f"--embed {text}: meaning is a cosine from 0 to 1")
        return cls(ModelName.parse(place), meaning)
