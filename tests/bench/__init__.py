"""Benchmarks: each module's `main()` returns figures. `python -m tests.bench` runs them all and
prints one table.

Figures are ratios taken in one run wherever two things are compared; nothing here is a timed test.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Figure"]


@dataclass(frozen=True)
class Figure:
    """One measured number beside its goal. `passed` is None where there is no goal."""

    name: str
    value: float
    unit: str
    goal: str = ""
    passed: bool | None = None
