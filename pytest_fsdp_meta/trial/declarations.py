"""Compare what the ranks declare: what one of them alone declares would be ignored, or would hold for all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from filecmp import cmp
from os.path import isabs
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fsdp_meta.loader.declared import Declared
from pytest_fsdp_meta.text import name_ranks

if TYPE_CHECKING:
    from pytest_fsdp_meta.checks.materialisation.observe import Loaded

ABSENT = Declared("not declared", "")


def describe_problem(loaded: Sequence[Loaded]) -> str:
    """Return an error message for what the ranks declare differently or in vain; "" if there is nothing.

    Declarations about tensors are compared between the ranks that hold these: a stage of a pipeline names only its own.
    """
    returned = {rank.inventory.rank: Declared(rank.returned, rank.returned) for rank in loaded}
    if len(set(returned.values())) > 1:
        return f"the loader returned {_by_rank(returned)}; return a Subject that declares the same on every rank"
    ranks = {rank.inventory.rank: (set(rank.inventory.by_name), _declarations(rank)) for rank in loaded}
    for field, names in dict.fromkeys(key for _, declared in ranks.values() for key in declared):
        found = {n: own.get((field, names), ABSENT) for n, (held, own) in ranks.items() if held.issuperset(names)}
        compared = {one.compared for one in found.values()}
        if len(compared) > 1 and not _equal_weights(compared):
            of = f" for {' and '.join(names)}" if names else ""
            return f"Subject({field}=...) differs between ranks{of}: {_by_rank(found)}; declare the same on every rank"
    patterns = [pattern for rank in loaded for pattern in rank.subject.patterns.items()]
    matched = {pattern for pattern, problem in patterns if not problem}
    return next((problem for pattern, problem in patterns if pattern not in matched), "")


def _declarations(rank: Loaded) -> dict[tuple[str, tuple[str, ...]], Declared]:
    """Return what the rank declares, by the field and the tensors that it is about."""
    facts = rank.subject
    plain = {
        "loss_over_ranks": facts.loss_over_ranks,
        "max_grad_norm": "" if facts.max_grad_norm is None else str(facts.max_grad_norm),
        "kept_attributes": ", ".join(sorted(facts.kept_attributes)),
    }
    by_name: dict[str, Mapping[str, str]] = {
        **{field: dict.fromkeys(getattr(facts, field), "") for field in ("unsharded", "offloaded", "on_some_ranks")},
        "frozen": {name: source if source != name else "" for name, source in facts.frozen.items()},
        "drawn": {name: str(facts.drawn_rows.get(name, "")) for name in facts.drawn},
        "placements": {name: ", ".join(placements) for name, placements in facts.placements.items()},
    }
    return {
        **{(field, ()): one for field, one in rank.fields.items()},
        **{(field, ()): Declared(text, text) for field, text in plain.items() if text},
        **{("tied", tuple(sorted(group))): Declared("declared", "declared") for group in facts.tied},
        **{
            (field, (name,)): Declared(text or "declared", text or "declared")
            for field, names in by_name.items()
            for name, text in names.items()
        },
    }


def _by_rank(declared: Mapping[int, Declared]) -> str:
    """Return the declarations with their ranks, like "1.0 on rank 0, not declared on ranks 1-3"."""
    ranks = {one: [rank for rank, own in declared.items() if own == one] for one in declared.values()}
    return ", ".join(f"{one.shown} on {name_ranks(own)}" for one, own in ranks.items())


def _equal_weights(folders: Collection[str]) -> bool:
    """Return whether these are checkpoints with the same files, which each rank may have written for itself."""
    if not all(map(isabs, folders)):
        return False
    first, *others = ({file.name: file for file in Path(folder).glob("*.safetensors")} for folder in folders)
    return all(
        other.keys() == first.keys() and all(cmp(first[name], other[name], shallow=False) for name in first)
        for other in others
    )
