"""DeepSpeed's ZeRO-3: ``deepspeed.initialize(model, config=...)`` with models of transformers."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

if not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed looks for an accelerator when it is imported

import deepspeed
import torch
from transformers import AutoModelForCausalLM

from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.transformers import subject, token_batch
from pytest_fsdp_meta.worlds import Rank, WorldSpec

ARCHITECTURES = ("llama", "llama-tied", "qwen3-moe", "gpt2")
OTHER_SIZE = (
    "a checkpoint of ZeRO-3 loads in a world of the same size only (deepspeed 0.19.8, runtime/engine.py:4751); "
    "ds_to_universal converts it"
)
NO_RANDOM_STATE = "save_checkpoint keeps no state of random generators (deepspeed 0.19.8), and GPT-2 has dropout"


def train_step(engine: Any, optimizer: Any, batch: dict[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


def gathered(engine: Any) -> dict[str, Any]:
    """Return what ``engine.save_16bit_model()`` writes: rank 0 has the whole state dict, the others have none."""
    return engine._zero3_consolidated_16bit_state_dict() or {}


def decayed_and_others(model: Any) -> list[dict[str, Any]]:
    decayed = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim < 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def load(
    path: Path,
    *,
    prepare: Callable[[Any], object] = lambda model: None,
    groups: Callable[[Any], Any] = lambda model: [p for p in model.parameters() if p.requires_grad],
    config: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    **declared: Any,
) -> Subject:
    model = AutoModelForCausalLM.from_pretrained(path)
    prepare(model)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups(model), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **(zero or {})},
            **(config or {}),
        },
        dist_init_required=False,
    )
    fields: dict[str, Any] = {
        "optimizer": optimizer,
        "train_step": train_step,
        "max_grad_norm": 1.0,  # what DeepSpeed clips to by default
        "state_dict": gathered,
        "save": lambda engine, optimizer, folder: engine.save_checkpoint(str(folder)),
        "resume": lambda engine, optimizer, folder: engine.load_checkpoint(str(folder)),
        "whole_while_loading": True,
    }
    return subject(engine, path, **{**fields, **declared})


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3-moe"])
@fsdp_conformance(world_size=2, xfail={"dcp_reshards": OTHER_SIZE})
def test_zero3(fsdp, checkpoints, name):
    return load(checkpoints[name])


@fsdp_conformance(world_size=2, xfail={"dcp_reshards": OTHER_SIZE, "random_numbers_resume": NO_RANDOM_STATE})
def test_dropout(fsdp, checkpoints):
    return load(checkpoints["gpt2"])


@fsdp_conformance(world_size=3, xfail={"dcp_reshards": OTHER_SIZE})
def test_uneven(fsdp, checkpoints):
    return load(checkpoints["llama-tied"], batch=partial(token_batch, checkpoint=checkpoints["llama-tied"], rows=6))


@fsdp_conformance(world_size=2, xfail={"dcp_reshards": OTHER_SIZE})
def test_persistent_parameters(fsdp, checkpoints):
    """DeepSpeed keeps small parameters whole by default, beside this rank's part."""
    return load(checkpoints["llama"], zero={"stage3_param_persistence_threshold": 100_000})


@fsdp_conformance(world_size=2, xfail={"dcp_reshards": OTHER_SIZE})
def test_groups(fsdp, checkpoints):
    return load(checkpoints["llama"], groups=decayed_and_others)


@fsdp_conformance(world_size=2, xfail={"dcp_reshards": OTHER_SIZE})
def test_sub_groups(fsdp, checkpoints):
    return load(checkpoints["llama"], zero={"sub_group_size": 1000})


@fsdp_conformance(world_size=2, xfail={"dcp_reshards": OTHER_SIZE})
def test_without_clipping(fsdp, checkpoints):
    return load(checkpoints["llama"], config={"gradient_clipping": 0.0}, max_grad_norm=None)


@fsdp_conformance(world_size=2, xfail={"dcp_reshards": OTHER_SIZE})
def test_frozen_embedding(fsdp, checkpoints):
    def prepare(model: Any) -> None:
        model.get_input_embeddings().requires_grad_(False)

    path = checkpoints["llama"]

    def reference() -> Any:
        model = AutoModelForCausalLM.from_pretrained(path)
        prepare(model)
        return model

    return load(path, prepare=prepare, reference=reference)


@fsdp_conformance(world_size=2, xfail={"dcp_reshards": OTHER_SIZE})
def test_accumulation(fsdp, checkpoints):
    def accumulate(engine: Any, optimizer: Any, batch: dict[str, Any]) -> float:
        rows = len(batch["input_ids"])
        total = 0.0
        for half in (slice(0, rows // 2), slice(rows // 2, rows)):
            loss = engine(**{key: value[half] for key, value in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / 2
        return total

    return load(checkpoints["llama"], config={"gradient_accumulation_steps": 2}, train_step=accumulate)


@fsdp_conformance(world_size=2, xfail={"dcp_reshards": OTHER_SIZE})
def test_bf16(fsdp, checkpoints):
    path = checkpoints["llama"]

    def reference() -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)

    return load(path, reference=reference, config={"bf16": {"enabled": True}})


def partition_off_by_one(fsdp: Rank, path: Path) -> Subject:
    loaded = load(path)
    weight = loaded.model.module.model.layers[0].mlp.up_proj.weight
    weight.ds_tensor.data.copy_(weight.ds_tensor.roll(1))
    return loaded


def embedding_untied(fsdp: Rank, path: Path) -> Subject:
    def prepare(model: Any) -> None:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())

    return load(path, prepare=prepare)


def loss_divided_twice(fsdp: Rank, path: Path) -> Subject:
    def step(engine: Any, optimizer: Any, batch: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = engine(**batch).loss
        engine.backward(loss / 2)
        engine.step()
        return loss.detach()

    return load(path, config={"gradient_clipping": 0.0}, max_grad_norm=None, train_step=step)


def norms_in_no_group(fsdp: Rank, path: Path) -> Subject:
    return load(path, groups=lambda model: decayed_and_others(model)[:1])


def clipping_not_declared(fsdp: Rank, path: Path) -> Subject:
    """The defect is the author's declaration. Small parameters are kept whole by default, beside this rank's part."""
    return load(path, zero={"stage3_param_persistence_threshold": 100_000}, max_grad_norm=None)


DEFECTS = {
    partition_off_by_one: ("llama", "params_equal_reference", "model.layers.0.mlp.up_proj.weight, ranks 0, 1"),
    embedding_untied: ("llama-tied", "tied_weights_share_storage", "lm_head.weight"),
    loss_divided_twice: ("llama", "grad_parity", "all 21 parameters, ranks 0, 1: gradient is"),
    norms_in_no_group: ("llama", "optimizer_owns_parameters", "model.norm.weight"),
}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_defects(checkpoints, failures_of, defect):
    name, check, message = DEFECTS[defect]
    failures = failures_of(defect, WorldSpec({"dp_shard": 2}, timeout=120), path=checkpoints[name])
    assert message in failures[check], failures


def test_no_module_is_blamed_for_clipping_that_is_not_declared(checkpoints, failures_of):
    """The loaded values are restored before the step is traced: also those of parameters that are kept whole."""
    failures = failures_of(clipping_not_declared, WorldSpec({"dp_shard": 2}), path=checkpoints["llama"])
    assert set(failures) == {"grad_parity", "dcp_reshards"}
    assert "if train_step clips, declare Subject(max_grad_norm=" in failures["grad_parity"]
    assert "where it starts" not in failures["grad_parity"]


def test_recipe(recipe):
    assert "failed" not in recipe("deepspeed")
