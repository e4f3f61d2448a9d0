"""mpi-pytest: pytest inside mpiexec, or else an mpiexec for each test."""

import bodies
import pytest
import torch.distributed as dist
from mpi4py import MPI


def join_once() -> None:
    """Join here, not in a fixture: the pytest that starts mpiexec evaluates fixtures too."""
    if not dist.is_initialized():
        comm = MPI.COMM_WORLD
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
        port = comm.bcast(store.port if store else None)
        bodies.join(comm.rank, store or dist.TCPStore("127.0.0.1", port, is_master=False))


@pytest.mark.parallel(bodies.WORLD)
@pytest.mark.parametrize("number", range(bodies.TESTS))
def test_body(number):
    join_once()
    bodies.run(number)
