"""One pytest per rank: under ``torchrun -m pytest``, or as xdist workers that each run all tests."""

import os

import bodies
import pytest
import torch.distributed as dist


@pytest.fixture(scope="session", autouse=True)
def group():
    if "PYTEST_XDIST_WORKER" in os.environ:
        bodies.join(int(os.environ["PYTEST_XDIST_WORKER"][2:]), address=f"file://{bodies.MARKS}/store")
    else:
        bodies.join(int(os.environ["RANK"]), address="env://")
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("number", range(bodies.TESTS))
def test_body(number):
    bodies.run(number)
