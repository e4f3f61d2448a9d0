"""Tiny checkpoints of transformers' models: of all causal language models, and of other classes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pytest_fsdp_meta.transformers.sizes import tiny_config

CAUSAL_LMS: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""All model types that have a causal language model, in transformers' order."""

MAX_PARAMETERS = 8_000_000
"""The largest number of parameters of a tiny model; one with more has a size that ``tiny_config`` does not reduce."""
SEED = 7
STANDARD_DEVIATION = 0.05
"""The standard deviation of all weights."""


def tiny_checkpoint(
    model_type: str, folder: str | os.PathLike[str], *, auto_class: Any = AutoModelForCausalLM, **sizes: Any
) -> Path:
    """Write a tiny checkpoint of this type's causal language model with ``save_pretrained`` and return its folder.

    ``auto_class`` names another class of the model, such as AutoModelForSequenceClassification. The bits are the same
    every time. ``sizes`` override those of ``tiny_config``. Raises ValueError for a model type without such a class and
    for a model that would not be tiny; architectures may raise their own errors for sizes that they do not support.
    """
    config, build = _recipe(model_type, auto_class, sizes)
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in build(config).parameters())
    except ValueError as error:
        if not str(error).startswith("Unrecognized configuration class"):  # its message lists all that have one
            raise
        raise ValueError(f"{model_type!r} has no class for transformers.{auto_class.__name__}") from None
    if size > MAX_PARAMETERS:
        raise ValueError(
            f"{model_type}: {size:,} parameters, but should be at most {MAX_PARAMETERS:,}; pass smaller sizes"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = build(config)
        for parameter in model.parameters():
            # Norms and biases are initialised with ones and zeros, so a loader that skips them would go unnoticed.
            if parameter.ndim:
                torch.nn.init.normal_(parameter, mean=parameter.data.float().mean().item(), std=STANDARD_DEVIATION)
    model.save_pretrained(folder)
    return Path(folder)


def _recipe(model_type: str, auto_class: Any, sizes: dict[str, Any]) -> tuple[PreTrainedConfig, Any]:
    """Return the config, and what builds a model from it."""
    if auto_class is AutoModelForCausalLM:
        if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ValueError(f"{model_type!r} has no causal language model; CAUSAL_LMS lists the types that have one")
        kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        config = tiny_config(model_type, **sizes)
        if isinstance(config, kind.config_class):
            return config, kind
        # The text decoder of a speech model takes the decoder's part of the config.
        parts = (getattr(config, name) for name in config.sub_configs)
        return next((part for part in parts if isinstance(part, kind.config_class)), config), kind
    config = tiny_config(model_type, **sizes)
    config.architectures = []  # where a type has several classes, from_config iterates over them, and fails on None
    return config, auto_class.from_config
