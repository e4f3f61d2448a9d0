"""NeMo Automodel: ``NeMoAutoModelForCausalLM.from_pretrained`` with the FSDP2 strategy.

NVIDIA-NeMo/Automodel#2146 reports buffers that its init context leaves on the CPU. results/systems.md has the findings,
and what a run on a CPU can show.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from nemo_automodel import NeMoAutoModelForCausalLM
from nemo_automodel._transformers import auto_model
from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config
from nemo_automodel.components.distributed.mesh import ParallelismSizes
from nemo_automodel.components.training.utils import clip_grad_norm
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.transformers import reference_model, token_batch

ARCHITECTURES = ("llama", "llama-tied", "qwen3-moe", "gemma3", "gpt2", "falcon-h1")


def load(path: Path, device: torch.device, config: FSDP2Config, *, force_hf: bool = True, **sizes: int) -> Subject:
    """Load the checkpoint; ``force_hf=False`` uses the package's own implementation of the architecture, if any."""
    stand_in_for_cuda(device)
    model = NeMoAutoModelForCausalLM.from_pretrained(
        str(path),
        dtype=torch.float32,
        attn_implementation="sdpa",
        force_hf=force_hf,
        use_liger_kernel=False,  # a CUDA kernel
        distributed_setup=DistributedSetup.build(config, parallelism_sizes=ParallelismSizes(**sizes)),
    )
    return Subject(
        model,
        reference=lambda: reference_model(path),
        batch=lambda step: token_batch(step, path),
        loss=next_token_loss,
        clip_grad_norm=clip,
    )


def stand_in_for_cuda(device: torch.device) -> None:
    """Replace the current CUDA device with the rank's device if there is no GPU, and nothing else.

    The package asks for it twice: for the index of a ``torch.device``, which FSDP2 does not use, and for the device on
    which ``apply_model_infrastructure`` materialises parameters.
    """
    if device.type == "cuda":
        return
    torch.cuda.current_device = lambda: 0
    build = auto_model.apply_model_infrastructure
    auto_model.apply_model_infrastructure = lambda **options: build(**{**options, "device": device})


def next_token_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the loss here, because transformers' loss does not support logits sharded over tensor-parallel ranks."""
    logits = model(input_ids=batch["input_ids"]).logits
    whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return torch.nn.functional.cross_entropy(whole[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def clip(parameters: Iterable[torch.nn.Parameter], limit: float) -> Any:
    """Clip like the package's training: torch's clip_grad_norm_ cannot mix gradients on several meshes."""
    return clip_grad_norm(limit, [torch.nn.ParameterList(parameters)])


def in_float32() -> FSDP2Config:
    """Return a float32 policy like the reference's; the package's default is bfloat16."""
    return FSDP2Config(mp_policy=MixedPrecisionPolicy())


@pytest.mark.parametrize("name", ARCHITECTURES)
@fsdp_conformance(world_size=2)
def test_fsdp2(fsdp, checkpoints, name):
    return load(checkpoints[name], fsdp.device, in_float32())


@fsdp_conformance(mesh={"dp_replicate": 2, "dp_shard": 2})
def test_hsdp(fsdp, checkpoints):
    # The package refuses replicas of one shard, so the world of two that reads the checkpoint does not replicate.
    sizes = {"dp_replicate_size": 2} if fsdp.world_size > 2 else {}
    return load(checkpoints["llama"], fsdp.device, in_float32(), **sizes)


@fsdp_conformance(mesh={"dp_shard": 2, "tp": 2})
def test_fsdp2_with_tensor_parallelism(fsdp, checkpoints):
    return load(checkpoints["llama"], fsdp.device, in_float32(), tp_size=2)


NO_ORIGINAL = "its Llama keeps no copy of the frequencies (original_inv_freq)"


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@fsdp_conformance(world_size=2, xfail={"names_match_reference": NO_ORIGINAL})
def test_own_llama(fsdp, checkpoints, name):
    return load(checkpoints[name], fsdp.device, in_float32(), force_hf=False)


@fsdp_conformance(world_size=2)
def test_default_precision(fsdp, checkpoints):
    return load(checkpoints["llama"], fsdp.device, FSDP2Config())
