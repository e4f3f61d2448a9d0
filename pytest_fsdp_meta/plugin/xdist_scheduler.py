"""Under pytest-xdist: the items of one loader stay on one worker, so that it is loaded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xdist.scheduler import (
    EachScheduling,
    LoadFileScheduling,
    LoadGroupScheduling,
    LoadScheduling,
    LoadScopeScheduling,
    WorkStealingScheduling,
)

from pytest_fsdp_meta.catalogue import Catalogue
from pytest_fsdp_meta.plugin.node_ids import loader_of

DISTRIBUTIONS = {
    "load": LoadScheduling,
    "worksteal": WorkStealingScheduling,
    "loadgroup": LoadGroupScheduling,
    "loadscope": LoadScopeScheduling,
    "loadfile": LoadFileScheduling,
    "each": EachScheduling,
}


class LoaderScheduling:
    """xdist's own distribution where nothing is a loader; else by units of work that keep a loader together."""

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


def by_loader(config: Any, log: Any, catalogue: Catalogue) -> Any:
    """Whole classes or files where xdist is told so; else an xdist group, a loader in one world, or a single test."""
    kind = DISTRIBUTIONS[config.getoption("dist")]
    if kind is EachScheduling:
        return _Each(config, log)
    if kind in (LoadScopeScheduling, LoadFileScheduling):
        return type("ByScope", (_Recovering, kind), {})(config, log)

    class ByLoader(_Recovering, LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            group = super()._split_scope(nodeid)
            return loader_of(nodeid, catalogue) or nodeid if group == nodeid else group

    return ByLoader(config, log)


class _Recovering:
    """What xdist's distribution by scope lacks when a worker crashes (pytest-xdist 3.8)."""

    assigned_work: dict[Any, dict[str, dict[str, bool]]]
    registered_collections: dict[Any, list[str]]
    workqueue: dict[str, dict[str, bool]]

    def remove_node(self, node: Any) -> str | None:
        """The item at which the worker crashed does not run again: xdist's own ends one worker after the other with it.

        Nor are units handed out again of which nothing is left: a worker that is given nothing never asks for more.
        """
        units = self.assigned_work[node]
        left = [(unit, nodeid) for unit in units.values() for nodeid, done in unit.items() if not done]
        for unit, crashed in left[:1]:
            unit[crashed] = True
        for scope in [scope for scope, unit in units.items() if all(unit.values())]:
            del units[scope]
        super().remove_node(node)  # type: ignore[misc]
        return left[0][1] if left else None

    def _reschedule(self, node: Any) -> None:
        """Not to a replacement that is still collecting; and enough to go on, for a worker keeps its last item."""
        if node in self.registered_collections:
            super()._reschedule(node)  # type: ignore[misc]
            pending = self.assigned_work[node].values()
            while self.workqueue and not node.shutting_down and sum(list(u.values()).count(False) for u in pending) < 2:
                self._assign_work_unit(node)  # type: ignore[attr-defined]


class _Each(EachScheduling):  # type: ignore[misc]
    """xdist's own ends with an internal error when a second worker crashes before the first one is replaced."""

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        super().add_node_collection(node, collection)
        self.node2collection.setdefault(node, list(collection))

    def schedule(self) -> None:
        waiting = {node: self.node2pending.pop(node) for node in self.nodes if node not in self.node2collection}
        super().schedule()
        self.node2pending.update(waiting)
