"""What Trinity's trainer takes for each step, in files beside its checkpoints.

The driver is sent the same, and may have been killed before it has written it down. Then a
checkpoint has been trained on tokens that no ledger knows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ajet_sdk.backbones.shared.carry_over import GroupPlace, TakenGroups
from ajet_sdk.errors import ConfigError
from ajet_sdk.whole_file import write_whole

if TYPE_CHECKING:
    from ajet_sdk.cluster.mailbox import TrainedMessage


def reports_of(job: Path) -> Path:
    """The directory of the reports of a job of Trinity."""
    return job / "reports"


def write_report(directory: Path, report: TrainedMessage) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / f"step_{report['step']:06d}.json", json.dumps(report))


def read_reports(directory: Path, last_step: int) -> list[TrainedMessage]:
    """The reports of the steps up to one, in their order."""
    reports: list[TrainedMessage] = [
        json.loads(path.read_text()) for path in sorted(directory.glob("step_*.json"))
    ]
    return [report for report in reports if report["step"] <= last_step]


def first_batch(
    reports: Sequence[TrainedMessage], last_step: int, size: int, carry_over: int
) -> int:
    """The number of batches that are trained wholly after a step, behind which the explorer goes
    on.

    Raises ConfigError without a `carry_over`, if groups of later batches are among the trained.
    """
    if carry_over:
        return taken_groups(reports, last_step, size).whole
    if any(group["batch"] > last_step for report in reports for group in report["groups"]):
        raise ConfigError(
            "rollout.carry_over: 0; the run trained groups of later batches, which would be trained"
            " again, and others never; resume with the carry_over that it had"
        )
    return last_step


def taken_groups(reports: Sequence[TrainedMessage], last_step: int, size: int) -> TakenGroups:
    """The groups that the steps up to one trained, of batches of `size`. A step without a report
    trained its own batch."""
    places = []
    reported = set()
    for report in reports:
        reported.add(report["step"])
        for group in report["groups"]:
            places.append(GroupPlace(group["batch"], group["position"]))
    for step in range(1, last_step + 1):
        if step not in reported:
            places += [GroupPlace(step, position) for position in range(size)]
    taken = TakenGroups(size)
    taken.add(places)
    return taken
