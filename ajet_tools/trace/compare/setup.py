"""Finds what changed between two steps besides the policy: its requests, its model and its judge.

Requests are compared by what isn't a message: tools, choice of tools, format of the answer,
sampling, model, and the system prompt; those of a judge by its rubric, too. The judge is compared
by its rewards of equal answers to equal tasks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ajet_sdk.protocols import TraceReader
from ajet_tools.text.clean import counted, one_line
from ajet_tools.trace.compare.changes import Finding
from ajet_tools.trace.queries.base import rows

ASPECTS = {
    "tools": "request->'$.tools'",
    "tool_choice": "request->'$.tool_choice'",
    "response_format": "request->'$.response_format'",
    "template": "request->'$.chat_template_kwargs'",
    "stop": "request->'$.stop'",
    "temperature": "sampling->'$.temperature'",
    "top_p": "sampling->'$.top_p'",
    "penalties": (
        "json_array(sampling->'$.frequency_penalty', sampling->'$.presence_penalty', "
        "sampling->'$.repetition_penalty')"
    ),
    "model": "to_json(c.model)",
    "system prompt": (
        "CASE WHEN c.parent_call_id IS NULL AND messages_suffix->>'$[0].role' IN ('system',"
        " 'developer') THEN messages_suffix->'$[0].content' END"
    ),
}
"""Aspects of a request that are no messages of the conversation, each with its SQL."""
JUDGE = "the judge"
RUBRIC = "rubric"
_OF_JUDGE = {
    RUBRIC: r"""nullif(trim(replace(regexp_extract(
        messages_suffix::VARCHAR, '<rubric>(.*?)</rubric>', 1, 's'), '\n', ' ')), '')""",
    "model": ASPECTS["model"],
    "system prompt": ASPECTS["system prompt"],
    "temperature": ASPECTS["temperature"],
}
"""Aspects of a judge's request; the tags around its rubric are those of `LlmJudge`."""
_SHOWN = 60
_BEFORE = 12
"""Characters to show before the first difference of two texts."""


@dataclass(frozen=True)
class JudgeChange:
    """Rewards of equal answers to equal tasks, at a step and before."""

    changed: int
    """Answers whose reward is another one."""
    same: int
    noisy: int
    """Answers that the judge rewards differently within the step, or before it."""
    episodes: tuple[str, ...]

    @property
    def is_evident(self) -> bool:
        """Whether rewards changed more often than the judge disagrees with itself."""
        return self.changed > 2 * self.noisy


def setup_changes(
    reader: TraceReader, run_id: str, split: str, decoding: str | None, before: int, step: int
) -> Iterator[Finding]:
    """Yields a finding for each aspect of an agent's requests that has other values at a step than
    before."""
    earlier, later = (request_values(reader, run_id, split, decoding, at) for at in (before, step))
    yield from differing_values(earlier, later)


Values = Mapping[tuple[str, str], set[str]]
"""JSON values by agent and aspect."""


def code_changes(earlier: Mapping[str, object], later: Mapping[str, object]) -> Iterator[Finding]:
    """Yields a finding for the judge and the workflow if two recorded configs name others, or the
    same of an edited file."""
    sides = [_code(config) for config in (earlier, later)]
    for part in ("judge", "workflow"):
        old, new = (side.get(part, {}) for side in sides)
        if not old or not new or old == new:
            continue
        if old.get("name") != new.get("name"):
            yield Finding("setup", f"{part}: {old.get('name')} → {new.get('name')}")
        else:
            yield Finding("setup", f"the file of the {part} {new.get('name')} was edited")


def _code(config: Mapping[str, object]) -> Mapping[str, Mapping[str, object]]:
    code = config.get("code")
    return code if isinstance(code, Mapping) else {}


def differing_values(earlier: Values, later: Values) -> Iterator[Finding]:
    """Yields a finding for each aspect of an agent's requests whose values are others; both sides
    have the agent."""
    for agent, aspect in sorted(later.keys() & earlier.keys()):
        old = earlier[agent, aspect]
        new = later[agent, aspect]
        gone = sorted(old - new)
        added = sorted(new - old)
        if not gone or not added:
            continue  # a value that is only rarer or more frequent is the agent's choice
        if agent == JUDGE:
            whose = agent
        else:
            whose = f"agent {one_line(agent, 40)}"
        texts = [_short(aspect, values) for values in (gone, added)]
        if aspect in (RUBRIC, "system prompt") and len(gone) == len(added) == 1:
            texts = _where_they_part(gone[0], added[0])
        yield Finding("setup", f"{aspect} of {whose}: {texts[0]} → {texts[1]}")


def request_values(
    reader: TraceReader, run_id: str, split: str | None, decoding: str | None, step: int | None
) -> dict[tuple[str, str], set[str]]:
    """Returns the values of each agent and aspect in a run's episodes of a kind (None: any)."""
    kind = (run_id, split, decoding, step)
    values: dict[tuple[str, str], set[str]] = {}
    for row in _aspects_by_agent(reader, "agent", "rollout", ASPECTS, *kind):
        for name in ASPECTS:
            values[str(row["agent"]), name] = {value or "none" for value in row[name] or ["none"]}
    for row in _aspects_by_agent(reader, "NULL", "judge", _OF_JUDGE, *kind):
        for name in _OF_JUDGE:  # a judge may make other calls that have no rubric
            values[JUDGE, name] = {value for value in row[name] or () if value}
    return values


def _aspects_by_agent(
    reader: TraceReader, agent: str, phase: str, aspects: Mapping[str, str], *kind: object
) -> list[dict[str, Any]]:
    """The values of aspects of requests, of episodes of a kind: run, split, decoding, step."""
    listed = ", ".join(
        f'list(DISTINCT ({sql})::VARCHAR) AS "{name}"' for name, sql in aspects.items()
    )
    found: list[dict[str, Any]] = rows(
        reader,
        f"""
        SELECT {agent} AS agent, {listed} FROM calls c JOIN episodes e USING (episode_id)
        WHERE e.run_id = $1 AND ($2::VARCHAR IS NULL OR e.split = $2)
          AND ($3::VARCHAR IS NULL OR e.decoding = $3) AND ($4::INTEGER IS NULL OR e.step = $4)
          AND NOT coalesce(e.superseded, false) AND phase = '{phase}' GROUP BY 1""",
        *kind,
    )
    return found


def _where_they_part(old: str, new: str) -> list[str]:
    """Two texts, from a little before their first difference."""
    pairs = zip(old, new, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    start = max(0, common - _BEFORE)
    if start == 0 or max(len(old), len(new)) <= _SHOWN:
        return [one_line(old, _SHOWN), one_line(new, _SHOWN)]
    return [f"…{one_line(text[start:], _SHOWN)}" for text in (old, new)]


def _short(aspect: str, values: Sequence[str]) -> str:
    if aspect != "tools":
        return one_line(" or ".join(values), _SHOWN)
    names: list[str] = []
    for value in values:
        try:
            tools = json.loads(value)
        except ValueError:
            tools = []
        for tool in tools if isinstance(tools, list) else []:
            function = {}
            if isinstance(tool, dict):
                function = tool.get("function", tool)
            names.append(str(function.get("name", "?")) if isinstance(function, dict) else "?")
    return one_line(", ".join(dict.fromkeys(names)) or "none", _SHOWN)


def judge_change(reader: TraceReader, run_id: str, split: str, step: int) -> JudgeChange:
    """Compares the rewards of a step's answers with those that equal answers to the same tasks had
    before."""
    [row] = rows(
        reader,
        """
        WITH scored AS (
            SELECT any_value(e.episode_id) AS episode_id, e.task_id, md5(any_value(e.output)::VARCHAR) AS answer,
              any_value(e.step) AS step, round(sum(w.value * w.weight), 9) AS reward
            FROM episodes e JOIN rewards w USING (episode_id)
            WHERE e.run_id = $1 AND e.split = $2 AND e.step <= $3 AND e.status = 'succeeded'
              AND NOT coalesce(e.superseded, false) AND e.output IS NOT NULL GROUP BY e.episode_id, e.task_id),
        answers AS (
            SELECT list(DISTINCT reward) FILTER (step < $3) AS before,
              list(DISTINCT reward) FILTER (step = $3) AS after,
              min(episode_id) FILTER (step = $3) AS example
            FROM scored GROUP BY task_id, answer)
        SELECT count(*) FILTER (len(before) = 1 AND len(after) = 1 AND before <> after) AS changed,
          count(*) FILTER (len(before) = 1 AND len(after) = 1 AND before = after) AS same,
          count(*) FILTER (len(before) > 1 OR len(after) > 1) AS noisy,
          list(example ORDER BY example) FILTER (len(before) = 1 AND len(after) = 1 AND before <> after) AS examples
        FROM answers""",
        run_id,
        split,
        step,
    )
    return JudgeChange(row["changed"], row["same"], row["noisy"], tuple(row["examples"] or ()))


def headline(
    setup: Sequence[Finding], judge: JudgeChange, others: Sequence[Finding], step: int, moved: bool
) -> str:
    """Returns the most likely causes, ranked by their evidence, and what was checked and did not
    change."""
    causes: list[str] = []
    ruled_out: list[str] = []
    # the judge comes first: a change of it makes all other differences of reward moot
    if judge.is_evident:
        answers = counted(judge.changed, "equal answer")
        causes.append(f"the judge changed at step {step} ({answers}, other rewards)")
    elif judge.same:
        ruled_out.append(f"judge no ({counted(judge.same, 'equal answer')}, same rewards)")
    causes += [f"{finding.text} (at step {step})" for finding in setup]
    if not setup:
        ruled_out += ["tools no", "sampling no", "model no"]
    failed = [finding.text for finding in others if finding.kind == "failures"]
    causes += failed
    if not causes and moved:
        causes += [f"the update: {finding.text}" for finding in others if _blames_update(finding)]
        kinds = {finding.kind for finding in others}
        if not causes and "update" in kinds:
            causes.append("the update in between, or other tasks")
        if not causes and "updates" in kinds:
            causes.append("the updates in between")
    if not causes:
        causes = ["nothing that was checked" if moved else "no change that chance does not explain"]
    return " · ".join([f"most likely: {'; then '.join(causes)}", *ruled_out])


def _blames_update(finding: Finding) -> bool:
    """Whether a metric moved in the direction of an update that was too large."""
    if finding.kind == "grad_norm":
        return (finding.after or 0.0) > (finding.before or 0.0)
    return finding.kind in ("kl", "entropy", "clip_share")
