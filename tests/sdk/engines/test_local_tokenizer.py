"""The Hugging Face tokenizer as exact ids need it, over byte-level and SentencePiece-like
vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from ajet_sdk.errors import ConfigError
from ajet_sdk.tokens.huggingface import HFTokenizer

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = ["What is 12+34? The answer is 46.", "héllo wörld 你好 🙂", "  two  spaces\n\ttab"] * 3


def byte_level() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXTS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_tokens(["<tool_call>"])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def sentencepiece_like() -> PreTrainedTokenizerFast:
    pieces = [f"<0x{b:02X}>" for b in range(256)] + [
        "▁",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "▁h",
        "▁hello",
    ]
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", *pieces])}
    merges = [("▁", "h")]
    inner = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module", params=[byte_level, sentencepiece_like])
def tokenizer(request: Any) -> HFTokenizer:
    return HFTokenizer(request.param())


_BOTH: list[HFTokenizer] = []


@given(st.text(max_size=60), st.sampled_from([0, 1]))
def test_any_text_comes_back_byte_for_byte(text: str, which: int) -> None:
    if not _BOTH:
        _BOTH.extend([HFTokenizer(byte_level()), HFTokenizer(sentencepiece_like())])
    tokenizer = _BOTH[which]
    if which == 1:
        text = text.replace("▁", "")
    text = text.encode(errors="ignore").decode()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


def test_nothing_is_added_and_nothing_dropped(tokenizer: HFTokenizer) -> None:
    for special in [str(t) for t in tokenizer.hf.all_special_tokens]:
        ids = tokenizer.encode(special)
        assert len(ids) == 1 and tokenizer.is_special(ids[0])
        assert tokenizer.decode(ids) == special
    assert tokenizer.encode("") == []
    assert not tokenizer.is_special(tokenizer.encode("h")[-1])


def test_a_reply_cut_inside_a_character_decodes_to_a_mark(tokenizer: HFTokenizer) -> None:
    ids = tokenizer.encode("é你")
    bytes_of = [tokenizer.token_bytes(i) for i in ids]
    assert b"".join(bytes_of).decode() == "é你"
    if len(bytes_of[-1]) < 3:
        assert tokenizer.decode(ids[:-1]).endswith("�")


def test_tokens_added_later_are_plain_text_and_ids_beyond_are_empty() -> None:
    tokenizer = HFTokenizer(byte_level())
    [added] = tokenizer.encode("<tool_call>")
    assert tokenizer.token_bytes(added) == b"<tool_call>" and not tokenizer.is_special(added)
    assert (
        tokenizer.token_bytes(len(tokenizer))
        == tokenizer.token_bytes(10**6)
        == tokenizer.token_bytes(-1)
        == b""
    )


def test_a_turn_ends_where_the_template_the_tokenizer_or_the_generation_config_say(
    tmp_path: Path,
) -> None:
    hf = byte_level()
    end, text_end = (
        hf.convert_tokens_to_ids("<|im_end|>"),
        hf.convert_tokens_to_ids("<|endoftext|>"),
    )
    assert HFTokenizer(hf).eos_ids == {end, text_end}
    hf.save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[7, text_end]).save_pretrained(tmp_path)
    loaded = HFTokenizer(tmp_path)
    assert loaded.eos_ids == {7, end, text_end}
    assert loaded.chat_template == TEMPLATE
    assert loaded.variables["eos_token"] == "<|endoftext|>"
    hf.chat_template = "{{ raise_exception('no') }}"
    assert HFTokenizer(hf).eos_ids == {text_end}


def test_a_missing_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        HFTokenizer(tmp_path / "nothing")


def test_digits_alone_stay_alone() -> None:
    hf = byte_level()
    hf.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer = HFTokenizer(hf)
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("123")] == [b"1", b"2", b"3"]
