"""Real tokenizers, trained here on a few lines, and chat templates in the style of public ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import PictureFormat

Message = dict[str, Any]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
TEXTS = [
    "You are a helpful assistant that may call tools. What is 3 + 4? The answer is 7.",
    (
        'system user assistant tool {"name": "calc", "arguments": {"expression": "12*34"}} <think>'
        " </think> Héllo wörld"
    ),
    "the quick brown fox jumps over the lazy dog and then it thinks: is that so? yes it is",
] * 20


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def reply(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


class Tok:
    """A `protocols.Tokenizer` over a `tokenizers.Tokenizer`."""

    pictures: PictureFormat | None = None

    def __init__(self, inner: tokenizers.Tokenizer, template: str | None, **variables: str) -> None:
        self.inner = inner
        self.chat_template = template
        self.variables: Mapping[str, Any] = variables
        self._added = inner.get_added_tokens_decoder()
        self.eos_ids = frozenset(
            i for i, t in self._added.items() if t.content in ("<|im_end|>", "</s>")
        )
        self.encoded = 0
        """Tokens that `encode` has made."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        self.encoded += len(ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.inner.decode(list(ids), skip_special_tokens=False)
        return text

    def is_special(self, token_id: int) -> bool:
        return token_id in self._added and bool(self._added[token_id].special)

    def token_bytes(self, token_id: int) -> bytes:
        return self.decode([token_id]).encode()


def byte_level(*, size: int = 420) -> tokenizers.Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXTS, trainer)
    inner.add_tokens(
        [
            AddedToken(t, special=False)
            for t in ("<think>", "</think>", "<tool_call>", "</tool_call>")
        ]
    )
    return inner


def metaspace(*, scheme: str = "always") -> tokenizers.Tokenizer:
    """Unigram over `▁` for blanks, as T5 and other SentencePiece models have: a text's start is
    tokenised otherwise."""
    inner = tokenizers.Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    every = sorted({c for t in TEXTS for c in t} | set("\n[]/<>_|;:"))
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>", *SPECIAL],
        unk_token="<unk>",
        initial_alphabet=every,
        show_progress=False,
    )
    inner.train_from_iterator(TEXTS, trainer)
    return inner


def llama2() -> tokenizers.Tokenizer:
    """BPE with byte fallback and a `▁` put before a text by the normaliser, as Llama 2 and Mistral
    have."""
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fallback = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=520,
        special_tokens=["<unk>", "<s>", "</s>", *SPECIAL, *fallback],
        initial_alphabet=list("▁"),
        show_progress=False,
    )
    inner.train_from_iterator([f"▁{t.replace(' ', '▁')}" for t in TEXTS], trainer)
    state = inner.to_str()
    # the trainer makes the fallback bytes special; in published tokenizers they are plain
    # vocabulary
    loaded = json.loads(state)
    loaded["added_tokens"] = [
        t for t in loaded["added_tokens"] if not t["content"].startswith("<0x")
    ]
    return tokenizers.Tokenizer.from_str(json.dumps(loaded))


CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- (c.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""Keeps everything, reasoning too; tool calls are written anew as JSON."""

TOOLS = (
    "{%- if tools %}{{- '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}\n"
)

FORGETFUL = CHATML.replace(
    "{%- if m.reasoning_content %}",
    "{%- if m.reasoning_content and loop.last %}",
).replace(
    "{{- m.content }}",
    "{{- m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content }}",
)
"""Drops the reasoning of earlier turns."""

INST = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content.strip() + eos_token }}
{%- else %}{{- raise_exception('only user and assistant roles are known, not ' + m.role) }}{% endif %}
{%- endfor %}"""


TEMPLATES = {
    "chatml": CHATML,
    "tools": TOOLS + CHATML,
    "forgetful": TOOLS + FORGETFUL,
    "inst": INST,
}
FAMILIES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "metaspace_always": lambda: metaspace(scheme="always"),
    "metaspace_first": lambda: metaspace(scheme="first"),
    "llama2": llama2,
}


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[..., Tok]:
    """A tokenizer by family and by the name (or the text) of a template."""
    trained = {name: make() for name, make in FAMILIES.items()}

    def make(family: str = "byte_level", template: str | None = "tools") -> Tok:
        source = TEMPLATES.get(template, template) if template else None
        end = "<|im_end|>" if template != "inst" else "</s>"
        return Tok(
            trained[family], source, bos_token="<s>" if template == "inst" else "", eos_token=end
        )

    return make


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as running:
        yield running


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with a tokenizer and a chat template."""
    from tests.tiny_models import save_tiny

    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")
