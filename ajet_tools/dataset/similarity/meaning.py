"""Embeds texts with an endpoint or a local model."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ajet_sdk.config.api_keys import api_key
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import ConfigError, EngineError, MissingExtra
from ajet_sdk.tasks.questions import readable
from ajet_tools.dataset.model.open import local_url
from ajet_tools.dataset.similarity.near import Vectors
from ajet_tools.text.model_name import ModelName

BATCH = 64
"""Texts per request."""
_AT_ONCE = 4
_PART = 4 * BATCH


def open_embedder(model: ModelName) -> ModelClient:
    """Opens the client that computes embeddings.

    `model` is at an endpoint, with its key in OPENAI_API_KEY, or the directory or hub name of a
    local model. Raises ConfigError; MissingExtra if a local model lacks its packages.
    """
    if model.base_url is not None:
        key = api_key("OPENAI_API_KEY")
        return ModelClient(model.base_url, model.name, key, concurrency=_AT_ONCE)
    name = model.name
    url = local_url(Path(name)) if Path(name).is_dir() else f"local://{name}"
    return ModelClient(url, name, concurrency=1, transport=_LocalModel(name))


async def embed(
    endpoint: ModelClient,
    texts: Sequence[str],
    *,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Vectors:
    """Returns normalized vectors, and closes the endpoint. Raises as `ModelClient.chat`, and
    EngineError for different lengths."""
    rows: list[npt.NDArray[np.float32]] = []
    try:
        for start in range(0, len(texts), _PART):
            if on_progress:
                on_progress("embedding", start, len(texts))
            part = [readable(text) for text in texts[start : start + _PART]]
            batches = [part[offset : offset + BATCH] for offset in range(0, len(part), BATCH)]
            for encoded in await asyncio.gather(*map(endpoint.embed, batches)):
                rows += [np.frombuffer(base64.b64decode(text), np.float32) for text in encoded]
    finally:
        await endpoint.aclose()
    if len({len(row) for row in rows}) > 1:
        raise EngineError(f"{endpoint.base_url} returned vectors of different lengths")
    vectors = np.stack(rows) if rows else np.empty((0, 1), np.float32)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(norms > 0, norms, 1), np.float32)


class _LocalModel:
    """Averages a transformer's last hidden states over the tokens of a text."""

    def __init__(self, model: str) -> None:
        try:
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise MissingExtra("transformers", "local") from error
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
            network, report = AutoModel.from_pretrained(
                model, output_loading_info=True, trust_remote_code=False
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"embeddings of {model}: no model can be loaded there: {error}"
            ) from error
        # the pooler isn't used, and many embedding models are saved without one
        missing = sorted(name for name in report["missing_keys"] if not name.startswith("pooler."))
        if missing:
            raise ConfigError(
                f"embeddings of {model}: the checkpoint lacks {len(missing)} tensors, such as"
                f" {missing[0]}"
            )
        self._network = network.eval()
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token

    async def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        vectors = await asyncio.to_thread(self._means, body["input"])
        return {
            "data": [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)]
        }

    async def aclose(self) -> None:
        return

    def _means(self, texts: Sequence[str]) -> list[list[float]]:
        import torch

        tokens = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=512, return_tensors="pt"
        )
        with torch.inference_mode():
            hidden = self._network(**tokens).last_hidden_state.float()
        mask = tokens["attention_mask"].unsqueeze(-1)
        means: list[list[float]] = ((hidden * mask).sum(1) / mask.sum(1).clamp(min=1)).tolist()
        return means
