"""`TokenEngine`: converts messages to token ids, samples, and converts the new ids to a message,
for any template."""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from ajet_sdk.dialects.fields import COMPLETIONS, refuse
from ajet_sdk.engines.picture_text import encode_text
from ajet_sdk.engines.prompts import Prompt, PromptBuilder
from ajet_sdk.engines.reply_schema import tool_calls_fault
from ajet_sdk.errors import ConfigError, ContextOverflow, RequestRefused
from ajet_sdk.pictures import PlacedPicture
from ajet_sdk.protocols import (
    Answer,
    Ask,
    Choice,
    Sampled,
    Sampler,
    Sampling,
    Tokenizer,
)
from ajet_sdk.tokens.formats import Parsed, ReplyFormat
from ajet_sdk.tokens.grammars import TYPED, allowed_tools, reply_grammar
from ajet_sdk.tokens.pieces import CutPoints
from ajet_sdk.tokens.probing import call_id, learn
from ajet_sdk.tokens.template import ChatTemplate

T = TypeVar("T")
_log = logging.getLogger("ajet")

NO_LIMIT = 2**31
_OTHERWISE_GIVEN = {"self", "messages", "tools", "continue_last", "at"}
"""Names of a template's variables, and of parameters on the way to it, that no request may set."""
LARGE_TEXT = 2**18
"""Characters of a request whose prompt is built in a thread: about 60,000 tokens, which take tens
of milliseconds."""
LARGE_MESSAGES = 2_000
PICTURE_WEIGHT = 16
"""Characters of text that take as long as one of a picture's data URL."""
PROMPT_END = 64
"""Final prompt tokens to search for the start of a reasoning block."""


@dataclass(frozen=True)
class Conversation:
    """A tokenized request."""

    ask: Ask
    prompt_ids: Sequence[int]
    sampling: Sampling
    prompt: Prompt | None = None
    """For chat."""

    @property
    def pictures(self) -> tuple[PlacedPicture, ...]:
        """The pictures in `prompt_ids`."""
        return () if self.prompt is None else self.prompt.pictures


class Chat:
    """An engine without its sampler: validation, exact ids per episode and agent, parsing of
    replies."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int | None = None,
        tool_call_parser: str = "auto",
        rescored: bool = True,
        constrains: bool = True,
        takes_pictures: bool = True,
        name: str = "the model",
    ) -> None:
        self.tokenizer = tokenizer
        self.name = name
        self.takes_pictures = takes_pictures and tokenizer.pictures is not None
        self._rescored = rescored
        self._constrains = constrains
        self.max_model_len = max_model_len or NO_LIMIT
        self._parser = tool_call_parser
        self._large = asyncio.Lock()
        self._warned = False
        """Whether the warning about a template without tools was logged."""
        self._cuts: CutPoints | None = None
        self._tokens: defaultdict[str, dict[str, PromptBuilder]] = defaultdict(dict)

    @cached_property
    def format(self) -> ReplyFormat:
        """The template's format of tool calls and reasoning, detected at first use."""
        return learn(self.tokenizer, self._parser)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.of(self.tokenizer.chat_template, self.tokenizer.variables)

    async def prepare(self, ask: Ask) -> Conversation:
        """As `begin`; a large request is tokenized in a thread, so that it holds up no other
        episode."""
        return await self._apart(self.begin, ask)

    async def length(self, ask: Ask) -> int:
        """Count the tokens of the prompt, a large one in a thread. Raises RequestRefused."""
        return await self._apart(self.count, ask)

    async def _apart(self, function: Callable[[Ask], T], ask: Ask) -> T:
        if not is_large(ask, self._known(ask)):
            return function(ask)
        async with self._large:  # one at a time, for its memory
            return await asyncio.to_thread(function, ask)

    def _known(self, ask: Ask) -> int:
        """The number of leading messages that repeat a recent request of the agent, and are
        therefore checked and have their form for the template."""
        if ask.messages is None:
            return 0
        return self.tokens(ask.episode_id, ask.agent).known(ask.messages)

    def begin(self, ask: Ask) -> Conversation:
        """Tokenize a request. Raises RequestRefused, ContextOverflow."""
        ids, prompt = self._ids(ask)
        room = self.max_model_len - len(ids)
        if room < 1:
            raise ContextOverflow(
                f"This model's maximum context length is {self.max_model_len} tokens, but the"
                f" prompt has {len(ids)}; shorten the conversation or raise max_model_len"
            )
        limit = min(room, ask.sampling.max_tokens or NO_LIMIT)
        sampling = replace(ask.sampling, max_tokens=limit if limit < NO_LIMIT else None)
        if self._constrains and not TYPED.isdisjoint(ask.options):
            sampling = replace(sampling, grammar=self._grammar(ask, ids))
        return Conversation(ask, ids, sampling, prompt)

    def _ids(self, ask: Ask) -> tuple[array[int], Prompt | None]:
        refuse(ask.options, COMPLETIONS)
        if not self._rescored:
            refuse_processing(ask.sampling)
        if ask.messages is None:
            return array("i", self._plain(ask.prompt)), None
        prompt = self._prompt(ask)
        return prompt.ids, prompt

    def count(self, ask: Ask) -> int:
        """Count the tokens of the prompt. Raises RequestRefused."""
        return len(self._ids(ask)[0])

    def _prompt(self, ask: Ask) -> Prompt:
        messages = ask.messages or ()
        self._check_messages(messages, self._known(ask))
        tools = _checked_tools(ask.tools)
        arguments = ask.options.get("chat_template_kwargs") or {}
        if not isinstance(arguments, Mapping):
            raise RequestRefused("chat_template_kwargs must be an object", "chat_template_kwargs")
        taken = _OTHERWISE_GIVEN & arguments.keys()
        if taken:
            raise RequestRefused(
                f"chat_template_kwargs has {', '.join(sorted(taken))}, which a template gets from"
                " ajet; leave it out",
                "chat_template_kwargs",
            )
        if ask.options.get("reasoning_effort") is not None:
            arguments = {"reasoning_effort": ask.options["reasoning_effort"], **arguments}
        self._check_tools(messages, tools or ())
        goes_on = bool(ask.options.get("continue_final_message"))
        return self.tokens(ask.episode_id, ask.agent).prompt(
            messages, tools, continue_last=goes_on, **arguments
        )

    def _check_messages(self, messages: Sequence[Any], known: int) -> None:
        """Raise RequestRefused if a message is malformed or has a part that the model doesn't take.
        The first `known` were checked before."""
        taken = {*_TEXT, "image_url"} if self.takes_pictures else _TEXT
        for index, message in enumerate(messages[known:], known):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise RequestRefused(f"messages[{index}] must be an object with a role", "messages")
            calls = message.get("tool_calls")
            content = message.get("content")
            if calls and (wrong := tool_calls_fault(calls)) is not None:
                raise RequestRefused(f"messages[{index}].{wrong}", "messages")
            for part in content if isinstance(content, list) else ():
                kind = _kind(part)
                if not isinstance(kind, str) or kind not in taken:
                    raise RequestRefused(
                        f"messages[{index}] contains a part of type {kind!r}: {self._limits()}",
                        "messages",
                    )

    def _limits(self) -> str:
        """Which parts of a message the model takes."""
        if self.takes_pictures:
            return f"{self.name} takes text and pictures (parts of type image_url)"
        if self.tokenizer.pictures is not None:
            return (
                f"{self.name} takes pictures, but what samples with it here does not"
                " (docs/guide/pictures.md says which do); backbone local with rollout.name"
                " transformers does"
            )
        return f"{self.name} takes only text"

    def _check_tools(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[object]
    ) -> None:
        """Warn once if the template ignores tools. Raises ConfigError if the config requires the
        template's format."""
        if self._warned or not self._template.in_hermes_form(messages, tools):
            return
        if "calls" in self._template.lacks:
            missing = "tool calls or their results"
        else:
            missing = "the tools of a request"
        problem = f"The chat template of {self.name} does not render {missing}"
        if self._parser == "template":
            raise ConfigError(
                f"{problem}, and model.tool_call_parser is template. Set it to auto to have them"
                " written in the Hermes form, or take a model whose chat template has tools"
            )
        self._warned = True
        _log.warning(
            "%s: they are written in the Hermes form (<tools>, <tool_call>, <tool_response>), as"
            " text. A model that never saw it may not call tools. model.tool_call_parser: template"
            " refuses such requests.",
            problem,
        )

    def _grammar(self, ask: Ask, prompt_ids: Sequence[int]) -> str:
        """The grammar of the reply; empty without one."""
        if ask.messages is None:
            return reply_grammar(ask.options, (), ReplyFormat(()), self.tokenizer)
        end = self.tokenizer.decode(prompt_ids[-PROMPT_END:])
        grammar = reply_grammar(
            ask.options, _checked_tools(ask.tools) or (), self.format, self.tokenizer, end
        )
        if grammar:
            for name in ("min_tokens", "bad_words", "ignore_eos"):
                if getattr(ask.sampling, name):
                    raise RequestRefused(
                        f"{name} and a structured output cannot be combined; leave one of them out",
                        name,
                    )
        return grammar

    def tokens(self, episode_id: str, agent: str) -> PromptBuilder:
        """The prompt builder of an agent's conversations."""
        agents = self._tokens[episode_id]
        if agent not in agents:
            self._cuts = self._cuts or CutPoints(self.tokenizer)
            agents.setdefault(
                agent, PromptBuilder(self.tokenizer, self._cuts)
            )  # large requests come from a thread
        return agents[agent]

    def _plain(self, prompt: object) -> list[int]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return encode_text(self.tokenizer, prompt)
        if (
            isinstance(prompt, list)
            and prompt
            and all(isinstance(i, int) and 0 <= i < NO_LIMIT for i in prompt)
        ):
            if self.tokenizer.pictures and set(self.tokenizer.pictures.never_sampled) & set(prompt):
                raise RequestRefused(
                    "the prompt has an image token without a picture; pictures are sent in messages"
                    " (chat/completions)",
                    "prompt",
                )
            return list(prompt)
        raise RequestRefused("prompt must be a string or a list of token ids", "prompt")

    def choice(self, conversation: Conversation, sampled: Sampled, index: int) -> Choice:
        """Make the choice of a continuation; the conversation's next prompt reuses its ids."""
        ids = array("i", map(int, sampled.output_ids))
        wanted = conversation.ask.logprobs
        if wanted:
            tokens = [self.tokenizer.token_bytes(i) for i in ids]
        else:
            tokens = None
        top = None
        if wanted and sampled.top is not None:
            top = [
                [(self.tokenizer.token_bytes(i), value) for i, value in likely]
                for likely in sampled.top
            ]
        text = sampled.text
        if text is None:
            ended = bool(ids) and (
                ids[-1] in self.tokenizer.eos_ids or ids[-1] in conversation.sampling.stop_token_ids
            )
            text = self.tokenizer.decode(list(ids[:-1] if ended else ids))
        if sampled.text is None:
            stop = None
        else:
            stop = self._stop_string(sampled, conversation.sampling.stop)
        if conversation.prompt is None:
            return Choice(
                None,
                text,
                sampled.finish_reason,
                ids,
                sampled.logprobs,
                tokens,
                stop,
                top=top,
                policy_version=sampled.policy_version,
                weight_updates=sampled.weight_updates,
            )
        logprobs = sampled.logprobs
        parsed = self._read(conversation, text)
        if len(parsed.calls) > 1 and conversation.ask.options.get("parallel_tool_calls") is False:
            # Cut after the first call; the tokens after it are only counted.
            kept_ids = self._until(ids, len(text) - parsed.behind_first)
            ids = ids[:kept_ids]
            logprobs = logprobs and logprobs[:kept_ids]
            tokens = tokens and tokens[:kept_ids]
            parsed = replace(parsed, calls=parsed.calls[:1], ids=parsed.ids[:1])
        message = self._message(conversation.prompt, parsed, ids, index)
        builder = self.tokens(conversation.ask.episode_id, conversation.ask.agent)
        builder.commit(conversation.prompt, ids, message, conversation.sampling.stop)
        cut = len(sampled.output_ids) - len(ids)
        if parsed.calls and (cut or sampled.finish_reason == "stop"):
            finish = "tool_calls"
        else:
            finish = sampled.finish_reason
        return Choice(
            message,
            None,
            finish,
            ids,
            logprobs,
            tokens,
            stop,
            top=top and top[: len(ids)],
            cut_tokens=cut,
            unread=parsed.unread,
            policy_version=sampled.policy_version,
            weight_updates=[place for place in sampled.weight_updates if place < len(ids)],
        )

    def _stop_string(self, sampled: Sampled, stops: Sequence[str]) -> str | None:
        """The stop string that ended the reply; the first one if it began inside a character."""
        behind = self.tokenizer.decode(sampled.output_ids)[len(sampled.text or "") :]
        return next((stop for stop in stops if behind.startswith(stop)), next(iter(stops), None))

    def _read(self, conversation: Conversation, text: str) -> Parsed:
        ask = conversation.ask
        if ask.options.get("tool_choice") != "none":
            tools = _checked_tools(ask.tools)
        else:
            tools = None
        prompt = self.tokenizer.decode(conversation.prompt_ids[-PROMPT_END:])
        parsed = self.format.parse(text, prompt=prompt, tools=tools or ())
        if parsed.calls and isinstance(choice := ask.options.get("tool_choice"), Mapping):
            allowed = {tool["function"].get("name") for tool in allowed_tools(choice, tools or ())}
            if any(name not in allowed for name, _ in parsed.calls):
                return Parsed(text)
        return parsed

    def _until(self, ids: Sequence[int], length: int) -> int:
        """The number of ids that decode to `length` characters."""
        low = 1
        high = len(ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (
                (low, middle)
                if len(self.tokenizer.decode(ids[:middle])) >= length
                else (middle + 1, high)
            )
        return low

    def _message(
        self, prompt: Prompt, parsed: Parsed, ids: Sequence[int], index: int
    ) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning is not None:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [
                {
                    "id": written or call_id(prompt.digest, ids, index, number),
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for number, ((name, arguments), written) in enumerate(
                    zip(parsed.calls, parsed.ids, strict=True)
                )
            ]
        return message

    def answer(self, conversation: Conversation, sampled: Sequence[Sampled], model: str) -> Answer:
        choices = tuple(
            self.choice(conversation, sample, index) for index, sample in enumerate(sampled)
        )
        prompt = len(conversation.prompt_ids)
        output = sum(len(sample.output_ids) for sample in sampled)
        return Answer(
            choices=choices,
            model=model,
            prompt_ids=conversation.prompt_ids,
            pictures=conversation.pictures,
            usage={
                "prompt_tokens": prompt,
                "completion_tokens": output,
                "total_tokens": prompt + output,
            },
            new_ids=None if conversation.prompt is None else conversation.prompt.call.new_ids,
            grammar=conversation.sampling.grammar,
        )

    def forget(self, episode_id: str) -> list[str]:
        """Drop an episode and return its agents."""
        return list(self._tokens.pop(episode_id, ()))


class TokenEngine:
    """An engine with a sampler and a tokenizer.

    Without `rescored`, requests with penalties, a bias and the like are refused, as the trainer
    cannot score them.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: Tokenizer,
        *,
        tool_call_parser: str = "auto",
        rescored: bool = True,
    ) -> None:
        self.sampler = sampler
        self.model = sampler.model
        self.chat = Chat(
            tokenizer,
            max_model_len=sampler.max_model_len,
            tool_call_parser=tool_call_parser,
            rescored=rescored,
            takes_pictures=sampler.takes_pictures,
            name=sampler.model,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self.chat.tokenizer

    @property
    def takes_pictures(self) -> bool:
        return self.chat.takes_pictures

    async def answer(self, ask: Ask) -> Answer:
        """Raises RequestRefused, ContextOverflow, EngineUnavailable."""
        conversation = await self.chat.prepare(ask)
        session = _session(ask.episode_id, ask.agent)
        sampled = await self.sample(conversation, session)
        return self.chat.answer(conversation, sampled, self.model)

    async def sample(self, conversation: Conversation, session: str) -> list[Sampled]:
        """Sample the replies of a tokenized request. Raises as `answer`."""
        return await self.sampler.sample(
            conversation.prompt_ids, conversation.sampling, session, conversation.pictures
        )

    async def count(self, ask: Ask) -> int:
        """Raises RequestRefused."""
        return await self.chat.length(ask)

    def forget(self, episode_id: str) -> None:
        for agent in self.chat.forget(episode_id):
            self.sampler.forget(_session(episode_id, agent))

    async def aclose(self) -> None:
        await self.sampler.aclose()


def is_large(ask: Ask, known: int) -> bool:
    """Whether building the prompt takes so long that it must not hold up other episodes. Its first
    `known` messages were built before."""
    if ask.messages is None:
        return isinstance(ask.prompt, str) and len(ask.prompt) > LARGE_TEXT
    if len(ask.messages) - known > LARGE_MESSAGES:
        return True
    # One plain loop, since every request asks: recursion would take three times as long.
    length = 0
    waiting: list[object] = [*ask.messages[known:], ask.tools]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            length += len(value) * PICTURE_WEIGHT if value.startswith("data:") else len(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        else:
            length += 1
    return length > LARGE_TEXT


def room_for_reply(
    prompt_ids: Sequence[int], sampling: Sampling, model: str, max_model_len: int
) -> int:
    """Most tokens of a reply. Raises RequestRefused, ContextOverflow."""
    if not len(prompt_ids):
        raise RequestRefused("the prompt is empty", "prompt")
    room = max_model_len - len(prompt_ids)
    if room < 1:
        raise ContextOverflow(
            f"the prompt has {len(prompt_ids)} tokens, but {model} takes {max_model_len} including"
            " the reply; shorten the conversation or raise rollout.max_model_len"
        )
    for name, value in (("n", sampling.n), ("max_tokens", sampling.max_tokens)):
        if value is not None and value < 1:
            raise RequestRefused(f"{name} must be at least 1 (got {value})", name)
    return min(room, sampling.max_tokens or room)


def refuse_processing(sampling: Sampling) -> None:
    """Raise RequestRefused for a parameter that the backbone's trainer cannot score."""
    plain = Sampling().as_dict()
    for name, value in sampling.as_dict().items():
        if name not in plain and name != "top_logprobs":
            raise RequestRefused(
                f"{name}={json.dumps(value)[:200]} is not supported: the trainer of this backbone"
                " cannot score such tokens; leave it out, or use backbone local",
                name,
            )


def _session(episode_id: str, agent: str) -> str:
    return f"{episode_id}/{agent}"


def _checked_tools(tools: object) -> list[dict[str, object]] | None:
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(
        isinstance(t, dict) and isinstance(t.get("function"), dict) for t in tools
    ):
        raise RequestRefused(
            'tools must be a list of {"type": "function", "function": {…}}', "tools"
        )
    return tools


_TEXT = frozenset(
    ("text", "string", "input_text", "output_text", "refusal", "thinking", "reasoning")
)


def _kind(part: object) -> object:
    """The type of a part of a message."""
    if isinstance(part, str):
        return "string"
    return part.get("type") if isinstance(part, dict) else None
