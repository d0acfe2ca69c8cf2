"""Stored conversations through a model's chat template: how well they would merge, before the model is trained.

The merge ratio is that of a run: tokens of every call's prompt and reply, over tokens of the timelines they fold into.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ajet_sdk.engines.retokenize import Refusal, retokenise
from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.errors import ConfigError, MissingExtra
from ajet_sdk.protocols import Tokenizer
from ajet_sdk.reporting.output import visible
from ajet_sdk.samples.timelines import Merged, merge
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.tokens.template import ChatTemplate
from ajet_sdk.types import Call, Episode, Split

_BEFORE, _AFTER = 8, 24
"""Tokens shown around the place where two texts part."""


@dataclass(frozen=True)
class Example:
    """Where one call did not go on from another: the text of both there."""

    episode_id: str
    call_id: str
    parent_call_id: str | None
    at_token: int
    before: str
    """The earlier call's text."""
    after: str
    """The text of the later call's prompt."""


@dataclass
class SplitKind:
    """The splits of one cause."""

    cause: str
    hint: str
    splits: int = 0
    extra_tokens: int = 0
    example: Example | None = None


@dataclass
class Merging:
    """How calls fold into timelines."""

    calls: int = 0
    timelines: int = 0
    apart: int = 0
    """Tokens of prompts and replies, were each call a sequence of its own."""
    held: int = 0
    """Tokens of the timelines."""

    @property
    def ratio(self) -> float | None:
        return self.apart / self.held if self.held else None

    def add(self, calls: Iterable[Call], merged: Merged) -> None:
        for call in calls:
            if call.prompt_ids is not None and call.output_ids is not None:
                self.calls += 1
                self.apart += len(call.prompt_ids) + len(call.output_ids)
        self.timelines += len(merged.timelines)
        self.held += sum(len(timeline.token_ids) for timeline in merged.timelines)


@dataclass
class Preflight:
    """The result of rendering the traces with a template."""

    limit: int | None
    """The model's longest sequence in tokens; None: not said."""
    episodes: int = 0
    own_ids: int = 0
    """Calls whose recorded output ids were used; the others' replies were encoded from their text."""
    foreign: int = 0
    """Calls that were asked in another dialect, or had no reply, and are left out."""
    predicted: Merging = field(default_factory=Merging)
    recorded: Merging = field(default_factory=Merging)
    """By the ids of the run, where it has them."""
    kinds: dict[str, SplitKind] = field(default_factory=dict)
    refused: dict[str, list[Refusal]] = field(default_factory=dict)
    """By the template's message."""
    prompts: list[int] = field(default_factory=list)
    """Tokens of each call's prompt."""
    wholes: list[int] = field(default_factory=list)
    """Tokens of each call's prompt and reply."""

    @property
    def extra_tokens(self) -> int:
        """Tokens that are trained through once more because of splits."""
        return sum(kind.extra_tokens for kind in self.kinds.values())

    @property
    def by_cost(self) -> list[SplitKind]:
        """The kinds of splits, the most expensive first."""
        return sorted(self.kinds.values(), key=lambda kind: (-kind.extra_tokens, kind.cause))

    def too_long(self, limit: int | None = None) -> tuple[int, int]:
        """How many calls' prompts fill the model's length, and how many do with their reply."""
        most = limit or self.limit
        if most is None:
            return 0, 0
        return sum(n >= most for n in self.prompts), sum(n > most for n in self.wholes)

    def quantiles(self) -> Mapping[str, int]:
        """Median, 95th percentile and maximum of the prompts' lengths; empty where there is none."""
        if not self.prompts:
            return {}
        return {
            name: int(np.quantile(self.prompts, share, method="higher"))
            for name, share in (("median", 0.5), ("p95", 0.95), ("max", 1.0))
        }


def preflight(
    chunks: Iterable[Sequence[Episode]], loaded: LoadedTokenizer, progress: Callable[[int], None] = lambda done: None
) -> Preflight:
    """Put episodes, a few at a time, through a tokenizer and its template.

    Raises ConfigError where the tokenizer has no chat template.
    """
    result = Preflight(loaded.limit)
    for chunk in chunks:
        for episode in chunk:
            _add(result, episode, loaded.tokenizer)
            progress(1)
    return result


def _add(result: Preflight, episode: Episode, tokenizer: Tokenizer) -> None:
    retokenised = retokenise(episode.calls, tokenizer)
    merged = merge(retokenised.calls, tokenizer.decode, ChatTemplate.known(tokenizer))
    rollout = [call for call in episode.calls if call.phase == "rollout"]
    result.episodes += 1
    result.own_ids += retokenised.own_ids
    result.foreign += len(retokenised.foreign)
    result.predicted.add(retokenised.calls, merged)
    result.recorded.add(rollout, merge(rollout))
    for call in retokenised.calls:
        prompt, output = (0 if ids is None else len(ids) for ids in (call.prompt_ids, call.output_ids))
        result.prompts.append(prompt)
        result.wholes.append(prompt + output)
    for refusal in retokenised.refused:
        result.refused.setdefault(refusal.why, []).append(refusal)
    calls = {call.call_id: call for call in retokenised.calls}
    for split in merged.splits:
        kind = result.kinds.setdefault(split.cause, SplitKind(split.cause, split.hint))
        kind.splits += 1
        kind.extra_tokens += split.extra_tokens
        kind.example = kind.example or _example(episode.episode_id, split, calls, tokenizer)


def _example(episode_id: str, split: Split, calls: Mapping[str, Call], tokenizer: Tokenizer) -> Example:
    parent = calls.get(split.parent_call_id or "")
    start, end = max(0, split.at_token - _BEFORE), split.at_token + _AFTER
    earlier = [] if parent is None else [*_list(parent.prompt_ids), *_list(parent.output_ids)]
    later = _list(calls[split.call_id].prompt_ids)
    before, after = (visible(tokenizer.decode(ids[start:end])) for ids in (earlier, later))
    return Example(episode_id, split.call_id, split.parent_call_id, split.at_token, before, after)


def _list(ids: object) -> list[int]:
    return [] if ids is None else list(np.asarray(ids).tolist())


_LARGEST_LIMIT = 1 << 30


"""A larger `model_max_length` means that the limit is unknown."""


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer, and the longest sequence its model takes (None: not said)."""

    tokenizer: Tokenizer
    limit: int | None


def load_tokenizer(model: str) -> LoadedTokenizer:
    """The tokenizer of a directory, or of a hub name that is in the cache; nothing is downloaded.

    `scripted` is the tokenizer of scripted engines. Raises ConfigError where none can be loaded, MissingExtra.
    """
    if model == "scripted":
        return LoadedTokenizer(ByteTokenizer(), None)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = _cached(model)
    try:
        tokenizer = HFTokenizer(folder)
    except ConfigError:
        raise
    except ImportError as error:
        raise MissingExtra(error.name or "transformers", "local") from error
    except Exception as error:  # the boundary: transformers raises what its file formats raise
        raise ConfigError(f"no tokenizer can be loaded from {model}: {type(error).__name__}: {error}") from error
    return LoadedTokenizer(tokenizer, _limit(folder, tokenizer))


def _cached(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise MissingExtra("huggingface_hub", "local") from error
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, FileNotFoundError, OSError) as error:
        raise ConfigError(
            f"{name} is neither a local directory nor a model in the Hugging Face cache, and nothing is "
            "downloaded; name a directory with tokenizer.json, or download the model first (hf download NAME)"
        ) from error


def _limit(folder: Path, tokenizer: Any) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    section = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    limit = section.get("max_position_embeddings") or getattr(tokenizer.hf, "model_max_length", None)
    return int(limit) if isinstance(limit, int | float) and 0 < limit < _LARGEST_LIMIT else None
