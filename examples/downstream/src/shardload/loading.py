"""The loader that this repository is about."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def load(path: Path, mesh: DeviceMesh, device: torch.device) -> PreTrainedModel:
    """The checkpoint at ``path`` (one of Llama's family, in one file), sharded over ``mesh``."""
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    model.tie_weights()  # to_empty gives each of two names memory of its own
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # no checkpoint has its buffers
    weights = load_file(path / "model.safetensors")
    # A tied head is stored once, under the name of the embedding.
    options = StateDictOptions(full_state_dict=True, strict=not config.tie_word_embeddings)
    set_model_state_dict(model, weights, options=options)
    return model
