"""Materialisation: nothing is left on meta, uninitialised, or on another device than the rank's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pytest_fsdp_meta.catalogue.checks.structure import MANIFEST, NAMES, SHAPES
from pytest_fsdp_meta.catalogue.checks.tying import came_apart
from pytest_fsdp_meta.catalogue.findings import Explanation, Finding, Mismatch
from pytest_fsdp_meta.catalogue.registry import check
from pytest_fsdp_meta.catalogue.view import NotJudged, PartlyJudged, Unjudgeable, View
from pytest_fsdp_meta.evidence import RankInventory, TensorFacts
from pytest_fsdp_meta.text import name_ranks

META = ("no_meta_params", "no_meta_buffers")
MANAGED = "managed_params_are_registered"
BYTE_TYPES = ("int8", "uint8")
"""Too few values for the maximum to be a sign of poison in a single element."""


def _on_meta(tensor: TensorFacts) -> Mismatch | None:
    return Mismatch("on meta", "materialised") if tensor.on_meta else None


@check(
    promise="no parameter is on meta",
    family="materialisation",
    needs=["inventory"],
    why="A parameter on meta has no memory: the first use fails, or worse, it is never used and never saved.",
    cause="it was materialised module by module and this one was forgotten, or its weight was not in the checkpoint",
    remedy="call to_empty() on the root after sharding, then load or initialise every parameter",
    references=["vllm-project/speculators#314", "pytorch/pytorch#132721"],
)
def no_meta_params(view: View) -> Iterable[Finding]:
    for name, facts in view.tensors("parameter"):
        yield from view.broken(name, [(rank, _on_meta(tensor)) for rank, tensor in facts])


@check(
    promise="no buffer is on meta",
    family="materialisation",
    needs=["inventory"],
    why="Buffers are easily forgotten: FSDP manages parameters only, and checkpoints leave out transient buffers.",
    cause="the loader materialises parameters only; FSDP does not manage buffers",
    remedy="materialise buffers as well (to_empty() on the root) and recompute those that the checkpoint lacks",
    references=["megatron-fsdp 0.6.1"],
)
def no_meta_buffers(view: View) -> Iterable[Finding]:
    for name, facts in view.tensors("buffer"):
        yield from view.broken(name, [(rank, _on_meta(tensor)) for rank, tensor in facts])


@check(
    promise="nothing that was allocated and never written is left",
    family="materialisation",
    needs=["inventory"],
    uses=["values"],
    after=[MANIFEST, NAMES, SHAPES],
    why="Uninitialised memory is often zero or plausible, so the model runs and is wrong, and not the same twice.",
    cause="to_empty() or torch.empty() allocated it and nothing wrote it: it is not in the checkpoint, or its name did "
    "not match",
    remedy="load it, or recompute it after to_empty() as the module's __init__ does",
    references=["NVIDIA-NeMo/Automodel#3808", "mosaicml/llm-foundry#1745"],
)
def no_uninitialized_memory(view: View) -> Iterable[Finding]:
    equal = _compared(view)
    apart = came_apart(view)
    unread: list[TensorFacts] = []
    for name, facts in view.tensors("parameter", "buffer"):
        unread += [tensor for _, tensor in facts if tensor.unreadable]
        suspects = {rank: tensor for rank, tensor in facts if not equal.get((name, rank), False)}
        told = [(rank, _poisoned(tensor, (name, rank) in equal)) for rank, tensor in suspects.items()]
        for finding in view.broken(name, told):
            tensor = suspects[finding.ranks[0]]
            words = _untied(view.evidence.inventory[finding.ranks[0]], name, apart.get(name, ()))
            yield replace(finding, detail=f"{tensor.poisoned} of {tensor.numel} elements", **words)
    careless = [rank.rank for rank in view.evidence.inventory if not rank.poison_kept]
    if careless:
        raise Unjudgeable(
            f"on {name_ranks(careless)} the loader switched off deterministic mode, by which memory that nobody writes "
            "is told from memory that holds zeros by chance; leave torch.utils.deterministic alone while loading"
        )
    if unread:
        raise PartlyJudged(f"torch cannot read {unread[0].name} ({unread[0].unreadable})")


def _poisoned(tensor: TensorFacts, differs: bool) -> Mismatch | None:
    """``differs`` is True where the reference is known to have something else here."""
    # Some integers at the maximum may be sentinels, unless the reference has others.
    some = bool(tensor.nan) or (differs and tensor.dtype not in BYTE_TYPES)
    if not tensor.poisoned or not (some or tensor.poisoned == tensor.numel):
        return None
    sign = "NaN" if tensor.nan else f"{tensor.dtype} maximum"
    words = _TRANSIENT if tensor.kind == "buffer" and not tensor.persistent else {}
    return Mismatch(f"uninitialised ({sign} under poison)", "written by the loader", **words)


def _untied(rank: RankInventory, name: str, tie: tuple[str, ...]) -> Explanation:
    """What to do where another name of a tie that came apart was written: loading this one as well would not tie it."""
    written = [other for other in tie if other != name and other in rank.by_name and not rank.by_name[other].poisoned]
    if not written:
        return {}
    return {
        "cause": f"it is tied to {written[0]}, which was written; the tie came apart (to_empty(), or two FSDP groups), "
        "and no checkpoint has this copy",
        "remedy": "tie before fully_shard with both modules in one FSDP group, and call tie_weights() again after "
        "to_empty()",
    }


_TRANSIENT: Explanation = {
    "cause": "it is a non-persistent buffer, so no checkpoint has it, and nothing recomputed it after to_empty()",
    "remedy": "recompute it after to_empty(), as the module's __init__ does",
}


def _compared(view: View) -> dict[tuple[str, int], bool]:
    """Whether what was compared equals the reference, by (name, rank); a NaN is a value: its memory is not poisoned."""
    own = set(view.evidence.reference.uninitialised) if view.evidence.reference else set()
    return {
        (comparison.name, rank): comparison.equal and comparison.name not in own
        for rank, comparisons in enumerate(view.evidence.values or ())
        for comparison in comparisons
        if comparison.elements
    }


def _elsewhere(view: View, kind: str) -> Iterable[Finding]:
    home = {rank.rank: rank.device for rank in view.evidence.inventory}
    offloaded = set(view.evidence.subject.offloaded)
    for name, facts in view.tensors(kind):
        told = [(rank, _misplaced(t, "cpu" if name in offloaded else home[rank])) for rank, t in facts]
        yield from view.broken(name, told)


def _misplaced(tensor: TensorFacts, home: str) -> Mismatch | None:
    return None if tensor.device == home else Mismatch(f"on {tensor.device}", f"on {home}")


@check(
    promise="every parameter is on this rank's device, index included; declared CPU offload is respected",
    family="materialisation",
    needs=["inventory"],
    after=[MANIFEST, *META],
    why="A parameter on another rank's device costs that rank's memory; one on the CPU is copied in every forward.",
    cause="the device was given without an index, or the loader left it where the checkpoint was read to",
    remedy="use fsdp.device, which has its index; declare Subject(offloaded=...) for what is meant to be on the CPU",
    references=["vllm-project/speculators#314", "pytorch/pytorch#135156"],
)
def params_on_rank_device(view: View) -> Iterable[Finding]:
    yield from _elsewhere(view, "parameter")


@check(
    promise="every buffer is on this rank's device, index included",
    family="materialisation",
    needs=["inventory"],
    after=[MANIFEST, *META],
    why="The forward may move a stranded buffer along, at a price, or fail only on the path that reads it.",
    cause="buffers were made outside of the context that sets the device, and FSDP moves parameters only",
    remedy="move buffers with the model: model.to(fsdp.device) for buffers, or make them on the device",
    references=["NVIDIA-NeMo/Automodel#2146"],
)
def buffers_on_rank_device(view: View) -> Iterable[Finding]:
    yield from _elsewhere(view, "buffer")


@check(
    promise="the Parameter objects that FSDP2 manages are the ones that the modules register",
    family="materialisation",
    needs=["inventory"],
    uses=["reference"],
    after=[MANIFEST, NAMES, SHAPES],
    why="FSDP gathers the old parameter and reduces into it: the new one, which the optimizer may hold, never learns.",
    cause="the parameter was made anew after fully_shard() and a first forward: FSDP keeps the old one, and puts it "
    "back",
    remedy="write into the parameter in place (under torch.no_grad), or make parameters anew before fully_shard()",
    references=["NVIDIA/Megatron-LM#6799"],
    since="0.2",
)
def managed_params_are_registered(view: View) -> Iterable[Finding]:
    parameters = [t for rank in view.evidence.inventory for t in rank.tensors if t.kind == "parameter"]
    if parameters and all(tensor.managed is None for tensor in parameters):
        raise NotJudged("fully_shard manages no parameter of the model")
    apart = came_apart(view)  # FSDP shares what was tied when it sharded; that it is no more is another promise
    for name, facts in view.tensors("parameter"):
        if name not in apart:
            yield from view.broken(name, [(rank, _replaced(tensor)) for rank, tensor in facts])


def _replaced(tensor: TensorFacts) -> Mismatch | None:
    if tensor.managed is not False:
        return None
    should = "the one that FSDP manages"
    if tensor.placements is None:
        return Mismatch("a plain parameter that FSDP does not know", should, **_PLAIN)
    return Mismatch("a parameter that FSDP does not know", should)


_PLAIN: Explanation = {
    "cause": "a plain parameter was put where fully_shard() had made a DTensor: the first forward fails, or takes the "
    "old one",
    "remedy": "write into the DTensor (distribute_tensor, or set_model_state_dict with full_state_dict=True), or make "
    "parameters anew before fully_shard()",
}
