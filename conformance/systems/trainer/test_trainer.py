"""transformers' Trainer with FSDP2: its prepared model and optimizer, and ``Trainer.training_step``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import DistributedType, PartialState
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.transformers import subject, token_batch

ARCHITECTURES = ("llama", "llama-tied", "qwen3-moe", "gemma3", "gpt2")
ONE_TOKEN_TOO_MANY = (
    "transformers 5.23.0: the Trainer counts the first label of each row for models without a loss_type, such as "
    "GPT2LMHeadModel (trainer.py:543, modeling_utils.py:1284): with 12 tokens in a row, the loss is 11/12 of it"
)
SAME_SEED = "transformers 5.23.0: the Trainer seeds all ranks alike (trainer.py:419), and GPT-2 has dropout"
FSDP = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": False}
Step = Callable[[Any, Any, dict[str, Any]], Tensor]


def make_trainer(path: Path, **options: Any) -> Trainer:
    options.setdefault("fsdp_config", FSDP)
    arguments = TrainingArguments(
        output_dir="unused", fsdp=True, use_cpu=not torch.cuda.is_available(), report_to=[], **options
    )
    if arguments.device.type == "cpu":  # accelerate uses DDP on CPUs, unless it takes them for GPUs
        PartialState().distributed_type = DistributedType.MULTI_GPU
    return Trainer(AutoModelForCausalLM.from_pretrained(path), arguments)


def step_of(trainer: Trainer, micro_batches: int = 1) -> Step:
    """Return the step of ``Trainer.train()``: its micro-batches, its number of tokens, its clipping."""

    def step(model: Any, optimizer: Any, batch: dict[str, Any]) -> Tensor:
        pieces = {key: value.chunk(micro_batches) for key, value in batch.items()}
        rows = iter([{key: value[number] for key, value in pieces.items()} for number in range(micro_batches)])
        samples, tokens = trainer.get_batch_samples(rows, micro_batches, model.device)
        trainer.current_gradient_accumulation_steps = len(samples)
        losses = [trainer.training_step(model, own, tokens) for own in samples]
        trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return step


def load(path: Path, micro_batches: int = 1, declared: dict[str, Any] | None = None, **options: Any) -> Subject:
    trainer = make_trainer(path, gradient_accumulation_steps=micro_batches, **options)
    trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    step = step_of(trainer, micro_batches)
    fields = {"optimizer": optimizer, "train_step": step, "max_grad_norm": 1.0, "whole_while_loading": True}
    return subject(model, path, **{**fields, **(declared or {})})


def uneven_labels(step: int, path: Path) -> dict[str, Tensor]:
    """Return a batch whose halves count different numbers of tokens."""
    batch = token_batch(step, path)
    labels = batch["labels"].clone()
    labels[: len(labels) // 2, 2:] = -100
    return {**batch, "labels": labels}


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3-moe", "gemma3"])
@fsdp_conformance(world_size=2)
def test_prepared(fsdp, checkpoints, name):
    return load(checkpoints[name])


@fsdp_conformance(
    world_size=2,
    xfail={
        "loss_parity": ONE_TOKEN_TOO_MANY,
        "grad_parity": ONE_TOKEN_TOO_MANY,
        "random_numbers_follow_the_mesh": SAME_SEED,
    },
)
def test_gpt2(fsdp, checkpoints):
    return load(checkpoints["gpt2"])


@fsdp_conformance(world_size=2)
def test_accumulation(fsdp, checkpoints):
    return load(checkpoints["llama"], micro_batches=2)


@pytest.mark.parametrize("micro_batches", [1, 2])
@fsdp_conformance(world_size=2)
def test_uneven_labels(fsdp, checkpoints, micro_batches):
    path = checkpoints["llama"]
    declared = {"batch": partial(uneven_labels, path=path), "loss_over_ranks": "mean"}
    return load(path, micro_batches, declared)


@fsdp_conformance(world_size=2)
def test_ram_efficient_loading(fsdp, checkpoints):
    config = {**FSDP, "cpu_ram_efficient_loading": True}
    return load(checkpoints["llama"], declared={"whole_while_loading": (0,)}, fsdp_config=config)


@fsdp_conformance(world_size=2)
def test_activation_checkpointing(fsdp, checkpoints):
    return load(checkpoints["llama"], fsdp_config={**FSDP, "activation_checkpointing": True})


@fsdp_conformance(world_size=2)
def test_bf16(fsdp, checkpoints):
    return load(checkpoints["llama"], bf16=True)


def test_recipe(recipe):
    assert "failed" not in recipe("trainer")
