"""Makes requests to vLLM's route `inference/v1/generate` and reads its responses.

The route of completions says nothing of the weights, and takes no pictures. This one names the
version of the weights that sampled each token. It takes the ids of a prompt with one placeholder
for each picture, which the server expands; it returns the expanded ids, which are compared with
ours. Ids that are expanded already would be expanded once more, without an error.

The route is that of vLLM 0.32.0 (`vllm/entrypoints/scale_out/token_in_token_out/`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pydantic import BaseModel, Field, ValidationError

from ajet_sdk.dialects.finish import finish_of
from ajet_sdk.engines.picture_text import (
    PictureSpan,
    picture_spans,
    placeholder_id,
    with_placeholders,
)
from ajet_sdk.engines.reply_schema import SHOWN, LogProb, TokenId
from ajet_sdk.errors import EngineUnavailable
from ajet_sdk.pictures import PlacedPicture
from ajet_sdk.protocols import Sampled, Sampling, Tokenizer

ROUTE = "inference/v1/generate"
_UNKNOWN = -9999.0
"""What vLLM sends for a log-probability that it does not have."""
_INCOMPLETE = 3
"""Most characters that stand for the bytes of one that is not complete."""


class _Candidate(BaseModel):
    token_id: TokenId
    logprob: LogProb


class _Token(_Candidate):
    top_logprobs: list[_Candidate] = []


class _Logprobs(BaseModel):
    content: list[_Token]


class _VersionSpan(BaseModel):
    version: str
    start: int
    """The place of its first token; the span ends where the next one starts."""


class _Choice(BaseModel):
    token_ids: list[TokenId]
    weight_versions: list[_VersionSpan] | None = None
    logprobs: _Logprobs
    finish_reason: str
    stop_reason: int | str | None = None


class _Span(BaseModel):
    offset: int
    length: int


class _Reply(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    prompt_token_ids: list[TokenId]
    mm_placeholders: dict[str, list[_Span]] | None = None


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as it is sent, and as the server should expand it."""

    prompt_ids: list[int]
    """With all tokens of its pictures."""
    short_ids: list[int]
    """With one placeholder for each picture."""
    spans: list[PictureSpan]

    def body(self, parameters: Mapping[str, object]) -> dict[str, object]:
        body: dict[str, object] = {
            "token_ids": self.short_ids,
            "sampling_params": dict(parameters),
            "return_token_ids": True,
        }
        if self.spans:
            body["content_parts"] = [
                {"type": "image_url", "url": span.picture.url} for span in self.spans
            ]
        return body


class TokenPrompts:
    """The prompts of one model."""

    def __init__(self, tokenizer: Tokenizer, *, names_versions: bool) -> None:
        """`names_versions`: the server was told the policy version of its weights. Raises
        ConfigError (`placeholder_id`)."""
        self._tokenizer = tokenizer
        self._names_versions = names_versions
        if tokenizer.pictures is None:
            self._placeholder = None
        else:
            self._placeholder = placeholder_id(tokenizer)

    def prompt(
        self, prompt_ids: Sequence[int], pictures: Sequence[PlacedPicture] = ()
    ) -> TokenPrompt:
        """Raises RequestRefused (`picture_spans`)."""
        ids = [int(token) for token in prompt_ids]
        if self._placeholder is None or not pictures:
            return TokenPrompt(ids, ids, [])
        spans = picture_spans(ids, pictures, self._tokenizer)
        return TokenPrompt(ids, with_placeholders(ids, spans, self._placeholder), spans)

    def choices_of(
        self,
        reply: Mapping[str, object],
        prompt: TokenPrompt,
        sampling: Sampling,
        version: int | None,
    ) -> list[Sampled]:
        """Return `sampling.n` continuations; a greedy request's choice is repeated. `version` is
        that of a server that names none. Raises EngineUnavailable, also if the server sampled
        after another prompt."""
        try:
            read = _Reply.model_validate(reply)
        except ValidationError as error:
            raise EngineUnavailable(
                f"vLLM's reply at {ROUTE} is not as in vLLM 0.32: {error!s:.{SHOWN}}"
            ) from error
        _check_expansion(prompt, read)
        sampled = [self._sampled(choice, sampling, version) for choice in read.choices]
        return sampled * sampling.n if len(sampled) == 1 else sampled

    def _sampled(self, choice: _Choice, sampling: Sampling, version: int | None) -> Sampled:
        finish = finish_of(choice.finish_reason)
        if finish not in ("stop", "length"):
            raise EngineUnavailable(f"vLLM ended a reply for {choice.finish_reason!r}")
        tokens = choice.logprobs.content
        if [token.token_id for token in tokens] != choice.token_ids or any(
            token.logprob <= _UNKNOWN for token in tokens
        ):
            raise EngineUnavailable("vLLM returned no log-probability for a token")
        text = None
        if isinstance(choice.stop_reason, str):
            text = self._text_before(choice.stop_reason, choice.token_ids)
        top = [_most_likely(token, sampling.top_logprobs) for token in tokens]
        updates = list[int]()
        if self._names_versions:
            if not choice.weight_versions:
                raise EngineUnavailable("vLLM named no version of the weights for a reply")
            version = int(choice.weight_versions[0].version)
            updates = _updates(choice.weight_versions)
        return Sampled(
            choice.token_ids,
            [token.logprob for token in tokens],
            finish,
            version,
            text,
            top if sampling.top_logprobs else None,
            weight_updates=tuple(updates),
        )

    def _text_before(self, stop: str, output_ids: Sequence[int]) -> str:
        """The text before a stop string that the last token completed."""
        text = self._tokenizer.decode(output_ids)
        known = len(self._tokenizer.decode(output_ids[:-1]))
        at = text.find(stop, max(0, known - len(stop) - _INCOMPLETE))
        if at < 0:
            raise EngineUnavailable(
                f"vLLM ended a reply at {stop!r}, which the reply does not have"
            )
        return text[:at]


def _updates(spans: Sequence[_VersionSpan]) -> list[int]:
    """The places of the updates, one for each version from one span to the next."""
    places = list[int]()
    for before, after in pairwise(spans):
        places += [after.start] * (int(after.version) - int(before.version))
    return places


def _most_likely(token: _Token, count: int) -> list[tuple[int, float]]:
    known = [(each.token_id, each.logprob) for each in token.top_logprobs]
    known.sort(key=lambda pair: -pair[1])
    return [pair for pair in known[:count] if pair[1] > _UNKNOWN]


def _check_expansion(prompt: TokenPrompt, reply: _Reply) -> None:
    """Raise EngineUnavailable if the server sampled after other ids, or with its pictures in other
    places."""
    expected = [(span.start, len(span)) for span in prompt.spans]
    placeholders = (reply.mm_placeholders or {}).get("image", ())
    placed = [(span.offset, span.length) for span in placeholders]
    if reply.prompt_token_ids == prompt.prompt_ids and placed == expected:
        return
    raise EngineUnavailable(
        f"vLLM made {len(reply.prompt_token_ids)} tokens of a prompt that has"
        f" {len(prompt.prompt_ids)} here, with its pictures at {str(placed)[:SHOWN]} instead of"
        f" {str(expected)[:SHOWN]} (first token and number of tokens). Its version of Transformers"
        " processes pictures in another way: install the same one for both, or set"
        " rollout.name: transformers",
        retryable=False,
    )
