"""Where ranks are on meshes, which of them see the same tokens, and how a parameter is expected to be placed there."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import prod

from pytest_fsdp_meta.checks.sharding.facts import place_of_rank
from pytest_fsdp_meta.evidence import (
    Evidence,
    MeshFacts,
    RankInventory,
    TensorFacts,
    replicates,
    sharded_dim,
    splits_experts,
    splits_model,
    splits_sequence,
)
from pytest_fsdp_meta.judging.findings import Explanation, Mismatch
from pytest_fsdp_meta.judging.view import View
from pytest_fsdp_meta.text import counted

PLAIN = "a plain tensor, whole on every rank"


def data_dims(view: View) -> dict[str | None, int]:
    """Return the sizes of the mesh dimensions that shard or replicate parameters.

    They come from the meshes of the parameters, because a loader may create its own. Dimensions of the world's mesh
    are added if the world has enough ranks for them too: the loader may have forgotten one or made it too small. They
    are also added if the loader's meshes have one rank each, under any names: it sharded over nothing.
    """
    world = view.evidence.world
    tensors = (t for rank in view.evidence.inventory for t in rank.tensors if t.kind == "parameter")
    meshes = {tensor.mesh: None for tensor in tensors if tensor.mesh is not None and not _of_experts(tensor.mesh)}
    sizes = [pair for mesh in meshes for pair in mesh.pairs]
    alone = all(size == 1 for _, size in sizes)
    if alone or any(pair[0] == name for name, _ in world.mesh for pair in sizes):
        fits = ((n, s) for n, s in world.mesh if all(_has_room(mesh, n, s, world.size) for mesh in meshes))
        sizes = [*fits, *sizes]
    dims: dict[str | None, int] = {}
    for name, size in sizes:
        dims[name] = max(size, dims.get(name, 1))
    return {name: size for name, size in dims.items() if size > 1 and _role(name) != "free"}


def _of_experts(mesh: MeshFacts) -> bool:
    """Return whether the mesh is one of experts, which divide the ranks differently from all other parameters."""
    return any(splits_experts(dim) for dim in mesh.dims)


def _has_room(mesh: MeshFacts, name: str | None, size: int, world: int) -> bool:
    """Return whether the world has enough ranks for the mesh with a dimension of this size."""
    return prod(mesh.shape) // _size(mesh, name) * size <= world


def _size(mesh: MeshFacts, name: str | None) -> int:
    """Return the size of a dimension; 1 if the mesh does not have it."""
    return dict(mesh.pairs).get(name, 1)


def _role(dim: str | None) -> str:
    """Return what a mesh dimension of this name does to parameters: "shard", "replicate" or "free" (either)."""
    if splits_model(dim):
        return "free"
    return "replicate" if replicates(dim) else "shard"


def compare_with_declared(tensor: TensorFacts, declared: tuple[str, ...], world: int) -> Mismatch | None:
    """Compare the placements with the declared ones."""
    if tensor.placements is None and world == 1:
        return None  # a single rank need not shard
    actual = tensor.placements or ()
    if actual and len(actual) != len(declared):
        cause = (
            f"Subject(placements=...) declares {counted(len(declared), 'placement')}, but the tensor's mesh has "
            f"{counted(len(actual), 'dimension')}"
        )
        remedy = "declare one placement per mesh dimension, in order"
        if len(actual) < len(declared):  # each plan that shards the parameter adds a dimension to its mesh
            cause = f"the plan of another mesh dimension (parallelize_module) left it out; or {cause}"
            remedy = f"add its module to the plan, or {remedy}"
        return Mismatch(describe_placements(tensor), f"{_tuple(declared)}, as declared", cause, remedy)
    if len(actual) == len(declared) and all(map(_fits, actual, declared)):
        return None
    return Mismatch(describe_placements(tensor), f"{_tuple(declared)}, as declared", **_explain(actual, declared))


def _explain(actual: tuple[str, ...], declared: tuple[str, ...]) -> Explanation:
    """Explain a parameter that is already sharded, or declared whole, for which "shard it" would be wrong advice."""
    if not actual:
        return _NO_PLACEMENTS if set(declared) == {"R"} else {}
    pairs = list(zip(actual, declared, strict=True))
    wrong = [(a, d) for a, d in pairs if not _fits(a, d)]
    if all(d == "R" and sharded_dim(a) is not None for a, d in wrong):
        return _KEEP_WHOLE if set(declared) == {"R"} else _REPLICATE
    dims = [(sharded_dim(a), sharded_dim(d)) for a, d in wrong]
    return _OTHER_DIM if all(a != d and None not in (a, d) for a, d in dims) else {}


_DECLARE = "or declare the intent with Subject(placements=...)"
_KEEP_WHOLE: Explanation = {
    "cause": "it is declared whole but was passed to fully_shard() or parallelize_module() with its module",
    "remedy": f"keep it whole: exclude it from fully_shard() (ignored_params) or the plan; {_DECLARE}",
}
_REPLICATE: Explanation = {
    "cause": "it is sharded over a mesh dimension that should replicate it: the mesh has its dimensions in another "
    "order, is flattened, or is another mesh",
    "remedy": f"pass fully_shard() a mesh of two dimensions, the first of which replicates; {_DECLARE}",
}
_OTHER_DIM: Explanation = {
    "cause": "it was sharded on another dim than declared; fully_shard() shards dim 0 by default",
    "remedy": f"shard it on the declared dim (shard_placement_fn of fully_shard(), or the plan); {_DECLARE}",
}
_NO_PLACEMENTS: Explanation = {
    "cause": "it is declared replicated on a mesh but is a plain tensor without a mesh",
    "remedy": "declare Subject(unsharded=...) instead of Subject(placements=...), or make it a DTensor on this mesh",
}


def _fits(actual: str, declared: str) -> bool:
    """Return whether placements match; torch writes S(dim) as a strided shard if two mesh dimensions shard one dim."""
    return actual == declared or (actual.startswith("_S(") and declared == f"S({sharded_dim(actual)})")


def is_whole(tensor: TensorFacts) -> bool:
    """Return whether this rank holds all of the tensor: it is plain, or no mesh dimension of size > 1 shards it."""
    if is_split(tensor):
        return False
    sizes = tensor.mesh.shape if tensor.mesh is not None else ()
    return all(placement == "R" or size == 1 for placement, size in zip(tensor.placements or (), sizes, strict=True))


def is_split(tensor: TensorFacts) -> bool:
    """Return whether an adapter reports that this rank holds a part only, without placements."""
    return bool(tensor.sharded_by) and tensor.placements is None and not tensor.whole


def compare_with_default(
    tensor: TensorFacts, dims: dict[str | None, int], world: int, roles: Collection[str] = ("shard", "replicate")
) -> Mismatch | None:
    """Compare with what the names of the mesh dimensions imply, of those with these roles.

    Scalars and empty tensors always match.
    """
    if not tensor.shape or 0 in tensor.shape:
        return None
    sharding = {name: size for name, size in dims.items() if _role(name) == "shard"}
    expected = " x ".join(f"{name or 'the mesh'}={size}" for name, size in sharding.items())
    if tensor.placements is None:
        if not sharding:
            return None
        return Mismatch(describe_placements(tensor), f"sharded over {expected}")
    assert tensor.mesh is not None
    of_dims = [_role(dim) for dim in tensor.mesh.dims]
    if tensor.mesh.dims == (None, None):
        of_dims = ["replicate", "shard"]  # how fully_shard() uses the dimensions of an unnamed 2-D mesh
    rows = zip(of_dims, tensor.mesh.shape, tensor.placements, tensor.mesh.dims, strict=True)
    for role, size, placement, dim in rows:
        if size == 1 or role not in roles:
            continue
        if role == "shard" and sharded_dim(placement) is None:
            return Mismatch(describe_placements(tensor), f"sharded over {dim or 'the mesh'}={size}")
        if role == "replicate" and placement != "R":
            where = f"replicated over {dim or 'the first mesh dimension'}={size}"
            return Mismatch(
                describe_placements(tensor), where, **(_REPLICATE if sharded_dim(placement) is not None else {})
            )
    return _forgotten(tensor, dims, "shard" in of_dims and "replicate" in roles, world)


def _forgotten(tensor: TensorFacts, dims: dict[str | None, int], reduces: bool, world: int) -> Mismatch | None:
    """Find a dimension that the tensor's mesh lacks or has too small: nothing is sharded or reduced over the rest."""
    assert tensor.mesh is not None
    if _of_experts(tensor.mesh):
        return None  # experts divide the ranks of the other dimensions
    for name, size in dims.items():
        # Two meshes may cover the same ranks; then the world has no ranks left for both dimensions.
        if name is None or _size(tensor.mesh, name) >= size or not _has_room(tensor.mesh, name, size, world):
            continue
        as_well = "" if name in tensor.mesh.dims or max(tensor.mesh.shape) == 1 else " as well"
        if _role(name) == "shard":
            return Mismatch(describe_placements(tensor), f"sharded over {name}={size}{as_well}")
        # FSDP2 reduces gradients over the dimensions of its own mesh only; DDP over TP reduces by itself.
        if reduces and tensor.requires_grad:
            return Mismatch(
                describe_placements(tensor), f"replicated over {name}={size}{as_well} (by fully_shard(mesh=...))"
            )
    return None


def describe_placements(tensor: TensorFacts) -> str:
    """Describe the placements of a parameter for messages."""
    if tensor.placements is None:
        return f"split into parts by {tensor.sharded_by}" if is_split(tensor) else PLAIN
    return f"{_tuple(tensor.placements)} on mesh {tensor.mesh}"


def _tuple(placements: tuple[str, ...]) -> str:
    return f"({', '.join(placements)})" if len(placements) != 1 else placements[0]


Coordinates = tuple[tuple[str, int], ...]
"""The index of a rank along each of some mesh dimensions."""


def coordinates(evidence: Evidence) -> dict[int, dict[str, int]]:
    """Return each rank's index along the named dimensions of the world's mesh and of all meshes of its tensors."""
    order = evidence.world.mesh
    return {rank.rank: place_of_rank(rank.rank, order) | _in_meshes(_meshes_of(rank)) for rank in evidence.inventory}


def _meshes_of(rank: RankInventory) -> set[MeshFacts]:
    return {tensor.mesh for tensor in rank.tensors if tensor.mesh is not None}


def _in_meshes(meshes: Iterable[MeshFacts]) -> dict[str, int]:
    pairs = ((mesh.dims, mesh.coordinate) for mesh in meshes if mesh.coordinate is not None)
    return {dim: i for dims, coordinate in pairs for dim, i in zip(dims, coordinate, strict=True) if dim is not None}


def sequence_places(evidence: Evidence) -> dict[int, Coordinates]:
    """Return each rank's place along the dimensions that divide the sequence.

    Of the ranks that see the same rows, those with the same place see the same tokens.
    """
    return {
        rank: tuple(sorted((dim, index) for dim, index in place.items() if splits_sequence(dim)))
        for rank, place in coordinates(evidence).items()
    }


def share_places(evidence: Evidence) -> dict[int, Coordinates]:
    """Return each rank's place along the dimensions whose ranks have different shares of a summed loss.

    The ranks along other dimensions, such as tensor-parallel ones, compute the same share together. Meshes of experts
    divide the ranks differently. The loader's own meshes replace the world's, as for slices of the batch.
    """
    places = {}
    for rank in evidence.inventory:
        meshes = [mesh for mesh in _meshes_of(rank) if not any(map(splits_experts, mesh.dims))]
        place = _in_meshes(meshes) or place_of_rank(rank.rank, evidence.world.mesh)
        shares = ((dim, i) for dim, i in place.items() if splits_sequence(dim) or not splits_model(dim))
        places[rank.rank] = tuple(sorted(shares))
    return places
