"""Advice on a run in training, in words, from the package that explains traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

    from ajet_sdk.protocols import TraceReader
    from ajet_sdk.reporting.held_out import Change


Query = Callable[[str, Sequence[object]], "pa.Table"]


class Advice(Protocol):
    """Each function returns a message, or an empty text."""

    def warning_signs(self, history: Mapping[str, Mapping[int, float]], /) -> dict[str, str]:
        """Warnings about a rising reward, by metric; `history`: each metric's values by step."""

    def not_carried_over(
        self, train: Mapping[int, float], change: Change | None, step: int, /
    ) -> str:
        """Whether the training reward rose and the held-out reward did not."""

    def without_signal(self, trace: TraceReader, run_id: str, /) -> str:
        """Whether many training tasks gave every attempt the same reward."""

    def on_gap(self, query: Query, run_id: str, step: int, gap: float, service: str, /) -> str:
        """Whether sampler and trainer disagree at a step, by `gap` on average."""


def installed_advice() -> Advice | None:
    """The functions of the entry point `ajet.advice`; None without the tools."""
    for entry in entry_points(group="ajet.advice", name="training"):
        advice: Advice = entry.load()
        return advice
    return None
