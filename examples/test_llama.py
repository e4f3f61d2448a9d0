from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pytest_fsdp_meta import Subject, fsdp_conformance


def load_sharded(path, mesh, device):  # your own loading code
    config = LlamaConfig.from_pretrained(path)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    weights = load_file(Path(path, "model.safetensors"))
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)  # no checkpoint has its buffers
    return model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    path = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(path)
    return path


def token_batch(step, size):
    tokens = torch.randint(128, (size, 16), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


@fsdp_conformance(world_size=2)
def test_llama(fsdp, tiny_llama):  # runs on every rank
    model = load_sharded(tiny_llama, mesh=fsdp.mesh, device=fsdp.device)
    return Subject(
        model,
        reference=lambda: LlamaForCausalLM.from_pretrained(tiny_llama),
        batch=lambda step: token_batch(step, size=8),
    )
