"""The specification of a world: mesh, device, backend, time limit. Plain data, checked before any process starts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from numbers import Integral

from pytest_fsdp_meta import standin

DEFAULT_MESH_DIM = "dp_shard"
MOST_RANKS = 1024
"""The largest world: each rank is a process of some 50 MB, and a mistyped size should not take machines down."""
NODE = 8
"""Ranks of a node, where nodes are simulated."""
ENDS = 3
"""Up to how many dimensions of a mesh all combinations of their ends are simulated."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
SCOPES = ("function", "module", "session")
"""How long a world may live, in pytest's terms."""


@dataclass(frozen=True)
class Sources:
    """What a rank needs to import the modules of the parent process: the search path, and the files of loose modules.

    In pytest's ``importlib`` mode a test module cannot be found by its name, so ranks need its file.
    """

    path: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, tuple[str, ...]] | None = None
    """A function as "module:name" and its arguments; ranks call it before they import any of the parent's modules."""


@dataclass(frozen=True)
class WorldSpec:
    """One world. ``mesh`` maps dimension names to sizes, in order; their product is the size of the world.

    ``timeout`` is the limit in seconds for each call, and for the start if that limit is higher than a minute.
    ``process_group`` is "plugin", or "loader" if the called code runs ``init_process_group`` itself; torchrun's
    environment is set in both cases.
    """

    mesh: Mapping[str, int]
    device_type: str = "cpu"
    backend: str = "gloo"
    timeout: float = 300.0
    process_group: str = "plugin"
    devices: tuple[int, ...] = ()
    """Device indices by local rank; empty: the local rank itself."""
    visible: tuple[str, ...] = ()
    """The only GPUs that the ranks see, by device index, as CUDA_VISIBLE_DEVICES names them; empty: all."""
    simulated: tuple[int, ...] = ()
    """The only ranks that run, each alone under torch's fake process group and on meta; empty: all ranks run."""
    device_memory: int = 0
    """Bytes of the device that each simulated rank would have; 0: unknown."""
    memory_reserve: float = 0.0
    """The share of it that is not for tensors: the device's context, buffers of NCCL, fragmentation."""

    @property
    def size(self) -> int:
        return prod(self.mesh.values())

    @property
    def on_gpus(self) -> bool:
        """Whether its ranks need GPUs, which worlds share; the stand-in device is memory of the host."""
        return self.device_type not in ("cpu", standin.NAME)

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables of its ranks that the parent does not have.

        Loaders select the GPU of their local rank, which would be another worker's if all were visible. Simulated
        ranks see none, so that a loader that asks for one is refused on every machine.
        """
        return {VISIBLE: ",".join(self.visible)} if self.visible or self.simulated else {}

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that have a process."""
        return self.simulated or range(self.size)


@dataclass(frozen=True)
class Location:
    """The position of a rank, numbered as torchrun does: nodes in the order of their ranks, then ranks of a node."""

    rank: int
    local_rank: int
    local_size: int
    group_rank: int = 0
    """The number of its node."""
    group_size: int = 1
    """The number of nodes."""
    address: str = "127.0.0.1"
    """The address at which the other ranks reach it."""
    interface: str = "lo" if sys.platform == "linux" else ""
    """The network interface that has this address; empty if unknown."""


def place_of(rank: int, spec: WorldSpec) -> Location:
    """Return the position of a rank of this machine; simulated ranks are spread over nodes of ``NODE``."""
    if not spec.simulated:
        return Location(rank, local_rank=rank, local_size=spec.size)
    nodes = -(-spec.size // NODE)
    return Location(rank, rank % NODE, min(NODE, spec.size), group_rank=rank // NODE, group_size=nodes)


def choose(
    size: int, device: str, backend: str, gpus: int, require_gpu: bool = False, here: str = "this machine"
) -> tuple[str, str]:
    """Return (device type, backend) for a world of ``size`` ranks on a machine, called ``here``, with ``gpus`` GPUs.

    Raises ValueError if the machine cannot do what the options ask for; never falls back to something else silently.
    """
    if size > MOST_RANKS:
        raise ValueError(f"a world of {size} is too large; use at most {MOST_RANKS} ranks")
    if backend == "nccl" and device == "cpu":
        raise ValueError("--fsdp-backend=nccl runs on cuda only; use --fsdp-backend=gloo with --fsdp-device=cpu")
    if device == "cuda" and not gpus:
        raise ValueError(f"--fsdp-device=cuda: {here} has no GPU that torch can use; use cpu or auto")
    if backend == "nccl" and not gpus and device != standin.NAME:
        raise ValueError(f"--fsdp-backend=nccl: {here} has no GPU that torch can use; use gloo or auto")
    if device == standin.NAME:
        if backend == "nccl" or require_gpu:
            option = "--fsdp-backend=nccl" if backend == "nccl" else "--fsdp-require-gpu"
            raise ValueError(f"{option}: --fsdp-device={device} needs no GPU, and uses gloo; leave one of them out")
        return device, "gloo"
    shares = backend == "gloo" and device == "cuda"
    if (device == "cuda" or backend == "nccl") and not shares and size > gpus:
        raise ValueError(
            f"a world of {size} on cuda with nccl needs {size} GPUs, {here} has {gpus}; use a smaller world, "
            "or --fsdp-device=cuda --fsdp-backend=gloo, which lets ranks share a GPU"
        )
    on_gpu = device == "cuda" or backend == "nccl" or (device == "auto" and backend == "auto" and 0 < size <= gpus)
    if require_gpu and not on_gpu:
        raise ValueError(f"--fsdp-require-gpu: a world of {size} would run on the CPU, {here} has {gpus} GPUs")
    if not on_gpu:
        return "cpu", "gloo"
    return "cuda", "nccl" if backend == "auto" else backend


def choose_simulated(mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Return ranks that stand for all others: both ends of each dimension, in all combinations.

    With more than ``ENDS`` dimensions: the first rank, the last one, and each dimension's last with the others' first.
    """
    sizes = [size for size in mesh.values() if size > 1]
    strides = [prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    ends = [(size - 1) * stride for size, stride in zip(sizes, strides, strict=True)]
    if len(sizes) > ENDS:
        return tuple(sorted({0, *ends, sum(ends)}))
    ranks = [0]
    for end in ends:
        ranks += [rank + end for rank in ranks]
    return tuple(sorted(ranks))


def resolve_mesh(mesh: Mapping[str, int], world_size: int | None) -> dict[str, int]:
    """Return the mesh with its one ``-1`` filled in.

    Raises ValueError, with one line that says what is wrong and what would be right, if a size is not a positive int
    or their product is not ``world_size``.
    """
    if not mesh:
        raise ValueError("mesh has no dimensions; write for example mesh={'dp_shard': 2}")
    for name, size in mesh.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"mesh dimension {name!r} is not a name; use one such as 'dp_shard' or 'tp'")
        if isinstance(size, bool) or not isinstance(size, Integral) or (size < 1 and size != -1):
            raise ValueError(f"mesh size {name}={size!r} should be a positive int, or -1 for the remaining ranks")
    mesh = {name: int(size) for name, size in mesh.items()}
    free = [name for name, size in mesh.items() if size == -1]
    known = prod(size for size in mesh.values() if size != -1)
    shown = " x ".join(f"{name}={size}" for name, size in mesh.items())
    if len(free) > 1:
        raise ValueError(f"mesh {shown} leaves {len(free)} sizes open; only one may be -1")
    if free:
        if world_size is None:
            raise ValueError(f"mesh {shown} leaves {free[0]} open; set world_size as well, to compute it from")
        if world_size % known:
            raise ValueError(f"mesh {shown} does not fit a world of {world_size}, which is not a multiple of {known}")
        return {name: world_size // known if size == -1 else size for name, size in mesh.items()}
    if world_size is not None and known != world_size:
        raise ValueError(f"mesh {shown} has {known} ranks, but the world size is {world_size}")
    return mesh
