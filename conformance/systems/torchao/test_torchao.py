"""torchao's training in low precision on FSDP2: float8 with its own all-gather, int8 weights, NF4 under LoRA."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.quantized_training import (
    Int8MixedPrecisionTrainingConfig,
    Int8MixedPrecisionTrainingLinearWeight,
    int8_weight_only_quantized_training,
)
from torchao.quantization import quantize_
from transformers import AutoModelForCausalLM

from fixtures.tiny import save_tiny
from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.transformers import subject
from pytest_fsdp_meta.worlds import Rank, WorldSpec


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("checkpoint"))


def is_inner(module: Any, name: str) -> bool:
    return isinstance(module, torch.nn.Linear) and name != "lm_head"


def in_float8(path: Path, all_gather: bool) -> Any:
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=all_gather, emulate=True)  # a CPU has no float8 products
    model = AutoModelForCausalLM.from_pretrained(path)
    return convert_to_float8_training(model, config=config, module_filter_fn=is_inner)


def in_int8(path: Path, config: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path)
    quantize_(model, config, filter_fn=is_inner)
    return model


def load(fsdp: Rank, path: Path, build: Any, **declared: Any) -> Subject:
    model = build()
    for layer in model.model.layers:
        fully_shard(layer, mesh=fsdp.mesh)
    model = fully_shard(model, mesh=fsdp.mesh)
    return subject(model, path, **{"reference": build, "whole_while_loading": True, **declared})


FLOAT8 = {"loss_parity": 0.005, "grad_norm_parity": 0.02} | dict.fromkeys(
    ("grad_parity", "second_grad_parity", "grad_accumulation_parity", "update_parity"), 0.3
)
"""Activations are scaled by the largest of a rank's own rows, so that ranks round otherwise than the reference."""
LOADING = (
    "names_match_reference",
    "shapes_match_reference",
    "dtypes_match_reference",
    "requires_grad_matches_reference",
    "no_meta_params",
    "no_meta_buffers",
    "no_uninitialized_memory",
    "params_equal_reference",
    "buffers_equal_reference",
    "nothing_left_unsharded",
    "load_is_repeatable",
)


@pytest.mark.parametrize("all_gather", [False, True])
@fsdp_conformance(world_size=2, tolerance=FLOAT8)
def test_float8(fsdp, path, all_gather):
    return load(fsdp, path, partial(in_float8, path, all_gather))


@fsdp_conformance(world_size=2)
def test_int8_products(fsdp, path):
    # torch.distributed.checkpoint loads with weights_only=True, which refuses other classes of tensors.
    torch.serialization.add_safe_globals([Int8MixedPrecisionTrainingLinearWeight, Int8MixedPrecisionTrainingConfig])
    return load(fsdp, path, partial(in_int8, path, Int8MixedPrecisionTrainingConfig()))


@fsdp_conformance(world_size=2, only=LOADING)
def test_int8_weights(fsdp, path):
    """They cannot be saved by torch.distributed.checkpoint, and their updates are rounded at random on each rank."""
    return load(fsdp, path, partial(in_int8, path, int8_weight_only_quantized_training()))


def scaled_twice(fsdp: Rank, path: Path) -> Subject:
    """Scale the weights of one layer, as loading a scale twice does."""

    def build() -> Any:
        model = in_int8(path, int8_weight_only_quantized_training())
        model.model.layers[1].mlp.up_proj.weight.scale.mul_(2)
        return model

    reference = partial(in_int8, path, int8_weight_only_quantized_training())
    return load(fsdp, path, build, reference=reference)


def test_another_scale_is_found(path, failures_of):
    failures = failures_of(scaled_twice, WorldSpec({"dp_shard": 2}, timeout=120), path=path)
    assert "model.layers.1.mlp.up_proj.weight, ranks 0, 1" in failures["params_equal_reference"]


def test_recipe(recipe):
    assert "failed" not in recipe("torchao")
