"""Tying: what is one weight in the reference is one weight on every rank."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_fsdp_meta.catalogue.findings import Finding
from pytest_fsdp_meta.catalogue.registry import check
from pytest_fsdp_meta.catalogue.view import NotJudged, View
from pytest_fsdp_meta.evidence import RankInventory
from pytest_fsdp_meta.text import counted


@check(
    promise="what the reference ties is one parameter or one storage on every rank",
    family="tying",
    needs=["inventory"],
    fields=["reference or tied"],
    uses=["reference"],
    after=["same_manifest_on_every_rank", "names_match_reference", "no_meta_params"],
    why="Untied, the two copies start equal, are trained apart, and one of them is dropped when the model is saved.",
    cause="to_empty() or loading gave each name its own memory: the tie was made before, or across two FSDP groups",
    remedy="tie before fully_shard with both modules in one FSDP group, and call tie_weights() again after to_empty()",
    references=[
        "hiyouga/LLaMA-Factory#10236",
        "verl-project/verl#7834",
        "pytorch/pytorch#188346",
        "huggingface/accelerate#4171",
    ],
)
def tied_weights_share_storage(view: View) -> Iterable[Finding]:
    if not _told(view):
        raise NotJudged("no tie is known; declare Subject(reference=<callable>) or Subject(tied=[(name, name)])")
    groups = _groups(view)
    if not groups:
        raise NotJudged("nothing is tied: neither Subject(tied=...) nor the reference ties anything")
    for group in groups:
        if [name for name in group if not view.judgeable(name)]:
            continue
        apart = tuple(rank.rank for rank in view.evidence.inventory if _apart(rank, group))
        if apart:
            others = ", ".join(group[1:])
            yield Finding(group[0], apart, f"another memory than {others}", f"one weight with {others}")


@check(
    promise="what is tied is still one weight, with equal values, after training steps",
    family="tying",
    needs=["inventory", "training"],
    uses=["reference"],
    after=[
        "same_manifest_on_every_rank",
        "names_match_reference",
        "shapes_match_reference",
        "no_meta_params",
        "no_uninitialized_memory",
        "tied_weights_share_storage",
    ],
    why="A tie that breaks while training saves one weight and goes on with two.",
    cause="something puts a new parameter in the place of one of the names, or writes to one of them alone",
    remedy="update tied weights in place, and once; call tie_weights() after whatever re-creates parameters",
    references=["pytorch/pytorch#176076"],
    since="0.2",
)
def tied_weights_stay_tied(view: View) -> Iterable[Finding]:
    after = [run.after for run in view.evidence.training or () if run.after is not None]
    groups = _groups(view) if _told(view) else _own(view)
    if not groups or not after:
        raise NotJudged(
            "nothing is tied: neither Subject(tied=...), nor the reference, nor the loaded model ties anything"
        )
    steps = max(len(run.losses) for run in view.evidence.training or ())
    for group in groups:
        if [name for name in group if not view.judgeable(name)]:
            continue
        apart = tuple(rank.rank for rank in after if _apart(rank, group))
        if apart:
            others = ", ".join(group[1:])
            values = {after[rank].by_name[name].digest for rank in apart[:1] for name in group}
            yield Finding(
                group[0],
                apart,
                f"another memory than {others} after {counted(steps, 'step')}",
                f"one weight with {others}",
                "with other values" if len(values) > 1 else "with equal values, so far",
                condemns=group,
            )


def _told(view: View) -> bool:
    """Whether anybody tells what is tied: the author, or a whole reference."""
    reference = view.evidence.reference
    return bool(view.evidence.subject.tied) or (reference is not None and reference.complete)


def _own(view: View) -> tuple[tuple[str, ...], ...]:
    """The ties that the loaded model shows by itself, on every rank."""
    shown = [set(rank.ties()) for rank in view.evidence.inventory]
    return tuple(sorted(set[tuple[str, ...]].intersection(*shown))) if shown else ()


def _groups(view: View) -> tuple[tuple[str, ...], ...]:
    """The declared ties, and those of the reference that are not declared."""
    declared, reference = view.evidence.subject.tied, view.evidence.reference
    if reference is None or not reference.complete:
        return declared
    known = [set(group) for group in declared]
    return declared + tuple(tie for tie in reference.inventory.ties() if not any(set(tie) <= group for group in known))


def came_apart(view: View) -> dict[str, tuple[str, ...]]:
    """The names of the known ties that are one weight no more, on some rank, each with all names of its tie."""
    inventory = view.evidence.inventory
    return {name: group for group in _groups(view) if any(_apart(rank, group) for rank in inventory) for name in group}


def _apart(rank: RankInventory, group: tuple[str, ...]) -> bool:
    members = [rank.by_name[name] for name in group if name in rank.by_name]
    if len({member.identity for member in members}) <= 1:
        return False
    # An empty shard has no memory to share; whether it is tied shows on the ranks that hold something. Some devices do
    # not tell where their memory is: there only one object is surely one weight.
    held = {member.storage or member.identity for member in members if member.numel}
    return bool(held) and (len(held) > 1 or not all(member.numel for member in members))
