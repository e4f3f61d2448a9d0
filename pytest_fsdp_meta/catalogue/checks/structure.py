"""Structure: the model has the names, shapes, dtypes and trainability that it should have, on every rank alike."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from pytest_fsdp_meta.catalogue.findings import Explanation, Finding, Mismatch
from pytest_fsdp_meta.catalogue.registry import check
from pytest_fsdp_meta.catalogue.view import NotDeclared, NotJudged, View, majority, ranks_by
from pytest_fsdp_meta.evidence import TensorFacts
from pytest_fsdp_meta.text import name_ranks

MANIFEST = "same_manifest_on_every_rank"
NAMES = "names_match_reference"
SHAPES = "shapes_match_reference"


@check(
    promise="names, shapes, dtypes, requires_grad and order of parameters and buffers agree on all ranks",
    family="structure",
    needs=["inventory"],
    why="FSDP pairs collectives by order: ranks that disagree exchange the wrong bytes, or hang.",
    cause="the loader branches on the rank while it builds, casts or freezes the model",
    remedy="do on every rank what is done on rank 0, and let only the reading of bytes depend on the rank",
    references=["vllm-project/speculators#776", "pytorch/pytorch#73547"],
)
def same_manifest_on_every_rank(view: View) -> Iterable[Finding]:
    inventories = view.evidence.inventory
    comparable = True
    for name, facts in view.tensors("parameter", "buffer"):
        there = [(rank.rank, name in rank.by_name) for rank in inventories]
        usual = majority(there)
        for has, ranks in ranks_by(there).items():
            if has != usual:
                others = name_ranks(rank for rank, other in there if other == usual)
                words = ("there", "absent") if has else ("missing", "there")
                yield Finding(name, ranks, words[0], f"{words[1]}, as on {others}")
        comparable = comparable and len({has for _, has in there}) == len({tensor.kind for _, tensor in facts}) == 1
        yield from _disagreements(facts)
    if comparable:
        yield from _disorder(view)


def _disorder(view: View) -> Iterator[Finding]:
    told = [(rank.rank, tuple(tensor.name for tensor in rank.tensors)) for rank in view.evidence.inventory]
    usual = majority(told)
    for order, ranks in ranks_by(told).items():
        if order != usual:
            first, should = next((a, b) for a, b in zip(order, usual, strict=True) if a != b)
            detail = f"the first out of place is {first}, where other ranks have {should}"
            yield Finding(None, ranks, "another order of names", "the order of the other ranks", detail)


def _disagreements(facts: list[tuple[int, TensorFacts]]) -> Iterator[Finding]:
    for aspect in ("kind", "shape", "dtype", "requires_grad", "persistent"):
        told = [(rank, getattr(tensor, aspect)) for rank, tensor in facts]
        usual = majority(told)
        for value, ranks in ranks_by(told).items():
            if value != usual:
                others = name_ranks(rank for rank, other in told if other == usual)
                yield Finding(facts[0][1].name, ranks, f"{aspect} {value}", f"{usual}, as on {others}")


@check(
    promise="no parameter or buffer too many or too few",
    family="structure",
    needs=["inventory", "reference"],
    after=[MANIFEST],
    why="A bias that should not exist is trained and saved; one that is missing is silently left out of the forward.",
    cause="the sharded model was built from another config than the reference, or a wrapper renames its tensors",
    remedy="build both from one config and let wrappers be removed from names before they are compared",
    references=["NVIDIA/TransformerEngine#2713", "pytorch/pytorch#118119"],
)
def names_match_reference(view: View) -> Iterable[Finding]:
    ranks = tuple(rank.rank for rank in view.evidence.inventory)
    # Seen over all ranks: one that is missing on some of them is the manifest's affair.
    ours = {t.name: t for rank in view.evidence.inventory for t in rank.tensors}
    truth = view.truth.by_name
    ties = (*view.evidence.inventory[0].ties(), *view.evidence.subject.tied)
    stored_once = {name for group in ties if any(twin in truth for twin in group) for name in group}
    extra = [name for name in ours if name not in truth]
    if not view.reference.complete:  # a checkpoint holds neither transient buffers nor a tied weight twice
        extra = [name for name in extra if ours[name].persistent and name not in stored_once]
    missing = [name for name in truth if name not in ours]
    prefix = _common_prefix(extra, missing) if len(missing) == len(truth) else ""  # a wrapper renames every tensor
    if prefix:
        yield Finding(
            None,
            ranks,
            f"names begin with {prefix!r} ({extra[0]})",
            f"those of the reference ({missing[0]})",
            cause="a wrapper is returned in place of the model that it wraps",
            remedy="return the wrapped model itself, or strip the prefix from its names",
            condemns=(*extra, *missing),
        )
        return
    for name in filter(view.judgeable, extra):
        there = f"there (a {ours[name].kind})"
        yield Finding(name, ranks, there, "absent, as in the reference", **_about_bias(name, ours, truth))
    for name in filter(view.judgeable, missing):
        wanted = f"a {truth[name].kind}, as in the reference"
        yield Finding(name, ranks, "missing", wanted, **_about_bias(name, ours, truth))
    if view.reference.complete:  # a checkpoint does not tell parameters from buffers
        for name, facts in view.tensors("parameter", "buffer"):
            if name in truth:
                yield from view.broken(name, [(rank, _recast(tensor, truth[name])) for rank, tensor in facts])


def _recast(tensor: TensorFacts, truth: TensorFacts) -> Mismatch | None:
    if tensor.kind != truth.kind:
        return Mismatch(
            f"a {tensor.kind}",
            f"a {truth.kind}, as in the reference",
            "materialising or loading re-created it as the other kind: an optimizer and FSDP see parameters only",
            "re-create a parameter as torch.nn.Parameter, a buffer by register_buffer",
        )
    if tensor.persistent != truth.persistent:
        return Mismatch(
            f"a {_lasting(tensor)} buffer",
            f"a {_lasting(truth)} one, as in the reference",
            "it was registered again with another persistent=...: checkpoints have it or not by that alone",
            f"call register_buffer(name, tensor, persistent={truth.persistent})",
        )
    return None


def _lasting(tensor: TensorFacts) -> str:
    return "persistent" if tensor.persistent else "non-persistent"


def _common_prefix(extra: list[str], missing: list[str]) -> str:
    """The prefix that, put before every missing name, gives exactly the extra ones; empty when there is none."""
    if not extra or len(extra) != len(missing) or not extra[0].endswith(missing[0]):
        return ""
    prefix = extra[0].removesuffix(missing[0])
    return prefix if prefix.endswith(".") and {prefix + name for name in missing} == set(extra) else ""


def _about_bias(name: str, ours: Container[str], truth: Container[str]) -> Explanation:
    """Where the module is on both sides: else it is the module that is too many or too few."""
    weight = name.removesuffix("bias") + "weight"
    return _BIAS if name.endswith("bias") and weight in ours and weight in truth else {}


_BIAS: Explanation = {
    "cause": "a bias that the config disables is registered as a parameter all the same, or the reverse",
    "remedy": "call register_parameter(name, None) for a disabled bias",
}


@check(
    promise="every parameter and buffer has the global shape that it has in the reference",
    family="structure",
    needs=["inventory", "reference"],
    after=[MANIFEST, NAMES],
    why="DTensor.from_local believes what it is told: wrong placements make another tensor, and no error tells of it.",
    cause="the placements do not fit the tensor, for example those of a 2-D weight reused for a 3-D stack of experts; "
    "or it is another checkpoint, or a resized vocabulary",
    remedy="give every parameter placements for its own dims, and DTensor.from_local the global shape",
    references=["NVIDIA/TransformerEngine#2713"],
    since="0.2",
)
def shapes_match_reference(view: View) -> Iterable[Finding]:
    truth = view.truth.by_name
    for name, facts in view.tensors("parameter", "buffer", only=truth):
        shape = truth[name].shape
        wanted = f"{shape}, as in the reference"
        told = [(rank, None if t.shape == shape else _reshaped(t, wanted)) for rank, t in facts]
        yield from view.broken(name, told)


def _reshaped(tensor: TensorFacts, wanted: str) -> Mismatch:
    if tensor.managed is False:
        return Mismatch(f"shape {tensor.shape}", wanted, *_REPLACED)
    return Mismatch(f"shape {tensor.shape}", wanted)


_REPLACED = (
    "another parameter was put where fully_shard() had made a DTensor, perhaps of its local shard",
    "write into the DTensor, or make parameters anew before fully_shard()",
)


@check(
    promise="every parameter and buffer has the dtype that it has in the reference",
    family="structure",
    needs=["inventory", "reference"],
    after=[MANIFEST, NAMES, SHAPES],
    why="Norms, routers and rotary frequencies that are rounded to bfloat16 cost accuracy that no error tells of.",
    cause="a cast of the whole model (model.to(dtype), a default dtype, torch_dtype=...) took along what must keep its "
    "own",
    remedy="cast parameters by name, or build the reference with the same cast if it is meant",
    references=["huggingface/accelerate#3985", "vllm-project/speculators#668", "NVIDIA-NeMo/Automodel#2549"],
)
def dtypes_match_reference(view: View) -> Iterable[Finding]:
    truth = view.truth.by_name
    for name, facts in view.tensors("parameter", "buffer"):
        if name in truth:
            expected = truth[name].dtype
            yield from view.broken(
                name, [(rank, None if t.dtype == expected else Mismatch(t.dtype, expected)) for rank, t in facts]
            )


@check(
    promise="frozen stays frozen, trainable stays trainable",
    family="structure",
    needs=["inventory"],
    fields=["reference or frozen"],
    uses=["reference"],
    after=[MANIFEST, NAMES, SHAPES],
    why="A frozen verifier that trains drifts away unseen; a trainable head that is frozen never learns.",
    cause="it was set before the parameters were re-created (to_empty, sharding, load with assign=True), or never",
    remedy="set requires_grad after the last step that makes new Parameter objects",
    references=["vllm-project/speculators#593", "pytorch/torchtitan#4593"],
)
def requires_grad_matches_reference(view: View) -> Iterable[Finding]:
    declared = _parameters(view) & set(view.evidence.subject.frozen)
    reference = view.evidence.reference if declared else view.reference
    truth = reference.inventory.by_name if reference is not None and reference.complete else None
    if truth is None and not declared:
        raise NotJudged("a checkpoint does not say what is trainable; declare Subject(reference=<callable>)")
    for name, facts in view.tensors("parameter", only=declared if truth is None else None):
        if name in declared:
            yield from view.broken(name, [(rank, _thawed(tensor)) for rank, tensor in facts])
        elif truth is not None and name in truth:
            yield from view.broken(name, [(rank, _trainability(t, truth[name].requires_grad)) for rank, t in facts])


def _parameters(view: View) -> set[str]:
    return {tensor.name for rank in view.evidence.inventory for tensor in rank.tensors if tensor.kind == "parameter"}


def _thawed(tensor: TensorFacts) -> Mismatch | None:
    return Mismatch("trainable", "frozen, as declared") if tensor.requires_grad else None


def _trainability(tensor: TensorFacts, expected: bool) -> Mismatch | None:
    if tensor.requires_grad == expected:
        return None
    if expected:
        return Mismatch(
            "frozen",
            "trainable",
            "the loader freezes it, by a pattern that matches too much; or the reference's own loading thaws it",
            "narrow the pattern; where it is meant, declare Subject(frozen=...) or freeze it in the reference as well",
        )
    return Mismatch("trainable", "frozen")


@check(
    promise="the custom attributes that Subject(kept_attributes=...) names survive sharding and re-creation",
    family="structure",
    needs=["inventory", "reference"],
    fields=["kept_attributes"],
    after=[MANIFEST, NAMES, SHAPES],
    why="What reads the attribute later (what to shard, whose gradients to reduce) silently does the other thing.",
    cause="the parameter was re-created (to_empty, fully_shard, load with assign=True), which drops its attributes",
    remedy="set the attributes again after the last step that makes new Parameter objects, and read them only then",
    references=["NVIDIA/Megatron-LM fsdp_no_shard", "NVIDIA/TransformerEngine#1771"],
    since="0.2",
)
def parameter_attributes_kept(view: View) -> Iterable[Finding]:
    kept = view.evidence.subject.kept_attributes
    if not kept:
        raise NotDeclared("kept_attributes")
    if not view.reference.complete:
        raise NotJudged("a checkpoint holds no attributes; declare Subject(reference=<callable>)")
    truth = view.truth.by_name
    unknown = [key for key in kept if not any(key in tensor.attributes for tensor in truth.values())]
    for name, facts in view.tensors("parameter", only=truth):
        for key, expected in truth[name].attributes.items():
            yield from view.broken(name, [(rank, _lost(tensor, key, expected)) for rank, tensor in facts])
    if unknown:
        raise NotJudged(
            f"no parameter of the reference has the attribute {unknown[0]!r}, so nothing tells which should keep it; "
            "set it on the reference's parameters as well"
        )


def _lost(tensor: TensorFacts, key: str, expected: str) -> Mismatch | None:
    if tensor.attributes.get(key) == expected:
        return None
    actual = f"{key}={tensor.attributes[key]}" if key in tensor.attributes else f"without the attribute {key}"
    return Mismatch(actual, f"{key}={expected}, as in the reference")
