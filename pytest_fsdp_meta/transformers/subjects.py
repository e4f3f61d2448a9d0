"""Subjects derived from a transformers checkpoint: the reference that a model should equal, and its batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
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
CLASSIFIES_IMAGES = {
    name
    for names in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values()
    for name in ([names] if isinstance(names, str) else names)
}
"""Names of model classes whose loss takes the number of a class for each image."""
CLASSIFIES_SOUND = {*MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES.values()}
"""Names of model classes whose loss takes the number of a class for each recording."""

IMAGE, SAMPLES = 32, 8000
"""The height and width of an image whose config names none, and the samples of a recording."""


def subject(
    model: Module, checkpoint: str | os.PathLike[str], *, rows: int = ROWS, length: int = LENGTH, **declared: Any
) -> Subject:
    """Return the Subject of a model that was loaded from this checkpoint, with reference and batches derived from it.

    The reference is the same class, loaded whole by ``from_pretrained``; the model is expected to have the same tied
    and frozen weights. Each batch has ``rows`` rows of ``length`` random tokens, and classes as labels for classifiers.
    Classifiers of images and recordings get random ones, and other models no batch. ``declared`` are fields of Subject,
    which override the derived ones.
    """
    own = (kind for kind in type(model).__mro__ if issubclass(kind, transformers.PreTrainedModel))
    unsharded = (kind for kind in own if not issubclass(kind, FSDPModule))  # fully_shard() makes a subclass
    kind = next(unsharded, None) or _named_class(checkpoint)
    derived: dict[str, Any] = {"reference": partial(_load, kind, os.fspath(checkpoint))}
    if batch := _batches_of(kind, checkpoint, rows, length):
        derived["batch"] = batch
    return Subject(model, **{**derived, **declared})


def _batches_of(
    kind: Any, checkpoint: str | os.PathLike[str], rows: int, length: int
) -> Callable[[int], dict[str, Tensor]] | None:
    bases = {base.__name__ for base in kind.__mro__}
    config = AutoConfig.from_pretrained(checkpoint)
    tokens = {"vocabulary": getattr(config.get_text_config(), "vocab_size", 0), "rows": rows, "length": length}
    if tokens["vocabulary"] and bases & TRAINED_ON_TOKENS:
        return partial(_tokens, **tokens)
    if tokens["vocabulary"] and bases & CLASSIFIES_TOKENS:
        return partial(_classified_tokens, **tokens, classes=config.num_labels)
    if tokens["vocabulary"] and bases & CLASSIFIES_ROWS:
        return partial(_classified_rows, **tokens, classes=config.num_labels, end=getattr(config, "eos_token_id", None))
    if bases & CLASSIFIES_IMAGES:
        size = getattr(config, "image_size", None) or IMAGE
        shape = rows, getattr(config, "num_channels", 3), *(size if isinstance(size, list | tuple) else (size, size))
        return partial(_signals, name="pixel_values", shape=shape, classes=config.num_labels)
    if bases & CLASSIFIES_SOUND and kind.main_input_name == "input_values":
        return partial(_signals, name="input_values", shape=(rows, SAMPLES), classes=config.num_labels)
    return None


def reference_model(checkpoint: str | os.PathLike[str]) -> Any:
    """Load the whole model on one device, as the class that the checkpoint names."""
    return _load(_named_class(checkpoint), os.fspath(checkpoint))


def token_batch(
    step: int, checkpoint: str | os.PathLike[str], rows: int = ROWS, length: int = LENGTH
) -> dict[str, Tensor]:
    """Return the global batch of a step: random tokens of the checkpoint's vocabulary, the same for the same step."""
    vocabulary = int(AutoConfig.from_pretrained(checkpoint).get_text_config().vocab_size)
    return _tokens(step, vocabulary, rows, length)


def _tokens(step: int, vocabulary: int, rows: int, length: int) -> dict[str, Tensor]:
    tokens = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def _classified_tokens(step: int, vocabulary: int, rows: int, length: int, classes: int) -> dict[str, Tensor]:
    tokens = _tokens(step, vocabulary, rows, length)["input_ids"]
    return {"input_ids": tokens, "labels": tokens % classes}


def _classified_rows(
    step: int, vocabulary: int, rows: int, length: int, classes: int, end: int | None
) -> dict[str, Tensor]:
    tokens = _tokens(step, vocabulary, rows, length)["input_ids"]
    if isinstance(end, int):  # BART and T5 classify by the state at this token, and ask for as many in each row
        tokens = torch.where(tokens == end, (end + 1) % vocabulary, tokens)
        tokens[:, -1] = end
    return {"input_ids": tokens, "labels": _classes(step, rows, classes)}


def _signals(step: int, name: str, shape: tuple[int, ...], classes: int) -> dict[str, Tensor]:
    """Return normally distributed images or recordings, with a class for each."""
    signals = torch.randn(shape, generator=torch.Generator().manual_seed(step))
    return {name: signals, "labels": _classes(step, shape[0], classes)}


def _classes(step: int, rows: int, classes: int) -> Tensor:
    return (torch.arange(rows) + step) % classes


def _load(kind: Any, checkpoint: str) -> Any:
    return kind.from_pretrained(checkpoint)


def _named_class(checkpoint: str | os.PathLike[str]) -> Any:
    config = AutoConfig.from_pretrained(checkpoint)
    named: Iterator[Any] = (getattr(transformers, name, None) for name in config.architectures or ())
    return next(filter(None, named), AutoModelForCausalLM)
