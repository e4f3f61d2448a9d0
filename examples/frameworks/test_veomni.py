# A model that build_parallelize_model of VeOmni shards and loads, built as its trainer does.
# veomni 0.1.12 was generated for transformers 5.9.0, which it does not name: install transformers==5.9.0 with it.
from dataclasses import fields
from functools import partial

import pytest
from veomni.arguments.arguments_types import MixedPrecisionConfig, OpsImplementationConfig
from veomni.distributed.parallel_state import init_parallel_state
from veomni.distributed.torch_parallelize import build_parallelize_model
from veomni.models import build_foundation_model

from pytest_fsdp_meta import fsdp_conformance
from pytest_fsdp_meta.transformers import subject, tiny_checkpoint

# The kernels that need no GPU. The defaults are FlashAttention, Liger and Triton.
EAGER = {field.name: "eager" for field in fields(OpsImplementationConfig) if field.name.endswith("_implementation")}
OPS = OpsImplementationConfig(**{**EAGER, "attn_implementation": "sdpa", "qat_implementation": "none"})
# Without this, parameters are gathered in bfloat16.
FLOAT32 = {"mixed_precision": MixedPrecisionConfig(enable=False)}


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return str(tiny_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3")))  # random weights, which stand for yours


def build(path, weights=None, device="cpu"):
    return build_foundation_model(path, weights, "float32", init_device=device, ops_implementation=OPS)


@fsdp_conformance(world_size=2)
def test_build(fsdp, path):
    # Decides the mesh. For replicas of shards, give it dp_replicate_size and dp_shard_size, and the marker the same:
    # @fsdp_conformance(mesh={"dp_replicate": 2, "dp_shard": 2}).
    init_parallel_state(dp_size=fsdp.world_size, dp_shard_size=fsdp.world_size, device_type=fsdp.device.type)
    model = build_parallelize_model(build(path, device="meta"), path, init_device="meta", **FLOAT32)
    # VeOmni replaces the forward of the models that it knows, so the reference is built by it as well, on the CPU.
    # It builds no model on meta for one rank, so dcp_reshards is skipped on two or three ranks.
    return subject(model, path, reference=partial(build, path, path))
