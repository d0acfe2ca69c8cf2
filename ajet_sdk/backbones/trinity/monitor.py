"""Trinity's monitor interface: the metrics of its explorer and trainer go to the driver by the `Post`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity.utils.monitor import Monitor

from ajet_sdk.backbones.post import post_of

__all__ = ["ToTheDriver"]


class ToTheDriver(Monitor):  # type: ignore[misc]
    """Sends the metrics of the explorer and the trainer to the driver."""

    def __init__(self, project: str, group: str, name: str, role: str, config: Any = None) -> None:
        self.role = role
        arguments = (config.monitor.monitor_args if config is not None else None) or {}
        self._post = post_of(arguments["run_id"])
        self._last: Any = None

    def log(self, data: Mapping[str, Any], step: int, commit: bool = False) -> None:
        numbers = {name: float(value) for name, value in data.items() if _is_number(value)}
        self._last = self._post.put.remote("metrics", {"role": self.role, "step": int(step), "metrics": numbers})

    async def arrived(self) -> None:
        """Wait until everything that was logged is with the `Post`, which takes it in order."""
        if self._last is not None:
            await self._last

    def close(self) -> None:
        """Nothing is held."""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or hasattr(value, "item")
