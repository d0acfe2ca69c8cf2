"""Texts as vectors, by an OpenAI-compatible endpoint or a local model, and which of them mean about the same."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import ConfigError, EngineError, EngineUnavailable, MissingExtra
from ajet_tools.dataset.likeness import MARKED, marks
from ajet_tools.dataset.pairs import Pair

__all__ = ["close_pairs", "embed"]

Vectors = npt.NDArray[np.float32]
_BATCH = 64
_TRIES = 6
_BLOCK = 2048


def embed(
    texts: Sequence[str], where: str, model: str, *, told: Callable[[str, int, int], None] | None = None
) -> Vectors:
    """A vector of length 1 for each text.

    Args:
        where: an endpoint's URL (`http://127.0.0.1:8000/v1`; its key in OPENAI_API_KEY), or `local`.
        model: the model's name there, or the directory or hub name of a local one.

    Raises ConfigError, EngineError; MissingExtra where a local model needs what is not installed.
    """
    if where != "local" and not where.startswith(("http://", "https://")):
        raise ConfigError(f"--embeddings takes a URL and a model, or `local` and a directory (got {where!r})")
    batches = [list(texts[start : start + _BATCH]) for start in range(0, len(texts), _BATCH)]
    asked = _local(model) if where == "local" else _endpoint(where, model)
    made = []
    for number, batch in enumerate(batches):
        if told:
            told("embedding", number * _BATCH, len(texts))
        made.append(asked(batch))
    if len({vectors.shape[1] for vectors in made}) > 1:
        raise EngineError(f"{where} gave vectors of different lengths; one model gives one length")
    vectors = np.concatenate(made) if made else np.empty((0, 1), np.float32)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(norms > 0, norms, 1), np.float32)


def _endpoint(url: str, model: str) -> Callable[[list[str]], Vectors]:
    import httpx

    key = os.environ.get("OPENAI_API_KEY")
    client = httpx.Client(timeout=120, headers={"authorization": f"Bearer {key}"} if key else {})
    route = f"{url.rstrip('/')}/embeddings"

    def ask(batch: list[str]) -> Vectors:
        # some endpoints refuse an empty text
        answer = _posted(client, route, {"model": model, "input": [text or " " for text in batch]})
        try:
            items = sorted(answer["data"], key=lambda item: item["index"])
            vectors = np.array([item["embedding"] for item in items], np.float32)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{route} answered no embeddings: {str(answer)[:120]}") from error
        if len(vectors) != len(batch) or vectors.ndim != 2:
            raise EngineError(f"{route} answered {len(vectors)} embeddings for {len(batch)} texts")
        return vectors

    return ask


def _posted(client: Any, route: str, body: dict[str, Any]) -> Any:
    """The answer, after up to six tries where the endpoint is busy or out of reach; a refusal is final."""
    import httpx

    said, status = "", None
    for attempt in range(_TRIES):
        wait = 0.5 * 2**attempt
        try:
            response = client.post(route, json=body)
        except httpx.TransportError as error:
            said = f"{type(error).__name__}: {error}"
        else:
            if response.is_success:
                try:
                    return response.json()
                except ValueError as error:
                    raise EngineError(f"{route} answered no JSON: {response.text[:120]!r}") from error
            status, said = response.status_code, f"HTTP {response.status_code}: {response.text[:160]}"
            if status != 429 and status < 500:
                raise EngineError(f"{route} refused: {said}. Check the model's name and OPENAI_API_KEY")
            after = response.headers.get("retry-after", "")
            wait = float(after) if after.replace(".", "", 1).isdigit() else wait
        if attempt < _TRIES - 1:
            time.sleep(min(wait, 60))
    raise EngineUnavailable(f"{route} did not answer in {_TRIES} tries; the last: {said}", status=status)


def _local(model: str) -> Callable[[list[str]], Vectors]:
    """The mean of a transformer's last hidden states, over the tokens of the text."""
    try:
        import torch
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise MissingExtra("transformers", "local") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        network = AutoModel.from_pretrained(model).eval()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--embeddings local {model}: no model can be read there: {error}") from error
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def ask(batch: list[str]) -> Vectors:
        tokens = tokenizer(
            [t or " " for t in batch], padding=True, truncation=True, max_length=512, return_tensors="pt"
        )
        with torch.inference_mode():
            hidden = network(**tokens).last_hidden_state.float()
        mask = tokens["attention_mask"].unsqueeze(-1)
        return np.asarray(((hidden * mask).sum(1) / mask.sum(1).clamp(min=1)).numpy(), np.float32)

    return ask


def close_pairs(vectors: Vectors, texts: Sequence[str], least: float, *, numbers: bool = True) -> Iterator[Pair]:
    """All pairs with a cosine of at least that; short texts in normal form with different numbers stay apart.

    Every pair is compared, a block of the matrix at a time: 100,000 rows are 5 billion products of vectors.
    """
    apart = [marks(text) if numbers and len(text) < MARKED else None for text in texts]
    for start in range(0, len(vectors), _BLOCK):
        block = vectors[start : start + _BLOCK]
        for other in range(start, len(vectors), _BLOCK):
            cosine = block @ vectors[other : other + _BLOCK].T
            for a, b in np.argwhere(cosine >= least - 1e-6).tolist():
                one, two = start + a, other + b
                if one < two and (apart[one] is None or apart[two] is None or apart[one] == apart[two]):
                    yield Pair(one, two, min(1.0, float(cosine[a, b])))
