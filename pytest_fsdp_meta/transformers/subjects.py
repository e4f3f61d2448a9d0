"""Subjects derived from a transformers checkpoint: the reference that a model should equal, and its batches."""

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
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from pytest_fsdp_meta.loader.subject import Subject

ROWS, LENGTH = 8, 12
"""The default size of a batch: rows, and tokens in each row."""

TRAINED_ON_TOKENS = {
    *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
    *MODEL_FOR_MASKED_LM_MAPPING_NAMES.values(),
    *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values(),
}
"""Names of model classes whose loss takes the tokens as labels."""
CLASSIFIES_ROWS = {*MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()}
"""Names of model classes whose loss takes the number of a class for each row."""
CLASSIFIES_TOKENS = {*MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values()}
"""Names of model classes whose loss takes the number of a class for each token."""

TRAINED = TRAINED_ON_TOKENS | CLASSIFIES_ROWS | CLASSIFIES_TOKENS


def subject(
    model: Module, checkpoint: str | os.PathLike[str], *, rows: int = ROWS, length: int = LENGTH, **declared: Any
) -> Subject:
    """Return the Subject of a model that was loaded from this checkpoint, with reference and batches derived from it.

    The reference is the same class, loaded whole by ``from_pretrained``; the model is expected to have the same tied
    and frozen weights. Each batch has ``rows`` rows of ``length`` random tokens; models that are not trained on tokens
    alone get no batch. ``declared`` are fields of Subject, which override the derived ones.
    """
    kind = _class_of(model, checkpoint)
    derived: dict[str, Any] = {"reference": partial(_load, kind, os.fspath(checkpoint))}
    bases = {base.__name__ for base in kind.__mro__}
    tokens = {"vocabulary": _vocabulary(checkpoint), "rows": rows, "length": length} if bases & TRAINED else {}
    if bases & TRAINED_ON_TOKENS:
        derived["batch"] = partial(_tokens, **tokens)
    elif bases & TRAINED:
        classes = AutoConfig.from_pretrained(checkpoint).num_labels
        derived["batch"] = partial(_classified, **tokens, classes=classes, each_token=bool(bases & CLASSIFIES_TOKENS))
    return Subject(model, **{**derived, **declared})


def reference_model(checkpoint: str | os.PathLike[str]) -> Any:
    """Load the whole model on one device, as the class that the checkpoint names."""
    return _load(_named_class(checkpoint), os.fspath(checkpoint))


def token_batch(
    step: int, checkpoint: str | os.PathLike[str], rows: int = ROWS, length: int = LENGTH
) -> dict[str, Tensor]:
    """Return the global batch of a step: random tokens of the checkpoint's vocabulary, the same for the same step."""
    return _tokens(step, _vocabulary(checkpoint), rows, length)


def _tokens(step: int, vocabulary: int, rows: int, length: int) -> dict[str, Tensor]:
    tokens = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def _classified(
    step: int, vocabulary: int, rows: int, length: int, classes: int, each_token: bool
) -> dict[str, Tensor]:
    tokens = _tokens(step, vocabulary, rows, length)["input_ids"]
    return {"input_ids": tokens, "labels": (tokens if each_token else tokens.sum(1)) % classes}


def _vocabulary(checkpoint: str | os.PathLike[str]) -> int:
    return int(AutoConfig.from_pretrained(checkpoint).get_text_config().vocab_size)


def _load(kind: Any, checkpoint: str) -> Any:
    return kind.from_pretrained(checkpoint)


def _class_of(model: Module, checkpoint: str | os.PathLike[str]) -> Any:
    """Return the model's transformers class, skipping FSDP's subclasses, or the class that the checkpoint names."""
    for kind in type(model).__mro__:
        if issubclass(kind, transformers.PreTrainedModel) and not issubclass(kind, FSDPModule):
            return kind
    return _named_class(checkpoint)


def _named_class(checkpoint: str | os.PathLike[str]) -> Any:
    config = AutoConfig.from_pretrained(checkpoint)
    named: Iterator[Any] = (getattr(transformers, name, None) for name in config.architectures or ())
    return next(filter(None, named), AutoModelForCausalLM)
