"""Reads what a row asks and what it answers, in every shape of row that public datasets have.

| shape | question | answer |
|---|---|---|
| task | `main_query`, `init_messages`, context in `metadata` | `metadata.answer` |
| question and answer | `question`, `query`, `problem`, `prompt`, ... | `answer`, `solution`, `gold`, `label`, ... |
| Alpaca, Dolly | `instruction` with `input` or `context` | `output`, `response` |
| reading, text to SQL | `passage` or `context`, `question`; `db_id`, `schema` | `answer`, `sql` |
| multiple choice | `question` with `choices`, `options`, `A` to `D`, `endings` | `answer`, `answerKey`, `label` |
| chat | `messages`, `conversations` (ShareGPT), `prompt` as messages | the last assistant message |
| preference | `prompt` | `chosen` |

Everything that compares, checks or exports rows reads them here, so that two rows are the same
question for all or for none. `ajet_sdk/tasks/row_names.py` has the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from string import ascii_uppercase
from typing import Any

from ajet_sdk.picture_files import PictureFile
from ajet_sdk.tasks.row_names import (
    ANSWER_NAMES,
    ANSWERS,
    CHATS,
    CHOICES,
    CONTEXTS,
    INNER,
    INPUTS,
    LABELLED,
    MEDIA,
    ONE_CHOICE,
    OPENED,
    OPENINGS,
    PICTURES,
    QUESTIONS,
    REPLIES,
    SYSTEMS,
    TOOLS,
    VERDICTS,
    asks_by_one,
    squashed,
)
from ajet_sdk.tasks.row_pictures import DATA, apart, pictures_among, without_places
from ajet_sdk.tasks.row_texts import (
    chat_of,
    distinct,
    encoded,
    fold,
    is_system,
    number_of,
    strings_of,
    text_of_context,
    text_of_message,
    texts_of_choices,
)

PART = "\x1d"
"""Separates the parts of a question in its text, such as passage and question. Similar questions
are similar in each part: two questions about one long passage are different. White space for all
other readers of the text.
"""
SYSTEM = "\x1c"
"""Separates a system prompt and tools from the question."""

_PICTURE = "image: "
"""Begins the part of a picture, which is followed by its number."""
_PICTURES = frozenset(map(squashed, PICTURES))
_SQL = re.compile(r"\s*(?:select|with|insert|update|delete|create)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Question:
    """What a row asks."""

    system: tuple[str, ...] = ()
    """System prompt and tools."""
    parts: tuple[str, ...] = ()
    """Context, question and choices; for a conversation, the messages before the reply."""
    messages: Sequence[Mapping[str, object]] = ()
    """The same as a prompt."""
    columns: frozenset[str] = frozenset()
    """The columns that the prompt is made of."""
    asking: tuple[str, ...] = ()
    """The parts that may be a question alone, without labels and choices."""

    @property
    def text(self) -> str:
        """All parts, separated by `PART`; the system's before `SYSTEM`."""
        system = f"\n{PART}".join(self.system)
        asked = f"\n{PART}".join(self.parts)
        return f"{system}\n{SYSTEM}{asked}" if system else asked

    @property
    def plain(self) -> str:
        """The text for a reader."""
        return "\n\n".join((*self.system, *self.parts))


def without_system(text: str) -> str:
    """Returns the text of a question without system prompt and tools, which hide no leak."""
    return text.rpartition(SYSTEM)[2]


def pictures_of(text: str) -> frozenset[str]:
    """Returns the parts of a question's text that stand for its pictures."""
    if _PICTURE not in text:
        return frozenset()
    parts = (part.strip() for part in text.split(PART))
    return frozenset(part for part in parts if part.startswith(_PICTURE))


def readable(text: str) -> str:
    """Returns the text of a question without the marks between its parts."""
    return text.replace(PART, "").replace(SYSTEM, "")


def question_of(values: Mapping[str, object]) -> Question:
    """Returns all of what a row asks; empty if nothing that is known to ask."""
    return Reading(values).question


def plain_question(values: Mapping[str, object]) -> str:
    """Returns what a row asks, for a reader: a person, a model."""
    return question_of(values).plain or strings_of(values)


def text_of(values: Mapping[str, object]) -> str:
    """Returns the text by which a row is compared (`Reading.text`)."""
    return Reading(values).text


def _has_picture(values: Iterable[object]) -> bool:
    """Whether a column of any name has a picture; each row is asked, so that the loop is plain."""
    for value in values:
        if isinstance(value, str):
            if value.startswith(DATA) or isinstance(value, PictureFile):
                return True
        elif isinstance(value, dict):
            if _has_picture(value.values()):
                return True
        elif isinstance(value, list) and _has_picture(value):
            return True
    return False


@lru_cache(maxsize=4096)
def _only_column(names: tuple[str, ...], inner: tuple[str, ...]) -> str | None:
    # most files have a few sets of names, and reading a whole question takes ten times as long
    return asks_by_one(names, inner)


def answer_of(values: Mapping[str, object]) -> Any:
    """Returns what a row answers (`Reading.answer`), or None."""
    return Reading(values).answer


@dataclass(frozen=True)
class Reply:
    """The messages of a reply, and the column that holds them."""

    messages: Sequence[Mapping[str, object]]
    column: str


def messages_of_reply(value: object) -> list[dict[str, object]]:
    """Returns a text, a message or the end of a conversation as the assistant's messages."""
    if isinstance(value, str) and value.strip():
        return [{"role": "assistant", "content": value}]
    messages = chat_of([value] if isinstance(value, Mapping) else value)
    asked = [
        index
        for index, message in enumerate(messages)
        if message.get("role") in ("user", "system", "developer")
    ]
    return messages[asked[-1] + 1 :] if asked else messages


def _simple(value: object) -> Any:
    """Returns the answer in a value, such as SQuAD's `{"text": ["42"]}`; None for an empty one."""
    if isinstance(value, Mapping):
        for name in ("text", "value", "answer", "ground_truth"):
            if (inner := _simple(value.get(name))) is not None:
                return inner
    if isinstance(value, list) and len(value) == 1:
        return _simple(value[0])
    if value is None or value in ("", [], {}) or (isinstance(value, str) and not value.strip()):
        return None
    return value


_ANSWERED = (*ANSWERS, *REPLIES)


@lru_cache(maxsize=4096)
def _present(fields: frozenset[str], names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if squashed(name) in fields)


class Reading:
    """What a row asks and answers. Each part is read when it is first asked for, and once.

    The fields of the metadata count among those of the row.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values = values
        self.messages: list[dict[str, object]] = []
        self.columns: set[str] = set()

    @cached_property
    def fields(self) -> dict[str, list[tuple[str, object]]]:
        """Field names and values, by the form in which names are compared; the metadata's first."""
        fields: dict[str, list[tuple[str, object]]] = {}
        inner = [self.values.get(name) for name in INNER]
        for mapping in (*inner, self.values):
            for name, value in mapping.items() if isinstance(mapping, Mapping) else ():
                if value is not None:
                    fields.setdefault(squashed(str(name)), []).append((str(name), value))
        return fields

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self.fields)

    @cached_property
    def text(self) -> str:
        """The text by which the row is compared: what it asks, else its strings without answers,
        else all strings."""
        values = self.values
        inner = [values.get(name) for name in INNER if name in values]
        column = _only_column(
            tuple(name for name, value in values.items() if value is not None),
            tuple(name for mapping in inner if isinstance(mapping, Mapping) for name in mapping),
        )
        text = values[column] if column is not None else None
        if not isinstance(text, str) or not text.strip() or _has_picture(values.values()):
            text = self.question.text
        if text.strip():
            return text
        unanswered = {
            name: value for name, value in values.items() if squashed(name) not in ANSWER_NAMES
        }
        return strings_of(unanswered) or strings_of(values)

    @cached_property
    def truths(self) -> list[Any]:
        """The values of all fields that hold the right answer, the best first."""
        return list(self.truths_in(ANSWERS))

    def truths_in(self, names: Sequence[str]) -> Iterator[Any]:
        """Yields the values of the fields of these names that hold the right answer, in the order
        of the names."""
        is_replied = any(self.value(name) is not None for name in self.present(REPLIES))
        for name in self.present(tuple(names)):
            for _, value in self.fields.get(squashed(name), ()):
                answer = _simple(value)
                says_worth = isinstance(answer, bool) and is_replied and name in VERDICTS
                if answer is not None and not says_worth:
                    yield answer
        if names is ANSWERS and self.query_is_answer():
            yield self.value("query")

    @cached_property
    def reply(self) -> Reply | None:
        """The end of the row's conversation, else a completion or the better of two."""
        for name in self.present(CHATS):
            if name in OPENED:
                continue
            for column, value in self.fields.get(squashed(name), ()):
                messages = chat_of(value)
                if messages and messages[-1].get("role") == "assistant":
                    return Reply(messages[-1:], column)
        for name in self.present(REPLIES):
            for column, value in self.fields.get(squashed(name), ()):
                if messages := messages_of_reply(value):
                    return Reply(messages, column)
        return None

    @cached_property
    def answer(self) -> Any:
        """The right answer, else the reply, else the last assistant message, or None."""
        if self.truths:
            return self.truths[0]
        if self.reply is None:
            return None
        return text_of_message(self.reply.messages[-1]) or None

    def present(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Returns those of the names that are fields, in their order."""
        return _present(self.names, names)

    def value(self, name: str) -> object:
        """Returns the value of a field that is not blank, or None."""
        for _, value in self.fields.get(squashed(name), ()):
            if value not in ("", [], {}):
                return value
        return None

    def query_is_answer(self) -> bool:
        """Whether `query` is the SQL that answers the row's `question`, as in Spider."""
        query = self.value("query")
        if not isinstance(query, str) or _SQL.match(query) is None:
            return False
        return any(isinstance(self.value(name), str) for name in ("main_query", "question"))

    @cached_property
    def question(self) -> Question:
        """All of what the row asks; empty if nothing that is known to ask."""
        self._read_chat()
        chat = self._chat_text()
        before = self._texts(CONTEXTS)
        questions: list[str] = []
        if self._is_asked_in_chat:
            # the others are often the conversation in another form, such as the text of its
            # template
            questions = self._texts(("main_query", "question", "query", "problem"))
        else:
            questions = self._texts(QUESTIONS)
            questions += self._inputs(questions)
        if self.messages:
            last = fold(text_of_message(self.messages[-1]))
        else:
            last = ""
        questions = [text for text in questions if fold(text) not in last]
        prose = distinct([*before, *questions], [chat] if chat else [])
        before = [text for text in before if text in prose]
        questions = [text for text in questions if text in prose and text not in before]
        before = [*self._labels(), *before]
        choices = self._listed_choices("\n".join([*prose, chat]))
        system = self._system()
        said = [chat] if chat else []
        pictures = [f"{_PICTURE}{number_of(value)}" for value in self._pictures()]
        asked = [*before, *said, *questions]
        if pictures:  # told by their pixels, wherever a row has them and says where they are
            asked = [text for text in map(without_places, asked) if text]
        return Question(
            system=tuple(text for _, text in system),
            parts=(*self._media(), *pictures, *asked, *choices),
            messages=self._prompt(
                system=[text for name, text in system if name not in TOOLS],
                before=before,
                questions=questions,
                choices=choices,
            ),
            columns=frozenset(self.columns),
            asking=(*prose, *said),
        )

    def _read_chat(self) -> None:
        self._is_asked_in_chat = False
        for name in self.present(CHATS):
            for column, value in self.fields.get(squashed(name), ()):
                messages = chat_of(value)
                if not messages:
                    continue
                # a prompt that ends in the assistant's words is continued: they are part of it
                is_answered = messages[-1].get("role") == "assistant" and name not in OPENED
                if (
                    not is_answered
                    and name not in (*OPENED, *OPENINGS)
                    and self.value("main_query")
                ):
                    continue
                self.columns.add(column)
                self.messages = messages[:-1] if is_answered else messages
                has_user = any(message.get("role") == "user" for message in self.messages)
                self._is_asked_in_chat = has_user and name not in OPENINGS
                return

    def _system(self) -> list[tuple[str, str]]:
        """Returns system prompts and tools, each with the name of its field."""
        parts = [("system", text_of_message(m)) for m in self.messages if is_system(m)]
        for name in self.present(SYSTEMS):
            value = self.value(name)
            text = value if isinstance(value, str) else encoded(value)
            if text.strip() and all(fold(text) != fold(known) for _, known in parts):
                parts.append((name, text))
                if name not in TOOLS:
                    self._use(name)
        return [(name, text) for name, text in parts if text.strip()]

    def _texts(self, names: Sequence[str]) -> list[str]:
        texts: list[str] = []
        for name in self.present(tuple(names)):
            if name == "query" and self.query_is_answer():
                continue
            for column, value in self.fields.get(squashed(name), ()):
                if not chat_of(value) and (text := text_of_context(value)):
                    self.columns.add(column)
                    texts.append(text)
        return texts

    def _inputs(self, questions: Sequence[str]) -> list[str]:
        """Returns the material of an instruction, without a `text` that is the whole row, or a
        corpus's."""
        texts = self._texts(INPUTS)
        whole = self.value("text")
        is_repeated = isinstance(whole, str) and any(
            fold(question) in fold(whole) for question in questions
        )
        if is_repeated or not (questions or self._is_answered()):
            return [text for text in texts if text != whole]
        return texts

    def _is_answered(self) -> bool:
        return any(self.value(name) is not None for name in self.present(_ANSWERED))

    def _labels(self) -> list[str]:
        labels = []
        for name in self.present(LABELLED):
            if (value := self.value(name)) is not None:
                labels.append(f"{name}: {text_of_context(value)}")
                self._use(name)
        return labels

    def _media(self) -> list[str]:
        """Returns a number for each sound and video; texts with different numbers are never near
        copies."""
        values = [(name, self.value(name)) for name in self.present(MEDIA)]
        return [f"{name}: {number_of(value)}" for name, value in values if value is not None]

    def _pictures(self) -> list[object]:
        """Returns the pictures of columns and messages, but not those that answer."""
        pictures: list[object] = []
        for squashed_name, pairs in self.fields.items():
            if squashed_name in ANSWER_NAMES:
                continue
            for _, value in pairs:
                if squashed_name in _PICTURES:
                    pictures += value if isinstance(value, list) else [value]
                else:
                    pictures += pictures_among(value)
        for message in self.messages:
            pictures += apart(message.get("content"))[1]
        return [value for value in pictures if value not in ("", [], {}, None)]

    def _listed_choices(self, said: str) -> list[str]:
        """Returns the choices as one part, unless the question lists them itself."""
        choices = self._choices()
        if not choices or all(fold(choice) in fold(said) for choice in choices):
            return []
        return [
            "\n".join(
                f"{letter}. {text}" for letter, text in zip(ascii_uppercase, choices, strict=False)
            )
        ]

    def _choices(self) -> list[str]:
        for name in self.present(CHOICES):
            value = self.value(name)
            texts = texts_of_choices(value)
            if texts:
                self._use(name)
                return texts
        single = sorted(
            (name, value)
            for pairs in self.fields.values()
            for name, value in pairs
            if ONE_CHOICE.fullmatch(name) and isinstance(value, str | int | float)
        )
        if len(single) < 2:
            return []
        self.columns.update(name for name, _ in single)
        return [str(value) for _, value in single]

    def _use(self, name: str) -> None:
        self.columns.update(column for column, _ in self.fields.get(squashed(name), ()))

    def _chat_text(self) -> str:
        said = [message for message in self.messages if not is_system(message)]
        texts = []
        for message in said:
            content, _ = apart(message.get("content"))
            texts.append(text_of_message({**message, "content": content}))
        if len(said) == 1:
            return texts[0]
        return "\n\n".join(
            text for text in texts if text.strip()
        )  # names of roles would make all dialogues alike

    def _prompt(
        self,
        *,
        system: Sequence[str],
        before: Sequence[str],
        questions: Sequence[str],
        choices: Sequence[str],
    ) -> list[dict[str, object]]:
        """Returns the conversation, with the other parts in its last user message or in one of
        their own."""
        in_chat = [text_of_message(message) for message in self.messages if is_system(message)]
        messages: list[dict[str, object]] = []
        messages += [{"role": "system", "content": text} for text in system if text not in in_chat]
        messages += self.messages
        last = messages[-1] if self.messages else {}
        content = last.get("content")
        if not questions and last.get("role") == "user" and isinstance(content, str):
            text = "\n\n".join([*before, content, *choices])
            return [*messages[:-1], {**last, "content": text}]
        if added := [*before, *questions, *choices]:
            messages.append({"role": "user", "content": "\n\n".join(added)})
        return messages
