"""How a process becomes a rank of its world: store, torchrun's environment, process group and mesh."""

from __future__ import annotations

import os
import random
import socket
import tempfile
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from pytest_fsdp_meta import standin
from pytest_fsdp_meta.text import did_you_mean
from pytest_fsdp_meta.worlds.diagnosis import flight_recorder
from pytest_fsdp_meta.worlds.failures import Misuse
from pytest_fsdp_meta.worlds.rank import process_groups, shapes
from pytest_fsdp_meta.worlds.rank.channel import Channel
from pytest_fsdp_meta.worlds.spec import Location, WorldSpec

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

SEED = 20240229
COMPOSITE = {("cuda", "nccl"): "cpu:gloo,cuda:nccl", (standin.NAME, "gloo"): standin.BACKEND}
"""What torch makes of a group without a backend, as under torchrun: collectives of CPU tensors work as well."""


@dataclass
class Rank:
    """What a rank knows of its world: the ``fsdp`` fixture of a loader."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    """With its index: ``cuda:3``; ``meta`` where the world is simulated."""
    state: dict[str, Any] = field(default_factory=dict, repr=False)
    """Anything to keep from one call of the world to the next."""
    _mesh: DeviceMesh | None = field(default=None, repr=False)
    _folder: Path = field(default=Path(), repr=False)
    _library: object = field(default=None, repr=False)
    """Implementations of operators, which torch uses as long as it is referenced."""
    _store: object = field(default=None, repr=False)
    """On rank 0: serves as long as it is referenced, because the loader's own process group meets there."""

    if not TYPE_CHECKING:  # else every name would exist for type checkers

        def __getattr__(self, name: str) -> NoReturn:
            known = [one for one in (*self.__dataclass_fields__, *vars(Rank)) if not one.startswith("_")]
            if name in known:  # its own error
                return object.__getattribute__(self, name)
            hint = did_you_mean(name, known, f"it has {', '.join(known)}")
            raise AttributeError(f"fsdp has no attribute {name!r}{hint}")

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the marker. Raises ValueError if the loader makes the process group itself."""
        if self._mesh is None:
            raise ValueError('fsdp.mesh does not exist with process_group="loader": the loader makes its own mesh')
        return self._mesh

    @property
    def simulated(self) -> bool:
        """Whether the other ranks do not run, and tensors have shapes but no values."""
        return bool(self.device.type == "meta")

    def checkpoint_of_shapes(self, source: str | Path | Module) -> Path:
        """Return a folder with a checkpoint that has the shapes of ``source``, and no values.

        ``source`` is a checkpoint's folder, whose safetensors files may end after their headers, or a model, such as
        one on meta. What a loader reads from it is on meta, and the file takes no room. Where all ranks run, a folder
        is returned as it is. Raises ValueError for another source, and for a model where all ranks run.
        """
        is_folder = isinstance(source, (str, Path))
        if not self.simulated:
            if is_folder:
                return Path(str(source))
            raise Misuse("checkpoint_of_shapes(model) has no values, which ranks that run need; give a checkpoint")
        if not is_folder and not hasattr(source, "state_dict"):
            raise Misuse(f"checkpoint_of_shapes({source!r:.60}): give a checkpoint's folder, or a model")
        folder = Path(tempfile.mkdtemp(prefix="shapes-", dir=self.shapes_folder))
        if is_folder:
            shapes.write_folder(Path(str(source)), folder)
        else:
            shapes.write_model(cast("Module", source), folder)
        return folder

    @property
    def shapes_folder(self) -> Path:
        """The folder with all checkpoints of shapes; it is removed when the world ends."""
        folder = self._folder / "shapes"
        folder.mkdir(exist_ok=True)
        return folder.resolve()

    @property
    def has_mesh(self) -> bool:
        return self._mesh is not None

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        import torch.distributed as dist

        dist.barrier()


def join(channel: Channel, spec: WorldSpec, place: Location, folder: Path) -> Rank:
    """Meet the other ranks. Make the process group and the mesh as well, unless the loader does.

    ``folder``: of this rank on its node; rank 0's holds the file in which the ranks of one node meet.
    """
    import torch.distributed as dist

    _limit_threads()
    device = _select_device(spec, place)
    seed(spec.device_type)
    listener = None
    if place.rank == spec.ranks[0]:
        listener = listen(place.address)
        channel.send("store", place.address, listener.getsockname()[1], _file_to_meet_in(spec, place, folder))
    _, address, port, file = channel.receive()
    os.environ.update(torchrun_environment(place, spec.size, address, port))
    os.environ.setdefault(flight_recorder.SIZE, flight_recorder.ENTRIES)  # read before the first process group
    _select_gloo_interface(place)
    me = Rank(place.rank, place.local_rank, spec.size, device, _folder=folder)
    if listener is not None:
        if file:
            threading.Thread(target=_serve, args=(me, address, port, listener), daemon=True).start()
        else:
            _serve(me, address, port, listener)
    if spec.simulated:
        return _join_alone(me, spec)
    if device.type == "cuda" and spec.backend == "gloo":
        me._library = process_groups.use_host()
    if spec.process_group == "loader":
        process_groups.watch_groups(address, port, place.rank, spec.size)
        return me
    dist.init_process_group(
        COMPOSITE.get((spec.device_type, spec.backend), spec.backend),
        store=dist.FileStore(file, spec.size) if file else me._store or dist.TCPStore(address, port, is_master=False),
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


def _join_alone(me: Rank, spec: WorldSpec) -> Rank:
    """Join a world whose other ranks do not run: collectives return at once, with arbitrary results."""
    import torch
    import torch.distributed as dist

    me.device = torch.device("meta")
    process_groups.make_all_groups_fake(me.rank, spec.size)
    process_groups.put_all_meshes_on_cpu()
    if spec.process_group == "loader":
        return me
    dist.init_process_group(process_groups.FAKE, rank=me.rank, world_size=spec.size)
    me._mesh = dist.device_mesh.init_device_mesh("cpu", tuple(spec.mesh.values()), mesh_dim_names=tuple(spec.mesh))
    return me


def listen(address: str) -> socket.socket:
    """Listen at this address of the machine, and nowhere else: a TCPStore answers whoever reaches it.

    Port 0: the system picks a free one, so two runs on one machine never meet.
    """
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def _file_to_meet_in(spec: WorldSpec, place: Location, folder: Path) -> str:
    """Return the path of a FileStore for the process group, or "" to meet in the TCPStore that rank 0 serves.

    A TCPStore asks the DNS for the name of the address at each end of each connection, and waits for 5 s if the answer
    is lost. Several nodes share no file; a loader finds its store in the environment, as under torchrun; and NCCL's
    watchdog has been run with TCPStore only.
    """
    in_file = spec.process_group == "plugin" and spec.backend == "gloo" and place.group_size == 1
    return str(folder / "store") if in_file else ""


def _serve(me: Rank, address: str, port: int, listener: socket.socket) -> None:
    """Serve a store where the environment says that there is one. Ranks that come earlier wait in the socket's queue.

    On a thread of its own if the ranks meet in a file, because the name of the address may have to be waited for.
    """
    import torch.distributed as dist

    me._store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def seed(device_type: str) -> None:
    """Seed the random number generators; every rank and every test starts from this state."""
    import torch

    random.seed(SEED)
    if device_type == "cpu":
        # torch.manual_seed keeps a traceback for each kind of device that is not there: 2 ms in a new rank.
        torch.default_generator.manual_seed(SEED)
    else:
        torch.manual_seed(SEED)


def _limit_threads() -> None:
    """Use OMP_NUM_THREADS threads, or one as under torchrun: an OpenMP pool does not survive the fork."""
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    os.environ["OMP_NUM_THREADS"] = threads = threads if threads.isdecimal() and int(threads) else "1"
    torch.set_num_threads(int(threads))


def _select_device(spec: WorldSpec, place: Location) -> torch.device:
    import torch

    index = spec.devices[place.rank] if spec.devices else place.local_rank
    if spec.device_type == "cpu":
        return torch.device("cpu")
    if spec.device_type == standin.NAME:
        standin.prepare()  # on other machines than the parent's, it may not have been built yet
        standin.activate(place.local_size)
    else:
        # Before CUDA starts: without it cuBLAS may give other bits for the same product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device(spec.device_type, index)
    torch.get_device_module(device).set_device(device)
    return device


def _select_gloo_interface(place: Location) -> None:
    """Name the network interface for gloo, which otherwise looks the host name up: that can fail or hang.

    On several nodes the cluster's own setting stays. On one node it does not: it is meant for the cluster's network,
    while these ranks meet on 127.0.0.1.
    """
    if place.interface and not (place.group_size > 1 and os.environ.get("GLOO_SOCKET_IFNAME")):
        os.environ["GLOO_SOCKET_IFNAME"] = place.interface


def torchrun_environment(place: Location, size: int, address: str, port: int) -> dict[str, str]:
    """Return what torchrun sets. TORCHELASTIC_USE_AGENT_STORE: a store is served at the port already."""
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
