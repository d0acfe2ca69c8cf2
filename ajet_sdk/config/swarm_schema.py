"""The section `ajet.swarm`: how a swarm server collects the episodes of a step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ajet_sdk.config.schema import Section, key

Share = Annotated[float, Field(ge=0)]


class Swarm(Section):
    collect: Literal["groups", "episodes", "signal", "any_client", "all_clients"] = key(
        "groups",
        "When a step has enough: `groups`: data.train_batch_size groups of rollout.num_repeat"
        " attempts; `episodes`: as many attempts at any tasks; `signal`: groups whose rewards are"
        " not all equal (at most four times as many groups); `any_client`, `all_clients`: when a"
        " client, or each that took part, agrees.",
    )
    step_timeout: float | None = key(
        None,
        "Seconds after which a step is trained with the attempts that have ended, also in groups"
        " that are not complete; null: no limit.",
        gt=0,
    )
    grace: float = key(
        60.0,
        "Seconds that open episodes get to end once a step has enough; later ones are abandoned."
        " With rollout.max_staleness above 0 they go on, for the next step.",
        ge=0,
    )
    max_open: int = key(1024, "Episodes that may be open at once.", ge=1)
    kind_key: str = key(
        "kind",
        "Metadata key that names a task's kind, for `shares` and metrics; else its env_type.",
    )
    shares: dict[str, Share | tuple[Share, Share]] = key(
        {},
        "Share of each kind of task in the groups of a step: a number, or two for the first and the"
        " last step, with a straight line between; empty: as tasks come.",
    )
