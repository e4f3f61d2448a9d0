"""trl with FSDP2: ``SFTTrainer`` with its own step and loss, and ``prepare_fsdp`` for models that are not trained."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
from trl.models import prepare_fsdp

from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.transformers import subject, token_batch
from pytest_fsdp_meta.worlds import Rank

ARCHITECTURES = ("llama", "llama-tied", "qwen3-moe")
FSDP = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
HEAD_BY_FULL_TENSOR = (
    "trl 1.16.0: the fused head reads lm_head.weight outside its module; with LoRA that is a DTensor there, and "
    "full_tensor() gathers it in each forward (trainer/utils.py:1637)"
)
ROOT_ALONE = (
    "trl 1.16.0: prepare_fsdp sets the wrapping policy for FSDP1 only (models/utils.py:297): with FSDP2 it shards the "
    "root, and the whole model is gathered at once (models/utils.py:338)"
)


def masked(step: int, path: Path) -> dict[str, Tensor]:
    """Return a batch as SFTTrainer's collator makes it: with a mask, and halves of different lengths."""
    batch = token_batch(step, path, rows=12)
    mask = torch.ones_like(batch["input_ids"])
    mask[: len(mask) // 2, 7:] = 0
    return {**batch, "labels": batch["labels"].where(mask == 1, -100), "attention_mask": mask}


def adapted(path: Path) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def make_trainer(path: Path, build: Any = AutoModelForCausalLM.from_pretrained, **options: Any) -> SFTTrainer:
    options = {"fsdp_config": FSDP, "bf16": False, "activation_checkpointing": False, **options}
    cpu = not torch.cuda.is_available()
    arguments = SFTConfig("unused", fsdp=True, use_cpu=cpu, report_to=[], **options)
    if cpu:  # accelerate uses DDP on CPUs, unless it takes them for GPUs
        PartialState().distributed_type = DistributedType.MULTI_GPU
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, "a"))
    return SFTTrainer(
        build(path),
        arguments,
        train_dataset=Dataset.from_dict({"input_ids": [[1]]}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="a", eos_token="a"),
    )


def train_step(trainer: SFTTrainer, micro_batches: int, model: Any, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    """Step as ``SFTTrainer.train()`` does: its micro-batches, its number of tokens, its clipping."""
    pieces = {key: value.chunk(micro_batches) for key, value in batch.items()}
    rows = iter([{key: value[number] for key, value in pieces.items()} for number in range(micro_batches)])
    samples, tokens = trainer.get_batch_samples(rows, micro_batches, model.device)
    trainer.current_gradient_accumulation_steps = len(samples)
    losses = [trainer.training_step(model, own, tokens) for own in samples]
    trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


def load(path: Path, micro_batches: int = 1, declared: dict[str, Any] | None = None, **options: Any) -> Subject:
    trainer = make_trainer(path, gradient_accumulation_steps=micro_batches, **options)
    trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    fields = {
        "optimizer": optimizer,
        "batch": partial(masked, path=path),
        "train_step": partial(train_step, trainer, micro_batches),
        "max_grad_norm": 1.0,
        "whole_while_loading": True,
    }
    return subject(model, path, **{**fields, **(declared or {})})


@pytest.mark.parametrize("name", ARCHITECTURES)
@fsdp_conformance(world_size=2)
def test_sft(fsdp, checkpoints, name):
    # SFTTrainer adds the loss that balances experts, which each rank computes of its own rows.
    return load(checkpoints[name], **({"router_aux_loss_coef": 0.0} if name == "qwen3-moe" else {}))


@fsdp_conformance(world_size=3)
def test_uneven(fsdp, checkpoints):
    return load(checkpoints["llama"])


@fsdp_conformance(world_size=2)
def test_accumulation(fsdp, checkpoints):
    return load(checkpoints["llama"], micro_batches=2)


@fsdp_conformance(world_size=2, tolerance={"loss_parity": 5e-3})
def test_bf16(fsdp, checkpoints):
    """FSDP2 returns log-probabilities in bfloat16, as accelerate asks it to, and trl adds them up in it."""
    return load(checkpoints["llama"], bf16=True)


@fsdp_conformance(world_size=2)
def test_activation_checkpointing(fsdp, checkpoints):
    return load(checkpoints["llama"], fsdp_config={**FSDP, "activation_checkpointing": True})


@fsdp_conformance(world_size=2, xfail={"collectives_within_budget": HEAD_BY_FULL_TENSOR})
def test_lora(fsdp, checkpoints):
    path = checkpoints["llama"]
    return load(path, build=adapted, declared={"reference": partial(adapted, path), "drawn": ["*lora_A*"]})


@fsdp_conformance(world_size=2, xfail={"step_memory_bounded": ROOT_ALONE})
def test_reference_model(fsdp: Rank, checkpoints):
    """The model that DPO, GRPO, KTO and RLOO compare with; it is trained here so that what is gathered is seen."""
    cpu = fsdp.device.type == "cpu"
    if cpu:
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    sharding = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    path = checkpoints["llama"]
    model = prepare_fsdp(AutoModelForCausalLM.from_pretrained(path), Accelerator(cpu=cpu, fsdp_plugin=sharding))
    return subject(model, path, whole_while_loading=True)


def test_recipe(recipe):
    assert "failed" not in recipe("trl")
