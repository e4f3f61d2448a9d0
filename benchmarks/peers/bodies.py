"""What every peer runs on its ranks: the same test bodies, and the same faults. The environment tells which."""

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
"""Seconds after which a hang may be told, for peers that can be told so."""
MARKS = Path(os.environ.get("BENCH_MARKS", "/nonexistent"))
GUILTY = 1


def run(number: int) -> None:
    """The body of one test, on one rank of a process group. Of faults, the first test has one and the others none."""
    (all_reduce if number and BODY in FAULTS else BODIES[BODY])()


def join(rank: int, store: dist.Store | None = None, address: str | None = None) -> None:
    """For peers that leave the process group to the test."""
    dist.init_process_group(
        "gloo", init_method=address, store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=LIMIT)
    )


def all_reduce() -> None:
    tensor = torch.full((16,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    assert tensor[0] == sum(range(WORLD))


def sharded() -> None:
    """Two layers, each a group of FSDP2's, forward and backward."""
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(4, 16)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def hold() -> None:
    """For the memory of a world: every rank has trained and is still there."""
    sharded()
    mark("held")
    time.sleep(3)


def mark(name: str) -> None:
    (MARKS / f"{name}.{dist.get_rank()}").write_text(str(time.time()))


def at_fault() -> None:
    """On one rank; the others wait for it in a collective, and if they come out of it, it was another test's."""
    dist.barrier()
    if dist.get_rank() == GUILTY:
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
    "orphan": lambda: time.sleep(1000),  # while it sleeps, its pytest is killed from outside
}
BODIES = {"all_reduce": all_reduce, "sharded": sharded, "hold": hold} | dict.fromkeys(FAULTS, at_fault)

if __name__ == "__main__":
    import sys

    join(int(os.environ["RANK"]), address="env://")  # under torchrun
    run(int(sys.argv[1]))
    dist.destroy_process_group()
