"""Finds the tokenizer of a run and decodes token ids to text and exact bytes; reads the recorded
config."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

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


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer, by id."""

    token_bytes: Callable[[int], bytes]
    """Exact bytes of an id; empty beyond the vocabulary, whose size models round up."""
    is_special: Callable[[int], bool]
    source: str
    """Location of the tokenizer."""
    template: ChatTemplate | None = None
    """Chat template stored with the tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, including special tokens; invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")


def vocabulary(
    reader: TraceReader, run_id: str, tokenizer: Path | None = None, trace: Path | None = None
) -> Vocabulary:
    """Load the tokenizer of a run.

    Args:
        tokenizer: a directory with a tokenizer, or its `tokenizer.json`; None: the model of the run's recorded config.
        trace: path of the trace, to look for the run's checkpoint next to it, then for `model_places`.

    Nothing is downloaded; a Hub model must be in the local cache. Raises ConfigError if there is no
    tokenizer.
    """
    if tokenizer is not None:
        return _load(tokenizer)
    job = recorded_config(reader, run_id).get("ajet")
    model = _section(job, "model")
    if model.get("scripted"):
        scripted = ByteTokenizer()

        def token_bytes(token_id: int) -> bytes:
            if 0 <= token_id < scripted.vocab_size:
                return scripted.token_bytes(token_id)
            return b""

        source = "the scripted engine's bytes"
        return Vocabulary(token_bytes, scripted.is_special, source, ChatTemplate.known(scripted))
    path = model.get("path")
    checkpoint = []
    if trace is not None:
        checkpoint = [_folder(trace) / "checkpoint" / run_id / "model"]
    for candidate in (*checkpoint, *model_places(job, trace)):
        if candidate.is_dir():
            return _load(candidate)
    cached = _cached(path) if isinstance(path, str) and path else None
    if cached is not None:
        return _load(cached)
    raise ConfigError(
        f"the run's model.path {path} is not a directory here"
        if path
        else "the run's config names no model.path"
    )


def known_vocabulary(
    reader: TraceReader, run_id: str, tokenizer: Path | None = None, trace: Path | None = None
) -> tuple[Vocabulary | None, str]:
    """Load the tokenizer of a run, or return None with the reason of the failure."""
    try:
        return vocabulary(reader, run_id, tokenizer, trace), ""
    except ConfigError as error:
        return None, str(error)


def model_places(job: object, trace: Path | None) -> Iterator[Path]:
    """Yield possible paths of the model in a recorded config (its `ajet` section), most likely
    first.

    A trace does not record the directory of the config file, so a relative `model.path` is resolved
    from the working directory, then from the directory of the trace and its parents. A model made
    by a recipe is in the directory of the run's seed: the link at `model.path` belongs to the last
    run, which may have had another seed.
    """
    model, common = (_section(job, name) for name in ("model", "trainer_common"))
    path = model.get("path")
    seed = common.get("seed")
    if not isinstance(path, str) or not path:
        return
    above = []
    if trace is not None:
        above = [_folder(trace), *list(_folder(trace).parents)[:3]]
    for candidate in (Path(path).expanduser(), *(folder / path for folder in above)):
        if model.get("recipe") and isinstance(seed, int):
            of_seed = made_for_seed(candidate, seed)
            if of_seed.is_dir() or candidate.is_symlink():
                candidate = of_seed
        yield candidate


def _section(job: object, name: str) -> Mapping[str, object]:
    section = job.get(name) if isinstance(job, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def _folder(trace: Path) -> Path:
    return (trace if trace.is_dir() else trace.parent).resolve()


def _cached(name: str) -> Path | None:
    """Return the directory of a Hub model in the local cache."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        cached = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:  # a path, not a name
        return None
    if isinstance(cached, str):
        return Path(cached).parent
    return None


def _load(path: Path) -> Vocabulary:
    """Load the tokenizer of a directory, or a `tokenizer.json`."""
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
    """Load a `tokenizer.json` without transformers and torch, which take seconds to import."""
    try:
        from tokenizers import Tokenizer as FastTokenizer
    except ImportError as error:
        raise ConfigError(f"the tokenizer {file} needs the extra `local` ({error})") from error
    try:
        backend = FastTokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception for an invalid file
        raise ConfigError(f"{file} cannot be loaded as a tokenizer: {error}") from error
    added = backend.get_added_tokens_decoder()
    special = frozenset(i for i, token in added.items() if token.special)
    contents = {i: str(token.content).encode() for i, token in added.items()}
    alphabet = None
    if is_byte_level(file.read_bytes()):
        alphabet = byte_alphabet()

    def token_bytes(token_id: int) -> bytes:
        content = contents.get(token_id)
        if content is None:
            token = None
            if token_id >= 0:
                token = backend.id_to_token(token_id)
            content = contents[token_id] = b"" if token is None else exact_bytes(token, alphabet)
        return content

    return Vocabulary(token_bytes, special.__contains__, str(file), _template_beside(file))


def _template_beside(file: Path) -> ChatTemplate | None:
    """Read the chat template from the files that transformers saves with a `tokenizer.json`."""
    settings = file.with_name("tokenizer_config.json")
    template_file = file.with_name("chat_template.jinja")
    try:
        config: dict[str, object] = json.loads(settings.read_bytes()) if settings.is_file() else {}
        source: object
        if template_file.is_file():
            source = template_file.read_text(encoding="utf-8")
        else:
            source = config.get("chat_template")
        if not isinstance(source, str):
            return None
        tokens = {
            k: v.get("content") if isinstance(v, dict) else v
            for k, v in config.items()
            if k.endswith("_token")
        }
        return ChatTemplate.of(source, {k: v for k, v in tokens.items() if isinstance(v, str)})
    except (ConfigError, ValueError):
        return None


@dataclass(frozen=True)
class Spelled:
    """The text of T tokens, with the part of each token."""

    pieces: tuple[bytes, ...]
    """Exact bytes of each token."""
    text: str
    """The whole text; invalid UTF-8 is decoded to lone surrogates U+DC80 to U+DCFF (PEP 383)."""
    starts: npt.NDArray[np.int64]
    """T + 1 offsets: text[starts[i]:starts[i + 1]] belongs to token i. A character belongs to the
    token of its first byte; a token with only later bytes of a character has no text."""

    def __len__(self) -> int:
        return len(self.pieces)

    def of(self, token: int) -> str:
        return self.text[self.starts[token] : self.starts[token + 1]]

    def token_at(self, offset: int) -> int:
        """Return the token of a character."""
        return int(np.searchsorted(self.starts, offset, side="right")) - 1

    def holder(self, token: int) -> int:
        """Return the token with the character that this token continues, or itself if it has
        text."""
        if self.pieces[token] and self.starts[token] == self.starts[token + 1]:
            return self.token_at(int(self.starts[token]) - 1)
        return token


def spell(pieces: Sequence[bytes]) -> Spelled:
    """Decode the bytes of tokens; each character belongs to the token of its first byte."""
    joined = b"".join(pieces)
    text = joined.decode(errors="surrogateescape")
    ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))
    if len(text) == len(joined):  # single-byte characters
        return Spelled(tuple(pieces), text, np.concatenate(([0], ends)))
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    stray = (codes >= 0xDC80) & (codes <= 0xDCFF)
    sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    first_bytes = np.cumsum(np.where(stray, 1, sizes)) - np.where(stray, 1, sizes)
    return Spelled(tuple(pieces), text, np.concatenate(([0], np.searchsorted(first_bytes, ends))))


def token_text(ids: Sequence[int], known: Vocabulary) -> Spelled:
    """Decode ids to bytes and text."""
    return spell([known.token_bytes(int(i)) for i in ids])


_ESCAPES = {code: f"\\x{code - 0xDC00:02x}" for code in range(0xDC80, 0xDD00)}
_ESCAPES |= {code: f"\\u{code:04x}" for code in (0x200C, 0x200D, 0xFE0E, 0xFE0F)}


def shown(text: str) -> str:
    """Escape a token's text for a terminal: invalid bytes as \\xNN, and characters that join or
    restyle others."""
    if text.isascii() and text.isprintable():
        return text
    return visible(text.translate(_ESCAPES))


def recorded_config(reader: TraceReader, run_id: str) -> dict[str, object]:
    """Return the config recorded by a run; empty for none or an unknown run."""
    rows = reader.query("SELECT config FROM runs WHERE run_id = ?", [run_id]).to_pylist()
    document = json.loads(rows[0]["config"] or "{}") if rows else {}
    return document if isinstance(document, dict) else {}


def run_config(reader: TraceReader, run_id: str) -> Config:
    """Validate the recorded config; a run without one (of an agent that was only observed) has the
    defaults.

    Raises ConfigError if the config is not valid in this version.
    """
    document = recorded_config(reader, run_id)
    file = document.pop("config_file", None)
    if not isinstance(document.get("ajet"), Mapping):
        return load_config(values={"ajet": {"backbone": "debug"}})
    try:
        return load_config(values=document, beside=Path(file) if isinstance(file, str) else None)
    except ConfigError as error:
        raise ConfigError(
            f"the config that run {run_id} recorded is not valid in this version:\n{error}"
        ) from error
