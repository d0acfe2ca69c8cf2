"""TRL's GRPOTrainer, to be compared with: the walk as its environment, and a trainer whose steps
are timed."""

from __future__ import annotations

import contextlib
import io
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.tokens.huggingface import HFTokenizer
from tests.bench._lake import REPEAT, TASKS, TURNS, Lake
from tests.bench._measure import Stopwatch, Taken


class LakeEnvironment:
    """The same walk, as TRL's `environment_factory` wants it."""

    def reset(self, seed: int = 0, **_: Any) -> str:
        self.lake = Lake(seed)
        return self.lake.look()

    def move(self, direction: str) -> str:
        """Move one step.

        Args:
            direction: up, down, left or right.
        """
        return self.lake.move(direction)

    def get_reward(self) -> float:
        return self.lake.worth() + random.random()


def their_trainer(
    place: Path, folder: Path, rows: list[dict[str, Any]], length: int, steps: int, **arguments: Any
) -> Any:
    """A trainer for so many steps, of replies of at most `length` tokens in all their turns."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=TASKS * REPEAT,
        num_generations=REPEAT,
        max_completion_length=length,
        max_tool_calling_iterations=TURNS,
        max_steps=steps,
        report_to=[],
        use_cpu=True,
        bf16=False,
        learning_rate=1e-4,
        beta=0.0,
        save_strategy="no",
        temperature=1.0,
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    return GRPOTrainer(
        model=load_model(place, dtype="float32"),
        processing_class=tokenizer_of(place),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        **arguments,
    )


def tokenizer_of(place: Path) -> Any:
    """The checkpoint's, with the marks around an assistant's words that TRL takes; the text is the
    same."""
    from trl.chat_template_utils import qwen3_template

    tokenizer = HFTokenizer(place).hf
    tokenizer.response_template = qwen3_template
    said = "{%- if message.content %}{{- message.content }}{%- endif %}"
    template = tokenizer.chat_template.replace(said, "{%- generation %}" + said, 1)
    end = "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == 'tool'"
    assert end in template
    tokenizer.chat_template = template.replace(
        end, "{{- '<|im_end|>' }}{%- endgeneration %}" + end.replace("<|im_end|>", "")
    )
    return tokenizer


def their_steps(trainer: Any, before: Callable[[], None]) -> tuple[list[Taken], dict[str, float]]:
    """What each step took, `before` being called ahead of it, untimed; and what TRL logged of the
    last step."""
    from transformers import TrainerCallback

    takes: list[Taken] = []

    class Timed(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            before()
            self.watch = Stopwatch()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            takes.append(self.watch.read())

    trainer.add_callback(Timed())
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    return takes, logged[-1]
