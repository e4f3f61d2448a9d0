"""Loader and check parsed from node ids, which are all that pytest-xdist's controller knows of an item."""

from __future__ import annotations

import re

from pytest_fsdp_meta.catalogue import Catalogue

CHECK_AT_END = re.compile(r"[-\[](\w+)\]$")


def loader_of(nodeid: str, catalogue: Catalogue) -> str | None:
    """Return the node id up to the check, which all items of a loader in one world share; None for other items."""
    found = CHECK_AT_END.search(nodeid)
    return nodeid[: found.start(1)] if found and found[1] in catalogue else None


def split_node_id(nodeid: str, catalogue: Catalogue) -> tuple[str, str] | None:
    """Return the display name of the loader in its world and the check id; None for other items."""
    prefix = loader_of(nodeid, catalogue)
    if prefix is None and "]@" in nodeid:  # an xdist_group mark appends "@group"
        nodeid = nodeid.rpartition("@")[0]
        prefix = loader_of(nodeid, catalogue)
    return None if prefix is None else (join_without_check(prefix, "]"), nodeid[len(prefix) : -1])


def join_without_check(before: str, after: str) -> str:
    """Return a name without its check, from the parts before and after it, and without the separator left over."""
    if before.endswith("[") and after == "]":
        return before[:-1]
    return before + after[1:] if after.startswith("-") else before.removesuffix("-") + after
