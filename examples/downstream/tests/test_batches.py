"""What is no loader: the whole body runs on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from pytest_fsdp_meta import fsdp_spmd

from shardload import rows_of


@fsdp_spmd(world_size=3)
def test_the_rows_of_all_ranks_are_the_batch(fsdp):
    seen = torch.zeros(16, dtype=torch.int64, device=fsdp.device)
    seen[list(rows_of(fsdp.rank, fsdp.world_size, rows=16))] += 1
    dist.all_reduce(seen)
    assert seen.tolist() == [1] * 16
