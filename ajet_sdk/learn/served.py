"""The weights in training as a server of vLLM's takes them: all of them, merged ones, or an adapter."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from ajet_sdk.learn import checkpoint

__all__ = ["Served"]

_EMBEDDING, _REST = "output_embedding.safetensors", "model-00001-of-00001.safetensors"
_LARGEST_RANK = 512
"""Of an adapter that vLLM serves."""


@dataclass(frozen=True)
class Served:
    """How a model in training is given to its server."""

    model: Any
    tokenizer: Any
    """Of transformers."""

    @property
    def lora_rank(self) -> int | None:
        """The rank of the adapter where it is served as one; None where whole weights are."""
        lora = getattr(self.model, "active_peft_config", None) if self._lora else None
        if lora is None or lora.r > _LARGEST_RANK:
            return None
        odd = (lora.use_dora, lora.bias != "none", lora.modules_to_save, lora.rank_pattern, lora.alpha_pattern)
        return None if any(odd) else int(lora.r)

    @property
    def differs(self) -> bool:
        """Whether what is served first is not what lies at `model.path`."""
        return self._lora or self._tied

    @property
    def _lora(self) -> bool:
        return hasattr(self.model, "merge_adapter")

    @property
    def _inner(self) -> Any:
        return self.model.get_base_model() if self._lora else self.model

    @property
    def _tied(self) -> bool:
        inner = self._inner
        head = inner.get_output_embeddings()
        return head is not None and head.weight is inner.get_input_embeddings().weight

    def write(self, place: Path) -> None:
        """Put the weights as they are now into a new directory."""
        if self.lora_rank is not None:
            checkpoint.save_model(self.model, place)
            return
        if self._lora:
            checkpoint.export(place, self.model, self.tokenizer)
        else:
            checkpoint.save_model(self.model, place)
        if self._tied:
            self._untie(place)

    def _untie(self, place: Path) -> None:
        """Write the output embedding beside the input embedding that it is tied to.

        On a CPU vLLM packs it apart, and reloads only what a checkpoint holds: a tied one would keep its old weights.
        """
        head = self._inner.get_output_embeddings()
        name = next(name for name, module in self._inner.named_modules() if module is head) + ".weight"
        weight = head.weight.detach().contiguous().cpu()
        save_file({name: weight}, place / _EMBEDDING, metadata={"format": "pt"})
        index = place / "model.safetensors.index.json"
        if not index.is_file():
            (place / "model.safetensors").rename(place / _REST)
            with safe_open(place / _REST, framework="pt") as file:
                index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(file.keys(), _REST)}))
        known = json.loads(index.read_text())
        known["weight_map"][name] = _EMBEDDING
        index.write_text(json.dumps(known))
        config = place / "config.json"
        shape = json.loads(config.read_text())
        for section in (shape, shape.get("text_config")):
            if isinstance(section, dict):
                section["tie_word_embeddings"] = False
        config.write_text(json.dumps(shape, indent=1))
