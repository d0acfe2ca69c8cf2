"""Names of the fields of rows: which ask, and which answer.

Names are compared without case, separators and digits: `answerKey`, `Correct Answer`, `question_2`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

QUERY_COLUMNS = ("main_query", "question", "query", "prompt", "problem", "instruction")
"""Common names of the column with the question; a row with one of these, and no other part, is read
by columns."""
QUESTIONS = (
    *QUERY_COLUMNS,
    *(
        "instructions",
        "question_stem",
        "question_text",
        "question_content",
        "problem_statement",
        "user_query",
    ),
    *("user_prompt", "stem", "goal", "claim", "hypothesis", "turns"),
)
TOOLS = ("tools", "functions")
SYSTEMS = ("system", "system_prompt", "system_message", *TOOLS)
CONTEXTS = (
    *(
        "context",
        "contexts",
        "ctx",
        "passage",
        "passages",
        "paragraph",
        "paragraphs",
        "article",
        "document",
    ),
    *(
        "documents",
        "story",
        "background",
        "evidence",
        "fact",
        "facts",
        "conversation",
        "dialogue",
        "dialog",
    ),
    *("history", "premise", "table", "tables", "starter_code"),
)
LABELLED = ("schema", "table_schema", "db_schema", "ddl", "db_id", "database", "db")
"""Context that a reader doesn't recognize without its name."""
PICTURES = ("image", "images", "image_path")
MEDIA = ("audio", "audios", "video", "videos")
INPUTS = ("input", "inputs", "sentence", "text")
"""Asked by themselves, or material for an instruction. A conversation has them already, in another
form."""
CHOICES = (
    "choices",
    "options",
    "candidates",
    "endings",
    "alternatives",
    "answer_choices",
    "mcq_options",
)
ONE_CHOICE = re.compile(
    r"(?:[oO]ption|[cC]hoice|op|sol)_?(?:[a-eA-E]|[1-9])|[aA]nswer_?[A-E]|[A-E]"
)
"""Matches a column with one choice: `A`, `option1`, `answerB`, `opa`, `sol2`."""
ANSWERS = (
    *(
        "answer",
        "final_answer",
        "ground_truth",
        "ground_truth_answer",
        "gold",
        "gold_answer",
        "expected",
    ),
    *(
        "expected_answer",
        "expected_output",
        "correct_answer",
        "correct",
        "correct_option",
        "answer_key",
        "best_answer",
    ),
    *(
        "reference_answer",
        "reference_solution",
        "correct_response",
        "exact_answer",
        "short_answer",
        "answer_text",
    ),
    *(
        "ans",
        "gt",
        "truth",
        "target",
        "solution",
        "canonical_solution",
        "answers",
        "solutions",
        "result",
        "sql",
    ),
    *("reference", "label", "labels", "targets", "answer_idx", "cop"),
)
"""Fields with the answer that is right, the best first."""
VERDICTS = ("correct", "label", "labels", "target")
"""True or false in these says what a reply of the row is worth."""
REPLIES = (
    "completion",
    "response",
    "output",
    "outputs",
    "chosen",
    "reply",
    "summary",
    "highlights",
)
"""Fields with a reply, one of several that a question may have."""
CHATS = (
    "init_messages",
    "messages",
    "conversations",
    "conversation",
    "prompt",
    "chat",
    "dialogue",
    "dialog",
    "turns",
)
OPENINGS = ("init_messages", "dialogue", "dialog")
"""Conversations that a question may follow."""
OPENED = ("prompt", "init_messages")
"""Conversations without a reply; one that ends in the assistant's words is to be continued."""
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "bot": "assistant",
    "ai": "assistant",
}
INNER = ("metadata", "extra_info", "reward_model")
"""Objects whose fields count as columns; the latter two are verl's."""


def asks_by_one(names: Iterable[str], inner: Iterable[str] = ()) -> str | None:
    """Returns the only column that asks among those of a row and of its metadata, or None if
    several may."""
    asking = [name for name in names if is_asking(name)]
    if len(asking) == 1 and asking[0] in QUERY_COLUMNS and not any(map(is_asking, inner)):
        return asking[0]
    return None


def is_answer(name: str) -> bool:
    """Whether a field of this name may hold the right answer."""
    return squashed(name) in _TRUTH_NAMES


def is_reply(name: str) -> bool:
    """Whether a field of this name may hold a reply, alone or at the end of a conversation."""
    return squashed(name) in _REPLY_NAMES


def is_asking(name: str) -> bool:
    """Whether a field of this name may be part of a question."""
    return squashed(name) in _ASKING_NAMES or ONE_CHOICE.fullmatch(name) is not None


@cache
def squashed(name: str) -> str:
    """Returns the form in which names are compared."""
    return re.sub(r"[^a-z]", "", name.lower())


_ASKING = dict.fromkeys(
    (*QUESTIONS, *SYSTEMS, *CONTEXTS, *LABELLED, *PICTURES, *MEDIA, *INPUTS, *CHOICES, *CHATS)
)
_ASKING_NAMES = frozenset(map(squashed, _ASKING))
_TRUTH_NAMES = frozenset(map(squashed, ANSWERS))
_REPLY_NAMES = frozenset(map(squashed, (*REPLIES, *CHATS))) - {"prompt"}
ANSWER_NAMES = _TRUTH_NAMES | frozenset(map(squashed, REPLIES))
