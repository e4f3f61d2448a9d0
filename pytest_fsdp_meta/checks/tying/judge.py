"""Check that weights tied in the reference are tied on every rank, after loading and after training steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pytest_fsdp_meta.evidence import RankInventory
from pytest_fsdp_meta.judging.findings import Finding
from pytest_fsdp_meta.judging.registry import tying_check
from pytest_fsdp_meta.judging.view import NotJudged, View
from pytest_fsdp_meta.text import counted


@tying_check(
    promise="tied weights share one parameter or one storage on every rank",
    fields=["reference or tied"],
    uses=["reference"],
    after=["same_manifest_on_every_rank", "names_match_reference", "no_meta_params"],
    why="Two untied copies start equal and diverge in training, and saving the model drops one of them.",
    cause="each name has a storage of its own since to_empty(), loading or a new parameter, and nothing tied them "
    "after that; or their modules are in two FSDP groups",
    remedy="tie before fully_shard() with both modules in one FSDP group, and tie again (tie_weights()) after what "
    "makes new parameters: to_empty(), load_state_dict(assign=True)",
    references=[
        "hiyouga/LLaMA-Factory#10236",
        "verl-project/verl#7834",
        "pytorch/pytorch#188346",
        "huggingface/accelerate#4171",
    ],
    simulated="too",
)
def tied_weights_share_storage(view: View) -> Iterable[Finding]:
    if not _ties_known(view):
        raise NotJudged("no ties are known; declare Subject(reference=<callable>) or Subject(tied=[(name, name)])")
    groups = _groups(view)
    if not groups:
        raise NotJudged("no weights are tied, neither by Subject(tied=...) nor in the reference")
    for group, ranks, actual in _broken(view, groups, view.evidence.inventory):
        yield Finding(group[0], ranks, actual, _tied_to(group), condemns=group)


@tying_check(
    promise="tied weights still share storage after training steps",
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
    why="After a tie breaks, two weights are trained but only one is saved.",
    cause="something replaces the parameter of one of the names, or writes to one of them only",
    remedy="update tied weights in place and only once, and call tie_weights() after parameters are re-created",
    references=["pytorch/pytorch#176076"],
)
def tied_weights_stay_tied(view: View) -> Iterable[Finding]:
    after = [run.after for run in view.evidence.training or () if run.after is not None]
    groups = _groups(view) if _ties_known(view) else _ties_of_the_model(view)
    if not groups or not after:
        raise NotJudged(
            "no weights are tied, neither by Subject(tied=...) nor in the reference nor in the loaded model"
        )
    steps = max(len(run.losses) for run in view.evidence.training or ())
    for group, ranks, actual in _broken(view, groups, after):
        equal = len({after[ranks[0]].by_name[name].digest for name in group}) == 1
        detail = "values are still equal" if equal else "values differ"
        actual, expected = f"{actual} after {counted(steps, 'step')}", f"still {_tied_to(group)}"
        yield Finding(group[0], ranks, actual, expected, detail, condemns=group)


def _broken(
    view: View, groups: Iterable[tuple[str, ...]], inventories: Sequence[RankInventory]
) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], str]]:
    """Yield each judgeable tie that is broken on some ranks, these ranks, and what is wrong there."""
    for group in groups:
        ranks = tuple(rank.rank for rank in inventories if _apart(rank, group))
        if all([*map(view.judgeable, group)]) and ranks:  # a list, so that all that are left out are recorded
            yield group, ranks, f"does not share storage with {', '.join(group[1:])}"


def _ties_known(view: View) -> bool:
    """Return whether the author declares ties or a complete reference shows them."""
    reference = view.evidence.reference
    return bool(view.evidence.subject.tied) or (reference is not None and reference.complete)


def _ties_of_the_model(view: View) -> tuple[tuple[str, ...], ...]:
    """Return the ties that the loaded model has on every rank."""
    shown = [set(rank.ties()) for rank in view.evidence.inventory]
    return tuple(sorted(set[tuple[str, ...]].intersection(*shown))) if shown else ()


def _groups(view: View) -> tuple[tuple[str, ...], ...]:
    """Return the declared ties, then those of the reference that are not declared."""
    declared, reference = view.evidence.subject.tied, view.evidence.reference
    if reference is None or not reference.complete:
        return declared
    known = [set(group) for group in declared]
    return declared + tuple(tie for tie in reference.inventory.ties() if not any(set(tie) <= group for group in known))


def _tied_to(group: tuple[str, ...]) -> str:
    return "tied to it" if len(group) == 2 else "tied to them"


def broken_ties(view: View) -> dict[str, tuple[str, ...]]:
    """Return the names in each known tie that is broken on some rank, mapped to all names in that tie."""
    inventory = view.evidence.inventory
    return {name: group for group in _groups(view) if any(_apart(rank, group) for rank in inventory) for name in group}


def _apart(rank: RankInventory, group: tuple[str, ...]) -> bool:
    """Return whether the names of a tie are separate weights on this rank."""
    members = [rank.by_name[name] for name in group if name in rank.by_name]
    if len({member.identity for member in members}) <= 1:
        return False
    # Empty shards have no storage to compare; the tie is judged on ranks whose shards have elements. Some devices do
    # not expose storage addresses: there, only the same object counts as tied.
    held = {member.storage or member.identity for member in members if member.numel}
    return bool(held) and (len(held) > 1 or not all(member.numel for member in members))
