"""The data set that verl's loader is given: places in a batch, without a task in them.

Which tasks are run is decided by the step and the seed alone, as in `local`; verl's loader only counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

__all__ = ["Slots"]


class Slots(Dataset):  # type: ignore[misc]
    """As many rows as `data_files` says: `data.train_files` and `data.val_files` are numbers here."""

    def __init__(self, data_files: int, **_: Any) -> None:
        self._size = int(data_files)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._size:
            raise IndexError(index)
        return {"slot": torch.tensor([index]), "index": index, "data_source": "ajet"}
