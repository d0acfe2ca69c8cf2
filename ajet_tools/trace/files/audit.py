"""Recomputes the derived values of a trace from calls, rewards and the recorded config, and
compares them.

An independent implementation, written from the documentation (design, timelines, training, traces):
it shares no code with sampling, merging, ledger and training, so that it does not repeat their
errors. Texts and prompts are compared call by call, everything else in DuckDB.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, TypedDict

import duckdb
import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import AjetError, ConfigError, PictureError
from ajet_sdk.pictures import picture_at, url_in
from ajet_sdk.protocols import TraceReader
from ajet_sdk.tokens.formats import PARSERS, ReplyFormat
from ajet_sdk.tokens.probing import format_of
from ajet_sdk.tokens.template import ChatTemplate
from ajet_sdk.trace.pictures import digests_in
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.scratch import open_scratch
from ajet_sdk.types import JsonView
from ajet_tools.text.clean import counted
from ajet_tools.trace.decoding import Vocabulary, vocabulary
from ajet_tools.trace.files.compared import CHECKS
from ajet_tools.trace.files.recomputed import TABLES
from ajet_tools.trace.files.weights import differing, gradient, weights_of
from ajet_tools.trace.queries.base import grouped


@dataclass(frozen=True, slots=True)
class Differs:
    """A failed check of a run: recomputed and stored values differ."""

    check: str
    run: str
    row: str
    """Id of the first different row: a call, episode or group, or name and step of a metric."""
    expected: str
    stored: str
    count: int
    """Number of different rows."""

    @property
    def says(self) -> str:
        """What does not fit, as a sentence about the row."""
        return _SAYS.get(self.check, "{row}: {check}").format(row=self.row, check=self.check)


_SAYS = {
    "copies": "two calls have one reply: {row} is a copy, or its original",
    "log-probabilities": "call {row} has log-probabilities that cannot have been sampled",
    "policy versions": "call {row} names a version of the weights that was not there in its step",
    "weight updates": "the weights cannot have changed at these places of the reply of call {row}",
    "ledger": "the ledger tells something else of call {row} than follows from the records",
    "trained rows": "call {row} was trained without a row of it, or has a row and was not trained",
    "advantages": "the advantages of call {row} do not follow from the rewards of its group",
    "trainer's values": "the trainer's values of call {row} cannot be those of its tokens",
    "metrics": "the metric {row} does not follow from the episodes",
    "order": "call {row} is not at its place or time in its episode",
    "groups": "the attempts of group {row} are not the attempts at one task in one step",
    "episodes": "status, task, error and rewards of episode {row} do not fit together",
    "replies": "the reply of call {row} is another one than was sampled",
    "requests": "call {row} differs from the other calls of its request or agent",
    "sampling": "call {row} was sampled with other settings than those of the run",
    "prompts": "call {row} extends another call than its prompt begins with",
    "texts": "the reply of call {row} is not the text of its sampled tokens",
    "templates": "the prompt of call {row} is not what the template makes of its messages",
    "weights": "the weights give call {row} other values than were recorded",
}
"""What a failed check says about its first row."""


@dataclass(frozen=True, slots=True)
class Unchecked:
    """A check that was not possible."""

    check: str
    run: str
    reason: str


@dataclass(frozen=True, slots=True)
class Audit:
    differs: tuple[Differs, ...]
    unchecked: tuple[Unchecked, ...]
    checks: int
    """Number of kinds of checks."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Rows read by table; for `weights`, calls with recomputed log-probabilities."""


def audit(path: Path, *more: Path, tokenizer: Path | None = None, weights: bool = False) -> Audit:
    """Recompute the contents of a trace of one or more files, and report the first different row of
    each check.

    `tokenizer` is a directory or a `tokenizer.json`; None: the tokenizer of each run's config. With
    `weights`, sampled log-probabilities are compared with a forward pass of some calls for each
    available version of the weights. Superseded steps and unfinished episodes are skipped. Raises
    TraceError for an unreadable trace, and ConfigError for an invalid tokenizer.
    """
    differs: list[Differs] = []
    unchecked: list[Unchecked] = []
    with open_trace(path, *more) as reader, open_scratch() as db:
        rows = _load(reader, db)
        for name, sql in CHECKS.items():
            differs += first_of_each_run(name, db.execute(sql).fetchall())
        unchecked += [Unchecked(*row) for row in db.execute(_UNCHECKED).fetchall()]
        for (run,) in db.execute("SELECT run_id FROM runs ORDER BY started").fetchall():
            wrong, reasons = _texts(reader, db, run, path, tokenizer)
            differs += wrong
            unchecked += reasons
            if weights:
                wrong, reasons, compared = _weights(reader, run, path)
                differs += wrong
                rows["weights"] = rows.get("weights", 0) + compared
                unchecked += reasons
    return Audit(tuple(differs), tuple(unchecked), len(CHECKS) + len(_TEXTS) + weights, rows)


def _load(reader: TraceReader, db: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """Load the tables of the trace as `s_TABLE`, and create the recomputed tables."""
    db.execute("SET TimeZone = 'UTC'")
    count = {}
    for table in ("runs", "episodes", "calls", "rewards", "metrics", "ledger", "trained"):
        rows = reader.query(f"SELECT * FROM {table}")
        count[table] = rows.num_rows
        db.register("arrow", rows)
        db.execute(f"CREATE TABLE s_{table} AS FROM arrow")
        db.unregister("arrow")
    for sql in TABLES:
        db.execute(sql)
    return count


def first_of_each_run(name: str, rows: Sequence[tuple[object, ...]]) -> list[Differs]:
    """Report the first row of each run, of ordered rows (run, id, expected, stored)."""
    by_run = grouped(rows, lambda row: str(row[0] or ""))
    return [
        Differs(name, run, str(of[0][1]), str(of[0][2]), str(of[0][3]), len(of))
        for run, of in by_run.items()
    ]


def _weights(
    reader: TraceReader, run: str, trace: Path
) -> tuple[list[Differs], list[Unchecked], int]:
    """Compare sampled log-probabilities with those of the weights; also returns the number of
    compared calls."""
    differs: list[tuple[object, ...]] = []
    unchecked = []
    compared = Counter[int]()
    for version in weights_of(reader, run, trace):
        try:
            wrong, calls = differing(reader, run, version)
            differs += wrong
            compared[version.version] += calls
            step = gradient(reader, run, version)
            if step is not None and abs(step[1] - step[2]) > 1e-3 * (1e-3 + step[1]):
                differs.append((run, f"train/grad_norm in step {step[0]}", step[1], step[2]))
        except (OSError, ValueError, ImportError) as error:
            reason = f"{version.adapter or version.model} cannot be used: {error}"
            unchecked.append(Unchecked("weights", run, reason))
    used = (
        "SELECT DISTINCT policy_version FROM calls JOIN episodes USING (episode_id) WHERE run_id ="
        " ? AND trainable"
    )
    versions = reader.query(used, [run]).column(0).to_pylist()
    missing = {version for version in versions if version is not None and not compared[version]}
    if missing:
        listed = ", ".join(map(str, sorted(missing)))
        unchecked.append(
            Unchecked(
                "weights", run, f"versions {listed}: no weights at hand, or sampled with limits"
            )
        )
    return first_of_each_run("weights", differs), unchecked, sum(compared.values())


_TEXTS = ("prompts", "texts", "templates")
_UNREAD = "tool calls in an unknown format"

_UNCHECKED = """
    SELECT 'ledger, advantages, metrics' AS checked, run_id, CASE
        WHEN estimator IS NULL THEN 'the run recorded no config'
        WHEN backbone IN ('run', 'debug') THEN 'nothing is trained by backbone ' || backbone
        ELSE 'rewards less a KL penalty that is not stored' END AS reason FROM runs WHERE NOT trains
    UNION ALL SELECT 'trained rows, advantages', run_id, 'none are stored' FROM runs
        WHERE trains AND NOT stores
    UNION ALL SELECT 'groups, sampling, staleness', run_id, 'values of the recorded config cannot be read' FROM runs
        WHERE trains AND (num_repeat IS NULL OR temperature IS NULL OR max_staleness IS NULL OR updates IS NULL)
    UNION ALL SELECT 'advantages', run_id, 'opd takes them from a teacher' FROM runs WHERE trains AND estimator = 'opd'
    UNION ALL SELECT 'entropy and gap', run_id, 'only known for the first mini-batch' FROM runs WHERE trains
        AND updates > 1
    UNION ALL SELECT 'metrics', run_id, 'those of step ' || step
        || ' were lost with a process that was killed' FROM steps WHERE unlogged
    UNION ALL SELECT 'unmaskable', run_id, 'assumed correct for ' || count(*) || ' calls' FROM s_ledger
        WHERE outcome = 'unmaskable' GROUP BY run_id
    UNION ALL SELECT 'truncated', run_id, 'assumed correct for ' || count(*)
        || ' calls of episodes with branches or too many '
        'timelines' FROM calls c JOIN lengths k USING (call_id) WHERE k.given AND learnt GROUP BY run_id
    UNION ALL SELECT 'steps that are not finished', run_id, 'the run is ' || status FROM runs
        WHERE trains AND status <> 'finished'
    ORDER BY run_id, checked"""
"""(check, run, reason) of values that cannot be recomputed, or are assumed to be correct."""


def _texts(
    reader: TraceReader,
    db: duckdb.DuckDBPyConnection,
    run: str,
    trace: Path,
    tokenizer: Path | None,
) -> tuple[list[Differs], list[Unchecked]]:
    """Compare prompts with the calls that they extend, and with a tokenizer, ids with texts."""
    known: Vocabulary | None = None
    unchecked = []
    try:
        known = vocabulary(reader, run, tokenizer, trace)
        if known.template is None:
            unchecked.append(
                Unchecked("templates", run, f"there is no chat template beside {known.source}")
            )
    except ConfigError as error:
        if tokenizer is not None:
            raise
        unchecked += [
            Unchecked(name, run, f"no tokenizer: {error}") for name in ("texts", "templates")
        ]
    wrong: dict[str, list[tuple[object, ...]]] = {name: [] for name in (*_TEXTS, _UNREAD)}
    for calls in _episodes(db, run):
        for call in calls:
            for name, expected, stored in _wrong(call, calls, known):
                wrong[name].append((run, call.row["call_id"], expected, stored))
    if unread := len(wrong.pop(_UNREAD)):
        reason = (
            f"tool calls of {counted(unread, 'message')} cannot be read from the sampled tokens"
        )
        unchecked.append(Unchecked("texts", run, reason))
    return [
        difference for name, rows in wrong.items() for difference in first_of_each_run(name, rows)
    ], unchecked


class _Row(TypedDict):
    call_id: str
    episode_id: str
    agent: str
    phase: str
    parent_call_id: str | None
    prefix_len: int | None
    prompt_suffix: list[int | None] | None
    prefix_messages: int | None
    messages_suffix: str | None
    pictures: str | None
    output_ids: list[int | None] | None
    request: str | None
    response: str | None
    extends_call_id: str | None
    error: str | None
    cut_tokens: int | None
    finish_reason: str | None


@dataclass(slots=True)
class _Call:
    """A call with its whole prompt; None without ids."""

    row: _Row
    prompt: npt.NDArray[np.int32] | None
    whole: npt.NDArray[np.int32] | None
    """Prompt and sampled ids."""
    keyed: npt.NDArray[np.int32] | None
    """The same with a number of each picture in place of its ids."""
    messages: list[dict[str, object]] | None


def _episodes(db: duckdb.DuckDBPyConnection, run: str) -> Iterator[list[_Call]]:
    """Yield the calls of each episode in order of their index, reading a few thousand at once."""
    cursor = db.cursor()
    cursor.execute(
        """SELECT call_id, episode_id, agent, phase, parent_call_id, prefix_len, prompt_suffix, prefix_messages,
            messages_suffix, pictures, output_ids, request, response, extends_call_id, error, cut_tokens, finish_reason
        FROM calls WHERE run_id = ? ORDER BY step, episode_id, "index" """,
        [run],
    )
    names = [column[0] for column in cursor.description or ()]
    batches = iter(lambda: cursor.fetchmany(2000), [])
    rows: Iterator[Any] = (dict(zip(names, row, strict=True)) for batch in batches for row in batch)
    for _, mine in groupby(rows, key=lambda row: row["episode_id"]):
        calls: dict[str, _Call] = {}
        for row in mine:
            calls[row["call_id"]] = _whole(row, calls.get(row["parent_call_id"] or ""))
        yield list(calls.values())


def _whole(row: _Row, parent: _Call | None) -> _Call:
    prompt = whole = messages = None
    if row["prompt_suffix"] is not None:
        suffix = _ids(row["prompt_suffix"])
        before = parent.whole if parent is not None else None
        if before is None:
            prompt = suffix
        else:
            prompt = np.concatenate((before[: row["prefix_len"]], suffix))
        if row["output_ids"] is None:
            whole = prompt
        else:
            whole = np.concatenate((prompt, _ids(row["output_ids"])))
    if row["messages_suffix"] is not None:
        if parent is not None:
            earlier = (parent.messages or [])[: row["prefix_messages"] or 0]
        else:
            earlier = []
        added = json.loads(row["messages_suffix"])
        if isinstance(added, list) and all(isinstance(message, dict) for message in added):
            messages = [*earlier, *added]
    return _Call(row, prompt, whole, _keyed(whole, row["pictures"]), messages)


def _keyed(
    whole: npt.NDArray[np.int32] | None, pictures: str | None
) -> npt.NDArray[np.int32] | None:
    """Ids in which two pictures of one size differ, by a number made of the digest."""
    if whole is None or pictures is None:
        return whole
    out = whole.copy()
    for start, end, digest, token_id in json.loads(pictures):
        place = out[start:end]
        place[place == token_id] = -1 - int(digest[:7], 16)
    return out


def _ids(ids: Sequence[int | None]) -> npt.NDArray[np.int32]:
    """Convert token ids; NULL becomes -1, an invalid id."""
    return np.asarray([-1 if id is None else id for id in ids], np.int32)


def _object(text: str | None) -> dict[str, object]:
    """Parse a JSON object; other values become an empty one."""
    value = json.loads(text or "{}")
    return value if isinstance(value, dict) else {}


def _wrong(
    call: _Call, calls: Sequence[_Call], known: Vocabulary | None
) -> Iterator[tuple[str, str, str]]:
    """Yield (check, expected, stored) for each difference in a call."""
    if call.prompt is None or call.whole is None:
        return
    yield from _wrong_prefix(call, calls)
    yield from _wrong_pictures(call)
    if known is None or call.row["output_ids"] is None:
        return
    text = known.decode(_ids(call.row["output_ids"]).tolist())
    missing = _missing(call.row, text, known)
    if missing is not None:
        yield "texts", repr(text), missing
    else:
        yield from _wrong_calls(call, text, known, _object(call.row["request"]))
    if call.messages is None and call.row["messages_suffix"] is not None:
        yield "templates", "a list of messages", str(call.row["messages_suffix"])
    # of a picture the template writes one token, and the processor as many as the picture has
    is_text = call.row["pictures"] is None
    if known.template is not None and call.messages is not None and is_text:
        rendered = _rendered(known.template, call.messages, _object(call.row["request"]))
        prompt = known.decode(call.prompt.tolist())
        if any(
            message.get("tool_calls") for message in call.messages
        ):  # the model may write other spaces
            rendered = "".join(rendered.split())
            prompt = "".join(prompt.split())
        if rendered != prompt:
            at = next(
                (i for i, (a, b) in enumerate(zip(rendered, prompt, strict=False)) if a != b), 0
            )
            yield (
                "templates",
                f"character {at}: {rendered[at : at + 60]!r}",
                repr(prompt[at : at + 60]),
            )


def _wrong_pictures(call: _Call) -> Iterator[tuple[str, str, str]]:
    """Compare the pictures in the prompt with those of the messages."""
    if call.row["pictures"] is None or call.messages is None:
        return
    stored = sorted(digest for _, _, digest, _ in json.loads(call.row["pictures"]))
    sent = sorted(_sent(call.messages))
    if stored != sent:
        yield "prompts", _counted(sent), _counted(stored)


def _counted(digests: Sequence[str]) -> str:
    return f"{counted(len(digests), 'picture')} {' '.join(digest[:6] for digest in digests)}"


def _sent(messages: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """The digests of the pictures in messages."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.get("type") != "image_url":
                continue
            with suppress(PictureError):  # sent as it was, and refused
                url = url_in(part)
                referred = digests_in(url)
                yield referred.pop() if referred else picture_at(url).digest


def _wrong_prefix(call: _Call, calls: Sequence[_Call]) -> Iterator[tuple[str, str, str]]:
    """Check that a call extends the longest earlier call of its agent and phase that is a prefix of
    its prompt."""
    assert call.prompt is not None
    longest = 0
    ids = {None}
    shared = 0
    for candidate in calls:
        if candidate is call:
            break
        if candidate.keyed is None or call.keyed is None:
            continue
        common = _common(call.keyed[: len(call.prompt)], candidate.keyed)
        shared = max(shared, common)
        mine = (candidate.row["agent"], candidate.row["phase"]) == (
            call.row["agent"],
            call.row["phase"],
        )
        if (
            mine
            and candidate.row["output_ids"] is not None
            and common == len(candidate.keyed) >= longest
        ):
            ids = {*(ids if common == longest else ()), candidate.row["call_id"]} - {None}
            longest = common
    if call.row["extends_call_id"] not in ids:
        yield (
            "prompts",
            f"extends {' or '.join(map(str, ids))}",
            f"extends {call.row['extends_call_id']}",
        )
    if call.row["prefix_len"] != shared:
        yield "prompts", f"{shared} tokens of an earlier call", f"{call.row['prefix_len']}"


def _common(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size


def _missing(row: _Row, text: str, known: Vocabulary) -> str | None:
    """Return a part of the stored reply that is missing in the sampled text, or None."""
    message = _message(row)
    if message is None:
        if row["error"] is None:
            return repr(row["response"])
        return None
    content = message.get("content")
    calls = _listed(message)
    reasoning = message.get("reasoning_content")
    is_complete = (
        row["error"] is None and not row["cut_tokens"] and row["finish_reason"] is not None
    )
    is_bare = content is None and not any(
        value for name, value in message.items() if name != "role"
    )
    if (is_bare or (not calls and not reasoning and isinstance(content, str))) and is_complete:
        last = _ids((row["output_ids"] or [])[-1:]).tolist()
        ended = "".join(known.decode([i]) for i in last if known.is_special(i))
        plain = {text, text.removesuffix(ended)}
        plain |= {_before_stop(reply, _object(row["request"])) for reply in plain}
        if content in plain or (is_bare and not text.removesuffix(ended).strip()):
            return None
        return repr(content)
    parts = [content, reasoning, *(str(_called(call)[0]) for call in calls)]
    return next(
        (repr(part) for part in parts if isinstance(part, str) and part.strip() not in text), None
    )


def _before_stop(text: str, request: JsonView) -> str:
    """Return a text up to the first of the request's stop strings, which end a reply and are no
    part of it."""
    stop = request.get("stop")
    if isinstance(stop, str):
        strings = [stop]
    elif isinstance(stop, list):
        strings = stop
    else:
        strings = []
    ends = [text.find(end) for end in strings if isinstance(end, str) and end and end in text]
    return text[: min(ends)] if ends else text


def _message(row: _Row) -> dict[str, object] | None:
    """Return the stored reply, or None."""
    choices = _object(row["response"]).get("choices")
    if isinstance(choices, list) and choices:
        choice = choices[0]
    else:
        choice = None
    if isinstance(choice, dict):
        message = choice.get("message")
    else:
        message = None
    return message if isinstance(message, dict) else None


def _listed(message: Mapping[str, object]) -> list[object]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _wrong_calls(
    call: _Call, text: str, known: Vocabulary, request: JsonView
) -> Iterator[tuple[str, str, str]]:
    """Compare names and arguments of the stored tool calls with those parsed from the sampled
    text."""
    stored = [_called(entry) for entry in _listed(_message(call.row) or {})]
    if not stored or call.row["error"] is not None or call.row["cut_tokens"] or call.prompt is None:
        return
    last = _ids((call.row["output_ids"] or [])[-1:]).tolist()
    end = "".join(known.decode([i]) for i in last if known.is_special(i))
    prompt = known.decode(call.prompt[-64:].tolist())
    tools = request.get("tools") or [{"function": {"name": name}} for name, _ in stored]
    read: list[list[tuple[object, object]]] = []
    with suppress(
        AjetError, TypeError, AttributeError
    ):  # a template that renders nothing, invalid tools
        if known.template is None:
            probed = _EVERY
        else:
            probed = _format(known.template, (end,) if end else ())
        for form in (probed, *(ReplyFormat(forms, probed.reasoning) for forms in PARSERS.values())):
            parses = (
                form.parse(reply, prompt=prompt, tools=tools).calls
                for reply in (text.removesuffix(end), text)
            )
            # models write control characters as they are
            read += [
                [(name, _arguments(arguments)) for name, arguments in calls]
                for calls in parses
                if calls
            ]
            if stored in read:
                return
    if read:
        yield (
            "texts",
            f"calls {json.dumps(read[0], ensure_ascii=False)}",
            json.dumps(stored, ensure_ascii=False),
        )
    else:
        yield _UNREAD, "", ""


def _arguments(text: str) -> object:
    return json.loads(text, strict=False)


_EVERY = ReplyFormat(tuple(form for forms in PARSERS.values() for form in forms))
_format = lru_cache(maxsize=8)(format_of)


def _called(call: object) -> tuple[object, object]:
    """Return name and arguments of a tool call; JSON arguments are parsed."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return repr(call), None
    arguments = function.get("arguments")
    with suppress(ValueError):
        if isinstance(arguments, str):
            arguments = json.loads(arguments, strict=False)
        else:
            arguments = arguments
    return function.get("name"), arguments


def _rendered(
    template: ChatTemplate, messages: Sequence[Mapping[str, object]], request: JsonView
) -> str:
    try:
        return template.render(
            [template.form(message) for message in messages],
            request.get("tools"),
            **(options if isinstance(options := request.get("chat_template_kwargs"), dict) else {}),
        )
    except (AjetError, TypeError, AttributeError) as error:  # invalid tools
        return f"refused: {error}"
