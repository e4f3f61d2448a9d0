"""axolotl's FSDP2: accelerate with the functions that axolotl patches into it, and the step of the Trainer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from axolotl.monkeypatch.accelerate import fsdp2
from axolotl.monkeypatch.accelerate.parallelism_config import patch_parallelism_config
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.transformers import subject, tiny_checkpoint
from pytest_fsdp_meta.worlds import Rank

ARCHITECTURES = ("llama", "llama-tied", "llama-prime-tied", "qwen3-moe")

BUFFERS = {
    "names_match_reference": "axolotl 0.19.0 makes parameters of persistent buffers, which then get gradients "
    "(monkeypatch/accelerate/fsdp2.py:332)"
}


class TorchOnCPU(ModuleType):
    """axolotl sends what is not sharded, such as persistent buffers, through ``torch.device("cuda")``."""

    @staticmethod
    def device(kind: str) -> torch.device:
        return torch.device("cpu" if kind == "cuda" else kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def patch(fsdp: Rank, *, adapter: bool = False) -> None:
    """Patch accelerate and transformers as ``PatchManager._apply_fsdp_patches`` does for FSDP2."""
    fsdp2.patch_initialize_missing_keys_for_fsdp()
    if adapter:
        fsdp2.patch_move_missing_keys_meta_for_fsdp()
    patch_parallelism_config()
    fsdp2.patch_accelerate_fsdp2()
    fsdp2.patch_tied_keys_for_meta_device()
    if fsdp.device.type == "cpu":
        fsdp2.torch = TorchOnCPU("torch")
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU


def prepare(
    fsdp: Rank, path: Path, *, adapter: bool = False, plugin: dict[str, Any] | None = None, **options: Any
) -> tuple[Accelerator, Any, Any]:
    patch(fsdp, adapter=adapter)
    sharding = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": True, **(plugin or {})}
    sharding = FullyShardedDataParallelPlugin(fsdp_version=2, **sharding)
    built = Accelerator(cpu=fsdp.device.type == "cpu", fsdp_plugin=sharding, **options)
    model = adapted(path) if adapter else AutoModelForCausalLM.from_pretrained(path)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return built, *built.prepare(model, torch.optim.AdamW(trained, lr=1e-3))


def load(fsdp: Rank, path: Path, declared: dict[str, Any] | None = None, **options: Any) -> Subject:
    built, model, optimizer = prepare(fsdp, path, **options)
    fields = {
        "optimizer": optimizer,
        "whole_while_loading": True,
        "save": lambda model, optimizer, folder: built.save_state(str(folder)),
        "resume": lambda model, optimizer, folder: built.load_state(str(folder)),
    }
    return subject(model, path, **{**fields, **(declared or {})})


def adapted(path: Path) -> Any:
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(AutoModelForCausalLM.from_pretrained(path), config)


@pytest.mark.parametrize("name", ARCHITECTURES)
@fsdp_conformance(world_size=2)
def test_prepare(fsdp, checkpoints, name):
    return load(fsdp, checkpoints[name])


@fsdp_conformance(world_size=2)
def test_without_ram_efficient_loading(fsdp, checkpoints):
    return load(fsdp, checkpoints["llama-tied"], plugin={"cpu_ram_efficient_loading": False})


@fsdp_conformance(world_size=2)
def test_bf16(fsdp, checkpoints):
    return load(fsdp, checkpoints["llama"], mixed_precision="bf16")


@fsdp_conformance(world_size=2)
def test_activation_checkpointing(fsdp, checkpoints):
    return load(fsdp, checkpoints["llama"], plugin={"activation_checkpointing": True})


@fsdp_conformance(mesh={"dp_replicate": 2, "dp_shard": 2})
def test_hsdp(fsdp, checkpoints):
    if fsdp.world_size == 2:  # where the checkpoint of 4 ranks is loaded: accelerate refuses replicas of whole shards
        return load(fsdp, checkpoints["llama"])
    sizes = {"dp_replicate_size": 2, "dp_shard_size": fsdp.world_size // 2}
    return load(fsdp, checkpoints["llama"], parallelism_config=ParallelismConfig(**sizes))


@fsdp_conformance(world_size=2)
def test_lora(fsdp, checkpoints):
    declared = {"reference": partial(adapted, checkpoints["llama"]), "drawn": ["*lora_A*"]}
    return load(fsdp, checkpoints["llama"], {**declared, "whole_while_loading": (0,)}, adapter=True)


@pytest.fixture(scope="session")
def gemma4(tmp_path_factory):
    return tiny_checkpoint("gemma4_text", tmp_path_factory.mktemp("gemma4"))


@fsdp_conformance(world_size=2, xfail=BUFFERS)
def test_persistent_buffers(fsdp, gemma4):
    return load(fsdp, gemma4, plugin={"transformer_cls_names_to_wrap": ["Gemma4TextDecoderLayer"]})


def train_step(trainer: Trainer, model: Any, optimizer: Any, batch: dict[str, Any]) -> Any:
    """Train as ``Trainer.train()`` does."""
    samples, tokens = trainer.get_batch_samples(iter([batch]), 1, model.device)
    trainer.current_gradient_accumulation_steps = len(samples)
    losses = [trainer.training_step(model, own, tokens) for own in samples]
    trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
    optimizer.step()
    model.zero_grad()
    return torch.stack(losses).sum()


def load_trainer(fsdp: Rank, path: Path, max_grad_norm: float = 1.0, **config: Any) -> Subject:
    patch(fsdp)
    config = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": True, **config}
    options = {"max_grad_norm": max_grad_norm, "use_cpu": fsdp.device.type == "cpu", "report_to": []}
    arguments = TrainingArguments("out", fsdp=True, fsdp_config=config, **options)
    if options["use_cpu"]:
        PartialState().distributed_type = DistributedType.MULTI_GPU
    trainer = Trainer(AutoModelForCausalLM.from_pretrained(path), arguments)
    trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    step = {"train_step": partial(train_step, trainer), "max_grad_norm": max_grad_norm}
    return subject(model, path, optimizer=optimizer, whole_while_loading=True, **step)


@fsdp_conformance(world_size=2)
def test_trainer(fsdp, checkpoints):
    return load_trainer(fsdp, checkpoints["llama"])


@fsdp_conformance(world_size=2, xfail=BUFFERS)
def test_trainer_persistent_buffers(fsdp, gemma4):
    return load_trainer(fsdp, gemma4, max_grad_norm=0.05, transformer_layer_cls_to_wrap=["Gemma4TextDecoderLayer"])


def test_recipe(recipe):
    assert "failed" not in recipe("axolotl")
