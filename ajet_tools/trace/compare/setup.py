"""Finds what changed between two steps besides the policy: its requests, its model and its judge.

Requests are compared by what isn't a message: tools, choice of tools, format of the answer,
sampling, model, and the system prompt. The judge is compared by its rewards of equal answers to
equal tasks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
_SHOWN = 60


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
        old, new = earlier[agent, aspect], later[agent, aspect]
        gone, added = sorted(old - new), sorted(new - old)
        if not gone or not added:
            continue  # a value that is only rarer or more frequent is the agent's choice
        text = (
            f"{aspect} of agent {one_line(agent, 40)}: {_short(aspect, gone)} →"
            f" {_short(aspect, added)}"
        )
        yield Finding("setup", text)


def request_values(
    reader: TraceReader, run_id: str, split: str | None, decoding: str | None, step: int | None
) -> dict[tuple[str, str], set[str]]:
    """Returns the values of each agent and aspect in a run's episodes of a kind (None: any)."""
    listed = ", ".join(
        f'list(DISTINCT ({sql})::VARCHAR) AS "{name}"' for name, sql in ASPECTS.items()
    )
    found: list[dict[str, Any]] = rows(
        reader,
        f"""
        SELECT agent, {listed} FROM calls c JOIN episodes e USING (episode_id)
        WHERE e.run_id = $1 AND ($2::VARCHAR IS NULL OR e.split = $2)
          AND ($3::VARCHAR IS NULL OR e.decoding = $3) AND ($4::INTEGER IS NULL OR e.step = $4)
          AND NOT coalesce(e.superseded, false) AND phase = 'rollout' GROUP BY agent""",
        run_id,
        split,
        decoding,
        step,
    )
    values: dict[tuple[str, str], set[str]] = {}
    for row in found:
        for name in ASPECTS:
            values[str(row["agent"]), name] = {value or "none" for value in row[name] or ["none"]}
    return values


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
            function = tool.get("function", tool) if isinstance(tool, dict) else {}
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
          list(example) FILTER (len(before) = 1 AND len(after) = 1 AND before <> after) AS examples
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
