"""Distribution under pytest-xdist: all items of one loader go to one worker, so that it loads once."""

from __future__ import annotations

from functools import cache
from typing import Any

from xdist.scheduler import LoadGroupScheduling, LoadScheduling

from pytest_fsdp_meta.catalogue import Catalogue
from pytest_fsdp_meta.plugin.collection import loader_of


def keep_loaders_together(usual: Any, config: Any, log: Any, catalogue: Catalogue) -> Any:
    """Return a scheduler that never splits a loader in place of ``load`` and ``loadgroup``, else the usual one.

    ``loadscope`` and ``loadfile`` do not split a loader either, and ``each`` runs everything on every worker.
    """
    kind = {LoadScheduling: ByLoader, LoadGroupScheduling: ByGroup}.get(type(usual))
    return usual if kind is None else kind(config, log, catalogue)


class ByLoader(LoadScheduling):  # type: ignore[misc]
    """xdist's ``load``, but a worker that is sent an item is sent all items of its loader in that world."""

    def __init__(self, config: Any, log: Any, catalogue: Catalogue) -> None:
        super().__init__(config, log)
        self._loader_of = cache(lambda index: loader_of(self.collection[index], catalogue))

    def _send_tests(self, node: Any, num: int) -> None:
        first, rest = self.pending[:num], self.pending[num:]
        if loaders := {self._loader_of(index) for index in first} - {None}:
            more = [index for index in rest if self._loader_of(index) in loaders]
            self.pending[:] = [*first, *more, *(index for index in rest if self._loader_of(index) not in loaders)]
            num += len(more)
        super()._send_tests(node, num)


class ByGroup(LoadGroupScheduling):  # type: ignore[misc]
    """xdist's ``loadgroup``, where a loader in one world is a group, unless the user has given it another."""

    def __init__(self, config: Any, log: Any, catalogue: Catalogue) -> None:
        super().__init__(config, log)
        self._catalogue = catalogue

    def _split_scope(self, nodeid: str) -> str:
        group: str = super()._split_scope(nodeid)
        return loader_of(nodeid, self._catalogue) or nodeid if group == nodeid else group
