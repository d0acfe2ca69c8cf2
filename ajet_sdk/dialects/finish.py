"""Finish reasons of all vendors and servers, mapped to OpenAI's.

A reason outside of the table (`abort`, `error`, `network_error`) is an error, not the end of a
reply.
"""

from __future__ import annotations

from typing import Literal

Finish = Literal["stop", "length", "tool_calls", "function_call", "content_filter"]
"""OpenAI's finish reasons, as used by engines, calls and the trace."""

_WORDS: dict[Finish, str] = {
    # OpenAI, Responses | Anthropic, Bedrock | TGI, Together | Cohere, Baidu | llama.cpp, LM Studio,
    # ExLlama
    "stop": (
        "stop completed | end_turn stop_sequence pause_turn compaction | eos_token eos | complete"
        " normal | word eosfound stopstringfound stop_token stop_string"
    ),
    # OpenAI, Responses | Anthropic | Mistral, Gemini | watsonx | vLLM | llama.cpp, LM Studio,
    # ExLlama
    "length": (
        "length incomplete max_output_tokens max_messages steered | max_tokens"
        " model_context_window_exceeded | model_length continuation | token_limit | repetition |"
        " limit maxpredictedtokensreached contextlengthreached max_new_tokens"
    ),
    # OpenAI | Anthropic | Cohere | LM Studio
    "tool_calls": "tool_calls | tool_use | tool_call | toolcalls",
    "function_call": "function_call",
    # The provider withheld the reply. OpenAI | Anthropic | Bedrock | Gemini | Cohere, Zhipu
    "content_filter": (
        "content_filter | refusal | content_filtered guardrail_intervened malformed_model_output"
        " malformed_tool_use | safety recitation language other blocklist prohibited_content spii"
        " jailbreak model_armor escalation malformed_function_call malformed_response"
        " unexpected_tool_call too_many_tool_calls image_safety image_prohibited_content"
        " image_recitation image_other no_image | error_toxic sensitive"
    ),
}
FINISH: dict[str, Finish] = {
    word: finish for finish, words in _WORDS.items() for word in words.replace("|", " ").split()
}
"""OpenAI's reason by the vendor's in lower case, with `_` for `-`."""


def finish_of(reason: object) -> Finish | None:
    """OpenAI's finish reason for a vendor's; None if it is unknown.

    Gemini's route for OpenAI's clients sends two reasons: `function_call_filter: MALFORMED_…`.
    """
    if not isinstance(reason, str):
        return None
    before, _, last = reason.rpartition(":")
    known = before in ("", "function_call_filter", *FINISH)
    return FINISH.get(reason) or (
        FINISH.get(last.strip().lower().replace("-", "_")) if known else None
    )
