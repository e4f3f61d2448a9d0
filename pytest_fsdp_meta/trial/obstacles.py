"""Why an observation cannot be taken: what earlier observations rule out, and what errors of worlds mean."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Sequence
from dataclasses import replace
from filecmp import cmpfiles
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fsdp_meta.checks.checkpoint.facts import FirstStep, RankResumed, RankStateDict
from pytest_fsdp_meta.evidence import (
    RankInventory,
    ReferenceFacts,
    SubjectFacts,
    TensorFacts,
    Unavailable,
    not_declared,
    partly_held,
    sharded_dim,
)
from pytest_fsdp_meta.judging.registry import OBSERVATIONS
from pytest_fsdp_meta.loader.adapter import BUILT_IN, FSDP1
from pytest_fsdp_meta.loader.subject import SubjectError
from pytest_fsdp_meta.text import describe_nearest, name_ranks, names_in
from pytest_fsdp_meta.worlds import WorldError

if TYPE_CHECKING:
    from pytest_fsdp_meta.checks.materialisation.observe import Loaded

NOT_WANTED = Unavailable("no selected check needs it", kind="unselected")
FOLDERS = ("reference", "verifier", "export_reference")
"""Fields of Subject that may be a folder with a checkpoint."""
DECLARE = "declare Subject(save=..., resume=...)"
WITHOUT_LOADER = ("the reference", "the verifier", "the export_reference")
"""The labels of worlds that build another model than the loader's."""
NOT_OF_ITS_OWN = re.compile(r"(OutOfMemoryError|MemoryError|DistBackendError|DistNetworkError|\.Skipped)$")
"""Exceptions that a world raises because of its machine or network, or because the author skips."""
HINTS = {
    "ReduceOp.PREMUL_SUM with Gloo": "gloo does not scale while it reduces: on the CPU, call "
    "set_force_sum_reduction_for_comms(True) on every FSDP module, too",
    **{
        f"DistributedConfig.__init__() got an unexpected keyword argument '{name}'": (
            f"DistributedConfig has {name} from transformers {since} on"
        )
        for name, since in (("fsdp_size", "5.13"), ("tp_size", "5.13"), ("dp_replicate_size", "5.23"))
    },
}
"""Part of an error's summary -> what to do, where the message of torch or transformers does not say it."""


def add_hints(summary: str) -> str:
    return "; ".join([summary, *(hint for text, hint in HINTS.items() if text in summary)])


def from_world_error(error: WorldError, known: Collection[str] = ()) -> Unavailable:
    """Return the error with its world's output; the item shows the output of the loader's own ranks itself.

    An exception names some of the ``known`` tensors. A rank that is killed, ends or hangs names none, and what another
    model raises is not about the loader's.
    """
    outputs = [(rank, text.strip()) for rank, text in enumerate(error.outputs) if text.strip()] if error.label else []
    alone = len(error.outputs) == 1
    shown = [
        f"output of {error.label if alone else f'rank {rank} of {error.label}'}:\n{text}" for rank, text in outputs
    ]
    names, first = list[str](), error.failures[0]
    if _raises_of_its_own(error) and error.label not in WITHOUT_LOADER:
        names = [*names_in(first.message, known), *first.tensors]
    detail = "\n\n".join([str(error), *shown])
    return Unavailable(add_hints(error.summary), error=True, detail=detail, names=tuple(names))


def failed_or_refused(reason: str, error: WorldError) -> Unavailable:
    """Return why something could not be observed: an error, unless all ranks refuse it with the same exception."""
    return Unavailable(reason, error=not error.unanimous, detail=str(error), kind="refused")


def unsupported(loaded: Sequence[Loaded]) -> dict[str, Unavailable]:
    """Return the observations and checks that cannot be judged because torch lacks a private name.

    Without the inventory, nothing can.
    """
    reasons = {name: reason for rank in reversed(loaded) for name, reason in rank.lacking.items()}
    if "inventory" in reasons:
        reasons |= dict.fromkeys(OBSERVATIONS, reasons["inventory"])
    return {name: Unavailable(f"not judged: {reason}", kind="unsupported") for name, reason in reasons.items()}


def declared_otherwise(loaded: Sequence[Loaded]) -> str:
    """Return the error of a pattern that matches on no rank, or of what a rank declares otherwise than another; or "".

    Declarations about tensors are compared between the ranks that hold these: a stage of a pipeline names only its own.
    """
    patterns = [pattern for rank in loaded for pattern in rank.subject.patterns.items()]
    matched = {pattern for pattern, problem in patterns if not problem}
    if unmatched := next((problem for pattern, problem in patterns if pattern not in matched), ""):
        return unmatched
    for field, names in dict.fromkeys(key for rank in loaded for key in rank.declared):
        ranks: dict[str, list[int]] = {}
        for rank in loaded:
            if rank.inventory.by_name.keys() >= set(names):
                text = rank.declared.get((field, names), "not declared" if rank.declared else "a bare model")
                ranks.setdefault(text, []).append(rank.inventory.rank)
        if len(ranks) > 1 and not (field in FOLDERS and _equal_checkpoints(ranks)):
            of = f" for {' and '.join(names)}" if names else ""
            found = ", ".join(f"{text} on {name_ranks(own)}" for text, own in ranks.items())
            return f"Subject({field}=...) differs between ranks{of}: {found}; declare the same on every rank"
    return ""


def _equal_checkpoints(folders: Collection[str]) -> bool:
    """Return whether these are folders with the same weights, which each rank may have written for itself."""
    first, *others = folders
    names = {file.name for folder in folders for file in Path(folder).glob("*.safetensors")}
    return bool(names) and all(len(cmpfiles(first, other, names, shallow=False)[0]) == len(names) for other in others)


def no_training_declared(subject: SubjectFacts) -> Unavailable | None:
    """Return what the author has to declare before anything can be trained; None if nothing is missing."""
    if "batch" not in subject.declared:
        return not_declared("batch")
    why = f"{subject.engine} runs the backward and the optimizer's step itself" if subject.engine else ""
    why = "the stages of a pipeline train by the author's schedule" if subject.stages else why
    if not why or "train_step" in subject.declared:
        return None
    return replace(not_declared("train_step"), summary=f"{why}; declare Subject(train_step=...)")


def unknown_attribute(
    subject: SubjectFacts,
    inventory: Sequence[RankInventory],
    reference: ReferenceFacts | None,
    checkpoints: Container[str],
) -> str:
    """Return an error message if no tensor has an attribute of ``Subject(kept_attributes=...)``, else "".

    The reference is searched too, because sharding may have dropped the attribute from the model. ``checkpoints``: the
    fields of Subject that are folders.
    """
    if reference is None and "reference" in subject.declared and "reference" not in checkpoints:
        return ""  # unknown: the reference, which may have the attribute, was not recorded
    sources = (*inventory, reference.inventory) if reference else tuple(inventory)
    known = {name for source in sources for tensor in source.tensors for name in tensor.attributes}
    unknown = [name for name in subject.kept_attributes if name not in known]
    if not unknown:
        return ""
    where = "the model or the reference" if reference and reference.complete else "the model"
    carried = sorted({name for source in sources for name in source.custom_attributes})
    hint = describe_nearest(unknown[0], carried, "custom attribute")
    return str(SubjectError("kept_attributes", f"no tensor of {where} has {unknown[0]!r}{hint}"))


def odd_model(inventory: Sequence[RankInventory], subject: SubjectFacts, what: str) -> Unavailable | None:
    """Return why the ranks cannot run collectives on the model together; None if they can.

    Ranks may lack what is declared to be on some ranks only, as long as those that have it agree. ``what`` is then not
    done.
    """
    if meta := tuple(dict.fromkeys(t.name for rank in inventory for t in rank.tensors if t.on_meta)):
        return Unavailable(f"{what}: {meta[0]} is on meta", error=True, names=meta)
    facts = [{t.name: (t.name, t.shape, t.dtype, t.requires_grad) for t in rank.tensors} for rank in inventory]
    some = partly_held(subject, inventory)
    manifests = {tuple(fact for name, fact in rank.items() if name not in some) for rank in facts}
    if len(manifests) == 1 and not any(len({rank[name] for rank in facts if name in rank}) > 1 for name in some):
        return None
    summary = f"{what}: the ranks hold different tensors, so their collectives would not pair up"
    return Unavailable(summary, error=True, by=("same_manifest_on_every_rank",))


def not_saved_by_torch(
    inventory: Sequence[RankInventory], subject: SubjectFacts, state_dict: Sequence[RankStateDict], *, gathering: bool
) -> Unavailable | None:
    """Return why torch cannot save the model as a sharded checkpoint or, if ``gathering``, as a full state dict."""
    in_parts = exported_in_parts(inventory, subject) if gathering else frozenset()
    tensors = [
        t for rank in inventory for t in rank.tensors if t.persistent and (t.unreadable or t.name not in in_parts)
    ]
    declare = "declare Subject(state_dict=...)" if gathering else DECLARE
    # torch's state-dict functions know the parts of FSDP1, and gather them if they gather all.
    known = () if in_parts else (FSDP1,)
    if unfit := [
        t.name for t in tensors if t.unreadable or (_sharded_without_dtensor(t) and t.sharded_by not in known)
    ]:
        return Unavailable(
            f"{unfit[0]} is neither a DTensor nor a whole plain tensor, and torch does not know which part of it a "
            f"rank holds; {declare}",
            kind="undeclared",
        )
    refused = [rank.refused for rank in state_dict if rank.refused]
    if not refused:
        return None
    return Unavailable(f"torch's get_model_state_dict refuses the model ({refused[0]}); {declare}", kind="undeclared")


def exported_in_parts(inventory: Sequence[RankInventory], subject: SubjectFacts) -> frozenset[str]:
    """Return the tensors that an adapter describes, and those that only some ranks have: torch gathers neither.

    torch gathers FSDP1's; megatron-fsdp and ZeRO-3 gather by functions of their own, which the author's ``state_dict``
    calls.
    """
    tensors = (tensor for rank in inventory for tensor in rank.tensors)
    by_author = "state_dict" in subject.declared
    described = {t.name for t in tensors if _sharded_without_dtensor(t) and (by_author or t.sharded_by not in BUILT_IN)}
    return partly_held(subject, inventory) | described


def not_gathered_by_gloo(inventory: Sequence[RankInventory]) -> Unavailable | None:
    """Return the tensor on which gloo hangs: sharded on another dim than 0, and empty on some rank (torch 2.13)."""
    for rank in inventory:
        for tensor in rank.tensors:
            if not tensor.numel and any(sharded_dim(placement) for placement in tensor.placements or ()):
                return Unavailable(
                    f"{tensor.name} is sharded on another dim than 0 and its shard on rank {rank.rank} is empty, "
                    "which gloo cannot gather"
                )
    return None


def beside_not_loaded_by_torch(saved: Sequence[RankResumed], subject: SubjectFacts) -> Unavailable | None:
    """Return what torch's checkpoint cannot keep of what is beside the model: shards without their places."""
    if "save" in subject.declared:
        return None
    for name in dict.fromkeys(name for rank in saved for name in rank.plain):
        held = [rank.beside.get(name) for rank in saved]
        shapes = {(own.dtype, own.shape) if own is not None and own.shape is not None else None for own in held}
        if len(shapes) > 1 and None not in shapes:
            summary = f"{name} is a plain tensor of another shape on other ranks, of which torch keeps one; {DECLARE}"
            return Unavailable(summary, kind="undeclared")
    return None


def optimizer_not_loaded_by_torch(ranks: Sequence[FirstStep], subject: SubjectFacts) -> str:
    """Return why torch.distributed.checkpoint cannot load the optimizer's state; empty where it can."""
    if refused := next((step.unloadable for step in ranks if step.unloadable), ""):
        return refused
    first = set(ranks[0].stateless)
    for rank, step in enumerate(ranks):
        if differing := (first ^ set(step.stateless)).difference(subject.on_some_ranks, subject.by_stage):
            name = min(differing)
            with_state, without = (rank, 0) if name in first else (0, rank)
            return (
                f"{name} got a gradient on rank {with_state} and none on rank {without}, so the optimizer has state "
                "for it on one rank only, but torch.distributed.checkpoint loads that state on all ranks"
            )
    return ""


def explain_missing_state(summary: str, stateless: Sequence[str]) -> str:
    """Add cause and remedy to torch's error about the state of a parameter that got no gradient."""
    for name in stateless:
        if re.search(rf"Missing (key|optimizer state) .*(?<!\w){re.escape(name)}(?!\w)", summary):
            return (
                f"{summary}; {name} got no gradient, so no state of it was saved, but torch expects one for each "
                "trainable parameter of the optimizer: freeze it, or leave it out of the optimizer"
            )
    return summary


def refuses_checkpoint(error: WorldError) -> bool:
    """Whether the first failure is an exception that may be about the checkpoint."""
    return _raises_of_its_own(error) and not error.user


def _raises_of_its_own(error: WorldError) -> bool:
    """Whether the first failure is an exception that is not about the machine, its network or another rank."""
    first = error.failures[0]
    return (
        first.kind == "raised"
        and not first.lost_peer
        and not NOT_OF_ITS_OWN.search(first.exception)
        and "out of memory" not in first.message
    )


def _sharded_without_dtensor(tensor: TensorFacts) -> bool:
    return bool(tensor.sharded_by) or (tensor.placements is None and not tensor.whole)
