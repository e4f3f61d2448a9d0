"""The subject that follows from a checkpoint of transformers: what the model shall equal, and what it is trained on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from pytest_fsdp_meta.loader.subject import Subject

ROWS, LENGTH = 8, 12

TRAINED_ON_TOKENS = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()}
"""Classes whose loss takes a label for each token."""


def subject(
    model: Module, checkpoint: str | os.PathLike[str], *, rows: int = ROWS, length: int = LENGTH, **declared: Any
) -> Subject:
    """The subject of a model that was loaded from this checkpoint.

    Its reference is the same class, loaded whole by ``from_pretrained``; what that ties and freezes is expected of
    the model. Batches of ``rows`` rows are random tokens of the vocabulary, for a model that is trained on tokens
    alone. What is ``declared``, any field of Subject, goes first.
    """
    kind = _class_of(model, checkpoint)
    derived: dict[str, Any] = {"reference": partial(_load, kind, os.fspath(checkpoint))}
    if any(one.__name__ in TRAINED_ON_TOKENS for one in kind.__mro__):
        vocabulary = _vocabulary(checkpoint)
        derived["batch"] = partial(_tokens, vocabulary=vocabulary, rows=rows, length=length)
    return Subject(model, **{**derived, **declared})


def reference_model(checkpoint: str | os.PathLike[str]) -> Any:
    """The whole model on one device, of the class that the checkpoint names."""
    return _load(_named_class(checkpoint), os.fspath(checkpoint))


def token_batch(
    step: int, checkpoint: str | os.PathLike[str], rows: int = ROWS, length: int = LENGTH
) -> dict[str, Tensor]:
    """The global batch of a step: random tokens of the checkpoint's vocabulary, the same for the same step."""
    return _tokens(step, _vocabulary(checkpoint), rows, length)


def _tokens(step: int, vocabulary: int, rows: int, length: int) -> dict[str, Tensor]:
    tokens = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def _vocabulary(checkpoint: str | os.PathLike[str]) -> int:
    return int(AutoConfig.from_pretrained(checkpoint).get_text_config().vocab_size)


def _load(kind: Any, checkpoint: str) -> Any:
    return kind.from_pretrained(checkpoint)


def _class_of(model: Module, checkpoint: str | os.PathLike[str]) -> Any:
    """That of the model, without what sharding has made of it; where it is none of transformers, the checkpoint's."""
    for kind in type(model).__mro__:
        if issubclass(kind, transformers.PreTrainedModel) and not issubclass(kind, FSDPModule):
            return kind
    return _named_class(checkpoint)


def _named_class(checkpoint: str | os.PathLike[str]) -> Any:
    config = AutoConfig.from_pretrained(checkpoint)
    named: Iterator[Any] = (getattr(transformers, name, None) for name in config.architectures or ())
    return next(filter(None, named), AutoModelForCausalLM)
