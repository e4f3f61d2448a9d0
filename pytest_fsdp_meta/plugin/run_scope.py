"""Which loaders this run was asked for: a loader of an earlier run that it was not asked for is not missing."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta.plugin.loader_items import LoaderItem

DESELECTED = "fsdp_deselected"
"""Key of ``workeroutput``: the loaders that a worker of pytest-xdist deselected, by name."""
PARTIAL = ("lf", "stepwise")
"""Options with which pytest does not even collect all files."""


class RunScope:
    """A pytest plugin that knows what was deselected and which paths pytest was given."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._deselected: set[str] = set()

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        """Record loaders with a deselected item; on a worker also for the controller, which collects nothing."""
        self._deselected.update(item.loader.name for item in items if isinstance(item, LoaderItem))
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[DESELECTED] = sorted(self._deselected)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._deselected.update(getattr(node, "workeroutput", {}).get(DESELECTED, ()))

    def has(self, loader: str) -> bool:
        """Return whether the run would have a loader with this name, if it still existed."""
        option = self._config.getoption
        if loader in self._deselected or any(option(name, False) for name in PARTIAL):
            return False
        path, _, node = loader.partition("::")
        try:
            file = (self._config.rootpath / path).resolve()
        except ValueError:  # a name that no file can have, from a report that something else wrote
            return False
        return not self._is_ignored(file) and any(self._covers(arg, file, node) for arg in self._config.args)

    def _covers(self, arg: str, file: Path, node: str) -> bool:
        given, _, part = arg.partition("::")
        path = self._absolute(given)
        if self._config.getoption("pyargs", False) and not path.exists():
            return True  # the name of a package: what it held before is not known
        within = file == path or path in file.parents
        return within and (not part or node == part or node.startswith((f"{part}::", f"{part}[")))

    def _is_ignored(self, file: Path) -> bool:
        ignored = map(self._absolute, self._config.getoption("ignore", None) or ())
        patterns = (str(self._absolute(glob)) for glob in self._config.getoption("ignore_glob", None) or ())
        paths = (file, *file.parents)
        return any(path in paths for path in ignored) or any(
            fnmatchcase(str(path), pattern) for pattern in patterns for path in paths
        )

    def _absolute(self, path: str) -> Path:
        return (self._config.invocation_params.dir / path).resolve()
