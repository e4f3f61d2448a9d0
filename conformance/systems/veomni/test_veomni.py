"""veomni's ``build_parallelize_model`` with Qwen3 as veomni patches it, loaded from a checkpoint of transformers."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from veomni.arguments.arguments_types import MixedPrecisionConfig, OpsImplementationConfig
from veomni.distributed.parallel_state import init_parallel_state
from veomni.distributed.torch_parallelize import build_parallelize_model
from veomni.models import build_foundation_model

from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.transformers import subject
from pytest_fsdp_meta.worlds import Rank

ARCHITECTURES = ("qwen3", "qwen3-tied")
EAGER = {field.name: "eager" for field in fields(OpsImplementationConfig) if field.name.endswith("_implementation")}
OPS = OpsImplementationConfig(**{**EAGER, "attn_implementation": "sdpa", "qat_implementation": "none"})


def build(path: Path, device: str = "cpu", **options: Any) -> Any:
    return build_foundation_model(
        str(path), torch_dtype="float32", init_device=device, ops_implementation=OPS, **options
    )


def load(fsdp: Rank, path: Path, *, bf16: bool = False, **sizes: int) -> Subject:
    init_parallel_state(
        dp_size=fsdp.world_size, device_type=fsdp.device.type, **(sizes or {"dp_shard_size": fsdp.world_size})
    )
    model = build_parallelize_model(
        build(path, "meta"), str(path), mixed_precision=MixedPrecisionConfig(enable=bf16), init_device="meta"
    )
    return subject(model, path, rows=12, reference=partial(build, path, weights_path=str(path)))


@pytest.mark.parametrize("name", ARCHITECTURES)
@fsdp_conformance(world_size=2)
def test_build(fsdp, checkpoints, name):
    return load(fsdp, checkpoints[name])


@fsdp_conformance(world_size=3)
def test_uneven(fsdp, checkpoints):
    return load(fsdp, checkpoints["qwen3"])


@fsdp_conformance(world_size=2)
def test_bf16(fsdp, checkpoints):
    return load(fsdp, checkpoints["qwen3"], bf16=True)


@fsdp_conformance(mesh={"dp_replicate": 2, "dp_shard": 2})
def test_hsdp(fsdp, checkpoints):
    return load(fsdp, checkpoints["qwen3"], dp_replicate_size=fsdp.world_size // 2, dp_shard_size=2)


def test_recipe(recipe):
    assert "failed" not in recipe("veomni")
