"""Check that replicas are bit-identical, and that every shard equals its slice of the reference or the verifier."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType

from pytest_fsdp_meta.evidence import Comparison, TensorFacts, frozen_sources, splits_model
from pytest_fsdp_meta.judging.causes import (
    IF_DRAWN,
    OTHER_TENSOR,
    ROUNDING,
    ZEROS,
    Cases,
    common_pattern,
    explain_pattern,
    find_swapped,
    is_zero,
)
from pytest_fsdp_meta.judging.expectations import coordinates, is_whole
from pytest_fsdp_meta.judging.findings import Explanation, Finding
from pytest_fsdp_meta.judging.registry import values_check
from pytest_fsdp_meta.judging.view import Differs, NotJudged, PartlyJudged, Unjudgeable, View, majority, ranks_by
from pytest_fsdp_meta.text import first_of, grouped, name_ranks

BASIC = (
    "same_manifest_on_every_rank",
    "names_match_reference",
    "shapes_match_reference",
    "collectives_match_on_every_rank",
    "no_meta_params",
    "no_meta_buffers",
    "no_uninitialized_memory",
    "managed_params_are_registered",
    "shards_tile_the_tensor",
)
REFERENCE, WHOLE, VERIFIER = "the reference's slice", "the reference", "the verifier"
"""What tensors are compared with, as messages name it: a shard, a whole tensor, a frozen one."""


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
        raise Differs(f"{random[0]} differs between its ranks, and each time the reference is built")
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
        (rank, (tensor.held, tensor.numel, tensor.dtype, _model_part(tensor, unsharded, coordinates[rank])))
        for rank, tensor in facts
        if tensor.digest is not None and tensor.numel
        if not any(placement.startswith("P") for placement in tensor.placements or ())  # parts of a sum
    )
    for ranks in ranks_by(held).values():
        if len(ranks) > 1:
            yield [(rank, by_rank[rank]) for rank in ranks]


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
        has = "has" if s else "have"
        agree = f"{has} the {source}'s values" if known else f"hold{s} the same elements"
        actual = f"bits that differ from those of {name_ranks(agreeing)}, which {agree}"
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
    return explain_pattern(tensor, wrong, odd=True) if wrong and common_pattern(wrong)[0] else {}


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


@values_check(
    promise="every parameter shard is bit-identical to the reference's slice (within rounding if the loader casts)",
    after=[*BASIC, "replicas_equal"],
    why="A model with weights that were not loaded, or loaded into the wrong place, still trains.",
    cause="the weight was not loaded (it still has its initialisation), was loaded from another tensor or checkpoint, "
    "or was initialised again after loading",
    remedy="load by name, into the parameters themselves (.to() may return a copy), and fail on missing and unexpected "
    f"keys; initialise before loading, never after; {IF_DRAWN}",
    references=["NVIDIA-NeMo/Automodel#3597", "huggingface/transformers#46620", "speculators 0.4.0"],
)
def params_equal_reference(view: View) -> Iterable[Finding]:
    # frozen_weights_equal_verifier judges frozen tensors.
    names = view.names("parameter", but=frozen_names(view))
    yield from _missing(view, "parameter")
    yield from _differences(view, names, view.evidence.values)


@values_check(
    promise="every buffer, persistent or not, equals the reference's buffer on every rank",
    after=[*BASIC, "replicas_equal"],
    why="Wrong rotary frequencies or masks still give a finite loss.",
    cause="the buffer was computed from other settings than the reference's or in another dtype, or was overwritten",
    remedy="compute it on every rank as the module's __init__ does, from the reference's config and in its dtype",
    references=[
        "huggingface/transformers#45902",
        "huggingface/transformers#48892",
        "hiyouga/LLaMA-Factory#10236",
        "hiyouga/LLaMA-Factory#10820",
        "LLaMA-Factory 0.9.5",
    ],
)
def buffers_equal_reference(view: View) -> Iterable[Finding]:
    names = view.names("buffer", but=frozen_names(view))
    yield from _missing(view, "buffer")
    yield from _differences(view, names, view.evidence.values)
    if not view.reference.complete:
        known = {comparison.name for rank in view.evidence.values or () for comparison in rank}
        transient = {t.name for rank in view.evidence.inventory for t in rank.tensors if not t.persistent}
        unknown = [name for name in names if name in transient - known]
        if unknown:
            raise NotJudged(
                f"a checkpoint does not contain non-persistent buffers ({len(unknown)} here, first: {unknown[0]}), so "
                "their values cannot be compared; declare Subject(reference=<callable>)"
            )


@values_check(
    promise="frozen weights equal the verifier's tensors that they were copied from",
    needs=["inventory", "verifier"],
    after=[*BASIC, "replicas_equal"],
    why="A frozen weight is never trained, so an error in loading it is permanent.",
    cause="it was initialised again after loading, or never loaded",
    remedy="load frozen weights last, and do not call init_weights() on modules that are frozen or already loaded",
    references=["vllm-project/speculators#314", "vllm-project/speculators#452"],
)
def frozen_weights_equal_verifier(view: View) -> Iterable[Finding]:
    sources = view.evidence.subject.frozen
    names = view.names("parameter", "buffer", only=frozen_names(view))
    yield from _differences(view, names, view.evidence.verifier, VERIFIER, sources)


def frozen_names(view: View) -> set[str]:
    """Return the tensors to compare with the verifier: those declared frozen, otherwise those the reference freezes.

    Empty if the reference serves as the verifier and that comparison is unavailable, or if it is not selected:
    ``params_equal_reference`` and ``buffers_equal_reference`` then compare frozen tensors too.
    """
    subject, reference = view.evidence.subject, view.evidence.reference
    if "frozen_weights_equal_verifier" not in view.selection:
        return set()
    if "verifier" in view.evidence.unavailable and "verifier" not in subject.declared:
        return set()
    return set(frozen_sources(subject, reference))


def _missing(view: View, kind: str) -> Iterator[Finding]:
    """Report tensors of the reference that ranks do not have, unless a more basic check is selected that does."""
    inventory = view.evidence.inventory
    for name, tensor in view.reference_inventory.by_name.items():
        ranks = tuple(rank.rank for rank in inventory if name not in rank.by_name)
        basic = "names_match_reference" if len(ranks) == len(inventory) else "same_manifest_on_every_rank"
        of_kind = tensor.kind == kind or (tensor.kind == "tensor" and kind == "parameter")  # "tensor": a checkpoint's
        if ranks and of_kind and basic not in view.selection and name not in view.on_some_ranks:
            yield Finding(name, ranks, "missing", f"a {kind}, as in the reference", **_ABSENT)


def _differences(
    view: View,
    names: Collection[str],
    comparisons: tuple[tuple[Comparison, ...], ...] | None,
    source: str = REFERENCE,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Finding]:
    """Report the tensors that differ from ``source``; ``renamed`` maps names to their names there."""
    # Tensors on meta are left out before if a check that reports them is selected.
    on_meta = {n: tuple(rank for rank, tensor in view.holders(n) if tensor.on_meta) for n in names}
    for name in [name for name in names if on_meta[name]]:
        yield Finding(name, on_meta[name], "no values: it is on meta", f"the values of {source}", **_ABSENT)
    unusable = _unusable(view, source)
    unstable: list[str] = []
    found, subject = view.comparisons(comparisons, names), view.evidence.subject
    drawn = {name: found.get(name, []) for name in names if name in subject.drawn}
    for name, pairs in drawn.items():
        infinite = tuple(rank for rank, c in pairs if c.measure is not None and not math.isfinite(c.measure.actual))
        if infinite:  # finite values need not equal the reference's
            actual = "values that are infinite or NaN"
            yield Finding(name, infinite, actual, "finite: it is declared drawn", **_DRAWN_WRONG)
        if infinite or name not in subject.drawn_rows:
            found.pop(name, None)
    wrong = {name: [(rank, c) for rank, c in pairs if not c.equal] for name, pairs in found.items()}
    owners = _names_by_digest(view, [name for name, cases in wrong.items() if cases])
    elsewhere = {name: other for name, cases in wrong.items() if (other := _held_elsewhere(view, owners, name, cases))}
    others = elsewhere | find_swapped(wrong)
    for name, pairs in found.items():
        original = renamed.get(name, name)
        if original in unusable:
            unstable.append(original)
        else:
            compared_with = source if original == name else f"{source}'s {original}"
            yield from _difference(view, name, pairs, compared_with, others.get(name, ""))
    if unstable:
        raise Unjudgeable(
            f"the reference is not reproducible: it {unusable[unstable[0]]} ({first_of(unstable)}); make it build the "
            "same model every time"
        )
    not_compared = [
        name
        for name in names
        if name not in {*found, *drawn} and not on_meta[name]
        if source == VERIFIER or name in view.reference_inventory.by_name
    ]
    if not_compared:
        raise PartlyJudged(
            f"{first_of(not_compared)} could not be compared: torch cannot slice it (quantized, sparse, nested, or a "
            "tensor subclass)"
        )


def _unusable(view: View, source: str) -> dict[str, str]:
    """Return the tensors of the reference that nothing can be compared with, mapped to the reason."""
    reference = view.evidence.reference
    if reference is None or (source == VERIFIER and "verifier" in view.evidence.subject.declared):
        return {}
    unusable = dict.fromkeys(reference.unstable, "has other bits each time it is built")
    return unusable | dict.fromkeys(reference.uninitialised, "never writes the tensor")


def _names_by_digest(view: View, wrong: Collection[str]) -> dict[str, set[str]]:
    """Return which tensors have these bits in the reference, or on some rank if they are right there.

    Tensors that the same mistake made wrong, such as the rotary frequencies of all blocks, may have equal bits.
    """
    reference = view.evidence.reference
    owners: dict[str, set[str]] = {}
    if not wrong:
        return owners
    for inventory in (*view.evidence.inventory, *([reference.inventory] if reference is not None else [])):
        for tensor in inventory.tensors:
            right = tensor.name not in wrong or (reference is not None and inventory is reference.inventory)
            if tensor.digest is not None and right:
                owners.setdefault(tensor.digest, set()).add(tensor.name)
    return owners


def _held_elsewhere(view: View, owners: Mapping[str, set[str]], name: str, wrong: Cases) -> str:
    """Return the one other tensor that has on some rank, or in the reference, the bits that ``name`` has; else "".

    Constant tensors, such as zeros or the weights of norms after their creation, are like others by chance.
    """
    if any(map(_is_constant, (comparison for _, comparison in wrong))):
        return ""
    tied = view.evidence.inventory[0].tied_with.get(name, frozenset())
    held = (view.evidence.inventory[rank].by_name[name].digest for rank, _ in wrong)
    others = set[str]().union(*(owners.get(digest or "", ()) for digest in held)) - {name, *tied}
    return others.pop() if len(others) == 1 else ""


def _is_constant(comparison: Comparison) -> bool:
    """Return whether all elements are zero, or as large as the first that differs."""
    measure, first = comparison.measure, comparison.actual
    if measure is None or first is None:
        return False
    return not measure.actual or math.isclose(measure.actual, abs(first) * math.sqrt(measure.elements), rel_tol=1e-6)


def _difference(view: View, name: str, pairs: Cases, source: str, owner: str) -> Iterator[Finding]:
    """Report the ranks that differ in one tensor, which may hold the values of the ``owner``, another one."""
    tensor = view.evidence.inventory[pairs[0][0]].by_name[name]
    rounding = ROUNDING.get(tensor.dtype, 0.0)
    off = [(rank, c) for rank, c in pairs if not c.equal]
    wrong = [(rank, c) for rank, c in off if not (c.cast and c.problem is None and c.max_rel <= rounding)]
    zeros = [rank for rank, c in wrong if is_zero(c)]
    by_problem = grouped(((c.problem, c.should_be, rank in zeros), (rank, c)) for rank, c in wrong)
    for (problem, should_be, zero), cases in by_problem.items():
        ranks = tuple(rank for rank, _ in cases)
        if problem is not None:
            adapted = cases[0][1].shape is None and tensor.sharded_by
            yield Finding(name, ranks, problem, should_be, **(_ADAPTED if adapted else _SHAPE))
        else:
            # The frequencies of another block may have been rounded as well.
            other = "" if common_pattern(cases)[0] in ("zeros", "rounded", "times", "plus") else owner
            detail = describe_difference(cases, tensor) + f"; these are the values of {other}" * bool(other)
            # Ranks where nothing was written say nothing about whether the other wrong ranks are exceptions.
            comparable = pairs if zero else [(rank, c) for rank, c in pairs if rank not in zeros]
            kept = name in view.evidence.subject.drawn_rows
            odd = len(cases) < len([c for _, c in comparable if c.elements])
            explanation = OTHER_TENSOR if other else explain_pattern(tensor, cases, odd)
            compared_with = source.replace(REFERENCE, WHOLE) if is_whole(tensor) else source
            actual = f"values{' outside the drawn rows' * kept} that differ from {compared_with}"
            yield Finding(name, ranks, actual, "", detail, **(_NOT_KEPT if kept and not other else explanation))


_ABSENT: Explanation = {
    "cause": "it was not created or not materialised, so nothing was loaded into it",
    "remedy": "select names_match_reference, no_meta_params and no_meta_buffers as well, which say more",
}
_NOT_KEPT: Explanation = {
    "cause": "rows that are not declared drawn were drawn as well: the tensor was resized after the old rows were "
    "lost, or drawn as a whole",
    "remedy": "copy the old rows from the checkpoint into the resized tensor and draw only the others; or declare the "
    "rows that are drawn: Subject(drawn={name: slice})",
}
_DRAWN_WRONG: Explanation = {
    "cause": "it was drawn from a distribution with wrong limits, scaled by a size that is zero on this rank or on "
    "meta, or overwritten after the draw",
    "remedy": "take the sizes from the whole parameter, not from the local shard, and initialise after to_empty()",
}
_SHAPE: Explanation = {
    "cause": "the verifier is another model, has the tensor under another name, or has a vocabulary of another size",
    "remedy": "copy the frozen weights from the model they belong to, or map the names: "
    "Subject(frozen={name: name in the verifier})",
}
_ADAPTED: Explanation = {
    "cause": "the adapter describes another part of the tensor than the rank holds",
    "remedy": "compare the start, ranges and shape of the Part with the part that the rank holds",
}


def describe_difference(cases: list[tuple[int, Comparison]], tensor: TensorFacts) -> str:
    """Describe the largest difference among the ranks, and where it first occurs."""
    rank, worst = max(cases, key=lambda case: case[1].max_abs)
    if not worst.index:
        return f"{worst.actual:.6g} on rank {rank}, but should be {worst.expected:.6g}"
    index = ", ".join(map(str, worst.index))
    differing = "all" if worst.differing == worst.elements else f"{worst.differing} of {worst.elements}"
    what = "tensor" if is_whole(tensor) else "shard"
    return (
        f"{differing} elements of rank {rank}'s {what} differ, first at [{index}]: {worst.actual:.6g}, but should be "
        f"{worst.expected:.6g}; largest difference {worst.max_abs:.3g}"
    )
