"""Reduce a tensor and take a step of FSDP2 with torch alone: if this fails, later failures are not the plugin's."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

DEVICE = "cpu" if "GPU_DRY_RUN" in os.environ else "cuda"


def main() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if DEVICE == "cuda":
        print(torch.cuda.get_device_name(0), "NCCL", torch.cuda.nccl.version())
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    else:
        dist.init_process_group("gloo", rank=0, world_size=1)
    x = torch.ones(1, device=DEVICE)
    dist.all_reduce(x)
    print("all_reduce:", x.item())
    model = torch.nn.Linear(4, 4).to(DEVICE)
    fully_shard(model)
    model(x.expand(2, 4)).sum().backward()
    assert model.weight.grad is not None
    print("FSDP2, sum of a gradient:", model.weight.grad.full_tensor().sum().item())  # type: ignore[attr-defined]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
