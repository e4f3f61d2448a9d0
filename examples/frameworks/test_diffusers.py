# A transformer of diffusers that Accelerator.prepare shards with FSDP2, as its training scripts do.
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from diffusers import FluxTransformer2DModel

from pytest_fsdp_meta import Subject, fsdp_conformance

SIZES = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
SIZES |= {"in_channels": 4, "joint_attention_dim": 24, "pooled_projection_dim": 20, "axes_dims_rope": (4, 4, 8)}


# Stands for FluxTransformer2DModel.from_pretrained(path), which builds the whole model on every rank, too.
def build():
    torch.manual_seed(0)
    return FluxTransformer2DModel(**SIZES)


@fsdp_conformance(world_size=2)
def test_flux(fsdp):
    cpu = fsdp.device.type == "cpu"
    if cpu:  # otherwise accelerate uses DDP on CPUs, and the test passes without having seen FSDP
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    sharding = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    model = build()
    model, optimizer = Accelerator(cpu=cpu, fsdp_plugin=sharding).prepare(model, torch.optim.AdamW(model.parameters()))
    # batch and loss let the training be judged: results/frameworks/diffusers.md has those for Flux.
    # Checkpoints, accumulation and clipping: see test_accelerate.py.
    return Subject(model, reference=build, optimizer=optimizer, whole_while_loading=True)
