"""The `verl` backbone: verl on Ray with vLLM, sampling and training in turn on the same GPUs."""

from __future__ import annotations

from ajet_sdk.backbones.verl.backbone import verl
from ajet_sdk.backbones.verl.mapping import Place, to_verl

__all__ = ["Place", "to_verl", "verl"]
