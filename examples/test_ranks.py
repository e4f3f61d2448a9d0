# test_ranks.py
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pytest_fsdp_meta import fsdp_spmd


@fsdp_spmd(world_size=4)  # the whole body runs on every rank
def test_all_reduce(fsdp):
    total = torch.ones(2, device=fsdp.device)
    dist.all_reduce(total)
    assert total.tolist() == [4, 4]


def rank_chunk(total):  # ranks can run any function, including closures and lambdas
    return torch.arange(total).chunk(dist.get_world_size())[dist.get_rank()].tolist()


@pytest.mark.fsdp_world(world_size=2)
@given(total=st.integers(2, 100))  # each example is the same on all ranks
def test_chunks_cover_the_range(fsdp_world, total):  # the body runs in the pytest process
    chunks = fsdp_world.run(rank_chunk, total)
    assert chunks[0] + chunks[1] == list(range(total))
