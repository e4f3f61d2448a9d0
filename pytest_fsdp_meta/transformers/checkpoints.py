"""Tiny checkpoints of every causal language model that transformers knows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pytest_fsdp_meta.transformers.sizes import tiny_config

CAUSAL_LMS: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""The model types that have a causal language model, in transformers' order."""

LARGEST = 8_000_000
"""More parameters than this and a model is not tiny: a size that we do not know."""
SEED = 7
SPREAD = 0.05


def tiny_checkpoint(model_type: str, folder: str | os.PathLike[str], **sizes: Any) -> Path:
    """A tiny checkpoint of the causal language model of this type, as its ``save_pretrained`` writes it.

    The same bits every time. ``sizes`` go before those of ``tiny_config``. Raises ValueError for a model type that
    has no causal language model, or that would not be tiny, and whatever an architecture says of sizes that do not
    suit it.
    """
    kind = _causal_lm(model_type)
    config = _own_config(kind, tiny_config(model_type, **sizes))
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{model_type}: {size:,} parameters, but should be at most {LARGEST:,}; give smaller sizes")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = kind(config)
        for parameter in model.parameters():
            # Ones and zeros, with which norms and biases begin, would hide that they were not loaded.
            if parameter.ndim:
                torch.nn.init.normal_(parameter, mean=parameter.data.float().mean().item(), std=SPREAD)
    model.save_pretrained(folder)
    return Path(folder)


def _causal_lm(model_type: str) -> Any:
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"{model_type!r} has no causal language model; CAUSAL_LMS has those that have one")
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def _own_config(kind: Any, config: PreTrainedConfig) -> PreTrainedConfig:
    """That of a part where the model is made of one: the decoder of a model that hears as well, for example."""
    if isinstance(config, kind.config_class):
        return config
    parts = (getattr(config, name) for name in config.sub_configs)
    return next((part for part in parts if isinstance(part, kind.config_class)), config)
