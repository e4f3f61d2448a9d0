"""What a world shall be: size, mesh, device, backend. Plain data, checked before a process is started."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from numbers import Integral

DEFAULT_MESH_DIM = "dp_shard"
SCOPES = ("function", "module", "session")
"""For how long a world may be kept."""


@dataclass(frozen=True)
class Sources:
    """What lets a rank import what the parent process has imported: search path, and files of loose modules.

    Under pytest's ``importlib`` mode a test module cannot be found by its name, so ranks need its file.
    """

    path: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, tuple[str, ...]] | None = None
    """A function, as "module:name", and its arguments: called before anything of the parent's is imported."""


@dataclass(frozen=True)
class WorldSpec:
    """One world. ``mesh`` maps dimension names to sizes, in order; their product is the size of the world.

    ``timeout`` is in seconds and holds for every call, and for the start where it is longer than what that gets anyway.
    ``process_group`` is "plugin", or "loader" when the called code runs ``init_process_group`` itself; torchrun's
    environment is there in both cases.
    """

    mesh: Mapping[str, int]
    device_type: str = "cpu"
    backend: str = "gloo"
    timeout: float = 300.0
    process_group: str = "plugin"
    devices: tuple[int, ...] = ()
    """Device indices by local rank; empty: the local rank itself."""

    @property
    def size(self) -> int:
        return prod(self.mesh.values())


@dataclass(frozen=True)
class Place:
    """Where a rank is, as torchrun numbers it: nodes in the order of their ranks, and the ranks of each node."""

    rank: int
    local_rank: int
    local_size: int
    group_rank: int = 0
    """The number of its node."""
    group_size: int = 1
    address: str = "127.0.0.1"
    """By which the other ranks reach it."""
    interface: str = "lo" if sys.platform == "linux" else ""
    """The network interface that has this address, where it is known."""


def resolve_mesh(mesh: Mapping[str, int], world_size: int | None) -> dict[str, int]:
    """The mesh with its one ``-1`` filled in.

    Raises ValueError, with one line that says what is wrong and what would be right, when the sizes are no sizes or
    do not multiply out to ``world_size``.
    """
    if not mesh:
        raise ValueError("mesh names no dimension; write for example mesh={'dp_shard': 2}")
    for name, size in mesh.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"mesh dimension {name!r} is not a name; use one such as 'dp_shard' or 'tp'")
        if isinstance(size, bool) or not isinstance(size, Integral) or (size < 1 and size != -1):
            raise ValueError(f"mesh size {name}={size!r} should be a positive int, or -1 for what is left over")
    mesh = {name: int(size) for name, size in mesh.items()}
    free = [name for name, size in mesh.items() if size == -1]
    known = prod(size for size in mesh.values() if size != -1)
    shown = " x ".join(f"{name}={size}" for name, size in mesh.items())
    if len(free) > 1:
        raise ValueError(f"mesh {shown} leaves {len(free)} sizes open; only one may be -1")
    if free:
        if world_size is None:
            raise ValueError(f"mesh {shown} leaves {free[0]} open, so it needs a world_size to be worked out from")
        if world_size % known:
            raise ValueError(f"mesh {shown} does not divide a world of {world_size}: {world_size} / {known} is no int")
        return {name: world_size // known if size == -1 else size for name, size in mesh.items()}
    if world_size is not None and known != world_size:
        raise ValueError(f"mesh {shown} multiplies out to {known}, but the world size is {world_size}")
    return mesh
