"""The test bodies and faults that every tool runs on its ranks; environment variables select one."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

TESTS = int(os.environ.get("BENCH_TESTS", "20"))
WORLD = int(os.environ.get("BENCH_WORLD", "2"))
BODY = os.environ.get("BENCH_BODY", "all_reduce")
LIMIT = float(os.environ.get("BENCH_LIMIT", "300"))
"""Time limit in seconds for a hang, for tools that have one."""
MARKS = Path(os.environ.get("BENCH_MARKS", "/nonexistent"))
FAULTY = 1
"""The rank that has the fault."""


def run(number: int) -> None:
    """Run the body of one test on one rank. Only the first test has a fault."""
    (all_reduce if number and BODY in FAULTS else BODIES[BODY])()


def join(rank: int, store: dist.Store | None = None, address: str | None = None) -> None:
    """Initialise the process group, for tools that leave that to the test."""
    dist.init_process_group(
        "gloo", init_method=address, store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=LIMIT)
    )


def all_reduce() -> None:
    tensor = torch.full((16,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    assert tensor[0] == sum(range(WORLD))


def sharded() -> None:
    """Run forward and backward of two layers, each an FSDP2 group."""
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(4, 16)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def hold() -> None:
    """Train and then wait on every rank, so that the memory of the world can be measured."""
    sharded()
    mark("held")
    time.sleep(3)


def mark(name: str) -> None:
    (MARKS / f"{name}.{dist.get_rank()}").write_text(str(time.time()))


def inject_fault() -> None:
    """Inject the fault on one rank. If another rank leaves the collective, it was paired with another test's."""
    dist.barrier()
    if dist.get_rank() == FAULTY:
        mark("fault")
        FAULTS[BODY]()
    dist.all_reduce(torch.ones(1))
    mark("out")


def boom() -> None:
    raise RuntimeError("boom")


FAULTS = {
    "raise": boom,
    "exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "deadlock": lambda: time.sleep(1000),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "pytest-timeout": lambda: time.sleep(1000),  # until pytest-timeout ends the test
    "orphan": lambda: time.sleep(1000),  # while it sleeps, its pytest is killed from outside
}
BODIES = {"all_reduce": all_reduce, "sharded": sharded, "hold": hold} | dict.fromkeys(FAULTS, inject_fault)

if __name__ == "__main__":
    import sys

    join(int(os.environ["RANK"]), address="env://")  # under torchrun
    run(int(sys.argv[1]))
    dist.destroy_process_group()
