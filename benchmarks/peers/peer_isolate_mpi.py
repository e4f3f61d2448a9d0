"""pytest-isolate-mpi: an mpiexec for each test, with a pytest on each rank."""

import bodies
import pytest
import torch.distributed as dist


@pytest.mark.mpi(ranks=bodies.WORLD, timeout=bodies.LIMIT)
@pytest.mark.parametrize("number", range(bodies.TESTS))
def test_body(mpi_ranks, comm, number):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
    port = comm.bcast(store.port if store else None)
    bodies.join(comm.rank, store or dist.TCPStore("127.0.0.1", port, is_master=False))
    bodies.run(number)
    dist.destroy_process_group()
