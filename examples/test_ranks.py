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


def share(total):  # what ranks run may be any function, closures and lambdas too
    return torch.arange(total).chunk(dist.get_world_size())[dist.get_rank()].tolist()


@pytest.mark.fsdp_world(world_size=2)
@given(total=st.integers(2, 100))  # drawn once, for all ranks
def test_shares_make_the_whole(fsdp_world, total):
    shares = fsdp_world.run(share, total)  # this body runs in the pytest process
    assert shares[0] + shares[1] == list(range(total))
