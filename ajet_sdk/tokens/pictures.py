"""What a model's processor makes of a picture: the text in place of the template's placeholder, and
pixels.

The processor is that of the checkpoint without its half for videos, which needs torchvision, and
always with Pillow: torchvision resizes with other rounding, and sampler and trainer must see the
same pixels.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ajet_sdk.config.model_source import adapter_base
from ajet_sdk.errors import ConfigError, RequestRefused
from ajet_sdk.pictures import Picture

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a checkpoint beside tokenizer and model. The last one is never read here, but others need
it."""
_PIXELS = re.compile(r"pixel|image_(grid|size|position)")
"""Names of the arrays that a model takes with pictures."""
_MEDIA_TOKENS = re.compile(r"(image|video|audio|boi)_token_(id|index)")
"""Keys of a config with tokens that stand for pictures and the like. One that begins a picture is
among them: a processor puts tokens behind it."""
_LAYOUTS = 65_536
"""Pictures whose layout is kept."""
_MEMORY = 256 << 20
"""Bytes of pixels that are kept for the next pass."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a picture's size alone decides."""

    text: str
    tokens: int
    """Number of its image tokens."""
    grid: tuple[int, int]
    """Rows and columns of its tokens; (0, 0) if the model has no grid of positions."""


@dataclass(frozen=True, slots=True)
class ProcessedPicture:
    """A picture for a model."""

    layout: _Layout
    pixels: dict[str, npt.NDArray[Any]]
    """By argument of the model, each with a first axis (or two) of length 1 for the picture."""


class PictureProcessor:
    """The processor of a checkpoint's model that takes pictures. Thread-safe."""

    def __init__(
        self, path: Path, config: dict[str, Any], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._processor = _load(path)
        self._decode = decode
        self.placeholder: str = (
            getattr(self._processor, "boi_token", None) or self._processor.image_token
        )
        """What the chat template writes for a picture."""
        self.token_id = int(config.get("image_token_id", config.get("image_token_index", -1)))
        """The image token."""
        self.never_sampled: tuple[int, ...] = media_tokens(config)
        """Tokens that stand for media: sampled, they would be pictures that are not there."""
        self.marks: tuple[str, ...] = tuple(decode([token]) for token in self.never_sampled)
        """Their texts, which in a message are only text."""
        text_config = config.get("text_config") or config
        rope = text_config.get("rope_parameters") or text_config.get("rope_scaling") or {}
        self.has_grid_positions = "mrope_section" in rope
        """Whether the tokens of a picture have a position in three dimensions (M-RoPE: Wang et al.
        2024, arXiv:2409.12191, section 2.1)."""
        self._merge: int = getattr(self._processor.image_processor, "merge_size", 1)
        self._lock = threading.Lock()
        self._layouts: OrderedDict[str, _Layout] = OrderedDict()
        self._equal: dict[_Layout, _Layout] = {}
        """Layouts are few, and their texts long: each is stored once."""
        self._kept: OrderedDict[str, ProcessedPicture] = OrderedDict()
        self._size = 0

    def text_of(self, picture: Picture) -> tuple[str, int]:
        """The text that stands for a picture, and the number of its image tokens. Raises
        RequestRefused."""
        layout = self._layout_of(picture)
        return layout.text, layout.tokens

    def grid_of(self, picture: Picture) -> tuple[int, int]:
        """Rows and columns of a picture's tokens, for positions in three dimensions."""
        return self._layout_of(picture).grid

    def _layout_of(self, picture: Picture) -> _Layout:
        layout = self._layouts.get(picture.digest)
        return self.process(picture).layout if layout is None else layout

    def process(self, picture: Picture) -> ProcessedPicture:
        """Raises RequestRefused if the model does not take a picture of this shape."""
        with self._lock:
            kept = self._kept.get(picture.digest)
            if kept is not None:
                self._kept.move_to_end(picture.digest)
                return kept
            processed = self._process(picture)
            self._kept[picture.digest] = processed
            self._layouts[picture.digest] = processed.layout
            if len(self._layouts) > _LAYOUTS:
                self._layouts.popitem(last=False)
            self._size += _bytes(processed)
            while self._size > _MEMORY and len(self._kept) > 1:
                self._size -= _bytes(self._kept.popitem(last=False)[1])
            return processed

    def whole(self, text: str, pictures: Sequence[Picture]) -> dict[str, npt.NDArray[Any]]:
        """What the processor makes of a text with a placeholder for each picture: all arguments of
        the model, as the checkpoint's authors mean it."""
        made = self._processor(
            text=[text],
            images=[[picture.image() for picture in pictures]],
            text_kwargs={"add_special_tokens": False},
            return_tensors="np",
        )
        return {name: np.asarray(value) for name, value in made.items()}

    def _process(self, picture: Picture) -> ProcessedPicture:
        try:
            made = self.whole(self.placeholder, [picture])
        except Exception as error:  # processors raise anything for a shape that they do not take
            raise RequestRefused(
                f"the model's processor does not take a picture of {picture.width} ×"
                f" {picture.height} pixels: {error}",
                "messages",
            ) from error
        ids = made["input_ids"][0]
        pixels = {name: value for name, value in made.items() if _PIXELS.match(name)}
        grid = (0, 0)
        if self.has_grid_positions:
            _, height, width = pixels["image_grid_thw"][0].tolist()
            grid = height // self._merge, width // self._merge
        layout = _Layout(self._decode(ids.tolist()), int((ids == self.token_id).sum()), grid)
        layout = self._equal.setdefault(layout, layout)
        return ProcessedPicture(layout, _seen(pixels))


def picture_processor(
    path: str | Path, decode: Callable[[Sequence[int]], str]
) -> PictureProcessor | None:
    """The processor of a checkpoint, by directory or name; None if its model takes no pictures.

    Raises ConfigError if the processor cannot be loaded.
    """
    directory = _directory(adapter_base(path) or path)
    if directory is None or not takes_pictures(directory):
        return None
    try:
        return PictureProcessor(directory, _json(directory / "config.json"), decode)
    except (OSError, ValueError, TypeError, AttributeError, ImportError, KeyError) as error:
        raise ConfigError(
            f"model.path: the processor for pictures in {path} cannot be loaded: {error}"
        ) from error


def takes_pictures(path: str | Path) -> bool:
    """Whether a checkpoint's model takes pictures, and it has the processor for them."""
    directory = _directory(path)
    if directory is None:
        return False
    config = _json(directory / "config.json")
    return (
        bool(config.get("vision_config"))
        and ("image_token_id" in config or "image_token_index" in config)
        and any((directory / name).is_file() for name in PROCESSOR_FILES[:2])
    )


def processor_files(path: str | Path) -> list[Path]:
    """The files of a checkpoint's processor for pictures; none if its model takes none."""
    directory = _directory(adapter_base(path) or path) if path else None
    if directory is None or not takes_pictures(directory):
        return []
    return [file for name in PROCESSOR_FILES if (file := directory / name).is_file()]


def media_tokens(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that stand for pictures and the like, by a model's config."""
    found = {
        value
        for key, value in config.items()
        if _MEDIA_TOKENS.fullmatch(key) and isinstance(value, int)
    }
    return tuple(sorted(found))


def _directory(path: str | Path) -> Path | None:
    """The directory of a checkpoint, or of the downloaded files of one by name."""
    if Path(path).exists():
        return Path(path) if Path(path).is_dir() else None
    from transformers.utils.hub import cached_file

    found = [
        cached_file(
            str(path),
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        for name in ("config.json", *PROCESSOR_FILES)
    ]
    return Path(found[0]).parent if found[0] else None


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _load(path: Path) -> Any:
    """The checkpoint's own class of processor, without the half for videos."""
    import transformers

    names = [_json(path / name).get("processor_class") for name in PROCESSOR_FILES]
    name = next((name for name in names if name), None)
    if name is None or not hasattr(transformers, name):
        raise ConfigError(f"{path} names no processor class that transformers has")
    whole = getattr(transformers, name)
    wanted = [part for part in whole.get_attributes() if part in ("image_processor", "tokenizer")]
    halved: Any = type(name, (whole,), {"get_attributes": classmethod(lambda _: wanted)})
    return halved.from_pretrained(path, local_files_only=True, backend="pil")


def _seen(pixels: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """The pixels, none of them all zero: Idefics 3 takes a tile of zeros for padding and drops
    it."""
    values = pixels.get("pixel_values")
    if values is not None and values.ndim == 5:
        for tile in values.reshape(-1, *values.shape[2:]):
            if not tile.any():
                tile.flat[0] = np.finfo(values.dtype).tiny
    return pixels


def _bytes(processed: ProcessedPicture) -> int:
    return sum(array.nbytes for array in processed.pixels.values())
