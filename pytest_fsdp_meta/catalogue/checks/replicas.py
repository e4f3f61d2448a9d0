"""Values: what several ranks hold is the same on each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pytest_fsdp_meta.catalogue.checks.values import BASIC, frozen_names, numbers
from pytest_fsdp_meta.catalogue.diagnosis.patterns import UNWRITTEN, other_part, unwritten
from pytest_fsdp_meta.catalogue.diagnosis.patterns import Cases as Wrong
from pytest_fsdp_meta.catalogue.findings import Explanation, Finding
from pytest_fsdp_meta.catalogue.registry import check
from pytest_fsdp_meta.catalogue.view import NotJudged, PartlyJudged, View, majority, ranks_by
from pytest_fsdp_meta.evidence import Comparison, TensorFacts, sharded_dim, splits_model
from pytest_fsdp_meta.text import name_ranks


@check(
    promise="what is replicated (HSDP, TP-replicated, unsharded, buffers) is bit-identical on all its ranks",
    family="values",
    needs=["inventory"],
    uses=["reference", "values", "verifier"],
    after=[*BASIC, "nothing_left_unsharded"],
    why="A saved checkpoint and full_tensor() show one replica only, while the others train something else.",
    cause="these ranks were not given the value that the others have, or replicas diverged after loading",
    remedy="let every rank load or compute it alike, or broadcast it once loading is done",
    references=["allenai/OLMo-core#319", "NVIDIA-NeMo/Automodel#3822", "pytorch/pytorch#178569"],
    since="0.2",
)
def replicas_equal(view: View) -> Iterable[Finding]:
    compared, coordinates = _compared(view), _model_coordinates(view)
    reference = view.evidence.reference
    drawn = set(reference.unstable) if reference is not None else set()
    unread: list[TensorFacts] = []
    loose: list[str] = []
    for name, facts in view.tensors("parameter", "buffer"):
        unread += [tensor for _, tensor in facts if tensor.unreadable]
        sets = _replicas(view, facts, coordinates)
        apart = [ranks for ranks in sets if len({tensor.digest for _, tensor in ranks}) > 1]
        if apart and name in drawn:
            loose.append(name)
        elif apart:
            yield from _diverged(view, name, apart, compared.get(name, {}))
    if loose:
        raise NotJudged(
            f"the reference gives other bits of {loose[0]} each time that it is built, and so may each rank"
        )
    if unread:
        raise PartlyJudged(f"torch cannot read {unread[0].name} ({unread[0].unreadable})")


Cases = list[tuple[int, TensorFacts]]


def _replicas(view: View, facts: Cases, coordinates: Mapping[int, Mapping[str, int]]) -> Iterator[Cases]:
    """The ranks that hold the same part of a tensor, where they are several."""
    reference = view.evidence.reference
    truth = reference.inventory.by_name.get(facts[0][1].name) if reference is not None else None
    by_rank = dict(facts)
    held = (
        (rank, (tensor.regions, tensor.local_shape, tensor.dtype, _apart(tensor, truth, coordinates[rank])))
        for rank, tensor in facts
        if tensor.digest is not None and tensor.numel and not _part_of_sum(tensor)
    )
    for ranks in ranks_by(held).values():
        if len(ranks) > 1:
            yield [(rank, by_rank[rank]) for rank in ranks]


def _part_of_sum(tensor: TensorFacts) -> bool:
    return any(placement.startswith("P") for placement in tensor.placements or ())


def _apart(tensor: TensorFacts, truth: TensorFacts | None, place: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """What sets a rank apart along dimensions that split the model and that the tensor's mesh does not have.

    There a plain tensor may be a part cut by hand, unless it is as large as the whole of the reference.
    """
    if truth is not None and truth.shape == tensor.shape:
        return ()
    known = tensor.mesh.dims if tensor.mesh is not None else ()
    return tuple(sorted((dim, index) for dim, index in place.items() if dim not in known))


def _model_coordinates(view: View) -> dict[int, dict[str, int]]:
    """Where each rank is on the dimensions that split the model: of the world's mesh, and of those of the loader."""
    places: dict[int, dict[str, int]] = {}
    for rank in view.evidence.inventory:
        place: dict[str | None, int] = {}
        left = rank.rank
        for dim, size in reversed(view.evidence.world.mesh):
            left, place[dim] = divmod(left, size)
        for mesh in {tensor.mesh for tensor in rank.tensors}:
            if mesh is not None and mesh.coordinate is not None:
                place.update(zip(mesh.dims, mesh.coordinate, strict=True))
        places[rank.rank] = {dim: index for dim, index in place.items() if dim is not None and splits_model(dim)}
    return places


def _compared(view: View) -> dict[str, dict[int, Comparison]]:
    """What each rank's part is beside the truth, by name and rank: of what is frozen, beside the verifier."""
    by_name: dict[str, dict[int, Comparison]] = {}
    frozen = frozen_names(view)
    for taken, wanted in ((view.evidence.values, False), (view.evidence.verifier, True)):
        for rank, comparisons in enumerate(taken or ()):
            for comparison in comparisons:
                if (comparison.name in frozen) is wanted and comparison.problem is None:
                    by_name.setdefault(comparison.name, {})[rank] = comparison
    return by_name


def _diverged(view: View, name: str, apart: list[Cases], compared: Mapping[int, Comparison]) -> Iterator[Finding]:
    """The ranks whose bits are others than those of the ranks that are right, or than most have where none is."""
    found: dict[bool, tuple[list[int], list[int]]] = {}
    for replicas in apart:
        right = [rank for rank, _ in replicas if rank in compared and compared[rank].equal]
        if len(right) == len(replicas):
            continue  # the same numbers in other bits: a zero and its negative, or two NaN
        usual = majority((rank, tensor.digest) for rank, tensor in replicas)
        kept = right or [rank for rank, tensor in replicas if tensor.digest == usual]
        all_kept, all_odd = found.setdefault(bool(right), ([], []))
        all_kept += kept
        all_odd += [rank for rank, _ in replicas if rank not in kept]
    truth = "verifier" if name in frozen_names(view) else "reference"
    tensor = apart[0][0][1]
    each = all(len({tensor.digest for _, tensor in ranks}) == len(ranks) for ranks in apart)
    for known, (kept, odd) in found.items():
        s = "s" if len(kept) == 1 else ""
        expected = (
            f"those of {name_ranks(kept)}, which hold{s} the same elements" + f" and equal{s} the {truth}" * known
        )
        zeros = [rank for rank in odd if rank in compared and unwritten(compared[rank])]
        for ranks in filter(None, [[rank for rank in odd if rank not in zeros], zeros]):
            wrong = [(rank, compared[rank]) for rank in ranks if rank in compared]
            detail = numbers(wrong, tensor) if known and wrong else ""
            words = UNWRITTEN if ranks is zeros else _words(tensor, wrong, known, each)
            yield Finding(name, tuple(sorted(ranks)), "other bits", expected, detail, **words)


def _words(tensor: TensorFacts, wrong: Wrong, right: bool, each: bool) -> Explanation:
    """``each`` tells that no two replicas agree, so that none of them is odd."""
    if wrong and not right:
        return _NONE_RIGHT
    if each and not right:
        return _EACH_ITS_OWN
    if wrong and not other_part(tensor, wrong):
        return _IN_PART
    sharded = any(sharded_dim(placement) is not None for placement in tensor.placements or ())
    return _ODD_SHARDS if sharded else {}


_NONE_RIGHT: Explanation = {
    "cause": "each rank drew or computed it by itself, and none as the truth has it: it was not loaded or not "
    "recomputed, and a seed or the rank went into it",
    "remedy": "load or compute it alike on every rank, and fail on keys that are missing",
}
_EACH_ITS_OWN: Explanation = {
    "cause": "each rank drew or computed it by itself, with a seed or a number that depends on the rank; or only some "
    "ranks were given it, or another part of it",
    "remedy": "draw it with one seed for all ranks that hold it, or broadcast it once loading is done",
}
_IN_PART: Explanation = {
    "cause": "these ranks have it right but for some elements, or nearly: replicas diverged after loading (part was "
    "written over, or updated on some ranks only), or computed or rounded it each in its own way",
    "remedy": "let every rank load or compute it by the same code, or broadcast it once loading is done",
}
_ODD_SHARDS: Explanation = {
    "cause": "these ranks read the slice of another rank, or only the first replica was given the weight",
    "remedy": "take the offset from the DTensor's own mesh coordinate, and let every rank load",
}
