"""torch.multiprocessing.spawn in each test, as in tutorials."""

import bodies
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank: int, number: int, address: str) -> None:
    bodies.join(rank, address=address)
    bodies.run(number)
    dist.destroy_process_group()


@pytest.mark.parametrize("number", range(bodies.TESTS))
def test_body(number, tmp_path):
    mp.spawn(work, (number, f"file://{tmp_path}/store"), nprocs=bodies.WORLD)
