"""Loading a checkpoint, and the engine that a config makes of it, asked through the whole chat
path."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ajet_sdk.config.config import load_config
from ajet_sdk.dialects.openai_chat import CHAT
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.engines.local.products import products_of
from ajet_sdk.engines.open import open_engine
from ajet_sdk.errors import ConfigError, ContextOverflow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    specials = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate([*specials, *letters])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|end|>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.4,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_a_config_makes_an_engine_that_chats_with_exact_ids(checkpoint: Path) -> None:
    engine = open_engine(load_config(values={"model": {"path": str(checkpoint), "device": "cpu"}}))

    async def main() -> None:
        messages = [{"role": "user", "content": "héllo"}]
        for _ in range(3):
            body = {"messages": messages, "max_tokens": 9, "seed": 1}
            answer = await engine.answer(CHAT.ask(body, "e", "default"))
            [choice] = answer.choices
            assert answer.model == "tiny" and answer.choices[0].policy_version is None
            assert (
                choice.output_ids is not None
                and choice.logprobs is not None
                and choice.message is not None
            )
            assert len(choice.output_ids) == len(choice.logprobs) <= 9
            messages += [choice.message, {"role": "user", "content": "more"}]
        with pytest.raises(ContextOverflow):
            body = {"messages": [{"role": "user", "content": "x" * 200}]}
            await engine.answer(CHAT.ask(body, "e", "default"))
        engine.forget("e")
        await engine.aclose()

    asyncio.run(main())


def test_weights_are_float32_on_a_cpu_and_in_the_type_asked_for(checkpoint: Path) -> None:
    model = load_model(checkpoint, device="cpu")
    assert model.dtype == torch.float32 and not model.training
    assert products_of(model) == torch.float32
    lower = load_model(checkpoint, device="cpu", dtype="bfloat16")
    assert lower.dtype == torch.float32 and products_of(lower) == torch.bfloat16
    eager = load_model(checkpoint, device="cpu", attn_implementation="eager")
    assert eager.config._attn_implementation == "eager"


def test_an_adapter_is_added_and_loaded_again(checkpoint: Path, tmp_path: Path) -> None:
    lora = SimpleNamespace(enabled=True, r=4, alpha=8, dropout=0.0, target_modules="all-linear")
    model = load_model(checkpoint, device="cpu", lora=lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and all(p.shape[0] == 4 or p.shape[1] == 4 for p in trained)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path, device="cpu")
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_missing_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_model(tmp_path / "nothing", device="cpu")
    with pytest.raises(ConfigError, match=r"model\.dtype"):
        load_model(tmp_path / "nothing", device="cpu", dtype="float99")


def test_flash_attention_where_it_cannot_run_is_a_config_error(checkpoint: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="flash_attention_2 needs bfloat16 on a GPU, but the model is float32 on cpu",
    ):
        load_model(checkpoint, attn_implementation="flash_attention_2", device="cpu")
