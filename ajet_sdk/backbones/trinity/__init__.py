"""The `trinity` backbone: Trinity-RFT on Ray, with vLLM and verl on GPUs, or with ajet's own learner on a CPU."""

from __future__ import annotations

from ajet_sdk.backbones.trinity.backbone import trinity
from ajet_sdk.backbones.trinity.mapping import Place, to_trinity

__all__ = ["Place", "to_trinity", "trinity"]
