"""peft's adapters on FSDP2: LoRA, DoRA, ``modules_to_save`` and trainable tokens, added before sharding."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.transformers import subject
from pytest_fsdp_meta.worlds import Rank

ARCHITECTURES = ("llama", "llama-tied", "qwen3-moe")
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.0}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Path:
    """Return the folder of adapters that peft saved after a training, here of ones."""
    model = adapted(checkpoints["llama"])
    with torch.no_grad():
        for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            parameter.copy_(torch.linspace(-0.1, 0.1 + number / 100, parameter.numel()).view_as(parameter))
    folder = tmp_path_factory.mktemp("adapters")
    model.save_pretrained(folder)
    return folder


def adapted(path: Path, **options: Any) -> Any:
    return get_peft_model(AutoModelForCausalLM.from_pretrained(path), LoraConfig(**{**LORA, **options}))


def trained_adapters(path: Path, adapters: Path) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), adapters, is_trainable=True)


def shard(fsdp: Rank, model: Any) -> Any:
    layers = model.get_base_model().model.layers
    for layer in layers:
        fully_shard(layer, mesh=fsdp.mesh)
    return fully_shard(model, mesh=fsdp.mesh)


def load(fsdp: Rank, path: Path, build: Any, **declared: Any) -> Subject:
    fields = {"reference": build, "whole_while_loading": True, "drawn": ["*lora_A*"]}
    model = shard(fsdp, build())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return subject(model, path, **{**fields, **declared}, optimizer=optimizer)


@pytest.mark.parametrize("name", ARCHITECTURES)
@fsdp_conformance(world_size=2)
def test_lora(fsdp, checkpoints, name):
    return load(fsdp, checkpoints[name], partial(adapted, checkpoints[name]))


@fsdp_conformance(world_size=2)
def test_dora(fsdp, checkpoints):
    return load(fsdp, checkpoints["llama"], partial(adapted, checkpoints["llama"], use_dora=True))


@fsdp_conformance(world_size=2)
def test_modules_to_save(fsdp, checkpoints):
    return load(fsdp, checkpoints["llama"], partial(adapted, checkpoints["llama"], modules_to_save=["lm_head"]))


@fsdp_conformance(world_size=2)
def test_trainable_tokens(fsdp, checkpoints):
    build = partial(adapted, checkpoints["llama"], trainable_token_indices=[1, 5, 7])
    return load(fsdp, checkpoints["llama"], build)


@fsdp_conformance(world_size=2)
def test_trained_adapters(fsdp, checkpoints, adapters):
    """Adapters that were saved are loaded: nothing is drawn."""
    return load(fsdp, checkpoints["llama"], partial(trained_adapters, checkpoints["llama"], adapters), drawn=())


@pytest.mark.parametrize(
    ("options", "error"),
    [({"modules_to_save": ["lm_head"]}, KeyError), ({"trainable_token_indices": [1, 5]}, AttributeError)],
    ids=["modules_to_save", "trainable_token_indices"],
)
def test_a_tied_model_cannot_be_tied_again(checkpoints, options, error):
    """Loaders do that after ``to_empty``. A release that repairs it fails this test (seen with peft 0.21.2)."""
    model = adapted(checkpoints["llama-tied"], **options)
    with pytest.raises(error):
        model.get_base_model().tie_weights()


def test_recipe(recipe):
    assert "failed" not in recipe("peft")
