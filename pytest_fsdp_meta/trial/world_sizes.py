"""Choose the world of another size in which a checkpoint is loaded, and find the size of a trial's largest world."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from pytest_fsdp_meta.evidence import Unavailable, shards_data
from pytest_fsdp_meta.worlds import WorldSpec


def largest_world_size(spec: WorldSpec, wanted: Collection[str]) -> int:
    """Return how many ranks the largest world of a trial runs; its worlds run one after the other."""
    if spec.simulated:
        return len(spec.ranks)
    other = other_size(spec) if "resharded" in wanted else spec
    return spec.size if isinstance(other, Unavailable) else max(spec.size, other.size)


def other_size(spec: WorldSpec) -> WorldSpec | Unavailable:
    """Return the spec of a world with half the ranks along one mesh dimension.

    The dimension is the largest one that shards data, or the largest of all where none does. A world of one rank
    gets two ranks instead.
    """
    sharding = {dim: size for dim, size in spec.mesh.items() if shards_data(dim)}
    halved = next((_largest_dim(dims) for dims in (sharding, spec.mesh) if max(dims.values(), default=0) > 1), None)
    if halved is not None:
        mesh = {**spec.mesh, halved: spec.mesh[halved] // 2}
    elif spec.backend == "nccl":
        return Unavailable("a world of 2 needs another GPU than this world of 1 has")
    else:
        mesh = {**spec.mesh, next(iter(sharding or spec.mesh)): 2}
    other = replace(spec, mesh=mesh)
    devices = spec.devices[: other.size] if other.size <= len(spec.devices) else spec.devices * other.size
    return replace(other, devices=devices)


def describe_size(spec: WorldSpec) -> str:
    """Return the size and the mesh of a world for a message: "a world of 2 (dp_shard=2)"."""
    return f"a world of {spec.size} ({', '.join(f'{name}={size}' for name, size in spec.mesh.items())})"


def _largest_dim(dims: Mapping[str, int]) -> str:
    return max(dims, key=lambda name: dims[name])
