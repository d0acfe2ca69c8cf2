"""OpenTelemetry traces as JSON: OTLP, the SDK's own form (OpenInference, Phoenix), agent-lightning's store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from pydantic import ValidationError

from ajet_tools.trace.imports.episodes import episode_of
from ajet_tools.trace.imports.parsed import Parsed
from ajet_tools.trace.imports.spans import Span, spans_of
from ajet_tools.trace.imports.spool import Spool
from ajet_tools.trace.json_rows import BadRows, Row

__all__ = ["made_of", "read"]


def read(rows: Iterable[Row], bad: BadRows, left_out: Counter[str]) -> Iterator[Parsed]:
    """An episode for each trace that has a model call."""
    with Spool() as spool:
        for row in rows:
            try:
                if not isinstance(row.value, Mapping):
                    raise TypeError("it is no object")
                for span in list(spans_of(row.value)):
                    spool.add(span)
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                bad.add(row.where, f"holds no spans: {error}")
        yield from made_of(spool.traces(), bad, left_out)


def made_of(traces: Iterable[tuple[str, list[Span]]], bad: BadRows, left_out: Counter[str]) -> Iterator[Parsed]:
    """The episodes of traces."""
    for trace, spans in traces:
        try:
            made = episode_of(trace, spans)
        except (ValidationError, ValueError, TypeError, KeyError, AttributeError) as error:
            bad.add(f"trace {trace}", f"cannot be an episode: {str(error).splitlines()[0]}")
            continue
        if made is None or made.episode is None:
            left_out["traces without a model call"] += 1
        else:
            told = {"ajet.episode", "ajet.call"}
            others = sum(not told & span.attributes.keys() for span in spans)
            others -= 0 if any("ajet.call" in span.attributes for span in spans) else len(made.episode.calls)
            if others:
                left_out["spans that are no model call"] += others
            yield made
