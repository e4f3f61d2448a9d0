"""TODO."""

from __future__ import annotations

import re

import pytest

from pytest_fsdp_meta.catalogue import Catalogue
from pytest_fsdp_meta.plugin.collection import CheckCase

CHECKED = re.compile(r"[-\[](\w+)\]$")
"""Of a loader's item, what it is called after its loader: the check."""


def loader_of(nodeid: str, catalogue: Catalogue) -> str | None:
    """What all items of one loader in one world share: the node id up to the check. None for any other item."""
    found = CHECKED.search(nodeid)
    return nodeid[: found.start(1)] if found and found[1] in catalogue else None


def split_node_id(nodeid: str, catalogue: Catalogue) -> tuple[str, str] | None:
    """The loader in its world, as it is told, and the check. None where the item is no loader's."""
    shared = loader_of(nodeid, catalogue)
    if shared is None and "]@" in nodeid:  # xdist's group
        nodeid = nodeid.rpartition("@")[0]
        shared = loader_of(nodeid, catalogue)
    return None if shared is None else (_without_check(shared, "]"), nodeid[len(shared) : -1])


def display_name(item: pytest.Item, case: CheckCase) -> str:
    """As ``take_apart``, wherever the name of the item has its check."""
    where, before, after = shared_name(item, case)
    return f"{where}::{_without_check(before, after)}"


def shared_name(item: pytest.Item, case: CheckCase) -> tuple[str, str, str]:
    """What the names of all items of one loader share: where it is, and what stands before the check and after it."""
    assert item.parent is not None
    before, _, after = item.name.rpartition(case.check)
    return item.parent.nodeid, before, after


def _without_check(before: str, after: str) -> str:
    if before.endswith("[") and after == "]":
        return before[:-1]
    return before + after[1:] if after.startswith("-") else before.removesuffix("-") + after
