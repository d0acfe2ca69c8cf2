"""The treatment of each field of a request: honoured, without effect on sampling, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ajet_sdk.errors import RequestRefused
from ajet_sdk.types import Json

WITHOUT_EFFECT = "x_without_effect"
"""Key of a recorded request for fields that exist in its dialect only and don't change the
reply."""

Effect = Literal["honoured", "no effect", "refused"]


@dataclass(frozen=True, slots=True)
class Field:
    """The treatment of a field. `note` says how it is honoured, or what to use instead of a refused
    one."""

    effect: Effect
    note: str = ""
    nothing: tuple[object, ...] = ()
    """Values of a refused field that request nothing and are accepted."""


Fields = Mapping[str, Field]
"""Fields by name. Other fields are refused as unknown, unless they begin with `x_`."""


def fields(effect: Effect, names: str, note: str = "") -> dict[str, Field]:
    """Make fields with the same effect; `names` is separated by spaces."""
    return dict.fromkeys(names.split(), Field(effect, note))


COMPLETIONS: Fields = {
    **fields(
        "honoured",
        "model messages prompt stream temperature top_p top_k min_p seed n stop stop_token_ids",
    ),
    **fields(
        "honoured", "max_tokens max_completion_tokens min_tokens ignore_eos logprobs top_logprobs"
    ),
    **fields(
        "honoured", "frequency_penalty presence_penalty repetition_penalty logit_bias bad_words"
    ),
    **fields("honoured", "tools"),
    **fields("honoured", "tool_choice", "auto, none, required, a function, allowed_tools"),
    **fields("honoured", "response_format", "text, json_object, json_schema"),
    **fields(
        "honoured", "structured_outputs", "as in vLLM: json, json_object, regex, choice, grammar"
    ),
    **fields(
        "honoured",
        "guided_json guided_regex guided_choice guided_grammar",
        "as in earlier versions of vLLM",
    ),
    **fields("honoured", "parallel_tool_calls", "false: a reply ends after its first tool call"),
    **fields(
        "honoured",
        "continue_final_message",
        "the reply continues the last message, which must be the assistant's",
    ),
    **fields("honoured", "stream_options", "include_usage"),
    **fields("honoured", "reasoning_effort", "passed to the chat template"),
    **fields(
        "honoured", "chat_template_kwargs", "passed to the chat template; not an OpenAI field"
    ),
    **fields("honoured", "return_token_ids return_tokens_as_token_ids", "as in vLLM"),
    **fields(
        "no effect",
        "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention"
        " prompt_cache_options prediction verbosity timeout priority request_id cache_salt"
        " include_reasoning skip_special_tokens spaces_between_special_tokens"
        " include_stop_str_in_output add_special_tokens add_generation_prompt"
        " guided_decoding_backend",
    ),
    "length_penalty": Field("refused", "beam search is not supported; request n replies", (1,)),
    "use_beam_search": Field("refused", "request n replies", (False,)),
    "best_of": Field("refused", "request n replies and choose one", (1,)),
    "echo": Field("refused", "prepend the prompt to the reply yourself", (False,)),
    "suffix": Field("refused", "the policy continues text; it cannot fill in", ("",)),
    "modalities": Field("refused", "the policy produces text only", (["text"],)),
    "audio": Field("refused", "the policy produces text only"),
    "web_search_options": Field("refused", "there is no web search; give the policy a search tool"),
    "moderation": Field("refused", "there is no moderation"),
    "functions": Field("refused", "pass them as tools", ([],)),
    "function_call": Field("refused", "use tools and tool_choice", ("none", "auto")),
}
"""Chat completions and completions, with vLLM's fields. Engines get the options of every dialect by
these names."""


def without_effect(body: Mapping[str, object], known: Fields) -> Json:
    """The fields of a request that don't affect sampling, for the record. Google's names have two
    spellings."""
    return {
        name: value
        for name, value in body.items()
        if value is not None
        and (entry := known.get(name) or known.get(camel_case(name))) is not None
        and entry.effect == "no effect"
    }


@lru_cache(maxsize=4096)
def camel_case(name: str) -> str:
    """Convert `mime_type` to `mimeType`."""
    return re.sub(r"_([a-z])", lambda match: match[1].upper(), name)


def refuse(body: Mapping[str, object], known: Fields) -> None:
    """Raise RequestRefused for the first field that can't be honoured; the message says what to
    do."""
    for name, value in body.items():
        if value is None or name.startswith("x_"):
            continue
        field = known.get(name)
        if field is None:
            raise RequestRefused(f"{name} is not a known parameter; leave it out", name)
        if field.effect == "refused" and value not in field.nothing:
            shown = json.dumps(value, default=str)[:200]
            raise RequestRefused(
                f"{name}={shown} is not supported; {field.note or 'leave it out'}", name
            )
