"""A copy of a model to sample from while the model itself is being trained."""

from __future__ import annotations

import copy
from typing import Any

import torch

__all__ = ["Twin"]


class Twin:
    """A second model over the frozen weights of the first, with trained weights of its own until `catch_up`.

    Two threads may not use one module at once: training mode, hooks on its layers and a switched-off adapter are
    seen by both. A model of which all weights are trained is held twice; of a LoRA model only the adapter is.
    """

    def __init__(self, model: Any) -> None:
        frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
        self.module: Any = copy.deepcopy(model, dict(frozen)).eval().requires_grad_(False)
        own = dict(self.module.named_parameters())
        self._pairs = [(own[name], p) for name, p in model.named_parameters() if p.requires_grad]

    def catch_up(self) -> None:
        """Take over the model's weights as they are now; nobody may use this one, or change that one, meanwhile."""
        with torch.no_grad():
            for own, trained in self._pairs:
                own.copy_(trained)
