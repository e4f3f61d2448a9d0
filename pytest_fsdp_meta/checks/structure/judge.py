"""Check names, shapes, dtypes, trainability and attributes of parameters and buffers, on every rank."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from math import prod
from operator import gt, ne

from pytest_fsdp_meta.checks.sharding.facts import holding_stages
from pytest_fsdp_meta.evidence import TensorFacts, replicates, splits_model, splits_stages
from pytest_fsdp_meta.judging.findings import Explanation, Finding, Mismatch, either
from pytest_fsdp_meta.judging.registry import structure_check
from pytest_fsdp_meta.judging.view import NotDeclared, NotJudged, View, majority, ranks_by
from pytest_fsdp_meta.text import joined_runs, name_ranks, without_numbers

MANIFEST = "same_manifest_on_every_rank"
NAMES = "names_match_reference"
SHAPES = "shapes_match_reference"


@structure_check(
    promise="names, shapes, dtypes, requires_grad and order of parameters and buffers agree on all ranks",
    needs=["inventory"],
    why="FSDP matches collectives by their order: ranks that disagree exchange the wrong bytes or hang.",
    cause="the loader depends on the rank when it builds, casts or freezes the model",
    remedy="build, cast and freeze the model alike on every rank; only the reading of data may depend on the rank",
    references=["vllm-project/speculators#776", "pytorch/pytorch#73547"],
    simulated="too",
)
def same_manifest_on_every_rank(view: View) -> Iterable[Finding]:
    inventories = view.evidence.inventory
    comparable = True
    for name, facts in view.tensors("parameter", "buffer"):
        presence = [(rank.rank, name in rank.by_name) for rank in inventories if name not in view.on_some_ranks]
        usual = majority(presence) if presence else True
        for present, ranks in ranks_by(presence).items():
            if present != usual:
                others = name_ranks(rank for rank, other in presence if other == usual)
                actual, expected = ("present", "absent") if present else ("missing", "present")
                yield Finding(name, ranks, actual, f"{expected}, as on {others}")
        yield from _on_several_stages(view, name, facts)
        kinds = {tensor.kind for _, tensor in facts}
        comparable = comparable and len({present for _, present in presence}) <= len(kinds) == 1
        yield from _disagreements(view, facts)
    if comparable:
        yield from _disorder(view)


def _on_several_stages(view: View, name: str, facts: list[tuple[int, TensorFacts]]) -> Iterator[Finding]:
    """Yield a finding for a parameter of several stages, which the model would use twice, unless it is tied."""
    subject, inventory = view.evidence.subject, view.evidence.inventory
    stages = holding_stages(name, subject.stages, inventory)
    if len(stages) < 2 or facts[0][1].kind != "parameter" or name in subject.on_some_ranks:
        return
    if any(name in group for group in subject.tied) or any(name in rank.tied_with for rank in inventory):
        return
    yield Finding(
        name,
        tuple(rank for rank, _ in facts),
        f"on stages {joined_runs(stages)} of the pipeline",
        "on one of them",
        cause="the ranges of layers that the stages build overlap",
        remedy="give each layer to one stage; declare what stages share on purpose with Subject(tied=...) or "
        "Subject(on_some_ranks=...)",
    )


def _disorder(view: View) -> Iterator[Finding]:
    some = view.on_some_ranks
    orders = [
        (rank.rank, tuple(t.name for t in rank.tensors if t.name not in some)) for rank in view.evidence.inventory
    ]
    usual = majority(orders)
    for order, ranks in ranks_by(orders).items():
        if order != usual:
            first, expected = next((a, b) for a, b in zip(order, usual, strict=True) if a != b)
            others = name_ranks(rank for rank, other in orders if other == usual)
            detail = f"first difference: {first} in place of {expected}"
            yield Finding(
                None, ranks, "parameters and buffers in a different order", f"in the order of {others}", detail
            )


def _disagreements(view: View, facts: list[tuple[int, TensorFacts]]) -> Iterator[Finding]:
    for aspect in ("kind", "shape", "dtype", "requires_grad", "persistent"):
        values = [(rank, getattr(tensor, aspect)) for rank, tensor in facts]
        usual = majority(values)
        for value, ranks in ranks_by(values).items():
            if value != usual:
                others = name_ranks(rank for rank, other in values if other == usual)
                by_hand = _explain_uneven_cut(view, facts[0][1], value, usual) if aspect == "shape" else {}
                yield Finding(facts[0][1].name, ranks, f"{aspect} {value}", f"{usual}, as on {others}", **by_hand)


def _explain_uneven_cut(view: View, tensor: TensorFacts, shape: tuple[int, ...], other: tuple[int, ...]) -> Explanation:
    """Explain a parameter whose size along one dim differs between ranks, over a dimension that splits the model."""
    dims = [dim for dim in _dims_beyond(view, [tensor]) if splits_model(dim)]
    one = len(shape) == len(other) and sum(map(ne, shape, other)) == 1
    return _by_hand(view, dims) if one and dims and tensor.kind == "parameter" and not tensor.sharded_by else {}


def _dims_beyond(view: View, tensors: Iterable[TensorFacts]) -> dict[str, int]:
    """Return the mesh dimensions that may divide the tensors without being in the mesh of any of them."""
    world, meshes = view.evidence.world, [t.mesh for t in tensors if t.mesh is not None]
    known = {dim for mesh in meshes for dim in mesh.dims}
    room = world.size // max((prod(mesh.shape) for mesh in meshes), default=1)
    return {
        name: size
        for name, size in world.mesh
        if 1 < size <= room and name not in known and not replicates(name) and not splits_stages(name)
    }


def _by_hand(view: View, dims: Iterable[str]) -> Explanation:
    sizes = dict(view.evidence.world.mesh)
    where = " or ".join(f"{dim}={sizes[dim]}" for dim in dims)
    unknown = "nothing says which part of the whole it is"
    if "adapter" in view.evidence.subject.declared:
        unknown = "Subject(adapter=...) returns None for it"
    return {
        "cause": f"each rank of {where} holds a part that was cut by hand, or the local shard of a DTensor, and "
        f"{unknown}",
        "remedy": "declare Subject(adapter=...), a function that returns pytest_fsdp_meta.Part.block(tensor, shape, "
        "start) for such a tensor (docs/hand-written-tp.md); or keep the DTensor",
    }


@structure_check(
    promise="no parameters or buffers are missing or extra",
    after=[MANIFEST],
    why="An extra bias is trained and saved; a missing one is silently left out of the forward.",
    cause="the sharded model and the reference are built from different configs, or a wrapper renames the tensors",
    remedy="build both from the same config, and return the module inside a wrapper that renames its tensors",
    references=["NVIDIA/TransformerEngine#2713", "pytorch/pytorch#118119"],
    simulated="too",
)
def names_match_reference(view: View) -> Iterable[Finding]:
    ranks = tuple(rank.rank for rank in view.evidence.inventory)
    # A tensor that only some ranks lack is reported by same_manifest_on_every_rank.
    ours = {t.name: t for rank in view.evidence.inventory for t in rank.tensors}
    reference = view.reference_inventory.by_name
    ties = (*view.evidence.inventory[0].ties(), *view.evidence.subject.tied)
    stored_once = {name for group in ties if any(other in reference for other in group) for name in group}
    extra = [name for name in ours if name not in reference]
    if not view.reference.complete:  # checkpoints omit non-persistent buffers and drawn weights, and store ties once
        known = {*stored_once, *view.evidence.subject.drawn}
        extra = [name for name in extra if ours[name].persistent and name not in known]
    missing = [name for name in reference if name not in ours]
    prefix = _common_prefix(extra, missing) if len(missing) == len(reference) else ""  # a wrapper renames every tensor
    if prefix:
        yield Finding(
            None,
            ranks,
            f"names have the prefix {prefix!r} ({extra[0]})",
            f"named as in the reference ({missing[0]})",
            cause="the loader returns a wrapper instead of the model inside it",
            remedy=f"return the inner module, which is .{prefix.removesuffix('.')} of the returned one",
            condemns=(*extra, *missing),
        )
        return
    for name in filter(view.judgeable, extra):
        actual = f"present (a {ours[name].kind})"
        yield Finding(name, ranks, actual, "absent, as in the reference", **_explain_bias(name, ours, reference))
    numbered = {without_numbers(name) for name in view.on_some_ranks}
    for name in filter(view.judgeable, missing):
        expected = f"a {reference[name].kind}, as in the reference"
        explanation = _explain_bias(name, ours, reference) or (_IN_NO_STAGE if view.evidence.subject.stages else {})
        if not explanation and without_numbers(name) in numbered:
            explanation = _GIVEN_TO_NONE
        yield Finding(name, ranks, "missing", expected, **explanation)
    if view.reference.complete:  # checkpoints do not distinguish parameters from buffers
        for name, facts in view.tensors("parameter", "buffer"):
            if name in reference:
                yield from view.findings_for(name, [(rank, _compare_kind(t, reference[name])) for rank, t in facts])


def _compare_kind(tensor: TensorFacts, reference: TensorFacts) -> Mismatch | None:
    if tensor.kind != reference.kind:
        return Mismatch(
            f"a {tensor.kind}",
            f"a {reference.kind}, as in the reference",
            "it was re-created as the other kind; the optimizer and FSDP see parameters only",
            "re-create parameters as torch.nn.Parameter and buffers with register_buffer()",
        )
    if tensor.persistent != reference.persistent:
        return Mismatch(
            f"a {_persistence(tensor)} buffer",
            f"{_persistence(reference)}, as in the reference",
            "it was registered again with a different persistent=..., which decides whether checkpoints contain it",
            f"call register_buffer(name, tensor, persistent={reference.persistent})",
        )
    return None


def _persistence(tensor: TensorFacts) -> str:
    return "persistent" if tensor.persistent else "non-persistent"


def _common_prefix(extra: list[str], missing: list[str]) -> str:
    """Return the prefix that turns the missing names into exactly the extra ones; empty if there is none."""
    if not extra or len(extra) != len(missing) or not extra[0].endswith(missing[0]):
        return ""
    prefix = extra[0].removesuffix(missing[0])
    return prefix if prefix.endswith(".") and {prefix + name for name in missing} == set(extra) else ""


def _explain_bias(name: str, ours: Container[str], reference: Container[str]) -> Explanation:
    """Explain an extra or missing bias; empty if the whole module is extra or missing."""
    weight = name.removesuffix("bias") + "weight"
    return _BIAS if name.endswith("bias") and weight in ours and weight in reference else {}


_IN_NO_STAGE: Explanation = {
    "cause": "no stage of the pipeline builds it: the ranges of layers leave it out, or end before it",
    "remedy": "let the first layer of each stage follow the last one of the stage before",
}
_GIVEN_TO_NONE: Explanation = {
    "cause": "parts of this kind are given to the ranks by their number, and no rank is given this one",
    "remedy": "give each number to one rank, also where the ranks do not divide them evenly",
}
_BIAS: Explanation = {
    "cause": "a bias that the config disables is registered as a parameter anyway, or the reverse",
    "remedy": "call register_parameter(name, None) for a disabled bias",
}


_SHAPES = either(
    "",
    "the model is built from another config than the reference, or its vocabulary was resized",
    "the placements do not fit the tensor, such as those of a 2-D weight for a 3-D stack of experts",
    "choose placements for each parameter's own dims, and pass the global shape to DTensor.from_local; if one rank has "
    "this shape too, compare the configs",
)


@structure_check(
    promise="every parameter and buffer has the same global shape as in the reference",
    after=[MANIFEST, NAMES],
    why="DTensor.from_local does not validate placements: wrong ones silently change the global shape.",
    cause=_SHAPES["cause"],
    remedy=_SHAPES["remedy"],
    references=["NVIDIA/TransformerEngine#2713"],
    simulated="too",
)
def shapes_match_reference(view: View) -> Iterable[Finding]:
    reference = view.reference_inventory.by_name
    tensors = list(view.tensors("parameter", "buffer", only=reference))
    by_hand = _explain_layout_by_hand(view, [(facts[0][1], reference[name].shape) for name, facts in tensors])
    for name, facts in tensors:
        pairs = [(rank, _compare_shape(t, reference[name].shape, by_hand)) for rank, t in facts]
        yield from view.findings_for(name, pairs)


def _explain_layout_by_hand(view: View, tensors: Sequence[tuple[TensorFacts, tuple[int, ...]]]) -> Explanation:
    """Explain wrong shapes that are all parts of the reference's, at least one an exact fraction; else return {}.

    A model of another width is smaller in more dims than ranks divide, and DTensors know the dimensions of their mesh.
    """
    wrong = [(tensor, shape) for tensor, shape in tensors if tensor.shape != shape]
    dims = _dims_beyond(view, (tensor for tensor, _ in wrong))
    cuts = [_cuts(tensor.shape, shape) for tensor, shape in wrong]
    if any(t.sharded_by for t, _ in wrong) or not all(1 <= len(cut) <= len(dims) for cut in cuts):
        return {}
    exact = [(whole // part) for cut in cuts for part, whole in cut if part and not whole % part]
    cutting = [dim for dim, size in dims.items() if any(not size % parts for parts in exact)]
    return _by_hand(view, cutting) if cutting else {}


def _cuts(shape: tuple[int, ...], whole: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (size, whole size) of each dim that is smaller than the whole's; [] if it cannot be a part of that."""
    if len(shape) != len(whole) or any(map(gt, shape, whole)):
        return []
    return [(part, size) for part, size in zip(shape, whole, strict=True) if part < size]


def _compare_shape(tensor: TensorFacts, shape: tuple[int, ...], by_hand: Explanation) -> Mismatch | None:
    if tensor.shape == shape:
        return None
    found = Mismatch(f"shape {tensor.shape}", f"{shape}, as in the reference")
    if tensor.mesh is not None and tensor.local_shape == shape:
        return found._replace(**_WHOLE_AS_PART)
    if tensor.managed is not False:
        return found._replace(**(by_hand or _SHAPES))
    cause = "the DTensor that fully_shard() created was replaced by another parameter, perhaps by its local shard"
    return found._replace(cause=cause, remedy="write into the DTensor, or re-create parameters before fully_shard()")


_WHOLE_AS_PART: Explanation = {
    "cause": "each rank passed the whole tensor to DTensor.from_local as if it were the rank's part",
    "remedy": "pass the rank's part to DTensor.from_local, or the placement Replicate()",
}


@structure_check(
    promise="every parameter and buffer has the same dtype as in the reference",
    after=[MANIFEST, NAMES, SHAPES],
    why="Norms, routers and rotary frequencies that are rounded to bfloat16 silently cost accuracy.",
    cause="a cast of the model (model.to(dtype), a default dtype, torch_dtype=...) or of this tensor changed what must "
    "keep its dtype",
    remedy="cast parameters by name; if this is intended, cast the reference the same way: "
    "Subject(reference=lambda: build().to(torch.bfloat16))",
    references=["huggingface/accelerate#3985", "vllm-project/speculators#668", "NVIDIA-NeMo/Automodel#2549"],
    simulated="too",
)
def dtypes_match_reference(view: View) -> Iterable[Finding]:
    reference = view.reference_inventory.by_name
    computes_in = set(view.evidence.inventory[0].computes_in)
    for name, facts in view.tensors("parameter", "buffer"):
        if name in reference:
            expected = reference[name].dtype
            masters = {t.dtype for _, t in facts} == computes_in and facts[0][1].kind == "parameter"
            explanation = _NO_MASTERS if masters else Explanation()
            pairs = [
                (rank, None if t.dtype == expected else Mismatch(t.dtype, expected, **explanation)) for rank, t in facts
            ]
            yield from view.findings_for(name, pairs)


_NO_MASTERS: Explanation = {
    "cause": "the weights have the dtype in which the mixed-precision policy computes: they kept that of the "
    "checkpoint or config, and nothing cast them to the finer one in which they should be updated",
    "remedy": "cast the model to the dtype of its master weights before fully_shard(); without masters on purpose, "
    "cast the reference the same way: Subject(reference=lambda: build().to(torch.bfloat16))",
}


@structure_check(
    promise="frozen parameters stay frozen and trainable parameters stay trainable",
    needs=["inventory"],
    fields=["reference or frozen"],
    uses=["reference"],
    after=[MANIFEST, NAMES, SHAPES],
    why="A frozen verifier that is trained drifts unnoticed; a trainable head that is frozen never learns.",
    cause="requires_grad was set before the parameters were re-created (to_empty, sharding, assign=True), or never",
    remedy="set requires_grad after the last step that creates new Parameter objects",
    references=["vllm-project/speculators#593", "pytorch/torchtitan#4593"],
    simulated="too",
)
def requires_grad_matches_reference(view: View) -> Iterable[Finding]:
    parameters = {t.name for rank in view.evidence.inventory for t in rank.tensors if t.kind == "parameter"}
    declared = parameters & set(view.evidence.subject.frozen)
    reference = view.evidence.reference if declared else view.reference
    known = reference.inventory.by_name if reference is not None and reference.complete else None
    if known is None and not declared:
        raise NotJudged("a checkpoint does not record what is trainable; declare Subject(reference=<callable>)")
    for name, facts in view.tensors("parameter", only=declared if known is None else None):
        if name in declared:
            thawed = Mismatch("trainable", "frozen, as declared")
            yield from view.findings_for(name, [(rank, thawed if t.requires_grad else None) for rank, t in facts])
        elif known is not None and name in known:
            yield from view.findings_for(
                name, [(rank, _trainability(t, known[name].requires_grad)) for rank, t in facts]
            )


def _trainability(tensor: TensorFacts, expected: bool) -> Mismatch | None:
    if tensor.requires_grad == expected:
        return None
    if expected:
        return Mismatch(
            "frozen",
            "trainable",
            "the loader freezes it, perhaps by a pattern that matches too much, or loading the reference unfreezes it",
            "narrow the pattern; if intended, declare Subject(frozen=...) or freeze it in the reference as well",
        )
    return Mismatch("trainable", "frozen")


@structure_check(
    promise="parameters keep the custom attributes that Subject(kept_attributes=...) names",
    fields=["kept_attributes"],
    after=[MANIFEST, NAMES, SHAPES],
    why="Code that reads the attribute (what to shard, which gradients to reduce) silently does the opposite.",
    cause="the parameter was re-created (to_empty, fully_shard, assign=True), which drops its attributes",
    remedy="set the attributes again after the last step that creates new Parameter objects; read them only after that",
    references=["NVIDIA/Megatron-LM fsdp_no_shard", "NVIDIA/TransformerEngine#1771"],
    simulated="too",
)
def parameter_attributes_kept(view: View) -> Iterable[Finding]:
    kept = view.evidence.subject.kept_attributes
    if not kept:
        raise NotDeclared("kept_attributes")
    if not view.reference.complete:
        raise NotJudged("a checkpoint does not record attributes; declare Subject(reference=<callable>)")
    reference = view.reference_inventory.by_name
    unknown = [key for key in kept if not any(key in tensor.attributes for tensor in reference.values())]
    for name, facts in view.tensors("parameter", only=reference):
        for key, expected in reference[name].attributes.items():
            yield from view.findings_for(name, [(rank, _lost(tensor, key, expected)) for rank, tensor in facts])
    if unknown:
        raise NotJudged(
            f"no parameter of the reference has the attribute {unknown[0]!r}, so it is unknown which should keep it; "
            "set it on the reference's parameters as well"
        )


def _lost(tensor: TensorFacts, key: str, expected: str) -> Mismatch | None:
    if tensor.attributes.get(key) == expected:
        return None
    actual = f"{key}={tensor.attributes[key]}" if key in tensor.attributes else f"without the attribute {key}"
    return Mismatch(actual, f"{key}={expected}, as in the reference")
