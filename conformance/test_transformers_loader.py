"""(b) transformers' own FSDP2 loader, on the same checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from fixtures.conforming import subject
from pytest_fsdp_meta import fsdp_conformance


@pytest.fixture
def path(request: pytest.FixtureRequest, checkpoint) -> Path:
    return checkpoint(request.param)


def from_pretrained(path: Path, **sizes: int):
    return AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(**sizes))


@pytest.mark.parametrize("path", ["llama", "llama-tied", "qwen3-moe", "gemma3", "gpt2"], indirect=True)
@fsdp_conformance(world_size=(1, 2, 4))
def test_from_pretrained(fsdp, path):
    return subject(from_pretrained(path, fsdp_size=fsdp.world_size), path)


@pytest.mark.parametrize("path", ["llama-tied", "qwen3-moe"], indirect=True)
@fsdp_conformance(mesh={"dp_replicate": 2, "dp_shard": 2})
def test_from_pretrained_hsdp(fsdp, path):
    return subject(from_pretrained(path, fsdp_size=2, dp_replicate_size=2), path)


@pytest.mark.parametrize("path", ["falcon-h1"], indirect=True)
@fsdp_conformance(world_size=2)
def test_falcon(fsdp, path):
    return subject(from_pretrained(path, fsdp_size=fsdp.world_size), path)
