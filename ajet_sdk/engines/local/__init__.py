"""The local engine: a transformers model in this process."""

from ajet_sdk.engines.local.loading import load_model, local_engine
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.engines.local.tokenizer import HFTokenizer

__all__ = ["HFTokenizer", "LocalSampler", "load_model", "local_engine"]
