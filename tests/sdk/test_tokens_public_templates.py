"""Exact ids on published chat templates, as TRL collects them: our text is transformers' text, and
ids are kept."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from ajet_sdk.engines.prompts import PromptBuilder
from ajet_sdk.errors import RequestRefused
from ajet_sdk.tokens.probing import learn
from ajet_sdk.tokens.template import ChatTemplate, clean

FOUND = importlib.util.find_spec("trl")
FOLDER = Path(FOUND.origin).parent / "chat_templates" if FOUND and FOUND.origin else Path("none")
TEMPLATES = sorted(FOLDER.glob("*.jinja"))
pytestmark = pytest.mark.skipif(not TEMPLATES, reason="TRL is not installed")

TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Calculates.",
        "parameters": {
            "type": "object",
            "properties": {"e": {"type": "string", "description": "what"}},
        },
    },
}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "calc", "arguments": '{"e": "12*34"}'},
}
MARKER = re.compile(r"<\|[^|<>\s]{1,30}\|>|<｜[^｜<>]{1,30}｜>|</?[a-z_]{1,20}>|\[/?[A-Z_]{3,20}\]")
Message = dict[str, Any]


def said(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


CONVERSATIONS: dict[str, tuple[list[Message], list[Any] | None, list[Message], list[Message]]] = {
    # what is asked, tools, replies, and what is asked after each
    "plain": (
        [said("user", "What is 3 + 4?")],
        None,
        [said("assistant", "The answer is 7."), said("assistant", "yes it is")],
        [said("user", "and then?"), said("user", "so")],
    ),
    "system": (
        [said("system", "You are a helpful assistant."), said("user", "the quick brown fox")],
        None,
        [said("assistant", "jumps over")],
        [said("user", "the lazy dog")],
    ),
    "tools": (
        [said("user", "What is 12*34?")],
        [TOOL],
        [said("assistant", "", tool_calls=[CALL]), said("assistant", "It is 408.")],
        [said("tool", "408", tool_call_id="call00001", name="calc"), said("user", "thanks")],
    ),
    "reasoning": (
        [said("user", "What is 3 + 4?")],
        None,
        [said("assistant", "7", reasoning_content="three and four"), said("assistant", "yes")],
        [said("user", "is that so?"), said("user", "so")],
    ),
}


class Published:
    """A byte-level tokenizer that knows the markers of one template."""

    pictures = None

    def __init__(self, inner: Any, source: str) -> None:
        self.inner = Tokenizer.from_str(inner.to_str())
        markers = sorted(set(MARKER.findall(source)) | {"<bos>", "<eos>"})
        self.inner.add_special_tokens(
            [AddedToken(text, special=True, normalized=False) for text in markers]
        )
        self.chat_template: str | None = source
        self.variables: Mapping[str, Any] = {"bos_token": "<bos>", "eos_token": "<eos>"}
        self._special = {
            i for i, token in self.inner.get_added_tokens_decoder().items() if token.special
        }
        self.eos_ids = frozenset({self.inner.token_to_id("<eos>")})

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Any) -> str:
        text: str = self.inner.decode(list(ids), skip_special_tokens=False)
        return text

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        return self.decode([token_id]).encode()


@cache
def published(path: Path, make: Callable[..., Any]) -> Published:
    return Published(make().inner, path.read_text(encoding="utf-8"))


LACKING = re.compile(
    r"cohere2?|deepseek_r1_distill|gemma3?|idefics3|lfm2|llama3|llava_next|phi3(_5)?|qwen2_5_vl|smolvlm"
)
"""Templates that render no tools, or no calls; deepseekv3 renders calls alone."""


def of_transformers(
    tok: Published, messages: list[Message], tools: Any, generate: bool = True
) -> str | None:
    """What transformers renders of the messages in the form that the template reads, with tools as
    text where it renders none; None where it refuses."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = ChatTemplate.of(tok.chat_template, tok.variables)
    if template.in_hermes_form(messages, tools):
        messages, tools = template._as_text([clean(m) for m in messages], tools)
    formed = [template.form(m) for m in messages]
    try:
        [text], _ = render_jinja_template(
            [formed],
            tools=tools,
            chat_template=tok.chat_template,
            add_generation_prompt=generate,
            **tok.variables,
        )
    except Exception:  # noqa: BLE001  a template refuses in many ways
        return None
    return str(text)


def sampled_of(tok: Published, messages: list[Message], reply: Message, tools: Any) -> list[int]:
    """What the model may have sampled: the reply as the template writes it, letter by letter where
    it is plain."""
    head, whole = (
        of_transformers(tok, messages, tools),
        of_transformers(tok, [*messages, reply], tools, False),
    )
    body = (
        whole[len(head) :]
        if head and whole and whole.startswith(head)
        else str(reply["content"]) + "<eos>"
    )
    return [
        i for piece in re.split(f"({MARKER.pattern}|.)", body) if piece for i in tok.encode(piece)
    ]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_text_is_that_of_transformers_and_sampled_ids_are_kept(
    path: Path, tokenizer_of: Callable[..., Any]
) -> None:
    tok = published(path, tokenizer_of)
    rendered = 0
    for name, (asked, tools, replies, following) in CONVERSATIONS.items():
        tokens, messages, before = PromptBuilder(tok), list(asked), list[list[int]]()
        for turn in range(len(replies) + 1):
            expected = of_transformers(tok, messages, tools)
            try:
                prompt = tokens.prompt(messages, tools)
            except RequestRefused:
                assert expected is None, (name, turn)
                break
            assert prompt.text == expected, (name, turn)
            rendered += 1
            shown = tok.decode(prompt.ids)
            if prompt.reused:
                assert list(prompt.ids[: prompt.reused]) in before, (name, turn)
                assert (prompt.cause is None) == (prompt.reused == len(before[-1])), (name, turn)
                assert "".join(shown.split()) == "".join(prompt.text.split()), (name, turn)
            else:
                assert list(prompt.ids) == tok.encode(prompt.text) and (turn == 0) == (
                    prompt.cause is None
                ), (name, turn)
            if turn == len(replies):
                break
            output = sampled_of(tok, messages, replies[turn], tools)
            tokens.commit(prompt, output, replies[turn])
            before.append([*prompt.ids, *output])
            messages += [replies[turn], following[turn]]
    assert rendered >= 2, "the template refuses everything"


@pytest.mark.parametrize(
    "name", ["cohere2", "gemma3", "glm4moe", "lfm2", "llama3_1", "qwen2_5", "smolvlm"]
)
def test_a_template_that_keeps_history_keeps_a_conversation_in_one_piece(
    name: str, tokenizer_of: Callable[..., Any]
) -> None:
    """Else the law above would say nothing. Others strip the reasoning that their generation prompt
    opens."""
    tok = published(FOLDER / f"{name}.jinja", tokenizer_of)
    asked, tools, replies, following = CONVERSATIONS["plain"]
    tokens = PromptBuilder(tok)
    prompt = tokens.prompt(asked, tools)
    tokens.commit(prompt, sampled_of(tok, asked, replies[0], tools), replies[0])
    assert tokens.prompt([*asked, replies[0], following[0]], tools).reused > len(prompt.ids)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_that_supports_tools_keeps_its_form(
    path: Path, tokenizer_of: Callable[..., Any]
) -> None:
    tok, name = published(path, tokenizer_of), path.stem.removesuffix("_training")
    lacks = ChatTemplate.of(tok.chat_template, tok.variables).lacks
    if name == "deepseekv3":
        assert lacks == {"tools"}
    else:
        assert ("calls" in lacks) == bool(LACKING.fullmatch(name)) >= ("tools" in lacks)
        assert not lacks or learn(tok).calls[0].open.strip() == "<tool_call>"


OWN_SYNTAX = re.compile("gemma4|diffusion_gemma|muse")
"""Templates whose arguments are written in no syntax that is learnt."""


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_calls_that_a_template_shows_are_read_back(
    path: Path, tokenizer_of: Callable[..., Any]
) -> None:
    tok = published(path, tokenizer_of)
    template, form = ChatTemplate.of(tok.chat_template, tok.variables), learn(tok)
    for arguments in ({"e": "12*34"}, {}, {"e": "Zürich 東京"}):
        call = {**CALL, "function": {"name": "calc", "arguments": json.dumps(arguments)}}
        text = template.reply_text(said("assistant", "", tool_calls=[call]), [TOOL])
        plain = template.reply_text(said("assistant", "zqtext"), [TOOL])
        text = text.rstrip().removesuffix(plain.partition("zqtext")[2].rstrip())
        if "calc" not in text or OWN_SYNTAX.search(path.stem):
            continue
        read = form.parse(text, tools=[TOOL])
        assert [(name, json.loads(spelt)) for name, spelt in read.calls] == [("calc", arguments)], (
            text
        )
