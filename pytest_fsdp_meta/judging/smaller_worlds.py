"""Say where a finding starts by what the same check finds in smaller worlds, and choose the cause that fits."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from pytest_fsdp_meta.evidence import SmallerWorld
from pytest_fsdp_meta.judging.findings import Finding
from pytest_fsdp_meta.judging.registry import Check

FAMILIES = ("structure", "values", "training", "checkpoint")
"""Families of checks whose findings may or may not be due to several ranks."""
EXCEPT = frozenset(
    {
        # They compare ranks or worlds, so that a world of one rank proves nothing.
        *("same_manifest_on_every_rank", "replicas_equal", "replicas_stay_equal", "ranks_skip_alike", "dcp_reshards"),
        # What they find says where it comes from.
        *("dtypes_match_reference", "requires_grad_matches_reference", "parameter_attributes_kept"),
        *("state_dict_names_clean", "modules_train"),
    }
)
WITH_TWO_CAUSES = frozenset({"optimizer_owns_parameters"})  # its other findings say where they come from
LOADING = "the code that builds the model and loads its weights"
COMPARE = {
    "structure": "the configs and the code that builds the model",
    "values": LOADING,
    "training": "the forward, the loss and the step",
    "checkpoint": "save() and resume()",
    "load_is_repeatable": LOADING,
    "optimizer_owns_parameters": "the code that builds the optimizer",
    "full_state_dict_exports": "state_dict() and its hooks",
}
"""Check or family -> where the cause is, if one rank is enough for the finding."""
ON_RANKS = "the code that depends on the rank or the mesh"
COMPARE_RANKS = {
    "structure": ON_RANKS,
    "values": "how weights are split and sent to the ranks",
    "drawn_weights_are_one_draw": "how the ranks are seeded",
    "training": "how rows are divided, and how loss and gradients are reduced",
    **dict.fromkeys(("forward_sees_current_weights", "frozen_weights_stay_frozen", "every_trainable_moves"), ON_RANKS),
    "update_parity": "how optimizer and scheduler use shards and the number of ranks",
    "optimizer_owns_parameters": "how the optimizer is built from shards and the number of ranks",
    "second_grad_parity": ON_RANKS,
    "buffers_follow_training": "how rows are divided, and how the buffers are reduced",
    **dict.fromkeys(("grad_norm_parity", "grad_clip_parity"), "how the norms of the ranks are added"),
    "beside_parity": ON_RANKS,
    "checkpoint": "how the shards of the ranks are saved and read",
    "load_is_repeatable": ON_RANKS,
    "full_state_dict_exports": "how state_dict() and its hooks gather the shards",
}
"""Check or family -> where the cause is, if the finding takes several ranks."""


def may_be_due_to_ranks(check: Check) -> bool:
    return check.built_in and check.family in FAMILIES and check.id not in EXCEPT


def add_smaller_worlds(check: Check, findings: Sequence[Finding], smaller: Sequence[SmallerWorld]) -> list[Finding]:
    """Return the findings with the place where they start, and with the cause that smaller worlds leave possible.

    Those of one cause start in one place: there, a few of their tensors may be wrong by less than is noticed. The
    cause that a check has for all findings without one of their own says less.
    """
    if not smaller or not may_be_due_to_ranks(check):
        return [*findings]
    tensors: dict[str, set[str | None]] = {}
    for finding in findings:
        tensors.setdefault(finding.cause, set()).add(finding.tensor)
    alike = ({finding.tensor} if finding.cause == check.cause else tensors[finding.cause] for finding in findings)
    every, pairs = check.id not in WITH_TWO_CAUSES, zip(findings, alike, strict=True)
    return [_add(check, one, own, smaller) if every or one.cause_alone else one for one, own in pairs]


def _add(check: Check, finding: Finding, alike: Set[str | None], smaller: Sequence[SmallerWorld]) -> Finding:
    alone, *others = smaller
    found = _finds(check, alike, alone)
    if found is None:
        start = f"not known: {alone.problem}" if alone.problem else ""
    elif found:
        place = COMPARE.get(check.id, COMPARE[check.family])
        compare = "" if finding.origin else f", so not in the sharding: compare {place}"
        start = f"a world of one rank fails as well{compare}"
    else:
        place = COMPARE_RANKS.get(check.id, COMPARE_RANKS[check.family])
        compare = "" if finding.origin else f", so it takes several ranks: compare {place}"
        start = f"a world of one rank passes{_describe_dimensions(check, alike, others) or compare}"
    chosen = {True: finding.cause_alone, False: finding.cause_sharded, None: ""}[found]
    remedy = finding.remedy_alone if found else ""
    origin = "; ".join(filter(None, [finding.origin, start]))
    return replace(finding, origin=origin, cause=chosen or finding.cause, remedy=remedy or finding.remedy)


def _finds(check: Check, tensors: Set[str | None], world: SmallerWorld) -> bool | None:
    """Return whether the check finds one of the tensors there, or something about the model; None if not judged."""
    if check.id in world.failed:
        found = world.failed[check.id]
        return None in tensors or "" in found or not tensors.isdisjoint(found)
    return False if check.id in world.passed else None


def _describe_dimensions(check: Check, tensors: Set[str | None], worlds: Sequence[SmallerWorld]) -> str:
    """Return what the worlds along one dimension of the mesh add: "; tp=2 alone fails, dp_shard=2 alone passes"."""
    named = [(f"{name}={size} alone", _finds(check, tensors, world)) for world in worlds for name, size in world.mesh]
    failing, passing = ([text for text, found in named if found is wanted] for wanted in (True, False))
    if failing:
        others = f", {' and '.join(passing)} {'pass' if len(passing) > 1 else 'passes'}" if passing else ""
        return f"; {' and '.join(failing)} {'fail' if len(failing) > 1 else 'fails'}{others}"
    return f", and so do {' and '.join(passing)}: only together do they fail" if len(passing) > 1 else ""
