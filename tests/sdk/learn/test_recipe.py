"""Recipes: what is learnt of a demonstration, when a model is made anew, and how the warm-up
ends."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ajet_sdk.config.config import Config, load_config
from ajet_sdk.config.model_source import MARK
from ajet_sdk.errors import ConfigError, TrainingError
from ajet_sdk.learn import warm_up
from ajet_sdk.learn.recipe import (
    Demonstration,
    Recipe,
    Shape,
    build_recipe,
    wants_recipe,
    with_model,
)
from ajet_sdk.tokens.huggingface import HFTokenizer

TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]


def adds(draw: random.Random) -> Demonstration:
    a, b = draw.randint(10, 99), draw.randint(-9, 99)
    function = {"name": "calc", "arguments": json.dumps({"expression": f"{a}+{b}"})}
    call = {"id": "call_1", "type": "function", "function": function}
    return Demonstration(
        [
            {"role": "system", "content": "Count."},
            {"role": "user", "content": f"What is {a}+{b}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": str(a + b)},
            {"role": "assistant", "content": f"It is {a + b}."},
        ],
        TOOLS,
    )


SMALL = Recipe(
    adds,
    min_steps=2,
    check_every=2,
    max_steps=6,
    demonstrations=40,
    batch=8,
    shape=Shape(hidden=16, heads=2, kv_heads=1, intermediate=32, layers=1),
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    draw = random.Random(0)
    return warm_up.train_tokenizer(SMALL, [adds(draw) for _ in range(200)])


def test_what_is_learnt_is_what_the_assistant_says_and_where_it_ends(tokenizer: Any) -> None:
    draw = random.Random(3)
    one = adds(draw)
    (sample,) = warm_up.tokenize_demonstrations(HFTokenizer(tokenizer), [one])
    line = sample.timeline
    learnt = [tokenizer.decode(line.token_ids[s.start : s.end]) for s in line.spans]
    arguments = one.messages[2]["tool_calls"][0]["function"]["arguments"]
    assert learnt == [
        f'<tool_call>\n{{"name": "calc", "arguments": {arguments}}}\n</tool_call><|im_end|>',
        one.messages[4]["content"] + "<|im_end|>",
    ]
    whole = tokenizer.apply_chat_template(one.messages, tools=TOOLS, tokenize=False)
    assert whole.startswith(tokenizer.decode(line.token_ids))


def test_digits_and_signs_are_tokens_of_their_own(tokenizer: Any) -> None:
    ids = tokenizer("What is 57+-3?", add_special_tokens=False)["input_ids"]
    pieces = [tokenizer.decode([i]) for i in ids]
    assert pieces[-6:] == ["5", "7", "+", "-", "3", "?"]


def test_any_text_survives_the_tokenizer(tokenizer: Any) -> None:
    for text in ("plain", "ünïcode ✓ 中文", "tab\tand\nline", "<|im_start|>user"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_the_key_follows_settings_seed_and_what_is_demonstrated() -> None:
    def subtracts(draw: random.Random) -> Demonstration:
        one = adds(draw)
        return Demonstration(
            [*one.messages[:-1], {"role": "assistant", "content": "no"}], one.tools
        )

    keys = {
        SMALL.key(0),
        SMALL.key(1),
        replace(SMALL, lr=1e-3).key(0),
        replace(SMALL, shape=Shape(hidden=32)).key(0),
        replace(SMALL, demonstrate=subtracts).key(0),
    }
    assert len(keys) == 5
    assert SMALL.key(0) == replace(SMALL).key(0)


def configured(tmp_path: Path, recipe: Recipe, path: str = "model", seed: int = 0) -> Config:
    """A config whose recipe is handed over by a module of its own."""
    import sys
    from types import ModuleType

    module = ModuleType(f"recipe_of_{tmp_path.name}")
    module.recipe = recipe  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return load_config(
        values={
            "model": {"path": str(tmp_path / path), "recipe": f"{module.__name__}->recipe"},
            "trainer_common": {"seed": seed},
        }
    )


class Rewards:
    """A probe that says what it is told to."""

    def __init__(self, *rewards: float) -> None:
        self.rewards = list(rewards)

    async def reward(self, model: Any, tokenizer: Any, count: int) -> float:
        assert not model.training
        return self.rewards.pop(0)


def build(config: Config, *rewards: float) -> Path:
    return asyncio.run(build_recipe(config, Rewards(*rewards)))  # type: ignore[arg-type]


def test_the_warm_up_ends_once_the_agent_earns_enough(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = build(configured(tmp_path, SMALL), 0.1, 0.3, 0.9)
    record = json.loads((place / MARK).read_text())
    assert (record["steps"], record["reward"]) == (4, 0.3)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(place),
        AutoTokenizer.from_pretrained(place),
    )
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_a_warm_up_that_does_not_get_going_says_how_far_it_came(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match=r"reached a reward of 0\.20 in 6 steps, less than 0\.25"
    ):
        build(configured(tmp_path, SMALL), 0.1, 0.2, 0.15)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_made_model_is_kept_until_recipe_or_seed_change(tmp_path: Path) -> None:
    made, place = build(configured(tmp_path, SMALL), 0.5), tmp_path / "model"
    first = (place / "model.safetensors").read_bytes()
    assert build(configured(tmp_path, SMALL)) == made == place.resolve()
    build(configured(tmp_path, replace(SMALL, lr=1e-3)), 0.5)
    second = (place / "model.safetensors").read_bytes()
    build(configured(tmp_path, SMALL, seed=1), 0.5)
    assert len({first, second, (place / "model.safetensors").read_bytes()}) == 3
    build(configured(tmp_path, SMALL), 0.5)
    assert (place / "model.safetensors").read_bytes() == first


def test_runs_of_two_seeds_share_a_directory_and_neither_loses_its_model(tmp_path: Path) -> None:
    """Whatever begins while a run reads its model, or before it is resumed."""
    place, of = tmp_path / "model", {}
    for seed in (0, 1):
        made = build(configured(tmp_path, SMALL, seed=seed), 0.5)
        of[made] = (made / "model.safetensors").read_bytes()
    for seed, made in (*enumerate(of), (0, next(iter(of)))):
        assert (
            build(configured(tmp_path, SMALL, seed=seed)) == made
        )  # no reward is measured: nothing is made
        assert (place / "model.safetensors").read_bytes() == of[made]
        assert all(
            (each / "model.safetensors").read_bytes() == bytes_ for each, bytes_ in of.items()
        )
    build(
        configured(tmp_path, replace(SMALL, lr=1e-3), seed=1), 0.5
    )  # another recipe: made, and not the one kept
    assert (place / "model.safetensors").read_bytes() not in of.values()
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        ".model.seed-0",
        ".model.seed-1",
        "model",
    ]


def test_a_directory_of_an_earlier_version_becomes_its_seeds_model(tmp_path: Path) -> None:
    own, place = build(configured(tmp_path, SMALL), 0.5), tmp_path / "model"
    place.unlink()
    own.rename(place)
    other = build(configured(tmp_path, SMALL, seed=1), 0.5)
    assert (place.resolve(), build(configured(tmp_path, SMALL)), place.resolve()) == (
        other,
        own,
        own,
    )


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_rename_loses_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, recipe = build(configured(tmp_path, SMALL), 0.5), replace(SMALL, lr=1e-3)
    other = build(configured(tmp_path, SMALL, seed=1), 0.5)
    weights = (kept / "model.safetensors").read_bytes()

    class Killed(BaseException):
        pass

    for name in ("rename", "replace", "symlink_to"):
        original = getattr(Path, name)
        for after in (False, True):

            def killed(self: Path, to: Any, original: Any = original, after: bool = after) -> None:
                if after:
                    original(self, to)
                raise Killed

            with monkeypatch.context() as patched:
                patched.setattr(Path, name, killed)
                with pytest.raises(Killed):
                    build(configured(tmp_path, recipe, seed=1), 0.5)
            assert (
                build(configured(tmp_path, SMALL)) == kept
                and (kept / "model.safetensors").read_bytes() == weights
            )
            assert build(configured(tmp_path, recipe, seed=1), 0.5) == other
            assert json.loads((tmp_path / "model" / MARK).read_text())["recipe"] == recipe.key(1)
            recipe = replace(recipe, lr=recipe.lr * 2)


def test_somebodys_own_model_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert build(configured(tmp_path, SMALL)) == tmp_path / "model"
    (tmp_path / "notes").mkdir()
    with pytest.raises(ConfigError, match="contains no model"):
        build(configured(tmp_path, SMALL, path="notes"))


def test_a_config_names_the_seeds_own_model_whatever_the_link_says_later(tmp_path: Path) -> None:
    config, other = configured(tmp_path, SMALL), configured(tmp_path, SMALL, seed=1)
    own, second = build(config, 0.5), build(other, 0.5)
    made = asyncio.run(with_model(config))
    build(other)
    assert (tmp_path / "model").resolve() == second
    assert made.model.path is not None and made.resolve(made.model.path) == own
    assert made.model_name == config.model_name and not wants_recipe(made)
    assert asyncio.run(with_model(made)) is made


def test_a_recipe_fills_directories_and_not_hub_names(tmp_path: Path) -> None:
    config = configured(tmp_path, SMALL)
    assert wants_recipe(config)
    for path, wanted in (
        ("Qwen/Qwen2.5-0.5B-Instruct", False),
        ("./models/x", True),
        ("models/a/b", True),
    ):
        changed = config.model.model_copy(update={"path": path})
        assert wants_recipe(config.model_copy(update={"model": changed})) is wanted


def test_something_else_than_a_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a dict, not a Recipe"):
        build(configured(tmp_path, {}))  # type: ignore[arg-type]


def test_a_seed_gives_the_same_model_again(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weights = []
    for name in ("one", "two"):
        place = build(configured(tmp_path, SMALL, path=name), 0.5)
        weights.append(load_file(place / "model.safetensors"))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
