"""Functions that the benchmarks run on every rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fixtures.conforming import load_conforming, own_rows, subject
from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.checks.training.observe.steps import train
from pytest_fsdp_meta.checks.values.observe import observe_values
from pytest_fsdp_meta.ranks.inventory import take_inventory
from pytest_fsdp_meta.ranks.optimizers import make_optimizer
from pytest_fsdp_meta.transformers import reference_model
from pytest_fsdp_meta.worlds import Rank, current


def load_shards(fsdp: Rank, path: Path) -> Subject:
    """Load every tensor of the checkpoint as a parameter sharded on dim 0; each rank reads only its own rows."""
    model = nn.Module()
    with safe_open(path / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  the handle is not iterable
            shape, (size, rank) = tuple(file.get_slice(name).get_shape()), (fsdp.world_size, fsdp.rank)
            rows = -(-shape[0] // size)
            local = file.get_slice(name)[rank * rows : (rank + 1) * rows].clone()
            whole = DTensor.from_local(local, fsdp.mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
            model.register_parameter(name, nn.Parameter(whole))
    return Subject(model, reference=path)


def load_and_train(path: Path, steps: int) -> None:
    """Load and train, which is all that a loss-parity test needs on every rank."""
    me = current()
    loaded = load_conforming(me, path)
    train(loaded, me.device, range(steps), (me.rank, me.world_size), make_optimizer(loaded))


def train_reference(path: Path, steps: int, builds: int) -> None:
    for _ in range(builds):
        model = reference_model(path)
    alone = subject(model, path)
    train(alone, current().device, range(steps), (0, 1), make_optimizer(alone))


def verify(path: str, repeats: int) -> dict[str, Any]:
    """Measure the seconds of ``torch.equal`` on this rank's shards, of verifying them and of the inventory."""
    model = current().state["subject"].model
    shards = [own_rows(parameter)[0] for parameter in model.parameters()]

    def inventory() -> Any:
        return take_inventory(model, current().rank, "cpu")

    compared = observe_values(path)
    assert [comparison.equal for comparison in compared] == [True] * len(shards)
    return {
        "bytes": sum(shard.nbytes for shard in shards),
        "largest": max(shard.nbytes for shard in shards),
        **time_each(shards, {"verify": lambda: observe_values(path), "inventory": inventory}, repeats),
        "extra": {"verify": peak_memory(lambda: observe_values(path)), "inventory": peak_memory(inventory)},
    }


def time_each(shards: list[Tensor], work: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    copies = [shard.clone() for shard in shards]
    work = {"equal": lambda: [torch.equal(a, b) for a, b in zip(shards, copies, strict=True)], **work}
    return {name: [seconds(act) for _ in range(repeats)] for name, act in work.items()}


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak_memory(work: Callable[[], Any]) -> int:
    """Return the peak of additional anonymous memory in bytes, since the kernel can drop pages of mapped files."""
    before, over, peak = anonymous_memory(), threading.Event(), [0]

    def watch() -> None:
        while not over.wait(0.001):
            peak[0] = max(peak[0], anonymous_memory() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    over.set()
    watcher.join()
    return peak[0]


def anonymous_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
