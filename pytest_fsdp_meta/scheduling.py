"""Under pytest-xdist: the items of one loader stay on one worker, so that it is loaded once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from xdist.scheduler import LoadGroupScheduling, LoadScheduling, WorkStealingScheduling

from pytest_fsdp_meta.catalogue import Catalogue

DISTRIBUTIONS = {"load": LoadScheduling, "worksteal": WorkStealingScheduling, "loadgroup": LoadGroupScheduling}
"""Those that would tear a loader's items apart; the others keep a class, a file or everything together."""


class LoaderScheduling:
    """xdist's own distribution where nothing is a loader; else each loader is one unit of work, like an xdist group."""

    def __init__(self, config: Any, log: Any, catalogue: Catalogue) -> None:
        self._config, self._log, self._catalogue = config, log, catalogue
        self._xdists = DISTRIBUTIONS[config.getoption("dist")](config, log)
        self._decided = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._xdists, name)

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        if not self._decided:  # the first worker decides: all must collect the same
            self._decided = True
            if any(loader_of(nodeid, self._catalogue) for nodeid in collection):
                scheduling = by_loader(self._config, self._log, self._catalogue)
                for known in self._xdists.nodes:
                    scheduling.add_node(known)
                self._xdists = scheduling
        self._xdists.add_node_collection(node, collection)


def by_loader(config: Any, log: Any, catalogue: Catalogue) -> LoadGroupScheduling:
    """A unit of work is an xdist group, a loader in one world, or a single test."""

    class ByLoader(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            group = super()._split_scope(nodeid)
            return loader_of(nodeid, catalogue) or nodeid if group == nodeid else group

    return ByLoader(config, log)


def loader_of(nodeid: str, catalogue: Catalogue) -> str | None:
    """What all items of one loader in one world share: the node id up to the check. None for any other item."""
    found = re.search(r"[-\[](\w+)\]$", nodeid)
    return nodeid[: found.start(1)] if found and found[1] in catalogue else None
