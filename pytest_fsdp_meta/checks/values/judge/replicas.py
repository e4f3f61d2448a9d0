"""Check that replicas are bit-identical on all ranks that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pytest_fsdp_meta.checks.values.judge.slices import BASIC, describe_difference, frozen_names
from pytest_fsdp_meta.evidence import Comparison, TensorFacts, sharded_dim, splits_model
from pytest_fsdp_meta.judging.causes import ZEROS, Cases, is_zero, may_be_other_slice
from pytest_fsdp_meta.judging.coordinates import coordinates
from pytest_fsdp_meta.judging.families import values_check
from pytest_fsdp_meta.judging.findings import Explanation, Finding
from pytest_fsdp_meta.judging.view import NotJudged, PartlyJudged, View, majority, ranks_by
from pytest_fsdp_meta.text import name_ranks


@values_check(
    promise="replicated tensors (HSDP, TP-replicated, unsharded, buffers) are bit-identical on all their ranks",
    needs=["inventory"],
    uses=["reference", "values", "verifier"],
    after=[*BASIC, "nothing_left_unsharded"],
    why="A saved checkpoint and full_tensor() show one replica only, while the others train something else.",
    cause="these ranks did not receive the value that the others have, or replicas diverged after loading",
    remedy="load or compute it alike on every rank, or broadcast it after loading",
    references=["allenai/OLMo-core#319", "NVIDIA-NeMo/Automodel#3822", "pytorch/pytorch#178569"],
)
def replicas_equal(view: View) -> Iterable[Finding]:
    compared, coordinates = _compared(view), model_coordinates(view)
    reference = view.evidence.reference
    unstable = set(reference.unstable) if reference is not None else set()
    unread: list[TensorFacts] = []
    random: list[str] = []
    for name, facts in view.tensors("parameter", "buffer"):
        unread += [tensor for _, tensor in facts if tensor.unreadable]
        sets = replica_sets(view, facts, coordinates)
        apart = [ranks for ranks in sets if len({tensor.digest for _, tensor in ranks}) > 1]
        if apart and name in unstable:
            random.append(name)
        elif apart:
            yield from _diverged(view, name, apart, compared.get(name, {}))
    if random:
        raise NotJudged(f"{random[0]} differs each time the reference is built, so its replicas may differ too")
    if unread:
        raise PartlyJudged(f"torch cannot read {unread[0].name} ({unread[0].unreadable})")


Replicas = list[tuple[int, TensorFacts]]
"""The ranks that hold the same part of a tensor."""


def replica_sets(view: View, facts: Replicas, coordinates: Mapping[int, Mapping[str, int]]) -> Iterator[Replicas]:
    """Return the sets of two or more ranks that hold the same part of a tensor."""
    reference = view.evidence.reference
    unsharded = reference.inventory.by_name.get(facts[0][1].name) if reference is not None else None
    by_rank = dict(facts)
    held = (
        (rank, (tensor.regions, tensor.local_shape, tensor.dtype, _model_part(tensor, unsharded, coordinates[rank])))
        for rank, tensor in facts
        if tensor.digest is not None and tensor.numel and not _part_of_sum(tensor)
    )
    for ranks in ranks_by(held).values():
        if len(ranks) > 1:
            yield [(rank, by_rank[rank]) for rank in ranks]


def _part_of_sum(tensor: TensorFacts) -> bool:
    return any(placement.startswith("P") for placement in tensor.placements or ())


def _model_part(
    tensor: TensorFacts, unsharded: TensorFacts | None, place: Mapping[str, int]
) -> tuple[tuple[str, int], ...]:
    """Return the rank's coordinates on the model-splitting dimensions that the tensor's mesh does not have.

    Along those, a plain tensor may be a part split by hand, unless it is as large as the reference's.
    """
    if unsharded is not None and unsharded.shape == tensor.shape:
        return ()
    known = tensor.mesh.dims if tensor.mesh is not None else ()
    return tuple(sorted((dim, index) for dim, index in place.items() if dim not in known))


def model_coordinates(view: View) -> dict[int, dict[str, int]]:
    """Return each rank's coordinates on the dimensions that split the model, in all meshes."""
    return {
        rank: {dim: index for dim, index in place.items() if splits_model(dim)}
        for rank, place in coordinates(view.evidence).items()
    }


def _compared(view: View) -> dict[str, dict[int, Comparison]]:
    """Return the comparison of each rank's part with the reference (with the verifier if frozen), by name and rank."""
    by_name: dict[str, dict[int, Comparison]] = {}
    frozen, drawn = frozen_names(view), view.evidence.subject.drawn
    for taken, wanted in ((view.evidence.values, False), (view.evidence.verifier, True)):
        for rank, comparisons in enumerate(taken or ()):
            for comparison in comparisons:
                right = (comparison.name in frozen) is wanted and comparison.name not in drawn
                if right and comparison.problem is None:
                    by_name.setdefault(comparison.name, {})[rank] = comparison
    return by_name


def _diverged(view: View, name: str, apart: list[Replicas], compared: Mapping[int, Comparison]) -> Iterator[Finding]:
    """Report the ranks whose bits differ from those of the correct ranks, or of most ranks if none is known correct."""
    found: dict[bool, tuple[list[int], list[int]]] = {}
    for replicas in apart:
        right = [rank for rank, _ in replicas if rank in compared and compared[rank].equal]
        if len(right) == len(replicas):
            continue  # equal numbers with different bits: 0.0 and -0.0, or two NaNs
        usual = majority((rank, tensor.digest) for rank, tensor in replicas)
        agreeing = right or [rank for rank, tensor in replicas if tensor.digest == usual]
        all_agreeing, all_odd = found.setdefault(bool(right), ([], []))
        all_agreeing += agreeing
        all_odd += [rank for rank, _ in replicas if rank not in agreeing]
    source = "verifier" if name in frozen_names(view) else "reference"
    tensor = apart[0][0][1]
    all_differ = all(len({tensor.digest for _, tensor in ranks}) == len(ranks) for ranks in apart)
    for known, (agreeing, odd) in found.items():
        s = "s" if len(agreeing) == 1 else ""
        equal = f" and equal{s} the {source}" if known else ""
        actual = f"bits that differ from those of {name_ranks(agreeing)}, which hold{s} the same elements{equal}"
        zeros = [rank for rank in odd if rank in compared and is_zero(compared[rank])]
        for ranks in filter(None, [[rank for rank in odd if rank not in zeros], zeros]):
            wrong = [(rank, compared[rank]) for rank in ranks if rank in compared]
            detail = describe_difference(wrong, tensor) if known and wrong else ""
            explanation = ZEROS if ranks is zeros else _explain(tensor, wrong, known, all_differ)
            yield Finding(name, tuple(sorted(ranks)), actual, "", detail, **explanation)


def _explain(tensor: TensorFacts, wrong: Cases, right: bool, all_differ: bool) -> Explanation:
    """Explain diverged replicas; ``right`` if some are known correct, ``all_differ`` if no two agree."""
    if wrong and not right:
        return _NONE_RIGHT
    if all_differ and not right:
        return _ALL_DIFFER
    if wrong and not may_be_other_slice(tensor, wrong):
        return _IN_PART
    sharded = any(sharded_dim(placement) is not None for placement in tensor.placements or ())
    return _ODD_SHARDS if sharded else {}


_NONE_RIGHT: Explanation = {
    "cause": "each rank initialised or computed it by itself, none as in the reference: it was not loaded or not "
    "recomputed, and depends on a seed or on the rank",
    "remedy": "load or compute it alike on every rank, and fail on missing keys",
}
_ALL_DIFFER: Explanation = {
    "cause": "each rank initialised or computed it by itself, from a seed or a value that depends on the rank; or only "
    "some ranks received it, or received another part of it",
    "remedy": "initialise it from one seed on all ranks that hold it, or broadcast it after loading",
}
_IN_PART: Explanation = {
    "cause": "most elements on these ranks are correct, or nearly: replicas diverged after loading (a part was "
    "overwritten, or updated on some ranks only), or were computed or rounded differently",
    "remedy": "load or compute it with the same code on every rank, or broadcast it after loading",
}
_ODD_SHARDS: Explanation = {
    "cause": "these ranks read the slice of another rank, or only the first replica received the weight",
    "remedy": "take the offset from the DTensor's own mesh coordinate, and load on every rank",
}
