# A model that lightning's Fabric shards with ModelParallelStrategy.
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from pytest_fsdp_meta import fsdp_conformance
from pytest_fsdp_meta.transformers import subject, tiny_checkpoint


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))  # random weights, which stand for yours


# Shard also where the mesh has a size of 1, so that a checkpoint can be loaded in a smaller world.
# For tensor parallelism, call parallelize_module with mesh["tensor_parallel"], give the strategy data_parallel_size=2,
# tensor_parallel_size=2, and the marker the mesh to expect: @fsdp_conformance(mesh={"dp": 2, "tp": 2}).
def parallelize(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


@fsdp_conformance(world_size=2)
def test_fabric(fsdp, path):
    # Both sizes are needed: by default, data_parallel_size is the number of nodes, so nothing is sharded on one node.
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=fsdp.world_size, tensor_parallel_size=1)
    fabric = Fabric(accelerator=fsdp.device.type, strategy=strategy, devices=fsdp.world_size)
    fabric.launch()
    model = fabric.setup_module(AutoModelForCausalLM.from_pretrained(path))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-4))
    # The model and the optimizer inside of Fabric's wrappers are judged.
    # from_pretrained builds the whole model on every rank; in fabric.init_module(empty_init=True), leave out
    # whole_while_loading.
    # Fabric's own training step and checkpoints: results/frameworks/lightning.md.
    return subject(model, path, optimizer=optimizer, whole_while_loading=True)
