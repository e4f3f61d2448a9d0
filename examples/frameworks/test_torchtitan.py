# A model that one of torchtitan's functions parallelize_... shards, built and initialised as its trainer does.
from functools import partial
from types import SimpleNamespace

import torch
import torchtitan.distributed.parallel_dims
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import llama3_configs, parallelize_llama

from pytest_fsdp_meta import Subject, fsdp_conformance

# "spmd_types", the default of torchtitan 0.3.0, needs a nightly build of torch.
PARALLELISM = ParallelismConfig(spmd_backend="partial_dtensor")


def build(parallelize=lambda model: model, device="cpu"):
    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.update_from_config(config=SimpleNamespace(parallelism=PARALLELISM))
    with torch.device("meta"):
        model = config.build()
    model = parallelize(model).to_empty(device=device)
    model.init_weights(buffer_device=None)
    return model


@fsdp_conformance(world_size=2)
def test_parallelize(fsdp):
    torchtitan.distributed.parallel_dims.device_type = fsdp.device.type  # for CPUs only
    settings = {"training": TrainingConfig(), "compile_config": CompileConfig(), "ac_config": None, "dump_folder": ""}
    settings |= {"parallelism": PARALLELISM, "parallel_dims": ParallelDims.from_config(PARALLELISM, fsdp.world_size)}
    # drawn: torchtitan initialises every weight, and ranks draw other numbers than one device. Weights have to be
    # written, finite, equal on replicas and of one draw. To have values compared, load a checkpoint that the reference
    # has saved.
    # batch, loss and optimizer let the training be judged. The loss is a sum divided by the tokens of all ranks:
    # loss_over_ranks="sum". The optimizer is torchtitan's container, whose state_dict() belongs into save and resume.
    # state_dict=lambda model: model.state_dict(), because a hook saves the fused wqkv as three tensors, and torch's
    # get_model_state_dict refuses such a model.
    # Tensor parallelism and replicas are declared by the marker: @fsdp_conformance(mesh={"dp_shard": 2, "tp": 2}).
    return Subject(build(partial(parallelize_llama, **settings), fsdp.device), reference=build, drawn="*")
