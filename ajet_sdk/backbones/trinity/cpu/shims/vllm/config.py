"""See the package."""


class ModelConfig:
    """Not to be made here."""

    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError("images and videos need vLLM; this is ajet's replacement for runs without GPUs")
