"""Pictures in the forward passes of a model, for sampler and trainer.

A row of a pass has keyed ids (`pictures.keyed`): the key of a picture in place of its image tokens.
From them alone come the ids, the pixels in the order of their tokens, and the positions. Nothing is
taken from the model's state: transformers keeps the positions of its last call there, which may be
another conversation's.

Letters of shapes: B rows, T tokens.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ajet_sdk.engines.local.forward import distance, lowest_logit, tolerance
from ajet_sdk.engines.local.products import exact_products, inner_model
from ajet_sdk.errors import ConfigError, EngineError
from ajet_sdk.pictures import Picture, picture_of
from ajet_sdk.protocols import Tokenizer
from ajet_sdk.tokens.pictures import PictureProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KeyedIds = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Pictures = Mapping[int, Picture]
"""Pictures by key."""

_TOWER = ("visual", "vision_model", "vision_tower", "connector", "multi_modal_projector")
"""Modules that turn pixels into the embeddings of image tokens."""


class Vision:
    """A model's arguments for rows with pictures."""

    def __init__(self, model: PreTrainedModel, processor: PictureProcessor) -> None:
        self.processor = processor
        parameters = inspect.signature(inner_model(model).forward).parameters
        self._takes_types = "token_type_ids" in parameters
        """Gemma: the tokens of a picture attend to each other in both directions."""

    def model_ids(self, keyed: KeyedIds) -> npt.NDArray[np.int64]:
        """The ids as the model takes them."""
        return np.where(keyed < 0, self.processor.token_id, keyed).astype(np.int64)

    def shift(self, keyed_T: KeyedIds, pictures: Pictures) -> int:
        """Difference of position and place of the token that follows a row."""
        if not self.processor.has_grid_positions:
            return 0
        return sum(
            max(self.processor.grid_of(pictures[key])) - tokens
            for key, _, tokens in _runs(keyed_T, pictures, self.processor)
        )

    def positions(self, keyed_T: KeyedIds, pictures: Pictures) -> npt.NDArray[np.int64]:
        """Positions of a row (`positions_of`)."""
        return positions_of(keyed_T, pictures, self.processor)

    def arguments(
        self,
        keyed_BT: KeyedIds,
        pictures: Pictures,
        device: torch.device | str,
        types_of: KeyedIds | None = None,
    ) -> dict[str, torch.Tensor]:
        """The pixels of all pictures in the rows, in order; and the types of tokens, if the model
        takes them, of the whole conversations `types_of`."""
        made: dict[str, torch.Tensor] = {}
        if self._takes_types:
            types = keyed_BT if types_of is None else types_of
            made["token_type_ids"] = torch.from_numpy((types < 0).astype(np.int64)).to(device)
        shown = [
            self.processor.process(pictures[key]).pixels
            for row in keyed_BT
            for key, _, _ in _runs(row, pictures, self.processor)
        ]
        for name in shown[0] if shown else ():
            # Idefics has an axis for the pictures of a row before that of tiles.
            axis = 1 if shown[0]["pixel_values"].ndim == 5 else 0
            whole = np.concatenate([pixels[name] for pixels in shown], axis=axis)
            made[name] = torch.from_numpy(whole).to(device)
        return made

    def inputs(
        self,
        keyed_T: KeyedIds,
        pictures: Pictures,
        device: torch.device | str,
        begin: int = 0,
    ) -> dict[str, torch.Tensor]:
        """The model's arguments for one conversation from its token `begin` on."""
        fresh_1T = keyed_T[None, begin:]
        made = self.arguments(fresh_1T, pictures, device, types_of=keyed_T[None])
        made["input_ids"] = torch.from_numpy(self.model_ids(fresh_1T)).to(device)
        if self.processor.has_grid_positions:
            positions = self.positions(keyed_T, pictures)[:, None, begin:]
            made["position_ids"] = torch.from_numpy(positions).to(device)
        return made


def positions_of(
    keyed_T: KeyedIds, pictures: Pictures, processor: PictureProcessor
) -> npt.NDArray[np.int64]:
    """Positions of a row from its first token, (3, T); three times the same if the model has no
    grid of them.

    Text counts up on all three axes. The token at row y and column x of a picture that begins at p
    has (p, p + y, p + x), and the text after it continues at p + max(rows, columns).
    """
    positions = np.empty((3, len(keyed_T)), np.int64)
    position = place = 0
    runs = _runs(keyed_T, pictures, processor) if processor.has_grid_positions else ()
    for key, start, tokens in runs:
        text = start - place
        positions[:, place:start] = np.arange(position, position + text)
        position += text
        rows, columns = processor.grid_of(pictures[key])
        at = np.arange(tokens)
        grid = np.stack([np.zeros_like(at), at // columns, at % columns])
        positions[:, start : start + tokens] = position + grid
        position += max(rows, columns)
        place = start + tokens
    positions[:, place:] = np.arange(position, position + len(keyed_T) - place)
    return positions


def _runs(
    keyed_T: KeyedIds, pictures: Pictures, processor: PictureProcessor
) -> list[tuple[int, int, int]]:
    """Key, start and number of image tokens of each picture of a row."""
    at = np.flatnonzero(keyed_T < 0)
    runs: list[tuple[int, int, int]] = []
    done = 0
    while done < len(at):
        key = int(keyed_T[at[done]])
        tokens = processor.text_of(pictures[key])[1]
        if (keyed_T[at[done : done + tokens]] != key).any() or done + tokens > len(at):
            raise EngineError("a prompt was cut inside a picture")
        runs.append((key, int(at[done]), tokens))
        done += tokens
    return runs


def vision_of(model: PreTrainedModel, tokenizer: Tokenizer | None) -> Vision | None:
    """What a model sees with, by the processor of its tokenizer; None if it takes no pictures."""
    processor = None if tokenizer is None else tokenizer.pictures
    if isinstance(processor, PictureProcessor):
        return Vision(model, processor)
    return None


_TRIAL_SIZES = ((96, 64), (64, 64))


def check_vision(model: PreTrainedModel, vision: Vision) -> None:
    """Compare a pass over two pictures with one by the processor's own arguments.

    Raises ConfigError if the logits differ: the model then places pictures in a way that is not
    known here, and would learn from others than were shown.
    """
    processor = vision.processor
    pictures = [_noise(number, *size) for number, size in enumerate(_TRIAL_SIZES)]
    whole = processor.whole(f"ab{processor.placeholder}cd{processor.placeholder}ef", pictures)
    keyed = whole["input_ids"][0].astype(np.int32)
    at = np.flatnonzero(keyed == processor.token_id)
    done = 0
    for picture in pictures:
        tokens = processor.text_of(picture)[1]
        keyed[at[done : done + tokens]] = picture.key
        done += tokens
    known = {picture.key: picture for picture in pictures}
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), exact_products(model):
            own = {name: torch.from_numpy(value).to(model.device) for name, value in whole.items()}
            expected = model(**own, use_cache=False).logits
            ours = vision.inputs(keyed, known, model.device)
            gap = distance(model(**ours, use_cache=False).logits, expected)
    finally:
        model.train(was_training)
    if not gap <= tolerance(model):
        raise ConfigError(
            f"model.path: {type(inner_model(model)).__name__} places pictures in a way that ajet"
            f" does not know (its logits differ by {gap:.2g}); use Qwen-VL, Idefics 3, SmolVLM or"
            " Gemma 3, or remove preprocessor_config.json to use the model for text"
        )


def _noise(seed: int, width: int, height: int) -> Picture:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return picture_of(file.getvalue())


def forbid(model: PreTrainedModel, tokens: Sequence[int]) -> None:
    """Let a model never sample some tokens, and its trainer normalize without them."""
    head: Any = inner_model(model).get_output_embeddings()
    head.register_forward_hook(_Forbidden(tuple(tokens)))


class _Forbidden:
    """A hook, which a copy of the model takes along."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self._tokens = tokens

    def __call__(self, _module: nn.Module, _inputs: object, logits: torch.Tensor) -> torch.Tensor:
        tokens = torch.tensor(self._tokens, device=logits.device)
        return logits.index_fill(-1, tokens, lowest_logit(logits.dtype))


def is_of_tower(name: str) -> bool:
    """Whether a parameter, by its name, belongs to the part of a model that sees."""
    return not set(name.split(".")).isdisjoint(_TOWER)


def freeze_tower(model: PreTrainedModel) -> None:
    """Keep the part of a model that sees as it is."""
    for name, parameter in model.named_parameters():
        if is_of_tower(name):
            parameter.requires_grad_(False)
