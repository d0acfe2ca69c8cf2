"""Bodies of clients' requests. What is missing, of another type or out of range is refused (400).

Other fields are kept: some are checked where they are used, others have no effect here.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

LARGEST = 2**53
"""Largest number of a request; JSON's numbers are exact up to there."""
MOST_SAMPLES = 1024
"""Largest `num_samples` of a request."""
MOST_ALTERNATIVES = 1024
"""Largest `topk_prompt_logprobs` of a request, whose answer has this number of values for each
token."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable")
    return text


Text = Annotated[str, Field(max_length=4096), AfterValidator(_printable)]
SessionId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,127}$")]
"""As this server makes them; they become names of directories."""
Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Seed = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Token = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    """A JSON object. Types are not converted."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="allow")

    def json_object(self) -> dict[str, Any]:
        """The object as it was sent."""
        return self.model_dump(exclude_unset=True)


class OfSession(Body):
    session_id: SessionId


class OfModel(Body):
    model_id: Text


class Promise(Body):
    request_id: Text


class OfCheckpoint(Body):
    tinker_path: Text


class _Lora(Body):
    rank: Whole | None = None
    seed: Seed | None = None
    train_attn: bool | None = None
    train_mlp: bool | None = None
    train_unembed: bool | None = None


class _Weights(Body):
    """What create_model and load_weights share."""

    base_model: Text | None = None
    path: Text | None = None
    weights_access_token: Text | None = None
    lora_config: _Lora | None = None
    optimizer: bool | None = None
    optimizer_config: dict[str, object] | None = None
    user_metadata: dict[str, object] | None = None


class NewModel(_Weights, OfSession):
    model_seq_id: Whole


class LoadWeights(_Weights, OfModel):
    seq_id: Whole | None = None


class _Adam(Body):
    __pydantic_extra__: dict[str, Number]
    type: str | None = None


class Numbered(OfModel):
    """An optimizer step, or a request to save weights."""

    seq_id: Whole | None = None
    path: Text | None = None
    sampling_session_seq_id: Whole | None = None
    overwrite: bool | None = None
    user_metadata: dict[str, object] | None = None
    optimizer_params: dict[str, object] | None = None
    adam_params: _Adam | None = None


class NewSampler(OfSession):
    sampling_session_seq_id: Whole
    base_model: Text | None = None
    model_path: Text | None = None


class _Tokens(Body):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Token]


class _Image(Body):
    type: Literal["image"]
    data: str
    """The file in base64."""
    expected_tokens: int | None = None


class _OtherChunk(Body):
    """A picture stored elsewhere, or audio, which is refused where the prompt is used."""

    type: Literal["image_asset_pointer", "audio"]


class _Prompt(Body):
    chunks: list[_Tokens | _Image | _OtherChunk]


class _SamplingParams(Body):
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Annotated[int, Field(ge=-1, le=LARGEST)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    seed: Seed | None = None
    stop: str | list[str] | list[Token] | None = None


class Sample(Body):
    sampling_session_id: Text
    seq_id: Whole
    prompt: _Prompt
    sampling_params: _SamplingParams
    num_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = None
    prompt_logprobs_last_n: Whole | None = None
    topk_prompt_logprobs: (
        Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | Literal[False] | None
    ) = None
