"""Check that every tensor is materialised, initialised and on its rank's device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pytest_fsdp_meta.checks.structure.judge import MANIFEST, NAMES, SHAPES
from pytest_fsdp_meta.checks.tying.judge import broken_ties
from pytest_fsdp_meta.evidence import RankInventory, TensorFacts
from pytest_fsdp_meta.judging.findings import Explanation, Finding, Mismatch
from pytest_fsdp_meta.judging.registry import materialisation_check
from pytest_fsdp_meta.judging.view import NotJudged, PartlyJudged, Unjudgeable, View
from pytest_fsdp_meta.text import name_ranks

META = ("no_meta_params", "no_meta_buffers")
MANAGED = "managed_params_are_registered"
BYTE_TYPES = ("int8", "uint8")
"""Dtypes with so few values that a written element may well be the maximum, which is the poison value."""


def _on_meta(tensor: TensorFacts) -> Mismatch | None:
    return Mismatch("on meta", "materialised") if tensor.on_meta else None


@materialisation_check(
    promise="no parameter is on the meta device",
    why="A parameter on meta has no memory: its first use fails or, worse, it is never used and never saved.",
    cause="modules are materialised one by one and this one was left out, or its weight is not in the checkpoint",
    remedy="call to_empty() on the root after sharding, then load or initialise every parameter",
    references=["vllm-project/speculators#314", "pytorch/pytorch#132721"],
)
def no_meta_params(view: View) -> Iterable[Finding]:
    for name, facts in view.tensors("parameter"):
        yield from view.findings_for(name, [(rank, _on_meta(tensor)) for rank, tensor in facts])


@materialisation_check(
    promise="no buffer is on the meta device",
    why="Buffers are easily forgotten: FSDP manages parameters only, and checkpoints omit non-persistent buffers.",
    cause="the loader materialises parameters only; FSDP does not manage buffers",
    remedy="materialise buffers too (to_empty() on the root) and recompute those that the checkpoint lacks",
    references=["megatron-fsdp 0.6.1"],
)
def no_meta_buffers(view: View) -> Iterable[Finding]:
    for name, facts in view.tensors("buffer"):
        yield from view.findings_for(name, [(rank, _on_meta(tensor)) for rank, tensor in facts])


@materialisation_check(
    promise="no tensor is left uninitialised",
    uses=["values"],
    after=[MANIFEST, NAMES, SHAPES],
    why="Uninitialised memory often holds plausible values: the model runs, is wrong, and differs between runs.",
    cause="to_empty() or torch.empty() allocated it and nothing wrote to it: loading skips it, or the checkpoint has "
    "it under another name or not at all",
    remedy="load it, or recompute it after to_empty() as the module's __init__ does",
    references=["NVIDIA-NeMo/Automodel#3808", "mosaicml/llm-foundry#1745"],
)
def no_uninitialized_memory(view: View) -> Iterable[Finding]:
    equal = _compared(view)
    broken, drawn = broken_ties(view), view.evidence.subject.drawn
    unread: list[TensorFacts] = []
    for name, facts in view.tensors("parameter", "buffer"):
        unread += [tensor for _, tensor in facts if tensor.unreadable]
        suspects = {rank: tensor for rank, tensor in facts if not equal.get((name, rank), False)}
        comparable = name not in drawn
        mismatches = [
            (rank, _poisoned(tensor, comparable and (name, rank) in equal)) for rank, tensor in suspects.items()
        ]
        for finding in view.findings_for(name, mismatches):
            tensor = suspects[finding.ranks[0]]
            explanation = _untied(view.evidence.inventory[finding.ranks[0]], name, broken.get(name, ()))
            if not explanation and name in drawn:
                explanation = _NOT_DRAWN
            elif not explanation and tensor.poisoned < tensor.numel:
                explanation = _IN_PART
            yield replace(finding, detail=f"{tensor.poisoned} of {tensor.numel} elements", **explanation)
    unpoisoned = [rank.rank for rank in view.evidence.inventory if not rank.poison_kept]
    if unpoisoned:
        raise Unjudgeable(
            f"on {name_ranks(unpoisoned)} the loader switched off deterministic mode, without which uninitialised "
            "memory cannot be detected; leave torch.utils.deterministic alone while loading"
        )
    if unread:
        raise PartlyJudged(f"torch cannot read {unread[0].name} ({unread[0].unreadable})")


def _poisoned(tensor: TensorFacts, differs: bool) -> Mismatch | None:
    """Compare with the poison values; ``differs`` is True if the reference is known to have other values."""
    # A few integers at the maximum may be sentinels, unless the reference has other values there.
    few_suffice = bool(tensor.nan) or (differs and tensor.dtype not in BYTE_TYPES)
    if not tensor.poisoned or not (few_suffice or tensor.poisoned == tensor.numel):
        return None
    value = "NaN" if tensor.nan else f"{tensor.dtype} maximum"
    explanation = _TRANSIENT if tensor.kind == "buffer" and not tensor.persistent else {}
    return Mismatch(f"never written (poison value {value})", "written by the loader", **explanation)


_IN_PART: Explanation = {
    "cause": "a part of it was written: some rows, some blocks of a fused tensor, or what a smaller checkpoint has",
    "remedy": "write the other elements as well, or draw them and declare the rows: Subject(drawn={name: slice})",
}
_NOT_DRAWN: Explanation = {
    "cause": "it is declared drawn, and what draws it did not reach it: a slice or view of a DTensor is a copy where "
    "there are several ranks, or its module has no reset_parameters()",
    "remedy": "draw into the parameter itself, or into its local shard: parameter.to_local()",
}


def _untied(rank: RankInventory, name: str, tie: tuple[str, ...]) -> Explanation:
    """Explain a tensor whose tied twin was written: loading this one as well would not restore the tie."""
    written = [other for other in tie if other != name and other in rank.by_name and not rank.by_name[other].poisoned]
    if not written:
        return {}
    return {
        "cause": f"it should be tied to {written[0]}, which was written; to_empty() or separate FSDP groups broke the "
        "tie, and no checkpoint contains this copy",
        "remedy": "tie before fully_shard() with both modules in one FSDP group; call tie_weights() again after "
        "to_empty()",
    }


_TRANSIENT: Explanation = {
    "cause": "it is a non-persistent buffer, so no checkpoint has it, and nothing recomputed it after to_empty()",
    "remedy": "recompute it after to_empty(), as the module's __init__ does",
}


def _compared(view: View) -> dict[tuple[str, int], bool]:
    """Return whether each compared tensor equals the reference, by (name, rank).

    A NaN that the reference has as well is a value and not poison, unless the reference never writes the tensor.
    """
    unwritten = set(view.evidence.reference.uninitialised) if view.evidence.reference else set()
    unwritten.update(view.evidence.subject.drawn_rows)  # equal in the other rows only
    return {
        (comparison.name, rank): comparison.equal and comparison.name not in unwritten
        for rank, comparisons in enumerate(view.evidence.values or ())
        for comparison in comparisons
        if comparison.elements
    }


def _on_other_devices(view: View, kind: str) -> Iterable[Finding]:
    devices = {rank.rank: rank.device for rank in view.evidence.inventory}
    offloaded = set(view.evidence.subject.offloaded)
    for name, facts in view.tensors(kind):
        pairs = [(rank, t.device, "cpu" if name in offloaded else devices[rank]) for rank, t in facts]
        wrong = [(rank, Mismatch(f"on {own}", f"on {due}") if own != due else None) for rank, own, due in pairs]
        yield from view.findings_for(name, wrong)


@materialisation_check(
    promise="every parameter is on its rank's device, including the index, or on the CPU if declared offloaded",
    after=[MANIFEST, *META],
    why="A parameter on another rank's device uses that rank's memory; one on the CPU is copied in every forward.",
    cause="the device was given without an index, or it was left where it was created or the checkpoint was read to",
    remedy="use fsdp.device, which includes the index; declare Subject(offloaded=...) for intended CPU offload",
    references=["vllm-project/speculators#314", "pytorch/pytorch#135156"],
)
def params_on_rank_device(view: View) -> Iterable[Finding]:
    yield from _on_other_devices(view, "parameter")


@materialisation_check(
    promise="every buffer is on its rank's device, including the index",
    after=[MANIFEST, *META],
    why="The forward may copy a buffer from another device at every call, or fail only on the path that reads it.",
    cause="it was created outside the context that sets the device, or after fully_shard(), which moves what it finds",
    remedy="move buffers to fsdp.device with the model, or create them on the device",
    references=["NVIDIA-NeMo/Automodel#2146"],
)
def buffers_on_rank_device(view: View) -> Iterable[Finding]:
    yield from _on_other_devices(view, "buffer")


@materialisation_check(
    promise="modules register the same Parameter objects that FSDP2 manages",
    uses=["reference"],
    after=[MANIFEST, NAMES, SHAPES],
    why="FSDP gathers and reduces the old parameter; the new one, which the optimizer may hold, never learns.",
    cause="the parameter was re-created after fully_shard() and a first forward; FSDP still holds the old one and "
    "restores it",
    remedy="write into the parameter in place (under torch.no_grad), or re-create parameters before fully_shard()",
    references=["NVIDIA/Megatron-LM#6799"],
    simulated="too",
)
def managed_params_are_registered(view: View) -> Iterable[Finding]:
    parameters = [t for rank in view.evidence.inventory for t in rank.tensors if t.kind == "parameter"]
    if parameters and all(tensor.managed is None for tensor in parameters):
        raise NotJudged("fully_shard() manages no parameter of the model")
    # A broken tie replaces a parameter as well; tied_weights_share_storage reports it.
    broken = broken_ties(view) if "tied_weights_share_storage" in view.selection else ()
    for name, facts in view.tensors("parameter"):
        if name not in broken:
            yield from view.findings_for(name, [(rank, _replaced(tensor)) for rank, tensor in facts])


def _replaced(tensor: TensorFacts) -> Mismatch | None:
    if tensor.managed is not False:
        return None
    if tensor.placements is None:
        return Mismatch("a plain parameter in place of the DTensor that FSDP manages", "", **_PLAIN)
    return Mismatch("not the Parameter object that FSDP manages", "")


_PLAIN: Explanation = {
    "cause": "the DTensor that fully_shard() created was replaced by a plain parameter; the first forward fails or "
    "uses the old one",
    "remedy": "write into the DTensor (distribute_tensor, or set_model_state_dict with full_state_dict=True), or "
    "re-create parameters before fully_shard()",
}
