"""GGUF to a checkpoint of transformers, run as a program: `python -m ajet_sdk.engines.local.gguf FILE DIRECTORY`.

transformers reads the file and takes its quantization away. A process of its own, because transformers prints its
progress and needs the memory of the model twice.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(file: Path, directory: Path) -> None:
    """Write weights in float32, tokenizer and chat template of a GGUF file to `directory`."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
    )
    # the weights are plain tensors by now; with these two, transformers refuses to write a model that it read from GGUF
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
