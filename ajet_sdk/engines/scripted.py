"""`ScriptedEngine`: deterministic replies with token ids, for tests, demonstrations and replays.

`InProcess` lets an engine take the place of an endpoint's connection.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ajet_sdk.dialects.openai_chat import CHAT
from ajet_sdk.engines.chat import Chat, Conversation
from ajet_sdk.engines.loop_calls import in_thread
from ajet_sdk.engines.picture_text import encode_text
from ajet_sdk.engines.reply_schema import tool_calls_fault
from ajet_sdk.errors import EngineError
from ajet_sdk.pictures import Picture
from ajet_sdk.protocols import Answer, Ask, Engine, PictureFormat, Sampled, Tokenizer
from ajet_sdk.tokens.template import ChatTemplate

Reply = str | Mapping[str, object]
Replies = Callable[[Ask], Any] | Sequence[Reply]

MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls")
"""Keys of a scripted message."""

IMAGE = "<|image|>"
SPECIALS = (
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    IMAGE,
)

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif -%}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content or [] -%}
{{- '<|image|>' if part.type == 'image' else part.text -}}
{%- endfor %}{% endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
{{- '<tool_call>{"name": ' + (call.function.name | tojson) + ', "arguments": ' -}}
{{- (arguments if arguments is string else (arguments | tojson)) + '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


class BytePictures:
    """Pictures in the prompts of `ByteTokenizer`: a token for each square of 32 pixels, at most
    256."""

    token_id = 256 + SPECIALS.index(IMAGE)
    placeholder = IMAGE
    never_sampled: tuple[int, ...] = (token_id,)
    marks: tuple[str, ...] = (IMAGE,)

    def text_of(self, picture: Picture) -> tuple[str, int]:
        squares = -(-picture.width // 32) * -(-picture.height // 32)
        tokens = min(squares, 256)
        return IMAGE * tokens, tokens


class ByteTokenizer:
    """A tokenizer with a chat template and nothing to load: one id per byte, and seven special
    tokens from 256 on."""

    pictures: PictureFormat | None = BytePictures()

    chat_template: str | None = TEMPLATE
    variables: Mapping[str, object] = {"bos_token": "", "eos_token": "<|im_end|>"}
    eos_ids: frozenset[int] = frozenset({256 + SPECIALS.index("<|im_end|>")})
    vocab_size = 256 + len(SPECIALS)

    _bytes = (*(bytes([i]) for i in range(256)), *(special.encode() for special in SPECIALS))
    _split = re.compile("(" + "|".join(map(re.escape, SPECIALS)) + ")")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._split.split(text):
            if piece in SPECIALS:
                ids.append(256 + SPECIALS.index(piece))
            else:
                ids.extend(piece.encode("utf-8", "surrogatepass"))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self._bytes.__getitem__, ids)).decode("utf-8", "replace")

    def __len__(self) -> int:
        return len(self._bytes)

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]


class ScriptedEngine:
    """Returns scripted replies.

    `replies` is a function of the `Ask`, or a sequence, which starts anew for each agent of each
    episode. A sync function runs in a new thread per request, so that a blocking one delays no
    other request. A reply is a string, an assistant message (a dict, whose tool calls are rendered
    by the template), or from a function a list of these for the `n` choices. Exceptions of the
    function are raised as the engine's.

    `logprob` is the log-probability of every token, or a function of the ids. None: replies have
    none, as nobody sampled them, and estimators that need them leave these calls out
    (`untrainable`).
    """

    def __init__(
        self,
        replies: Replies,
        tokenizer: Tokenizer | None = None,
        *,
        model: str = "scripted",
        logprob: float | Callable[[Sequence[int]], Sequence[float]] | None = None,
        max_model_len: int | None = None,
        policy_version: int | None = 0,
        tool_call_parser: str = "auto",
    ) -> None:
        self.model = model
        self.policy_version = policy_version
        self.chat = Chat(
            tokenizer or ByteTokenizer(),
            max_model_len=max_model_len,
            tool_call_parser=tool_call_parser,
            constrains=False,
        )
        self._replies = replies
        self._logprob = logprob
        self._turns: Counter[tuple[str, str]] = Counter()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.chat.tokenizer

    @property
    def takes_pictures(self) -> bool:
        return self.chat.takes_pictures

    async def answer(self, ask: Ask) -> Answer:
        """Raises EngineError at the end of the script, and the function's errors."""
        conversation = await self.chat.prepare(ask)
        replies = await self._reply_to(ask)
        sampled = [
            self._sampled(conversation, replies[min(i, len(replies) - 1)])
            for i in range(ask.sampling.n)
        ]
        return self.chat.answer(conversation, sampled, self.model)

    async def count(self, ask: Ask) -> int:
        """Raises RequestRefused."""
        return await self.chat.length(ask)

    async def _reply_to(self, ask: Ask) -> Sequence[Reply]:
        if callable(self._replies):
            own_loop = inspect.iscoroutinefunction(self._replies)
            if own_loop:
                replies = self._replies(ask)
            else:
                replies = await _in_a_thread(self._replies, ask)
            if inspect.isawaitable(replies):
                replies = await replies
        else:
            turn = self._turns[ask.episode_id, ask.agent]
            self._turns[ask.episode_id, ask.agent] += 1
            if turn >= len(self._replies):
                raise EngineError(
                    f"the script has {len(self._replies)} replies, but agent {ask.agent!r} asked"
                    " for another"
                )
            replies = self._replies[turn]
        replies = replies if isinstance(replies, list) else [replies]
        if not replies or not all(isinstance(reply, (str, Mapping)) for reply in replies):
            raise EngineError(
                "a scripted reply must be a string, a message or a list of these (got"
                f" {replies!r:.200})"
            )
        for message in replies:
            if not isinstance(message, str):
                _check_message(message)
        return replies

    def _sampled(self, conversation: Conversation, reply: Reply) -> Sampled:
        tokenizer = self.tokenizer
        sampling = conversation.sampling
        text = reply if isinstance(reply, str) else self._spelt(reply)
        ids = [*encode_text(tokenizer, text), min(tokenizer.eos_ids)]
        cut = None
        finish = "stop"
        for end in range(1, len(ids) + 1) if sampling.stop else ():
            so_far = tokenizer.decode(ids[:end])
            matches = [so_far.index(stop) for stop in sampling.stop if stop in so_far]
            if matches:
                ids = ids[:end]
                cut = so_far[: min(matches)]
                break
        if sampling.max_tokens is not None and len(ids) > sampling.max_tokens:
            ids = ids[: sampling.max_tokens]
            cut = None
            finish = "length"
        reason: Literal["stop", "length"] = "stop" if finish == "stop" else "length"
        return Sampled(ids, self._logprobs(ids), reason, self.policy_version, cut)

    def _logprobs(self, ids: Sequence[int]) -> list[float] | None:
        if self._logprob is None:
            return None
        if callable(self._logprob):
            return list(self._logprob(ids))
        return [self._logprob] * len(ids)

    def _spelt(self, message: Mapping[str, object]) -> str:
        """An assistant message as the template renders it after its generation prompt."""
        template = ChatTemplate.of(self.tokenizer.chat_template, self.tokenizer.variables)
        turns = [
            template.form(m)
            for m in ({"role": "user", "content": "-"}, {"role": "assistant", **message})
        ]
        head = template.render(turns[:1])
        whole = template.render(turns, add_generation_prompt=False)
        if not whole.startswith(head):
            raise EngineError(
                "this template drops its generation prompt; write scripted replies as strings"
            )
        text = whole[len(head) :]
        ends = [
            text.rindex(end)
            for i in self.tokenizer.eos_ids
            if (end := self.tokenizer.decode([i])) in text
        ]
        return text[: max(ends)] if ends else text

    def forget(self, episode_id: str) -> None:
        self.chat.forget(episode_id)
        for key in [key for key in self._turns if key[0] == episode_id]:
            del self._turns[key]

    async def aclose(self) -> None:
        return


def _check_message(reply: Mapping[str, object]) -> None:
    """Raise EngineError for a message that a template would render incompletely or with `null`."""
    unknown = [name for name, value in reply.items() if value and name not in MESSAGE_KEYS]
    calls = reply.get("tool_calls")
    wrong = tool_calls_fault(calls) if calls else None
    if unknown:
        wrong = (
            f"{unknown[0]!r} is no key of a message (got {dict(reply)!r:.200}); keys:"
            f" {', '.join(MESSAGE_KEYS)}"
        )
    elif not isinstance(reply.get("content"), (str, list, type(None))):
        wrong = f"content must be text (got {reply['content']!r:.200})"
    if wrong is not None:
        raise EngineError(f"a scripted message cannot be rendered: {wrong}")


async def _in_a_thread(replies: Callable[[Ask], object], ask: Ask) -> Any:
    """Call a sync function in a daemon thread, so that a hung one blocks neither the loop nor the
    process's end."""

    def call() -> Any:
        try:
            return replies(ask)
        except StopIteration:  # futures refuse it; `lambda ask: next(replies)` raises it
            raise EngineError(
                f"the script has ended, but agent {ask.agent!r} asked for more"
            ) from None

    return await asyncio.wrap_future(in_thread(call, "ajet-scripted"))


class InProcess:
    """Posts requests for `chat/completions` to an engine.

    `limited`: pass `max_tokens` to the engine and report its usage.
    """

    def __init__(self, engine: Engine, *, limited: bool) -> None:
        self._engine = engine
        self._limited = limited
        self._requests = 0

    async def post(self, route: str, body: Mapping[str, object]) -> dict[str, object]:
        """Return the reply as JSON of OpenAI's API. Raises the engine's errors."""
        self._requests += 1
        episode = f"request-{self._requests}"
        limits = () if self._limited else ("max_tokens", "max_completion_tokens")
        sampled = {name: value for name, value in body.items() if name not in limits}
        try:
            answer = await self._engine.answer(CHAT.ask(sampled, episode, "default"))
        finally:
            self._engine.forget(episode)
        choices = [
            {
                "message": choice.message,
                "finish_reason": choice.finish_reason,
                "token_ids": [int(i) for i in choice.output_ids or ()],
            }
            for choice in answer.choices
        ]
        return {"choices": choices, **({"usage": dict(answer.usage)} if self._limited else {})}

    async def aclose(self) -> None:
        await self._engine.aclose()
