# A model whose input's points are divided over ranks by physicsnemo's ShardTensor, with its weights sharded by FSDP2.
import torch
from physicsnemo.domain_parallel import ShardTensor, register_custom_ops
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module

from pytest_fsdp_meta import Subject, fsdp_conformance


def build():  # stands for your model
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(6, 16, 3, padding=1), nn.GELU(), nn.Conv1d(16, 6, 3, padding=1))


@fsdp_conformance(mesh={"dp": 2, "cp": 2})
def test_domain_parallel(fsdp):
    register_custom_ops()  # physicsnemo does it by itself with CUDA only, and convolutions are wrong without it
    model = fully_shard(distribute_module(build().to(fsdp.device), fsdp.mesh["cp"]), mesh=fsdp.mesh["dp"])

    def divide(model, args):
        own = args[0].chunk(fsdp.mesh["cp"].size(), 2)[fsdp.mesh.get_local_rank("cp")]
        return ShardTensor.from_local(own, fsdp.mesh["cp"], [Shard(2)], "chunk", args[0].shape)

    model.register_forward_pre_hook(divide)
    model.register_forward_hook(lambda model, args, output: output.full_tensor())
    # Of 9 points, one rank has 5 and the other 4. The mesh dimension is named "cp" (or "context", "sp"): its ranks have
    # the same rows. For other names, declare data_parallel.
    batch = lambda step: {"points": torch.randn(8, 6, 9, generator=torch.Generator().manual_seed(step))}  # noqa: E731
    loss = lambda model, batch: model(batch["points"]).square().mean()  # noqa: E731
    return Subject(model, reference=build, batch=batch, loss=loss)
