"""Makes requests to vLLM's completions route and reads its responses, with token ids in both."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence

from ajet_sdk.dialects.finish import finish_of
from ajet_sdk.engines.chat import room_for_reply
from ajet_sdk.engines.reply_schema import ReplyChoice, read_reply
from ajet_sdk.errors import EngineError, EngineUnavailable
from ajet_sdk.protocols import Sampled, Sampling

_ID = "token_id:"


FORBIDDEN = -100.0
"""The lowest bias that vLLM takes: its tokens are not sampled."""


def sampling_parameters(
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    model: str,
    max_model_len: int,
    eos_ids: Iterable[int],
    drawn_from: int | str,
    never_sampled: Iterable[int] = (),
) -> dict[str, object]:
    """Return every parameter as JSON, as the server chooses the omitted ones.

    The seed is derived from `drawn_from` if `sampling` has none. A greedy request has one choice,
    regardless of `sampling.n`. Raises ContextOverflow, RequestRefused.
    """
    room = room_for_reply(prompt_ids, sampling, model, max_model_len)
    greedy = sampling.temperature == 0
    # Scrambled: vLLM seeds choice i of a request with seed + i, so successive seeds would repeat
    # choices.
    seed = random.Random(drawn_from if sampling.seed is None else sampling.seed).getrandbits(62)
    bias = {str(token): value for token, value in sampling.logit_bias}
    bias |= {str(token): FORBIDDEN for token in never_sampled}
    return {
        "max_tokens": room,
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": -1 if greedy or sampling.top_k < 1 else sampling.top_k,
        "min_p": 0.0 if greedy else sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "logit_bias": bias or None,
        "bad_words": list(sampling.bad_words),
        "min_tokens": sampling.min_tokens,
        "n": 1 if greedy else sampling.n,
        "seed": seed,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(
            {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}
        ),
        "ignore_eos": True,  # only the ids above end a turn
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": sampling.top_logprobs,
        **({"structured_outputs": {"grammar": sampling.grammar}} if sampling.grammar else {}),
    }


def request_body(prompt_ids: Sequence[int], parameters: Mapping[str, object]) -> dict[str, object]:
    """Return the request of a prompt without pictures."""
    return {
        **parameters,
        "prompt": [int(token) for token in prompt_ids],
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def choices_of(reply: Mapping[str, object], version: int | None, n: int) -> list[Sampled]:
    """Return `n` continuations; a greedy request's choice is repeated. Raises EngineError,
    EngineUnavailable."""
    sampled = [
        _sampled(choice, version) for choice in read_reply(reply, "completions", "vLLM").choices
    ]
    return sampled * n if len(sampled) == 1 else sampled


def _sampled(choice: ReplyChoice, version: int | None) -> Sampled:
    if choice.token_ids is None or choice.logprobs is None:
        raise EngineError(
            "vLLM returned no token ids with log-probabilities; upgrade to 0.11 or later"
        )
    finish = finish_of(choice.finish_reason)
    if finish not in ("stop", "length"):
        raise EngineUnavailable(f"vLLM ended a reply for {choice.finish_reason!r}")
    logprobs = [value for value in choice.values if value is not None]
    if len(logprobs) != len(choice.token_ids):
        raise EngineUnavailable("vLLM returned no log-probability for a token")
    cut = choice.text if isinstance(choice.stop_reason, str) else None
    return Sampled(choice.token_ids, logprobs, finish, version, cut, _alternatives(choice))


def _alternatives(choice: ReplyChoice) -> list[list[tuple[int, float]]] | None:
    """The most likely tokens at each position, most likely first; None if the server sends no
    ids."""
    if choice.logprobs is not None:
        places = choice.logprobs.top_logprobs
    else:
        places = None
    if not places or not all(
        token.startswith(_ID) for alternatives in places for token in alternatives or ()
    ):
        return None
    return [_most_likely_first(alternatives or {}) for alternatives in places]


def _most_likely_first(alternatives: Mapping[str, float]) -> list[tuple[int, float]]:
    possible = [
        (int(token[len(_ID) :]), value)
        for token, value in alternatives.items()
        if value > -math.inf
    ]
    return sorted(possible, key=lambda pair: -pair[1])
