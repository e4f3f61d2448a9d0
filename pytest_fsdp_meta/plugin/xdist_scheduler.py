"""Distribution under pytest-xdist: all items of one loader go to one worker, so that it loads once."""

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

BY_TEST = (LoadScheduling, WorkStealingScheduling, LoadGroupScheduling)
BY_SCOPE = (LoadScopeScheduling, LoadFileScheduling)


def keep_loaders_together(usual: Any, config: Any, log: Any, catalogue: Catalogue) -> Any:
    """Return a scheduler that keeps loaders together, or the usual one if this plugin does not know its kind."""
    is_known = type(usual) in (*BY_TEST, *BY_SCOPE, EachScheduling)
    return LoaderScheduling(usual, config, log, catalogue) if is_known else usual


class LoaderScheduling:
    """Uses xdist's own scheduler until the first worker reports a loader, then one that keeps loaders together."""

    def __init__(self, usual: Any, config: Any, log: Any, catalogue: Catalogue) -> None:
        self._config, self._log, self._catalogue = config, log, catalogue
        self._xdists = usual
        self._decided = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._xdists, name)

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        if not self._decided:  # the first worker's items decide: xdist requires all workers to collect the same
            self._decided = True
            if any(loader_of(nodeid, self._catalogue) for nodeid in collection):
                scheduling = by_loader(type(self._xdists), self._config, self._log, self._catalogue)
                for known in self._xdists.nodes:
                    scheduling.add_node(known)
                self._xdists = scheduling
        self._xdists.add_node_collection(node, collection)


def by_loader(kind: type, config: Any, log: Any, catalogue: Catalogue) -> Any:
    """Return a scheduler whose units of work keep each loader on one worker.

    Units are classes or files with ``--dist loadscope`` and ``loadfile``; otherwise an xdist group, a loader in one
    world, or a single test.
    """
    if kind is EachScheduling:
        return _Each(config, log)
    if kind in BY_SCOPE:
        return type("ByScope", (_Recovering, kind), {})(config, log)

    class ByLoader(_Recovering, LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            group = super()._split_scope(nodeid)
            return loader_of(nodeid, catalogue) or nodeid if group == nodeid else group

    return ByLoader(config, log)


class _Recovering:
    """Makes xdist's LoadScopeScheduling survive crashed workers (needed with pytest-xdist 3.8)."""

    assigned_work: dict[Any, dict[str, dict[str, bool]]]
    registered_collections: dict[Any, list[str]]
    workqueue: dict[str, dict[str, bool]]

    def remove_node(self, node: Any) -> str | None:
        """Return the item that crashed the worker, and do not run it again: it would crash every replacement.

        Units without items left are dropped as well: a worker that gets an empty unit never asks for another.
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
        """Assign units only to workers that have collected, until each has two items pending.

        A worker runs an item only once it knows the next one, so one pending item would never run.
        """
        if node in self.registered_collections:
            super()._reschedule(node)  # type: ignore[misc]
            pending = self.assigned_work[node].values()
            while self.workqueue and not node.shutting_down and sum(list(u.values()).count(False) for u in pending) < 2:
                self._assign_work_unit(node)  # type: ignore[attr-defined]


class _Each(EachScheduling):  # type: ignore[misc]
    """Fixes an internal error of xdist when a second worker crashes before the first one is replaced."""

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        super().add_node_collection(node, collection)
        self.node2collection.setdefault(node, list(collection))

    def schedule(self) -> None:
        waiting = {node: self.node2pending.pop(node) for node in self.nodes if node not in self.node2collection}
        super().schedule()
        self.node2pending.update(waiting)
