"""Starting the processes of ranks: forked from a server that has imported torch, or spawned where that is unsafe."""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from pytest_fsdp_meta.worlds import preload
from pytest_fsdp_meta.worlds.spec import Sources


@dataclass
class Preload:
    """What ranks find imported. One per pytest process: the fork server is started once and serves all worlds."""

    sources: Sources = field(default_factory=Sources)
    modules: Sequence[str] = ()
    """Modules of ours and of downstream's that every rank needs, by name."""
    test_modules: Sequence[str] = ()
    method: str = "forkserver"
    _started: bool = False

    def start(self) -> None:
        """Begins importing in the background; worlds wait for it only if it has not finished."""
        if self._started or self.method != "forkserver":
            return
        self._started = True
        from multiprocessing import forkserver

        request = {
            "modules": [*preload.TORCH_MODULES, *self.modules, *self.test_modules],
            "path": list(self.sources.path),
            "files": dict(self.sources.modules),
        }
        multiprocessing.get_context("forkserver").set_forkserver_preload([preload.__name__])
        with _environment(**{preload.REQUEST: json.dumps(request)}):
            forkserver.ensure_running()

    def context(self) -> BaseContext:
        self.start()
        return multiprocessing.get_context(self.method)

    def give_up_forking(self, reason: str) -> None:
        """Every later world is spawned; said once."""
        if self.method != "spawn":
            self.method = "spawn"
            warnings.warn(f"pytest-fsdp-meta: {reason}, so ranks are spawned, which is slower", stacklevel=2)

    def launch(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> BaseProcess:
        # Not daemonic: a daemonic process may have no children, and loaders have DataLoader workers.
        process: BaseProcess = self.context().Process(target=target, args=args, name=name)  # type: ignore[attr-defined]
        process.start()
        return process


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
