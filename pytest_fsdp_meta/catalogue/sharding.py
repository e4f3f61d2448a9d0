"""Sharding: every parameter lies on the mesh as declared."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from pytest_fsdp_meta.catalogue.judging import View
from pytest_fsdp_meta.catalogue.registry import Finding, Told, Words, check
from pytest_fsdp_meta.evidence import MODEL_DIMS, TensorFacts


@check(
    promise="every parameter has its placements on its mesh dimensions: as declared, else sharded over every dimension "
    "that shards and replicated over dp_replicate",
    family="sharding",
    needs=["inventory"],
    after=["same_manifest_on_every_rank", "names_match_reference"],
    why="A parameter that is not sharded costs its full size on every rank; one on the wrong dim is another tensor.",
    cause="the module was not passed to fully_shard or parallelize_module, was ignored, or was sharded on another mesh "
    "or dim",
    remedy="shard it; or declare what is meant with Subject(unsharded=...) or Subject(placements=...)",
    references=["pytorch/pytorch#129229", "NVIDIA/TransformerEngine#2713"],
)
def dtensor_placements(view: View) -> Iterable[Finding]:
    subject = view.evidence.subject
    unsharded = set(subject.unsharded)
    dims = _data_dims(view)
    size = view.evidence.world.size
    for name, facts in view.tensors("parameter"):
        declared = subject.placements.get(name)
        if name in unsharded:
            told = [(rank, _whole(tensor)) for rank, tensor in facts]
        elif declared is not None:
            told = [(rank, _as_declared(tensor, declared, size)) for rank, tensor in facts]
        else:
            told = [(rank, _by_default(tensor, dims, size)) for rank, tensor in facts]
        yield from view.broken(name, told)


def _data_dims(view: View) -> dict[str | None, int]:
    """Dimensions that shard or replicate: of the meshes that parameters lie on, for a loader may make its own.

    And those of the world's mesh that have room beside them, for it may have used one and forgotten the other.
    """
    world = view.evidence.world
    tensors = (t for rank in view.evidence.inventory for t in rank.tensors if t.kind == "parameter")
    # Experts cut up the ranks in a way of their own, which nothing else follows.
    meshes = {tensor.mesh: None for tensor in tensors if tensor.mesh is not None and "ep" not in tensor.mesh.dims}
    dims: dict[str | None, int] = {}
    for mesh in meshes:
        dims.update(zip(mesh.dims, mesh.shape, strict=True))
    if not dims or any(name in dims for name, _ in world.mesh):
        most = max((prod(mesh.shape) for mesh in meshes), default=1)
        dims = {**{name: size for name, size in world.mesh if most * size <= world.size}, **dims}
    return {name: size for name, size in dims.items() if size > 1 and _role(name) != "free"}


def _role(dim: str | None) -> str:
    """What is expected of a mesh dimension by its name: "shard", "replicate" or "free"."""
    if dim in MODEL_DIMS:
        return "free"
    return "replicate" if dim is not None and ("replica" in dim or dim == "ddp") else "shard"


def _whole(tensor: TensorFacts) -> Told | None:
    sizes = tensor.mesh.shape if tensor.mesh is not None else ()
    if all(placement == "R" or size == 1 for placement, size in zip(tensor.placements or (), sizes, strict=True)):
        return None
    return Told(
        _placed(tensor),
        "whole on every rank, as declared",
        "it is declared unsharded, and sharded all the same",
        "keep it out of fully_shard (ignored_params), or take it out of Subject(unsharded=...)",
    )


def _as_declared(tensor: TensorFacts, declared: tuple[str, ...], world: int) -> Told | None:
    if tensor.placements is None and world == 1:
        return None  # alone, a loader need not shard
    actual = tensor.placements or ()
    if actual and len(actual) != len(declared):
        dims = f"{len(actual)} mesh dimension{'s' if len(actual) > 1 else ''}"
        return Told(
            _placed(tensor),
            f"{_tuple(declared)}, as declared",
            f"Subject(placements=...) gives {len(declared)} for {dims}",
            "declare one placement per mesh dimension, in order",
        )
    fits = len(actual) == len(declared) and all(_fits(a, d) for a, d in zip(actual, declared, strict=True))
    return None if fits else Told(_placed(tensor), f"{_tuple(declared)}, as declared")


def _fits(actual: str, declared: str) -> bool:
    """A strided shard is how torch writes S(dim) where two mesh dimensions shard one tensor dim."""
    return actual == declared or (actual.startswith("_S(") and declared == f"S({actual[3:].split(',')[0]})")


def _by_default(tensor: TensorFacts, dims: dict[str | None, int], world: int) -> Told | None:
    sharding = {name: size for name, size in dims.items() if _role(name) == "shard"}
    wanted = " x ".join(f"{name or 'the mesh'}={size}" for name, size in sharding.items())
    if tensor.placements is None:
        if not sharding or not tensor.shape:
            return None  # nothing shards here, or a scalar, which nothing can shard
        return Told(_placed(tensor), f"sharded over {wanted}")
    assert tensor.mesh is not None
    roles = [_role(dim) for dim in tensor.mesh.dims]
    if tensor.mesh.dims == (None, None):
        roles = ["replicate", "shard"]  # what fully_shard makes of a 2-D mesh
    for role, size, placement, dim in zip(roles, tensor.mesh.shape, tensor.placements, tensor.mesh.dims, strict=True):
        shards = placement.startswith(("S(", "_S("))
        if size > 1 and role == "shard" and not shards:
            return Told(_placed(tensor), f"sharded over {dim or 'the mesh'}={size}", **_meant(dim, placement))
        if size > 1 and role == "replicate" and placement != "R":
            return Told(_placed(tensor), f"replicated over {dim or 'the first mesh dimension'}={size}")
    return _forgotten(tensor, dims, "shard" in roles, world)


def _forgotten(tensor: TensorFacts, dims: dict[str | None, int], shards: bool, world: int) -> Told | None:
    """A dimension that the tensor's mesh leaves out: nobody shards it there, or reduces its gradients over it."""
    assert tensor.mesh is not None
    for name, size in dims.items():
        # A dimension of another mesh over the same ranks leaves no room beside this one; experts borrow theirs.
        room = prod(tensor.mesh.shape) * size <= world and "ep" not in tensor.mesh.dims
        if name is not None and name not in tensor.mesh.dims and room and tensor.shape:
            if _role(name) == "shard":
                return Told(_placed(tensor), f"sharded over {name}={size} as well")
            # FSDP2 reduces over the mesh that it was given and no other; DDP over TP does it by itself.
            if shards and tensor.requires_grad:
                return Told(_placed(tensor), f"replicated over {name}={size} as well, which fully_shard(mesh=...) does")
    return None


def _meant(dim: str | None, placement: str) -> Words:
    """A loader's own mesh may call its replicating dimension anything."""
    if dim is None or dim.endswith("shard") or dim == "fsdp" or placement != "R":
        return {}
    return {
        "cause": f"it was not sharded over {dim}; or {dim} is meant to replicate, which its name does not say",
        "remedy": f"shard it; or call the dimension dp_replicate, or one of {', '.join(sorted(MODEL_DIMS))}; or "
        "declare Subject(placements=...)",
    }


def _placed(tensor: TensorFacts) -> str:
    if tensor.placements is None:
        return "a plain tensor, whole on every rank"
    return f"{_tuple(tensor.placements)} on mesh {tensor.mesh}"


def _tuple(placements: tuple[str, ...]) -> str:
    return f"({', '.join(placements)})" if len(placements) != 1 else placements[0]
