"""Our conforming loaders pass every check, on checkpoints of real architectures.

What is neither slow nor nightly here is the part of ``make conformance`` that shows that right loaders pass.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fixtures.conforming import blocks_named, load_sharded, subject
from fixtures.tiny import CHECKPOINTS
from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.transformers import reference_model


def nightly_but(*others: str) -> list[Any]:
    """Return the checkpoints; only make nightly takes those that are not among ``others``."""
    return [pytest.param(name, marks=() if name in others else pytest.mark.nightly) for name in CHECKPOINTS]


@pytest.mark.parametrize("path", nightly_but("llama", "gpt2"), indirect=True)
@fsdp_conformance(world_size=2)
def test_sharded(fsdp, path):
    return subject(load_sharded(path, fsdp.mesh, fsdp.device), path)


@pytest.mark.slow
@pytest.mark.parametrize("path", nightly_but("llama"), indirect=True)
@fsdp_conformance(world_size=(1, 4))
def test_sharded_in_other_worlds(fsdp, path):
    return subject(load_sharded(path, fsdp.mesh, fsdp.device), path)


@pytest.mark.parametrize("path", nightly_but("llama-tied"), indirect=True)
@fsdp_conformance(mesh={"dp_replicate": 2, "dp_shard": 2})
def test_hsdp(fsdp, path):
    return subject(load_sharded(path, fsdp.mesh, fsdp.device), path)


@pytest.mark.parametrize("path", ["llama-odd"], indirect=True)
@fsdp_conformance(world_size=4)
def test_uneven_sizes_and_empty_shards(fsdp, path):
    return subject(load_sharded(path, fsdp.mesh, fsdp.device), path)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["llama", "llama-prime-tied"], indirect=True)
@fsdp_conformance(world_size=3)
def test_three_ranks(fsdp, path):
    """Most sizes of the other worlds are powers of two, whose shards are uneven only for other numbers of ranks."""
    return subject(load_sharded(path, fsdp.mesh, fsdp.device), path, rows=12)


@pytest.mark.nightly
@pytest.mark.parametrize("path", ["llama-tied", "llama-odd"], indirect=True)
@fsdp_conformance(world_size=8)
def test_eight_ranks(fsdp, path):
    return subject(load_sharded(path, fsdp.mesh, fsdp.device), path)


@pytest.mark.nightly
@pytest.mark.parametrize("path", ["llama"], indirect=True)
@fsdp_conformance(mesh={"dp_replicate": 2, "dp_shard": 4})
def test_hsdp_of_eight(fsdp, path):
    return subject(load_sharded(path, fsdp.mesh, fsdp.device), path)


@pytest.mark.nightly
@pytest.mark.parametrize("path", ["llama-bfloat16"], indirect=True)
@fsdp_conformance(world_size=(1, 2))
def test_long_batches_in_bfloat16(fsdp, path):
    """2048 tokens: on GPUs, fast attention kernels accumulate the gradients of so many in an order that varies."""
    return subject(load_sharded(path, fsdp.mesh, fsdp.device), path, rows=8, length=256)


def freeze(model: torch.nn.Module, prefix: str) -> torch.nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefix))
    return model


@pytest.mark.parametrize("path", ["llama", pytest.param("gpt2", marks=pytest.mark.nightly)], indirect=True)
@fsdp_conformance(world_size=2)
def test_frozen_part(fsdp, path):
    model = load_sharded(path, fsdp.mesh, fsdp.device)
    block = next(blocks_named(model))
    return subject(
        freeze(model, block),
        path,
        reference=lambda: freeze(reference_model(path), block),
        frozen=f"{block}.*",
        verifier=path,
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", ["llama"], indirect=True)
@fsdp_conformance(world_size=2)
def test_checkpoint_directory_as_reference(fsdp, path):
    return Subject(load_sharded(path, fsdp.mesh, fsdp.device), reference=path)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["llama"], indirect=True)
@fsdp_conformance(world_size=2)
def test_bare_model(fsdp, path):
    return load_sharded(path, fsdp.mesh, fsdp.device)
