"""Episodes with token ids as agents leave them: turns that extend, forks, several agents, calls
that do not count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from ajet_sdk.samples.build import Batch, build
from ajet_sdk.types import Call, Episode, Reward

VOCABULARY = 200
"""Ids are below this."""

_ids = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6)


@st.composite
def episodes(draw: st.DrawFn, name: str, group: str, attempt: int) -> Episode:
    """Calls that extend an earlier context of their agent, cut it short, or begin anew."""
    contexts: dict[str, list[list[int]]] = {"default": [], "critic": []}
    calls: list[Call] = []
    for index in range(draw(st.integers(1, 5))):
        agent = draw(st.sampled_from(["default", "default", "critic"]))
        seen = contexts[agent]
        before: Sequence[int] = (
            draw(st.sampled_from(seen)) if seen and draw(st.integers(0, 4)) else []
        )
        if before and not draw(st.integers(0, 3)):
            before = before[: draw(st.integers(1, len(before)))]
        prompt, output = [*before, *draw(_ids)], draw(_ids)
        more: dict[str, Any] = {}
        if not draw(st.integers(0, 9)):
            more = draw(
                st.sampled_from(
                    [{"error": "undelivered"}, {"trainable": False}, {"phase": "judge"}]
                )
            )
        calls.append(
            Call(
                call_id=f"{name}.{index}",
                episode_id=name,
                index=index,
                agent=agent,
                policy_version=draw(st.integers(0, 2)),
                prompt_ids=prompt,
                output_ids=output,
                logprobs=draw(
                    st.lists(
                        st.floats(-4, -0.0078125, width=32),
                        min_size=len(output),
                        max_size=len(output),
                    )
                ),
                **more,
            )
        )
        seen.append([*prompt, *output])
    failed = not draw(st.integers(0, 9))
    rewards = () if failed else (Reward(value=draw(st.floats(-2, 2, width=16))),)
    return Episode(
        episode_id=name,
        run_id="r",
        group_id=group,
        attempt=attempt,
        step=1,
        calls=tuple(calls),
        rewards=rewards,
        status="failed" if failed else "succeeded",
        error="it broke" if failed else None,
    )


@st.composite
def groups(draw: st.DrawFn, most: int = 3) -> list[Episode]:
    """Whole groups of attempts."""
    made = []
    for group in range(draw(st.integers(1, most))):
        for attempt in range(draw(st.integers(2, 3))):
            made.append(draw(episodes(f"e{group}.{attempt}", f"g{group}", attempt)))
    return made


def batches(most: int = 3) -> st.SearchStrategy[tuple[list[Episode], Batch]]:
    """Episodes and what `build` makes of them; there is something to train."""
    made = groups(most).map(lambda found: (found, build(found)))
    return made.filter(lambda both: bool(both[1].samples))
