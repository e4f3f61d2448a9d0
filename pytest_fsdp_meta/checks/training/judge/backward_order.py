"""Order parameters as the backward reaches them, and say in one line which gradients still agree."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pytest_fsdp_meta.evidence import RankTraining
from pytest_fsdp_meta.judging.limits import gradients_beyond_rounding, limits_of
from pytest_fsdp_meta.judging.view import View
from pytest_fsdp_meta.text import fold_members

MOST_MEMBERS = 6
"""Members of a module that are named one by one, on each side of the line."""


def backward_order(view: View) -> dict[str, int]:
    """Return the place of each parameter in the order in which the backward completes the gradients.

    That is the reverse of the order of first use in the reference's forward. The order of registration stands in for it
    for what no module's forward announced.
    """
    registered = [t.name for t in view.reference_inventory.tensors if t.kind == "parameter"]
    used = view.reference.used
    known = set(used)
    order = [*reversed(used), *(name for name in reversed(registered) if name not in known)]
    return {name: place for place, name in enumerate(order)}


def sort_by_backward(view: View, names: Sequence[str]) -> list[str]:
    """Return the names with those first whose gradients the backward completes first."""
    order = backward_order(view)
    return sorted(names, key=lambda name: order.get(name, len(order)))


def describe_first_departure(view: View, runs: Sequence[RankTraining], departing: Collection[str]) -> str:
    """Return which gradients of the first step still agree next to the one that the backward reaches first, else ""."""
    limits, due = limits_of(view, "gradients"), gradients_beyond_rounding(view)
    # A gradient of zeros agrees whatever the backward does.
    names = [name for name in view.names("parameter") if name in due and name not in departing]
    pairs = view.comparisons(tuple(run.gradients for run in runs), names)
    agreeing = {name for name, cases in pairs.items() if not any(limits.exceeded(*case) for case in cases)}
    return describe_boundary(backward_order(view), agreeing, departing)


def describe_boundary(order: Mapping[str, int], agreeing: Collection[str], departing: Collection[str]) -> str:
    """Return which members agree and which do not, in the smallest module with both around what departs first.

    Return "" if every gradient departs, or none.
    """
    reached = sorted((name for name in departing if name in order), key=order.__getitem__)
    if not reached:
        return ""
    first = reached[0]
    around = _module_with_both(first, agreeing)
    if around is None:
        return ""
    members = _by_member(around, order, agreeing, departing)
    right = [member for member, states in members.items() if states == {True}]
    wrong = [member for member, states in members.items() if states == {False}]
    # Members with both, such as another block, say nothing about the boundary.
    if not right or not wrong:
        return ""
    prefix = f"{around}." if around else ""
    line = f"{_list(prefix, right)} {_verb(right, 'agrees', 'agree')}, {_list(prefix, wrong)} "
    line += f"{_verb(wrong, 'does', 'do')} not"
    own = len(wrong) == 1 and first.rpartition(".")[0] in (around, f"{prefix}{wrong[0]}")
    return line if own else f"{line}; the backward reaches {first} first"


def _module_with_both(first: str, agreeing: Collection[str]) -> str | None:
    """Return the smallest module around the parameter that has an agreeing one; None if there is none."""
    module = first
    while module:
        module = module.rpartition(".")[0]
        if any(not module or name.startswith(f"{module}.") for name in agreeing):
            return module
    return None


def _by_member(
    module: str, order: Mapping[str, int], agreeing: Collection[str], departing: Collection[str]
) -> dict[str, set[bool]]:
    """Return whether each member's gradients agree, in the order of the forward; a member may have both."""
    members: dict[str, set[bool]] = {}
    for name in sorted((*agreeing, *departing), key=lambda name: -order.get(name, len(order))):
        if not module or name.startswith(f"{module}."):
            member = name.removeprefix(f"{module}.").partition(".")[0] if module else name.partition(".")[0]
            members.setdefault(member, set()).add(name in agreeing)
    return members


def _list(prefix: str, members: Sequence[str]) -> str:
    if len(members) <= MOST_MEMBERS or all(member.isdecimal() for member in members):
        return fold_members(prefix, members)
    return f"{fold_members(prefix, members[:MOST_MEMBERS])} and {len(members) - MOST_MEMBERS} more"


def _verb(members: Sequence[str], one: str, several: str) -> str:
    return one if len(members) == 1 else several
