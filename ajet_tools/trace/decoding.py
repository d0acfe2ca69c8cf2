"""A run's tokenizer, where it is at hand: token ids as text, and the exact bytes and visible text of each id.

The config that a run recorded, as it was and checked again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ajet_sdk.config.config import Config, load_config
from ajet_sdk.config.model_source import made_for_seed
from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import visible
from ajet_sdk.tokens.huggingface import HFTokenizer, byte_alphabet, exact_bytes, is_byte_level
from ajet_sdk.tokens.template import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer


@dataclass(frozen=True)
class Vocabulary:
    """The text of each id of a tokenizer."""

    token_bytes: Callable[[int], bytes]
    """The exact bytes of an id; none for an id beyond the vocabulary (models round theirs up)."""
    is_special: Callable[[int], bool]
    source: str
    """Where the tokenizer was found."""
    template: ChatTemplate | None = None
    """Its chat template, where one lies beside it."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")


def vocabulary(
    reader: TraceReader, run_id: str, tokenizer: Path | None = None, trace: Path | None = None
) -> Vocabulary:
    """The text of each token id of a run.

    Args:
        tokenizer: a directory with a tokenizer, or its `tokenizer.json`; None: what the run's recorded config names.
        trace: where the trace lies. The run's checkpoint beside it comes first, then the places of `model_places`.

    Nothing is downloaded; of a model named on the Hub, the local cache is asked. Raises ConfigError, which says where
    was looked, where the tokenizer is not at hand.
    """
    if tokenizer is not None:
        return _load(tokenizer)
    job = recorded_config(reader, run_id).get("ajet")
    model = _section(job, "model")
    if model.get("scripted"):
        return _bytes()
    path = model.get("path")
    checkpoint = [] if trace is None else [_folder(trace) / "checkpoint" / run_id / "model"]
    for candidate in (*checkpoint, *model_places(job, trace)):
        if candidate.is_dir():
            return _load(candidate)
    cached = _cached(path) if isinstance(path, str) and path else None
    if cached is not None:
        return _load(cached)
    raise ConfigError(
        f"the run's model.path {path} is not a directory here" if path else "the run's config names no model.path"
    )


def known_vocabulary(
    reader: TraceReader, run_id: str, tokenizer: Path | None = None, trace: Path | None = None
) -> tuple[Vocabulary | None, str]:
    """The `vocabulary`, or None and why the tokenizer is not at hand."""
    try:
        return vocabulary(reader, run_id, tokenizer, trace), ""
    except ConfigError as error:
        return None, str(error)


def model_places(job: object, trace: Path | None) -> Iterator[Path]:
    """Where the model that a recorded config (its `ajet`) names may lie, the likeliest first.

    The trace does not say where the config file stood, so a relative `model.path` is looked for from here, then from
    the trace's directory and above it. What a recipe made lies in the directory of the run's seed: the link at
    `model.path` is that of the last run, which may have had another seed.
    """
    model, common = (_section(job, name) for name in ("model", "trainer_common"))
    path, seed = model.get("path"), common.get("seed")
    if not isinstance(path, str) or not path:
        return
    above = [] if trace is None else [_folder(trace), *list(_folder(trace).parents)[:3]]
    for place in (Path(path).expanduser(), *(folder / path for folder in above)):
        if model.get("recipe") and isinstance(seed, int):
            made = made_for_seed(place, seed)
            place = made if made.is_dir() or place.is_symlink() else place
        yield place


def _section(job: object, name: str) -> Mapping[str, object]:
    section = job.get(name) if isinstance(job, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def _folder(trace: Path) -> Path:
    return (trace if trace.is_dir() else trace.parent).resolve()


def _cached(name: str) -> Path | None:
    """The directory of a Hub model in the local cache."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        cached = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:  # a path, not a name
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _bytes() -> Vocabulary:
    scripted = ByteTokenizer()

    def token_bytes(token_id: int) -> bytes:
        return scripted.token_bytes(token_id) if 0 <= token_id < scripted.vocab_size else b""

    return Vocabulary(token_bytes, scripted.is_special, "the scripted engine's bytes", ChatTemplate.known(scripted))


def _load(path: Path) -> Vocabulary:
    """The tokenizer of a directory, or of one `tokenizer.json`."""
    path = path.expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return _read(file, file.stat().st_mtime_ns)
    if not path.is_dir():
        raise ConfigError(f"there is no tokenizer in {path}")
    try:
        slow = HFTokenizer(path)
    except ImportError as error:
        raise ConfigError(f"the tokenizer in {path} needs the extra `local` ({error})") from error
    return Vocabulary(slow.token_bytes, slow.is_special, str(path), ChatTemplate.known(slow))


@lru_cache(maxsize=4)
def _read(file: Path, changed: int) -> Vocabulary:
    """A `tokenizer.json`, read without transformers and torch, which take seconds to load."""
    try:
        from tokenizers import Tokenizer as FastTokenizer
    except ImportError as error:
        raise ConfigError(f"the tokenizer {file} needs the extra `local` ({error})") from error
    try:
        backend = FastTokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception at a file that is none of its own
        raise ConfigError(f"{file} cannot be loaded as a tokenizer: {error}") from error
    added = backend.get_added_tokens_decoder()
    special = frozenset(i for i, token in added.items() if token.special)
    contents = {i: str(token.content).encode() for i, token in added.items()}
    token_bytes = _look_up(backend, contents, byte_alphabet() if is_byte_level(file.read_bytes()) else None)
    return Vocabulary(token_bytes, special.__contains__, str(file), _template_beside(file))


def _template_beside(file: Path) -> ChatTemplate | None:
    """The chat template in the files that transformers writes beside a `tokenizer.json`."""
    settings, template_file = file.with_name("tokenizer_config.json"), file.with_name("chat_template.jinja")
    try:
        config: dict[str, object] = json.loads(settings.read_bytes()) if settings.is_file() else {}
        source = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
        if not isinstance(source, str):
            return None
        tokens = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
        return ChatTemplate.of(source, {k: v for k, v in tokens.items() if isinstance(v, str)})
    except (ConfigError, ValueError):
        return None


def _look_up(
    backend: FastTokenizer, known: dict[int, bytes], alphabet: Mapping[str, int] | None
) -> Callable[[int], bytes]:
    def token_bytes(token_id: int) -> bytes:
        content = known.get(token_id)
        if content is None:
            token = backend.id_to_token(token_id) if token_id >= 0 else None
            content = known[token_id] = b"" if token is None else exact_bytes(token, alphabet)
        return content

    return token_bytes


@dataclass(frozen=True)
class Spelled:
    """The text of a token sequence, and which part of it is whose. T tokens."""

    pieces: tuple[bytes, ...]
    """The exact bytes of each token."""
    text: str
    """All of it; a byte that is no UTF-8 stands as the lone surrogate U+DC80 to U+DCFF (PEP 383)."""
    starts: npt.NDArray[np.int64]
    """T + 1 places in `text`: token i's is text[starts[i]:starts[i + 1]]. A character stands where its first byte
    does; a token that only goes on with one has no text of its own."""

    def __len__(self) -> int:
        return len(self.pieces)

    def of(self, token: int) -> str:
        return self.text[self.starts[token] : self.starts[token + 1]]

    def token_at(self, place: int) -> int:
        """The token in which the character at a place of the text stands."""
        return int(np.searchsorted(self.starts, place, side="right")) - 1

    def holder(self, token: int) -> int:
        """The token that shows the character which this one goes on with; itself where it has text of its own."""
        if self.pieces[token] and self.starts[token] == self.starts[token + 1]:
            return self.token_at(int(self.starts[token]) - 1)
        return token


def spell(pieces: Sequence[bytes]) -> Spelled:
    """The bytes of tokens as text, each character given to the token in which it begins."""
    joined = b"".join(pieces)
    text = joined.decode(errors="surrogateescape")
    ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))
    if len(text) == len(joined):  # one byte a character
        return Spelled(tuple(pieces), text, np.concatenate(([0], ends)))
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    stray = (codes >= 0xDC80) & (codes <= 0xDCFF)
    sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    first_bytes = np.cumsum(np.where(stray, 1, sizes)) - np.where(stray, 1, sizes)
    return Spelled(tuple(pieces), text, np.concatenate(([0], np.searchsorted(first_bytes, ends))))


def token_text(ids: Sequence[int], known: Vocabulary) -> Spelled:
    """The exact bytes and the text of each id."""
    return spell([known.token_bytes(int(i)) for i in ids])


def shown(text: str) -> str:
    """A token's text as a terminal can show it without moving: strays as \\xNN, joiners and marks in the open."""
    if text.isascii() and text.isprintable():
        return text
    open_text = "".join(map(_in_the_open, text))
    return visible(open_text)


def _in_the_open(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return f"\\u{code:04x}" if character in "\u200c\u200d\ufe0e\ufe0f" else character


def recorded_config(reader: TraceReader, run_id: str) -> dict[str, object]:
    """The document as it stands in `runs`; empty where the run recorded none or is not in this trace."""
    rows = reader.query("SELECT config FROM runs WHERE run_id = ?", [run_id]).to_pylist()
    document = json.loads(rows[0]["config"] or "{}") if rows else {}
    return document if isinstance(document, dict) else {}


def run_config(reader: TraceReader, run_id: str) -> Config:
    """The recorded config, checked; the defaults where there is none (an agent that was only observed).

    Raises ConfigError where this version takes it no longer.
    """
    document = recorded_config(reader, run_id)
    file = document.pop("config_file", None)
    if not isinstance(document.get("ajet"), Mapping):
        return load_config(values={"ajet": {"backbone": "debug"}})
    try:
        return load_config(values=document, beside=Path(file) if isinstance(file, str) else None)
    except ConfigError as error:
        raise ConfigError(f"the config that run {run_id} recorded is not valid in this version:\n{error}") from error
