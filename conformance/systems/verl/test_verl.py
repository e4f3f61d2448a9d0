"""verl's FSDP engine: its model, optimizer and schedule, ``train_batch`` over micro-batches, and its checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_cuda import PlatformCUDA

from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.transformers import subject, token_batch

ARCHITECTURES = ("llama", "llama-tied", "qwen3-moe", "gemma3")


class PlatformCPU(PlatformCUDA):
    """verl has platforms for accelerators only, and asks for the platform when it is imported."""

    device_name, device_module = "cpu", torch.cpu

    def current_device(self) -> Any:
        return torch.device("cpu")


if not torch.cuda.is_available():
    platform_manager.set_platform(PlatformCPU())

from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.utils.losses import sft_loss  # noqa: E402


def with_prompts(step: int, path: Path) -> dict[str, Tensor]:
    """Return rows with prompts of different lengths, which have no labels."""
    batch = token_batch(step, path)
    labels = batch["labels"].clone()
    for row in range(len(labels)):
        labels[row, : 1 + row % 5] = -100
    return {**batch, "labels": labels}


def of_different_lengths(step: int, path: Path) -> dict[str, Tensor]:
    """Return rows with prompts, padded on the right."""
    batch = with_prompts(step, path)
    lengths = torch.tensor([len(row) - number % 4 for number, row in enumerate(batch["labels"])])
    mask = (torch.arange(batch["labels"].shape[1]) < lengths[:, None]).long()
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def train_step(engine: Any, model: Any, optimizer: Any, batch: dict[str, Tensor], max_tokens: int = 32) -> Tensor:
    """Train as ``SFTTrainer`` does: packed rows without padding, in micro-batches of a number of tokens."""
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    masks = batch.get("attention_mask", torch.ones_like(batch["labels"])).bool()
    rows = [row[mask] for row, mask in zip(batch["input_ids"], masks, strict=True)]
    tensors = {
        "input_ids": nested(rows),
        "position_ids": nested([torch.arange(len(row), device=row.device) for row in rows]),
        "loss_mask": nested([(row[mask] != -100).long() for row, mask in zip(batch["labels"], masks, strict=True)]),
    }
    options = {"use_dynamic_bsz": True, "max_token_len_per_gpu": max_tokens, "temperature": 1.0}
    data = tensordict_utils.get_tensordict(tensors, {**options, "use_remove_padding": True})
    with engine.train_mode():
        output = engine.train_batch(data, partial(sft_loss, None))
    return torch.tensor(output["loss"]).sum()


def adapted(path: Path) -> Any:
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(AutoModelForCausalLM.from_pretrained(path), config)


def load(path: Path, declared: Any = None, model: Any = None, **options: Any) -> Subject:
    options = {"strategy": "fsdp2", "use_torch_compile": False, "mixed_precision": {"param_dtype": "fp32"}, **options}
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=str(path), load_tokenizer=False, override_config={"attn_implementation": "sdpa"}, **(model or {})
        ),
        FSDPEngineConfig(**options),
        FSDPOptimizerConfig(lr=1e-3, total_training_steps=10, lr_warmup_steps=2),
        CheckpointConfig(),
    )
    engine.initialize()
    fields = {
        "optimizer": engine.optimizer,
        "batch": partial(with_prompts, path=path),
        "train_step": partial(train_step, engine),
        "max_grad_norm": 1.0,
        "save": lambda model, optimizer, folder: engine.save_checkpoint(str(folder)),
        "resume": lambda model, optimizer, folder: engine.load_checkpoint(str(folder), del_local_after_load=False),
    }
    return subject(engine.module, path, **{**fields, **(declared or {})})


SAME_SIZE = {
    "dcp_reshards": "verl 0.9.1 names the files of a checkpoint by the number of ranks, and loads it on as many only "
    "(fsdp_checkpoint_manager.py:213)"
}
FROZEN = {
    "optimizer_owns_parameters": "verl 0.9.1 gives its optimizer the frozen parameters of a LoRA model as well "
    "(transformer_impl.py:499)"
}
same_size = partial(fsdp_conformance, xfail=SAME_SIZE)


@pytest.mark.parametrize("name", ARCHITECTURES)
@same_size(world_size=2)
def test_engine(fsdp, checkpoints, name):
    return load(checkpoints[name])


@same_size(world_size=2)
def test_rows_of_different_lengths(fsdp, checkpoints):
    path = checkpoints["llama"]
    return load(path, {"batch": partial(of_different_lengths, path=path)})


@same_size(world_size=2, tolerance={"loss_parity": 5e-3})
def test_bf16(fsdp, checkpoints):
    """Without flash-attn's cross entropy, verl computes log-probabilities in bfloat16 on a CPU: with three digits."""
    return load(checkpoints["llama"], mixed_precision=None)


@same_size(world_size=4)
def test_hsdp(fsdp, checkpoints):
    return load(checkpoints["llama-tied"], fsdp_size=2)


@same_size(world_size=2)
def test_without_gradient_checkpointing(fsdp, checkpoints):
    return load(checkpoints["llama"], model={"enable_gradient_checkpointing": False}, forward_prefetch=True)


@fsdp_conformance(world_size=2, xfail={**SAME_SIZE, **FROZEN})
def test_lora(fsdp, checkpoints):
    declared = {"reference": partial(adapted, checkpoints["llama"]), "drawn": ["*lora_A*"]}
    return load(checkpoints["llama"], declared, model={"lora_rank": 4, "lora_alpha": 8})


def test_recipe(recipe):
    assert "failed" not in recipe("verl")
