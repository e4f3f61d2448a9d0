"""What is expected of a parameter on its mesh: as declared, else by the names of the mesh dimensions."""

from __future__ import annotations

from math import prod

from pytest_fsdp_meta.catalogue.findings import Explanation, Mismatch
from pytest_fsdp_meta.catalogue.view import View
from pytest_fsdp_meta.evidence import MeshFacts, TensorFacts, replicates, sharded_dim, splits_experts, splits_model
from pytest_fsdp_meta.text import counted

PLAIN = "a plain tensor, whole on every rank"
SHARDED = "sharded over"
"""How it begins what is expected of a parameter that a mesh dimension should shard."""


def data_dims(view: View) -> dict[str | None, int]:
    """Dimensions that shard or replicate: of the meshes that parameters lie on, for a loader may make its own.

    And those of the world's mesh that have room beside them, for it may have used one and forgotten the other, or made
    one too small.
    """
    world = view.evidence.world
    tensors = (t for rank in view.evidence.inventory for t in rank.tensors if t.kind == "parameter")
    meshes = {tensor.mesh: None for tensor in tensors if tensor.mesh is not None and not _of_experts(tensor.mesh)}
    sizes = [pair for mesh in meshes for pair in zip(mesh.dims, mesh.shape, strict=True)]
    if not sizes or any(pair[0] == name for name, _ in world.mesh for pair in sizes):
        fits = ((n, s) for n, s in world.mesh if all(_has_room(mesh, n, s, world.size) for mesh in meshes))
        sizes = [*fits, *sizes]
    dims: dict[str | None, int] = {}
    for name, size in sizes:
        dims[name] = max(size, dims.get(name, 1))
    return {name: size for name, size in dims.items() if size > 1 and _role(name) != "free"}


def _of_experts(mesh: MeshFacts) -> bool:
    """Experts cut up the ranks in a way of their own, which nothing else follows."""
    return any(splits_experts(dim) for dim in mesh.dims)


def _has_room(mesh: MeshFacts, name: str | None, size: int, world: int) -> bool:
    """Whether the ranks of the world suffice for the mesh with a dimension of this size."""
    return prod(mesh.shape) // _size(mesh, name) * size <= world


def _size(mesh: MeshFacts, name: str | None) -> int:
    """Of a dimension; 1 where the mesh does not have it."""
    return dict(zip(mesh.dims, mesh.shape, strict=True)).get(name, 1)


def _role(dim: str | None) -> str:
    """What is expected of a mesh dimension by its name: "shard", "replicate" or "free"."""
    if splits_model(dim):
        return "free"
    return "replicate" if replicates(dim) else "shard"


def as_declared(tensor: TensorFacts, declared: tuple[str, ...], world: int) -> Mismatch | None:
    """What is wrong beside the declared placements."""
    if tensor.placements is None and world == 1:
        return None  # alone, a loader need not shard
    actual = tensor.placements or ()
    if actual and len(actual) != len(declared):
        gives = f"Subject(placements=...) gives {len(declared)} for {counted(len(actual), 'mesh dimension')}"
        each = "declare one placement per mesh dimension, in order"
        if len(actual) < len(declared):  # a plan that shards it on one more makes a mesh of both
            gives = f"the plan of another mesh dimension (parallelize_module) left it out; or {gives}"
            each = f"put its module into the plan, or {each}"
        return Mismatch(placed(tensor), f"{_tuple(declared)}, as declared", gives, each)
    fits = len(actual) == len(declared) and all(_fits(a, d) for a, d in zip(actual, declared, strict=True))
    return (
        None if fits else Mismatch(placed(tensor), f"{_tuple(declared)}, as declared", **_otherwise(actual, declared))
    )


def _otherwise(actual: tuple[str, ...], declared: tuple[str, ...]) -> Explanation:
    """What to say of a parameter that need not be sharded, because it is, or because it is declared whole."""
    if not actual:
        return _NO_PLACEMENTS if set(declared) == {"R"} else {}
    pairs = list(zip(actual, declared, strict=True))
    wrong = [(a, d) for a, d in pairs if not _fits(a, d)]
    if all(d == "R" and sharded_dim(a) is not None for a, d in wrong):
        return _KEEP_WHOLE if set(declared) == {"R"} else _REPLICATE
    dims = [(sharded_dim(a), sharded_dim(d)) for a, d in wrong]
    return _OTHER_DIM if all(a != d and None not in (a, d) for a, d in dims) else {}


_DECLARE = "or declare what is meant with Subject(placements=...)"
_KEEP_WHOLE: Explanation = {
    "cause": "it is declared whole, and was passed to fully_shard or parallelize_module with the rest of its module",
    "remedy": f"keep it whole: leave it out of fully_shard (ignored_params) or of the plan; {_DECLARE}",
}
_REPLICATE: Explanation = {
    "cause": "it is sharded over a mesh dimension that should replicate it: the mesh was passed with its dimensions in "
    "another order, or flattened, or another one was passed",
    "remedy": f"give fully_shard a mesh of two dimensions, the first of which replicates; {_DECLARE}",
}
_OTHER_DIM: Explanation = {
    "cause": "it was sharded on another dim than declared; fully_shard takes dim 0 unless it is told otherwise",
    "remedy": f"shard it on that dim (shard_placement_fn of fully_shard, or the plan); {_DECLARE}",
}
_NO_PLACEMENTS: Explanation = {
    "cause": "it is declared replicated on a mesh, and is a plain tensor that lies on none",
    "remedy": "declare Subject(unsharded=...) in place of Subject(placements=...), or make it a DTensor of this mesh",
}


def _fits(actual: str, declared: str) -> bool:
    """A strided shard is how torch writes S(dim) where two mesh dimensions shard one tensor dim."""
    return actual == declared or (actual.startswith("_S(") and declared == f"S({sharded_dim(actual)})")


def is_whole(tensor: TensorFacts) -> bool:
    """Whether this rank holds all of it: a plain tensor, or one that no mesh dimension of more than one rank splits."""
    if in_parts(tensor):
        return False
    sizes = tensor.mesh.shape if tensor.mesh is not None else ()
    return all(placement == "R" or size == 1 for placement, size in zip(tensor.placements or (), sizes, strict=True))


def in_parts(tensor: TensorFacts) -> bool:
    """Whether an adapter says that this rank holds less than all of it, without placements that could be told."""
    return bool(tensor.sharded_by) and tensor.placements is None and not tensor.whole


def by_default(tensor: TensorFacts, dims: dict[str | None, int], world: int) -> Mismatch | None:
    """What is wrong where nothing is declared; nothing is expected of what holds too little to be cut."""
    if not tensor.shape or 0 in tensor.shape:
        return None
    sharding = {name: size for name, size in dims.items() if _role(name) == "shard"}
    wanted = " x ".join(f"{name or 'the mesh'}={size}" for name, size in sharding.items())
    if tensor.placements is None:
        if not sharding:
            return None
        return Mismatch(placed(tensor), f"{SHARDED} {wanted}")
    assert tensor.mesh is not None
    roles = [_role(dim) for dim in tensor.mesh.dims]
    if tensor.mesh.dims == (None, None):
        roles = ["replicate", "shard"]  # what fully_shard makes of a 2-D mesh
    for role, size, placement, dim in zip(roles, tensor.mesh.shape, tensor.placements, tensor.mesh.dims, strict=True):
        if size > 1 and role == "shard" and sharded_dim(placement) is None:
            return Mismatch(placed(tensor), f"{SHARDED} {dim or 'the mesh'}={size}", **_meant(dim, placement))
        if size > 1 and role == "replicate" and placement != "R":
            where = f"replicated over {dim or 'the first mesh dimension'}={size}"
            return Mismatch(placed(tensor), where, **(_REPLICATE if sharded_dim(placement) is not None else {}))
    return _forgotten(tensor, dims, "shard" in roles, world)


def _forgotten(tensor: TensorFacts, dims: dict[str | None, int], shards: bool, world: int) -> Mismatch | None:
    """A dimension that the tensor's mesh leaves out, or has in small: nobody shards it there, or reduces gradients."""
    assert tensor.mesh is not None
    if _of_experts(tensor.mesh):
        return None  # experts borrow the room of others
    for name, size in dims.items():
        # A dimension of another mesh over the same ranks leaves no room beside this one.
        if name is None or _size(tensor.mesh, name) >= size or not _has_room(tensor.mesh, name, size, world):
            continue
        as_well = "" if name in tensor.mesh.dims else " as well"
        if _role(name) == "shard":
            return Mismatch(placed(tensor), f"{SHARDED} {name}={size}{as_well}")
        # FSDP2 reduces over the mesh that it was given and no other; DDP over TP does it by itself.
        if shards and tensor.requires_grad:
            return Mismatch(placed(tensor), f"replicated over {name}={size}{as_well}, which fully_shard(mesh=...) does")
    return None


def _meant(dim: str | None, placement: str) -> Explanation:
    """A loader's own mesh may call its replicating dimension anything."""
    if dim is None or dim.endswith("shard") or dim == "fsdp" or placement != "R":
        return {}
    return {
        "cause": f"it was not sharded over {dim}; or {dim} is meant to replicate, which its name does not say",
        "remedy": "shard it; or call the dimension dp_replicate, or tp, cp, pp or ep where it splits the model; or "
        "declare Subject(placements=...)",
    }


def placed(tensor: TensorFacts) -> str:
    """How a parameter lies on its mesh, as messages write it."""
    if tensor.placements is None:
        return f"in parts, as {tensor.sharded_by} says" if in_parts(tensor) else PLAIN
    return f"{_tuple(tensor.placements)} on mesh {tensor.mesh}"


def _tuple(placements: tuple[str, ...]) -> str:
    return f"({', '.join(placements)})" if len(placements) != 1 else placements[0]
