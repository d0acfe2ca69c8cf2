"""The kinds of judges: their names in `--judge` and `task_judge.judge_type`, and the functions that
open them.

Packages add kinds by the entry point group `ajet.judges`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points

GROUP = "ajet.judges"
CUSTOM = "customized_protocol"
"""The judge type of a user's function or class."""


@dataclass(frozen=True)
class JudgeKind:
    opener: str
    """`MODULE:FUNCTION`, which returns the judge of a `Config` with the section `task_judge`."""
    argument: str = ""
    """The argument after the name: `:PATTERN`, `:FILE`, `[:ARGUMENT]` (optional), or nothing."""
    key: str | None = None
    """The key of `task_judge` that the argument sets; for a FILE, to its content."""
    name: str | None = None
    """The name in `--judge`; None for the judge type."""


KINDS = {
    "exact": JudgeKind("ajet_sdk.judges.text:open_exact"),
    "math": JudgeKind("ajet_sdk.judges.math:open_math"),
    "regex": JudgeKind("ajet_sdk.judges.text:open_regex", ":PATTERN", "pattern"),
    "code": JudgeKind("ajet_sdk.judges.code:open_code"),
    "llm": JudgeKind("ajet_sdk.judges.llm:open_llm", ":FILE", "llm"),
    "rubrics_auto_grader": JudgeKind(
        "ajet_sdk.judges.rubric:open_rubric", ":FILE", "rubrics_auto_grader", "rubric"
    ),
    "combined": JudgeKind("ajet_sdk.judges.combined:open_combined", ":FILE", "combined"),
}


def judge_kinds() -> dict[str, JudgeKind]:
    """ajet's kinds, and those of installed packages, whose argument is
    `task_judge.options.argument`."""
    added = {
        entry.name: JudgeKind(entry.value, "[:ARGUMENT]", "options")
        for entry in entry_points(group=GROUP)
    }
    return {**added, **KINDS}


def kind_named(word: str) -> tuple[str, JudgeKind | None]:
    """The judge type and kind of a name in `--judge`; unknown names are class paths of a user's
    judge."""
    for judge_type, kind in KINDS.items():
        if word == (kind.name or judge_type):
            return judge_type, kind
    added = (
        judge_kinds() if word.isidentifier() else {}
    )  # reading the installed packages takes time
    return (word, added[word]) if word in added else (CUSTOM, None)


def judge_forms(kinds: Mapping[str, JudgeKind]) -> list[str]:
    """The forms of `--judge`: `exact`, `regex:PATTERN`, `llm:FILE`, `file.py:function`."""
    named = [f"{kind.name or judge_type}{kind.argument}" for judge_type, kind in kinds.items()]
    return [*named, "file.py:function", "module->Name"]
