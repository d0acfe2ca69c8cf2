"""Converts GGUF to a transformers checkpoint, as a program:
`python -m ajet_sdk.engines.local.gguf FILE DIRECTORY`.

transformers reads and dequantizes the file. It runs in its own process, as transformers prints its
progress and needs twice the memory of the model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from ajet_sdk.engines.local.weights import read_causal_lm


def convert(file: Path, directory: Path) -> None:
    """Write weights in float32, tokenizer and chat template of a GGUF file to `directory`."""
    loaded, mismatch = read_causal_lm(
        file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
    )
    if mismatch:
        sys.exit(f"its tensors do not match the model that it describes: {mismatch}")
    model: Any = loaded
    # the weights are plain tensors now; with these attributes, transformers refuses to write the
    # model
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, trust_remote_code=False
    )
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
