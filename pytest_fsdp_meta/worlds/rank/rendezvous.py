"""How a process becomes a rank of its world."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pytest_fsdp_meta.worlds.diagnosis import flight_recorder
from pytest_fsdp_meta.worlds.rank.channel import Channel
from pytest_fsdp_meta.worlds.spec import Place, WorldSpec

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

SEED = 20240229


@dataclass
class Rank:
    """What a rank knows of its world: the ``fsdp`` fixture of a loader."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    """With its index: ``cuda:3``."""
    state: dict[str, Any] = field(default_factory=dict, repr=False)
    """Kept between the calls of one world."""
    _mesh: DeviceMesh | None = field(default=None, repr=False)
    _store: object = field(default=None, repr=False)
    """Served on rank 0 for as long as it is held; the loader's own process group meets there."""

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the marker. Raises ValueError where the loader makes the process group itself."""
        if self._mesh is None:
            raise ValueError('fsdp.mesh does not exist with process_group="loader": the loader makes its own mesh')
        return self._mesh

    @property
    def has_mesh(self) -> bool:
        return self._mesh is not None

    def barrier(self) -> None:
        """Waits until every rank is here."""
        import torch.distributed as dist

        dist.barrier()


def join(channel: Channel, spec: WorldSpec, place: Place) -> Rank:
    """Meets the other ranks, and makes the process group and the mesh where the world has those of the plugin."""
    import torch
    import torch.distributed as dist

    # An OpenMP pool does not survive the fork; torchrun gives each rank one thread too.
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    os.environ["OMP_NUM_THREADS"] = threads = threads if threads.isdecimal() and int(threads) else "1"
    torch.set_num_threads(int(threads))
    seed(spec.device_type)
    index = spec.devices[place.rank] if spec.devices else place.local_rank
    device = torch.device(spec.device_type, index) if spec.device_type != "cpu" else torch.device("cpu")
    if device.type == "cuda":
        # Before CUDA starts: without it cuBLAS may give other bits for the same product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device)
    store = None
    if place.rank == 0:
        # Port 0: the system picks a free one, so two runs on one machine never meet.
        store = dist.TCPStore(place.address, 0, is_master=True, wait_for_workers=False)
        channel.send("store", place.address, store.port)
    _, address, port = channel.receive()
    os.environ.update(torchrun_environment(place, spec.size, address, port))
    flight_recorder.switch_on()
    if place.interface and not (place.group_size > 1 and os.environ.get("GLOO_SOCKET_IFNAME")):
        # Without it gloo looks the host name up, which fails or hangs on machines that cannot resolve their own; and
        # what a cluster sets is for its network, while the ranks of one machine meet on 127.0.0.1.
        os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    if spec.process_group == "loader":
        number(address, port)
    me = Rank(place.rank, place.local_rank, spec.size, device, _store=store)
    if spec.process_group == "plugin":
        from datetime import timedelta

        dist.init_process_group(
            spec.backend,
            store=store or dist.TCPStore(address, port, is_master=False),
            rank=place.rank,
            world_size=spec.size,
            # Later than the parent's own deadline: the parent shows the stacks of all ranks, torch only an error.
            timeout=timedelta(seconds=2 * spec.timeout + 60),
            device_id=device if spec.backend == "nccl" else None,
        )
        me._mesh = dist.device_mesh.init_device_mesh(
            device.type, tuple(spec.mesh.values()), mesh_dim_names=tuple(spec.mesh)
        )
    return me


def seed(device_type: str) -> None:
    """The state of random numbers that every rank and every test begins with."""
    import torch

    random.seed(SEED)
    if device_type == "cpu":
        # torch.manual_seed keeps a traceback for each kind of device that is not there: 2 ms in a new rank.
        torch.default_generator.manual_seed(SEED)
    else:
        torch.manual_seed(SEED)


def torchrun_environment(place: Place, size: int, address: str, port: int) -> dict[str, str]:
    """What torchrun sets. The store behind the port is already served, so nothing has to bind it."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "GROUP_RANK": str(place.group_rank),
        "ROLE_RANK": str(place.rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_WORLD_SIZE": str(place.group_size),
        "ROLE_WORLD_SIZE": str(size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


SCHEMES = ("env", "tcp")


def number(address: str, port: int) -> None:
    """From now on the second group that is made by way of this store does not see what the first has left there."""
    # By its name: torch.distributed.rendezvous is the function of this name, which hides the module.
    handlers = getattr(import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    met = count()

    def numbered(handler: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def meet(url: str, *given: Any, **named: Any) -> Iterator[Any]:
            import torch.distributed as dist

            ours = _place(url) == (address, port)
            for store, rank, size in handler(url, *given, **named):
                before = next(met) if ours else 0
                yield (dist.PrefixStore(f"again{before}", store) if before else store), rank, size

        return meet

    for scheme in SCHEMES:
        if scheme in handlers:
            handlers[scheme] = numbered(handlers[scheme])


def _place(url: str) -> tuple[str, int]:
    """(address, port) that a URL stands for."""
    parts = urlsplit(url)
    if parts.scheme == "env":
        return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    return parts.hostname or "", parts.port or 0
