"""ajet's own JSON lines (`ajet trace export --format native`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pydantic import BaseModel, TypeAdapter, ValidationError

from ajet_sdk.errors import TraceVersionError
from ajet_sdk.pictures import picture_at
from ajet_sdk.tasks.json_rows import BadRows, Row
from ajet_sdk.trace.pictures import resolved
from ajet_sdk.types import Episode, Feedback, LedgerEntry, Metric, Run, Trained
from ajet_tools.trace.export.native import HEADER, VERSION
from ajet_tools.trace.imports.sink import Parsed, first_error


def read(rows: Iterable[Row], bad: BadRows) -> Iterator[Parsed]:
    """Read exported runs, metrics and episodes. Raises TraceVersionError for a newer file."""
    for row in rows:
        if not isinstance(row.value, dict):
            bad.add(row.where, f"is not an object (got {type(row.value).__name__})")
            continue
        version = row.value.get(HEADER)
        if version is not None and version not in range(1, VERSION + 1):
            raise TraceVersionError(
                f"{row.where} is version {version}; this ajet reads {VERSION}. Upgrade ajet"
            )
        try:
            parsed = _parsed(row.value)
        except (ValidationError, KeyError, TypeError, ValueError, AttributeError) as error:
            bad.add(row.where, f"is not in ajet's format: {_why(error)}")
            continue
        if parsed is not None:
            yield parsed
        elif version is None:
            bad.add(
                row.where,
                f"has none of {HEADER}, run, metrics, episode; it has {', '.join(row.value)[:80]}",
            )


class _EpisodeLine(BaseModel):
    """A line with an episode. Its calls omit the id of the episode."""

    episode: dict[str, object]
    superseded: bool = False
    ledger: tuple[LedgerEntry, ...] = ()
    feedback: tuple[Feedback, ...] = ()
    trained: tuple[Trained, ...] = ()


_METRICS = TypeAdapter(tuple[Metric, ...])

_URLS = TypeAdapter(dict[str, str])
_CALLS = TypeAdapter(list[dict[str, object]])


def _parsed(value: Mapping[str, object]) -> Parsed | None:
    if "run" in value:
        return Parsed(run=Run.model_validate(value["run"]))
    if "metrics" in value:
        return Parsed(metrics=_METRICS.validate_python(value["metrics"]))
    if "episode" in value:
        if "pictures" in value:
            urls = _URLS.validate_python(value["pictures"])
            pictures = {digest: picture_at(url) for digest, url in urls.items()}
            value = resolved({k: v for k, v in value.items() if k != "pictures"}, pictures)
        return _episode(_EpisodeLine.model_validate(value))
    return None


def _episode(line: _EpisodeLine) -> Parsed:
    fields = line.episode
    ended = bool(fields.pop("ended", True))
    calls = [
        {**call, "episode_id": fields["episode_id"]}
        for call in _CALLS.validate_python(fields["calls"])
    ]
    return Parsed(
        episode=Episode.model_validate({**fields, "calls": calls}),
        ended=ended,
        superseded=line.superseded,
        ledger=line.ledger,
        feedback=line.feedback,
        trained=line.trained,
    )


def _why(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return first_error(error)
    return f"{type(error).__name__} {error}"
