"""Builds calls from token rows of other trainers, and checks lengths and masks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import groupby

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from ajet_sdk.tasks.json_rows import BadRows, Row
from ajet_sdk.types import Call, Trained
from ajet_tools.trace.imports.sink import UNKNOWN_TIME, Parsed, first_error, stable_id


def each(
    rows: Iterable[Row], bad: BadRows, parse: Callable[[Row], Iterable[Parsed]]
) -> Iterator[Parsed]:
    """Parse each row, and report invalid rows and inconsistent tokens with their position."""
    for row in rows:
        try:
            yield from (replace(parsed, where=row.where) for parsed in parse(row))
        except ValidationError as error:
            bad.add(row.where, first_error(error))
        except (TypeError, ValueError, KeyError, IndexError) as error:
            bad.add(row.where, str(error))


def agree(what: str, values: Sequence[object] | None, tokens: int, of: str = "tokens") -> None:
    """Raise ValueError unless there are as many values as tokens; None is unknown."""
    if values is not None and len(values) != tokens:
        raise ValueError(f"{what} for {len(values)} of {tokens} {of}")


def sampled_call(
    episode_id: str,
    index: int,
    prompt_ids: Sequence[int] | None,
    output_ids: Sequence[int] | None,
    logprobs: Sequence[float] | None,
    *,
    messages: Sequence[dict[str, object]] = (),
    reply: dict[str, object] | None = None,
    agent: str = "default",
    version: int | None = None,
    trainable: bool = True,
    at: datetime = UNKNOWN_TIME,
) -> Call:
    """Build a call; unknown ids are None.

    Raises ValueError for a negative id, or for log-probabilities of another length than the sampled
    ids.
    """
    agree(f"call {index}: log-probabilities", logprobs, len(output_ids or ()), "sampled tokens")
    return Call(
        call_id=stable_id("call", episode_id, index),
        episode_id=episode_id,
        index=index,
        agent=agent,
        trainable=trainable,
        policy_version=version,
        request={"messages": list(messages)} if messages else {},
        response={} if reply is None else {"choices": [{"index": 0, "message": reply}]},
        prompt_ids=_ids(prompt_ids),
        output_ids=_ids(output_ids),
        logprobs=None if logprobs is None else np.asarray(logprobs, np.float32),
        started_at=at,
        ended_at=at,
    )


def _ids(ids: Sequence[int] | None) -> npt.NDArray[np.int32] | None:
    if (
        ids
        and (odd := next((i for i in (min(ids), max(ids)) if not 0 <= i < 2**31), None)) is not None
    ):
        raise ValueError(f"{odd} is no token id")
    return None if ids is None else np.asarray(ids, np.int32)


def scored(
    call: Call,
    step: int,
    advantages: Sequence[float] | float | None,
    logprobs: Sequence[float] | None = None,
    entropy: Sequence[float] | None = None,
) -> tuple[Trained, ...]:
    """Return the trainer's values of a call's sampled tokens; empty without advantages."""
    if advantages is None or call.output_ids is None:
        return ()
    size = len(call.output_ids)
    given = [advantages] * size if isinstance(advantages, int | float) else advantages
    agree(f"call {call.index}: advantages", given, size, "sampled tokens")
    if not np.isfinite(given).all():
        raise ValueError(f"call {call.index}: an advantage is not a finite number")
    agree(f"call {call.index}: the trainer's log-probabilities", logprobs, size, "sampled tokens")
    agree(f"call {call.index}: entropies", entropy, size, "sampled tokens")
    unknown = np.full(size, np.nan, np.float32)
    return (
        Trained(
            run_id="",
            step=step,
            episode_id=call.episode_id,
            call_id=call.call_id,
            advantages=np.asarray(given, np.float32),
            logprobs=unknown if logprobs is None else np.asarray(logprobs, np.float32),
            entropy=unknown if entropy is None else np.asarray(entropy, np.float32),
        ),
    )


def turns(
    episode_id: str,
    tokens: Sequence[int],
    mask: Sequence[float],
    logprobs: Sequence[float] | None,
    advantages: Sequence[float] | None,
    *,
    step: int = 0,
    version: int | None = None,
) -> tuple[tuple[Call, ...], tuple[Trained, ...]]:
    """Split a sequence into calls: each run of sampled tokens, with all tokens before it as prompt.

    All arguments have length T. Raises ValueError if not, or for an advantage of a prompt token.
    """
    agree("mask", mask, len(tokens))
    agree("log-probabilities", logprobs, len(tokens))
    agree("advantages", advantages, len(tokens))
    calls: list[Call] = []
    trained: list[Trained] = []
    for is_sampled, run in groupby(range(len(tokens)), lambda i: bool(mask[i])):
        indices = list(run)
        first, end = indices[0], indices[-1] + 1
        if is_sampled:
            part = None if logprobs is None else logprobs[first:end]
            calls.append(
                sampled_call(
                    episode_id, len(calls), tokens[:first], tokens[first:end], part, version=version
                )
            )
            trained += scored(
                calls[-1], step, None if advantages is None else advantages[first:end]
            )
        elif (
            advantages is not None
            and (odd := next((i for i in indices if advantages[i]), None)) is not None
        ):
            raise ValueError(
                f"token {odd} was not sampled and has the advantage {advantages[odd]:g}"
            )
    return tuple(calls), tuple(trained)
